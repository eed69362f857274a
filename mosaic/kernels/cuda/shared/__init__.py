"""Shared by kernels of several operators on CUDA: the one import of triton, random numbers, statistics, tiles."""
