"""Kept keys of layers with a window: a state of their own, in which a sequence has a ring of rows however long it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.parts.cache import Kept, KeysAndValues, Seen
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import Window
    from mosaic.models.step_graph import StepGraph

NEAR: Final = KeysAndValues(name="kv_near", windowed=True)
FAR: Final = KeysAndValues(name="kv_far", windowed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ringed(Kept):
    """Kept keys, where layers with a window have the state `NEAR` and others have `FAR`.

    The keys of position p lie in row p modulo the rows that the owner has in `NEAR`: at most `ring`, reserved once. A step's keys
    replace the oldest ones there. So the last position that was ever written and the first key that a later step sees are less
    than `ring` positions apart, also where a step is taken back.

    Parameters
    ----------
    ring
        Of a layer's window less 1 and the most tokens of a step, the sum.
    """

    ring: int

    @property
    def kept(self) -> State:
        """The state of layers without a window."""
        return FAR

    @property
    def states(self) -> Sequence[State]:
        """It, and that of layers with one."""
        return FAR, NEAR

    def rows(self, owned: Sequence[int]) -> Mapping[State, int]:
        """Return a row for each token, and of layers with a window `ring` at most."""
        return {FAR: sum(owned), NEAR: sum(min(tokens, self.ring) for tokens in owned)}

    def seen(self, request: Any) -> Seen:
        """Return the same; a ring lies in one extent more than its rows, if positions begin anew in the midst of what is seen."""
        found = Kept.seen(self, request)
        return found._replace(extents=max(found.extents, len(request.states[NEAR].extents) + 1))

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return, beside the others, the extents of rings."""
        return (
            *Kept.inputs(self, arch),
            Input(name="near_extents", dtype="int64", per="extent", width=4, value=_ring),
            Input(name="cu_near_extents", dtype="int32", per="bound", value=lambda window: len(_ring(window))),
        )  # fmt: skip

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that the ring of a request has rows for all keys that layers with a window see, up to the last one that is seen."""
        Kept.check(self, request, arch)
        rows = request.states[NEAR].length if NEAR in request.states else 0
        needed = request.key_len - max(request.start - max(arch.windows, default=1) + 1, 0)
        if needed > rows:
            raise UsageError(
                f"a window at position {request.start} that sees up to {request.key_len} keys reaches {needed} of them in layers "
                f"with a window, and the request has {rows} rows of the state '{NEAR.name}': reserve more, or ask for fewer tokens "
                "a step."
            )

    def declare(self, step: StepGraph) -> None:
        """Declare both states."""
        step.near = step.state(NEAR)
        Kept.declare(self, step)


def _ring(window: Window) -> list[tuple[int, int, int, int]]:
    """The extents of the last positions that are seen, as many as there are rows; those of a row that begins anew come last."""
    owned, end = window.request.states[NEAR], window.request.key_len
    first, found = max(end - owned.length, 0), []
    stops = [*[place for _, _, place, _ in owned.extents[1:]], owned.length]
    for lap in range(first // owned.length * owned.length, end, owned.length):
        for (row, rows, place, before), stop in zip(owned.extents, stops, strict=True):
            passed = max(first - lap - place, 0)
            if passed < stop - place and lap + place < end:
                found.append((row, rows, lap + place + passed, before + passed))
    return found
