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
from typing import Final, NamedTuple

__all__ = ["BLOCK", "KINDS", "LONGEST", "Asked", "Kind", "digest_of", "trace"]

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
LONGEST: Final = max(kind.prompts[1] + kind.answers[1] for kind in KINDS.values())
_DIGESTED: Final = 1000


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


def digest_of(kind: Kind, seed: int) -> str:
    """Return a digest of a trace's first requests, by which runs show that theirs was the same."""
    return hashlib.sha1(repr([*islice(trace(kind, seed), _DIGESTED)]).encode(), usedforsecurity=False).hexdigest()[:16]
