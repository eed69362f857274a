"""The planner: lifetimes, peak formula, moves, offsets. `plan` is the entry point."""

from __future__ import annotations

from mosaic.planner.custom import plan_graph, plan_program
from mosaic.planner.plan import Plan
from mosaic.planner.planner import Planner, plan
from mosaic.planner.request import Request

__all__ = ["Plan", "Planner", "Request", "plan", "plan_graph", "plan_program"]
