"""What a decoding algorithm is: a generator over a canvas, its largest steps, and what it takes of the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Canvas, Shapes, Steps
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["Algorithm", "Traits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an algorithm takes besides the options that all take, and the models that it is for.

    Parameters
    ----------
    options
        Fields of a `GenerationConfig`; any other that is set is refused.
    blockwise
        For models that attend block by block, causally, or for bidirectional ones; None: either.
    shifted
        Whether row i-1 predicts position i; None: either.
    remasking
        The values of that option, the default first.
    defaults
        Values of options that are left out.
    """

    options: frozenset[str] = frozenset()
    blockwise: bool | None = None
    shifted: bool | None = None
    remasking: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm; one of your own is given as `GenerationConfig(algorithm=)`.

    Parameters
    ----------
    name
        For people.
    decode
        Decodes one request: a generator over its canvas that yields a `StepRequest` and gets the `StepResult`.
    shapes
        The largest steps that a request asks for, from its options, the model, the tokens of the prompt and the number that
        stands for it in random draws. Their `states` are the rows that the request takes, and that `canvas.rows_of` gives.
        Rows of keys and values may be left out: the canvas has one for each of its tokens.
    traits
        What it takes, and the models that it is for; not given, no option but those that all take, and any model.
    """

    name: str
    decode: Callable[[Canvas], Steps]
    shapes: Callable[[GenerationConfig, Architecture, int, int], Shapes]
    traits: Traits = Traits()

    def __str__(self) -> str:
        return self.name
