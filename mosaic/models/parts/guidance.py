"""Classifier-free guidance: a second copy of every sequence is computed, without its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.parts.part import Part

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Guidance(Part):
    """Rows are guided by those of the copies."""

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the scale: how far the rows move away from the copies'."""
        return (Input(name="guidance", dtype="float32", per="row"),)

    def copy_of(self, request: Any) -> Any:
        """Return the window of the copy, int64 [T]."""
        other = request.unconditional
        if other is None or other.shape != request.token_ids.shape:
            raise UsageError("a guided request needs its window without the prompt as well, of the same length.")
        return other


GUIDED: Final = Guidance()
