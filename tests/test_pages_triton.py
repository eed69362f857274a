"""page_extrema and page_bounds in Triton's interpreter, or on a GPU: random batches against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32
from test_pages import assert_bounds, bounds_case, extrema_case, stated_extrema
from test_triton_kernels import INTERPRETED, run

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_extrema_of_pages_in_triton(dtype: torch.dtype) -> None:
    for seed in (0, 3, 6, 7):
        case = extrema_case(seed, dtype, longest=50)
        expected = stated_extrema(case)
        assert torch.equal(run(case, DEVICE)["extrema"], expected)


@pytest.mark.some
@pytest.mark.parametrize(
    ("statistic", "dtype"), [("mean", F32), ("mean", BF16), ("max", F32), ("worst", F32), ("max", BF16)], ids=str
)
def test_bounds_of_pages_in_triton(statistic: str, dtype: torch.dtype) -> None:
    for seed in (1, 6, 7, 9):
        case = bounds_case(seed, dtype, statistic, most=70 if seed == 1 else 20, rows=[0, 0, 1, 3][seed % 4])
        assert_bounds(case, run(case, DEVICE)["bound"], slack=2)
