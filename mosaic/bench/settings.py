"""What to measure: one value, checked once, handed to every worker process as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from mosaic.errors import UnknownName, UsageError

__all__ = ["ATTENTION", "ENGINES", "SCHEMA", "Settings"]

SCHEMA: Final = "mosaic.bench/1"
ENGINES: Final = ("mosaic", "eager", "compile")
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
    dtype
        Of weights and activations; the checkpoint's if not given.
    budget_bytes, host_budget_bytes
        What Mosaic may take of the device, and of the host in pinned memory; what the device's profile says if not
        given. The PyTorch engines take what they take.
    caps
        Find the largest context of every engine under so many bytes of device memory, the CUDA context included.
    repeats
        Counted steps per point; the median is reported.
    attention
        One of `ATTENTION`, for the PyTorch engines.
    floor
        Measure the GEMM and attention rates of the plan's own shapes, and the time that its FLOPs take at them.
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
    dtype: str | None = None
    budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    caps: tuple[int, ...] = ()
    repeats: int = 5
    attention: str = "fastest"
    floor: bool = False
    averages: bool = True
    config: Mapping[str, int | str | None] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.contexts or self.caps) or min(self.contexts, default=1) < 1:
            raise UsageError(f"contexts are positive numbers of tokens, at least one; got {list(self.contexts)}.")
        if min(self.caps, default=1) < 1:
            raise UsageError(f"caps are positive numbers of bytes, got {list(self.caps)}.")
        if not self.mask_ratios or not all(0 < ratio <= 1 for ratio in self.mask_ratios):
            raise UsageError(f"mask ratios are in (0, 1], at least one; got {list(self.mask_ratios)}.")
        if not self.engines or len(set(self.engines)) < len(self.engines):
            raise UsageError(f"name each engine once, of {', '.join(ENGINES)}; got {list(self.engines)}.")
        for engine in self.engines:
            if engine not in ENGINES:
                raise UnknownName("engine", engine, ENGINES)
        if self.attention not in ATTENTION:
            raise UnknownName("attention backend", self.attention, ATTENTION)
        if self.repeats < 1:
            raise UsageError(f"a step is timed at least once, got {self.repeats} repeats.")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        lists = {field.name for field in fields(cls) if str(field.type).startswith("tuple")}
        given: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in values.items()}
        return cls(**given)
