"""What kernels of several operators share on the CPU: operands checked, scratch carved, random numbers, attention."""
