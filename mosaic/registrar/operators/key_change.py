"""change[B]: how far the keys of each sequence's window are from those that are kept for its positions, relative to these.

Sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] of k, at some positions, whose kept keys lie where `kv_store`
would write new ones. change[b] is sqrt(sum of (k - kept)^2 / sum of kept^2) over its rows that have a kept key, and all
columns: the Frobenius norm of the difference divided by that of the kept keys. It is 0 if both are equal, or if there
are none. Nothing is ever sliced, and nothing else is written.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs
from mosaic.registrar.operators import kv_store
from mosaic.registrar.tiles import Tile, Tiles, compute_dtype


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List a new key and a kept one of all heads, and two sums with a part of one."""
    compute, columns = compute_dtype(specs["k"].dtype), specs["k"].shape[1]
    return Tile((columns,), compute), Tile((columns,), compute), Tile((3,), compute)


def row_sums(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the two sums of every row, in float32."""
    return 8 * specs["k"].shape[0]


OPERATOR = Operator(
    name="key_change",
    operands="""
        k@:a[T, K*head_size] kv@#:c[R, L*2*K*head_size] extents@#:i64[X, 4] cu_extents@:i32[B+1] cu_seqlens@:i32[B+1]
        positions@:i32[T] -> change:f32[B]
    """,
    attrs="layer head_size",
    rules=kv_store.rules,
    flops="5*k",
    moved={"kv": "k", "extents": "0"},
    implementations=kernels_of("key_change", tiles=tiles, scratch=row_sums),
    roles={"k": "attention", "change": "statistics"},
)
