"""Choose the rows of a step that continue beyond the cut layer, by the change of their importance between two layers.

FOCUS (Liang et al., "DLLMs Know How to Tame Their Compute Bound", sections 4.1 and 4.2, algorithm 1). Sequence b has
the rows cu_seqlens[b] to cu_seqlens[b + 1], whose positions ascend. Its block begins at first[b] and has P positions;
listed[b] lists n of them, as in `token_importance`. `status` of a row: 0, it cannot be evicted; 1, it is masked and has
been processed in this block; 2, it is masked and has not. Rows that can be evicted lie in the block. Let M be those of
b, and D of a row the sum over KV heads of after - before at its position. These rows are kept:

- History. decoded[b] is the number of tokens that the previous step decoded, -1 if there is none that counts, and -2 if
  it is counted already. The row owner[b] of `state` [E, 4] begins with a sum and a count, which -1 sets to 0 and -2
  leaves as they are. Otherwise the step is counted: `history` "cumulative" counts each step, "block" each step that
  decoded tokens, and with "ema" the sum is an average: the first number, then (1 - weight) * average + weight * decoded.
  The average N is 1 if nothing was counted, and at least 1.
- Budget. The least integer K >= alpha * N; alpha * N within a relative 2^-20 above an integer counts as that integer.
- Candidates. With `threshold` "deviation" (equation 5) the rows of M with D >= sqrt(sum of D^2 over the listed
  positions / n): their mean D is 0. With "mean" (E.2.2) the rows with D >= mean + population deviation, both over M.
- The max(K, candidates) rows of M with the largest D, ties to the lower position; all of M if there are fewer. `keep`,
  if not 0, is their number instead (table 3). With `rank` "bottom" the rows with the least D are taken. If `ranks` is
  given, the rows with the largest ranks[b, position - first[b]] are taken, and neither D nor `rank` matters.
- Context: each row of M whose next position is that of a row taken so far.
- All rows of status 0, and rows whose D is not a number.
- Placeholders: every row of status 2 before a row of M that is kept, so that each position before it has keys (section
  4.2: "unprocessed"). With `placeholders` "masked" (algorithm 1, line 18) also every row of status 1 before one.

`rows` are their row numbers: sequence by sequence, ascending, then 0; sequence b has those from bounds[b] to bounds[b +
1], and total is their number. seen[b] is one past the last kept row's position, and at least first[b] + progress[b]:
the keys that kept rows attend to. If the positions from first[b] to first[b] + progress[b] were processed before, it is
equation 16's. Sums are in float32.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require

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
    """Reserve an int32 per row, whether it is kept, and one per sequence, the number of kept rows."""
    return 4 * (specs["status"].shape[0] + specs["owner"].shape[0])


OPERATOR = Operator(
    name="evict_tokens",
    operands="""
        before@#:f32[B, K, P] after@#:f32[B, K, P] listed@#:i32[B, P] first@:i32[B] progress@:i32[B] status@:u8[T]
        positions@:i32[T] cu_seqlens@:i32[B+1] decoded@:i32[B] owner@:i64[B] state!@:f32[E, 4] ranks?@#:f32[B, P]
        -> rows:i64[T] bounds:i32[B+1] total:i64[1] seen:i32[B]
    """,
    attrs="alpha history threshold placeholders weight=0.0 keep=0 rank='importance'",
    rules=rules,
    moved={"state": "2*B"},
    implementations=kernels_of("evict_tokens", scratch=flags),
    roles={"before": "statistics", "after": "statistics", "rows": "statistics"},
)
