"""The same inputs for every engine: random tokens of which a share, at random places, is masked."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from mosaic.models.architecture import Architecture

__all__ = ["Inputs", "make_inputs", "masked_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One sequence: int64 ids [S] on the CPU, and how many of them are [MASK]."""

    token_ids: Tensor
    tokens: int
    masked: int
    mask_ratio: float


def masked_rows(tokens: int, mask_ratio: float) -> int:
    """Return how many rows a share of the tokens is, rounded up as `Request` does.

    >>> masked_rows(1024, 0.1)
    103
    """
    return max(1, ceil(Fraction(str(mask_ratio)) * tokens))


def make_inputs(arch: Architecture, tokens: int, mask_ratio: float, seed: int) -> Inputs:
    """Draw the inputs of one point."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, arch.vocabulary, (tokens,), generator=generator)
    ids[ids == arch.mask_token_id] = (arch.mask_token_id + 1) % arch.vocabulary
    masked = masked_rows(tokens, mask_ratio)
    ids[torch.randperm(tokens, generator=generator)[:masked]] = arch.mask_token_id
    return Inputs(token_ids=ids, tokens=tokens, masked=masked, mask_ratio=mask_ratio)
