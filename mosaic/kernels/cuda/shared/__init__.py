"""What kernels of several operators share on CUDA: the one import of triton, random numbers, statistics, tiles."""
