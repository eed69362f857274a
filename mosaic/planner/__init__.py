"""The planner: lifetimes, peak formula, moves, offsets. `plan` is the way in."""

from __future__ import annotations

from mosaic.planner.plan import Plan
from mosaic.planner.planner import Planner, Request, plan

__all__ = ["Plan", "Planner", "Request", "plan"]
