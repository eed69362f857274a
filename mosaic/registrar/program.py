"""A program: a model's graphs over shared dims, the weights that they share, and the states that outlive a step.

Every phase sees every weight and every state buffer of the program, in one order, so that the plans of all phases place
them at the same addresses. A step may join several phases into one plan, or run one after another, with the second in
one of several sizes. In both cases, carries are handed from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from mosaic.errors import GraphError, UnknownName
from mosaic.registrar.bucketed import BucketedStep, Buckets
from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.validate import validate

__all__ = ["BucketedStep", "Build", "Program"]

Build: TypeAlias = Callable[[Graph], None]


class Program:
    """Phases of one model.

    Parameters
    ----------
    name
        The model's name.
    backend
        The backend whose implementations declare scratch bytes in graphs without a device; plans use their device's.

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
        self._bucketed: dict[str, BucketedStep] = {}

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of everything that can be planned: the phases and the joined steps."""
        return (*self._phases, *self._steps)

    @property
    def bucketed(self) -> Mapping[str, BucketedStep]:
        """The bucketed steps, by name."""
        return MappingProxyType(self._bucketed)

    def add_phase(self, name: str, build: Build) -> None:
        """Add a phase; `build` registers its ops into a graph."""
        self._require_new(name)
        self._phases[name] = build

    def add_step(self, name: str, phases: Sequence[str]) -> None:
        """Join phases, in order, into one step that is planned as a whole."""
        self._require_new(name, phases)
        self._steps[name] = tuple(phases)

    def add_bucketed_step(self, name: str, prefix: str, suffix: str, *, count: str, dim: str, buckets: Buckets) -> None:
        """Run a phase after another, in the smallest of several sizes that holds the count that the first computed.

        Each has its own plans, and carries lie at the same address in all of them. The suffix may declare a carry with
        fewer rows than the prefix: it sees the first ones. See `BucketedStep`.

        Raises
        ------
        GraphError
            If the buckets are not ascending numbers from 1.
        """
        self._require_new(name, (prefix, suffix))
        step = BucketedStep(prefix=prefix, suffix=suffix, count=count, dim=dim, buckets=buckets)
        if not callable(buckets):
            step.sizes({})
        self._bucketed[name] = step

    def _require_new(self, name: str, phases: Sequence[str] = ()) -> None:
        """Make sure that a name is free, and that the phases exist."""
        if name in (*self.steps, *self._bucketed):
            raise GraphError(f"program '{self.name}' has a phase or step '{name}' already")
        for phase in phases:
            if phase not in self._phases:
                raise UnknownName("phase", phase, self._phases)

    def graph(self, name: str, choices: Mapping[str, str] | None = None, *, backend: str | None = None) -> Graph:
        """Register and validate one phase or joined step; see `register`."""
        g = self.register(name, choices, backend=backend)
        validate(g)
        return g

    def register(
        self, name: str, choices: Mapping[str, str] | None = None, *, backend: str | None = None, brief: bool = False
    ) -> Graph:
        """Register one phase or joined step, with everything that it shares with the others; the compiler validates it.

        Parameters
        ----------
        backend
            The backend whose implementations declare scratch bytes; the program's by default.
        brief
            Leave out layers that repeat others, and whatever it shares with the other graphs, which are its `others`.

        Raises
        ------
        GraphError
            If two phases disagree about a weight, a state or a carry, or a bucketed step's suffix and prefix disagree.
        """
        if name not in self._phases and name not in self._steps:
            raise UnknownName("step", name, self.steps)
        g = Graph(name, backend=backend or self.backend, choices=choices, brief=brief)
        own = {phase: self._registered(phase, g, choices) for phase in self._phases} if len(self._phases) > 1 else {}
        g.others = tuple(own.values()) if brief else ()
        for graph in own.values():
            self._declare_shared(g, graph)
        for phase in self._steps.get(name, (name,)):
            if name in self._steps:
                with g.part(phase):
                    self._phases[phase](g)
            else:
                self._phases[phase](g)
        g.handed = self._handed(g, own)
        return g

    def _registered(self, phase: str, g: Graph, choices: Mapping[str, str] | None) -> Graph:
        """Register a phase by itself, with the given choices that it has."""
        own = Graph(phase, backend=g.backend, choices=choices, lenient=True, brief=g.brief)
        self._phases[phase](own)
        return own

    def _handed(self, g: Graph, own: Mapping[str, Graph]) -> frozenset[str]:
        """Names of the carries that hold a value when a phase starts, because it is the suffix of bucketed steps."""
        found: set[str] = set()
        for name, step in self._bucketed.items():
            if g.name == step.suffix:
                prefix = own[step.prefix]
                _require_count(name, step, prefix, g)
                written = {b.name: b for op in prefix.ops for b in op.writes if b.kind == "carry"}
                for b in g.buffers:
                    if b.kind == "carry" and b.name in written:
                        _require_alike(b, written[b.name])
                        found.add(b.name)
        return frozenset(found)

    def _declare_shared(self, g: Graph, own: Graph) -> None:
        """Declare the weights, those in host memory too, and the state of one phase, in order of registration, and the dims of
        their shapes."""
        shared = [b for b in own.buffers if b.is_shared]
        needed = {
            name for name, info in own.dims.items() if info.value is not None
        }  # in an order that does not depend on choices
        needed |= {name for b in shared for dim in b.shape if not isinstance(dim, int) for name in dim.names}
        for bounded in reversed(own.dims.values()):  # a bound is declared before the dim that it bounds
            if str(bounded.symbol) in needed and bounded.at_most is not None:
                needed.add(bounded.at_most)
        for name, info in own.dims.items():
            if name in needed:
                g.dim(name, at_most=info.at_most, value=info.value)
        for b in shared if not g.brief else ():
            if b.kind == "weight":
                g.weight(b.name, b.shape, b.dtype, tensor=b.tensor)
            elif b.kind == "host":
                g.buffer(b.name, b.shape, b.dtype, kind="host", tensor=b.tensor)
            else:
                g.state(b.name, b.shape, b.dtype)


def _require_count(name: str, step: BucketedStep, prefix: Graph, suffix: Graph) -> None:
    """Make sure that the prefix has the count, and the suffix the dim."""
    counts = {
        b.name for b in prefix.buffers if b.kind == "output" and b.spec.elements == 1 and b.dtype.startswith("int")
    }
    if step.count not in counts:
        raise GraphError(f"step '{name}': '{step.prefix}' has no output '{step.count}' of one integer")
    if step.dim not in suffix.dims:
        raise GraphError(f"step '{name}': '{step.suffix}' has no dim '{step.dim}'")


def _require_alike(taken: Buffer, given: Buffer) -> None:
    """Make sure that both phases see the same rows."""
    if (taken.dtype, taken.shape[1:]) != (given.dtype, given.shape[1:]):
        raise GraphError(
            f"{taken.name} ({taken.source}): the carry is {taken.spec} here and {given.spec} where it is written "
            f"({given.source}); only the number of rows may differ"
        )
