"""linear on CUDA: y = x @ weight.T + bias, by cuBLAS.

Accumulates in float32, but for split-K products of 16-bit operands, which cuBLAS may join in 16 bits unless
`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is off. cuBLAS's workspace belongs to the process.
Measured on an H200: 0 bytes from PyTorch's allocator. Legend: T rows, I inputs, O outputs.
"""

import torch
from torch import Tensor


def launch(*, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> None:
    """Write x @ weight.T + bias into y [T, O]."""
    if bias is None:
        torch.mm(x, weight.t(), out=y)
        return
    # torch.addmm with a vector takes the cublasLt path, whose workspace comes from the allocator. The bias is already
    # in y's dtype, so copying it first rounds nothing.
    y.copy_(bias.expand_as(y))
    y.addmm_(x, weight.t())
