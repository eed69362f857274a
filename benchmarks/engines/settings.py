"""Measurements of a table beyond `benchmarks.bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.bench import Settings
from mosaic.errors import UnknownName, UsageError
from mosaic.units import parse_bytes

__all__ = ["ATTENTION", "COMPILED", "SpeedSettings"]

COMPILED: Final[Mapping[str, Mapping[str, Any]]] = {
    "static": {"dynamic": False},
    "reduce-overhead": {"dynamic": False, "mode": "reduce-overhead"},
    "dynamic": {"dynamic": True},
}
"""Modes, and the arguments of `torch.compile`: for one size at a time, the same in CUDA graphs, for any size."""
ATTENTION: Final = ("fastest", "default", "cudnn", "flash", "efficient", "math")
"""How the PyTorch engines attend: the fastest backend of a timing on the same card, PyTorch's own choice, or one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSettings(Settings):
    """One benchmark of `benchmarks.speed`.

    Parameters
    ----------
    compiled
        Of `COMPILED`, in the order in which they run, each in a process of its own. The fastest at a size counts as `compile`
        there; the last one finds the largest contexts.
    caps
        Find the largest context of every engine under this many bytes of device memory, the CUDA context included.
    attention
        One of `ATTENTION`, for the PyTorch engines.
    """

    compiled: tuple[str, ...] = tuple(COMPILED)
    caps: tuple[int, ...] = ()
    attention: str = "fastest"

    def __post_init__(self) -> None:
        object.__setattr__(self, "caps", tuple(parse_bytes(cap, what="cap") for cap in self.caps))
        Settings.__post_init__(self)
        if not self.compiled or len(set(self.compiled)) < len(self.compiled):
            raise UsageError(f"name each way to compile once, of {', '.join(COMPILED)}; got {list(self.compiled)}.")
        for way in self.compiled:
            if way not in COMPILED:
                raise UnknownName("way to compile", way, COMPILED)
        if self.attention not in ATTENTION:
            raise UnknownName("attention backend", self.attention, ATTENTION)

    def check_contexts(self) -> None:
        """Refuse to measure nothing."""
        if not (self.contexts or self.caps):
            raise UsageError("give at least one context to time, or a cap to find the largest context in.")
