"""CUDA implementations, one operator a file, with the launch signatures of the CPU ones; importing most needs triton.

A launcher writes only into the views it is given (rows may be strided, columns may not) and asks PyTorch's allocator
for nothing. Where an index is out of range a kernel cannot raise: each file says what happens instead.
"""
