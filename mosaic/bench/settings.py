"""What to measure: one value, checked once, handed to every worker process as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from mosaic.errors import UnknownName, UsageError
from mosaic.units import Size, parse_bytes, parse_lengths

__all__ = ["ATTENTION", "COMPILED", "ENGINES", "SCHEMA", "Settings"]

SCHEMA: Final = "mosaic.bench/1"
ENGINES: Final = ("mosaic", "eager", "compile")
COMPILED: Final[Mapping[str, Mapping[str, Any]]] = {
    "static": {"dynamic": False},
    "reduce-overhead": {"dynamic": False, "mode": "reduce-overhead"},
    "dynamic": {"dynamic": True},
}
"""Ways to compile, and what each asks of `torch.compile`: for one size at a time, the same in CUDA graphs, for any size."""
ATTENTION: Final = ("fastest", "default", "cudnn", "flash", "efficient", "math")
"""How the PyTorch engines attend: the fastest backend of a timing on the same card, PyTorch's own choice, or one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One benchmark: a model on a device, at every context with every share of masked tokens.

    Parameters
    ----------
    model
        A preset's name (random weights) or a checkpoint directory.
    device
        The profile of the card, or "cpu".
    contexts, mask_ratios
        Tokens of the one sequence, and shares of them that are masked, in (0, 1].
    engines
        Of `ENGINES`, in the order in which they run.
    compiled
        Of `COMPILED`, in the order in which they run, each in a process of its own. The fastest at a size counts as `compile`
        there; the last one finds the largest contexts.
    dtype
        Of weights and activations; the checkpoint's if not given.
    budget, host_budget
        What Mosaic may take of the device, and of the host in pinned memory: bytes, or like "24GiB"; what the device's
        profile says if not given. The PyTorch engines take what they take.
    caps
        Find the largest context of every engine under this many bytes of device memory, the CUDA context included.
    repeats
        Counted steps per point; the median is reported.
    attention
        One of `ATTENTION`, for the PyTorch engines.
    averages
        Profile one more step of the PyTorch engines, for the time-weighted average of their activations.
    config
        Forces Mosaic's configuration instead of searching.
    seed
        Of random weights and inputs.
    """

    model: str
    device: str
    contexts: tuple[int, ...]
    mask_ratios: tuple[float, ...] = (0.5,)
    engines: tuple[str, ...] = ENGINES
    compiled: tuple[str, ...] = tuple(COMPILED)
    dtype: str | None = None
    budget: Size | None = None
    host_budget: Size | None = None
    caps: tuple[int, ...] = ()
    repeats: int = 5
    attention: str = "fastest"
    averages: bool = True
    config: Mapping[str, int | str | None] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._read_sizes()
        if not (self.contexts or self.caps):
            raise UsageError("give at least one context to time, or a cap to find the largest context in.")
        if not self.mask_ratios or not all(0 < ratio <= 1 for ratio in self.mask_ratios):
            raise UsageError(f"mask ratios are in (0, 1], at least one; got {list(self.mask_ratios)}.")
        if not self.engines or len(set(self.engines)) < len(self.engines):
            raise UsageError(f"name each engine once, of {', '.join(ENGINES)}; got {list(self.engines)}.")
        for engine in self.engines:
            if engine not in ENGINES:
                raise UnknownName("engine", engine, ENGINES)
        if not self.compiled or len(set(self.compiled)) < len(self.compiled):
            raise UsageError(f"name each way to compile once, of {', '.join(COMPILED)}; got {list(self.compiled)}.")
        for way in self.compiled:
            if way not in COMPILED:
                raise UnknownName("way to compile", way, COMPILED)
        if self.attention not in ATTENTION:
            raise UnknownName("attention backend", self.attention, ATTENTION)
        if self.repeats < 1:
            raise UsageError(f"a step is timed at least once, got {self.repeats} repeats.")

    def _read_sizes(self) -> None:
        """Numbers and text to ints."""
        object.__setattr__(self, "contexts", parse_lengths(self.contexts))
        object.__setattr__(self, "caps", tuple(parse_bytes(cap, what="cap") for cap in self.caps))
        for name, least in (("budget", 1), ("host_budget", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), what=name, least=least))

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        lists = {field.name for field in fields(cls) if str(field.type).startswith("tuple")}
        given: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in values.items()}
        return cls(**given)
