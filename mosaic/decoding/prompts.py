"""Prompts: what a model and the options of a generation take, and what is refused before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mosaic.decoding.algorithms import canvas_length
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["check_prompt"]


def check_prompt(prompt: Tensor, config: GenerationConfig, arch: Architecture, *, which: str = "the prompt") -> None:
    """Check a prompt, int64 [P], against options that are resolved, and the model.

    Parameters
    ----------
    which
        What errors call it.

    Raises
    ------
    UsageError
        If it is no prompt, has tokens that the model has not, or is too long.
    """
    if not 0 <= arch.mask_token_id < arch.vocabulary:
        raise UsageError(
            f"config.json names the mask token {arch.mask_token_id}, the model has tokens 0 to {arch.vocabulary - 1}; "
            "give mask_token_id there."
        )
    if prompt.dim() != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise UsageError(f"{which}: expected token ids [P], got {prompt.dtype} of shape {list(prompt.shape)}.")
    if not prompt.numel():
        raise UsageError(f"{which} is empty; give at least one token.")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= arch.vocabulary:
        raise UsageError(
            f"{which}: expected ids in [0, {arch.vocabulary}), got {low if low < 0 else high}; is it of another tokenizer?"
        )
    found = (prompt == arch.mask_token_id).nonzero()
    if len(found):
        raise UsageError(
            f"{which} has the mask token {arch.mask_token_id} at position {int(found[0])}, where it would be "
            "overwritten; remove it."
        )
    length = canvas_length(config, arch, prompt.numel())
    if arch.max_context and length > arch.max_context:
        room = arch.max_context - (length - prompt.numel())
        shorter = f"shorten the prompt to {room:,} tokens or lower gen_length" if room > 0 else "lower gen_length"
        raise UsageError(
            f"{which} of {prompt.numel():,} tokens and gen_length {config.gen_length:,} take {length:,} positions, the "
            f"model has {arch.max_context:,}; {shorter}, or {_scaling_for(length, arch)}."
        )


def _scaling_for(length: int, arch: Architecture) -> str:
    """Say what rotary scaling reaches a length."""
    factor = -(-length // (arch.rotary.original or arch.max_positions))
    if arch.rotary.kind != "default":
        return f"raise the factor of its rope_scaling to {factor}"
    return f'set rope_scaling in its config.json to {{"rope_type": "yarn", "factor": {factor}}}'
