"""A program: a model's graphs over shared dims, the weights they tie, and the state that outlives a step.

Every phase sees every weight and every state buffer of the program, in one
order, so that all phases' plans place them at the same addresses. A step may
join several phases, with carries handed from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from mosaic.errors import GraphError, UnknownName
from mosaic.registrar.graph import Graph
from mosaic.registrar.validate import validate

__all__ = ["Program"]

Build: TypeAlias = Callable[[Graph], None]


class Program:
    """Phases of one model.

    Parameters
    ----------
    name
        The model's name.
    backend
        Whose implementations declare scratch bytes.

    Examples
    --------
    >>> def encode(g):
    ...     n = g.dim("q_tokens")
    ...     cache = g.state("cache", (g.dim("kv_tokens"), 8), "float32")
    ...     _ = g.add_op("gather_rows", cache, g.input("rows", (n,), "int64"))
    >>> program = Program("toy")
    >>> program.add_phase("prefill", encode)
    >>> program.graph("prefill").state("cache", (program.graph("prefill").dim("kv_tokens"), 8), "float32").pool
    'state/cache'
    """

    def __init__(self, name: str, *, backend: str = "cuda") -> None:
        self.name, self.backend = name, backend
        self._phases: dict[str, Build] = {}
        self._steps: dict[str, tuple[str, ...]] = {}

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of everything that can be planned: the phases and the joined steps."""
        return (*self._phases, *self._steps)

    def add_phase(self, name: str, build: Build) -> None:
        """Add a phase; `build` registers its ops into a graph."""
        if name in self._phases or name in self._steps:
            raise GraphError(f"program '{self.name}' has a phase or step '{name}' already")
        self._phases[name] = build

    def add_step(self, name: str, phases: Sequence[str]) -> None:
        """Join phases, in order, into one step that is planned as a whole."""
        if name in self._phases or name in self._steps:
            raise GraphError(f"program '{self.name}' has a phase or step '{name}' already")
        for phase in phases:
            if phase not in self._phases:
                raise UnknownName("phase", phase, self._phases)
        self._steps[name] = tuple(phases)

    def graph(self, name: str, choices: Mapping[str, str] | None = None) -> Graph:
        """Register and validate one phase or joined step.

        Raises
        ------
        GraphError
            Where two phases disagree about a weight, a state or a carry.
        """
        if name not in self._phases and name not in self._steps:
            raise UnknownName("step", name, self.steps)
        g = Graph(name, backend=self.backend, choices=choices)
        for phase in self._phases:
            self._declare_shared(g, phase, choices)
        for phase in self._steps.get(name, (name,)):
            if name in self._steps:
                with g.part(phase):
                    self._phases[phase](g)
            else:
                self._phases[phase](g)
        validate(g)
        return g

    def _declare_shared(self, g: Graph, phase: str, choices: Mapping[str, str] | None) -> None:
        """Declare the weights and the state of one phase, in order of registration, and the dims of their shapes."""
        own = Graph(phase, backend=self.backend, choices=choices)
        self._phases[phase](own)
        shared = [b for b in own.buffers if b.kind in ("weight", "state")]
        needed = {str(symbol) for b in shared for dim in b.shape for symbol in getattr(dim, "free_symbols", ())}
        for bounded in reversed(own.dims.values()):  # a bound is declared before what it bounds
            if str(bounded.symbol) in needed and bounded.at_most is not None:
                needed.add(bounded.at_most)
        for name, info in own.dims.items():
            if name in needed:
                g.dim(name, at_most=info.at_most, value=info.value)
        for b in shared:
            if b.kind == "weight":
                g.weight(b.name, b.shape, b.dtype, tensor=b.tensor)
            else:
                g.state(b.name, b.shape, b.dtype)
