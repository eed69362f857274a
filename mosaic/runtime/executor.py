"""Executor: binds a plan document to memory once, then runs a flat list of kernel launches. A step allocates nothing.

Views are made and chunk loops unrolled when a plan is bound; `run` only walks the list. The executor trusts the plan
(the checker proves it) and obeys it to the byte; `debug="poison"` shows a plan that lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from mosaic import kernels
from mosaic.errors import PlanFormatError, UsageError
from mosaic.runtime.workspace import Workspace, torch_dtype

__all__ = ["Call", "Debug", "Executor"]

Debug = Literal["poison"] | None
SCHEMA: Final = "mosaic.plan/1"
_KEPT: Final = ("weight", "state", "external", "host")  # what a step leaves alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One bound launch: the op's index and name, the function, its arguments."""

    op: int
    name: str
    function: Callable[..., object]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    name: str
    parent: str | None
    dim: str
    start: int
    end: int
    rows: int
    extent: int
    count: int
    carried: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One iteration of a region: rows [start, end) of its dim."""

    index: int
    start: int
    end: int


@dataclass(slots=True)
class _Events:
    """Where roots are poisoned, by op index: before the op (their lifetime starts) or after the op before it (ends)."""

    starts: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)

    def inside(self, region: _Region) -> _Events:
        """Keep the events strictly inside a region; those on its borders happen once, outside of the loop."""
        return _Events(
            *(
                {time: roots for time, roots in table.items() if region.start < time < region.end}
                for table in (self.starts, self.ends)
            )
        )

    def merged(self, other: _Events) -> _Events:
        """Both sets of events."""
        return _Events(*(_merge(a, b) for a, b in ((self.starts, other.starts), (self.ends, other.ends))))


def _merge(a: dict[int, list[int]], b: dict[int, list[int]]) -> dict[int, list[int]]:
    return {time: a.get(time, []) + b.get(time, []) for time in [*a, *(time for time in b if time not in a)]}


_Chunks = Mapping[str, _Chunk]


class Executor:
    """A plan bound to a workspace.

    Parameters
    ----------
    plan
        A plan document (`mosaic.plan/1`), or an object with one as `document`.
    workspace
        Its pools must be committed as far as the plan reaches.
    tensors
        Tensors to use for weight, state and external buffers instead of the plan's offsets, by the buffers' `tensor`
        names: parameters adopted from a module.
    debug
        "poison": fill every buffer with NaN (integers with their least value) before its lifetime and after it.

    Attributes
    ----------
    inputs, outputs
        Views by name. Write the inputs before each `run`; the outputs are valid until the next one.
    """

    def __init__(
        self,
        plan: Any,
        workspace: Workspace,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        debug: Debug = None,
    ) -> None:
        self.document: Mapping[str, Any] = getattr(plan, "document", plan)
        if self.document.get("schema") != SCHEMA:
            raise PlanFormatError(
                f"the plan's schema is {self.document.get('schema')!r}, this runtime runs '{SCHEMA}'."
            )
        if debug not in (None, "poison"):
            raise UsageError(f"debug is None or 'poison', got {debug!r}.")
        self.workspace, self.debug = workspace, debug
        self._buffers: Sequence[Mapping[str, Any]] = self.document["buffers"]
        self._regions = _read_regions(self.document)
        self._tensors = dict(tensors or {})
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self.inputs = self._named("input")
        self.outputs = self._named("output")
        self.calls: tuple[Call, ...] = tuple(self._unroll())

    def run(self) -> None:
        """Run the step. Inputs are read from `inputs`; afterwards the results stand in `outputs`."""
        call = None
        try:
            for call in self.calls:
                call.function(**call.arguments)
        except Exception as error:
            error.add_note(f"in op {call.op} ({call.name}) of the plan" if call is not None else "before the first op")
            raise

    def buffer(self, name: str) -> Tensor:
        """View a whole buffer by name; its contents are those of the plan's moment."""
        for record in self._buffers:
            if record["name"] == name:
                return self._view(record["id"], {}, ())
        raise UsageError(f"the plan has no buffer '{name}'.")

    # --- views ----------------------------------------------------------------------------------------------------

    def _named(self, kind: str) -> Mapping[str, Tensor]:
        mine = {record["name"]: self._view(record["id"], {}, ()) for record in self._buffers if record["kind"] == kind}
        return MappingProxyType(mine)

    def _view(self, buffer: int, chunks: _Chunks, slices: Sequence[tuple[int, str, int]]) -> Tensor:
        """View a buffer as one iteration sees it; views are shared between ops.

        `slices` lists (axis, region, factor). A buffer from outside the region shows the iteration's rows, one from
        inside shows as many of its first rows as the iteration has.
        """
        record = self._buffers[buffer]
        slot = self._slot(record, chunks)
        ranges = tuple(self._rows(record, chunks, *entry) for entry in slices)
        key = (buffer, slot, ranges)
        view = self._views.get(key)
        if view is None:
            view = self._whole(record, slot)
            for axis, start, end in ranges:
                view = view.narrow(axis, start, end - start)
            self._views[key] = view
        return view

    def _whole(self, record: Mapping[str, Any], slot: int) -> Tensor:
        adopted = self._tensors.get(record["tensor"] or "")
        if adopted is not None:
            return adopted
        if record["kind"] == "external":
            raise UsageError(f"the buffer '{record['name']}' is external: give the tensor '{record['tensor']}'.")
        root = self._root(record)
        offset = root["offset"] + record["alias_offset"] + slot * (record["size"] // record["rotate"])
        return self.workspace.view(root["pool"], offset, record["shape"], record["dtype"])

    def _root(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        while record["alias_of"] is not None:
            record = self._buffers[record["alias_of"]]
        return record

    def _slot(self, record: Mapping[str, Any], chunks: _Chunks) -> int:
        if record["rotate"] == 1:
            return 0
        home = record["region"]
        return int(chunks[home].index % record["rotate"]) if home in chunks else 0

    def _rows(
        self, record: Mapping[str, Any], chunks: _Chunks, axis: int, region: str, factor: int
    ) -> tuple[int, int, int]:
        chunk = chunks[region]
        if self._is_inside(record["region"], region):
            return axis, 0, factor * (chunk.end - chunk.start)
        return axis, factor * chunk.start, factor * chunk.end

    def _depth(self, region: str | None) -> int:
        return 0 if region is None else 1 + self._depth(self._regions[region].parent)

    def _is_inside(self, home: str | None, region: str) -> bool:
        while home is not None and home != region:
            home = self._regions[home].parent
        return home is not None

    # --- unrolling ------------------------------------------------------------------------------------------------

    def _unroll(self) -> Iterator[Call]:
        events = self._poison_events() if self.debug == "poison" else {}
        if self.debug == "poison":
            yield from self._poison_everything()
        yield from self._level(None, 0, len(self.document["ops"]), {}, events, _Events())

    def _level(
        self,
        region: str | None,
        start: int,
        end: int,
        chunks: _Chunks,
        events: Mapping[str | None, _Events],
        inherited: _Events,
    ) -> Iterator[Call]:
        """One pass over the body of a region (None: the step), with the loops inside it."""
        due = events.get(region, _Events()).merged(inherited)
        children = {child.start: child for child in self._regions.values() if child.parent == region}
        index = start
        while index < end:
            child = children.get(index)
            after = child.end if child is not None else index + 1
            yield from self._poison(due.starts.get(index, ()), "start", index)
            if child is None:
                yield self._bind(self.document["ops"][index], chunks)
            else:
                for chunk in _chunks_of(child, self._regions, chunks):
                    inner = {**chunks, child.name: chunk}
                    yield from self._level(child.name, index, after, inner, events, due.inside(child))
            yield from self._poison(due.ends.get(after, ()), "end", after - 1)
            index = after

    def _bind(self, op: Mapping[str, Any], chunks: _Chunks) -> Call:
        launch = kernels.load(op["kernel"], self.document.get("backend", "cpu")).launch
        by_operand: dict[str, list[tuple[int, str, int]]] = {}
        # outer loops first: a chunk of a loop inside counts from the start of the outer one's
        for operand, axis, region, factor in sorted(op["slices"], key=lambda entry: self._depth(entry[2])):
            by_operand.setdefault(operand, []).append((axis, region, factor))
        arguments: dict[str, Any] = {
            name: self._view(buffer, chunks, by_operand.get(name, ())) for name, buffer in op["operands"].items()
        }
        arguments.update(op["attrs"])
        if _takes_row_start(launch):
            arguments["row_start"] = sum(
                factor * chunks[region].start for axis, region, factor in by_operand.get("q", ()) if axis == 0
            )
        return Call(op=op["index"], name=op["name"], function=launch, arguments=arguments)

    # --- poison ---------------------------------------------------------------------------------------------------

    def _poison_events(self) -> dict[str | None, _Events]:
        """When each alias group is poisoned, by the region in whose body that happens.

        A group is poisoned before its lifetime, after it, and in its gaps. Where its home is a region, that is in every
        iteration; a group that is carried from one iteration to the next belongs to the region around.
        """
        events: dict[str | None, _Events] = {}
        for root in self._buffers:
            group = [record for record in self._buffers if self._root(record) is root]
            if root["alias_of"] is not None or root["pool"] != "workspace" or any(r["kind"] in _KEPT for r in group):
                continue
            kinds = {record["kind"] for record in group}
            home, start, end = self._poison_home(root, group)
            mine = events.setdefault(home, _Events())
            if "input" not in kinds:
                mine.starts.setdefault(start, []).append(root["id"])
            if "output" not in kinds:
                mine.ends.setdefault(end, []).append(root["id"])
            for gap in root["gaps"] if len(group) == 1 else ():
                mine.ends.setdefault(gap[0], []).append(root["id"])
        return events

    def _poison_home(self, root: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> tuple[str | None, int, int]:
        """Find the region in whose every iteration a group is poisoned, and its lifetime there."""
        home: str | None = root["region"]
        start, end = min(record["start"] for record in group), max(record["end"] for record in group)
        while home is not None:
            region = self._regions[home]
            # the slots of a double buffer outlive one iteration, like what is carried
            if root["rotate"] == 1 and not any(record["id"] in region.carried for record in group):
                break
            home, start, end = region.parent, min(start, region.start), max(end, region.end)
        return home, start, end

    def _poison(self, roots: Sequence[int], when: str, op: int) -> Iterator[Call]:
        for buffer in roots:
            yield self._fill(self._buffers[buffer], when, op)

    def _fill(self, record: Mapping[str, Any], when: str, op: int) -> Call:
        dtype = torch_dtype(record["dtype"])
        numel = record["size"] // dtype.itemsize
        view = self.workspace.view(record["pool"], record["offset"], (numel,), record["dtype"])
        name = f"poison {record['name']} at its {when}"
        return Call(op=op, name=name, function=view.fill_, arguments={"value": _poison_value(dtype)})

    def _poison_everything(self) -> Iterator[Call]:
        """Fill what no input occupies before the step; 0xFF is NaN in every float dtype and -1 in integers."""
        inputs = sorted(
            (record["offset"], record["offset"] + record["size"])
            for record in self._buffers
            if record["pool"] == "workspace" and record["kind"] in ("input", *_KEPT)
        )
        position = 0
        for start, end in [*inputs, (self.document["peak_bytes"], 0)]:
            if start > position:
                view = self.workspace.view("workspace", position, (start - position,), "uint8")
                yield Call(op=0, name="poison", function=view.fill_, arguments={"value": 0xFF})
            position = max(position, end)


@cache
def _takes_row_start(launch: Callable[..., object]) -> bool:
    """Tell whether a kernel wants to know which row of the whole its first row is."""
    return "row_start" in signature(launch).parameters


def _poison_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    if dtype == torch.bool:
        return True
    return 0xFF if dtype == torch.uint8 else torch.iinfo(dtype).min


def _read_regions(document: Mapping[str, Any]) -> dict[str, _Region]:
    carried: dict[str, frozenset[int]] = {}
    for barrier in document["barriers"]:
        if barrier["region"] is not None:
            carried[barrier["region"]] = frozenset(barrier["carried"])
    return {
        entry["name"]: _Region(
            carried=carried.get(entry["name"], frozenset()),
            **{key: entry[key] for key in ("name", "parent", "dim", "start", "end", "rows", "extent", "count")},
        )
        for entry in document["regions"]
    }


def _chunks_of(region: _Region, regions: Mapping[str, _Region], outer: _Chunks) -> Iterator[_Chunk]:
    """Give the iterations of a region; the last has what is left.

    A loop inside a loop over the same dim divides the rows of the outer iteration; its chunks count from there.
    """
    extent, parent = region.extent, region.parent
    while parent is not None:
        if regions[parent].dim == region.dim:
            extent = min(extent, outer[parent].end - outer[parent].start)
            break
        parent = regions[parent].parent
    for index in range(region.count):
        start, end = index * region.rows, min((index + 1) * region.rows, extent)
        if start < end:
            yield _Chunk(index=index, start=start, end=end)
