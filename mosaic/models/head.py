"""The end of a step: the rows that are unembedded, their statistics or samples, and which of them are committed.

Legend: M rows, R rows whose logits are returned, B sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mosaic.models.architecture import Architecture
from mosaic.models.phase import Phase
from mosaic.models.residency import Residency
from mosaic.registrar.graph import Buffer, Graph

__all__ = ["Head"]

LOGITS_TILE: Final = 64
STATISTICS: Final = ("maximum", "second", "logsumexp", "entropy")


class Head:
    """Registers the head of a phase.

    Parameters
    ----------
    hidden
        The residual stream [T, D] after the last layer.
    cu_seqlens
        int32 [B + 1].
    """

    def __init__(
        self, g: Graph, arch: Architecture, phase: Phase, residency: Residency, *, hidden: Buffer, cu_seqlens: Buffer
    ) -> None:
        self.g, self.arch, self.phase, self.residency = g, arch, phase, residency
        self.hidden, self.cu_seqlens = hidden, cu_seqlens
        self.masked = g.dim("masked", at_most="tokens")

    @staticmethod
    def way(g: Graph, phase: Phase) -> str:
        """Declare the choice between whole rows of logits, by chunks, and an unembedding fused with what reads them."""
        if phase.head == "none":
            return ""
        return g.choice("head", ("logits",) if phase.head == "nucleus" else ("logits", "fused"))

    def register(self, weight: Buffer, way: str) -> None:
        """Register all of it; `weight` [V, D] is the head's."""
        g, arch, phase = self.g, self.arch, self.phase
        norm = self.declare(g, arch)
        rows = g.input("rows", (self.masked,), "int64")
        if phase.noisy:
            self.keys = g.input("keys", (self.masked,), "int64")
        if phase.head in ("sample", "nucleus"):
            self.temperature = g.input("temperature", (1,), "float32")
        if phase.head == "nucleus":
            self.top_p, self.top_k = g.input("top_p", (1,), "float32"), g.input("top_k", (1,), "int32")
        token, scores = self.outputs()
        self.residency.arrive(streamed=self.residency.streams_head)
        source = self.source(rows)
        guided = self.source(g.input("unconditional_rows", (self.masked,), "int64")) if phase.guided else None
        guidance = g.input("guidance", (1,), "float32") if phase.guided else None
        with g.scope("head"), g.chunk("logits", over=self.masked, tile=LOGITS_TILE):
            h = self.normed_rows(source, norm)
            if guided is not None:
                other = self.normed_rows(guided, norm, "unconditional_")
                g.add_op("guide", h, other, guidance, name="guide")
            self.unembed(h, weight, way, (token, *scores))
        if phase.rule:
            self.choose(token, scores)
        else:
            confidence = g.output("confidence", (self.masked,), "float32")
            g.add_op("confidence", scores[0], scores[2], out=confidence, name="confidence_of")
        if phase.logits:
            self.return_logits(norm, weight)

    def outputs(self) -> tuple[Buffer, Sequence[Buffer]]:
        """The token of each row and the float32 figures beside it: results, or what the choice of rows reads."""
        g, phase, shape = self.g, self.phase, (self.masked,)
        if not phase.rule:
            scores = [g.output(name, shape, "float32") for name in STATISTICS]
            return g.output("token", shape, "int64"), scores
        names: tuple[str, ...] = STATISTICS
        if phase.head == "nucleus":
            names = ("probability", "margin", "negative_entropy")
        elif phase.head == "sample":
            g.buffer("most_likely", shape, "int64")
            names = (*STATISTICS, "sample_logit")
        return g.output("token", shape, "int64"), [g.buffer(name, shape, "float32") for name in names]

    def unembed(self, h: Buffer, weight: Buffer, way: str, out: tuple[Buffer, ...]) -> None:
        """Statistics, samples or both of the rows of h [C, D]."""
        g, head = self.g, self.phase.head
        if head == "nucleus":
            logits = g.add_op("linear", h, weight, name="logits")
            g.add_op(
                "row_nucleus", logits, self.keys, self.temperature, self.top_p, self.top_k, out=out, name="nucleus"
            )
            return
        more: tuple[Buffer, ...] = ()
        if head == "sample":
            token, *scores, sample_logit = out
            more, out = (self.keys, self.temperature), (g["most_likely"], *scores, token, sample_logit)
        what = "sample" if head == "sample" else "stats"
        if way == "fused":
            g.add_op(f"unembed_{what}", h, weight, *more, out=out)
        else:
            g.add_op(f"row_{what}", g.add_op("linear", h, weight, name="logits"), *more, out=out)

    def choose(self, token: Buffer, scores: Sequence[Buffer]) -> None:
        """Score the rows, and commit those that the rule takes."""
        g, phase, shape = self.g, self.phase, (self.masked,)
        seqs = g.dim("seqs")
        score = self.score(scores, g.output("score", shape, "float32"))
        if phase.perturb:
            g.add_op("perturb_score", score, self.keys, g.input("score_temperature", (1,), "float32"), name="perturb")
        edit = g.input("edit_threshold", (seqs,), "float32") if phase.rule == "edit" else None
        g.add_op(
            "transfer", token, score, g.input("current", shape, "int64"), g.input("cu_rows", (seqs + 1,), "int32"),
            g.input("quota", (seqs,), "int32"), g.input("threshold", (seqs,), "float32"), edit,
            out=(g.output("chosen", shape, "int64"), g.output("committed", shape, "uint8")), name="transfer",
            rule=phase.rule, mask_id=self.arch.mask_token_id,
        )  # fmt: skip

    def score(self, scores: Sequence[Buffer], out: Buffer) -> Buffer:
        """The float32 number of each row by which the rule goes."""
        g, kind = self.g, self.phase.score
        keys = self.keys if kind == "random" else None
        if self.phase.head == "nucleus":
            figures = dict(zip(("confidence", "margin", "entropy"), scores, strict=True))
            if kind in figures:
                g.add_op("copy", figures[kind], out=out, name="score_of")
                return out
            scores = [scores[0]] * 4
        *statistics, logit = scores if self.phase.head == "sample" else (*scores[:4], scores[0])
        g.add_op("row_score", *statistics, logit, keys, out=out, name="score_of", kind=kind)
        return out

    def return_logits(self, norm: Buffer, weight: Buffer) -> None:
        """Whole rows of logits [R, V] of the rows asked for, as an output in the plan."""
        g, arch = self.g, self.arch
        returned = g.dim("logit_rows", at_most="tokens")
        chosen = g.input("logit_rows", (returned,), "int64")
        with g.scope("returned"):
            h = self.normed_rows(self.source(chosen), norm)
        out = g.output("logits", (returned, arch.vocabulary), arch.dtype)
        g.add_op("linear", h, weight, out=out, name="returned_logits")

    def source(self, rows: Buffer) -> Buffer:
        """The rows of the hidden state that predict these rows: those before them in shifted models. Where rows are chosen
        by a rule, the caller has shifted them: the first position after a window may be among them."""
        if not self.arch.shifted or self.phase.rule:
            return rows
        shifted: Buffer = self.g.add_op("shift_rows", rows, self.cu_seqlens, name="source_rows")
        return shifted

    def normed_rows(self, rows: Buffer, norm: Buffer, prefix: str = "") -> Buffer:
        """rms_norm(hidden[rows]), normalised in place of the gathered rows."""
        g = self.g
        gathered = g.add_op("gather_rows", self.hidden, rows, name=f"{prefix}gathered")
        h: Buffer = g.add_op("rms_norm", gathered, norm, name=f"{prefix}normed", eps=self.arch.norm_eps)
        g.add_alias(h, gathered)
        return h

    @staticmethod
    def declare(g: Graph, arch: Architecture) -> Buffer:
        """The last norm's weight, which phases without a head have too, where those with one have it."""
        return g.weight("final_norm", (arch.hidden,), arch.dtype, tensor=arch.names.final_norm)
