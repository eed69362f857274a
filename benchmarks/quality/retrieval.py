"""Retrieval: facts at any depth of a document, asked for afterwards.

A fact is one sentence, " The code of Anna is 4821.". Distractors are the other facts: the same name with another
attribute, the same attribute of another name, values that differ in one digit. Between them lie sentences about the
same people and places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.quality.items import Turn, pick
from benchmarks.quality.split import held_out
from benchmarks.quality.stories import pronoun
from benchmarks.quality.vocabulary import ADJECTIVES, CODES, FEELINGS, ITEMS, KINDS, NAMES, PLACES, vocabulary

__all__ = ["Document", "Fact", "ask", "document", "draw_code", "draw_facts", "filler", "scatter"]

ATTRIBUTES: Final = (*CODES, *KINDS)
NEAR_MISSES: Final = 0.25
"""Share of numbers that differ from another of the document in one digit."""
TRIES: Final = 64


@dataclass(frozen=True, slots=True)
class Fact:
    """A document's statement about a person."""

    attribute: str
    name: str
    value: str

    @property
    def sentence(self) -> str:
        """The fact as the document states it."""
        return f" The {self.attribute} of {self.name} is {self.value}."

    @property
    def key(self) -> tuple[str, str, str]:
        """The key for the split."""
        return self.attribute, self.name, self.value


def draw_facts(rng: Random, count: int, accept: Callable[[int, Fact], bool]) -> list[Fact]:
    """Draw facts of different (name, attribute), few enough names that most share theirs with another fact.

    Parameters
    ----------
    count
        At most `len(NAMES) * len(ATTRIBUTES)`.
    accept
        Whether a value may stand as fact number i; it is drawn again otherwise, after `TRIES` values with its key.
    """
    fewest = 1 + -(-count // len(ATTRIBUTES))
    people = rng.sample(NAMES, min(len(NAMES), max(fewest, round(count / rng.uniform(1, 6)))))
    keys = list(range(len(people) * len(ATTRIBUTES)))
    rng.shuffle(keys)
    facts: list[Fact] = []
    codes: list[str] = []
    while len(facts) < count:
        person, kind = divmod(keys.pop(), len(ATTRIBUTES))
        name, attribute = people[person], ATTRIBUTES[kind]
        fact = _draw_fact(rng, attribute, name, codes, lambda fact: accept(len(facts), fact))
        if fact is not None:
            facts.append(fact)
            if attribute not in KINDS:
                codes.append(fact.value)
    return facts


def _draw_fact(rng: Random, attribute: str, name: str, codes: list[str], accept: Callable[[Fact], bool]) -> Fact | None:
    """A fact with a value that is accepted; None where none seems to be (few words, none of them held out)."""
    for _ in range(TRIES):
        fact = Fact(attribute, name, _value(rng, attribute, codes))
        if accept(fact):
            return fact
    return None


def _value(rng: Random, attribute: str, codes: list[str]) -> str:
    return pick(rng, KINDS[attribute]) if attribute in KINDS else draw_code(rng, codes)


def draw_code(rng: Random, codes: Sequence[str]) -> str:
    """Return a number of four digits; a share of `NEAR_MISSES` differs from one of `codes` in one digit."""
    if not codes or rng.random() > NEAR_MISSES:
        return f"{int(rng.random() * 10_000):04d}"
    near, place = pick(rng, codes), int(rng.random() * 4)
    return near[:place] + str((int(near[place]) + 1 + int(rng.random() * 9)) % 10) + near[place + 1 :]


def filler(rng: Random, form: int | None = None) -> str:
    """Return a sentence that states no fact, of any form or of one of the twelve."""
    hero, friend = pick(rng, NAMES), pick(rng, NAMES)
    he, his = pronoun(hero)
    place, item, adjective, feeling = pick(rng, PLACES), pick(rng, ITEMS), pick(rng, ADJECTIVES), pick(rng, FEELINGS)
    match int(rng.random() * 12) if form is None else form:
        case 0:
            return f" {hero} walked to the {place} with {friend}."
        case 1:
            return f" {hero} found the {adjective} {item} near the {place}."
        case 2:
            return f" {friend} gave {hero} the {item} that {he} had lost."
        case 3:
            return f" The birds sang over the {place} all day."
        case 4:
            return f" {hero} was {feeling} and talked quietly with {friend}."
        case 5:
            return f" Then {hero} hid {his} {item} under the tree."
        case 6:
            return f" The road to the {place} was long and cold."
        case 7:
            return f" {hero} asked {friend} where the {item} was."
        case 8:
            return f" Late that evening {he} walked back to the {place}."
        case 9:
            return f" The {adjective} {item} of {hero} is in the {place}."
        case 10:
            return f" The children played in the {place} until the rain came."
        case _:
            return f" {hero} and {friend} carried the {item} over the bridge."


@dataclass(frozen=True, slots=True)
class Document:
    """Sentences as token ids, in order, and where each fact begins."""

    ids: list[int]
    facts: list[Fact]
    starts: list[int]


def document(rng: Random, facts: list[Fact], num_tokens: int, *, depth: float | None = None) -> Document:
    """Spread facts over a document of at most `num_tokens` tokens, filled up to within one sentence of it.

    Parameters
    ----------
    depth
        Where fact 0 goes, in [0, 1]; anywhere if not given. The others go anywhere.

    Raises
    ------
    ValueError
        If the facts alone are longer.
    """
    ids, starts = scatter(rng, [vocabulary().encode(fact.sentence) for fact in facts], num_tokens, depth=depth)
    return Document(ids, facts, starts)


def scatter(
    rng: Random, pieces: Sequence[Sequence[int]], num_tokens: int, *, depth: float | None = None
) -> tuple[list[int], list[int]]:
    """Spread pieces of text over a document of at most `num_tokens` tokens, filled up to within one sentence of it.

    Parameters
    ----------
    pieces
        Token ids; each piece stays whole.
    depth
        Where piece 0 goes, in [0, 1]; anywhere if not given. The others go anywhere.

    Returns
    -------
    The document's token ids, and where each piece begins.

    Raises
    ------
    ValueError
        If the pieces alone are longer.
    """
    sentences: list[tuple[Sequence[int], int]] = [(ids, index) for index, ids in enumerate(pieces)]
    used = sum(map(len, pieces))
    if used > num_tokens:
        raise ValueError(f"{len(pieces)} facts take {used} tokens, the document has {num_tokens}.")
    placed = sentences[:1] if depth is not None else []
    sentences = sentences[len(placed) :]
    while True:
        ids = vocabulary().encode(filler(rng))
        if used + len(ids) > num_tokens:
            break
        used += len(ids)
        sentences.append((ids, -1))
    rng.shuffle(sentences)
    text: list[int] = []
    starts = [0] * len(pieces)
    for sentence, index in sentences:
        if placed and len(text) >= (depth or 0.0) * (used - len(placed[0][0])):
            starts[0] = len(text)
            text += placed.pop()[0]
        if index >= 0:
            starts[index] = len(text)
        text += sentence
    if placed:
        starts[0] = len(text)
        text += placed.pop()[0]
    return text, starts


def ask(first: Fact, second: Fact | None = None) -> Turn:
    """Ask for one fact, or for two at once."""
    if second is None:
        question = f" What is the {first.attribute} of {first.name}?"
        return Turn(task="retrieval", question=question, answer=f" {first.value}", keys=(first.key,))
    question = f" What is the {first.attribute} of {first.name} and the {second.attribute} of {second.name}?"
    answer = f" {first.value} and {second.value}"
    return Turn(task="pair", question=question, answer=answer, keys=(first.key, second.key))


def for_training(_: int, fact: Fact) -> bool:
    """Accept items that are not held out."""
    return not held_out(*fact.key)
