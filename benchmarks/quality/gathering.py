"""Long answers that depend on many places of a document at once, in the manner of RULER (Hsieh et al. 2024).

`listing`: all numbered values of a key, in order. `chain`: names, each the friend of the one before. `passage`: a named
passage, word for word. `frequent`: of every kind of word the most frequent ones, in order. A *source* is what a document
holds for them: pieces of text that stand anywhere in it, each whole, and the questions that they answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random
from typing import Final

from benchmarks.quality.items import Turn, pick
from benchmarks.quality.retrieval import draw_code, filler
from benchmarks.quality.split import held_out
from benchmarks.quality.vocabulary import CODES, KINDS, NAMES

__all__ = [
    "COUNTED", "LEAST_MENTIONS", "LONGEST_CHAIN", "LONGEST_PASSAGE", "LONGEST_SERIES", "RANKS", "Chain", "Passage", "Series",
    "Source", "Tally", "draw_chain", "draw_passage", "draw_series", "draw_sources", "draw_tally",
]  # fmt: skip

COUNTED: Final = tuple(kind for kind in KINDS if kind != "color")
"""Kinds whose words are counted; sentences that state nothing have colors."""
RANKS: Final = 6
"""Words asked for of each kind."""
LEAST_MENTIONS: Final = 30
"""Words of a kind that a document for `frequent` has at least."""
LONGEST_SERIES: Final = 28
LONGEST_CHAIN: Final = 60
"""Links: in evaluation each name has about six friends."""
LONGEST_PASSAGE: Final = 216
"""Tokens."""
SERIES_TOKENS, LINK_TOKENS, TITLE_TOKENS = 14, 7, 8
"""Of a sentence of a series at most, of a link, and of a passage's title and marks."""
LEAST_ROOM: Final = 40
DISTINCT: Final = (0, 1, 2, 4, 5, 7, 9, 11)
"""Forms of `filler` with names or several things: one of them is rarely in a document twice."""


@dataclass(frozen=True, slots=True)
class Series:
    """Numbered values of one key: " The code 3 of Anna is 4821."."""

    attribute: str
    name: str
    values: tuple[str, ...]

    @property
    def pieces(self) -> list[str]:
        """One sentence a value."""
        return [
            f" The {self.attribute} {number} of {self.name} is {value}." for number, value in enumerate(self.values, 1)
        ]

    def ask(self, first: int = 1, last: int | None = None) -> Turn:
        """Ask for values number `first` to `last`, both included; for all of them by default.

        >>> Series("pin", "Anna", ("4821", "0077")).ask().answer
        ' 1 4821, 2 0077'
        """
        last = last or len(self.values)
        asked = self.values[first - 1 : last]
        return Turn(
            task="listing",
            question=f" Write the {self.attribute} of {self.name}, {first} to {last}.",
            answer=",".join(f" {number} {value}" for number, value in enumerate(asked, first)),
            keys=tuple((self.attribute, self.name, value) for value in asked),
        )


def draw_series(rng: Random, attribute: str, name: str, count: int, *, evaluation: bool) -> Series:
    """Draw `count` different numbers of four digits, from their side of the split."""
    values: list[str] = []
    while len(values) < count:
        value = draw_code(rng, values)
        if value not in values and held_out(attribute, name, value) == evaluation:
            values.append(value)
    return Series(attribute, name, tuple(values))


@dataclass(frozen=True, slots=True)
class Chain:
    """Different names, each the friend of the one before: " The friend of Anna is Ben."."""

    names: tuple[str, ...]

    @property
    def pieces(self) -> list[str]:
        """One sentence a link."""
        return [f" The friend of {a} is {b}." for a, b in pairwise(self.names)]

    def ask(self, first: int = 0, last: int | None = None) -> Turn:
        """Ask for the names from `first` (not included) to `last`, counted from 0; for all of them by default.

        >>> Chain(("Anna", "Ben", "Clara")).ask().question
        ' Write the friend of Anna, the friend of that friend, and on to Clara.'
        """
        last = len(self.names) - 1 if last is None else last
        walked = self.names[first : last + 1]
        return Turn(
            task="chain",
            question=f" Write the friend of {walked[0]}, the friend of that friend, and on to {walked[-1]}.",
            answer=",".join(f" {name}" for name in walked[1:]),
            keys=tuple(("friend", a, b) for a, b in pairwise(walked)),
        )


def draw_chain(rng: Random, names: Collection[str], links: int, *, evaluation: bool) -> Chain:
    """Draw a chain over some of the names, every link from its side of the split.

    Raises
    ------
    ValueError
        If none of many walks had that many links.
    """
    for _ in range(1_000):
        left = sorted(names)
        rng.shuffle(left)
        walked = [left.pop()]
        while left and len(walked) <= links:
            onward = next((i for i, name in enumerate(left) if (name in _friends(walked[-1])) == evaluation), None)
            if onward is None:
                break
            left[onward], left[-1] = left[-1], left[onward]
            walked.append(left.pop())
        if len(walked) == links + 1:
            return Chain(tuple(walked))
    raise ValueError(f"no chain of {links} links over {len(names)} names.")


@cache
def _friends(name: str) -> frozenset[str]:
    """Names that are friends of `name` in evaluation only."""
    return frozenset(other for other in NAMES if held_out("friend", name, other))


@dataclass(frozen=True, slots=True)
class Passage:
    """A text between quotation marks, under a name."""

    name: str
    text: str

    @property
    def pieces(self) -> list[str]:
        """The one piece."""
        return [f' The story about {self.name}:"{self.text}"']

    def ask(self) -> Turn:
        """Ask for the text."""
        return Turn(
            task="passage",
            question=f" Write the story about {self.name}.",
            answer=self.text,
            keys=(("passage", self.name, self.text),),
        )


def draw_passage(rng: Random, name: str, length: Callable[[str], int], num_tokens: int, *, evaluation: bool) -> Passage:
    """Draw sentences of at most `num_tokens` tokens by `length`, from their side of the split; at least one."""
    while True:
        text, used = "", 0
        while True:
            sentence = filler(rng, pick(rng, DISTINCT))
            used += length(sentence)
            if text and used > num_tokens:
                break
            text += sentence
        if held_out("passage", name, text) == evaluation:
            return Passage(name, text)


@dataclass(frozen=True, slots=True)
class Tally:
    """Words to be counted: sentences of them, and the most frequent ones of every kind in order."""

    ranked: dict[str, tuple[str, ...]]
    pieces: list[str]

    def ask(self, kinds: Sequence[str]) -> Turn:
        """Ask for the words of some kinds, the most frequent first.

        >>> Tally({"pet": ("cat", "dog")}, []).ask(["pet"]).answer
        ' pet cat, dog.'
        """
        return Turn(
            task="frequent",
            question=f" Sort all {', '.join(kinds)}.",
            answer="".join(f" {kind} {', '.join(self.ranked[kind])}." for kind in kinds),
            keys=tuple(("frequent", kind, *self.ranked[kind]) for kind in kinds),
        )


def draw_tally(rng: Random, kinds: Sequence[str], mentions: int, *, evaluation: bool) -> Tally:
    """Draw about `mentions` words a kind: each of the `RANKS` first ones as often as the next and a quarter more, or so.

    Parameters
    ----------
    mentions
        At least `LEAST_MENTIONS`.
    """
    ranked: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    for kind in kinds:
        order = rng.sample(KINDS[kind], len(KINDS[kind]))
        while held_out("frequent", kind, *order[:RANKS]) != evaluation:
            rng.shuffle(order)
        ranked[kind] = tuple(order[:RANKS])
        for word, count in zip(order, _counts(rng, mentions, len(order)), strict=True):
            words += [word] * count
    rng.shuffle(words)
    pieces, start = [], 0
    while start < len(words):
        end = start + 3 + int(rng.random() * 5)
        pieces.append(f" {pick(rng, NAMES)} saw {' '.join(words[start:end])}.")
        start = end
    return Tally(ranked, pieces)


def _counts(rng: Random, mentions: int, num_words: int) -> list[int]:
    """How often each word occurs: falling for the first `RANKS`, at most half of the last one for the others."""
    ratio = rng.uniform(1.25, 1.5)
    weights = [ratio**-rank for rank in range(RANKS)]
    rest = weights[-1] * rng.uniform(0.2, 0.5)
    scale = mentions / (sum(weights) + rest * (num_words - RANKS))
    counts = [int(rest * scale)] * (num_words - RANKS)
    for weight in reversed(weights):
        counts.insert(0, max(round(weight * scale), counts[0] + 1))
    return counts


Source = Series | Chain | Passage


def draw_sources(rng: Random, room: int, length: Callable[[str], int], taken: Sequence[Source] = ()) -> list[Source]:
    """Draw sources for one document, from the training side of the split.

    No question has two answers: no key has two series, no name two friends or two passages.

    Parameters
    ----------
    room
        Tokens, by `length`, that their pieces take at most; fewer than `LEAST_ROOM` are left over.
    taken
        What the document holds already.
    """
    found = list(taken)
    tasks = rng.sample(("listing", "chain", "chain", "passage"), 1 + int(rng.random() * 3))
    while room >= LEAST_ROOM and tasks:
        task = pick(rng, tasks)
        size = min(room, int(LEAST_ROOM * 10 ** rng.random()))
        made = _draw_source(rng, task, size, length, found)
        if made is None:
            tasks.remove(task)
        else:
            found.append(made)
            room -= sum(map(length, made.pieces))
    return found[len(taken) :]


def _draw_source(
    rng: Random, task: str, size: int, length: Callable[[str], int], beside: Sequence[Source]
) -> Source | None:
    """One of about `size` tokens and never more; None where the names are used up."""
    if task == "listing":
        series = [source for source in beside if isinstance(source, Series)]
        like = pick(rng, series) if series and rng.random() < 0.7 else None
        attribute = like.attribute if like and rng.random() < 0.5 else pick(rng, CODES)
        name = like.name if like and attribute != like.attribute else pick(rng, NAMES)
        if any((source.attribute, source.name) == (attribute, name) for source in series):
            return None
        return draw_series(rng, attribute, name, min(LONGEST_SERIES, size // SERIES_TOKENS), evaluation=False)
    if task == "chain":
        used = {name for source in beside if isinstance(source, Chain) for name in source.names}
        links = min(LONGEST_CHAIN, size // LINK_TOKENS)
        free = [name for name in NAMES if name not in used]
        return draw_chain(rng, free, links, evaluation=False) if len(free) > links + 8 else None
    titles = {source.name for source in beside if isinstance(source, Passage)}
    name = pick(rng, NAMES)
    if name in titles:
        return None
    return draw_passage(rng, name, length, min(LONGEST_PASSAGE, size - TITLE_TOKENS), evaluation=False)
