"""The end of a step: which rows are unembedded, what the head computes, and which rows are committed.

Legend: M rows, B sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mosaic.errors import GraphError
from mosaic.models.architecture import Architecture
from mosaic.models.inputs import StepInputs
from mosaic.models.phase import Phase
from mosaic.models.residency import Residency
from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.polynomial import Polynomial

LOGITS_TILE: Final = 64
WITHOUT_HIDDEN: Final = (
    "the last layer does not compute all hidden states: set `reads_hidden` on the part that reads them."
)


class StepEnding:
    """Registers the head and the parts that act at the end of a step.

    Parameters
    ----------
    inputs
        Of the step.
    hidden
        The residual stream [T, D] after the last layer; None if no part of the phase `reads_hidden`.
    rows
        A function that registers this iteration's rows of it, [C, D], for row numbers int64 [C] and a prefix of names.
    cu_seqlens
        int32 [B + 1].
    masked
        M.
    """

    def __init__(
        self, g: Graph, arch: Architecture, phase: Phase, residency: Residency, inputs: StepInputs, *,
        hidden: Buffer | None, rows: Callable[[Buffer, str], Buffer], cu_seqlens: Buffer, masked: Polynomial,
    ) -> None:  # fmt: skip
        self.g, self.arch, self.phase, self.residency, self.inputs = g, arch, phase, residency, inputs
        self._hidden, self._rows, self.cu_seqlens = hidden, rows, cu_seqlens
        self.masked = masked

    def register(self, weight: Buffer, way: str) -> None:
        """Register the whole end; `weight` [V, D] is the head's, `way` the option of the choice `head`."""
        g, phase, inputs = self.g, self.phase, self.inputs
        norm = g.weight("final_norm", (self.arch.hidden,), self.arch.dtype, tensor=self.arch.names.final_norm)
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
        with g.chunk("logits", over=self.masked, tile=LOGITS_TILE, name="head/logits"):
            h = self.normed_rows(source, norm)
            other = None if guided is None else self.normed_rows(guided, norm, "unconditional_")
            with g.scope("head"):
                if other is not None:
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

    @property
    def hidden(self) -> Buffer:
        """The residual stream after the last layer.

        Raises
        ------
        GraphError
            If no part of the phase said that it `reads_hidden`.
        """
        if self._hidden is None:
            raise GraphError(WITHOUT_HIDDEN)
        return self._hidden

    def token(self) -> Buffer:
        """Declare the output `token`, int64 [M]."""
        return self.g.output("token", (self.masked,), "int64")

    @property
    def commits(self) -> bool:
        """Whether a rule commits rows."""
        return self.phase.commit is not None

    @property
    def open_id(self) -> int:
        """The value of the input `current` in undecided rows."""
        return self.phase.tokens.open_id(self.arch)

    def score(self, kind: str, figures: Mapping[str, Buffer], out: Buffer) -> Buffer:
        """Write each row's number for the commit rule, as the head defines it."""
        return self.phase.head.score(self, kind, figures, out)

    def figures(self, names: Sequence[str]) -> Mapping[str, Buffer]:
        """Declare transients float32 [M] for a commit rule to read."""
        return {name: self.g.buffer(name, (self.masked,), "float32") for name in names}

    def source(self, rows: Buffer) -> Buffer:
        """Return the rows of the hidden state that predict these rows: in shifted models the rows before them, unless
        packing has shifted them."""
        if not self.arch.shifted or self.phase.shifts(self.arch):
            return rows
        shifted: Buffer = self.g.add_op("shift_rows", rows, self.cu_seqlens, name="source_rows")
        return shifted

    def normed_rows(self, rows: Buffer, norm: Buffer, prefix: str = "") -> Buffer:
        """Register rms_norm(hidden[rows]); the norm is in place on the gathered rows."""
        g, found = self.g, self._rows(rows, prefix)
        with g.scope("head"):
            h: Buffer = g.add_op("rms_norm", found, norm, name=f"{prefix}normed", eps=self.arch.norm_eps)
        g.add_alias(h, found)
        return h
