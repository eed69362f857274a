"""Queries normed per head and rotated in place; keys, normed and rotated, and values written to the rows that they are kept in.

The same as `head_norm` (where there are norms), `rotary` and `kv_store`, which say what each operand is, at once. k and v are read
alone. Of q, k, v, positions and sequences a region of tokens may slice the rows.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, require
from mosaic.registrar.operators import kv_store, rotary
from mosaic.registrar.tiles import Tile, Tiled, Tiles, norm_tiles, tiles_bytes


def infer(
    q: Spec, k: Spec, v: Spec, kv: Spec, extents: Spec, cu_extents: Spec, cu_seqlens: Spec, positions: Spec, inv_freq: Spec,
    q_norm: Spec | None = None, k_norm: Spec | None = None, sequences: Spec | None = None, *, layer: int, head_size: int,
    eps: float = 0.0, factor: float = 1.0,
) -> tuple[()]:  # fmt: skip
    kv_store.infer(k, v, kv, extents, cu_extents, cu_seqlens, positions, layer=layer, head_size=head_size)
    for x in (q, k):
        rotary.infer(x, positions, inv_freq, sequences, head_size=head_size, factor=factor)
    require(len(q.shape) == 2 and q.dtype == k.dtype, f"q must be a matrix of {k.dtype} as k is, not {q}")
    require(divides(k.shape[1], q.shape[1]), f"q must have a multiple of the {k.shape[1]} columns of k, not {q}")
    require((q_norm is None) == (k_norm is None), "there are norms of both queries and keys, or of none")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        require(norm is None or norm.shape == (head_size,), f"{name} must have {head_size} elements")
    return ()


def flops(q: Spec, *_: object, **__: object) -> Dim:
    return 10 * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count q twice, and k and v twice: what of kv they are written to."""
    small = sum(
        specs[name].bytes for name in ("positions", "inv_freq", "q_norm", "k_norm", "sequences") if name in specs
    )
    return small + 2 * (specs["q"].bytes + specs["k"].bytes + specs["v"].bytes)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List a copy of the keys, and the scratch of norms and rotation, in bytes; that of the queries is the larger."""
    (rows, width), dtype, size = specs["q"].shape, specs["q"].dtype, attrs["head_size"]
    rotation = rotary.tiles({"x": specs["q"], "inv_freq": specs["inv_freq"]}, attrs)
    norm = norm_tiles(rows, width // size, size, dtype) if "q_norm" in specs else ()
    parts = (Tile((tiles_bytes(part),), "uint8") for part in (rotation, norm))
    return Tile(specs["k"].shape, dtype), *parts


OPERATOR = Operator(
    name="rotary_store",
    reads=(
        "q", "k", "v", "kv", "extents", "cu_extents", "cu_seqlens", "positions", "inv_freq", "q_norm?", "k_norm?",
        "sequences?",
    ),
    updates=("q", "kv"),
    whole=frozenset({"kv", "extents", "cu_extents", "cu_seqlens"}),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(
            name="cpu", backend="cpu", kernel="mosaic.kernels.rotary_store", scratch=Tiled(tiles), row_origin="q"
        ),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.rotary_store", row_origin="q"),
    ),
    roles={"q": "attention", "k": "attention", "v": "attention"},
)  # fmt: skip
