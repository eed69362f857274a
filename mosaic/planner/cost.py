"""Predicted time of a step: per op max(FLOPs / rate at this size, bytes / bandwidth) + launch; streams run in parallel.

Ops are grouped into classes of equal cost (every layer repeats the same ones), so a step is a few dozen numbers. On
one stream times add; a region's time is that of its full chunks and of the shorter last one. With side streams, see
`timeline`. Pure: no clock and no device is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mosaic.devices import ANY_COLUMNS, Device, Rates
from mosaic.planner.body import Body, BufferRecord, OpRecord
from mosaic.planner.invariant import kernels_on_request
from mosaic.planner.timeline import Timeline, overlapping_loops
from mosaic.registrar.few_rows import FEW_ROWS
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import find

_Vector: TypeAlias = npt.NDArray[np.float64]
_Knobs: TypeAlias = tuple[str, ...]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_LINK_SHARE: Final = 0.5
"""The share of a transfer's bytes that crosses the link: what is read on one side is written on the other."""
_KEPT: Final = 4096
"""Results kept per cache."""


class _CostClass(NamedTuple):
    """Ops with the same cost: their rate; the kernel that chooses it by implementation ("": none); the only
    implementation, if there is one; the knobs of the enclosing regions; the knob whose iterations overlap ("": none);
    and polynomial rows of FLOPs, bytes, rate rows and rate columns."""

    rate: str
    kernel: str
    way: str
    knobs: tuple[str, ...]
    loop: str
    flops: int
    bytes: int
    rate_rows: int
    rate_columns: int


class _Part(NamedTuple):
    """A group of cost classes: [monomials, 4 x classes] of their FLOPs, bytes, rate rows and rate columns; the classes
    by rate, kernel and implementation; and the number of ops of each."""

    coefficients: _Vector
    spans: Mapping[tuple[str, str, str], slice]
    counts: _Vector


class _Slot(NamedTuple):
    """Cost classes that depend on the same knobs, the loop with side ops around them, and how often each row of the
    timeline counts them, [members, rows]."""

    knobs: tuple[str, ...]
    loop: str
    members: npt.NDArray[np.intp]
    counts: _Vector


class RateGrid:
    """FLOP/s over the logarithms of rows and columns: bilinear inside the measured range, constant outside.

    With `most`, also constant from that many rows on.
    """

    def __init__(self, table: Mapping[int, Rates], most: int | None = None) -> None:
        sizes = sorted({size for by_rows in table.values() for size in by_rows})
        rows, self._columns = np.log2(sizes), np.log2(list(table))
        self._least, self._most = sizes[0], max(sizes[0], min(sizes[-1], most or sizes[-1]))
        # one curve per number of columns, side by side on one axis, so that a lookup is one interpolation
        self._width = rows[-1] - rows[0] + 1
        self._axis = np.concatenate([rows + self._width * i for i in range(len(table))])
        self._rates = np.concatenate(
            [np.interp(rows, np.log2(list(by_rows)), list(by_rows.values())) for by_rows in table.values()]
        )

    def __call__(self, rows: _Vector, columns: _Vector) -> _Vector:
        place = np.log2(np.minimum(np.maximum(rows, self._least), self._most))
        if len(self._columns) > 1:
            between = np.interp(np.log2(np.maximum(columns, 1.0)), self._columns, np.arange(len(self._columns)))
            curve = np.minimum(np.floor(between), len(self._columns) - 2)
            place += curve * self._width
            near = np.interp(place, self._axis, self._rates)
            far = np.interp(place + self._width, self._axis, self._rates)
            mixed: _Vector = near + (far - near) * (between - curve)
            return mixed
        rates: _Vector = np.interp(place, self._axis, self._rates)
        return rates


class RateGrids:
    """FLOP/s on a device by the operators' rate names, and for attention by implementation."""

    def __init__(self, device: Device) -> None:
        fused = device.unembed_rates or device.gemm_rates[max(device.gemm_rates)]
        few = {ANY_COLUMNS: device.few_rows_rates} if device.few_rows_rates else device.gemm_rates
        self._products = {
            "gemm": RateGrid(device.gemm_rates),
            "few_rows": RateGrid(few, most=FEW_ROWS),  # larger products are split into pieces of FEW_ROWS rows
            "unembed": RateGrid({ANY_COLUMNS: fused}),
            "sampled_unembed": RateGrid({ANY_COLUMNS: device.sampled_unembed_rates or fused}),
        }
        self._attention = {name: RateGrid({ANY_COLUMNS: rates}) for name, rates in device.attention_rates.items()}

    def known(self, rate: str, implementation: str) -> bool:
        """Return whether the profile has a rate for this implementation: only attention has rates by implementation."""
        return rate != "attention" or implementation in self._attention

    def grid(self, rate: str, implementation: str = "") -> RateGrid | None:
        """Return the rates by rows and columns; None for an op bound by memory or the link.

        For an implementation without a rate in the profile, another one's rates are used.
        """
        if rate == "attention":
            others = self._attention
            return others.get(implementation) or others.get("triton") or next(iter(others.values()))
        return self._products.get(rate)


class OpTimes:
    """Seconds of a body's ops on a device, by the knobs they depend on, and of the whole step.

    Ops in no chunk region depend on no knob; ops in a region depend on its rows. `has_streams` says whether some ops
    run beside the others: then times do not add, and `total_seconds` is the only answer.

    Parameters
    ----------
    body
        One registration of the model.
    The profile with the rates.
        The profile whose rates hold.
    Consider only implementations whose rows do not depend on the number of other rows. A CPU has no others.
        Take no implementations but those whose rows do not depend on the number of others. On a CPU all are taken.

    Attributes
    ----------
    classes, class_of
        The cost classes, and the class of each op.
    groups
        The sets of knobs that ops depend on.
    columns
        The column of each knob's rows among the body's variables.
    """

    def __init__(self, body: Body, device: Device, *, batch_invariant: bool = False) -> None:
        self.body, self.device, self.has_streams = body, device, body.has_streams
        loop_of = overlapping_loops(body) if body.has_streams else [None] * len(body.ops)
        invariant = batch_invariant and device.backend == "cuda"
        keys = _cost_classes(body, loop_of, kernels_on_request(body, device.backend) if invariant else ())
        counts = Counter(keys)
        self.classes = sorted(counts)  # by rate first: the classes of one rate are a slice
        self.groups = sorted({c.knobs for c in self.classes})
        self.columns = _knob_columns(body)
        self._dims = sorted(set(range(len(body.variables))) - set(self.columns.values()))
        self._counts = counts
        self._joints: dict[tuple[_Knobs, ...], tuple[_Part, _Vector]] = {}
        self._whole = _part(body, self.classes, counts)
        self._grids = RateGrids(device)
        kernels = sorted({c.kernel for c in self.classes if c.kernel})
        records = {kernel: found for kernel in kernels if (found := find(kernel, body.operators)) is not None}
        self._ways = {
            kernel: {
                way.name: way
                for way in record.on(device.backend, invariant=invariant)
                if way.runs_on(device.capability)
            }
            for kernel, record in records.items()
        }
        self._rates = {kernel: record.rate for kernel, record in records.items()}
        self._part_of = {
            kernel: _part(body, [c for c in self.classes if c.kernel == kernel], counts) for kernel in kernels
        }
        self._launches_of = {kernel: _Launches(body, kernel) for kernel in self._ways}
        self._chosen: dict[tuple[int, ...], dict[str, str]] = {}
        number = {c: i for i, c in enumerate(self.classes)}
        self.class_of, self._loop_of = [number[key] for key in keys], loop_of
        self._totals: dict[tuple[int, ...], float] = {}
        self._parts: dict[tuple[Any, ...], _Vector] = {}

    def implementations(self, values: Sequence[int]) -> Mapping[str, str]:
        """Return the implementation of each operator of which the backend has several.

        Of the implementations that run on the card, support all its launches and have a known rate, it is the one that takes
        the least time for them, with every region in one pass; of equally fast ones the first.

        Parameters
        ----------
        values
            Of the body's variables; those of knobs are ignored.
        """
        dims = tuple([values[i] for i in self._dims])
        if dims not in self._chosen:
            _keep(self._chosen, dims, {kernel: self._cheapest(kernel, values) for kernel in self._ways})
        return self._chosen[dims]

    def _cheapest(self, kernel: str, values: Sequence[int]) -> str:
        point = list(values)
        for region in self.body.regions:
            point[self.columns[region.knob]] = point[self.body.variables.index(region.dim)]
        ways, part = self._ways[kernel], self._part_of[kernel]
        launches = self._launches_of[kernel].at(point)
        serving = [way for way in ways.values() if way.serves is None or all(way.serves(*each) for each in launches)]
        rated = [
            way for way in serving if way.capability or self._grids.known(way.rate or self._rates[kernel], way.name)
        ]
        seconds = {
            way.name: float((self._launch_seconds(part, [point], {kernel: way.name}) @ part.counts)[0])
            for way in rated or serving[:1]
        }
        return min(seconds, key=seconds.__getitem__)

    def launch_seconds(self, points: Sequence[Sequence[int]]) -> _Vector:
        """Return the seconds of one launch of each cost class, [points, classes], at values that differ in the knobs' rows only."""
        return self._launch_seconds(self._whole, points)

    def _launch_seconds(
        self, part: _Part, points: Sequence[Sequence[int]], chosen: Mapping[str, str] | None = None
    ) -> _Vector:
        table = np.array([(*values, 1) for values in points], dtype=np.float64)
        monomials = np.multiply.reduce(table[:, self.body.factors], axis=1)
        amounts = (monomials @ part.coefficients).reshape(len(points), 4, len(part.counts))
        flops, moved, rows, columns = amounts.transpose(1, 0, 2)
        seconds: _Vector = moved / self.device.bandwidth
        if chosen is None and self._ways:
            chosen = self.implementations(points[0])
        for (rate, kernel, way), span in part.spans.items():
            if rate == "link":
                work = moved[:, span] * (_LINK_SHARE / self.device.host_link)
            else:
                if kernel:
                    assert chosen is not None
                    way = chosen[kernel]
                    rate = self._ways[kernel][way].rate or rate
                grid = self._grids.grid(rate, way)
                if grid is None:
                    continue
                work = flops[:, span] / grid(rows[:, span], columns[:, span])
            np.maximum(seconds[:, span], work, out=seconds[:, span])
        seconds += self.device.launch_s
        return seconds

    def group_seconds(
        self, asked: Mapping[_Knobs, Sequence[Sequence[int]]], values: Sequence[int], extents: Mapping[str, int]
    ) -> dict[_Knobs, list[float]]:
        """Return, by group, the seconds of all ops that depend on exactly its knobs, all iterations together, on one stream.

        Parameters
        ----------
        asked
            By group, rows of each of its knobs, [settings, knobs]: asked for together they cost little more than one.
        values
            Of the body's variables; those of a group's knobs are replaced.
        """
        if not asked:
            return {}
        points: list[list[int]] = []
        weights: list[int] = []
        begins: list[int] = []
        owners: list[int] = []
        for number, (group, settings) in enumerate(asked.items()):
            for rows in settings:
                point = list(values)
                for knob, count in zip(group, rows, strict=True):
                    point[self.columns[knob]] = count
                begins.append(len(points))
                for weight, iteration in _iterations(self.columns, group, point, extents):
                    weights.append(weight)
                    points.append(iteration)
                    owners.append(number)
        part, counts = self._joint(tuple(asked))
        once = (self._launch_seconds(part, points) * counts[owners]).sum(axis=1)
        seconds = iter(np.add.reduceat(once * np.array(weights, dtype=np.float64), begins).tolist())
        return {group: [next(seconds) for _ in settings] for group, settings in asked.items()}

    def _joint(self, groups: tuple[_Knobs, ...]) -> tuple[_Part, _Vector]:
        """The classes of some groups, and how many ops of each group each stands for, [groups, classes]."""
        if groups not in self._joints:
            classes = [c for c in self.classes if c.knobs in groups]
            counts = [[self._counts[c] * (c.knobs == group) for c in classes] for group in groups]
            self._joints[groups] = _part(self.body, classes, self._counts), np.array(counts, dtype=np.float64)
        return self._joints[groups]

    def total_seconds(self, values: Sequence[int], extents: Mapping[str, int]) -> float:
        """Return the predicted seconds of the whole step, side streams in parallel with the main one.

        This takes tens of microseconds, less if the answer was cached.

        Parameters
        ----------
        values
            Of the body's variables.
        extents
            What the region of every knob runs over.
        """
        key = tuple(values)
        if key not in self._totals:
            iterations = {knob: -(-extents[knob] // values[self.columns[knob]]) for knob in self.timeline.knobs}
            _keep(self._totals, key, self.timeline.seconds(self._amounts(values, extents), iterations))
        return self._totals[key]

    def _amounts(self, values: Sequence[int], extents: Mapping[str, int]) -> list[list[float]]:
        """Seconds of the timeline's rows. A search changes one knob at a time: other contributions are cached."""
        dims = tuple([values[i] for i in self._dims])
        amounts = np.zeros((2, len(self.timeline.rows)))
        for number, slot in enumerate(self._slots):
            key = (number, dims, *[values[self.columns[knob]] for knob in slot.knobs])
            if key not in self._parts:
                _keep(self._parts, key, self._contribution(slot, list(values), extents))
            amounts += self._parts[key]
        seconds: list[list[float]] = amounts.tolist()
        return seconds

    def _contribution(self, slot: _Slot, values: list[int], extents: Mapping[str, int]) -> _Vector:
        """The contribution of one slot's classes to the timeline's rows, in full iterations and in the last one."""
        if not slot.loop:
            parts = [_iterations(self.columns, slot.knobs, values, extents)] * 2
        else:
            parts = []
            around = tuple(knob for knob in slot.knobs if knob != slot.loop)
            rows = min(values[self.columns[slot.loop]], extents[slot.loop])
            for count in (rows, extents[slot.loop] % rows or rows):
                point = list(values)
                point[self.columns[slot.loop]] = count
                parts.append(_iterations(self.columns, around, point, extents))
        seconds = self.launch_seconds([point for part in parts for _, point in part])[:, slot.members]
        weights = np.zeros((2, len(seconds)))
        weights[0, : len(parts[0])] = [weight for weight, _ in parts[0]]
        weights[1, len(parts[0]) :] = [weight for weight, _ in parts[1]]
        found: _Vector = weights @ seconds @ slot.counts
        return found

    @cached_property
    def timeline(self) -> Timeline:
        return Timeline(self.body, self.class_of, self._loop_of)

    @cached_property
    def _slots(self) -> list[_Slot]:
        """The classes by the knobs that they depend on, and how often each row of the timeline counts them."""
        counts = np.zeros((len(self.classes), len(self.timeline.rows)))
        for row, (_, classes) in enumerate(self.timeline.rows):
            for number, count in classes:
                counts[number, row] = count
        slots = []
        for knobs, loop in sorted({(c.knobs, c.loop) for c in self.classes}):
            members = np.array([i for i, c in enumerate(self.classes) if (c.knobs, c.loop) == (knobs, loop)])
            slots.append(_Slot(knobs, loop, members, counts[members]))
        return slots


def _part(body: Body, classes: Sequence[_CostClass], counts: Mapping[_CostClass, int]) -> _Part:
    """The numbers of some classes, sorted by rate. They are float64, because predictions need no exact FLOPs and
    products may exceed 64 bits."""
    used = [getattr(c, kind) for kind in ("flops", "bytes", "rate_rows", "rate_columns") for c in classes]
    rates = [c[:3] for c in classes]
    return _Part(
        coefficients=(body.coefficients[used] / body.denominators[used, None]).T,
        spans={rate: slice(rates.index(rate), rates.index(rate) + rates.count(rate)) for rate in rates},
        counts=np.array([counts[c] for c in classes], dtype=np.float64),
    )


def _cost_classes(body: Body, loop_of: Sequence[int | None], named: Collection[str]) -> list[_CostClass]:
    """The cost class of every op; kernels in `named` choose among implementations."""
    chains = {region: _knob_chain(body, region) for region in (None, *range(len(body.regions)))}
    loops = {None: ""} | {region: record.knob for region, record in enumerate(body.regions)}
    return [
        _CostClass(
            op.rate, *_way(op, named), chains[op.region], loops[loop], op.flops, op.bytes, op.rate_rows, op.rate_columns
        )
        for op, loop in zip(body.ops, loop_of, strict=True)
    ]


def _way(op: OpRecord, named: Collection[str]) -> tuple[str, str]:
    """The kernel of an op with several implementations on the backend, and the only one if the rate is its own."""
    if len(op.ways) > 1 or op.kernel in named:
        return op.kernel, ""
    return "", op.ways[0] if op.ways and op.rate == "attention" else ""


class _Launches:
    """The launches of a kernel that differ in operand specs or attributes."""

    def __init__(self, body: Body, kernel: str) -> None:
        forms: dict[Any, tuple[dict[str, BufferRecord], Mapping[str, Any]]] = {}
        for op in body.ops:
            if op.kernel == kernel:
                buffers = {name: body.buffers[b] for name, b in op.operands.items() if name != "scratch"}
                key = (*[(name, b.dtype, *b.shape) for name, b in buffers.items()], *op.attrs.items())
                forms.setdefault(key, (buffers, op.attrs))
        self._forms, used = (
            list(forms.values()),
            {row for found, _ in forms.values() for b in found.values() for row in b.shape},
        )
        self._body = body
        self._terms = {
            row: ([(i, c) for i, c in enumerate(body.coefficients[row].tolist()) if c], int(body.denominators[row]))
            for row in used
        }

    def at(self, values: Sequence[int]) -> list[tuple[dict[str, Spec], Mapping[str, Any]]]:
        """Return specs and attributes of each launch, at values of the body's variables."""
        powers = _exact_monomials(self._body, values)
        sizes = {
            row: int(sum(c * powers[i] for i, c in terms)) // denominator
            for row, (terms, denominator) in self._terms.items()
        }
        return [
            ({name: Spec(tuple([sizes[row] for row in b.shape]), b.dtype) for name, b in buffers.items()}, attrs)
            for buffers, attrs in self._forms
        ]


def _keep(results: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Cache a result; a full cache is emptied first."""
    if len(results) >= _KEPT:
        results.clear()
    results[key] = value


def _knob_chain(body: Body, region: int | None) -> tuple[str, ...]:
    knobs = []
    while region is not None:
        knobs.append(body.regions[region].knob)
        region = body.regions[region].parent
    return tuple(sorted(knobs))


def _knob_columns(body: Body) -> dict[str, int]:
    """The columns, among a body's variables, of the rows of every knob that has a region."""
    return {knob: body.variables.index(f"{knob}_rows") for knob in sorted({region.knob for region in body.regions})}


def op_totals(body: Body, values: Sequence[int], extents: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return FLOPs and bytes of every op over all its iterations, exact Python integers.

    `values` holds the rows of one full chunk per knob; a knob's region runs full chunks and one shorter last chunk.
    """
    columns = _knob_columns(body)
    chains: dict[int | None, tuple[str, ...]] = {}
    points: dict[tuple[str, ...], list[tuple[int, list[int]]]] = {}
    totals: dict[tuple[int, int, tuple[str, ...]], tuple[int, int]] = {}
    found = []
    for op in body.ops:
        knobs = chains.get(op.region)
        if knobs is None:
            knobs = chains[op.region] = _knob_chain(body, op.region)
        key = (op.flops, op.bytes, knobs)
        if key not in totals:
            if knobs not in points:
                iterations = _iterations(columns, knobs, list(values), extents)
                points[knobs] = [(weight, _exact_monomials(body, point)) for weight, point in iterations]
            totals[key] = (_total(body, op.flops, points[knobs]), _total(body, op.bytes, points[knobs]))
        found.append(totals[key])
    return found


def _exact_monomials(body: Body, values: Sequence[int]) -> list[int]:
    """Values of the monomials in Python integers: tokens times span times heads exceed 64 bits."""
    powers: list[int] = np.multiply.reduce(np.array([*values, 1], dtype=object)[body.factors], axis=0).tolist()
    return powers


def _total(body: Body, row: int, points: Sequence[tuple[int, Sequence[int]]]) -> int:
    """One polynomial over all iterations in Python integers: FLOPs of long contexts exceed 64 bits."""
    terms, over = body.coefficients[row].tolist(), int(body.denominators[row])
    return sum(weight * (int(sum(map(mul, terms, powers))) // over) for weight, powers in points)


def _iterations(
    columns: Mapping[str, int], knobs: tuple[str, ...], values: list[int], extents: Mapping[str, int]
) -> list[tuple[int, list[int]]]:
    """(how often, variables) of the distinct iterations of a nest of regions."""
    points = [(1, values)]
    for knob in knobs:
        column = columns[knob]
        grown = []
        for weight, point in points:
            full, rest = divmod(extents[knob], point[column])
            if full:
                grown.append((weight * full, point))
            if rest:
                short = list(point)
                short[column] = rest
                grown.append((weight, short))
        points = grown
    return points
