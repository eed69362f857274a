"""Cache policies: which keys and values a step attends to, and which of them outlive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from mosaic.errors import UsageError
from mosaic.models.attention.heads import Heads
from mosaic.models.attention.kept import KeptQueries, KeptTogether
from mosaic.models.attention.queries import Queries
from mosaic.models.attention.together import Together
from mosaic.models.inputs import Frequencies, Input
from mosaic.models.kept_keys import key_row
from mosaic.models.parts.part import Part
from mosaic.models.state import State
from mosaic.registrar.operators.kv_attention import kv_parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window
    from mosaic.models.step_graph import StepGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAndValues(State):
    """The keys and values of all layers, or of those with or without a window: one row per token, in extents; it grows at its
    end, so nothing moves."""

    extents: bool = True
    windowed: bool | None = None
    __hash__ = State.__hash__

    def columns(self, arch: Architecture) -> int:
        """Return keys and values of its layers."""
        return key_row(arch, self.windowed).columns

    def dtype_in(self, arch: Architecture) -> str:
        """Return the dtype of keys."""
        return arch.keys or arch.dtype


KV: Final = KeysAndValues(name="kv")


class Seen(NamedTuple):
    """Of one request: the keys that its window sees, the tokens that its sequence has rows for, and their extents."""

    keys: int
    owned: int
    extents: int


class CachePolicy(Part):
    """The source of the keys and values that a step attends to.

    Attributes
    ----------
    label
        What steps that decide tokens are called, if not `full_step` or `denoise`.
    by_position
        Whether a sequence has a row of `kept` for each position of its canvas.
    """

    __slots__ = ()
    label: ClassVar[str] = ""
    by_position: ClassVar[bool] = True

    @property
    def kept(self) -> State | None:
        """The state of keys and values, a row per token; None: they do not outlive the step."""
        return None

    @property
    def covering(self) -> CachePolicy:
        """A policy whose steps also serve requests of this one: if both wait, they share such a step."""
        return self

    @property
    def serves_exact(self) -> bool:
        """Whether `covering` also serves requests of a table that attend to all keys, and have no rows of its states."""
        return False

    @property
    def states(self) -> Sequence[State]:
        """The state of keys and values; a policy with more states overrides this."""
        return () if self.kept is None else (self.kept,)

    def seen(self, request: Any) -> Seen | None:
        """Return what a request sees of the state of keys; None if there is none."""
        return None

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return inputs for frequencies that depend on a sequence's length (frequencies by sequence, sequence by
        token), and for windows (the keys that each token sees)."""
        rotary = arch.rotary
        sees = [
            Input(
                name=f"sees_{window}", dtype="int32", per="token", width=2, joint=True,
                value=partial(keys_within, window, arch.block, self.kept is None),
            )
            for window in self.ranges(arch)
        ]  # fmt: skip
        if rotary.kind != "dynamic":
            return sees
        return (
            *sees,
            Input(
                name="frequencies", dtype="float32", per="sequence", width=rotary.dim // 2,
                value=lambda window: Frequencies(rotary, self.length(window)),
            ),
            Input(name="sequences", dtype="int32", per="token", value=lambda window: window.number),
        )  # fmt: skip

    def ranges(self, arch: Architecture) -> Sequence[int]:
        """Return the windows (0: none) of layers in which each row sees its own range of keys."""
        return arch.windows

    def length(self, window: Window) -> int:
        """Return the length of a window's sequence, on which its frequencies depend."""
        return window.end

    def rows(self, owned: Sequence[int]) -> Mapping[State, int]:
        """Return the rows of states, from the tokens that each sequence has keys for."""
        return {} if self.kept is None else {self.kept: sum(owned)}

    def ways(self) -> Sequence[Way]:
        """Return the options of the choice `attention`, the fastest first."""
        raise NotImplementedError

    def sizes(self, windows: Sequence[int], owned: Sequence[int]) -> Mapping[str, int]:
        """Return the values of the policy's own dims, from each window's tokens and each sequence's owned tokens."""
        return {}

    def dims(self, step: StepGraph) -> None:
        """Declare `span`, the keys that a query sees on average, and the policy's own dims."""
        raise NotImplementedError

    def declare(self, step: StepGraph) -> None:
        """Register the states and ask for the policy's inputs."""


@dataclass(frozen=True, slots=True)
class Whole(CachePolicy):
    """Whole sequences attend to themselves; nothing is kept."""

    def ways(self) -> Sequence[Way]:
        """Return all queries at once, chunks of queries, and groups of heads."""
        return Together(), Queries(), Heads()

    def dims(self, step: StepGraph) -> None:
        """Declare the keys that a query sees: tokens of the step."""
        step.g.dim("span", at_most="tokens")


@dataclass(frozen=True, slots=True)
class Kept(CachePolicy):
    """Windows write their keys and values into the state `kv` and attend to the keys of their sequence there."""

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of frequencies, extents, their bounds by sequence, and keys seen by sequence."""
        return (
            *CachePolicy.inputs(self, arch),
            Input(
                name="extents", dtype="int64", per="extent", width=4,
                value=lambda window: window.request.sequence.extents,
            ),
            Input(
                name="cu_extents", dtype="int32", per="bound", value=lambda window: len(window.request.sequence.extents)
            ),
            Input(name="seen", dtype="int32", per="sequence", value=lambda window: window.request.key_len),
        )  # fmt: skip

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that a request has a sequence, and sees at least its own window."""
        if not hasattr(request.sequence, "extents"):
            raise UsageError("a cached request needs a sequence that this model has opened.")
        end = request.start + request.token_ids.numel()
        if request.key_len < end:
            raise UsageError(
                f"a window that ends at position {end} sees that many keys at least, got {request.key_len}."
            )
        if request.key_len > request.sequence.length:
            raise UsageError(
                f"a window that sees {request.key_len} keys of a sequence that has rows for {request.sequence.length}: "
                "reserve more."
            )
        arch.rotary.check_kept(request.key_len, request.final_length)

    def length(self, window: Window) -> int:
        """Return the request's final length: kept keys are rotated by it from the first step on."""
        return int(window.request.final_length)

    @property
    def kept(self) -> State:
        """The state `kv`."""
        return KV

    def seen(self, request: Any) -> Seen:
        """Return the keys that the request sees, of the tokens that its sequence owns rows for."""
        sequence = request.sequence
        return Seen(request.key_len, sequence.length, len(sequence.extents))

    def ways(self) -> Sequence[Way]:
        """Return all queries at once, and chunks of queries: keys and values of all heads are kept anyway."""
        return KeptTogether(), KeptQueries()

    def sizes(self, windows: Sequence[int], owned: Sequence[int]) -> Mapping[str, int]:
        """Return the rows of partial results that may exist if a step's keys are split into segments."""
        return {"parts": kv_parts(windows, owned)}

    def dims(self, step: StepGraph) -> None:
        """Declare the keys that a query sees, the state's keys, their extents, and attention's partial results."""
        step.g.dim("keys")
        step.g.dim("extents")
        step.g.dim("parts")
        step.g.dim("span", at_most="keys")

    def declare(self, step: StepGraph) -> None:
        """Declare the state, and its rows that are written and read."""
        step.kv = step.state(self.kept)
        for entry in self.inputs(step.arch):
            step.inputs[entry.name]


def keys_within(width: int, block: int, own: bool, windows: Sequence[Window]) -> NDArray[np.int32]:
    """Return the keys [begin, end) that the tokens of windows see, int32 [T, 2].

    They are at a distance below `width`, unless that is 0, and before the ends that requests give, or else in no block
    after the token's own. The first key is that of position 0, or with `own` that of the window's first token.
    """
    position = np.concatenate(
        [np.arange(window.length) if own else places_of(window) for window in windows], dtype=np.int32
    )
    given = [window.request.values.get("ends") for window in windows]
    if given[0] is not None:
        end = np.concatenate(given, dtype=np.int32)
    else:
        end = (position // block + 1) * block if block else np.full_like(position, np.iinfo(np.int32).max)
    if not width:
        return np.stack([np.zeros_like(position), end], axis=1)
    return np.stack([np.maximum(position - width + 1, 0), np.minimum(end, position + width)], axis=1)


def places_of(window: Window) -> NDArray[np.int64]:
    """Return the positions of a window's tokens, which need not be adjacent."""
    given = window.request.values.get("positions")
    return np.arange(window.start, window.end) if given is None else given.numpy()


@dataclass(frozen=True, slots=True)
class Mixed(Kept):
    """The same with an end of visible keys per row: one step can mix causal, block-causal and bidirectional rows.

    `StepRequest.values["ends"]`, int32 [T], is the number of first keys of its sequence that a token sees: at least 1.
    """

    def ranges(self, arch: Architecture) -> Sequence[int]:
        """Return the windows of all layers, and 0 for layers without."""
        return tuple(sorted({layer.attention.window for layer in arch.stack}))

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that there is an end for each token."""
        Kept.check(self, request, arch)
        ends = request.values.get("ends")
        if ends is None or len(ends) != request.token_ids.numel() or int(ends.min()) < 1:
            raise UsageError(
                "the phase needs 'ends': for each token of the window, how many keys it sees; give it in `values`."
            )


WHOLE: Final = Whole()
KEPT: Final = Kept()
MIXED: Final = Mixed()
