"""A compiled model as the decoding tests take runners: from tensors, and with an architecture that a test may replace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

import mosaic
from mosaic.errors import DoesNotFit
from mosaic.models.architecture import Architecture
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.planner.plan import Plan
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.steps import StateRows, StepRequest, StepResult

__all__ = ["CompiledRunner"]


class CompiledRunner:
    """A checkpoint of these tensors, compiled.

    Parameters
    ----------
    options
        For `mosaic.compile`.

    Attributes
    ----------
    peak_bytes
        The most that a plan in force has taken since the last `check`.
    planned_bytes
        The same per pool.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], /, **options: Any) -> None:
        self._config, self._tensors, self._options = config, tensors, options
        self._compile()
        self.checked: Plan | None = None
        self.peak_bytes, self.planned_bytes = 0, dict[str, int]()

    def _compile(self) -> None:
        with TemporaryDirectory() as folder:
            contiguous = {name: tensor.contiguous() for name, tensor in self._tensors.items()}
            save_file(contiguous, f"{folder}/model.safetensors")
            Path(folder, "config.json").write_text(json.dumps(self._config), encoding="utf-8")
            self.model = mosaic.compile(folder, **self._options)
        self._architecture = self.model.architecture

    @property
    def architecture(self) -> Architecture:
        return self._architecture

    @architecture.setter
    def architecture(self, changed: Architecture) -> None:
        """The mask token is part of plans: with another one the model is compiled again."""
        if changed.mask_token_id != self._architecture.mask_token_id:
            self.model.close()
            self._config = {**self._config, "mask_token_id": changed.mask_token_id}
            self._compile()
        self._architecture = changed

    @property
    def asynchronous(self) -> bool:
        return self.model.asynchronous

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        results = self.model.step(requests)
        self.peak_bytes = max(self.peak_bytes, results[0].plan.total_bytes)
        for pool, size in self.model.memory().planned.items():
            self.planned_bytes[pool] = max(self.planned_bytes.get(pool, 0), size)
        return results

    def sharing(self) -> SharedSizes:
        return self.model.sharing()

    def exclusive(self) -> AbstractContextManager[object]:
        return self.model.exclusive()

    def open_rows(self, state: State) -> StateRows:
        return self.model.open_rows(state)

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Plan:
        self.checked, self.peak_bytes, self.planned_bytes = self.model.check(sizes, more=more), 0, {}
        return self.checked

    def place(self, steps: Mapping[str, StepSize], times: Mapping[str, int]) -> None:
        self.model.place(steps, times)

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        """The model's figures, compared with the plans'."""
        try:
            self.check(sizes, more=more)
        except DoesNotFit:
            assert not self.model.admits(sizes, more=more)
            return False
        assert self.model.admits(sizes, more=more)
        return True

    def close(self) -> None:
        self.model.close()
