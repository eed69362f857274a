"""held[E, W]: which packed rows of each head have keys of which part of a sequence.

For a windowed Refresh of sparse keys (`mosaic.models.policies.packed_keys`). The rows of sequence b before its span,
spans[b, 2] of them, are cut into held_rows[b, 1] parts of equal length. `chosen` has from column cu_seqlens[b] on the
spans[b, 4] rows whose keys are packed, ascending (`select_keys`). Part i has the row held_rows[b, 0] + i of held; there
the two numbers of head h in the layer's `slot` become the numbers of rows chosen by head h that lie before the part and
before its end: the first packed row with a key of the part, and the one after the last.

List r is that of `heads` heads, all or one, from r * `heads` on. A region over heads slices chosen: then list r is that of head
`row_start` + r. Sequences without rows have no parts.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Dim, Operator, require
from mosaic.registrar.operators.kv_store import require_layer


def rules(*, S: Dim, slot: int, kv_heads: int, heads: int, **_: object) -> None:
    require_layer("held", S, slot)
    require(heads in (1, kv_heads), f"heads must be 1 or all {kv_heads}, not {heads}")


OPERATOR = Operator(
    name="bound_parts",
    operands="""
        chosen:i32[N, T] spans@:i32[B, 5] cu_seqlens@:i32[B+1] held_rows@:i64[B, 2] held!@:i32[E, S*2*kv_heads]
    """,
    attrs="slot kv_heads heads",
    rules=rules,
    moved={"held": "2*N*heads*B"},
    implementations=kernels_of("bound_parts", row_origin="chosen"),
    roles={"chosen": "statistics", "held": "statistics"},
)
