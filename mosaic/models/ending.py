"""The end of a step: the rows that are unembedded, what the head computes of them, and which of them are committed.

Legend: M rows, B sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mosaic.models.architecture import Architecture
from mosaic.models.inputs import StepInputs
from mosaic.models.phase import Phase
from mosaic.models.residency import Residency
from mosaic.registrar.graph import Buffer, Graph

__all__ = ["Ending"]

LOGITS_TILE: Final = 64


class Ending:
    """Registers what a phase's parts ask for at the end of a step, and gives them what they share.

    Parameters
    ----------
    inputs
        Of the step.
    hidden
        The residual stream [T, D] after the last layer.
    cu_seqlens
        int32 [B + 1].
    """

    def __init__(
        self, g: Graph, arch: Architecture, phase: Phase, residency: Residency, inputs: StepInputs, *, hidden: Buffer,
        cu_seqlens: Buffer,
    ) -> None:  # fmt: skip
        self.g, self.arch, self.phase, self.residency, self.inputs = g, arch, phase, residency, inputs
        self.hidden, self.cu_seqlens = hidden, cu_seqlens
        self.masked = g.dim("masked", at_most="tokens")

    def register(self, weight: Buffer, way: str) -> None:
        """Register all of it; `weight` [V, D] is the head's, `way` the option of the choice `head`."""
        g, phase, inputs = self.g, self.phase, self.inputs
        norm = self.declare(g, self.arch)
        rows = inputs["rows"]
        if phase.noisy:
            inputs["keys"]
        for entry in phase.head.inputs(self.arch):
            inputs[entry.name]
        token, figures = phase.head.outputs(self)
        self.residency.arrive(streamed=self.residency.streams_head)
        source = self.source(rows)
        guided = None if phase.guidance is None else self.source(inputs["unconditional_rows"])
        guidance = None if phase.guidance is None else inputs["guidance"]
        with g.scope("head"), g.chunk("logits", over=self.masked, tile=LOGITS_TILE):
            h = self.normed_rows(source, norm)
            if guided is not None:
                other = self.normed_rows(guided, norm, "unconditional_")
                g.add_op("guide", h, other, guidance, name="guide")
            phase.head.unembed(self, h, weight, way, token, figures)
        if phase.commit is not None:
            phase.commit.register(self, token, figures)
            phase.tokens.decided(self, g["chosen"], g["committed"])
        else:
            confidence = g.output("confidence", (self.masked,), "float32")
            g.add_op("confidence", figures["maximum"], figures["logsumexp"], out=confidence, name="confidence_of")
        if phase.logits is not None:
            phase.logits.register(self, norm, weight)

    # --- what parts share -----------------------------------------------------------------------------------------

    def token(self) -> Buffer:
        """Declare the output `token`, int64 [M]."""
        return self.g.output("token", (self.masked,), "int64")

    def figures(self, names: Sequence[str]) -> Mapping[str, Buffer]:
        """Declare transients float32 [M], which a commit rule reads."""
        return {name: self.g.buffer(name, (self.masked,), "float32") for name in names}

    def source(self, rows: Buffer) -> Buffer:
        """Return the rows of the hidden state that predict these rows: those before them in shifted models, unless packing has
        shifted them."""
        if not self.arch.shifted or self.phase.shifts(self.arch):
            return rows
        shifted: Buffer = self.g.add_op("shift_rows", rows, self.cu_seqlens, name="source_rows")
        return shifted

    def normed_rows(self, rows: Buffer, norm: Buffer, prefix: str = "") -> Buffer:
        """Register rms_norm(hidden[rows]), normalised in place of the gathered rows."""
        g = self.g
        gathered = g.add_op("gather_rows", self.hidden, rows, name=f"{prefix}gathered")
        h: Buffer = g.add_op("rms_norm", gathered, norm, name=f"{prefix}normed", eps=self.arch.norm_eps)
        g.add_alias(h, gathered)
        return h

    @staticmethod
    def declare(g: Graph, arch: Architecture) -> Buffer:
        """Return the last norm's weight, which phases without a head have too, where those with one have it."""
        return g.weight("final_norm", (arch.hidden,), arch.dtype, tensor=arch.names.final_norm)
