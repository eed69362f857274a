"""What a decoding algorithm is: a generator over a canvas, its largest steps, and what it takes of the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.decoding.config import GenerationConfig, NamedAlgorithm

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Canvas, Shapes, Steps
    from mosaic.decoding.rows import TableRow
    from mosaic.models.architecture import Architecture

__all__ = ["Algorithm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(NamedAlgorithm):
    """An algorithm; one of your own is given as `GenerationConfig(algorithm=)`.

    Parameters
    ----------
    name
        For people.
    decode
        Decodes one request: a generator over its canvas that yields a `StepRequest` and gets the `StepResult`.
    shapes
        The largest steps of a request, from its options, the model, the tokens of the prompt and the number that stands for it
        in random draws. Their `states` are the rows that the request takes and `canvas.rows_of` gives; rows of keys and values
        are added.
    row
        What a table on the device has to know of a request, from what `shapes` gets; None for a request that has to be decoded by
        the generator. By default all have to.
    traits
        The options that it takes and the models that it is for; by default the options that all take, and any model.
    """

    decode: Callable[[Canvas], Steps]
    shapes: Callable[[GenerationConfig, Architecture, int, int], Shapes]
    row: Callable[[GenerationConfig, Architecture, int, int], TableRow | None] | None = None
