"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head, over a sequence's own keys and the packed keys of other parts.

For a windowed Refresh of sparse keys (`mosaic.models.policies.packed_keys`). Sequence b has the rows from cu_seqlens[b] on,
and packed keys and values in one extent of kv (`pack_keys`), spans[b, 4] of them before those of its span. A row of the
sequence attends to all of its own keys, and in key-value head h to those packed rows before the span's that do not lie
between the two numbers of h in row held_row[b] of held, in the layer's `slot`: these have older keys of its own rows
(`bound_parts`). kv may have a dtype of its own. A row in no sequence is unchanged. Nothing is ever sliced. y may
overwrite q.

For the cost model alone: `span`, the mean number of own keys of a row, rounded up, and `keys`, the packed rows that a
row sees at most.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.operators import kv_store
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, Tile, Tiles, attention_tiles, compute_dtype


def rules(*, L: Dim, layer: int, S: Dim, slot: int, scale: float, kv: Spec, **_: object) -> None:
    kv_store.rules(L=L, layer=layer, kv=kv)
    kv_store.require_layer("held", S, slot)
    require(scale > 0, f"scale must be positive, not {scale}")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries of a group of heads side by side; keys and values, converted from another dtype."""
    size, compute = attrs["head_size"], compute_dtype(specs["q"].dtype)
    alike = specs["q"].dtype == specs["kv"].dtype == compute
    converted = () if alike else (Tile((KEY_ROWS, size), compute),) * 2
    return Tile((QUERY_ROWS, size), compute), *converted, *attention_tiles(size, compute, masked=False)


OPERATOR = Operator(
    name="packed_attention",
    operands="""
        q@:a[T, G*kv_heads*head_size] k@:a[T, kv_heads*head_size] v@:a[T, kv_heads*head_size]
        kv@#:c[R, L*2*kv_heads*head_size] extents@#:i64[B, 4] held@:i32[E, S*2*kv_heads] held_row@:i64[B] spans@:i32[B, 5]
        cu_seqlens@:i32[B+1] -> y:a[T, G*kv_heads*head_size]
    """,
    attrs="layer slot kv_heads head_size scale span keys",
    inplace=(("y", "q"),),
    rules=rules,
    flops="4*span*q + 4*keys*q",
    moved={"kv": "2*keys*kv_heads*head_size", "held": "2*B*kv_heads", "extents": "0"},
    rate="attention",
    rate_rows="T*G*kv_heads",
    implementations=kernels_of("packed_attention", tiles=tiles),
    roles={"q": "attention", "k": "attention", "v": "attention", "y": "attention", "held": "statistics"},
)
