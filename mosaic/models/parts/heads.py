"""Heads: the results for unembedded rows.

Requests whose heads differ share a step: its head covers theirs, and each row has the token and the scores of its request's own
head. Legend: M rows, C rows of a chunk, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.parts.part import Part

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.step_graph import Ending
    from mosaic.registrar.graph import Buffer

FIGURES: Final = ("maximum", "second", "logsumexp", "entropy")
SAMPLED: Final = (*FIGURES, "sample_logit")
CUT: Final = ("probability", "margin", "negative_entropy")
CUT_SCORES: Final = dict(zip(("confidence", "margin", "entropy"), CUT, strict=True))


def _keys(request: Any) -> Any:
    others = (part for part in request.phase.parts if not isinstance(part, Head))
    if request.keys is None and not request.temperature and not any(part.noisy for part in others):
        return request.rows.new_zeros(request.rows.shape)
    if request.keys is None or request.keys.shape != request.rows.shape:
        raise UsageError("a phase that draws at random needs a key for every row.")
    return request.keys


NOISE: Final = Input(name="keys", dtype="int64", per="row", value=_keys)
"""Random keys of the rows, for parts that are `noisy`. A greedy request needs none for a head."""
TEMPERATURE: Final = Input(name="temperature", dtype="float32", per="row")
LIMITS: Final = (Input(name="top_p", dtype="float32", per="row"), Input(name="top_k", dtype="int32", per="row"))


class Head(Part):
    """The results for unembedded rows.

    Attributes
    ----------
    name
        Its name in options.
    decides
        Whether it has rows.
    samples
        Whether tokens are sampled: such a head needs a commit rule.
    cuts
        Whether its statistics are those of the tokens that top-p and top-k keep, at the temperature.
    ways
        Options of the choice `head`: logits of whole rows by chunks, or an unembedding fused with their reduction.
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    decides: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    cuts: ClassVar[bool] = False
    ways: ClassVar[Sequence[str]] = ("logits", "fused")

    @property
    def noisy(self) -> bool:
        """Samples are drawn."""
        return self.samples

    @property
    def covering(self) -> Head:
        """The least head whose steps serve requests of this one as well, and of others; itself if there is none."""
        return _COVERING.get(self, self)

    def outputs(self, end: Ending) -> tuple[Buffer, Mapping[str, Buffer]]:
        """Declare the token of each row int64 [M], and the head's float32 [M] statistics."""
        raise NotImplementedError

    def unembed(
        self, end: Ending, h: Buffer, weight: Buffer, way: str, token: Buffer, figures: Mapping[str, Buffer]
    ) -> None:
        """Compute token and statistics of the rows of h [C, D]."""
        raise NotImplementedError

    def score(self, end: Ending, kind: str, figures: Mapping[str, Buffer], out: Buffer) -> Buffer:
        """Write each row's float32 [M] number for the commit rule."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class NoHead(Head):
    """Nothing: the step only fills the cache."""

    name: ClassVar[str] = "none"
    decides: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Statistics(Head):
    """The most likely token, and the statistics of its row; they are results if nothing is committed."""

    name: ClassVar[str] = "statistics"

    def outputs(self, end: Ending) -> tuple[Buffer, Mapping[str, Buffer]]:
        """Declare the statistics: results, or inputs of a commit rule."""
        if not end.commits:
            figures = {name: end.g.output(name, (end.masked,), "float32") for name in FIGURES}
            return end.token(), figures
        return end.token(), end.figures(FIGURES)

    def unembed(
        self, end: Ending, h: Buffer, weight: Buffer, way: str, token: Buffer, figures: Mapping[str, Buffer]
    ) -> None:
        """Compute them from logits of whole rows, or fused."""
        _unembed(end, "stats", h, weight, way, (), (token, *figures.values()))

    def score(self, end: Ending, kind: str, figures: Mapping[str, Buffer], out: Buffer) -> Buffer:
        """Score by the maximum, which is the logit of the token."""
        return _row_score(end, kind, [*figures.values(), figures["maximum"]], out)


@dataclass(frozen=True, slots=True)
class Sample(Head):
    """A sample at a temperature, and the statistics of its row at temperature 1."""

    name: ClassVar[str] = "sample"
    samples: ClassVar[bool] = True

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the temperature."""
        return (TEMPERATURE,)

    def outputs(self, end: Ending) -> tuple[Buffer, Mapping[str, Buffer]]:
        """Declare the statistics, and the logit of the sample."""
        end.g.buffer("most_likely", (end.masked,), "int64")
        return end.token(), end.figures(SAMPLED)

    def unembed(
        self, end: Ending, h: Buffer, weight: Buffer, way: str, token: Buffer, figures: Mapping[str, Buffer]
    ) -> None:
        """Compute them from logits of whole rows, or fused."""
        *statistics, logit = figures.values()
        more = end.inputs["keys"], end.inputs["temperature"]
        _unembed(end, "sample", h, weight, way, more, (end.g["most_likely"], *statistics, token, logit))

    def score(self, end: Ending, kind: str, figures: Mapping[str, Buffer], out: Buffer) -> Buffer:
        """Score by the logit of the sample."""
        return _row_score(end, kind, list(figures.values()), out)


@dataclass(frozen=True, slots=True)
class Nucleus(Head):
    """A sample at a temperature of the tokens in top-p and top-k, and statistics of these tokens."""

    name: ClassVar[str] = "nucleus"
    samples: ClassVar[bool] = True
    cuts: ClassVar[bool] = True
    ways: ClassVar[Sequence[str]] = ("logits",)

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return temperature, top-p and top-k."""
        return TEMPERATURE, *LIMITS

    def outputs(self, end: Ending) -> tuple[Buffer, Mapping[str, Buffer]]:
        """Declare scores of each kind."""
        return end.token(), end.figures(CUT)

    def unembed(
        self, end: Ending, h: Buffer, weight: Buffer, way: str, token: Buffer, figures: Mapping[str, Buffer]
    ) -> None:
        """Compute them from logits of whole rows."""
        logits = end.g.add_op("linear", h, weight, name="logits")
        settings = (end.inputs[name] for name in ("keys", "temperature", "top_p", "top_k"))
        end.g.add_op("row_nucleus", logits, *settings, out=(token, *figures.values()), name="nucleus")

    def score(self, end: Ending, kind: str, figures: Mapping[str, Buffer], out: Buffer) -> Buffer:
        """Score by the statistic of this kind; other kinds do not depend on logits."""
        if kind in CUT_SCORES:
            end.g.add_op("copy", figures[CUT_SCORES[kind]], out=out, name="score_of")
            return out
        return _row_score(end, kind, [figures["probability"]] * 5, out)


@dataclass(frozen=True, slots=True)
class Each(Head):
    """What a request's own head computes, `StepRequest.head`: for steps that requests of several heads share."""

    name: ClassVar[str] = "each"
    samples: ClassVar[bool] = True
    ways: ClassVar[Sequence[str]] = ("logits",)

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return temperature, top-p and top-k, and which rows these cut."""
        cuts = Input(name="cuts", dtype="uint8", per="row", value=lambda request: request.head.cuts)
        return TEMPERATURE, *LIMITS, cuts

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that a request has a head of its own."""
        if request.head is None:
            raise UsageError("a step that requests of several heads share takes each one's own: give `head`.")

    def outputs(self, end: Ending) -> tuple[Buffer, Mapping[str, Buffer]]:
        """Declare what a sample has, and beside it what a nucleus has."""
        token, figures = SAMPLE.outputs(end)
        end.g.buffer("cut_token", (end.masked,), "int64")
        return token, {**figures, **end.figures(CUT)}

    def unembed(
        self, end: Ending, h: Buffer, weight: Buffer, way: str, token: Buffer, figures: Mapping[str, Buffer]
    ) -> None:
        """Compute samples of all rows from whole rows of logits, and of those that are cut the nuclei."""
        g, logits, cut = end.g, end.g.add_op("linear", h, weight, name="logits"), end.g["cut_token"]
        *statistics, logit = (figures[name] for name in SAMPLED)
        keys, temperature, top_p, top_k, cuts = (
            end.inputs[name] for name in ("keys", "temperature", "top_p", "top_k", "cuts")
        )
        samples, nuclei = (g["most_likely"], *statistics, token, logit), (cut, *[figures[name] for name in CUT])
        g.add_op("row_sample", logits, keys, temperature, out=samples, name="sample")
        g.add_op("row_nucleus", logits, keys, temperature, top_p, top_k, cuts, out=nuclei, name="nucleus")
        g.add_op("replace_rows", token, cut, cuts, name="token_of")

    def score(self, end: Ending, kind: str, figures: Mapping[str, Buffer], out: Buffer) -> Buffer:
        """Score by the logit of the sample, and rows that are cut by the figure of this kind."""
        _row_score(end, kind, [figures[name] for name in SAMPLED], out)
        if kind in CUT_SCORES:
            end.g.add_op("replace_rows", out, figures[CUT_SCORES[kind]], end.inputs["cuts"], name="own_score")
        return out


def _unembed(
    end: Ending, what: str, h: Buffer, weight: Buffer, way: str, more: Sequence[Buffer], out: tuple[Buffer, ...]
) -> None:
    g = end.g
    if way == "fused":
        g.add_op(f"unembed_{what}", h, weight, *more, out=out)
    else:
        g.add_op(f"row_{what}", g.add_op("linear", h, weight, name="logits"), *more, out=out)


def _row_score(end: Ending, kind: str, figures: Sequence[Buffer], out: Buffer) -> Buffer:
    keys = end.inputs["keys"] if kind == "random" else None
    end.g.add_op("row_score", *figures, keys, out=out, name="score_of", kind=kind)
    return out


NO_HEAD: Final = NoHead()
STATISTICS: Final = Statistics()
SAMPLE: Final = Sample()
NUCLEUS: Final = Nucleus()
EACH: Final = Each()
_COVERING: Final[Mapping[Head, Head]] = {STATISTICS: SAMPLE, SAMPLE: EACH, NUCLEUS: EACH}
