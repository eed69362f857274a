"""What a request would take, and when there is room for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from mosaic.errors import DoesNotFit
from mosaic.registrar.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from mosaic.decoding.described import Described
    from mosaic.models.architecture import Architecture

__all__ = ["Forecast"]

Fits: TypeAlias = Literal["now", "later", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Whether a session would admit a request.

    Parameters
    ----------
    fits
        "now", "later", when others have ended, or "never", not alone either.
    steps
        After how many steps of the session at most, unless others come before; None if nobody can say.
    positions
        Of its canvas, prompt included.
    state_bytes
        What it takes for itself, by state: keys and values (`kv`), its canvas, what its policies keep. Steps are shared.
    why
        Why it does not fit now; empty if it does.
    """

    fits: Fits
    steps: int | None
    positions: int
    state_bytes: Mapping[str, int]
    why: str = ""

    @classmethod
    def of(cls, described: Described, arch: Architecture, admitted: bool, refuse: Callable[[], None]) -> Forecast:
        """Return that of a request; if it is not admitted, `refuse` says why, unless it fits by the plan itself."""
        taken = {
            state.name: rows * max(state.columns(arch), 1) * ITEMSIZE[state.dtype_in(arch)]
            for state, rows in described.demand.items()
        }
        fits: Fits = "now"
        steps: int | None = 0
        why = ""
        try:
            if not admitted:
                refuse()
        except DoesNotFit as refused:
            fits, steps, why = "never" if refused.never else "later", refused.steps, str(refused)
        return cls(fits=fits, steps=steps, positions=described.length, state_bytes=taken, why=why)
