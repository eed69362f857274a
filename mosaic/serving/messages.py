"""What the server and its engine tell each other: plain records, which travel between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from mosaic.decoding.config import GenerationConfig
from mosaic.decoding.forecast import Forecast

__all__ = [
    "Asked",
    "Cancelled",
    "Canvas",
    "Ended",
    "Failed",
    "Frame",
    "Fresh",
    "Picture",
    "PlanWanted",
    "Ready",
    "Refused",
    "Stepped",
    "ToEngine",
    "ToServer",
    "Told",
    "Watched",
    "Wondered",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, and how many answers to it are wanted; `draws` is the number by which the first of them draws. `scores`: what
    each token was committed by is wanted, too; `frames`: so are canvases. `owner`: whose it is, a word that its canvases have."""

    number: int
    prompt: Sequence[int]
    config: GenerationConfig
    answers: int
    draws: int
    scores: bool = False
    frames: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for the answers to a prompt any more."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wondered:
    """Would a request fit, when, and what would it take?"""

    number: int
    prompt: Sequence[int]
    config: GenerationConfig


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Which plan is in force?"""

    number: int


@dataclass(frozen=True, slots=True)
class Told:
    """What was asked for: a forecast, the document of a plan, or why there is none."""

    number: int
    found: Forecast | Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Watched:
    """Somebody looks at the engine: pictures are wanted for a while."""


class Canvas(NamedTuple):
    """A live request: whose it is, tokens of its prompt and positions of its answer, steps so far, positions that are open, and
    tokens from position `first` on, -1 where nothing is decided."""

    number: int
    owner: str
    prompt_tokens: int
    length: int
    steps: int
    masked: int
    first: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The engine as it stands.

    Parameters
    ----------
    canvases
        Of the first live requests of each owner.
    rows
        Rows in use, by state.
    plan
        Of the last step: its dims, bytes by component and in all, the budget, and milliseconds as predicted.
    outlook
        Of the prompt that is next, if one waits.
    """

    canvases: Sequence[Canvas]
    rows: Mapping[str, int]
    plan: Mapping[str, Any] | None
    outlook: Forecast | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine can be asked; `longest` is the most positions of a request, prompt and answer, that fit it alone."""

    longest: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot be made, and why."""

    message: str


class Frame(NamedTuple):
    """A canvas after a step: steps so far, the block that it decoded, positions of the answer that are open, and the tokens from
    the first one that is not final to the last one that is decided, -1 where none is."""

    step: int
    block: int
    masked: int
    ids: Sequence[int]


class Fresh(NamedTuple):
    """What is new of an answer: tokens that became final, what each was committed by if asked for, and the last canvas; and its
    steps so far, and first tokens of its prompt whose keys others had computed."""

    ids: Sequence[int]
    scores: Sequence[float] = ()
    frame: Frame | None = None
    steps: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step has made final, and the state of the engine after it.

    Parameters
    ----------
    fresh
        By prompt, then by the place of the answer.
    seconds
        That it took.
    waiting, running
        Prompts that are not admitted yet, and requests that are live.
    newest
        Number of the last prompt that it has taken: later ones came during the step, and are not among those that wait.
    memory
        Bytes by pool, as planned and as committed.
    components, keys_used
        Bytes of the plan in force by component; of its rows of keys, the share in use.
    room_in
        Steps after which the prompt that is next has room, at most, if it waits for memory; None: it does not, or nobody can say.
    picture
        If somebody watches, now and then.
    """

    fresh: Mapping[int, Mapping[int, Fresh]]
    seconds: float
    waiting: int
    running: int
    newest: int
    memory: Mapping[str, tuple[int, int]]
    components: Mapping[str, int]
    keys_used: float
    room_in: int | None = None
    picture: Picture | None = None

    @property
    def tokens(self) -> int:
        """Tokens that became final, of all answers."""
        return sum(len(fresh.ids) for answers in self.fresh.values() for fresh in answers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All answers to a prompt have ended: by place, how (`Generation.finish`) and after how many steps, of how many positions of
    their blocks in all; and of how many of the prompt's tokens others had computed the keys."""

    number: int
    finishes: Sequence[str] = ()
    steps: Sequence[int] = ()
    positions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A prompt has no answer, and why: it would not fit alone either (`fits` is false), or cannot be."""

    number: int
    message: str
    fits: bool


ToEngine: TypeAlias = Asked | Cancelled | Wondered | PlanWanted | Watched
ToServer: TypeAlias = Ready | Failed | Stepped | Ended | Refused | Told
