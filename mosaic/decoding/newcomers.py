"""Whether requests that came together begin together: their first blocks wait until the prompts of all are written.

Steps with blocks have little time for prompts (`Scheduler`). If each request of many began its first block as soon as its own
prompt is written, the others' prompts would take several times as long, and the tokens of those who began would come no sooner
than in steps for all. Where few prompts fill a step, blocks cost them little, and where two steps have room for the prompts of
all, the wait costs more than it saves: nobody waits. Who came within a few turns came together (`pack_requests`); for those who
come later nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mosaic.kernels.shared.requests import held
from mosaic.registrar.operators.pack_requests import TOGETHER
from mosaic.registrar.request_table import Column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.kernels.shared.requests import Wanted

__all__ = ["held_back"]

STEPS: Final = 8
"""Whole steps that the prompts take, at most, for which somebody waits."""
MANY: Final = 2
"""Whole steps that the prompts of all take, at most, for which nobody waits: in Poisson traffic, seldom more come together."""
SHORT: Final = 4
"""Prompts that fill a step, at least, on the average."""


def held_back(columns: NDArray[np.int64], asked: Wanted, most_tokens: int) -> NDArray[np.bool_] | None:
    """Return who waits for the prompts of others, [S], in steps of so many tokens; None if nobody does.

    They do if the prompts are short, those of all would fill more than `MANY` steps if each had as many tokens as those that are
    not written have left on the average, the wait is short, and no more requests have begun than have not. Each step in which
    others decide is a turn: where these leave little time for prompts, the wait ends.
    """
    fills = asked.running & asked.fills
    if not (prompts := int(np.add.reduce(fills))):
        return None
    found, tokens = held(columns, asked), int(np.add.reduce(asked.length[fills]))
    count = prompts + int(np.add.reduce(found))
    if count == prompts or tokens > min(STEPS, prompts / SHORT) * most_tokens:
        return None
    turns = columns[:, Column.SERVED]
    if tokens * count <= MANY * prompts * most_tokens or turns.max() - turns[found].min() > TOGETHER + STEPS:
        return None
    return found if 2 * count >= int(np.add.reduce(asked.running)) else None
