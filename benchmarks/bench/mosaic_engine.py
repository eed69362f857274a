"""Mosaic as an engine: `mosaic.compile`, called with the same ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.inputs import Inputs
from benchmarks.bench.meters import driver_bytes
from benchmarks.bench.settings import Settings
from mosaic.devices import load_device
from mosaic.planner.plan import Plan
from mosaic.runtime.compile import compile as compile_model

__all__ = ["MosaicEngine"]


class MosaicEngine:
    """A compiled model in its planned memory."""

    ratio_matters = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.profile = load_device(settings.device)
        self.cuda = self.profile.backend == "cuda"
        self.compiled = compile_model(
            settings.model,
            device=self.profile,
            dtype=settings.dtype,
            budget=settings.budget,
            host_budget=settings.host_budget,
            threads=None if self.cuda else torch.get_num_threads(),  # as many as the other engines
            seed=settings.seed,
        )
        self.model = self.compiled.model
        self.arch = self.model.architecture
        self._inputs: Inputs | None = None

    def describe(self) -> dict[str, Any]:
        """Return what is true of every point."""
        return {
            "weights_bytes": self.compiled.memory().planned["weights"],
            "budget_bytes": self.compiled.memory().budget_bytes,
            "arithmetic": "logits of the masked rows, their statistics in float32",
        }

    def start(self, inputs: Inputs) -> None:
        """Remember the inputs."""
        self._inputs = inputs

    def settle(self) -> None:
        """Do nothing: the pages are the plan's."""

    def step(self) -> tuple[Tensor, Tensor]:
        """Run one step; return token and confidence of the masked positions."""
        assert self._inputs is not None
        with self.compiled.exclusive():  # views, though a meter's thread may be running
            found = self.compiled(self._inputs.token_ids)
        return found.token_ids, found.confidence

    @property
    def plan(self) -> Plan:
        """That of the inputs' step."""
        assert self._inputs is not None
        return self.compiled.plan(self._inputs.tokens, masked=self._inputs.masked)

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return predicted, planned and measured figures, after the counted steps."""
        plan, memory = self.plan, self.compiled.memory()
        return {
            "driver_bytes": driver_bytes(self.cuda),
            "reserved_bytes": torch.cuda.memory_reserved() if self.cuda else None,
            "activation_peak_bytes": plan.peak_bytes,
            "inflation": memory.committed["workspace"] / max(memory.planned["workspace"], 1) - 1,
            "predicted_s": plan.predicted_step_ms / 1e3,
        }

    def warm(self) -> None:
        """Do nothing: the first call of every point warms it."""

    def close(self) -> None:
        """Give the memory back."""
        self.compiled.close()
