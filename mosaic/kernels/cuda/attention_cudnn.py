"""attention on CUDA by cuDNN: softmax(q k^T * scale) v of one sequence, all tokens visible, grouped-query.

q, k, v and y are views [rows, heads * H] whose rows may be strided; y may be q itself. cuDNN gets one static graph per shape,
with the strides as they are, and runs it on the caller's pointers and stream with the op's scratch as its workspace. Never
its dynamic-shape kernel cache: it returned wrong values (cuDNN 9.19, H200). Measured there: 610 to 680 TFLOP/s in bfloat16,
heads of 128; the first graph takes about a second, each further one 0.04 s. Legend: T query rows, S keys, N query heads, K KV
heads, H head size.
"""

import importlib
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mosaic.errors import GraphError, MissingExtra, RuntimeMemoryError
from mosaic.kernels.card import card_ahead
from mosaic.registrar.operators.attention import CUDNN_WORKSPACE_BYTES

GRAPHS: Final = 128
"""Graphs kept: a step needs one per shape of a launch, two or three."""
ALIGNMENT: Final = 16
"""Bytes that addresses and rows must be multiples of: what one load of cuDNN's kernels takes."""
Q, K, V, Y = 1, 2, 3, 4  # what a graph calls its tensors


class Availability(NamedTuple):
    """Whether cuDNN can be used here, and if not, why."""

    usable: bool
    reason: str

    def __bool__(self) -> bool:
        return self.usable


class _Shape(NamedTuple):
    """All that a static graph is made for; strides of rows, in elements."""

    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    q_stride: int
    k_stride: int
    v_stride: int
    y_stride: int
    dtype: torch.dtype
    scale: float
    device: int


class _Plan(NamedTuple):
    """A built graph, and the bytes of workspace that one launch of it writes."""

    graph: Any
    workspace_bytes: int


@cache
def available() -> Availability:
    """Tell whether cuDNN and its Python frontend can be loaded, without touching a device.

    >>> bool(Availability(False, "cuDNN's frontend is not installed"))
    False
    """
    try:
        library().backend_version()
    except MissingExtra as error:
        return Availability(False, str(error))
    except RuntimeError as error:  # the frontend is there, the library that it loads is not
        return Availability(False, f"cuDNN's library cannot be loaded: {error}")
    return Availability(True, "")


@cache
def library() -> ModuleType:
    """Return cuDNN's Python frontend.

    Raises
    ------
    MissingExtra
        If it is not installed.
    """
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise MissingExtra("nvidia-cudnn-frontend", "cuda", "attention by cuDNN") from error


@cache
def handle_of(device: int) -> int:
    """Return one handle a device; launches set its stream."""
    with torch.cuda.device(device):
        handle: int = library().create_handle()
    return handle


def _declare(graph: Any, shape: _Shape) -> None:
    """Describe attention to an empty graph: batch 1, heads, rows, head size, each tensor with its own strides."""

    def extent(rows: int, heads: int, stride: int) -> dict[str, list[int]]:
        return {"dim": [1, heads, rows, shape.head_size], "stride": [rows * stride, shape.head_size, stride, 1]}

    queries, keys = (shape.rows, shape.heads), (shape.keys, shape.kv_heads)
    result = extent(*queries, shape.y_stride)
    y, _ = graph.sdpa(
        q=graph.tensor(name="q", uid=Q, **extent(*queries, shape.q_stride)),
        k=graph.tensor(name="k", uid=K, **extent(*keys, shape.k_stride)),
        v=graph.tensor(name="v", uid=V, **extent(*keys, shape.v_stride)),
        attn_scale=shape.scale,
        generate_stats=False,
        name="attention",
    )
    y.set_output(True).set_uid(Y).set_dim(result["dim"]).set_stride(result["stride"])


def _build(shape: _Shape, **target: Any) -> _Plan:
    """Build the graph of a shape for a target, a handle or a device's properties; takes tens of milliseconds."""
    cudnn = library()
    types = cudnn.data_type
    io = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}.get(shape.dtype)
    if io is None:
        raise GraphError(f"attention: cuDNN's graphs take bfloat16 and float16, not {shape.dtype}.")
    rows_bytes = [2 * stride for stride in (shape.q_stride, shape.k_stride, shape.v_stride, shape.y_stride)]
    if any(size % ALIGNMENT for size in rows_bytes):
        raise GraphError(
            f"attention: rows of q, k, v, y are {rows_bytes} bytes apart, cuDNN takes multiples of {ALIGNMENT}."
        )
    graph = cudnn.pygraph(
        name="attention", io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **target
    )
    _declare(graph, shape)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.deselect_workspace_greater_than(CUDNN_WORKSPACE_BYTES)
        graph.check_support()
        graph.build_plans()
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        raise GraphError(
            f"attention: cuDNN {cudnn.backend_version_string()} has no plan within {CUDNN_WORKSPACE_BYTES} bytes of "
            f"workspace for {shape}: {str(error).strip()}. Plan the step with implementation 'triton'."
        ) from error
    return _Plan(graph, graph.get_workspace_size())


@lru_cache(maxsize=GRAPHS)
def plan_of(shape: _Shape) -> _Plan:
    """Build the plan of a launch, or get it if it is among the last `GRAPHS`."""
    with torch.cuda.device(shape.device):
        if plan_of.cache_info().currsize == GRAPHS:
            torch.cuda.synchronize()  # the plan that goes unloads its kernels, which may still be queued
        return _build(shape, handle=handle_of(shape.device))


@cache
def captured_plan_of(shape: _Shape) -> _Plan:
    """Keep the plan of a launch that a CUDA graph records: a plan that goes unloads the kernels that it replays."""
    return plan_of(shape)


def launch(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, y: Tensor, head_size: int, scale: float, span: int = 0,
    block: int = 0, row_start: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; y may be q itself.

    A shape's first launch builds its graph, which a stream capture does not allow everywhere: launch once before.
    """
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    if cu_seqlens.shape[0] != 2 or block:
        has = f"step has blocks of {block}" if block else f"batch has up to {cu_seqlens.shape[0] - 1}"
        raise GraphError(
            f"attention: cuDNN's graphs serve one sequence whose queries see all of it; this {has}. "
            f"Plan the step with implementation 'triton'."
        )
    if card_ahead() is not None:
        return  # none of its kernels is Triton's
    device = q.device.index
    shape = _Shape(
        q.shape[0], k.shape[0], heads, kv_heads, head_size,
        q.stride(0), k.stride(0), v.stride(0), y.stride(0), q.dtype, scale, device,
    )  # fmt: skip
    graph, workspace_bytes = (captured_plan_of if torch.cuda.is_current_stream_capturing() else plan_of)(shape)
    given = 0 if scratch is None else scratch.numel()
    if workspace_bytes > given:
        raise RuntimeMemoryError(
            f"attention: cuDNN asks for a workspace of {workspace_bytes:,} bytes, the plan's scratch has {given:,}: "
            f"plan the step with implementation 'triton'."
        )
    operands = {Q: q.data_ptr(), K: k.data_ptr(), V: v.data_ptr(), Y: y.data_ptr()}
    if any(address % ALIGNMENT for address in operands.values()):
        raise GraphError(f"attention: cuDNN takes addresses of multiples of {ALIGNMENT} bytes for q, k, v and y.")
    handle = handle_of(device)
    library().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph.execute(operands, 0 if scratch is None else scratch.data_ptr(), handle=handle)
