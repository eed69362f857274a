"""A model that notes what its sessions ask for: they have no table, so that each request asks for its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.steps import StepRequest, StepResult

__all__ = ["Telling"]


class Telling:
    """The model, and in `asked` the requests of each step."""

    def __init__(self, model: CompiledModel) -> None:
        self._model, self.asked = model, list[tuple[StepRequest, ...]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def request_table(self) -> None:
        """Return no table."""

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        self.asked.append(tuple(requests))
        return self._model.step(requests)
