"""Sparse attention in block diffusion: what each step of a block is asked beside what it decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mosaic.decoding.canvas import whole_blocks
from mosaic.models.parts.selected import Selected, Summarized
from mosaic.models.sparse import SparseAttention

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Canvas
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.phase import Phase

__all__ = ["attending", "commits_within", "committing", "selection"]


def attending(phase: Phase, config: GenerationConfig, step: int) -> Phase:
    """Return the phase of a step of a block, counted from 0."""
    chosen = config.attention
    if not isinstance(chosen, SparseAttention):
        return phase
    return replace(phase, cache=Selected(attention=chosen, selects=_selects(chosen, config, step)))


def committing(phase: Phase, config: GenerationConfig) -> Phase:
    """Return the phase of a step that writes the keys of final tokens, with what later steps rank their pages by."""
    chosen = config.attention
    if not isinstance(chosen, SparseAttention) or chosen.by != "bounds":
        return phase
    return replace(phase, cache=Summarized(attention=chosen))


def selection(canvas: Canvas, start: int, step: int) -> dict[str, Any]:
    """Return what a step of the block at `start` says of its selection: the keys before it, how it attends, and who votes."""
    chosen, config = canvas.config.attention, canvas.config
    if not isinstance(chosen, SparseAttention):
        return {}
    selects, before = _selects(chosen, config, step), start - (config.block_length or 0)
    ranked = start // chosen.page * chosen.page if chosen.by == "bounds" else start  # the keys that are selected from
    carries = chosen.carried and step == 0 and before >= whole_blocks(config, canvas.prompt_len)[0]
    return {
        "captured": before if carries else ranked,
        "candidates": ranked if selects else 0,
        "exactly": selects and not carries and chosen.selects == "first",
        "votes_from": start if chosen.voters == "block" else max(start, canvas.prompt_len),
    }


def commits_within(config: GenerationConfig) -> bool:
    """Return whether the first step of a block may write the final keys of the one before: where it attends to all keys."""
    chosen = config.attention
    return not isinstance(chosen, SparseAttention) or chosen.selects == "first"


def _selects(chosen: SparseAttention, config: GenerationConfig, step: int) -> bool:
    return step < chosen.selecting(config.steps or config.block_length or 1)
