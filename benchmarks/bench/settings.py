"""What to measure: one value, checked once, handed to every worker process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from mosaic.errors import UnknownName, UsageError
from mosaic.units import Size, parse_bytes, parse_lengths

__all__ = ["ENGINES", "Settings"]

ENGINES: Final = ("mosaic", "eager", "compile")


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
    budget, host_budget
        What Mosaic may take of the device, and of the host in pinned memory: bytes, or like "24GiB"; by default what the
        device's profile says. The PyTorch engines have no budget.
    repeats
        Counted steps per point; the median is reported.
    seed
        Of random weights and inputs.
    """

    model: str
    device: str
    contexts: tuple[int, ...]
    mask_ratios: tuple[float, ...] = (0.5,)
    engines: tuple[str, ...] = ENGINES
    dtype: str | None = None
    budget: Size | None = None
    host_budget: Size | None = None
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "contexts", parse_lengths(self.contexts))
        for name, least in (("budget", 1), ("host_budget", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), what=name, least=least))
        self.check_contexts()
        if not self.mask_ratios or not all(0 < ratio <= 1 for ratio in self.mask_ratios):
            raise UsageError(f"mask ratios are in (0, 1], at least one; got {list(self.mask_ratios)}.")
        if not self.engines or len(set(self.engines)) < len(self.engines):
            raise UsageError(f"name each engine once, of {', '.join(ENGINES)}; got {list(self.engines)}.")
        for engine in self.engines:
            if engine not in ENGINES:
                raise UnknownName("engine", engine, ENGINES)
        if self.repeats < 1:
            raise UsageError(f"a step is timed at least once, got {self.repeats} repeats.")

    def check_contexts(self) -> None:
        """Refuse to measure nothing."""
        if not self.contexts:
            raise UsageError("give at least one context to time.")

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
