"""Copy the chosen keys and values of each sequence into its rows of one layer of kv[R, L*2*W], side by side, per head.

dLLM-Serve, section 4.5: row j of a sequence has, for each key-value head, that head's own j-th key and value. `chosen[N, T]` has
from column cu_seqlens[b] on the rows of k and v that are copied (`select_keys`), the same for all heads (one list) or a list for
each head; there are spans[b, 4] + spans[b, 3] - spans[b, 2] of them. Sequence b has one extent, which `extents[b]` describes as
`kv_store` does, and at least as many rows. Rows after them are unchanged. kv may have a dtype of its own, and has `kv_heads` heads.

With `held` (`bound_parts`) head h has chosen `end` - `begin` keys, its numbers of row held_row[b] in the layer's `slot`. They go to
the rows from `begin` on, and those of the span to the rows from spans[b, 4] on. Others are unchanged.

A region over heads gives the keys and values of some heads, and slices chosen: list r is that of head `row_start` + r of kv.
Nothing else is sliced, and there is no `held`.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.operators import kv_store
from mosaic.registrar.tiles import KEY_ROWS, Tile, Tiles


def rules(
    *, L: Dim, K: Dim, N: Dim, layer: int, slot: int, kv: Spec, held: Spec | None, held_row: Spec | None, S: Dim = 1,
    **_: object,
) -> None:  # fmt: skip
    require((held is None) == (held_row is None), "held and held_row go together")
    kv_store.rules(L=L, layer=layer, kv=kv)
    kv_store.require_layer("held", S, slot)
    require(N in (1, K), f"chosen has a list for all heads, or one for each of the {K}, not {N}")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the keys of some rows of one head."""
    return (Tile((KEY_ROWS, attrs["head_size"]), specs["k"].dtype),)


OPERATOR = Operator(
    name="pack_keys",
    operands="""
        k@:a[T, K*head_size] v@:a[T, K*head_size] chosen:i32[N, T] spans@:i32[B, 5] cu_seqlens@:i32[B+1]
        extents@#:i64[B, 4] kv!@#:c[R, L*2*kv_heads*head_size] held?@:i32[E, S*2*kv_heads] held_row?@:i64[B]
    """,
    attrs="layer kv_heads head_size slot=0",
    rules=rules,
    moved={"kv": "2*k", "extents": "0", "held": "2*B*kv_heads"},
    implementations=kernels_of("pack_keys", tiles=tiles, row_origin="chosen"),
    roles={"k": "attention", "v": "attention", "chosen": "statistics"},
)
