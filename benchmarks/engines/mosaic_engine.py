"""Mosaic as an engine, with all that a table says of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.bench.mosaic_engine import MosaicEngine
from benchmarks.engines.plans import alive_by_plan
from benchmarks.engines.settings import SpeedSettings
from mosaic.planner import Planner, Request

__all__ = ["MeasuredEngine", "fixed_part"]


class MeasuredEngine(MosaicEngine):
    """A compiled model in its planned memory."""

    settings: SpeedSettings

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return predicted, planned and measured figures, after the counted steps."""
        facts, plan, memory = super().facts(step_s), self.plan, self.compiled.memory()
        before = _allocations(self.cuda)
        self.step()
        peak, average = alive_by_plan(plan.records, self.profile)
        return {
            **facts,
            "allocations_in_step": _allocations(self.cuda) - before if self.cuda else None,
            "planned_bytes": sum(memory.planned.values()) + plan.components["context"] + plan.components["library"],
            "committed_bytes": dict(memory.committed),
            "planned_components": {**plan.components, **memory.planned},
            "host_bytes": plan.host_bytes,
            "config": dict(plan.config),
            "attention": {"used": plan.records.implementations.get("attention", self.profile.backend)},
            "max_ctx_tokens": plan.max_ctx_tokens,
            **fixed_part(facts["driver_bytes"], memory.committed, plan.components),
            "average_bytes": round(average),
            "peak_to_average": peak / average,
        }

    def largest_context(self, cap_bytes: int, mask_ratio: float) -> dict[str, Any]:
        """Return the planner's largest context, which is then run."""
        planner = Planner(
            self.model, device=self.profile, budget=cap_bytes, host_budget=self.settings.host_budget
        )  # fmt: skip
        request = Request(seq_lens=(1,), mask_ratio=mask_ratio)
        return {"max_tokens": planner.max_context(request), "note": "the planner's"}


def fixed_part(
    driver_bytes: int | None, committed: Mapping[str, int], components: Mapping[str, int]
) -> dict[str, int | None]:
    """Return the card's bytes beyond Mosaic's pages (context, modules, libraries), and the plan's bound of them."""
    pages = sum(size for name, size in committed.items() if name != "host")
    return {
        "fixed_bytes": None if driver_bytes is None else driver_bytes - pages,
        "declared_fixed_bytes": components["context"] + components["library"],
    }


def _allocations(cuda: bool) -> int:
    """How often PyTorch's allocator has been asked for memory of the card."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0)) if cuda else 0
