"""draw_requests on CUDA: random keys and sampling settings of the rows to decide of a table's requests.

One program a window, and one more for what lies beyond the last. Legend: M rows, B windows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import C, closes, float_of, key_of
from mosaic.registrar.request_table import Column

AT_ONCE: Final = 64  # untuned default
CANVAS, TOP_K, CUTS = (tl.constexpr(int(column)) for column in (Column.CANVAS, Column.TOP_K, Column.CUTS))
TEMPERATURE, TOP_P = tl.constexpr(int(Column.TEMPERATURE)), tl.constexpr(int(Column.TOP_P))
SCORE_TEMPERATURE = tl.constexpr(int(Column.SCORE_TEMPERATURE))


@triton.jit(do_not_specialize=["sequences", "most"])
def draw_requests_kernel(
    table, row, cu_rows, decided_rows, keys, temperature, top_p, top_k, cuts, score_temperature, sequences, most,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    inside = window < sequences
    request = tl.load(row + window, mask=inside, other=-1)
    known = request >= 0
    line = table + request * C
    canvas = tl.load(line + CANVAS, mask=known, other=0)
    draws = known & (closes(line, known) == 0)
    warmth = float_of(line, TEMPERATURE, draws)
    of_scores = float_of(line, SCORE_TEMPERATURE, draws)
    nucleus = tl.where(draws, float_of(line, TOP_P, draws), 1.0)
    best = tl.load(line + TOP_K, mask=draws, other=0).to(tl.int32)
    cut = tl.load(line + CUTS, mask=draws, other=0).to(tl.uint8)
    end = tl.load(cu_rows + window + 1, mask=inside, other=most)
    for at in range(tl.load(cu_rows + window), end, AT_ONCE):
        place = at + tl.arange(0, AT_ONCE)
        mine = place < end
        position = tl.load(decided_rows + place, mask=mine, other=0) - canvas
        key = tl.where(known, key_of(line, known, position), 0)
        tl.store(keys + place, key, mask=mine)
        tl.store(temperature + place, tl.where(mine, warmth, 0.0), mask=mine)
        tl.store(top_p + place, tl.where(mine, nucleus, 0.0), mask=mine)
        tl.store(top_k + place, tl.where(mine, best, 0), mask=mine)
        tl.store(cuts + place, tl.where(mine, cut, 0), mask=mine)
        tl.store(score_temperature + place, tl.where(mine, of_scores, 0.0), mask=mine)


def launch(
    *, table: Tensor, row: Tensor, cu_rows: Tensor, decided_rows: Tensor, keys: Tensor, temperature: Tensor, top_p:
    Tensor, top_k: Tensor, cuts: Tensor, score_temperature: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs."""
    sequences = row.shape[0]
    draw_requests_kernel[(sequences + 1,)](
        table, row, cu_rows, decided_rows, keys, temperature, top_p, top_k, cuts, score_temperature, sequences,
        keys.shape[0], AT_ONCE=AT_ONCE,
    )  # fmt: skip
