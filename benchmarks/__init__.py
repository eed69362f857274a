"""Benchmarks: their results go to `benchmarks/results` as JSON, and from there into the docs."""
