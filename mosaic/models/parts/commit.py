"""Commit rules: how rows are scored, and which of them are committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from mosaic.errors import UnknownName
from mosaic.models.inputs import ROW_BOUNDS, Input
from mosaic.models.parts.part import Part, ResultPer

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.step_graph import Ending
    from mosaic.registrar.graph import Buffer

Score: TypeAlias = Literal["confidence", "margin", "entropy", "random", "sequential"]
Rule: TypeAlias = Literal["top", "threshold", "dynamic", "above", "factor", "edit"]


class CommitRule(Part):
    """Decides which rows are committed: outputs score float32, chosen int64 and committed uint8, [M] each."""

    __slots__ = ()

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The head's token of each row, and the rule's outputs."""
        return {"token": "row", "score": "row", "committed": "row", "chosen": "row"}

    @property
    def covering(self) -> CommitRule:
        """A rule whose steps also serve requests of this one, if they are of a table."""
        return self

    def register(self, end: Ending, token: Buffer, figures: Mapping[str, Buffer]) -> None:
        """Register the rule for the head's tokens and scores."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(CommitRule):
    """Score every row, and commit rows by a rule.

    Parameters
    ----------
    score
        How a row's token is scored.
    rule
        Which rows are committed: see the operator `transfer`.
    perturb
        Add Gumbel noise to the scores: the highest ones are then a sample without replacement.
    """

    score: Score
    rule: Rule
    perturb: bool = False

    def __post_init__(self) -> None:
        for what, value, options in (("score", self.score, get_args(Score)), ("rule", self.rule, get_args(Rule))):
            if value not in options:
                raise UnknownName(what, value, options)

    @property
    def noisy(self) -> bool:
        """Whether it takes random keys: for random scores, or noise on scores."""
        return self.score == "random" or self.perturb

    @property
    def covering(self) -> Commit:
        """Editing, of the dynamic rule: it does the same where all rows are open."""
        return replace(self, rule="edit") if self.rule == "dynamic" else self

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return what stands in the rows, and what the rule goes by."""
        perturb = (Input(name="score_temperature", dtype="float32", per="row"),) if self.perturb else ()
        edit = (Input(name="edit_threshold", dtype="float32", per="sequence"),) if self.rule == "edit" else ()
        return (
            *perturb,
            *edit,
            Input(name="current", dtype="int64", per="row"),
            ROW_BOUNDS,
            Input(name="quota", dtype="int32", per="sequence"),
            Input(name="threshold", dtype="float32", per="sequence"),
        )  # fmt: skip

    def register(self, end: Ending, token: Buffer, figures: Mapping[str, Buffer]) -> None:
        """Score the rows, and commit those that the rule chooses."""
        g, inputs, shape = end.g, end.inputs, (end.masked,)
        score = end.score(self.score, figures, g.output("score", shape, "float32"))
        if self.perturb:
            g.add_op("perturb_score", score, inputs["keys"], inputs["score_temperature"], name="perturb")
        edit = inputs["edit_threshold"] if self.rule == "edit" else None
        g.add_op(
            "transfer", token, score, inputs["current"], inputs["cu_rows"], inputs["quota"], inputs["threshold"], edit,
            out=(g.output("chosen", shape, "int64"), g.output("committed", shape, "uint8")), name="transfer",
            rule=self.rule, mask_id=end.open_id,
        )  # fmt: skip
