"""The product of batch-invariant plans: right, and a row's bits are the same alone as among others."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_experts_triton import operand
from test_kernels import BF16, F32
from test_triton_kernels import INTERPRETED

from mosaic.kernels.cuda import invariant_linear

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = (
    [(70, 66, 128), (65, 96, 192)]
    if INTERPRETED
    else [(2048, 4096, 4096), (700, 512, 2048), (300, 4096, 12288), (300, 12288, 4096)]
)


def operands(rows: int, outer: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    wide = -(-inner // 128) * 128
    x, weight = (
        operand(n, wide, dtype=dtype, seed=n, scale=0.25)[:, :inner].contiguous().to(DEVICE) for n in (rows, outer)
    )
    generator = torch.Generator().manual_seed(1)
    bias, residual = (
        torch.randn(*shape, generator=generator).to(dtype).to(DEVICE) for shape in ((outer,), (rows, outer))
    )
    return x, weight, bias, residual


@pytest.mark.some
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, outer, inner", SHAPES)
def test_a_row_has_the_same_bits_alone(rows: int, outer: int, inner: int, dtype: torch.dtype) -> None:
    x, weight, bias, residual = operands(rows, outer, inner, dtype)
    y, added = torch.empty(rows, outer, dtype=dtype, device=DEVICE), residual.clone()
    invariant_linear.launch(x=x, weight=weight, bias=bias, y=y)
    invariant_linear.launch_add(x=x, weight=weight, y=added)
    exact = x.double() @ weight.double().T
    most = torch.finfo(dtype).eps if dtype == BF16 else 1e-5
    for found, expected in ((y, exact + bias.double()), (added, exact + residual.double())):
        torch.testing.assert_close(found.double(), expected, rtol=most, atol=most * float(expected.abs().max()))
    for start, end in ((0, 1), (3, 67), (rows - 33, rows), (5, min(rows, 261)), (1, min(rows, 513))):
        few, less = torch.empty_like(y[start:end]), residual[start:end].clone()
        invariant_linear.launch(x=x[start:end].clone(), weight=weight, bias=bias, y=few)
        invariant_linear.launch_add(x=x[start:end], weight=weight, y=less)
        assert torch.equal(few, y[start:end]) and torch.equal(less, added[start:end])
