"""The configurations of a model on a device: what each one needs and how long it takes.

A configuration fixes every choice and every knob (rows per chunk, or off). Its
variant, the lifetimes and the peak formula, depends on which knobs are on
only; variants are compiled on demand and kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mosaic.devices import Device
from mosaic.errors import UnknownName, UsageError
from mosaic.planner.cost import OpTimes
from mosaic.planner.lifetimes import Lifetimes, derive
from mosaic.planner.offsets import Order
from mosaic.planner.peaks import ALIGNMENT, PeakFormula, peak_formula
from mosaic.planner.template import Body, Template
from mosaic.units import round_up

_Tables = tuple[float, list[dict[int | None, float]], list[tuple[str, ...]]]
"""Seconds that no knob changes, seconds by setting of each knob, and the groups of nested knobs."""

__all__ = ["Config", "Point", "Space", "Variant"]


class Config(NamedTuple):
    """One option per choice and one row count (None: off) per knob, in the template's order."""

    choices: tuple[str, ...]
    rows: tuple[int | None, ...]


@dataclass(slots=True, kw_only=True)
class Variant:
    """A body with some of its regions on.

    `orders` are packings found at reference sizes, with the solver that found them, replayed for new sizes. The last
    three fields keep what plans say of this variant whatever the dims; the document module fills them.
    """

    body: Body
    life: Lifetimes
    formula: PeakFormula
    orders: list[tuple[Order, str]] = field(default_factory=list)
    op_statics: list[dict[str, Any]] = field(default_factory=list)
    buffer_statics: list[dict[str, Any]] = field(default_factory=list)
    formula_lines: list[dict[str, str]] = field(default_factory=list)


class Space:
    """All variants of a template on one device.

    Parameters
    ----------
    template
        The compiled model.
    device
        The profile to predict times with.
    """

    def __init__(self, template: Template, device: Device) -> None:
        self.template, self.device = template, device
        self._variants: dict[tuple[tuple[str, ...], tuple[bool, ...]], Variant] = {}
        self._times: dict[tuple[str, ...], OpTimes] = {}
        self._pool_rows: dict[tuple[tuple[str, ...], str], Mapping[int, int]] = {}

    def variant(self, config: Config) -> Variant:
        """The compiled variant of a configuration."""
        key = (config.choices, tuple([rows is not None for rows in config.rows]))
        if key not in self._variants:
            active = {knob.name for knob, on in zip(self.template.knobs, key[1], strict=True) if on}
            body = self.template.bodies[config.choices]
            life = derive(body, active)
            self._variants[key] = Variant(body=body, life=life, formula=peak_formula(body, life))
        return self._variants[key]

    def times(self, choices: tuple[str, ...]) -> OpTimes:
        """The cost classes of the body with these choices."""
        if choices not in self._times:
            self._times[choices] = OpTimes(self.template.bodies[choices], self.device)
        return self._times[choices]

    def pool_rows(self, choices: tuple[str, ...], pool: str) -> Mapping[int, int]:
        """How many buffer slots of each size (a row of the body's polynomials) a pool holds."""
        key = (choices, pool)
        if key not in self._pool_rows:
            rows: Counter[int] = Counter()
            for b in self.template.bodies[choices].buffers:
                if b.pool == pool and b.alias_of is None:
                    rows[b.bytes] += b.rotate
            self._pool_rows[key] = rows
        return self._pool_rows[key]

    def at(self, dims: Mapping[str, int]) -> Point:
        """The space at given dims."""
        return Point(self, self.template.dims_of(dims))

    @cached_property
    def choice_combinations(self) -> tuple[tuple[str, ...], ...]:
        """Every combination of choices."""
        return tuple(self.template.bodies)


class Point:
    """A space at fixed dims: evaluates configurations. One evaluation of the peak formula takes microseconds."""

    def __init__(self, space: Space, dims: dict[str, int]) -> None:
        self.space, self.dims = space, dims
        template = space.template
        self._dim_values = [dims[dim.name] for dim in template.dims]
        self.extents = {knob.name: dims[knob.over] for knob in template.knobs}
        self._knob_extents = list(self.extents.values())
        self._options: dict[int, list[int | None]] = {}
        self._tables: dict[tuple[str, ...], _Tables] = {}
        self._by_time: dict[tuple[tuple[str, ...], int], list[int | None]] = {}
        self._fixed: dict[tuple[str, ...], int] = {}
        self._peaks: dict[Config, tuple[int, int]] = {}
        self.evaluations = 0

    # -- configurations -----------------------------------------------------------------------------------------

    def options(self, knob: int) -> list[int | None]:
        """Settings of one knob, from off through ever smaller chunks: its tile times powers of two."""
        if knob not in self._options:
            record = self.space.template.knobs[knob]
            found: list[int | None] = []
            rows = record.tile
            while rows < self.extents[record.name]:
                found.append(rows)
                rows *= 2
            self._options[knob] = [None, *reversed(found)]
        return self._options[knob]

    def config(self, settings: Mapping[str, int | str | None]) -> Config:
        """The configuration that settings by name describe; what is not named is off, or the first option,
        and a chunk as large as its dim is off too.

        Raises
        ------
        UnknownName
            A name that is no knob or choice, or an option that is none.
        UsageError
            Rows that are not a positive multiple of the knob's tile.
        """
        known = [name for name, _ in self.space.template.choices] + [knob.name for knob in self.space.template.knobs]
        for name in settings:
            if name not in known:
                raise UnknownName("knob", name, known)
        choices = []
        for name, options in self.space.template.choices:
            chosen = str(settings.get(name, options[0]))
            if chosen not in options:
                raise UnknownName(f"option of '{name}'", chosen, options)
            choices.append(chosen)
        rows = []
        for knob in self.space.template.knobs:
            value = settings.get(knob.name)
            if value is not None and (not isinstance(value, int) or value <= 0 or value % knob.tile):
                raise UsageError(
                    f"'{knob.name}' takes rows that are a multiple of {knob.tile}, or none; got {value!r}."
                )
            rows.append(value if value is not None and value < self.extents[knob.name] else None)
        return Config(tuple(choices), tuple(rows))

    def grid(self) -> Iterator[Config]:
        """Every configuration of the stated grid, in a fixed order."""
        settings = [self.options(k) for k in range(len(self.space.template.knobs))]
        for choices in self.space.choice_combinations:
            for rows in product(*settings):
                yield Config(choices, rows)

    def smallest(self) -> Iterator[Config]:
        """Every subset of knobs at its smallest chunk: one of these has the lowest peak there is."""
        settings = [
            sorted({options[0], options[-1]}, key=lambda r: r or 0) for options in map(self.options, self._knobs)
        ]
        for choices in self.space.choice_combinations:
            for rows in product(*settings):
                yield Config(choices, rows)

    @property
    def _knobs(self) -> range:
        return range(len(self.space.template.knobs))

    def values(self, config: Config) -> list[int]:
        """Values of the body's variables: dims, then rows per knob (its whole dim when off)."""
        rows = [
            extent if given is None or given > extent else given
            for given, extent in zip(config.rows, self._knob_extents, strict=True)
        ]
        return self._dim_values + rows

    # -- evaluation ---------------------------------------------------------------------------------------------

    def polynomials(self, config: Config) -> npt.NDArray[np.int64]:
        """Every symbolic quantity of the configuration's body."""
        return self.space.template.bodies[config.choices].evaluate(self.values(config))

    def form_values(self, config: Config) -> npt.NDArray[np.int64]:
        """Bytes of each undominated live set: one evaluation of the peak formula."""
        self.evaluations += 1
        variant = self.space.variant(config)
        return variant.formula.values(variant.body.monomials(self.values(config)))

    def root_sizes(self, config: Config) -> npt.NDArray[np.int64]:
        """Bytes of every workspace root, in the order of the variant's `formula.roots`."""
        variant = self.space.variant(config)
        return variant.formula.root_sizes(variant.body.monomials(self.values(config)))

    def dominating(self, config: Config) -> tuple[int, int]:
        """Bytes of the largest live set, and how many of the formula's live sets are as large."""
        if config not in self._peaks:
            values = self.form_values(config).tolist()
            peak = max(values)
            self._peaks[config] = peak, values.count(peak)
        return self._peaks[config]

    def lower_bound(self, config: Config) -> int:
        """Bytes of the largest live set: what any offset assignment needs at least."""
        return self.dominating(config)[0]

    def pool_bytes(self, config: Config, pool: str) -> int:
        """Bytes of a pool outside the workspace (weights, state), packed at `ALIGNMENT`."""
        polynomials = self.polynomials(config)
        rows = self.space.pool_rows(config.choices, pool)
        return sum(round_up(int(polynomials[row]), ALIGNMENT) * count for row, count in rows.items())

    def fixed_bytes(self, config: Config) -> int:
        """Context, libraries, weights and state, in whole pages."""
        if config.choices not in self._fixed:
            device = self.space.device
            pools = sum(round_up(self.pool_bytes(config, pool), device.page_bytes) for pool in ("weights", "state"))
            self._fixed[config.choices] = device.context_bytes + device.library_bytes + pools
        return self._fixed[config.choices]

    def total_bytes(self, config: Config, workspace_bytes: int | None = None) -> int:
        """Bytes of the whole request; the workspace at its lower bound unless given."""
        workspace = self.lower_bound(config) if workspace_bytes is None else workspace_bytes
        return self.fixed_bytes(config) + round_up(workspace, self.space.device.page_bytes)

    def seconds(self, config: Config) -> float:
        """Predicted time of the step: what no knob changes, each knob's own ops, and what nested knobs share."""
        if config.choices not in self._tables:
            self._tables[config.choices] = self._tabulate(config.choices)
        total, tables, nested = self._tables[config.choices]
        for table, rows in zip(tables, config.rows, strict=True):
            if rows not in table:  # a setting off the grid
                return self._exact_seconds(config)
            total += table[rows]
        if nested:
            times, values = self.space.times(config.choices), self.values(config)
            total += sum(times.group_seconds(group, values, self.extents) for group in nested)
        return total

    def by_time(self, choices: tuple[str, ...], knob: int) -> list[int | None]:
        """Settings of one knob, the fastest first, larger chunks first where equal (nested knobs: at the others off)."""
        key = (choices, knob)
        if key not in self._by_time:
            off = (None,) * len(self._knobs)
            configs = {rows: Config(choices, (*off[:knob], rows, *off[knob + 1 :])) for rows in self.options(knob)}
            self._by_time[key] = sorted(self.options(knob), key=lambda rows: self.seconds(configs[rows]))
        return self._by_time[key]

    def _exact_seconds(self, config: Config) -> float:
        times, values = self.space.times(config.choices), self.values(config)
        return sum(times.group_seconds(group, values, self.extents) for group in times.groups)

    def _tabulate(self, choices: tuple[str, ...]) -> _Tables:
        """Times of every knob at all its settings: a few vector operations instead of a few each."""
        times = self.space.times(choices)
        values = self.values(Config(choices, (None,) * len(self._knobs)))
        tables: list[dict[int | None, float]] = []
        for index, knob in enumerate(self.space.template.knobs):
            options = self.options(index)
            if (knob.name,) not in times.groups:
                tables.append(dict.fromkeys(options, 0.0))
                continue
            settings = [self.extents[knob.name] if rows is None else rows for rows in options]
            seconds = times.knob_seconds(knob.name, values, settings, self.extents)
            tables.append(dict(zip(options, seconds, strict=True)))
        fixed = times.group_seconds((), values, self.extents) if () in times.groups else 0.0
        return fixed, tables, [group for group in times.groups if len(group) > 1]
