"""Block caches: decided tokens of a block that later steps do not recompute (FOCUS, section 4.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mosaic.errors import UsageError
from mosaic.models.parts.windows import APART
from mosaic.models.policies.policy import BlockStep, Policy, with_parts

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.phase import Phase

BLOCK_CACHES: Final = ("dc", "dc+")
"""When a decided token is frozen: after one more step, or once its right neighbour has been decided that long, too."""
BLOCK_COMMITS: Final = ("exact", "cached")
"""The keys of a finished block for later blocks: those of its final tokens, or those that tokens had when frozen."""


class Freezing(Policy):
    """Leaves frozen tokens out of a block's steps. Its option is one of `BLOCK_CACHES`."""

    def __init__(self, options: str, config: Any, arch: Architecture, positions: int) -> None:
        if options == "dc" and arch.shifted:
            raise UsageError(
                "block_cache 'dc': on this model a token predicts its right neighbour, so it is computed until that is decided; "
                "use 'dc+'."
            )
        if config.cache is not None:
            raise UsageError(
                f"cache '{config.cache}' and block_cache '{options}' both say which tokens of a block are computed; give one."
            )
        self._at_once, self._cached = options == "dc", config.block_commit == "cached"
        self._frozen = np.zeros(positions, dtype=bool)
        self._begun = -1

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Compute only unfrozen tokens; a step that writes final keys does so only if frozen tokens keep theirs."""
        if step.writes and (not self._cached or step.window[1] <= step.prefix):
            return phase
        return with_parts(phase, tokens=APART)

    def tell(self, step: BlockStep, request: Any) -> None:
        """List the computed tokens: those that are not frozen, and the whole previous block, unless its keys stay."""
        if step.phase.tokens != APART:
            return
        if step.start != self._begun:
            self._begun = step.start
            if not self._cached:
                self._frozen[: step.start] = False
        first, end = step.window
        step.places = (~self._frozen[first:end]).nonzero()[0] + first

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Freeze tokens that were computed as decided ones; with "dc+" their right neighbour was, too."""
        if not step.counts:
            return
        first, end = step.window
        if self._at_once:
            self._frozen[first:end] |= ~request.mask_array[first:end]
            return
        decided = ~request.mask_array[first : min(end + 1, step.end)]  # the block's last token has no neighbour
        decided[:-1] &= decided[1:]
        self._frozen[first:end] |= decided[: end - first]
