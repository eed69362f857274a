"""Every launch on a real CUDA device against the float64 reference; PyTorch's allocator is not asked for a byte."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32, F64, name_of, strided
from test_triton_kernels import (
    ALIASES,
    CASES,
    DTYPES,
    INTERPRETED,
    PARAMETERS,
    check,
    check_alias,
    check_slices,
    check_split_ties,
    check_ties,
    moved,
    scratch_for,
)

from mosaic.kernels import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set in this process"),
]


@pytest.fixture(autouse=True)
def float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLAS join the parts of a split product in float32, as the bounds assume."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_kernel(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("name", "alias"), ALIASES, ids=str)
def test_output_may_overwrite_an_operand(name: str, alias: dict[str, str], dtype: torch.dtype) -> None:
    check_alias(name, alias, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_attention_of_a_slice_of_rows_knows_where_it_starts(dtype: torch.dtype) -> None:
    check_slices(dtype, "cuda")


def test_statistics_resolve_ties() -> None:
    check_ties("cuda")
    check_split_ties("cuda")


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_a_launch_allocates_nothing(name: str, dtype: torch.dtype) -> None:
    case, _ = CASES[name](dtype)
    given = {name: moved(t, "cuda") for name, t in (case.operands | case.outputs).items()}
    launch, scratch = load(case.kernel, "cuda").launch, scratch_for(case, "cuda")
    launch(**given, **case.attrs, scratch=scratch)  # compiles; cuBLAS takes its workspace, once in a process
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, requests = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    launch(**given, **case.attrs, scratch=scratch)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests


def test_row_offsets_beyond_two_to_the_31_elements() -> None:
    rows, columns = 70_000, 32_768  # 2.3e9 elements of bfloat16, 4.3 GiB
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("less than 6 GiB of free memory on the GPU")
    x = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    x[-1] = torch.randn(columns, device="cuda").to(BF16)
    index, y = torch.tensor([rows - 1], device="cuda"), torch.empty(1, columns, dtype=BF16, device="cuda")
    load("gather_rows", "cuda").launch(x=x, rows=index, y=y)
    assert torch.equal(y[0], x[-1])
    weight = torch.ones(columns, dtype=BF16, device="cuda")
    expected = x[-1].to(F64) * (x[-1].to(F64).square().mean() + 1e-5).rsqrt()
    load("rms_norm", "cuda").launch(x=x, weight=weight, y=x, eps=1e-5)
    assert (x[-1].to(F64) - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert not x[-2].any()


def test_strided_operands_reach_the_gpu_with_their_strides() -> None:
    view = moved(strided(torch.ones(4, 6, dtype=F32)), "cuda")
    assert view.stride() == (14, 1) and torch.equal(view.cpu(), torch.ones(4, 6))
