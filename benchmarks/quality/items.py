"""Questions, and texts made of turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

__all__ = ["LONG_TASKS", "RESULT", "TASKS", "Item", "Turn", "pick", "prompt_of"]

TASKS: Final = ("retrieval", "pair", "addition", "subtraction", "multiplication", "sorting", "story")
LONG_TASKS: Final = ("listing", "chain", "passage", "frequent")
"""Answers of 64 to 256 tokens, from many places of a document."""

RESULT: Final = " Answer:"
"""Separates the visible working from the result."""

T = TypeVar("T")


def pick(rng: Random, values: Sequence[T]) -> T:
    """Return one of several values; the same on every version of Python."""
    return values[int(rng.random() * len(values))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question with its answer; both texts begin with a space.

    Parameters
    ----------
    task
        Of `TASKS` or `LONG_TASKS`.
    question, answer
        The question, without roles; the whole answer with its working, without [EOS].
    keys
        The keys for `held_out`; an evaluation turn has every key held out, a training turn none.
    """

    task: str
    question: str
    answer: str
    keys: tuple[tuple[str | int, ...], ...]

    @property
    def result(self) -> str:
        """The answer without its working."""
        return self.answer.rpartition(RESULT)[2].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question of an evaluation set.

    Parameters
    ----------
    task
        Of `TASKS` or `LONG_TASKS`.
    prompt
        The whole prompt, roles included.
    answer
        The text expected, without [EOS]; a story is one of many that are right.
    tokens
        Length of the prompt.
    length
        The context it was made for, prompt and answer; 0 where a task has no document.
    depth
        Where in the document the (first) fact lies, in [0, 1]; 0 without a document. None where the whole document counts.
    keys
        What the split decided on.
    """

    task: str
    prompt: str
    answer: str
    tokens: int
    length: int = 0
    depth: float | None = 0.0
    keys: tuple[tuple[str | int, ...], ...] = ()

    @property
    def result(self) -> str:
        """The answer without its working."""
        return self.answer.rpartition(RESULT)[2].strip()


def prompt_of(turn: Turn, document: str = "") -> str:
    """Return a prompt of one turn, the document before the question."""
    return f"<|user|>{document}{turn.question}<|assistant|>"
