"""Mosaic as an engine: `mosaic.compile`, called with the same ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mosaic.bench.floor import Floor
from mosaic.bench.inputs import Inputs
from mosaic.bench.meters import driver_bytes
from mosaic.bench.plans import alive_by_plan
from mosaic.bench.settings import Settings
from mosaic.devices import load_device
from mosaic.planner import Planner, Request
from mosaic.runtime.compile import compile as compile_model

__all__ = ["MosaicEngine", "fixed_part"]


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
            config=settings.config,
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

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return what was predicted, planned and measured, after the counted steps."""
        assert self._inputs is not None
        plan = self.compiled.plan(self._inputs.tokens, masked=self._inputs.masked)
        memory = self.compiled.memory()
        before = _allocations(self.cuda)
        self.step()
        facts: dict[str, Any] = {
            "allocations_in_step": _allocations(self.cuda) - before if self.cuda else None,
            "driver_bytes": driver_bytes(self.cuda),
            "reserved_bytes": torch.cuda.memory_reserved() if self.cuda else None,
            "activation_peak_bytes": plan.peak_bytes,
            "planned_bytes": sum(memory.planned.values()) + plan.components["context"] + plan.components["library"],
            "committed_bytes": dict(memory.committed),
            "planned_components": {**plan.components, **memory.planned},
            "host_bytes": plan.host_bytes,
            "inflation": memory.committed["workspace"] / max(memory.planned["workspace"], 1) - 1,
            "predicted_s": plan.predicted_step_ms / 1e3,
            "config": dict(plan.config),
            "attention": {"used": plan.records.implementations.get("attention", self.profile.backend)},
            "max_ctx_tokens": plan.max_ctx_tokens,
        }
        facts |= fixed_part(facts["driver_bytes"], memory.committed, plan.components)
        peak, average = alive_by_plan(plan.records, self.profile)
        facts |= {"average_bytes": round(average), "peak_to_average": peak / average}
        if not self.profile.estimated:  # the rates of a data sheet bound nothing
            facts["floor_s"] = Floor(self.arch, self.profile).whole(self._inputs.tokens, self._inputs.masked)
        return facts

    def largest_context(self, cap_bytes: int, mask_ratio: float) -> dict[str, Any]:
        """Return the planner's largest context: what it says, it runs."""
        planner = Planner(
            self.model,
            device=self.profile,
            budget=cap_bytes,
            host_budget=self.settings.host_budget,
        )
        request = Request(seq_lens=(1,), mask_ratio=mask_ratio)
        return {"max_tokens": planner.max_context(request), "note": "the planner's"}

    def warm(self) -> None:
        """Do nothing: the first call of every point warms it."""

    def close(self) -> None:
        """Give the memory back."""
        self.compiled.close()


def fixed_part(
    driver_bytes: int | None, committed: Mapping[str, int], components: Mapping[str, int]
) -> dict[str, int | None]:
    """Return what the card shows beyond our pages (context, modules, libraries), and the bound that the plan declared."""
    pages = sum(size for name, size in committed.items() if name != "host")
    return {
        "fixed_bytes": None if driver_bytes is None else driver_bytes - pages,
        "declared_fixed_bytes": components["context"] + components["library"],
    }


def _allocations(cuda: bool) -> int:
    """How often PyTorch's allocator has been asked for memory of the card."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0)) if cuda else 0
