"""Sparse attention and reuse in block diffusion: what each step of a block is asked beside what it decides."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mosaic.decoding.canvas import COMMIT, whole_blocks
from mosaic.decoding.evicting import hides
from mosaic.decoding.reusing import reuse_of
from mosaic.models.parts.reused import Reused
from mosaic.models.parts.selected import Selected, Summarized
from mosaic.models.sparse import SparseAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mosaic.decoding.canvas import Canvas
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.phase import Phase
    from mosaic.models.reuse import PrefixReuse

__all__ = ["attending", "commits_within", "committing", "later_steps", "selection"]


def attending(phase: Phase, config: GenerationConfig, step: int, *, refreshes: bool | None = None) -> Phase:
    """Return the phase of a step of a block, counted from 0; `refreshes`, if it is not as the number of the step says."""
    chosen, reuse = config.attention, reuse_of(config)
    again = reuse is not None and (_refreshes(reuse, step) if refreshes is None else refreshes)
    if isinstance(chosen, SparseAttention):
        return _selecting(phase, chosen, _selects(chosen, config, step), again)
    return phase if reuse is None else _reusing(phase, reuse, again)


@lru_cache(maxsize=256)
def _selecting(phase: Phase, attention: SparseAttention, selects: bool, refreshes: bool) -> Phase:
    return replace(phase, cache=Selected(attention=attention, selects=selects, refreshes=refreshes))


@lru_cache(maxsize=256)
def _reusing(phase: Phase, reuse: PrefixReuse, refreshes: bool) -> Phase:
    return replace(phase, cache=Reused(reuse=reuse, refreshes=refreshes))


@lru_cache(maxsize=256)
def later_steps(config: GenerationConfig) -> Sequence[int]:
    """Return of a block's steps after the first, counted from 0, the first of each kind: by whether they select and refresh."""
    kinds: dict[Phase, int] = {}
    for step in range(1, config.steps or config.block_length or 1):
        kinds.setdefault(attending(COMMIT, config, step), step)
    return tuple(kinds.values())


def committing(phase: Phase, config: GenerationConfig) -> Phase:
    """Return the phase of a step that writes the keys of final tokens, with what later steps rank their pages by."""
    chosen = config.attention
    if not isinstance(chosen, SparseAttention) or chosen.by != "bounds":
        return phase
    return replace(phase, cache=Summarized(attention=chosen))


def selection(canvas: Canvas, start: int, step: int, *, refreshes: bool | None = None) -> dict[str, Any]:
    """Return what a step of the block at `start` says of how it attends: the keys before it, which it reads, and who votes."""
    chosen, config, reuse = canvas.config.attention, canvas.config, reuse_of(canvas.config)
    reusing = {}
    if reuse is not None:
        reusing = {"prefix": start, "refreshes": _refreshes(reuse, step) if refreshes is None else refreshes}
    if not isinstance(chosen, SparseAttention):
        return reusing
    selects, before = _selects(chosen, config, step), start - (config.block_length or 0)
    ranked = start // chosen.page * chosen.page if chosen.by == "bounds" else start  # the keys that are selected from
    carries = chosen.carried and step == 0 and before >= whole_blocks(config, canvas.prompt_len)[0]
    return reusing | {
        "captured": before if carries else ranked,
        "candidates": ranked if selects else 0,
        "exactly": selects and not carries and chosen.selects == "first",
        "votes_from": start if chosen.voters == "block" else max(start, canvas.prompt_len),
    }


def commits_within(config: GenerationConfig) -> bool:
    """Return whether the first step of a block may write the final keys of the one before: where it attends to all keys, and the
    tokens that are left of that one see all of its keys."""
    chosen = config.attention
    if hides(config) and config.block_commit == "cached":
        return False
    return not isinstance(chosen, SparseAttention) or chosen.selects == "first"


def _selects(chosen: SparseAttention, config: GenerationConfig, step: int) -> bool:
    return chosen.selects_in(step, config.steps or config.block_length or 1)


def _refreshes(reuse: PrefixReuse, step: int) -> bool:
    return step == 0 or (reuse.steps is not None and step % reuse.steps == 0)
