"""Calibration of a card: rates, bandwidths, launch times and fixed bytes, measured with the kernels of plans."""
