"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head: bidirectional, varlen, grouped queries.

A query sees every key of its sequence, or with `block` those of its own block of `block` rows and of earlier blocks.
With `sees[T, 2]` row r sees the keys [sees[r, 0], sees[r, 1]) of its sequence, at least one, and `block` does not
apply. A region of tokens may slice queries, never keys and values. y may overwrite q. `span` is the mean number of keys
that a query sees, rounded up: without blocks the sum of squared sequence lengths divided by the tokens.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, Tile, Tiles, attention_tiles, compute_dtype


def rules(*, block: int, sees: Spec | None, **_: object) -> None:
    require(block >= 0, f"block must be a number of rows, or 0 for none, not {block}")
    require_sees(sees, block)


def require_sees(sees: Spec | None, block: int) -> None:
    """Refuse a block together with visible keys per row."""
    require(sees is None or block == 0, "sees says which keys a row sees, so there is no block")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles; for 16-bit inputs query, key and value are converted."""
    size, compute = attrs["head_size"], compute_dtype(specs["q"].dtype)
    own = attention_tiles(size, compute, masked=bool(attrs.get("block")) or "sees" in specs)
    if compute == specs["q"].dtype:
        return own
    return Tile((QUERY_ROWS, size), compute), *(Tile((KEY_ROWS, size), compute),) * 2, *own


CUDNN_WORKSPACE_BYTES: Final = 256
"""The requirements of cuDNN's static attention graphs, measured on an H200."""


def cudnn_workspace(specs: Specs, attrs: Attrs) -> Dim:
    return CUDNN_WORKSPACE_BYTES


def one_sequence(specs: Specs, attrs: Attrs) -> bool:
    """Tell whether cuDNN's static graphs support a launch: one sequence that sees all of itself, heads of a multiple of
    8 up to 128, in 16 bits."""
    heads = attrs["head_size"] % 8 == 0 and attrs["head_size"] <= 128
    whole = specs["cu_seqlens"].shape == (2,) and attrs.get("block", 0) == 0 and "sees" not in specs
    return whole and heads and specs["q"].dtype in ("bfloat16", "float16")


_CPU, _TRITON = kernels_of("attention", tiles=tiles, row_origin="q")
_CUDNN: Final = Implementation(
    name="cudnn", backend="cuda", kernel="mosaic.kernels.cuda.attention_cudnn", scratch=cudnn_workspace,
    serves=one_sequence, row_origin="q",
)  # fmt: skip

OPERATOR = Operator(
    name="attention",
    operands="""
        q:a[T, G*K*head_size] k@:a[S, K*head_size] v@:a[S, K*head_size] cu_seqlens:i32[B+1] sees?:i32[T, 2]
        -> y:a[T, G*K*head_size]
    """,
    attrs="head_size scale span block=0",
    inplace=(("y", "q"),),
    rules=rules,
    flops="4*span*q",
    rate="attention",
    rate_rows="T*G*K",
    implementations=(_CPU, _CUDNN, _TRITON),
    roles={"q": "attention", "k": "attention", "v": "attention", "y": "attention"},
)
