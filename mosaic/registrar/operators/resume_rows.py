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

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require

READS = ("chosen", "bounds", "positions", "rows", "cu_rows")


def infer(
    chosen: Spec, bounds: Spec, positions: Spec, rows: Spec, cu_rows: Spec, *, size: Dim, most: Dim
) -> tuple[Spec, Spec, Spec, Spec, Spec, Spec, Spec, Spec]:
    for name, spec in (("chosen", chosen), ("rows", rows)):
        require(len(spec.shape) == 1 and spec.dtype == "int64", f"{name} must be a vector of int64, not {spec}")
    require(len(positions.shape) == 1 and positions.dtype == "int32", f"positions must be int32[T], not {positions}")
    require(len(bounds.shape) == 1 and bounds.dtype == "int32", f"bounds must be int32[B + 1], not {bounds}")
    require(cu_rows == bounds, f"cu_rows must be {bounds} as bounds is, not {cu_rows}")
    decided = Spec((most,), "int64")
    place, count = Spec(rows.shape, "int32"), Spec((1,), "int32")
    return Spec((size,), "int64"), Spec((size,), "int32"), bounds, decided, decided, bounds, place, count


def counts(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve an int32 for every sequence: how many of its rows are decided."""
    return 4 * specs["bounds"].shape[0]


OPERATOR = Operator(
    name="resume_rows",
    reads=READS,
    writes=("kept", "kept_positions", "cu_seqlens", "decided", "asked", "cu_decided", "place", "count"),
    whole=frozenset(READS),
    infer=infer,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.resume_rows"),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.resume_rows", scratch=counts
        ),
    ),
    roles={"kept_positions": "statistics", "decided": "statistics", "place": "statistics"},
)
