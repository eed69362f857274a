"""The card that launches on meta tensors are for: they compute nothing, and tell which kernels a plan asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["Card", "card_ahead", "launches_for"]


class Card(NamedTuple):
    """What launchers ask of a card: its compute capability (90 for sm_90), and its number of multiprocessors."""

    capability: int
    processors: int


_AHEAD: ContextVar[Card | None] = ContextVar("_AHEAD", default=None)


def card_ahead() -> Card | None:
    """Return the card that launches are for; None: that of this process."""
    return _AHEAD.get()


@contextmanager
def launches_for(card: Card) -> Iterator[None]:
    """Let launchers of this thread choose for a card, which need not be there, until the block is left."""
    token = _AHEAD.set(card)
    try:
        yield
    finally:
        _AHEAD.reset(token)
