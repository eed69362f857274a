"""Local search over the order in which blocks are dropped on the skyline; late acceptance, one seed, compiled or not.

Any assignment that lies bottom-justified is the drop of its blocks by offset, so the best order gives an optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compiled, kernels
from .blocks import Blocks
from .layout import Layout
from .memory import FAR

_MEMORY = 1000  # steps back that late acceptance compares with


class LocalSearch:
    """An improving order, which goes on wherever it stopped; deterministic for a seed.

    It starts from an assignment, one offset per block; `fast` compiles it with numba.
    """

    def __init__(self, blocks: Blocks, layout: Layout, offsets: Sequence[int], *, seed: int, fast: bool) -> None:
        self._blocks, self._layout, self._fast = blocks, layout, fast
        rows, columns = layout.rows, layout.columns
        order = sorted(range(len(rows)), key=lambda i: offsets[rows[i]])
        make: Any = (lambda column: np.array(column, np.int64)) if fast else list
        self._order, self._best = make(order), make(order)
        self._offsets, self._tops = make(columns["sizes"]), make(columns["totals"])  # as long as that; overwritten
        names = ("sizes", "piece_cuts", "piece_low", "piece_high", "alignments", "pin_cuts", "pin_low", "pin_top")
        self._fixed = [make(columns[name]) for name in names]
        cost = self._drop(self._offsets)
        peak = max([self._offsets[i] + columns["sizes"][i] for i in order], default=0)
        draws = (seed * 0x9E3779B97F4A7C1 + 88172645463325252) & 0x3FFFFFFFFFFFFFFF or 1
        self._state, self._past = make([draws, 0, cost, peak, cost]), make([cost] * _MEMORY)

    def advance(self, steps: int, goal: int) -> int:
        """Try that many more moves, or until a peak of `goal` bytes; return the best peak of the free blocks."""
        run = compiled.compiled(kernels.improve) if self._fast else kernels.improve
        work = (self._state, self._order, self._best, self._past, self._offsets, self._tops)
        return int(run(steps, goal, *work, *self._fixed))

    def offsets(self) -> list[int]:
        """Return the best placement, one offset per block."""
        offsets = self._offsets.copy()
        self._drop(offsets)
        return self._blocks.beside_pins({row: int(offsets[i]) for i, row in enumerate(self._layout.rows)})

    def _drop(self, offsets: Any) -> int:
        """Drop the best order; write where its rows lie; return the cost."""
        run: Any = compiled.compiled(kernels.drop) if self._fast else kernels.drop
        return int(run(self._best, offsets, self._tops, *self._fixed, FAR))
