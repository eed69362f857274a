"""Views of a plan's buffers for ops, made when a plan is bound; equal views are shared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from mosaic.errors import UsageError
from mosaic.planner.plan_records import PlanBuffer, PlanRecords, PlanRegion
from mosaic.runtime.regions import Chunk, Chunks, Regions
from mosaic.runtime.workspace import Workspace, torch_dtype


class SliceOf(NamedTuple):
    """Iteration i of a region sees `factor` x its rows of one axis of an operand."""

    axis: int
    region: str
    factor: int


class Loop(NamedTuple):
    """An innermost loop, bound for all of its iterations at once."""

    region: PlanRegion
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """The value of an argument in each iteration of a loop; equal keys mean equal values."""

    key: Hashable
    values: Sequence[Any]


_Ranges: TypeAlias = tuple[tuple[int, int, int], ...]


class Views:
    """Views of one plan's buffers in a workspace.

    Parameters
    ----------
    tensors
        Tensors to use instead of the plan's offsets, by the buffers' `tensor` names; host buffers stay the plan's.
    """

    def __init__(
        self, records: PlanRecords, regions: Regions, workspace: Workspace, tensors: Mapping[str, Tensor]
    ) -> None:
        self._records = records
        self._regions, self._workspace, self._tensors = regions, workspace, tensors
        self._wholes: dict[Hashable, Tensor] = {}
        self._parts: dict[Hashable, Tensor] = {}
        self._columns: dict[Hashable, Column] = {}

    def root(self, record: PlanBuffer) -> PlanBuffer:
        """Give the buffer whose storage a buffer occupies."""
        return self._records.root(record)

    def is_adopted(self, buffer: int) -> bool:
        """Return whether a caller's tensor is used for a buffer."""
        record = self._records.buffers[buffer]
        return record.pool != "host" and (record.tensor or "") in self._tensors

    def whole(self, buffer: int, slot: int = 0, *, on_device: bool = False) -> Tensor:
        """View one slot of a buffer; `on_device` views host memory at the address that kernels use."""
        record = self._records.buffers[buffer]
        adopted = self._tensors.get(record.tensor or "") if record.pool != "host" else None
        if adopted is not None:
            return adopted
        if record.kind == "external":
            raise UsageError(f"the buffer '{record.name}' is external: give the tensor '{record.tensor}'.")
        root = self.root(record)
        offset = root.offset + record.alias_offset + slot * (record.size // record.rotate)
        place = root.pool, offset, tuple(record.shape), record.dtype
        return self.at(*place, on_device=on_device and root.pool == "host")

    def bytes_of(self, buffer: int) -> Tensor:
        """View all bytes of a root, in its dtype."""
        record = self._records.buffers[buffer]
        numel = record.size // torch_dtype(record.dtype).itemsize
        return self.at(record.pool, record.offset, (numel,), record.dtype)

    def at(self, pool: str, offset: int, shape: tuple[int, ...], dtype: str, *, on_device: bool = False) -> Tensor:
        """View bytes of a pool; the same bytes are the same tensor."""
        key = pool, offset, shape, dtype, on_device
        view = self._wholes.get(key)
        if view is None:
            where = {"on_device": True} if on_device else {}
            view = self._wholes[key] = self._workspace.view(pool, offset, shape, dtype, **where)
        return view

    def operand(
        self, buffer: int, slices: Sequence[SliceOf], chunks: Chunks, loop: Loop | None, *, on_device: bool = False
    ) -> Tensor | Column:
        """View a buffer as an op sees it: one view, or a column of views if it changes from iteration to iteration.

        A buffer from outside a region is narrowed to the iteration's rows, one from inside to as many of its first rows
        as the iteration has.

        Parameters
        ----------
        slices
            Outer regions first: a chunk of an inner loop counts from the start of the outer chunk.
        chunks
            The current iterations of the enclosing loops, except the bound one.
        loop
            The bound loop, if the op is in one.
        """
        record = self._records.buffers[buffer]
        home, rotate = record.region, record.rotate
        turns = loop is not None and rotate > 1 and home == loop.region.name
        slots = range(rotate) if turns else (chunks[home].index % rotate if home is not None and home in chunks else 0,)
        outer = tuple(self._range(home, entry, chunks[entry.region]) for entry in slices if entry.region in chunks)
        bases = [self._part(self.whole(buffer, slot, on_device=on_device), outer) for slot in slots]
        inner = [entry for entry in slices if entry.region not in chunks]
        if loop is None or not (turns or inner):
            return bases[0]
        ways = tuple((entry.axis, entry.factor, self._is_inside(home, entry.region)) for entry in inner)
        key = tuple(map(id, bases)), ways, id(loop.chunks)  # all are kept alive, so the ids stay unique
        if key not in self._columns:
            values = [
                self._part(bases[chunk.index % len(bases)], tuple(self._range(home, entry, chunk) for entry in inner))
                for chunk in loop.chunks
            ]
            self._columns[key] = Column(key, values)
        return self._columns[key]

    def _part(self, base: Tensor, ranges: _Ranges) -> Tensor:
        """Narrow a view axis by axis."""
        if not ranges:
            return base
        key = id(base), ranges
        view = self._parts.get(key)
        if view is None:
            view = base
            for axis, start, end in ranges:
                view = view.narrow(axis, start, end - start)
            self._parts[key] = view
        return view

    def _range(self, home: str | None, entry: SliceOf, chunk: Chunk) -> tuple[int, int, int]:
        axis, region, factor = entry
        if self._is_inside(home, region):
            return axis, 0, factor * (chunk.end - chunk.start)
        return axis, factor * chunk.start, factor * chunk.end

    def _is_inside(self, home: str | None, region: str) -> bool:
        return region in self._regions.chain(home)
