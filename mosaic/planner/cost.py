"""Predicted time of a step: per op max(FLOPs / rate at this size, bytes / bandwidth) + launch.

Ops are grouped into classes of equal cost (every layer repeats the same ones),
so a step is a few dozen numbers. One stream: times add. A region's time is
that of its full chunks and of the shorter last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

from mosaic.devices import Device
from mosaic.planner.template import Body

__all__ = ["OpTimes", "op_totals", "rate_at"]


def rate_at(rates: Mapping[int, float], rows: float) -> float:
    """Interpolate a rate table in log2(rows), flat outside.

    >>> rate_at({64: 1.0, 256: 3.0}, 128)
    2.0
    """
    points = sorted(rates.items())
    if rows <= points[0][0]:
        return points[0][1]
    for (low, a), (high, b) in zip(points, points[1:], strict=False):
        if rows <= high:
            return a + (b - a) * (log2(rows) - log2(low)) / (log2(high) - log2(low))
    return points[-1][1]


@dataclass(frozen=True, slots=True)
class _CostClass:
    """Ops that cost the same: polynomial rows of FLOPs, bytes and rate rows, the rate, how many there are."""

    flops: int
    bytes: int
    rate_rows: int
    rate: str
    knobs: tuple[str, ...]
    count: int


class OpTimes:
    """Seconds of a body's ops on a device, by the knobs they depend on.

    Ops in no chunk region depend on no knob; ops in a region depend on its rows.
    """

    def __init__(self, body: Body, device: Device) -> None:
        self.body, self.device = body, device
        counts: dict[tuple[int, int, int, str, tuple[str, ...]], int] = {}
        for op in body.ops:
            key = (op.flops, op.bytes, op.rate_rows, op.rate, _knob_chain(body, op.region))
            counts[key] = counts.get(key, 0) + 1
        self.classes = [_CostClass(*key, count) for key, count in counts.items()]
        self.groups = sorted({c.knobs for c in self.classes})
        self._by_group = {group: [c for c in self.classes if c.knobs == group] for group in self.groups}
        used = [row for c in self.classes for row in (c.flops, c.bytes, c.rate_rows)]
        self._rows = np.array(used, dtype=np.int64)
        # float64 from here on: predictions need no exact FLOPs, and products beyond 64 bits stay finite.
        self._coefficients = body.coefficients[self._rows].astype(np.float64) / body.denominators[self._rows, None]
        self.columns = {name.removesuffix("_rows"): i for i, name in enumerate(body.variables) if name.endswith("_rows")}
        grid = np.array(sorted(device.gemm_rates), dtype=np.float64)
        self._gemm = np.log2(grid), np.array([device.gemm_rates[int(r)] for r in grid])
        unembed = device.unembed_rates or device.gemm_rates
        grid = np.array(sorted(unembed), dtype=np.float64)
        self._unembed = np.log2(grid), np.array([unembed[int(r)] for r in grid])
        self._kinds = np.array([("memory", "gemm", "attention", "unembed").index(c.rate) for c in self.classes])
        self._index = {id(c): i for i, c in enumerate(self.classes)}
        self._members = {
            group: np.array([self._index[id(c)] for c in classes]) for group, classes in self._by_group.items()
        }
        self._counts = np.array([c.count for c in self.classes], dtype=np.float64)

    def launch_seconds(self, values: Sequence[int]) -> npt.NDArray[np.float64]:
        """Seconds of one launch of each cost class at the given variables."""
        powers = self.body.monomials(values).astype(np.float64)
        flops, moved, rows = (self._coefficients @ powers).reshape(-1, 3).T
        log_rows = np.log2(np.maximum(rows, 1.0))
        rates = np.where(
            self._kinds == 1,
            np.interp(log_rows, *self._gemm),
            np.where(self._kinds == 3, np.interp(log_rows, *self._unembed), self.device.attention_rate),
        )
        compute = np.where(self._kinds == 0, 0.0, flops / rates)
        seconds: npt.NDArray[np.float64] = np.maximum(compute, moved / self.device.bandwidth) + self.device.launch_s
        return seconds

    def group_seconds(self, group: tuple[str, ...], values: Sequence[int], extents: Mapping[str, int]) -> float:
        """Seconds of all ops that depend on exactly these knobs, all chunks together.

        Nested regions (more than one knob) are charged full chunks only, an upper bound.
        """
        members = self._members[group]
        once = float(self.launch_seconds(values)[members] @ self._counts[members])
        if not group:
            return once
        if len(group) > 1:
            loops = 1
            for knob in group:
                loops *= -(-extents[knob] // values[self.columns[knob]])
            return once * loops
        column = self.columns[group[0]]
        full, rest = divmod(extents[group[0]], values[column])
        if not rest:
            return once * full
        short = list(values)
        short[column] = rest
        return once * full + float(self.launch_seconds(short)[members] @ self._counts[members])


def _knob_chain(body: Body, region: int | None) -> tuple[str, ...]:
    knobs = []
    while region is not None:
        knobs.append(body.regions[region].knob)
        region = body.regions[region].parent
    return tuple(sorted(knobs))


def op_totals(body: Body, values: Sequence[int], extents: Mapping[str, int]) -> list[tuple[int, int]]:
    """FLOPs and bytes of every op over all its iterations, exact Python integers.

    `values` holds the rows of one full chunk per knob; a knob's region runs full chunks and one shorter last chunk.
    """
    cache: dict[tuple[int, int, tuple[str, ...]], tuple[int, int]] = {}
    found = []
    for op in body.ops:
        knobs = _knob_chain(body, op.region)
        key = (op.flops, op.bytes, knobs)
        if key not in cache:
            cache[key] = _total(body, key, values, extents)
        found.append(cache[key])
    return found


def _total(
    body: Body, key: tuple[int, int, tuple[str, ...]], values: Sequence[int], extents: Mapping[str, int]
) -> tuple[int, int]:
    flops, moved, knobs = key
    total = [0, 0]
    for weight, point in _iterations(body, knobs, list(values), extents):
        powers = [int(p) for p in body.monomials(point)]
        for slot, row in enumerate((flops, moved)):
            value = sum(int(c) * p for c, p in zip(body.coefficients[row], powers, strict=True))
            total[slot] += weight * (value // int(body.denominators[row]))
    return total[0], total[1]


def _iterations(
    body: Body, knobs: tuple[str, ...], values: list[int], extents: Mapping[str, int]
) -> list[tuple[int, list[int]]]:
    """(how often, variables) of the distinct iterations of a nest of regions."""
    points = [(1, values)]
    for knob in knobs:
        column = body.variables.index(f"{knob}_rows")
        grown = []
        for weight, point in points:
            full, rest = divmod(extents[knob], point[column])
            grown.append((weight * full, point))
            if rest:
                short = list(point)
                short[column] = rest
                grown.append((weight, short))
        points = grown
    return points
