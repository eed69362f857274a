"""FOCUS's options: which tokens of a block are computed after its first two layers. Presets are readings of the paper.

A step of block diffusion computes every token of the block and decodes about a tenth of them. FOCUS (Liang et al., "DLLMs Know
How to Tame Their Compute Bound") drops, after two layers, tokens that are unlikely to be decoded. The paper's main text, its
appendix and its public implementation differ; each option names one reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias, get_args

from mosaic.errors import UnknownName, UsageError
from mosaic.models.policies.policy import Options, is_integer, is_number

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

History: TypeAlias = Literal["cumulative", "ema", "block"]
Threshold: TypeAlias = Literal["deviation", "mean"]
Importance: TypeAlias = Literal["block", "masked"]
Placeholders: TypeAlias = Literal["masked", "unprocessed"]
FirstStep: TypeAlias = Literal["evicts", "whole", "prefill"]
Reach: TypeAlias = Literal["block", "step"]
Rank: TypeAlias = Literal["importance", "bottom", "random"]

MOST_REQUESTS: Final = 1024
"""The largest expected number of requests; with more, eviction pays as with this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction(Options):
    """How many tokens are kept, and which. The defaults are the paper's main text.

    Parameters
    ----------
    alpha
        Tokens kept per expected decoded token: at least 1.
    history
        The expected number of decoded tokens, at least 1: the mean over all steps of the request so far ("cumulative",
        equations 17 to 19), an exponential average over them ("ema", E.3), or the mean over the steps of the "block"
        that decoded any (the implementation).
    weight
        With "ema", the weight of the last step; the paper gives no value.
    threshold
        Which tokens are kept beyond that number. "deviation": those whose importance rose by at least the standard
        deviation over the positions that importance is measured over (equation 5). "mean": by at least the mean plus
        one deviation, both over the masked tokens (E.2.2).
    importance
        "block": attention of all rows of the block to all its positions (equation 2). "masked": attention among its
        masked rows, as if they were adjacent (the implementation).
    pool
        Width of the max pooling over neighbouring scores: odd.
    placeholders
        Masked tokens that are kept because kept masked ones follow: those not yet computed in the block, "unprocessed"
        (section 4.2), or all (algorithm 1, line 18: "masked").
    first_step
        Of a block. It "evicts" (algorithm 1, line 9), or computes the block "whole" (ours). "prefill": it evicts,
        except in a block with tokens of the prompt, where it is the prefill. The prefill computes the block whole and
        does not count as a step: not for the processed positions, the decoded tokens or a block cache (the
        implementation).
    reach
        The keys of a block that kept rows see: up to the rightmost row that any step of the "block" has kept (equation
        16), or up to the rightmost that this "step" keeps, and before the eviction up to the rightmost that it computes
        (the implementation).
    keep
        How many masked tokens are kept, beside the tokens that they depend on. 0: `alpha`, `history` and `threshold`
        decide it. A baseline (table 3).
    rank
        Which tokens are kept: those with the largest rise of "importance"; or as baselines (table 3) those at the
        "bottom", with the smallest rise, or "random" ones, by the request's seed and number, the step and the position.
    requests
        Requests expected to share a step. If the plan predicts that eviction saves no time for this number, it is left
        out with the block cache: blocks are decoded whole, and exactly. 0: it is never left out. The expected number
        decides, not that of live requests, so that a request's tokens do not depend on others.

    Raises
    ------
    UsageError
        If a value is invalid; the message is one line.

    Examples
    --------
    >>> str(Eviction()), str(Eviction(alpha=1.2, history="ema"))
    ('focus', "eviction(alpha=1.2, history='ema')")
    """

    word: ClassVar[str] = "eviction"
    alpha: float = 1.5
    history: History = "cumulative"
    weight: float = 0.25
    threshold: Threshold = "deviation"
    importance: Importance = "block"
    pool: int = 3
    placeholders: Placeholders = "unprocessed"
    first_step: FirstStep = "evicts"
    reach: Reach = "block"
    keep: int = 0
    rank: Rank = "importance"
    requests: int = 0

    def __post_init__(self) -> None:
        alpha, weight, pool = self.alpha, self.weight, self.pool
        if not is_number(alpha) or not 1 <= alpha < math.inf:
            raise UsageError(f"eviction: alpha is {alpha!r}; it must be a number of at least 1.")
        if not is_number(weight) or not 0 < weight <= 1:
            raise UsageError(f"eviction: weight is {weight!r}; it must be a share above 0, at most 1.")
        if not is_integer(pool, 1) or pool % 2 == 0:
            raise UsageError(f"eviction: pool is {pool!r}; it must be an odd number of scores.")
        for name, what in (("keep", "tokens"), ("requests", "requests")):
            count = getattr(self, name)
            if not is_integer(count, 0):
                raise UsageError(f"eviction: {name} is {count!r}; it must be a number of {what}, or 0.")
        for name, options in (
            ("history", History), ("threshold", Threshold), ("importance", Importance), ("placeholders", Placeholders),
            ("first_step", FirstStep), ("reach", Reach), ("rank", Rank),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(options):
                raise UnknownName(f"eviction's {name}", getattr(self, name), get_args(options))

    @classmethod
    def presets(cls) -> Mapping[str, Eviction]:
        """Return `PRESETS`."""
        return PRESETS

    def shown(self, value: object) -> str:
        """Return a value, in quotes if it is text."""
        return repr(value)

    def within_block(self, block: int) -> Eviction:
        """Return options that keep the same tokens of blocks, with numbers no larger than useful.

        >>> found = Eviction(alpha=1e9, pool=10**12 + 1, keep=10**12, requests=10**9).within_block(32)
        >>> found.alpha, found.pool, found.keep, found.requests
        (32, 65, 32, 1024)
        """
        return replace(
            self, alpha=min(self.alpha, block), pool=min(self.pool, 2 * block + 1), keep=min(self.keep, block),
            requests=min(self.requests, MOST_REQUESTS),
        )  # fmt: skip

    def of_one_request(self) -> Eviction:
        """Return options that leave eviction out if it does not pay for one request, unless `requests` is given."""
        return self if self.requests else replace(self, requests=1)

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Check that the model supports eviction; `dual`: of the active block, whose keys a dual cache keeps.

        Raises
        ------
        UsageError
            If it is bidirectional without a dual cache, or has fewer than three layers.
        """
        if not arch.block and (arch.shifted or not dual):
            raise UsageError(
                "eviction: this model attends in both directions, so it has no blocks with keys of their own; token eviction is "
                "for block diffusion (SDAR, LLaDA2.0, Fast-dLLM v2), and on LLaDA for the active block of cache 'dual'."
            )
        if arch.layers < 3:
            raise UsageError(
                f"eviction: importance is compared between the first two layers, and the model's {arch.layers} leave none to "
                "save; use a model of at least 3."
            )


PRESETS: Final[Mapping[str, Eviction]] = {
    "focus": Eviction(),
    "focus-public": Eviction(
        history="block", threshold="mean", importance="masked", first_step="prefill", reach="step"
    ),
}
"""Presets: the paper's main text, and its public implementation; both with the paper's alpha (section 5.2)."""
