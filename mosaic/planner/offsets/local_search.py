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

__all__ = ["LocalSearch"]

_MEMORY = 1000  # steps back that late acceptance compares with


class LocalSearch:
    """An improving order, which goes on wherever it stopped; deterministic for a seed.

    Parameters
    ----------
    layout : Layout
        From `layout_of`.
    offsets : sequence of int
        The assignment to start from, one offset per block.
    seed : int
        Of the random moves.
    fast : bool
        Compile with numba.
    """

    def __init__(self, blocks: Blocks, layout: Layout, offsets: Sequence[int], *, seed: int, fast: bool) -> None:
        self._blocks, self._layout, self._fast = blocks, layout, fast
        rows, columns = layout.rows, layout.columns
        order = sorted(range(len(rows)), key=lambda i: offsets[rows[i]])
        make: Any = (lambda column: np.array(column, dtype=np.int64)) if fast else list
        self._state = make([(seed * 0x9E3779B97F4A7C1 + 88172645463325252) & 0x3FFFFFFFFFFFFFFF or 1, 0, 0, 0, 0])
        self._order, self._best, self._past = make(order), make(order), make([0] * _MEMORY)
        self._offsets, self._tops = make([0] * len(rows)), make([0] * max(layout.num_sections, 1))
        names = ("sizes", "piece_cuts", "piece_low", "piece_high", "alignments", "pin_cuts", "pin_low", "pin_top")
        self._fixed = [make(columns[name]) for name in names]

    def advance(self, steps: int, goal: int) -> int:
        """Try that many more moves, or until a peak of `goal` bytes; return the best peak of the free blocks."""
        if not self._layout.rows:
            return 0
        run = compiled.compiled(kernels.improve) if self._fast else kernels.improve
        work = (self._state, self._order, self._best, self._past, self._offsets, self._tops)
        return int(run(steps, goal, *work, *self._fixed))

    def offsets(self) -> list[int]:
        """Return the best placement, one offset per block."""
        run: Any = compiled.compiled(kernels.drop) if self._fast else kernels.drop
        scratch = self._offsets.copy()
        run(self._best, scratch, self._tops.copy(), *self._fixed, 1 << 62)
        pins = self._blocks.pins
        found = [pin or 0 for pin in pins] if pins is not None else [0] * len(self._blocks)
        for row, offset in zip(self._layout.rows, scratch, strict=True):
            found[row] = int(offset)
        return found
