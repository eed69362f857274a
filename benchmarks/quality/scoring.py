"""Whether an answer is right: exact match of the result; for stories, no fault by their rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.evaluation import DEPTHS
from benchmarks.quality.items import RESULT, Item
from benchmarks.quality.stories import faults
from benchmarks.quality.vocabulary import EOS, vocabulary

__all__ = ["Score", "score", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One item's outcome.

    Parameters
    ----------
    item
        What was asked.
    text
        What came, up to the first [EOS].
    exact
        The result is the expected one, character for character after stripping spaces; a story has no fault. What a chain goes
        on with behind the name that it was asked to end at does not count: commas are decided before names.
    whole
        The working, too.
    tokens
        Share of the expected tokens, [EOS] included, that are right at their place; 1 or 0 for a story.
    faults
        The errors of a story.
    """

    item: Item
    text: str
    exact: bool
    whole: bool
    tokens: float
    faults: tuple[str, ...] = ()


def score(item: Item, text: str) -> Score:
    """Judge a text, already cut before its first [EOS].

    >>> from benchmarks.quality.evaluation import evaluation_set
    >>> item = evaluation_set(tasks=("addition",), per_task=1)[0]
    >>> score(item, item.answer).exact, score(item, " Answer: " + item.result).whole
    (True, False)
    """
    if item.task == "story":
        found = tuple(faults(item.prompt, text))
        return Score(item=item, text=text, exact=not found, whole=not found, tokens=float(not found), faults=found)
    working = RESULT in item.answer
    result = text.rpartition(RESULT)[2].strip() if RESULT in text or not working else None
    whole = text.strip() == item.answer.strip()
    if item.task == "chain" and text.strip().startswith(item.result + ","):
        result = item.result
    return Score(
        item=item, text=text, exact=result == item.result, whole=whole, tokens=_tokens_right(item.answer, text)
    )


def _tokens_right(expected: str, text: str) -> float:
    encode = vocabulary().encode
    wanted = [*encode(expected), EOS]
    return sum(a == b for a, b in zip(wanted, [*encode(text), EOS], strict=False)) / len(wanted)


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Share of exact answers, and of tokens right, by task, by length and by depth, each with its count.

    Depth is given in tenths, "0.3" for [0.3, 0.4), for the tasks with a document.
    """
    documents = [score for score in scores if score.item.length]
    placed = [score for score in documents if score.item.depth is not None]
    return {
        "by_task": _shares(scores, lambda s: (s.item.task,)),
        "by_length": _shares(documents, lambda s: (s.item.task, str(s.item.length))),
        "by_depth": _shares(placed, lambda s: (s.item.task, _tenth(s.item.depth))),
        "by_length_and_depth": _shares(placed, lambda s: (s.item.task, str(s.item.length), _tenth(s.item.depth))),
    }


def _tenth(depth: float | None) -> str:
    assert depth is not None
    return f"{min(DEPTHS - 1, int(depth * DEPTHS)) / DEPTHS:.1f}"


def _shares(scores: Iterable[Score], key: Callable[[Score], tuple[str, ...]]) -> dict[str, Any]:
    """Nested by the parts of the key, in the order of first appearance."""
    groups: dict[tuple[str, ...], list[Score]] = defaultdict(list)
    for one in scores:
        groups[key(one)].append(one)
    nested: dict[str, Any] = {}
    for parts, members in groups.items():
        place = nested
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        count = len(members)
        place[parts[-1]] = {
            "exact": sum(one.exact for one in members) / count,
            "whole": sum(one.whole for one in members) / count,
            "tokens": sum(one.tokens for one in members) / count,
            "count": count,
        }
    return nested
