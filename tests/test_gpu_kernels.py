"""Every launch on a real CUDA device against the float64 reference; PyTorch's allocator is not asked for a byte."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F16, F32, F64, Case, assert_within, name_of, randn, strided
from test_triton_kernels import (
    ALIASES,
    CASES,
    DTYPES,
    INTERPRETED,
    PARAMETERS,
    attention_error,
    check,
    check_alias,
    check_slices,
    check_split_ties,
    check_ties,
    moved,
    scratch_for,
)

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.kernels.cuda import attention_cudnn
from mosaic.registrar.operators.attention import CUDNN_WORKSPACE_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set in this process"),
]


@pytest.fixture(autouse=True)
def float32_sums() -> Iterator[None]:
    """Let cuBLAS join the parts of a split product in float32, as the bounds assume."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction = before


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
def test_a_kernel_is_right_and_allocates_nothing(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, "cuda")
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


class OnDevice:
    """Pinned host memory as the device sees it."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "data": (pinned.data_ptr(), False), "shape": (pinned.nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def seen_by_device(pinned: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(OnDevice(pinned), device="cuda").view(pinned.dtype).view(pinned.shape)


def test_rows_are_gathered_from_a_table_in_pinned_memory() -> None:
    table = torch.randn(1009, 517).to(BF16).pin_memory()
    index = torch.tensor([0, 1008, 7, 7], device="cuda")
    for kernel, names in (("embedding", ("ids", "table")), ("gather_rows", ("rows", "x"))):
        y = torch.empty(4, 517, dtype=BF16, device="cuda")
        load(kernel, "cuda").launch(**dict(zip(names, (index, seen_by_device(table)), strict=True)), y=y)
        assert torch.equal(y.cpu(), table[index.cpu()])


@pytest.mark.parametrize("alias", [False, True], ids=["", "through the device's view"])
def test_copies_to_and_from_pinned_memory(alias: bool) -> None:
    host, back = torch.randn(333, 517).to(BF16).pin_memory(), torch.empty(333, 517, dtype=BF16).pin_memory()
    x, y = (seen_by_device(t) if alias else t for t in (host, back))
    middle, copy = torch.zeros(333, 517, dtype=BF16, device="cuda"), load("copy", "cuda").launch
    torch.cuda.synchronize()
    requests = torch.cuda.memory_stats()["allocation.all.allocated"]
    copy(x=x[3:200], y=middle[3:200])
    copy(x=middle[3:200], y=y[3:200])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests
    assert torch.equal(back[3:200], host[3:200])
    chunk = torch.zeros(100, 64, dtype=BF16, device="cuda")
    copy(x=x[5:105, 128:192], y=chunk)  # columns of a wider matrix, both ways
    copy(x=chunk, y=y[200:300, 64:128])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests + 1
    assert torch.equal(back[200:300, 64:128], host[5:105, 128:192])
    if not alias:
        with pytest.raises(GraphError, match="a transfer needs both contiguous, or a matrix of rows"):
            copy(x=host.view(333, 11, 47)[:, :5], y=torch.empty(333, 5, 47, dtype=BF16, device="cuda"))


# --- attention by cuDNN ---------------------------------------------------------------------------------------------

with_cudnn = pytest.mark.skipif(not attention_cudnn.available(), reason=attention_cudnn.available().reason)
# query rows, keys, query heads, KV heads, head size
CUDNN_SHAPES = [
    (1, 1, 1, 1, 128),
    (1, 4099, 28, 4, 128),
    (7, 5003, 4, 1, 64),
    (100, 100, 1, 1, 128),
    (100, 4096, 28, 4, 128),
    (4096, 4096, 1, 1, 128),
    (4096, 4096, 32, 32, 128),
    (4099, 20011, 4, 4, 80),
    (16384, 16384, 4, 4, 128),
    (16384, 16384, 32, 32, 128),
    (16384, 16384, 28, 4, 128),
    (16384, 40009, 4, 2, 128),
]


def cudnn_operands(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Operands on the GPU, each inside wider rows; cuDNN wants 16 bytes of alignment."""
    rows, keys, heads, kv_heads, size = shape

    def operand(seed: int, count: int, width: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        wide = torch.randn(count, width + 24, generator=generator, device="cuda") * scale
        return wide.to(dtype)[:, 8 : 8 + width]

    operands = {
        "q": operand(0, rows, heads * size, 2),
        "k": operand(1, keys, kv_heads * size, 2),
        "v": operand(2, keys, kv_heads * size),
        "cu_seqlens": torch.tensor([0, keys], dtype=torch.int32, device="cuda"),
    }
    attrs = {"head_size": size, "scale": size**-0.5}
    return operands | attrs | {"scratch": torch.full((CUDNN_WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")}


def around(view: torch.Tensor) -> torch.Tensor:
    """The bytes beside the rows of a view, as integers."""
    wide = view.as_strided((view.shape[0], view.stride(0)), view.stride(), 0)
    return torch.cat([wide[:, :8], wide[:, 8 + view.shape[1] :]], dim=1).view(torch.int16).clone()


@with_cudnn
@pytest.mark.parametrize("dtype", [BF16, F16], ids=name_of)
@pytest.mark.parametrize("shape", CUDNN_SHAPES, ids=str)
def test_attention_by_cudnn(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = cudnn_operands(shape, dtype)
    y = torch.full_like(given["q"], float("nan"))
    attention_cudnn.launch(**given, y=y)
    chosen = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))[:33].sort().values
    operands = {name: given[name].cpu() for name in ("k", "v", "cu_seqlens")} | {"q": given["q"].cpu()[chosen]}
    case = Case("attention", operands, attrs={name: given[name] for name in ("head_size", "scale")})
    expected = case.reference()
    assert_within(y.cpu()[chosen], expected, attention_error(case, expected))
    before = around(given["q"])
    attention_cudnn.launch(**given, y=given["q"])
    assert torch.equal(given["q"], y)
    assert torch.equal(around(given["q"]), before)


@with_cudnn
def test_attention_by_cudnn_allocates_nothing_and_can_be_captured() -> None:
    given = cudnn_operands((300, 4099, 28, 4, 128), BF16)
    y = torch.empty_like(given["q"])
    attention_cudnn.launch(**given, y=y)
    torch.cuda.synchronize()
    requests = torch.cuda.memory_stats()["allocation.all.allocated"]
    attention_cudnn.launch(**given, y=y)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_cudnn.launch(**given, y=y)
    attention_cudnn.plan_of.cache_clear()  # what was captured stays loaded
    given["v"].copy_(randn(*given["v"].shape, dtype=BF16, seed=9).cuda())
    graph.replay()
    replayed = y.clone()
    attention_cudnn.launch(**given, y=y)
    assert torch.equal(replayed, y)
