"""Requests like those of dLLM-Serve's workloads: lengths and arrivals, the same for every system of a seed.

The data sets themselves are not here. Lengths are drawn evenly in their logarithms within the ranges of the paper's figure 7;
LiveBench's coding tasks are long, summaries (OSC) short, and BurstGPT has everything and comes in bursts.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from itertools import count, islice
from statistics import fmean
from typing import Any, Final, NamedTuple

__all__ = ["BLOCK", "KINDS", "LONGEST", "SHORTEST", "Asked", "Kind", "described", "trace"]

BLOCK: Final = 32
"""Tokens of a block; answers are whole blocks, and each step decides one token."""


class Kind(NamedTuple):
    """A kind of traffic: the fewest and the most tokens of prompts and answers, and the shape of the gamma distribution of the
    times between arrivals; 1 is a Poisson process, and at less requests come in bursts."""

    prompts: tuple[int, int]
    answers: tuple[int, int]
    shape: float = 1.0


KINDS: Final[Mapping[str, Kind]] = {
    "livebench": Kind((300, 600), (256, 512)),
    "osc": Kind((200, 500), (128, 256)),
    "burst": Kind((100, 600), (128, 512), shape=0.5),
}
_DESCRIBED: Final = 1000


class Asked(NamedTuple):
    """A request: its place, when it comes in seconds at one request a second on average, and tokens of prompt and answer."""

    number: int
    at_s: float
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        """Positions of its canvas."""
        return self.prompt + self.answer


LONGEST: Final = Asked(
    0, 0.0, max(kind.prompts[1] for kind in KINDS.values()), max(kind.answers[1] for kind in KINDS.values())
)
"""The longest request of any kind."""
SHORTEST: Final = Asked(
    0, 0.0, min(kind.prompts[0] for kind in KINDS.values()), min(kind.answers[0] for kind in KINDS.values())
)
"""The shortest one."""


def trace(kind: Kind, seed: int) -> Iterator[Asked]:
    """Draw requests without end.

    >>> [one.prompt for one in islice(trace(KINDS["osc"], 0), 3)] == [one.prompt for one in islice(trace(KINDS["osc"], 0), 3)]
    True
    """
    rng, at_s = random.Random(seed), 0.0
    for number in count():
        at_s += rng.gammavariate(kind.shape, 1 / kind.shape)
        prompt, answer = (round(math.exp(rng.uniform(*map(math.log, ends)))) for ends in (kind.prompts, kind.answers))
        yield Asked(number, at_s, prompt, max(round(answer / BLOCK), 1) * BLOCK)


def described(kind: Kind, seed: int) -> dict[str, Any]:
    """Return what a record says of a trace, by its first requests: a digest, by which runs show that theirs was the same, and the
    mean tokens of prompts and answers."""
    first = [*islice(trace(kind, seed), _DESCRIBED)]
    return {
        "digest": hashlib.sha1(repr(first).encode(), usedforsecurity=False).hexdigest()[:16],
        "mean_prompt": fmean(one.prompt for one in first), "mean_answer": fmean(one.answer for one in first),
    }  # fmt: skip
