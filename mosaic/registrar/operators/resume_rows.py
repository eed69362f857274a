"""The inputs of a graph over kept rows: row numbers, bounds, positions, and the kept rows to decide.

chosen[i], for i below bounds[B], are row numbers of tokens, each once; sequence b has chosen[bounds[b]:bounds[b + 1]].
The graph computes `size` rows: kept[i] = chosen[i] and kept_positions[i] = positions[kept[i]], padding included. The
sequences up to the first whose rows do not fit are computed; the others are empty, and have to run again. Of what is
computed

- cu_seqlens = bounds, and behind it the last of these.
- Of rows[m], the row numbers to decide, sequence b has those from cu_rows[b] to cu_rows[b + 1]. The kept ones, in their
  order, are decided: decided[d] is the index in `kept` and asked[d] is m, both 0 after the last. Sequence b has those
  from cu_decided[b] to cu_decided[b + 1]. place[m] is d, or -1 for rows that are not kept and for padding.

count[0] = bounds[B], whether the rows fit or not. `most` is the length of decided and asked.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require

READS = ("chosen", "bounds", "positions", "rows", "cu_rows")


def rules(*, S: Dim, size: Dim, **_: object) -> None:
    require(
        not isinstance(S, int) or not isinstance(size, int) or size <= S, f"there are {S} numbers of tokens, not {size}"
    )


def counts(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve an int32 per sequence: the number of its decided rows."""
    return 4 * specs["bounds"].shape[0]


OPERATOR = Operator(
    name="resume_rows",
    operands="""
        chosen@:i64[S] bounds@:i32[B+1] positions@:i32[T] rows@:i64[M] cu_rows@:i32[B+1]
        -> kept:i64[size] kept_positions:i32[size] cu_seqlens:i32[B+1] decided:i64[most] asked:i64[most]
        cu_decided:i32[B+1] place:i32[M] count:i32[1]
    """,
    attrs="size most",
    rules=rules,
    implementations=kernels_of("resume_rows", scratch=counts),
    roles={"kept_positions": "statistics", "decided": "statistics", "place": "statistics"},
)
