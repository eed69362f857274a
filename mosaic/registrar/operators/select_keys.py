"""chosen[lists, T]: the rows of each sequence whose keys are kept, per list: those with the largest pooled scores, and its span's.

dLLM-Serve, equations 5 and 6. Sequence b has n rows, from cu_seqlens[b] on, and spans[b] = (first, end, span first, span end,
kept), counted from there: its candidates are the rows before `span first` and those from `span end` on, side by side, so that
windows reach across the span. The pooled score of a candidate is the largest score of the `pool` candidates around it, an odd
number, of which there are fewer at the ends. Sets are divided evenly and in order among `lists`: a candidate's total is the sum of
its pooled scores over the list's sets, in float32. The `kept` candidates of the largest total are chosen; ties go to the lower row.

From column cu_seqlens[b] on, chosen has the rows of the step that are chosen, ascending, then those of the span: `kept` + `span
end` - `span first` in all. Columns after them are unchanged. `kept` is at most the number of candidates. Nothing is ever sliced.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require
from mosaic.registrar.tiles import Tile, Tiles


def rules(*, sets: int, lists: int, pool: int, **_: object) -> None:
    require(lists > 0 and sets % lists == 0, f"lists must divide the {sets} sets of scores, not {lists}")
    require(pool > 0 and pool % 2 == 1, f"pool must be an odd number of keys, not {pool}")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the scores of a sequence's candidates, pooled ones, totals, and the order of these."""
    keys = specs["scores"].shape[1]
    return *(Tile((keys,), "float32"),) * 3, Tile((keys,), "int64"), Tile((keys,), "int32")


def totals(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the totals of all lists."""
    return 4 * attrs["lists"] * specs["scores"].shape[1]


OPERATOR = Operator(
    name="select_keys",
    operands="scores@:f32[sets, T] spans@:i32[B, 5] cu_seqlens@:i32[B+1] -> chosen:i32[lists, T]",
    attrs="sets lists pool",
    rules=rules,
    implementations=kernels_of("select_keys", tiles=tiles, scratch=totals),
    roles={"scores": "statistics", "chosen": "statistics"},
)
