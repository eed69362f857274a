"""Policies: what a request may ask of its steps beside what its algorithm decides. A policy is one file, or two where it has
many options; `registry.py` lists them, and nothing else names one."""
