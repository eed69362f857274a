"""Benchmarks: what they measure goes to `benchmarks/results` as JSON, and from there into the docs."""
