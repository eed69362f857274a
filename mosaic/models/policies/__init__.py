"""Policies: options of a request that change its steps, beside its algorithm. A policy is one file, or two if it has
many options; `registry.py` lists them, and nothing else names one."""
