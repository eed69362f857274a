"""The two graphs of a phase that is cut inside a layer: the first computes the carries, the second continues from them.

Carries: hidden states and queries of all tokens, the numbers of the kept tokens, and their bounds. The second graph's
inputs per token and row are those of the kept rows.
Legend: T tokens, K rows kept, M rows to decide, D hidden, N H queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from mosaic.errors import GraphError
from mosaic.models.inputs import ROW_BOUNDS
from mosaic.models.parts.cut import COUNT, DECIDED_DIM, KEPT_DIM, PLACE, KeptRows

if TYPE_CHECKING:
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Supply
    from mosaic.models.parts.cut import Cut
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle


def _check(step: StepGraph, cut: Cut) -> None:
    """Raise a `GraphError` if the layer cannot be cut."""
    if not 0 <= cut.layer < step.arch.layers - 1:
        raise GraphError(
            f"a step is cut in a layer before the last, which is layer {step.arch.layers - 1}; got layer {cut.layer}."
        )


def _hidden(step: StepGraph) -> Buffer:
    return step.g.carry("cut_hidden", (step.g.dim("tokens"), step.arch.hidden), step.arch.dtype)


def _queries(step: StepGraph, cut: Cut) -> Buffer:
    width = step.arch.stack[cut.layer].attention.width
    return step.g.carry("cut_queries", (step.g.dim("tokens"), width), step.arch.dtype)


def _rows(step: StepGraph) -> Buffer:
    return step.g.carry("cut_rows", (step.g.dim("tokens"),), "int64")


def _bounds(step: StepGraph) -> Buffer:
    return step.g.carry("cut_bounds", (step.seqs + 1,), "int32")


class Prefix:
    """The first graph: it writes hidden states and queries into the carries."""

    def __init__(self, step: StepGraph, cut: Cut, way: Way) -> None:
        _check(step, cut)
        self.step, self.cut, self._way = step, cut, way
        self.hidden = _hidden(step)

    def end(self, matrices: dict[str, Bundle]) -> None:
        """Register queries, keys and values of the cut layer, and the choice of rows."""
        step, layer = self.step, self.cut.layer
        queries = _queries(step, self.cut)
        into = KeptRows(_rows(step), _bounds(step), step.g.output(COUNT, (1,), "int64"))
        with step.g.scope(f"layers.{layer}"):
            step.residency.arrive(streamed=step.residency.streams(layer))
            self._way.project(step, layer, step.attention_norm(layer), matrices, queries)
            self.cut.observe(step, layer, queries)
        self.cut.select(step, into)


class _Resumed(NamedTuple):
    """The inputs of ops over kept rows."""

    rows: Buffer
    positions: Buffer
    decided: Buffer
    asked: Buffer
    cu_decided: Buffer


class Suffix:
    """The second graph: it gathers the kept rows, and continues with the attention of the cut layer."""

    def __init__(self, step: StepGraph, cut: Cut, way: Way) -> None:
        _check(step, cut)
        self.step, self.cut, self._way = step, cut, way
        self._hidden, self._queries = _hidden(step), _queries(step, cut)
        self.decided = step.g.dim(DECIDED_DIM, at_most=KEPT_DIM)

    @cached_property
    def _resumed(self) -> _Resumed:
        step, g = self.step, self.step.g
        kept, rows = (step.tokens,), self.decided
        found = _Resumed(
            g.buffer("cut_kept", kept, "int64"), g.buffer("cut_positions", kept, "int32"),
            g.buffer("cut_decided", (rows,), "int64"), g.buffer("cut_asked", (rows,), "int64"),
            g.buffer("cut_cu_decided", (step.seqs + 1,), "int32"),
        )  # fmt: skip
        g.add_op(
            "resume_rows", _rows(step), _bounds(step), *map(self._first, ("positions", "rows", ROW_BOUNDS.name)),
            out=(*found, g.output(PLACE, (g.dim("masked"),), "int32")), size=step.tokens, most=rows,
        )  # fmt: skip
        return found

    def _first(self, name: str) -> Buffer:
        """An input of the first graph."""
        return self._computed[name]() if name in self._computed else self.step.inputs.given(name)

    def supplied(self, computed: Mapping[str, Supply]) -> Mapping[str, Supply]:
        """Return functions that register the inputs per token and row, for the kept rows.

        `computed` are the inputs that the step computes itself.
        """
        own: dict[str, Supply] = {
            "positions": lambda: self._resumed.positions,
            "cu_seqlens": lambda: _bounds(self.step),
            "rows": lambda: self._resumed.decided,
            ROW_BOUNDS.name: lambda: self._resumed.cu_decided,
        }
        self._computed = computed
        given = [name for name, entry in self.step.inputs.declared.items() if entry.per in ("token", "row")]
        return {name: partial(self._of_kept, name) for name in (*given, *computed)} | own

    def _of_kept(self, name: str) -> Buffer:
        """An input of the first graph, of the kept rows if it is of its tokens or rows."""
        g, whole = self.step.g, self._first(name)
        if whole.shape[0] not in (g.dim("tokens"), g.dim("masked")):
            return whole
        rows = self._resumed.rows if whole.shape[0] == g.dim("tokens") else self._resumed.asked
        out = g.output(name, rows.shape, whole.dtype) if name in self.step.phase.results else None
        found: Buffer = g.add_op("gather_rows", whole, rows, out=out, name=f"kept_{name}")
        return found

    def begin(self) -> None:
        """Gather the hidden states."""
        self.step.g.add_op("gather_rows", self._hidden, self._resumed.rows, out=self.step.hidden.buffer, name="resume")

    def attention(self, matrices: dict[str, Bundle]) -> None:
        """Register hidden += attention(q) @ o_proj.T of the cut layer."""
        step, carried = self.step, self._queries
        q = step.g.buffer("q", (step.tokens, carried.shape[1]), carried.dtype)
        step.g.add_op("gather_rows", carried, self._resumed.rows, out=q, name="queries")
        self._way.resume(step, self.cut.layer, q, matrices)
