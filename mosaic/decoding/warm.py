"""What a session makes before its first request comes, and what that has taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING

from mosaic.decoding.rows import demand_of
from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through
from mosaic.units import format_bytes

if TYPE_CHECKING:
    from mosaic.decoding.rows import TableRow
    from mosaic.decoding.scheduler import Scheduler
    from mosaic.kernels.cuda.shared.ahead import Kernels
    from mosaic.runtime.request_table import RequestTable
    from mosaic.runtime.room import Shape
    from mosaic.runtime.steps import StepRunner

__all__ = ["Warmed", "make_warm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What `Session.warm` has made.

    Parameters
    ----------
    requests
        How many requests fit.
    steps
        Sizes of steps.
    kernels
        None on a CPU.
    graph_bytes
        Of all captured graphs of the model.
    seconds
        In all.
    """

    requests: int
    steps: int
    kernels: Kernels | None
    graph_bytes: int
    seconds: float

    def __str__(self) -> str:
        graphs = f", graphs of {format_bytes(self.graph_bytes)}" if self.graph_bytes else ""
        kernels = "" if self.kernels is None else f"; {self.kernels}"
        return f"{self.steps} steps for {self.requests} requests{graphs}, in {self.seconds:.1f} s{kernels}"


def make_warm(
    runner: StepRunner,
    scheduler: Scheduler,
    table: RequestTable,
    rows: Sequence[TableRow],
    requests: int,
    progress: Callable[[str], object],
) -> Warmed:
    """Plan, compile and capture the steps of a session for requests like these; as for `Session.warm`."""
    began = perf_counter()
    with interrupts_held(), runner.exclusive(), interrupts_let_through():
        count = scheduler.foresee(rows, requests)
        if not count:
            runner.check(scheduler.sizes(rows, more := demand_of(rows[0], table.holes)), more=more)
        ladder = scheduler.ladder(rows)
        kernels = _compiled(table, ladder, progress)
    for number, (shape, kept) in enumerate(ladder if table.engine.ahead is None else (), start=1):
        progress(f"step {number} of {len(ladder)}: {shape.room}")
        with interrupts_held(), runner.exclusive(), interrupts_let_through():
            table.rehearse(shape, kept)
    with interrupts_held(), runner.exclusive():
        table.rest()
        table.freeze()
    return Warmed(
        requests=count,
        steps=len(ladder),
        kernels=kernels,
        graph_bytes=table.engine.memory().graph_bytes,
        seconds=perf_counter() - began,
    )


def _compiled(
    table: RequestTable, steps: Sequence[tuple[Shape, int | None]], progress: Callable[[str], object]
) -> Kernels | None:
    """Compile the kernels of steps, with the size of the second graph of cut ones; None on a CPU."""
    if table.engine.planner.device.backend == "cpu":
        return None
    from mosaic.runtime.launches import compile_ahead

    sizes = [(table.size(shape.room, table.planned), kept) for shape, kept in steps]
    graphs = ([size] if kept is None else [size.graph(), size.graph(kept)] for size, kept in sizes)
    return compile_ahead(table.engine, chain.from_iterable(graphs), progress)
