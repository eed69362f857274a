"""evict_tokens: the rows of a step that continue beyond the cut layer, chosen by the change of their importance.

Legend: B sequences, K KV heads, P positions of a block, T rows, E rows of the state.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEARLY: Final = 1 - 2.0**-20
"""Factor on a product before it is rounded up, so that the product's own rounding adds nothing."""
NOTHING: Final = -1
"""Instead of a number of decoded tokens: there is no step that counts."""
UNPROCESSED: Final = 2
"""The status of a masked row that has not been processed in its block."""


def launch(
    *, before: Tensor, after: Tensor, listed: Tensor, first: Tensor, progress: Tensor, status: Tensor,
    positions: Tensor, cu_seqlens: Tensor, decoded: Tensor, owner: Tensor, state: Tensor, rows: Tensor, bounds: Tensor,
    total: Tensor, seen: Tensor, alpha: float, history: str, threshold: str, placeholders: str, weight: float = 0.0,
    keep: int = 0, rank: str = "importance", ranks: Tensor | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write rows, bounds, total and seen, and count the step before in the state; all is read on the host."""
    difference = (after.numpy() - before.numpy()).sum(axis=1)
    kept, ends = list[int](), bounds.numpy()
    ends[0], statuses, places = 0, status.tolist(), positions.tolist()
    of_block = zip(first.tolist(), progress.tolist(), owner.tolist(), decoded.tolist(), strict=True)
    for sequence, ((begin, done, row, count), (low, high)) in enumerate(
        zip(of_block, pairwise(cu_seqlens.tolist()), strict=True)
    ):
        budget = _budget(state.numpy()[row], count, alpha, history, weight, high - low)
        names = [place for place in listed[sequence].tolist() if place >= 0]
        deltas = {at: float(difference[sequence, places[at] - begin]) for at in range(low, high) if statuses[at]}
        spread = _spread(deltas, [float(difference[sequence, name]) for name in names], threshold)
        target = keep or max(budget, _candidates(deltas, *spread))
        numbers = {at: -delta if rank == "bottom" else delta for at, delta in deltas.items()}
        if ranks is not None:
            own = ranks[sequence].tolist()
            numbers = {at: delta if math.isnan(delta) else own[places[at] - begin] for at, delta in deltas.items()}
        chosen = _chosen(numbers, {at: places[at] for at in deltas}, target)
        mine = _placed(chosen, low, high, statuses, masked=placeholders == "masked")
        kept += mine
        ends[sequence + 1] = len(kept)
        seen.numpy()[sequence] = max(begin + done, max((places[at] for at in mine), default=-1) + 1)
    rows.zero_()
    rows.numpy()[: len(kept)] = kept
    total.fill_(len(kept))


def _budget(own: NDArray[np.float32], decoded: int, alpha: float, kind: str, weight: float, most: int) -> int:
    """Count the step before in a row of the state; return how many of `most` rows the history asks for."""
    summed, counted = float(own[0]), float(own[1])
    if decoded == NOTHING:
        summed, counted = 0.0, 0.0
    elif decoded >= 0 and (kind != "block" or decoded):
        if kind == "ema" and counted:
            summed = (1 - weight) * summed + weight * decoded
        else:
            summed += decoded
        counted += 1
    own[0], own[1] = summed, counted
    average = summed / counted if counted and kind != "ema" else summed
    return math.ceil(min(alpha * max(1.0, average) * NEARLY, most))  # of nobody's row the average may be any


def _spread(deltas: Mapping[int, float], listed: Sequence[float], threshold: str) -> tuple[float, float]:
    """The mean that deltas are compared with, and their mean squared distance from it."""
    if threshold == "deviation":
        return 0.0, sum(delta * delta for delta in listed) / max(len(listed), 1)
    mean = sum(deltas.values()) / max(len(deltas), 1)
    return mean, sum((delta - mean) ** 2 for delta in deltas.values()) / max(len(deltas), 1)


def _candidates(deltas: Mapping[int, float], mean: float, square: float) -> int:
    """The number of deltas that are large enough to keep their rows."""
    return sum(delta >= mean and (delta - mean) ** 2 >= square for delta in deltas.values())


def _chosen(ranks: Mapping[int, float], places: Mapping[int, int], target: int) -> set[int]:
    """The rows with the largest numbers, those whose own is not a number, and the rows before these."""
    # a comparison with what is not a number is false: such a row is behind no other, and before none
    ahead = {
        at: sum(other > mine or (other == mine and row < at) for row, other in ranks.items())
        for at, mine in ranks.items()
    }
    best = {at for at, others in ahead.items() if others < target}
    following = {places[at] - 1 for at in best}
    return best | {at for at in ranks if places[at] in following}


def _placed(chosen: set[int], low: int, high: int, statuses: Sequence[int], *, masked: bool) -> list[int]:
    """The kept rows of a sequence, given the chosen ones."""
    rightmost = max(chosen, default=low)
    return [
        at
        for at in range(low, high)
        if not statuses[at] or at in chosen or (at < rightmost and (masked or statuses[at] == UNPROCESSED))
    ]


def reference(
    *, before: Tensor, after: Tensor, listed: Tensor, first: Tensor, progress: Tensor, status: Tensor, positions: Tensor,
    cu_seqlens: Tensor, decoded: Tensor, owner: Tensor, state: Tensor, alpha: float, history: str, threshold: str,
    placeholders: str, weight: float = 0.0, keep: int = 0, rank: str = "importance", ranks: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return outputs and the state afterwards in plain PyTorch, by sorting."""
    kept, sizes, ends, after_state = [], [0], [], state.clone()
    for b, (low, high) in enumerate(pairwise(cu_seqlens.tolist())):
        own, count = after_state[owner[b]], int(decoded[b])
        if count == NOTHING:
            own[:2] = 0
        elif count > 0 or (count == 0 and history != "block"):
            moving = history == "ema" and bool(own[1])
            own[0] = (1 - weight) * own[0] + weight * count if moving else own[0] + count
            own[1] += 1
        average = float(own[0] if history == "ema" else own[0] / own[1].clamp(min=1))
        budget = math.ceil(alpha * max(average, 1.0) * NEARLY)
        mine, places = status[low:high], positions[low:high]
        masked = mine.nonzero().view(-1)
        whole = (after[b] - before[b]).sum(0)
        delta = whole[places[masked].long() - int(first[b])]
        of = whole[listed[b][listed[b] >= 0].long()] if threshold == "deviation" else delta
        mean = 0.0 if threshold == "deviation" or not len(of) else float(of.mean())
        deviation = math.sqrt(float((of - mean).square().mean())) if len(of) else 0.0
        target = keep or max(budget, int((delta >= mean + deviation).sum()))
        numbers = -delta if rank == "bottom" else delta
        if ranks is not None:
            numbers = ranks[b, places[masked].long() - int(first[b])]
        numbers = numbers.where(~delta.isnan(), math.inf)
        order = torch.sort(numbers, descending=True, stable=True).indices
        best = masked[order[: target + int(delta.isnan().sum())]]
        left = mine == 0
        left[best] = True
        left[masked] |= torch.isin(places[masked] + 1, places[best])
        earlier = torch.arange(high - low) < max([*masked[left[masked]].tolist(), 0])
        left |= earlier if placeholders == "masked" else earlier & (mine == UNPROCESSED)
        kept.append(left.nonzero().view(-1) + low)
        sizes.append(sizes[-1] + len(kept[-1]))
        beyond = int(places[left].max()) + 1 if left.any() else 0
        ends.append(max(int(first[b] + progress[b]), beyond))
    chosen = torch.cat(kept)
    return {
        "rows": torch.cat([chosen, chosen.new_zeros(len(status) - len(chosen))]),
        "bounds": torch.tensor(sizes, dtype=torch.int32), "total": torch.tensor([len(chosen)]),
        "seen": torch.tensor(ends, dtype=torch.int32), "state": after_state,
    }  # fmt: skip
