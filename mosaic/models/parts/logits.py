"""Whole rows of logits, as an output in the plan. Legend: R rows whose logits are returned, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mosaic.models.inputs import Input
from mosaic.models.parts.part import Part

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.step_graph import Ending
    from mosaic.registrar.graph import Buffer


@dataclass(frozen=True, slots=True)
class ReturnedLogits(Part):
    """The logits of the rows that are asked for."""

    @property
    def reads_hidden(self) -> bool:
        """The rows may be any tokens."""
        return True

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the rows."""
        return (Input(name="logit_rows", dtype="int64", per="logit_row", index=True),)

    def register(self, end: Ending, norm: Buffer, weight: Buffer) -> None:
        """logits [R, V] = rms_norm(hidden[rows]) @ weight.T."""
        g, arch = end.g, end.arch
        returned = g.dim("logit_rows", at_most="tokens")
        rows = end.inputs["logit_rows"]
        h = end.normed_rows(end.source(rows), norm, "returned_")
        out = g.output("logits", (returned, arch.vocabulary), arch.dtype)
        g.add_op("linear", h, weight, out=out, name="returned_logits")


LOGITS: Final = ReturnedLogits()
