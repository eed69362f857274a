"""The memory interface of compiled models and programs: report, trim and close."""

from __future__ import annotations

from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Executor
from mosaic.runtime.outputs import MemoryReport
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.runtime.workspace import Workspace


class Face(ClosesOnExit):
    """The common base of compiled models and compiled programs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def workspace(self) -> Workspace:
        """Its memory."""
        return self._engine.workspace

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, least recently used first."""
        return self._engine.executors

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes by pool; the planned ones are those of the last step's plan."""
        with self._engine.turn():
            return self._engine.memory()

    def trim(self) -> None:
        """Give back memory that only earlier steps needed, and pages of states without owned rows.

        A step that would exceed the budget does so by itself. Until then, a generation's memory is kept for the next
        one. Outputs of the last step stay valid on the CPU; on a CUDA device they are emptied, as by a next step.
        """
        with self._engine.turn():
            self._engine.trim()

    def close(self) -> None:
        """Give all memory back. Closing twice is fine; running a step afterwards is an error."""
        self._engine.close()
