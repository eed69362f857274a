"""Whether requests that came together begin together: their first blocks wait until the prompts of all are written.

Steps with blocks have little time for prompts (`Scheduler`). If each request of many began its first block as soon as its own
prompt is written, the others' prompts would take several times as long, and the tokens of those who began would come no sooner
than in steps for all. Where few prompts fill a step, blocks cost them little, and nobody waits. Who came within
a few turns came together (`pack_requests`); for those who come later nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.kernels.shared.requests import Wanted

__all__ = ["begin_together"]

STEPS: Final = 8
"""Whole steps that the prompts take, at most, for which somebody waits."""
SHORT: Final = 4
"""Prompts that fill a step, at least, on the average."""


def begin_together(asked: Wanted, held: NDArray[np.bool_], most_tokens: int) -> bool:
    """Return whether those who would be `held`, [S], wait for the prompts of others, in steps of so many tokens.

    They do if the prompts are short, the wait is, and no more requests have begun than have not: for these nothing changes.
    """
    fills = asked.running & asked.fills
    prompts, tokens = int(np.add.reduce(fills)), int(np.add.reduce(asked.length[fills]))
    waiting = int(np.add.reduce(held))
    if not waiting or tokens > min(STEPS, prompts / SHORT) * most_tokens:
        return False
    return 2 * (prompts + waiting) >= int(np.add.reduce(asked.running))
