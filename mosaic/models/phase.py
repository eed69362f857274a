"""What one kind of step does besides running the layers. A model has one graph per phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from mosaic.errors import UnknownName, UsageError

__all__ = ["FULL_STEP", "Head", "Phase", "Rule", "Score"]

Head: TypeAlias = Literal["none", "statistics", "sample", "nucleus"]
Score: TypeAlias = Literal["", "confidence", "margin", "entropy", "random", "sequential"]
Rule: TypeAlias = Literal["", "top", "threshold", "dynamic", "above", "factor", "edit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A kind of step.

    Parameters
    ----------
    cached
        Keys and values are written to, and read from, the state `kv`, which outlives the step.
    head
        What is computed of the rows that are unembedded: nothing (`none`), the argmax and its statistics, a sample at a
        temperature as well, or (`nucleus`) a sample of what top-p and top-k keep.
    score
        How a row's token is scored; nothing: the step returns the statistics.
    perturb
        Add Gumbel noise to the scores, so that the highest are a draw without replacement.
    rule
        Which rows are committed by their scores; it comes with `score`.
    guided
        Classifier-free guidance: a second set of sequences is computed, without the prompt.
    logits
        Return the logits of chosen rows as well.
    held
        Other sequences' keys and values stay in the state `kv` meanwhile, which the step does not touch; cached phases
        count them anyway.

    Examples
    --------
    >>> Phase(cached=True, head="none").name, Phase(cached=True, score="confidence", rule="dynamic").name
    ('commit', 'denoise')
    """

    cached: bool = False
    head: Head = "statistics"
    score: Score = ""
    perturb: bool = False
    rule: Rule = ""
    guided: bool = False
    logits: bool = False
    held: bool = False

    def __post_init__(self) -> None:
        for what, value, options in (
            ("head", self.head, get_args(Head)),
            ("score", self.score, get_args(Score)),
            ("rule", self.rule, get_args(Rule)),
        ):
            if value not in options:
                raise UnknownName(what, value, options)
        if bool(self.score) != bool(self.rule):
            raise UsageError(f"a phase has a score and a rule, or neither; got '{self.score}' and '{self.rule}'.")
        if self.head == "none" and (self.score or self.guided or self.logits or not self.cached):
            raise UsageError("a phase without head only fills the cache; it is cached, and neither scores nor returns.")
        if self.head in ("sample", "nucleus") and not self.score:
            raise UsageError(f"a phase that samples ('{self.head}') chooses among its rows; give a score and a rule.")
        if self.cached and self.held:
            raise UsageError("a cached phase has the state itself; the rows that others hold are among its own.")
        if self.cached and self.guided:
            raise UsageError("guidance computes whole sequences; it has no cached phases.")

    @property
    def name(self) -> str:
        """The phase's label: `full_step`, `denoise` (over cached keys), or `commit` (no head; `prefill` is a long one)."""
        if not self.cached:
            return "full_step"
        return "commit" if self.head == "none" else "denoise"

    @property
    def noisy(self) -> bool:
        """Whether the step takes random keys."""
        return self.head in ("sample", "nucleus") or self.score == "random" or self.perturb


FULL_STEP: Final = Phase()
"""The whole sequence, statistics of the masked rows: what calling a model runs."""
