"""chosen[N, T]: the rows of each sequence whose keys are kept, in N lists: those with the largest pooled scores, and its span's.

dLLM-Serve, equations 5 and 6. Sequence b has n rows, from cu_seqlens[b] on, and spans[b] = (first, end, span first, span end,
kept), counted from there: its candidates are the rows before `span first` and those from `span end` on, side by side, so that
windows reach across the span. The pooled score of a candidate is the largest score of the `pool` candidates around it, an odd
number, of which there are fewer at the ends. A candidate's total, in float32, is the sum of its pooled scores over the `members`
sets of a list (`pools` "each", equation 5), or what is pooled of the sums ("sum", as the published codes do). The `kept`
candidates of the largest total are chosen; ties go to the lower row.

From column cu_seqlens[b] on, chosen has the rows of the step that are chosen, ascending, then those of the span: `kept` + `span
end` - `span first` in all. Columns after them are unchanged. `kept` is at most the number of candidates. With `held`
(`bound_parts`) list r keeps as many as head r has keys of the part of row held_row[b], in the layer's `slot`, instead of
`kept`; none, perhaps. A region over heads may slice scores and chosen, nothing else is sliced, and there is no `held`.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.kv_store import require_layer
from mosaic.registrar.tiles import Tile, Tiles

POOLS: Final = ("each", "sum")


def rules(
    *, pool: int, pools: str, slot: int, held: Spec | None, held_row: Spec | None, S: Dim = 1, **_: object
) -> None:
    require((held is None) == (held_row is None), "held and held_row go together")
    require_layer("held", S, slot)
    require(pool > 0 and pool % 2 == 1, f"pool must be an odd number of keys, not {pool}")
    require(pools in POOLS, f"pools must be one of {', '.join(POOLS)}, not '{pools}'")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the scores of a sequence's candidates, pooled ones, totals, and the order of these."""
    keys = specs["scores"].shape[1]
    return *(Tile((keys,), "float32"),) * 3, Tile((keys,), "int64"), Tile((keys,), "int32")


def totals(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the totals of all lists."""
    sets, keys = specs["scores"].shape
    return exact(4 * sets * keys) / attrs["members"]


OPERATOR = Operator(
    name="select_keys",
    operands="""
        scores:f32[N*members, T] spans@:i32[B, 5] cu_seqlens@:i32[B+1] held?@:i32[E, S*2*kv_heads] held_row?@:i64[B]
        -> chosen:i32[N, T]
    """,
    attrs="members pool pools='each' slot=0 kv_heads=1",
    rules=rules,
    moved={"held": "2*N*B"},
    implementations=kernels_of("select_keys", tiles=tiles, scratch=totals),
    roles={"scores": "statistics", "chosen": "statistics"},
)
