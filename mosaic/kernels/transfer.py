"""transfer: the rows that are committed by their scores, and the resulting tokens.

The rules are those of the operator's record. All of them commit, of a sequence's candidates in the order of their
scores (ties: the lower row), the first few; they differ in how many. Outputs overlap no operand. Legend: M rows, B
sequences.

The order is sorted in the plan's own memory (`_order`), and thresholds are counted in it by binary search.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.order import Order, above, at_least, fill_order, indices_of
from mosaic.kernels.shared.scratch import tiles_of

_NEVER: Final = 2**63 - 1
"""Sorts behind every candidate."""


def bind(
    *, token: Tensor, score: Tensor, current: Tensor, cu_rows: Tensor, quota: Tensor, threshold: Tensor, chosen: Tensor,
    committed: Tensor, rule: str, mask_id: int, edit_threshold: Tensor | None = None, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write chosen [M] and committed [M]; the bounds, quotas and thresholds are read on the host."""
    order, values, ranks, kept, other = (tile.numpy() for tile in tiles_of("transfer", scratch, {"score": score}))
    given, tokens, before, taken = score.numpy(), token.numpy(), current.numpy(), committed.view(torch.bool)
    done, count_of = taken.numpy(), RULES[rule]

    def run() -> None:
        np.not_equal(before, mask_id, out=kept)
        np.add(given, np.float32(0), out=values)  # -0.0 becomes 0.0
        fill_order(order, ranks, values)
        np.copyto(order, _NEVER, where=kept)
        done.fill(False)
        bounds, quotas, thresholds = cu_rows.tolist(), quota.tolist(), threshold.tolist()
        for b, (start, end) in enumerate(pairwise(bounds)):
            mine = order[start:end]
            mine.sort()
            candidates = mine[: np.searchsorted(mine, _NEVER)]
            count = count_of(candidates, max(quotas[b], 0), thresholds[b])
            done[indices_of(candidates[:count])] = True
            if edit_threshold is not None:
                edited, differs = kept[start:end], other[start:end]
                np.not_equal(tokens[start:end], before[start:end], out=differs)
                np.logical_and(edited, differs, out=edited)
                np.greater(values[start:end], float(edit_threshold[b]), out=differs)
                np.logical_and(edited, differs, out=edited)
                np.logical_or(done[start:end], edited, out=done[start:end])
        torch.where(taken, token, current, out=chosen)

    return run


launch = launcher(bind)


def _top(order: Order, quota: int, threshold: float) -> int:
    return quota


def _threshold(order: Order, quota: int, threshold: float) -> int:
    return max(at_least(order, threshold), 1)


def _dynamic(order: Order, quota: int, threshold: float) -> int:
    return max(above(order, threshold), quota)


def _above(order: Order, quota: int, threshold: float) -> int:
    return above(order, threshold)


def _factor(order: Order, quota: int, factor: float) -> int:
    """Bisect for the stop: its scores fall and its thresholds rise."""
    if not at_least(order, -1.0):
        return 1
    stop, last = 1, len(order) - 1
    end = last
    while stop < end:
        middle = (stop + end) // 2
        step = np.float32(1) - np.float32(factor) / np.float32(middle + 2)
        if at_least(order, float(step)) <= middle:
            end = middle
        else:
            stop = middle + 1
    return stop if stop < last else last + 1


RULES: Final[Mapping[str, Callable[[Order, int, float], int]]] = {
    "top": _top,
    "threshold": _threshold,
    "dynamic": _dynamic,
    "above": _above,
    "factor": _factor,
    "edit": _dynamic,
}
"""The number of a sequence's candidates, in order, that are committed: (order, quota, threshold) -> count, perhaps too many."""


def reference(
    *, token: Tensor, score: Tensor, current: Tensor, cu_rows: Tensor, quota: Tensor, threshold: Tensor, rule: str,
    mask_id: int, edit_threshold: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return chosen and committed, a row at a time."""
    tokens, before, bounds = token.tolist(), current.tolist(), cu_rows.tolist()
    committed: set[int] = set()
    for b, (start, end) in enumerate(pairwise(bounds)):
        scores: dict[int, float] = dict(zip(range(start, end), score[start:end].tolist(), strict=True))
        ranked = [row for _, row in sorted((-value, row) for row, value in scores.items() if before[row] == mask_id)]
        limit, count = float(threshold[b]), max(int(quota[b]), 0)
        high = sum(scores[row] > limit for row in ranked)
        if rule in ("dynamic", "edit"):
            count = max(high, count)
        elif rule == "above":
            count = high
        elif rule == "threshold":
            count = max(sum(scores[row] >= limit for row in ranked), 1)
        elif rule == "factor":
            count = _factor_reference([scores[row] for row in ranked], limit)
        committed.update(ranked[:count])
        if edit_threshold is not None:
            others = (row for row in scores if before[row] != mask_id and tokens[row] != before[row])
            committed.update(row for row in others if scores[row] > float(edit_threshold[b]))
    done = torch.zeros(score.shape[0], dtype=torch.uint8)
    done[sorted(committed)] = 1
    return {"chosen": torch.where(done.bool(), token, current), "committed": done}


def _factor_reference(descending: list[float], factor: float) -> int:
    stop = 0
    for n, value in enumerate(descending, start=1):
        stop = n
        if value < (-1.0 if n == 1 else 1.0 - factor / (n + 1)):
            break
    return stop if stop in (1, len(descending)) else stop - 1
