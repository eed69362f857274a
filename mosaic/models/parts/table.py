"""Tokens of requests that stand in a table on the device: the step itself finds whom it serves, and moves the table on.

A step is planned for a number of tokens, windows, rows to decide and extents of keys. It packs the windows of the requests that
it has room for, so the host gives it nothing of them, and may launch one step after another. Legend: T tokens, B windows, M rows
to decide, E extents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.models.inputs import Input, together
from mosaic.models.parts.windows import Windows
from mosaic.models.state import State
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.request_table import COLUMNS

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import Supply
    from mosaic.models.parts.part import ResultPer
    from mosaic.models.step_graph import Ending, StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["CANVAS", "HELD_EXTENTS", "REQUESTS", "TABLED", "Tabled"]

REQUESTS: Final = State(name="requests", width=COLUMNS, dtype="int64", least_rows=16, together=True)
"""A row for each request (`mosaic.registrar.request_table`)."""
CANVAS: Final = State(name="canvas", dtype="int64", together=True)
"""A token for each position of a request, `OPEN` where nothing is decided."""
HELD_EXTENTS: Final = State(name="held_extents", width=4, dtype="int64", together=True)
"""The extents of each request's keys, in order of position."""
ROOM: Final = Input(name="room", dtype="int64", per="step", width=8)
_BOUNDS: Final = ("cu_seqlens", "cu_rows", "cu_extents")
_DRAWS: Final = ("keys", "temperature", "top_p", "top_k", "cuts", "score_temperature")
_PLACED: Final = ("positions", "token_rows", "rows", "decided_rows", "extents", "quota", "threshold", "edit_threshold")


@dataclass(frozen=True, slots=True)
class Tabled(Windows):
    """Windows of the requests of a table; the host gives a step its `room` alone."""

    alone: ClassVar[bool] = True

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return which rows of the table are looked at, and what the step has room for."""
        return (ROOM,)

    @property
    def states(self) -> Sequence[State]:
        """The table, and what its columns point to."""
        return REQUESTS, CANVAS, HELD_EXTENTS

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """How each request that was served stands, and the rows of the canvas that were to decide."""
        return {"report": "sequence", "decided_rows": "row"}

    def supplied(self, step: StepGraph) -> Mapping[str, Supply]:
        """Register who is served and where their windows lie; return all inputs."""
        g, seqs, (tokens, masked) = step.g, step.seqs, map(step.g.dim, ("tokens", "masked"))
        extents = g.dim("extents") if step.phase.cached else 1
        table, canvas, cut = step.state(REQUESTS), step.state(CANVAS), step.phase.cut is not None
        keep = g.carry if cut else g.buffer
        served, begins = keep("served", (seqs,), "int64"), keep("begins", (seqs,), "int32")
        bounds = [keep(name, (seqs + 1,), "int32") for name in _BOUNDS]
        keys: Supply = partial(keep, "seen", (seqs,), "int32")  # a second graph need not ask for it
        if step.phase.graph != "suffix":
            seen = keys()
            g.add_op(
                "pack_requests", table, step.inputs[ROOM.name], out=(served, begins, seen, *bounds), name="pack",
                sequences=seqs,
            )  # fmt: skip
            keys = partial(_same, seen)
        shapes: dict[str, tuple[tuple[Any, ...], str]] = {
            "positions": ((tokens,), "int32"), "token_rows": ((tokens,), "int64"), "rows": ((masked,), "int64"),
            "decided_rows": ((masked,), "int64"), "extents": ((extents, 4), "int64"), "quota": ((seqs,), "int32"),
            "threshold": ((seqs,), "float32"), "edit_threshold": ((seqs,), "float32"),
        }  # fmt: skip
        # of a step that is cut, the second graph gives back those of the rows to decide that are kept
        own = {name: (f"all_{name}", g.buffer) if cut else (name, g.output) for name in self.results}
        placed = {}
        for name in _PLACED:
            called, make = own.get(name, (name, g.buffer))
            placed[name] = make(called, *shapes[name])
        g.add_op(
            "place_requests", table, canvas, step.state(HELD_EXTENTS), served, begins, *bounds, out=tuple(placed.values()),
            name="place", tokens=tokens, most=masked, count=extents,
        )  # fmt: skip
        found = placed | {buffer.name: buffer for buffer in bounds}
        supplied = {"seen": keys} | {name: partial(_same, buffer) for name, buffer in found.items()}
        supplied["token_ids"] = partial(_read, step, placed["token_rows"], "tokens")
        supplied["current"] = partial(_read, step, placed["decided_rows"], "current")
        supplied |= _draws(step, served, found)
        given = _Given(found | {REQUESTS.name: table, CANVAS.name: canvas, "served": served, "begins": begins})
        given.seen = keys
        for part in step.phase.parts:
            supplied |= part.of_table(step, given)
        return supplied

    def decided(self, end: Ending, chosen: Buffer, committed: Buffer) -> None:
        """Write the decisions, and move the table on; in a step that is cut, of the rows that were kept."""
        g = end.g
        served = {name: end.inputs[name] for name in ("seen", "cu_seqlens", "cu_rows", "decided_rows")}
        served |= {name: g[name] for name in ("served", "begins", "cu_extents", *_PLACED) if name not in served}
        served |= {state.name: state.register(g, end.arch) for state in (REQUESTS, CANVAS)}
        g.add_op("write_canvas", chosen, served["decided_rows"], served["canvas"], committed, name="decide")
        for part in end.phase.parts:
            part.note(end, served)
        g.add_op(
            "advance_requests", *(served[name] for name in ("requests", "canvas", "served", "begins", "cu_seqlens", "cu_rows")),
            out=g.output("report", (served["served"].shape[0], WIDTH), "int64"), name="advance", mask_id=end.arch.mask_token_id,
        )  # fmt: skip


class _Given(dict[str, "Buffer"]):
    """Buffers by name; `seen` is registered when a part asks for it."""

    seen: Supply

    def __missing__(self, name: str) -> Buffer:
        if name != "seen":
            raise KeyError(name)
        return self.seen()


def _same(buffer: Buffer) -> Buffer:
    return buffer


def _read(step: StepGraph, rows: Buffer, name: str) -> Buffer:
    tokens: Buffer = step.g.add_op("read_canvas", step.state(CANVAS), rows, name=name, open_id=step.arch.mask_token_id)
    return tokens


def _draws(step: StepGraph, served: Buffer, found: Mapping[str, Buffer]) -> dict[str, Supply]:
    """What rows draw by."""
    given = step.state(REQUESTS), served, found["cu_rows"], found["decided_rows"]
    return together(_DRAWS, lambda: step.g.add_op("draw_requests", *given, name="draws"))


TABLED: Final = Tabled()
