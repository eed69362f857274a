"""The inputs of a graph over kept rows: row numbers, positions, and the kept rows to decide.

chosen[i], for i below bounds[B], are row numbers of tokens, each once; sequence b has chosen[bounds[b]:bounds[b + 1]].
bounds[B] is at most `size`. The graph computes `size` rows: kept[i] = chosen[i] and kept_positions[i] =
positions[kept[i]], padding included.

Of rows[m], the row numbers to decide, sequence b has those from cu_rows[b] to cu_rows[b + 1]. The kept ones, in their
order, are decided: decided[d] is the index in `kept` and asked[d] is m, both 0 after the last. Sequence b has those
from cu_decided[b] to cu_decided[b + 1]. place[m] is d, or -1 for rows that are not kept and for padding. `most` is the
length of decided and asked.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require


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
        -> kept:i64[size] kept_positions:i32[size] decided:i64[most] asked:i64[most] cu_decided:i32[B+1] place:i32[M]
    """,
    attrs="size most",
    rules=rules,
    implementations=kernels_of("resume_rows", scratch=counts),
    roles={"kept_positions": "statistics", "decided": "statistics", "place": "statistics"},
)
