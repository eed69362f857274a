"""What the ways share: projections by chunks of tokens, attention over the step's own keys, the way back into the residual.

Legend: T tokens, C rows of a chunk, N query heads, K key-value heads, H head size, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mosaic.models.residency import Matrix, fetched

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.operator import Dim

__all__ = [
    "PROJECTION_TILE",
    "Chosen",
    "add_product",
    "attend",
    "bias_and_scale",
    "keys_and_values",
    "matrices",
    "project",
    "project_out",
    "project_rows",
]

PROJECTION_TILE: Final = 128


class Chosen(NamedTuple):
    """Rows of the step's tokens: their numbers int64 [C], positions int32 [C], and where rotary frequencies are a sequence's
    own, their sequences int32 [C]."""

    rows: Buffer
    positions: Buffer
    sequences: Buffer | None


def matrices(arch: Architecture, layer: int, kv_heads: Dim) -> list[Matrix]:
    """Return the four projections of a layer; shaped by the dim `kv_heads` where a region runs over it."""
    names, kv = arch.names, kv_heads * arch.head_size
    width = kv * (arch.heads // arch.kv_heads)
    return [
        Matrix(name="q_proj", shape=(width, arch.hidden), tensor=names.query.format(layer=layer)),
        Matrix(name="k_proj", shape=(kv, arch.hidden), tensor=names.key.format(layer=layer)),
        Matrix(name="v_proj", shape=(kv, arch.hidden), tensor=names.value.format(layer=layer)),
        Matrix(name="o_proj", shape=(arch.hidden, width), tensor=names.output.format(layer=layer)),
    ]


def project(
    step: StepGraph, layer: int, name: str, h: Buffer, matrix: Buffer, out: Buffer | None = None,
    chosen: Chosen | None = None,
) -> Buffer:  # fmt: skip
    """Project the rows h [C, D] to one of q, k and v, normed and rotated as the architecture says: those of the step's tokens,
    or chosen ones."""
    g, arch = step.g, step.arch
    bias, scale = bias_and_scale(step, layer, name, matrix.shape[0])
    y: Buffer = g.add_op("linear", h, matrix, bias, out=out, name=f"{name}_linear")
    if scale is not None:
        g.add_op("head_norm", y, scale, name=f"{name}_head_norm", eps=arch.norm_eps)
    if name != "v":
        factor: dict[str, Any] = {"factor": arch.rotary_scale} if arch.rotary_scale != 1.0 else {}
        g.add_op(
            "rotary", y, step.positions if chosen is None else chosen.positions, step.inv_freq,
            step.sequences if chosen is None else chosen.sequences, name=f"{name}_rotary",
            head_size=arch.head_size, **factor,
        )  # fmt: skip
    return y


def bias_and_scale(step: StepGraph, layer: int, name: str, width: Dim) -> tuple[Buffer | None, Buffer | None]:
    """Return the bias [width] of a projection, and the weight that its heads are normed by, where there are any."""
    arch = step.arch
    tensor, head_norm = {
        "q": (arch.names.query, arch.names.query_norm),
        "k": (arch.names.key, arch.names.key_norm),
        "v": (arch.names.value, ""),
    }[name]
    bias = scale = None
    if arch.qkv_bias:
        tensor = tensor.format(layer=layer).replace(".weight", ".bias")
        bias = step.g.weight(f"{name}_bias", (width,), arch.dtype, tensor=tensor)
    if name != "v" and arch.head_norms:
        scale = step.norm_weight(f"{name}_norm", head_norm.format(layer=layer), arch.head_size)
    return bias, scale


def project_rows(
    step: StepGraph, layer: int, norm: Buffer, weights: dict[str, Buffer], outs: dict[str, Buffer], loop: str, name: str
) -> None:
    """Project all tokens to those of q, k and v that there are buffers for, by chunks of tokens under one norm."""
    with step.g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name=loop) as rows:
        _, h = step.normed(rows, norm, name)
        for part, out in outs.items():
            project(step, layer, part, h, weights[f"{part}_proj"], out)


def keys_and_values(
    step: StepGraph, layer: int, norm: Buffer, weights: dict[str, Buffer], heads: Dim
) -> tuple[Buffer, Buffer]:
    """Project all tokens to the keys and values of some heads, by chunks of tokens."""
    arch = step.arch
    k, v = (step.g.buffer(name, (step.tokens, heads * arch.head_size), arch.dtype) for name in ("k", "v"))
    project_rows(step, layer, norm, weights, {"k": k, "v": v}, "keys", "keys_in")
    return k, v


def attend(step: StepGraph, q: Buffer, k: Buffer, v: Buffer, out: Buffer | None = None) -> Buffer:
    """softmax(q k^T) v, into `out` or over the queries' storage."""
    g, arch = step.g, step.arch
    blocks: dict[str, Any] = {"block": arch.block} if arch.block else {}
    y: Buffer = g.add_op(
        "attention", q, k, v, step.cu_seqlens, out=out, head_size=arch.head_size, scale=arch.head_size**-0.5,
        span=step.span, **blocks,
    )  # fmt: skip
    if out is None:
        g.add_alias(y, q)
    return y


def project_out(step: StepGraph, y: Buffer, matrix: Buffer) -> None:
    """hidden += y @ o_proj.T for all heads, by windows where hidden states or results are in host memory."""
    g = step.g
    if not step.on_host:
        add_product(step, y, matrix, step.hidden.buffer, "o_linear")
        return
    with g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name="output") as rows:
        window = step.hidden.rows(rows, "output_rows")
        if y.kind == "host":
            y = fetched(g, y, (rows, y.shape[1]), step.arch.dtype, "attended_rows")
        add_product(step, y, matrix, window, "o_linear")
        step.hidden.keep(window)


def add_product(step: StepGraph, x: Buffer, matrix: Buffer, y: Buffer, name: str) -> None:
    """y += x @ matrix.T."""
    if step.arrivals is None:
        step.g.add_op("linear_add", x, matrix, y, name=name)
    else:
        step.g.add_op("split_linear_add", x, matrix, y, step.arrivals, name=name)
