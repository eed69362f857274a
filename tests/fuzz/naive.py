"""The naive interpreter: every buffer is a tensor of its own, ops run in program order, loops slice by slice.

Without rows for its knob a loop runs once over everything. What nothing has written is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .findings import require
from .formulas import READS, UPDATES, WHOLE, evaluate
from .language import Beside, Body, Call, Choose, Declare, Loop, Program, Shape

INTEGERS = {"int64": torch.int64, "int32": torch.int32}


@dataclass(frozen=True)
class Chunk:
    """Rows [start, start + count) of a dim; `size` is what a full chunk has."""

    index: int
    start: int
    count: int
    size: int


@dataclass
class Box:
    """A buffer's slots and the dims of the loops it is at home in."""

    shape: Shape
    home: frozenset[str]
    slots: list[Tensor]
    turn: str | None = None


@dataclass
class Naive:
    """One step of a program.

    Parameters
    ----------
    choices
        The option of every choice.
    rows
        Rows per chunk by knob; None runs the loop once.
    given
        Values of inputs, weights, state and constants; states are updated.
    """

    program: Program
    choices: Mapping[str, str]
    rows: Mapping[str, int | None]
    given: Mapping[str, Tensor]
    boxes: dict[str, Box] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    calls: int = 0

    def run(self) -> dict[str, Tensor]:
        """Run the step; the values that all buffers outside of loops hold at its end."""
        self._body(self.program.body)
        return {name: box.slots[0] for name, box in self.boxes.items() if not box.home}

    def _body(self, body: Body) -> None:
        for s in body:
            match s:
                case Declare():
                    self._declare(s)
                case Call():
                    self._call(s)
                case Loop():
                    self._loop(s)
                case Beside():
                    self._body(s.body)
                case Choose():
                    self._body(s.options[self.choices[s.name]])
                case _:
                    pass  # what says only when, or where

    def _loop(self, loop: Loop) -> None:
        extent = self.program.dims[loop.dim].value
        rows = min(self.rows.get(loop.knob) or extent, extent)
        for index, start in enumerate(range(0, extent, rows)):
            self.chunks[loop.dim] = Chunk(index, start, min(rows, extent - start), rows)
            self._body(loop.body)
        for name in [name for name, box in self.boxes.items() if loop.dim in box.home]:
            del self.boxes[name]
        del self.chunks[loop.dim]

    def _declare(self, s: Declare) -> None:
        if s.name in self.boxes and (s.outside or s.rotate > 1 or s.kind != "transient"):
            return
        home = frozenset(self.chunks) if s.kind == "transient" and not s.outside else frozenset[str]()
        if s.name in self.given:
            self.boxes[s.name] = Box(s.shape, home, [self.given[s.name]])
            return
        turn = list(self.chunks)[-1] if home and s.rotate > 1 else None
        self.boxes[s.name] = Box(s.shape, home, [self._empty(s, home) for _ in range(s.rotate)], turn)

    def _empty(self, s: Declare, home: frozenset[str]) -> Tensor:
        sizes = [
            size[1] * self.chunks[size[0]].size
            if not isinstance(size, int) and size[0] in home
            else self.program.value(size)
            for size in s.shape
        ]
        if s.dtype in INTEGERS:
            return torch.full(sizes, torch.iinfo(INTEGERS[s.dtype]).min, dtype=INTEGERS[s.dtype])
        return torch.full(sizes, torch.nan, dtype=torch.float64)

    def _view(self, name: str, *, whole: bool = False) -> Tensor:
        """A buffer as the current iterations see it."""
        box = self.boxes[name]
        view = box.slots[self.chunks[box.turn].index % len(box.slots) if box.turn else 0]
        for axis, size in enumerate(box.shape):
            if isinstance(size, int) or size[0] not in self.chunks:
                continue
            chunk = self.chunks[size[0]]
            inside = size[0] in box.home
            if inside or not whole:
                view = view.narrow(axis, 0 if inside else size[1] * chunk.start, size[1] * chunk.count)
        return view

    def _call(self, s: Call) -> None:
        self.calls += 1
        whole = WHOLE.get(s.kernel, frozenset())
        names = {key: name for key, name in zip(READS[s.kernel], s.reads, strict=False) if name is not None}
        operands = {key: self._view(name, whole=key in whole) for key, name in names.items()}
        unwritten = [names[key] for key, value in operands.items() if value.is_floating_point() and value.isnan().any()]
        require(
            not unwritten, "unwritten", f"{s.kernel} reads more of {unwritten} than was written: the fuzzer is wrong"
        )
        attrs = dict(s.attrs)
        first = next((names[name] for name in ("q", "k") if name in names), None)
        leading = self.boxes[first].shape[0] if first else 0
        if not isinstance(leading, int) and leading[0] in self.chunks:
            attrs["row_start"] = leading[1] * self.chunks[leading[0]].start
        results = evaluate(s.kernel, operands, attrs)
        if s.kernel in UPDATES:
            operands[UPDATES[s.kernel]].copy_(results[0])
        elif s.into:
            for name, value in zip(s.writes, results, strict=True):
                self._view(name).copy_(value)
        else:
            for name, shape, value in zip(s.writes, s.shapes, results, strict=True):
                self.boxes[name] = Box(shape, frozenset(self.chunks), [value.clone()])
