"""Attention by cuDNN without cuDNN: what a graph is told, what it is given, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mosaic.errors import GraphError, MissingExtra, RuntimeMemoryError
from mosaic.kernels import load
from mosaic.kernels.cuda import attention_cudnn as cudnn

BF16 = torch.bfloat16


class FakeTensor:
    """A tensor of a graph; setters chain, as cuDNN's do."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def __getattr__(self, name: str) -> Any:
        def set_it(value: Any) -> FakeTensor:
            self.told[name.removeprefix("set_")] = value
            return self

        return set_it


class FakeGraph:
    """Records what it is told; `workspace` bytes are asked for, `refuses` fails its build."""

    workspace, refuses = 256, False

    def __init__(self, **told: Any) -> None:
        self.told, self.runs = told, []

    def tensor(self, **told: Any) -> FakeTensor:
        return FakeTensor(**told)

    def sdpa(self, **told: Any) -> tuple[FakeTensor, None]:
        self.attention, self.output = told, FakeTensor()
        return self.output, None

    def check_support(self) -> None:
        if self.refuses:
            raise RuntimeError("No valid execution plans")

    def deselect_workspace_greater_than(self, size: int) -> None:
        self.most = size

    def create_execution_plans(self, modes: list[str]) -> None:
        self.modes = modes

    def validate(self) -> None: ...

    build_operation_graph = build_plans = validate

    def get_workspace_size(self) -> int:
        return self.workspace

    def execute(self, operands: dict[int, int], workspace: int, handle: str) -> None:
        self.runs.append((operands, workspace, handle))


class FakeLibrary(SimpleNamespace):
    """The part of cuDNN's Python frontend that is used, for one device and one stream."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.streams: list[int] = []
        super().__init__(
            data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32"), heur_mode=SimpleNamespace(A="A"),
            cudnnGraphNotSupportedError=RuntimeError, backend_version_string=lambda: "9.19.0",
        )  # fmt: skip

    def pygraph(self, **told: Any) -> FakeGraph:
        self.graphs.append(FakeGraph(**told))
        return self.graphs[-1]

    def set_stream(self, *, handle: str, stream: int) -> None:
        self.streams.append(stream)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    capturing = SimpleNamespace(now=False)
    monkeypatch.setattr(cudnn, "library", lambda: fake)
    monkeypatch.setattr(cudnn, "handle_of", lambda device: f"handle of {device}")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.streams.append(-1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    fake.capturing = capturing
    yield fake
    cudnn.plan_of.cache_clear()
    cudnn.captured_plan_of.cache_clear()


def aligned(rows: int, width: int, right: int = 0) -> torch.Tensor:
    """Rows inside a wider buffer that starts on a multiple of 64 bytes."""
    flat = torch.zeros(rows * (width + right) + 32, dtype=BF16)
    skip = -flat.data_ptr() % 64 // 2
    return flat[skip : skip + rows * (width + right)].view(rows, width + right)[:, :width]


def operands(rows: int = 5, keys: int = 9, heads: int = 4, kv_heads: int = 2, size: int = 8) -> dict[str, Any]:
    return {
        "q": aligned(rows, heads * size, right=8), "k": aligned(keys, kv_heads * size),
        "v": aligned(keys, kv_heads * size, right=24), "y": aligned(rows, heads * size, right=16),
        "cu_seqlens": torch.tensor([0, keys], dtype=torch.int32), "head_size": size, "scale": 0.25,
        "scratch": torch.zeros(256, dtype=torch.uint8),
    }  # fmt: skip


def test_a_graph_is_told_the_heads_and_the_strides_as_they_are(library: FakeLibrary) -> None:
    given = operands()
    cudnn.launch(**given)
    (graph,) = library.graphs
    assert graph.told["handle"] == "handle of None" and graph.told["io_data_type"] == "bf16"
    assert graph.told["intermediate_data_type"] == graph.told["compute_data_type"] == "fp32"
    told = {name: graph.attention[name].told for name in "qkv"} | {"y": graph.output.told}
    assert {name: (t["dim"], t["stride"]) for name, t in told.items()} == {
        "q": ([1, 4, 5, 8], [200, 8, 40, 1]),
        "k": ([1, 2, 9, 8], [144, 8, 16, 1]),
        "v": ([1, 2, 9, 8], [360, 8, 40, 1]),
        "y": ([1, 4, 5, 8], [240, 8, 48, 1]),
    }
    assert told["y"]["output"] and graph.attention["attn_scale"] == 0.25 and not graph.attention["generate_stats"]
    assert graph.modes == ["A"] and graph.most == 256
    (pointers, workspace, handle), scratch = graph.runs[0], given["scratch"]
    assert pointers == {told[name]["uid"]: given[name].data_ptr() for name in "qkvy"}
    assert (workspace, handle, library.streams) == (scratch.data_ptr(), "handle of None", [7])


def test_one_graph_serves_a_shape_whatever_the_addresses(library: FakeLibrary) -> None:
    for given in (operands(), operands(), operands() | {"row_start": 3, "span": 9}):
        cudnn.launch(**given)
    in_place = operands()
    cudnn.launch(**in_place | {"y": in_place["q"]})  # other strides of y
    cudnn.launch(**operands(rows=6))
    assert [len(graph.runs) for graph in library.graphs] == [3, 1, 1]


def test_graphs_are_bounded_and_none_goes_while_its_kernels_are_queued(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in range(1, cudnn.GRAPHS + 1):
        cudnn.launch(**operands(rows=rows))
    assert -1 not in library.streams
    cudnn.launch(**operands(rows=cudnn.GRAPHS + 1))
    assert library.streams.count(-1) == 1
    assert cudnn.plan_of.cache_info().currsize == cudnn.GRAPHS


def test_a_captured_launch_keeps_its_graph(library: FakeLibrary) -> None:
    cudnn.launch(**operands())
    library.capturing.now = True
    cudnn.launch(**operands())
    library.capturing.now = False
    assert len(library.graphs) == 1
    cudnn.plan_of.cache_clear()
    assert cudnn.captured_plan_of.cache_info().currsize == 1


def test_what_cudnn_does_not_serve_is_refused(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)}
    with pytest.raises(GraphError, match=r"serve one sequence .*this batch has up to 2.*implementation 'triton'"):
        cudnn.launch(**operands() | several)
    wide = {name: value.float() for name, value in operands().items() if name in ("q", "k", "v", "y")}
    with pytest.raises(GraphError, match=r"take bfloat16 and float16, not torch.float32"):
        cudnn.launch(**operands() | wide)
    with pytest.raises(GraphError, match=r"rows of q, k, v, y are \[80, 32, 38, 96\] bytes apart"):
        cudnn.launch(**operands() | {"v": aligned(9, 16, right=3)})
    with pytest.raises(GraphError, match="addresses of multiples of 16 bytes"):
        cudnn.launch(**operands() | {"k": aligned(9, 24)[:, 1:17]})
    with pytest.raises(RuntimeMemoryError, match="workspace of 256 bytes, the plan's scratch has 0"):
        cudnn.launch(**operands() | {"scratch": None})
    monkeypatch.setattr(FakeGraph, "refuses", True)
    with pytest.raises(GraphError, match=r"9\.19\.0 has no plan within 256 bytes of workspace for .*rows=3"):
        cudnn.launch(**operands(rows=3))


def test_a_missing_frontend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    cudnn.library.cache_clear()
    cudnn.available.cache_clear()
    try:
        found = cudnn.available()
        assert not found and "nvidia-cudnn-frontend: pip install 'mosaic-dllm[cuda]'" in found.reason
        with pytest.raises(MissingExtra, match="attention by cuDNN needs nvidia-cudnn-frontend"):
            load("attention", "cuda", "cudnn").module.library()
    finally:
        cudnn.library.cache_clear()
        cudnn.available.cache_clear()


def test_a_frontend_without_its_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    cudnn.available.cache_clear()
    monkeypatch.setattr(cudnn, "library", lambda: SimpleNamespace(backend_version=missing))
    assert cudnn.available() == (False, "cuDNN's library cannot be loaded: Unable to find symbol cudnnGetVersion")
    cudnn.available.cache_clear()
