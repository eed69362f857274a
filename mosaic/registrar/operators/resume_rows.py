"""What a graph over kept rows goes by: which rows these are, their bounds and positions, and which rows to decide are among them.

chosen[i] is the number of a token, for i below bounds[B], each once; sequence b has chosen[bounds[b]:bounds[b + 1]]. The graph
computes `size` rows: kept[i] = chosen[i] and kept_positions[i] = positions[kept[i]], of padding too. There are more where
another graph computed so. Then all of cu_seqlens is 0 and no row is decided: the graph does nothing to what outlives it.
Otherwise

- cu_seqlens = bounds.
- Of rows[m], the numbers of tokens to decide, sequence b has those from cu_rows[b] to cu_rows[b + 1]. Those that are kept, in
  their order, are the decided ones: decided[d] is the row of `kept` and asked[d] is m, both 0 beyond the last. Sequence b has
  those from cu_decided[b] to cu_decided[b + 1]. place[m] is d, and -1 where the token is not kept and in padding.

count[0] = bounds[B], whether they fit or not. `most` is the length of decided and asked.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require

READS = ("chosen", "bounds", "positions", "rows", "cu_rows")


def rules(*, S: Dim, size: Dim, **_: object) -> None:
    require(
        not isinstance(S, int) or not isinstance(size, int) or size <= S, f"there are {S} numbers of tokens, not {size}"
    )


def counts(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve an int32 for every sequence: how many of its rows are decided."""
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
