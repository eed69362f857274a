"""`benchmarks.bench` as the tables have it: `torch.compile` in several ways, the fastest attention, averages, largest contexts."""

from __future__ import annotations

from benchmarks.engines.settings import COMPILED, SpeedSettings
from benchmarks.engines.suite import fastest_compiled, run

__all__ = ["COMPILED", "SpeedSettings", "fastest_compiled", "run"]
