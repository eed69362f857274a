"""Predicted time of a step: per op max(FLOPs / rate at this size, bytes / bandwidth) + launch.

Ops are grouped into classes of equal cost (every layer repeats the same ones),
so a step is a few dozen numbers. One stream: times add. A region's time is
that of its full chunks and of the shorter last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
import numpy.typing as npt

from mosaic.devices import Device
from mosaic.planner.template import Body

__all__ = ["OpTimes", "op_totals"]


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
        used = [row for c in self.classes for row in (c.flops, c.bytes, c.rate_rows)]
        self._rows = np.array(used, dtype=np.int64)
        # float64 from here on: predictions need no exact FLOPs, and products beyond 64 bits stay finite.
        self._coefficients = body.coefficients[self._rows].astype(np.float64) / body.denominators[self._rows, None]
        self.columns = {
            name.removesuffix("_rows"): i for i, name in enumerate(body.variables) if name.endswith("_rows")
        }
        grid = np.array(sorted(device.gemm_rates), dtype=np.float64)
        self._gemm = np.log2(grid), np.array([device.gemm_rates[int(r)] for r in grid])
        unembed = device.unembed_rates or device.gemm_rates
        grid = np.array(sorted(unembed), dtype=np.float64)
        self._unembed = np.log2(grid), np.array([unembed[int(r)] for r in grid])
        self._is_gemm, self._is_unembed, self._is_memory = (
            np.array([c.rate == rate for c in self.classes]) for rate in ("gemm", "unembed", "memory")
        )
        self._members = {
            group: np.array([i for i, c in enumerate(self.classes) if c.knobs == group]) for group in self.groups
        }
        self._counts = np.array([c.count for c in self.classes], dtype=np.float64)

    def launch_seconds(self, points: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """Seconds of one launch of each cost class, [points, classes], at several values of the variables."""
        powers = np.array([self.body.monomials(values) for values in points], dtype=np.float64)
        flops, moved, rows = (powers @ self._coefficients.T).reshape(len(points), -1, 3).transpose(2, 0, 1)
        log_rows = np.log2(np.maximum(rows, 1.0))
        rates = np.where(self._is_gemm, np.interp(log_rows, *self._gemm), self.device.attention_rate)
        if self._is_unembed.any():
            rates = np.where(self._is_unembed, np.interp(log_rows, *self._unembed), rates)
        compute = np.where(self._is_memory, 0.0, flops / rates)
        seconds: npt.NDArray[np.float64] = np.maximum(compute, moved / self.device.bandwidth) + self.device.launch_s
        return seconds

    def group_seconds(self, group: tuple[str, ...], values: Sequence[int], extents: Mapping[str, int]) -> float:
        """Seconds of all ops that depend on exactly these knobs, all iterations together."""
        iterations = _iterations(self.columns, group, list(values), extents)
        return self._weighted(group, [point for _, point in iterations], [[weight for weight, _ in iterations]])[0]

    def knob_seconds(
        self, knob: str, values: Sequence[int], settings: Sequence[int], extents: Mapping[str, int]
    ) -> list[float]:
        """The same for a group of one knob, at several settings of its rows at once."""
        points: list[list[int]] = []
        weights: list[list[int]] = []
        for rows in settings:
            point = list(values)
            point[self.columns[knob]] = rows
            iterations = _iterations(self.columns, (knob,), point, extents)
            weights.append([0] * len(points) + [weight for weight, _ in iterations])
            points += [point for _, point in iterations]
        return self._weighted((knob,), points, [row + [0] * (len(points) - len(row)) for row in weights])

    def _weighted(
        self, group: tuple[str, ...], points: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]
    ) -> list[float]:
        members = self._members[group]
        once = self.launch_seconds(points)[:, members] @ self._counts[members]
        total: list[float] = (np.array(weights, dtype=np.float64) @ once).tolist()
        return total


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
    columns = {name.removesuffix("_rows"): i for i, name in enumerate(body.variables) if name.endswith("_rows")}
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
                points[knobs] = [(weight, body.monomials(point).tolist()) for weight, point in iterations]
            totals[key] = (_total(body, op.flops, points[knobs]), _total(body, op.bytes, points[knobs]))
        found.append(totals[key])
    return found


def _total(body: Body, row: int, points: Sequence[tuple[int, Sequence[int]]]) -> int:
    """One polynomial over all iterations in Python integers: FLOPs of long contexts exceed 64 bits."""
    coefficients, denominator = body.coefficients[row].tolist(), int(body.denominators[row])
    return sum(weight * (sum(map(mul, coefficients, powers)) // denominator) for weight, powers in points)


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
