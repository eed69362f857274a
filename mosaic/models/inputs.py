"""The inputs of a step, each declared once: the graph registers it and the packer fills it from one record.

A record says to what a value belongs and how it is computed from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from mosaic.errors import GraphError, UsageError

if TYPE_CHECKING:
    from mosaic.models.rotary import Rotary
    from mosaic.registrar.graph import Buffer, Graph

Per: TypeAlias = Literal["token", "extent", "row", "logit_row", "sequence", "bound", "page", "step"]
"""What one value of an input belongs to. A `bound` is where a sequence begins: there is one more than sequences."""
Supply: TypeAlias = Callable[[], "Buffer"]
DIMS: Final[Mapping[str, str]] = {
    "token": "tokens", "extent": "extents", "row": "masked", "logit_row": "logit_rows", "sequence": "seqs", "bound": "seqs",
    "page": "pages",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a step.

    Parameters
    ----------
    name
        Of the graph's input.
    dtype
        Of its elements.
    per
        What one value belongs to.
    value
        Where values come from. Text: the request's field of this name, or its entry in `StepRequest.values`; the input's
        own name if empty. A function: called with a `Window` where `per` is token, extent, page, sequence or bound, and with the
        request where it is row, logit_row or step. Of tokens it gives a tensor or ranges with an element for each, or one
        number for all; of pages ranges; of extents `width` numbers for each; of rows, a tensor, or one number for all; of a
        sequence, a number, or `width` of them; of a bound, how many there are of the sequence. A copy of a sequence, which decides
        nothing, has 0 where `value` is text.
    index
        Values are row numbers within the request, which packing converts to row numbers of the step.
    copy
        Which copy of the request's windows `index` refers to.
    width
        Elements of one value; 0: the input is one-dimensional.
    joint
        `value` is a function that is called once, with all windows of the step in order, and returns all values as a
        NumPy array: for inputs per token or sequence that are slow one by one.

    Examples
    --------
    >>> Input(name="quota", dtype="int32", per="sequence").source
    'quota'
    """

    name: str
    dtype: str
    per: Per
    value: str | Callable[[Any], Any] = ""
    index: bool = False
    copy: int = 0
    width: int = 0
    joint: bool = False

    @property
    def source(self) -> str:
        """The name of the value in a request, if `value` is text."""
        assert isinstance(self.value, str)
        return self.value or self.name

    def of(self, request: Any) -> Any:
        """Return the value of a request.

        Raises
        ------
        UsageError
            If the request has none.
        """
        if callable(self.value):
            return self.value(request)
        found = getattr(request, self.source, None)
        if found is None:
            found = request.values.get(self.source)
        if found is None:
            raise UsageError(
                f"the phase needs '{self.source}' of every request, a value per {self.per}: give it in the StepRequest, "
                f'or as values={{"{self.source}": …}}.'
            )
        return found

    def of_all(self, windows: Iterable[Window]) -> list[Any]:
        """Return the value of each window."""
        if callable(self.value):
            return [*map(self.value, windows)]
        return [0 if window.copy else self.of(window.request) for window in windows]


ROW_BOUNDS: Final = Input(
    name="cu_rows", dtype="int32", per="bound", value=lambda window: 0 if window.copy else len(window.request.rows)
)
"""Bounds of the rows to decide, by sequence."""


class Window(NamedTuple):
    """The tokens of one sequence in a step.

    Attributes
    ----------
    request
        The request of the tokens.
    token_ids
        int64 [T].
    number
        The sequence's number in the step.
    start
        Position of the first token.
    copy
        0, or the number of a copy with other tokens, which decides nothing.
    """

    request: Any
    token_ids: Any
    number: int
    start: int
    copy: int = 0

    @property
    def length(self) -> int:
        """Tokens of the window."""
        count: int = self.token_ids.numel()
        return count

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Frequencies:
    """A value: rotary frequencies for a sequence length, float32 [dim / 2]."""

    rotary: Rotary
    length: int


def together(names: Iterable[str], register: Callable[[], Sequence[Buffer]]) -> dict[str, Supply]:
    """Return supplies of inputs, by name, that one op makes; it is registered when the first of them is asked for."""
    made = cache(register)

    def supply(place: int) -> Buffer:
        return made()[place]

    return {name: partial(supply, place) for place, name in enumerate(names)}


class StepInputs:
    """Registers the inputs that a phase declares, each on first use.

    Parameters
    ----------
    declared
        The records, by distinct names.
    """

    def __init__(self, g: Graph, declared: Sequence[Input]) -> None:
        self._g = g
        self.declared = {entry.name: entry for entry in declared}
        self._known: dict[str, Buffer] = {}
        self._given: dict[str, Buffer] = {}
        self.supplied: Mapping[str, Supply] = {}
        """Inputs that the step computes itself: the function that registers each on first use."""
        self.of_tokens: Mapping[str, Supply] = {}
        """Of these, what the tokens' part gives in place of the host."""

    def __getitem__(self, name: str) -> Buffer:
        """The input of this name."""
        if name not in self._known:
            self._known[name] = self.supplied[name]() if name in self.supplied else self.given(name)
        return self._known[name]

    def given(self, name: str) -> Buffer:
        """The input of this name as the host or the tokens' part gives it, even if the step computes another of that name."""
        if name in self.of_tokens:
            return self.of_tokens[name]()
        if name not in self.declared:
            raise GraphError(
                f"no part of the phase declares the input '{name}'; there are {', '.join(self.declared)}. Add it to a "
                "part's `inputs`."
            )
        if name not in self._given:
            self._given[name] = self._register(self.declared[name])
        return self._given[name]

    def _register(self, entry: Input) -> Buffer:
        size = self._g.dim(DIMS[entry.per]) if entry.per in DIMS else 1
        rows = size + 1 if entry.per == "bound" else size
        return self._g.input(entry.name, (rows, entry.width) if entry.width else (rows,), entry.dtype)

    def finish(self, *, all_asked: bool = True) -> None:
        """Make sure that the graph has no other input and, if `all_used`, that every declared one was used.

        Raises
        ------
        GraphError
            Naming the unused inputs, or those that packing could not fill.
        """
        strange = [b.name for b in self._g.buffers if b.kind == "input" and b.name not in self._given]
        if strange:
            raise GraphError(f"no part of the phase declares the inputs {', '.join(strange)}, so nothing fills them.")
        unused = [name for name in self.declared if all_asked and name not in self._known]
        if unused:
            raise GraphError(
                f"the phase declares inputs that no op reads: {', '.join(unused)}. Drop them, or use them."
            )
