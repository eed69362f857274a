"""Shared by kernels of several operators on the CPU: operands checked, scratch carved, random numbers, attention."""
