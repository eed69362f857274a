"""Simple stories whose people and things stay consistent, and the rules that check it.

A story has seven sentences, each one of a few forms. `faults` reads a text back by the same forms: a sentence that fits
none, or a name, pronoun, thing or place that changes, is a fault; any order of forms that keeps to the rules is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Final

from benchmarks.quality.items import Turn, pick
from benchmarks.quality.split import held_out
from benchmarks.quality.vocabulary import ADJECTIVES, FEELINGS, FEMALE, ITEMS, MALE, NAMES, PLACES

__all__ = ["FORMS", "draw", "faults", "pronoun", "story"]

TIMES: Final = ("day", "morning", "evening")

FORMS: Final = (
    (
        "One {time} {hero} went to the {place} with {his} {adjective} {item}.",
        "One {time} {hero} took {his} {adjective} {item} to the {place}.",
        "{hero} walked to the {place} one {time} with {his} {adjective} {item}.",
    ),
    (
        "{He} felt very {feeling}.",
        "{He} was {feeling} and smiled all the {time}.",
        "The sun was strong and {he} felt {feeling}.",
    ),
    (
        "Near the {place} {he} saw {his} friend {friend}.",
        "In the {place} {he} found a friend named {friend}.",
        "{friend} was there, too, and {hero} was {feeling}.",
    ),
    (
        "Then the wind came and {hero} lost the {item}.",
        "Then {hero} hid the {item} under a tree and could not find it.",
        "Then the rain came and the {adjective} {item} was not there.",
    ),
    (
        "{friend} looked everywhere and found the {adjective} {item} near the road.",
        "{friend} asked where it was and found the {item} under a tree.",
        "{friend} looked over the bridge and saw the {adjective} {item} there.",
    ),
    (
        "{hero} thanked {friend} and they played together until the sun set.",
        "{He} laughed and thanked {friend}, and they shared the {item}.",
        "{hero} and {friend} talked and laughed all {time}.",
    ),
    (
        "That night {he} carried the {item} home and was {feeling}.",
        "At last {hero} walked home with {his} {adjective} {item}.",
        "From that day on {hero} always kept the {item} near {him}.",
    ),
)
"""The forms of each sentence of a story, in order."""


def pronoun(name: str) -> tuple[str, str]:
    """Subject and possessive pronoun of a name: ("she", "her") or ("he", "his")."""
    return ("she", "her") if name in _FEMALE else ("he", "his")


_FEMALE: Final = frozenset(FEMALE)
_QUESTION: Final = " Write a story about {hero}, {article} {adjective} {item} and the {place}."


def _fixed(hero: str, adjective: str, item: str, place: str) -> dict[str, str]:
    """The facts that a story's prompt fixes."""
    he, his = pronoun(hero)
    him = "her" if he == "she" else "him"
    article = "an" if adjective[0] in "aeiou" else "a"
    return {
        "hero": hero, "he": he, "He": he.capitalize(), "his": his, "him": him, "article": article,
        "adjective": adjective, "item": item, "place": place,
    }  # fmt: skip


def story(rng: Random, hero: str, friend: str, adjective: str, item: str, place: str) -> Turn:
    """Ask for a story and tell one."""
    fixed = {**_fixed(hero, adjective, item, place), "friend": friend}
    sentences = (
        pick(rng, forms).format(**fixed, time=pick(rng, TIMES), feeling=pick(rng, FEELINGS)) for forms in FORMS
    )
    return Turn(
        task="story",
        question=_QUESTION.format(**fixed),
        answer=" " + " ".join(sentences),
        keys=(("story", hero, adjective, item, place),),
    )


def draw(rng: Random, *, evaluation: bool) -> Turn:
    """Return a story from its side of the split; hero and friend have different pronouns."""
    while True:
        hero, friend = pick(rng, NAMES), pick(rng, NAMES)
        adjective, item, place = pick(rng, ADJECTIVES), pick(rng, ITEMS), pick(rng, PLACES)
        if hero != friend and held_out("story", hero, adjective, item, place) == evaluation:
            return story(rng, hero, _unlike(hero, friend), adjective, item, place)


def _unlike(hero: str, friend: str) -> str:
    """A friend with another pronoun. Of 96 equally likely names one that cannot be is a weak lesson, half of them a strong one:
    a model that has not learned it names the friend after the hero."""
    if pronoun(hero) != pronoun(friend):
        return friend
    names, others = (FEMALE, MALE) if friend in _FEMALE else (MALE, FEMALE)
    return others[names.index(friend) % len(others)]


def faults(question: str, text: str) -> list[str]:
    """Return the errors of a story, sentence by sentence; empty if it is grammatical, consistent and complete.

    Parameters
    ----------
    question
        The question, or a prompt that ends with it; it names hero, thing and place.
    text
        The story.

    Examples
    --------
    >>> faults(" Write a story about Anna, a red kite and the park.", " He felt very happy.")
    ["sentence 1 is of no known form: 'He felt very happy.'", 'the story ends after 1 of 7 sentences']
    """
    asked = re.search(r"Write a story about (\w+), an? (\w+) (\w+) and the (\w+)\.", question)
    if asked is None:
        raise ValueError(f"no question for a story: {question[-80:]!r}")
    hero, adjective, item, place = asked.groups()
    fixed = _fixed(hero, adjective, item, place)
    found: list[str] = []
    friend = ""
    sentences = re.findall(r"[^.]*\.?", text.strip())[:-1]
    sentences = [sentence.strip() for sentence in sentences]
    for index, sentence in enumerate(sentences):
        slots = _read(sentence, index)
        if slots is None:
            found.append(f"sentence {index + 1} is of no known form: {sentence!r}")
            continue
        friend = friend or slots.get("friend", "")
        expected = {**fixed, "friend": friend}
        wrong = [f"{slot} {value!r}" for slot, value in slots.items() if slot in expected and value != expected[slot]]
        if wrong or friend == hero:
            found.append(
                f"sentence {index + 1} is not consistent ({', '.join(wrong) or 'friend is the hero'}): {sentence!r}"
            )
    if len(sentences) != len(FORMS):
        found.append(f"the story ends after {len(sentences)} of {len(FORMS)} sentences")
    return found


def _read(sentence: str, index: int) -> Mapping[str, str] | None:
    """The slots of a sentence, by the forms of its place in the story."""
    for form in _patterns()[index] if index < len(FORMS) else ():
        match = form.fullmatch(sentence)
        if match:
            return match.groupdict()
    return None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], ...], ...]:
    lists = {"time": TIMES, "feeling": FEELINGS, "hero": NAMES, "friend": NAMES}

    def pattern(form: str) -> re.Pattern[str]:
        parts = re.split(r"\{(\w+)\}", form)
        seen: set[str] = set()
        text = ""
        for position, part in enumerate(parts):
            if position % 2 == 0:
                text += re.escape(part)
            elif part in seen:
                text += f"(?P={part})"
            else:
                seen.add(part)
                text += f"(?P<{part}>{'|'.join(lists[part]) if part in lists else '[A-Za-z]+'})"
        return re.compile(text)

    return tuple(tuple(pattern(form) for form in forms) for forms in FORMS)
