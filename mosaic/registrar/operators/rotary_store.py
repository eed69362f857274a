"""Norm per head and rotate queries in place; norm and rotate keys, and write keys and values to the rows of the state.

Equal to `head_norm` (if there are norms), `rotary` and `kv_store`, which describe the operands, in one launch. k and v
are not written. A region of tokens may slice the rows of q, k, v, positions and sequences.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.operators import kv_store, rotary
from mosaic.registrar.tiles import Tile, Tiles, norm_tiles, tiles_bytes


def rules(
    *, L: Dim, S: tuple[Dim, ...], F: Dim, layer: int, head_size: int, factor: float, q_norm: Spec | None,
    k_norm: Spec | None, sequences: Spec | None, kv: Spec, **_: object,
) -> None:  # fmt: skip
    kv_store.rules(L=L, layer=layer, kv=kv)
    rotary.rules(S=S, R=F, head_size=head_size, factor=factor, sequences=sequences)
    require((q_norm is None) == (k_norm is None), "there are norms of both queries and keys, or of none")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List a copy of the keys, and the scratch of norms and rotation, in bytes; the queries' is the larger."""
    (rows, width), dtype, size = specs["q"].shape, specs["q"].dtype, attrs["head_size"]
    rotation = rotary.tiles({"x": specs["q"], "inv_freq": specs["inv_freq"]}, attrs)
    norm = norm_tiles(rows, width // size, size, dtype) if "q_norm" in specs else ()
    parts = (Tile((tiles_bytes(part),), "uint8") for part in (rotation, norm))
    return Tile(specs["k"].shape, dtype), *parts


OPERATOR = Operator(
    name="rotary_store",
    operands="""
        q!:a[T, G*K*head_size] k:a[T, K*head_size] v:a[T, K*head_size] kv!@#:c[R, L*2*K*head_size] extents@#:i64[X, 4]
        cu_extents@:i32[B+1] cu_seqlens@:i32[B+1] positions:i32[T] inv_freq:f32[*S, F] q_norm?:a[head_size]
        k_norm?:a[head_size] sequences?:i32[T]
    """,
    attrs="layer head_size eps=0.0 factor=1.0",
    rules=rules,
    flops="10*q",
    moved={"kv": "2*k", **dict.fromkeys(("extents", "cu_extents", "cu_seqlens"), "0")},
    implementations=kernels_of("rotary_store", tiles=tiles, row_origin="q"),
    roles={"q": "attention", "k": "attention", "v": "attention"},
)  # fmt: skip
