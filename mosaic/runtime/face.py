"""What users hold of an engine: they look at its memory, give it back, and close it."""

from __future__ import annotations

from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Executor
from mosaic.runtime.outputs import MemoryReport
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.runtime.workspace import Workspace


class Face(ClosesOnExit):
    """What a compiled model and a compiled program have in common."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def workspace(self) -> Workspace:
        """Its memory."""
        return self._engine.workspace

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, in the order of their last use."""
        return self._engine.executors

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes by pool; planned are those of the last step's plan."""
        with self._engine.turn():
            return self._engine.memory()

    def trim(self) -> None:
        """Give back what only earlier steps needed, and pages of states in which nobody has a row.

        It happens by itself where a step would exceed the budget otherwise. After a generation its memory is kept for the next
        one until then. Outputs of the last step stay valid on the CPU; on a CUDA device they are emptied, as by a next step.
        """
        with self._engine.turn():
            self._engine.trim()

    def close(self) -> None:
        """Give all memory back. Closing twice is fine; running a step afterwards is an error."""
        self._engine.close()
