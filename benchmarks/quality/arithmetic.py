"""Arithmetic on small numbers and sorting, with the working written out before the result.

Addition and subtraction go digit by digit from the units, carries and borrows visible in each step; multiplication by one
digit likewise; sorting merges pairs, then fours.
"""

from __future__ import annotations

from random import Random
from typing import Final

from benchmarks.quality.items import RESULT, Turn, pick
from benchmarks.quality.split import held_out

__all__ = ["OPERATIONS", "addition", "draw", "multiplication", "sorting", "subtraction"]

OPERATIONS: Final = ("addition", "subtraction", "multiplication", "sorting")
LARGEST: Final = 999
MOST_NUMBERS: Final = 8


def addition(a: int, b: int) -> Turn:
    """Write out a + b for numbers of up to three digits.

    >>> addition(347, 285).answer
    ' 7+5=12, 4+8+1=13, 3+2+1=6. Answer: 632'
    """
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    key = ("+", min(a, b), max(a, b))
    return _turn("addition", f" What is {a} + {b}?", ", ".join(steps), a + b, key)


def subtraction(a: int, b: int) -> Turn:
    """Write out a - b for a >= b; a borrowed ten stands in the step that needs it.

    >>> subtraction(402, 178).answer
    ' 12-8=4, 10-7-1=2, 4-1-1=2. Answer: 224'
    """
    steps, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        borrowed = x - y - borrow < 0
        x += 10 * borrowed
        rest = x - y - borrow
        steps.append(f"{x}-{y}-{borrow}={rest}" if borrow else f"{x}-{y}={rest}")
        borrow = int(borrowed)
    return _turn("subtraction", f" What is {a} - {b}?", ", ".join(steps), a - b, ("-", a, b))


def multiplication(a: int, b: int) -> Turn:
    """Write out a * b for a number of up to three digits and one of one digit.

    >>> multiplication(47, 6).answer
    ' 7*6=42, 4*6+4=28. Answer: 282'
    """
    steps, carry = [], 0
    for place in range(len(str(a))):
        x = a // 10**place % 10
        total = x * b + carry
        steps.append(f"{x}*{b}+{carry}={total}" if carry else f"{x}*{b}={total}")
        carry = total // 10
    return _turn("multiplication", f" What is {a} * {b}?", ", ".join(steps), a * b, ("*", a, b))


def sorting(values: list[int]) -> Turn:
    """Sort different numbers of two digits: pairs, fours, then all.

    >>> sorting([42, 17, 93, 58, 20]).answer
    ' 17 42, 58 93, 20. 17 42 58 93, 20. Answer: 17 20 42 58 93'
    """
    levels, size = [], 2
    while size < len(values):
        levels.append(", ".join(_listed(sorted(values[i : i + size])) for i in range(0, len(values), size)))
        size *= 2
    return _turn("sorting", f" Sort {_listed(values)}.", ". ".join(levels), _listed(sorted(values)), ("sort", *values))


def _listed(values: list[int]) -> str:
    return " ".join(map(str, values))


def _turn(task: str, question: str, working: str, result: int | str, key: tuple[str | int, ...]) -> Turn:
    return Turn(task=task, question=question, answer=f" {working}.{RESULT} {result}", keys=(key,))


def draw(rng: Random, operation: str, *, evaluation: bool) -> Turn:
    """Return a turn of one operation, from its side of the split."""
    while True:
        turn = _draw(rng, operation)
        if held_out(*turn.keys[0]) == evaluation:
            return turn


def _draw(rng: Random, operation: str) -> Turn:
    if operation == "sorting":
        return sorting(rng.sample(range(10, 100), 3 + int(rng.random() * (MOST_NUMBERS - 2))))
    a, b = (int(rng.random() * pick(rng, (100, LARGEST + 1, LARGEST + 1))) for _ in range(2))
    if operation == "multiplication":
        return multiplication(a, 2 + int(rng.random() * 8))
    return addition(a, b) if operation == "addition" else subtraction(max(a, b), min(a, b))
