"""Side-by-side measurements: eager PyTorch, `torch.compile` and Mosaic, each in a process of its own.

`settings` and `suite` need no torch; the rest runs in the worker processes that `suite.run` starts.
"""

from __future__ import annotations

from benchmarks.bench.settings import ENGINES, Settings
from benchmarks.bench.suite import run

__all__ = ["ENGINES", "Settings", "run"]
