"""The tokens of a step: their ids and positions, and where each sequence begins. Every phase has this part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.models.inputs import Input
from mosaic.models.parts.part import Part

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = ["WINDOWS", "Windows"]


@dataclass(frozen=True, slots=True)
class Windows(Part):
    """The windows of all sequences, one after another."""

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return ids, positions, and where sequences begin."""
        return (
            Input(name="token_ids", dtype="int64", per="token", value=lambda window: window.token_ids),
            Input(name="positions", dtype="int32", per="token", value=lambda window: range(window.start, window.end)),
            Input(name="cu_seqlens", dtype="int32", per="bound", value=lambda window: window.length),
        )


WINDOWS = Windows()
