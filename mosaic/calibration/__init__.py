"""Measuring a card: rates, bandwidths, launch times and fixed bytes, through the kernels that plans run."""
