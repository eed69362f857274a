"""FOCUS's options: which of a block's tokens a step computes beyond its first layers. Presets of readings of the paper.

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
"""More of them would keep any card as busy: whether eviction pays is the same for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction(Options):
    """How many tokens are kept, and which. The defaults are the paper's main text.

    Parameters
    ----------
    alpha
        Tokens kept for each that is expected to be decoded: at least 1.
    history
        What is expected: the mean over all steps of the request so far ("cumulative", equations 17 to 19), an exponential average
        over them ("ema", E.3), or the mean over steps of the "block" that decoded any (the implementation). At least 1.
    weight
        With "ema", how much of the average is the last step's; the paper does not say.
    threshold
        Tokens that are kept however many there are. "deviation": those whose importance has risen by at least the standard
        deviation over the positions that importance is measured over (equation 5). "mean": by at least the mean and one deviation,
        both over the masked tokens (E.2.2).
    importance
        "block": attention of all rows of the block to all its positions (equation 2). "masked": of its masked rows to these, as if
        they stood side by side (the implementation).
    pool
        Neighbouring scores of which the largest counts: odd.
    placeholders
        Masked tokens that are kept because they stand before masked ones that are: those "unprocessed" in the block so far (section
        4.2), or all (algorithm 1, line 18: "masked").
    first_step
        Of a block: it "evicts" (algorithm 1, line 9), or computes the block "whole" (ours). "prefill": it evicts, but for a block
        with tokens of the prompt, where it is the prefill. That computes the block whole, and later steps do not count it: neither
        what it has processed, nor what it has decoded, nor towards a block cache (the implementation).
    reach
        The keys of a block that kept rows see: up to the rightmost row that any step of the "block" has kept (equation 16), or up
        to the rightmost that this "step" keeps, and before the eviction up to the rightmost that it computes (the implementation).
    keep
        How many masked tokens are kept, beside the tokens that they need: in place of `alpha`, `history` and `threshold`, which say
        it where this is 0 (a baseline, table 3).
    rank
        Kept are the tokens whose "importance" has risen most, or as baselines (table 3) the ones at the "bottom", which have
        risen least, or the same number at "random": by the request's seed and number, the step and the position.
    requests
        How many requests are expected to share a step. A few rows take as long as one. If by the plan eviction saves no time for
        this number, it is left out, with the block cache: blocks are decoded whole, and exactly. 0: it is never left out. The
        expected number decides, not the number of live requests, so that a request's tokens do not depend on others.

    Raises
    ------
    UsageError
        A value that cannot be, in one line.

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
        """Return a value with its quotes, if it is text."""
        return repr(value)

    def within_block(self, block: int) -> Eviction:
        """Return what keeps the same tokens of blocks, by numbers that are no larger than there is use for.

        >>> found = Eviction(alpha=1e9, pool=10**12 + 1, keep=10**12, requests=10**9).within_block(32)
        >>> found.alpha, found.pool, found.keep, found.requests
        (32, 65, 32, 1024)
        """
        return replace(
            self, alpha=min(self.alpha, block), pool=min(self.pool, 2 * block + 1), keep=min(self.keep, block),
            requests=min(self.requests, MOST_REQUESTS),
        )  # fmt: skip

    def of_one_request(self) -> Eviction:
        """Return what leaves eviction out where it does not pay for one request, if `requests` is not given."""
        return self if self.requests else replace(self, requests=1)

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Check that tokens of a model can be evicted so; `dual`: of the active block, whose keys a dual cache keeps.

        Raises
        ------
        UsageError
            If it attends in both directions and there is no such cache, or has fewer than three layers.
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
"""By name: the paper's main text, and its public implementation; both with the paper's alpha (section 5.2)."""
