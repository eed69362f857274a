"""top_keys: the pages of each prefix with the most attention mass, per set, into the rows of a state.

`mosaic.registrar.operators.top_keys` defines which pages are chosen and where they are written (MAGE, equation 3). The
pages of one sequence and set are sorted in the plan's own memory. Legend: S keys of all prefixes, B sequences, E rows,
W numbers of a row.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.order import fill_order, indices_of
from mosaic.kernels.shared.scratch import tiles_of
from mosaic.registrar.operators.top_keys import keys_of, numbers_of


def bind(
    *, mass: Tensor, captured: Tensor, cu_keys: Tensor, owner: Tensor, selected: Tensor, slot: int, sets: int, k: int,
    page: int, ratio: float = 0.0, enough: float = 0.0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write count and pages of each sequence and set into its row of selected [E, W]; lengths are read on the host."""
    order, sums, ranks = tiles_of("top_keys", scratch, {"mass": mass})
    sorted_, values, ranked = order.numpy(), sums.numpy(), ranks.numpy()
    given, rows, numbers = mass.numpy(), selected.numpy(), numbers_of(k, page)

    def run() -> None:
        lengths, first, owners = captured.tolist(), cu_keys.tolist(), owner.tolist()
        for sequence, keys in enumerate(lengths):
            if not keys:
                continue
            pages = -(-keys // page)
            count = _count(keys, k, page, ratio)
            found, mine, row = values[:pages], sorted_[:pages], rows[owners[sequence]]
            for own in range(sets):
                masses = given[own, first[sequence] : first[sequence] + keys]
                whole = keys // page
                np.sum(masses[: whole * page].reshape(whole, page), axis=1, out=found[:whole])
                if whole < pages:
                    np.sum(masses[whole * page :], out=found[whole:].reshape(()))
                np.absolute(found, out=found)  # -0.0 becomes 0.0
                fill_order(mine, ranked[:pages], found)
                mine.sort()
                chosen = indices_of(mine[: count if not enough else _fewest(found[indices_of(mine[:count])], enough)])
                chosen.sort()
                place = row[(slot * sets + own) * numbers :]
                place[0] = len(chosen)
                place[1 : len(chosen) + 1] = chosen

    return run


launch = launcher(bind)


def _count(keys: int, k: int, page: int, ratio: float) -> int:
    """The number of pages of a prefix to choose."""
    count = min(k // page, -(-keys // page))
    if ratio:
        count = min(count, -(-keys_of(ratio, keys) // page))
    return count


def _fewest(sums: NDArray[np.float32], enough: float) -> int:
    """The number of the sums, the largest first, that add up to enough; all if they do not."""
    return min(int(np.searchsorted(np.cumsum(sums), np.float32(enough))) + 1, len(sums))


def reference(
    *, mass: Tensor, captured: Tensor, cu_keys: Tensor, owner: Tensor, selected: Tensor, slot: int, sets: int, k: int, page: int,
    ratio: float = 0.0, enough: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the state afterwards, in plain PyTorch."""
    after, numbers = selected.clone(), numbers_of(k, page)
    for sequence, keys in enumerate(captured.tolist()):
        first, count = int(cu_keys[sequence]), _count(keys, k, page, ratio)
        for own in range(sets if keys else 0):
            masses = mass[own, first : first + keys]
            sums = torch.stack([masses[at : at + page].sum() for at in range(0, keys, page)])
            best = torch.sort(sums, descending=True, stable=True)
            chosen = best.indices[:count]
            if enough:
                chosen = chosen[: int((best.values.cumsum(0) < enough).sum()) + 1]
            place = after[owner[sequence], (slot * sets + own) * numbers :]
            place[0] = len(chosen)
            place[1 : len(chosen) + 1] = chosen.sort().values
    return after
