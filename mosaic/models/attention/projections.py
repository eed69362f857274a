"""Shared by the options of `attention`: projections by chunks of tokens, attention over own keys, output projection.

Legend: T tokens, C rows of a chunk, N query heads, K key-value heads, H head size, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mosaic.models.residency import fetched
from mosaic.registrar.schemes.scheme import Bundle, Matrix, product

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.operator import Dim

PROJECTION_TILE: Final = 128


class Chosen(NamedTuple):
    """Rows of the step's tokens: their numbers int64 [C], positions int32 [C]; their sequences int32 [C] if each
    sequence has its own rotary frequencies; their visible keys int32 [C, 2] if the last layer has a window."""

    rows: Buffer
    positions: Buffer
    sequences: Buffer | None
    sees: Buffer | None


def matrices(arch: Architecture, layer: int, kv_heads: Dim | None = None) -> list[Matrix]:
    """Return the projections of a layer; shaped by the dim `kv_heads` if a region runs over it."""
    names, own = arch.names, arch.stack[layer].attention
    kv = (own.kv_heads if kv_heads is None else kv_heads) * own.head_size
    width = kv * (own.heads // own.kv_heads)
    shapes = {
        "q": ((width, arch.hidden), names.query), "k": ((kv, arch.hidden), names.key), "v": ((kv, arch.hidden), names.value),
        "o": ((arch.hidden, width), names.output),
    }  # fmt: skip
    return [
        Matrix(f"{part}_proj", shape, tensor.format(layer=layer), arch.scheme)
        for part, (shape, tensor) in shapes.items()
        if part != "v" or not own.keys_as_values
    ]


def project(
    step: StepGraph, layer: int, name: str, h: Buffer, matrix: Bundle, out: Buffer | None = None,
    chosen: Chosen | None = None,
) -> Buffer:  # fmt: skip
    """Project the rows h [C, D] to q, k or v, normed and rotated as the architecture says. The rows are the step's
    tokens, or chosen ones."""
    g, arch, own = step.g, step.arch, step.arch.stack[layer].attention
    bias, scale = bias_and_scale(step, layer, name, matrix.rows)
    y = product(g, h, matrix, bias, out=out, name=f"{name}_linear")
    if scale is not None:
        g.add_op("head_norm", y, scale, name=f"{name}_head_norm", eps=arch.norm_eps)
    if name != "v":
        factor: dict[str, Any] = {"factor": own.rotary_scale} if own.rotary_scale != 1.0 else {}
        g.add_op(
            "rotary", y, step.positions if chosen is None else chosen.positions, step.inv_freq[own.rotary],
            step.sequences if chosen is None else chosen.sequences, name=f"{name}_rotary",
            head_size=own.head_size, **factor,
        )  # fmt: skip
    return y


def bias_and_scale(step: StepGraph, layer: int, name: str, width: Dim) -> tuple[Buffer | None, Buffer | None]:
    """Return a projection's bias [width] and the weight of its per-head norm, or None for each."""
    arch, own = step.arch, step.arch.stack[layer].attention
    bias_name = "k" if name == "v" and own.keys_as_values else name
    tensor, head_norm = {
        "q": (arch.names.query, arch.names.query_norm),
        "k": (arch.names.key, arch.names.key_norm),
        "v": (arch.names.value, ""),
    }[bias_name]
    bias = scale = None
    if own.qkv_bias:
        tensor = tensor.format(layer=layer).replace(".weight", ".bias")
        bias = step.g.weight(f"{bias_name}_bias", (width,), arch.dtype, tensor=tensor)
    if name != "v" and own.head_norms:
        scale = step.norm_weight(f"{name}_norm", head_norm.format(layer=layer), own.head_size)
    return bias, scale


def project_rows(
    step: StepGraph, layer: int, norm: Buffer, weights: dict[str, Bundle], outs: dict[str, Buffer], loop: str, name: str
) -> None:
    """Project all tokens to the given ones of q, k and v, by chunks of tokens under one norm."""
    with step.g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name=loop) as rows:
        _, h = step.normed(rows, norm, name)
        for part, out in outs.items():
            project(step, layer, part, h, weights[f"{part}_proj"], out)


def keys_and_values(
    step: StepGraph, layer: int, norm: Buffer, weights: dict[str, Bundle], heads: Dim
) -> tuple[Buffer, Buffer]:
    """Project all tokens to the keys and values of some heads, by chunks of tokens."""
    width = heads * step.arch.stack[layer].attention.head_size
    k, v = (step.g.buffer(name, (step.tokens, width), step.arch.dtype) for name in ("k", "v"))
    project_rows(step, layer, norm, weights, {"k": k, "v": v}, "keys", "keys_in")
    return k, v


def attend(
    step: StepGraph,
    layer: int,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    out: Buffer | None = None,
    bounds: Buffer | None = None,
) -> Buffer:
    """softmax(q k^T) v, into `out` or in place of the queries; of all windows, or those within other `bounds`."""
    g, own = step.g, step.arch.stack[layer].attention
    y: Buffer = g.add_op(
        "attention", q, k, v, bounds or step.cu_seqlens, step.sees(layer), out=out, head_size=own.head_size,
        scale=own.head_size**-0.5, **rule(step, layer),
    )  # fmt: skip
    if out is None:
        g.add_alias(y, q)
    return y


def rule(step: StepGraph, layer: int) -> dict[str, Any]:
    """Return the visibility, if no operand gives it, and the mean number of visible keys, for the cost model."""
    window, block = step.arch.stack[layer].attention.window, step.arch.block
    span = 2 * window - 1 if window else step.span
    return {"span": span, **({"block": block} if block and step.sees(layer) is None else {})}


def project_out(step: StepGraph, y: Buffer, matrix: Bundle) -> None:
    """hidden += y @ o_proj.T for all heads, by windows if hidden states or results are in host memory."""
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


def add_product(step: StepGraph, x: Buffer, matrix: Bundle, y: Buffer, name: str) -> None:
    """y += x @ matrix.T."""
    product(step.g, x, matrix, onto=y, arrivals=step.arrivals, name=name)
