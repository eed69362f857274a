"""Choose which rows of a step go on beyond the layer that it is cut in, by how their importance has changed between two layers.

FOCUS (Liang et al., "DLLMs Know How to Tame Their Compute Bound", sections 4.1 and 4.2, algorithm 1). Sequence b has the rows
cu_seqlens[b] to cu_seqlens[b + 1], whose positions ascend. Its block begins at first[b] and has P positions, of which listed[b]
names some, n in all, as in `token_importance`. Of a row, `status` says whether it can be evicted: 0, it cannot; 1, it is masked
and has been processed in this block; 2, it is masked and has not. Rows that can, lie in the block. M are those of b, and D of a row
is the sum over KV heads of after - before at its position. These rows are kept:

- History. decoded[b] is how many tokens the step before decoded, -1 where there is none that counts. owner[b] is the row of
  `state` [E, 2] that has a sum and a count, which -1 sets to 0. Otherwise a step is counted: by `history` "cumulative" each, by
  "block" those that decoded, and by "ema" the sum is an average, the first number or (1 - weight) * average + weight * decoded.
  The average N is 1 where nothing was counted, and at least 1.
- Budget. The least integer K >= alpha * N, where alpha * N within a share of 2^-20 above an integer is that integer.
- Candidates. By `threshold` "deviation" (equation 5) the rows of M with D >= sqrt(sum of D^2 over what is listed / n): the mean
  of D over it is 0. By "mean" (E.2.2) those with D >= mean + population deviation, both over M.
- The max(K, candidates) rows of M with the largest D, those of equal D at the lower position first, and all of M if there are no
  more. Where `keep` is not 0, it is how many (table 3). By `rank` "bottom" those with the least D are taken. Where there are
  `ranks`, those with the largest number ranks[b, position - first[b]] are, whatever D is, and `rank` says nothing.
- Context: each row of M whose next position is one of those.
- All rows of status 0, and rows whose D is not a number.
- Placeholders: every row of status 2 before one of M among these, so that each position before it has keys (section 4.2:
  "unprocessed"). By `placeholders` "masked" (algorithm 1, line 18) also every row of status 1 before one.

`rows` are their numbers: sequence by sequence, ascending, then 0; sequence b has those from bounds[b] to bounds[b + 1], and total
is how many there are. seen[b] is the first position beyond every row that is kept, and at least first[b] + progress[b]: the keys
that kept rows attend to. Where positions from first[b] to first[b] + progress[b] were processed before, it is equation 16's. Sums
are in float32.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require

READS = (
    "before", "after", "listed", "first", "progress", "status", "positions", "cu_seqlens", "decoded", "owner", "state",
    "ranks",
)  # fmt: skip

HISTORIES: Final = ("cumulative", "ema", "block")
THRESHOLDS: Final = ("deviation", "mean")
PLACEHOLDERS: Final = ("masked", "unprocessed")
RANKS: Final = ("importance", "bottom")


def rules(
    *, alpha: float, history: str, threshold: str, placeholders: str, weight: float, keep: int, rank: str, **_: object
) -> None:
    for what, value, known in (
        ("history", history, HISTORIES),
        ("threshold", threshold, THRESHOLDS),
        ("placeholders", placeholders, PLACEHOLDERS),
        ("rank", rank, RANKS),
    ):
        require(value in known, f"{what} must be one of {', '.join(known)}, not '{value}'")
    require(alpha >= 1, f"alpha must be at least 1, not {alpha}")
    require(0 <= weight <= 1, f"weight must be a share, not {weight}")
    require(keep >= 0, f"keep must be a number of rows, not {keep}")


def flags(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve an int32 for every row, whether it is kept, and one for every sequence, how many are."""
    return 4 * (specs["status"].shape[0] + specs["owner"].shape[0])


OPERATOR = Operator(
    name="evict_tokens",
    operands="""
        before@#:f32[B, K, P] after@#:f32[B, K, P] listed@#:i32[B, P] first@:i32[B] progress@:i32[B] status@:u8[T]
        positions@:i32[T] cu_seqlens@:i32[B+1] decoded@:i32[B] owner@:i64[B] state!@:f32[E, 2] ranks?@#:f32[B, P]
        -> rows:i64[T] bounds:i32[B+1] total:i64[1] seen:i32[B]
    """,
    attrs="alpha history threshold placeholders weight=0.0 keep=0 rank='importance'",
    rules=rules,
    moved={"state": "2*B"},
    implementations=kernels_of("evict_tokens", scratch=flags),
    roles={"before": "statistics", "after": "statistics", "rows": "statistics"},
)
