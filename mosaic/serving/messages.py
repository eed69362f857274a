"""What the server and its engine tell each other: plain records, which travel between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mosaic.decoding.config import GenerationConfig

__all__ = ["Asked", "Cancelled", "Ended", "Failed", "Ready", "Refused", "Stepped", "ToEngine", "ToServer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, and how many answers to it are wanted; `draws` is the number by which the first of them draws."""

    number: int
    prompt: Sequence[int]
    config: GenerationConfig
    answers: int
    draws: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for the answers to a prompt any more."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine can be asked; `longest` is the most positions of a request, prompt and answer, that fit it alone."""

    longest: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot be made, and why."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step has made final, and the state of the engine after it.

    Parameters
    ----------
    tokens
        By prompt, then by the place of the answer: token ids, in order.
    positions
        Positions of the answers' canvases that the step decoded.
    waiting, running
        Prompts that are not admitted yet, and requests that are live.
    memory
        Bytes by pool, as planned and as committed.
    """

    tokens: Mapping[int, Mapping[int, Sequence[int]]]
    positions: int
    waiting: int
    running: int
    memory: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All answers to a prompt have ended: by place, how (`Generation.finish`) and after how many steps; and of how many of the
    prompt's first tokens others had computed the keys."""

    number: int
    finishes: Sequence[str] = ()
    steps: Sequence[int] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A prompt has no answer, and why: it would not fit alone either (`fits` is false), or cannot be."""

    number: int
    message: str
    fits: bool


ToEngine: TypeAlias = Asked | Cancelled
ToServer: TypeAlias = Ready | Failed | Stepped | Ended | Refused
