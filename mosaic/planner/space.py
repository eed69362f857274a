"""The configurations of a model on a device: the memory and time of each.

A configuration fixes every choice and every knob (rows per chunk, or off). Its
variant, the lifetimes and the peak formula, depends on which knobs are on
only; variants are compiled on demand and kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mosaic.devices import Device
from mosaic.planner.body import Body
from mosaic.planner.check import Records
from mosaic.planner.cost import OpTimes
from mosaic.planner.grid import Config, Grid
from mosaic.planner.lifetimes import Lifetimes, derive
from mosaic.planner.offsets import Guard, Order, Solution
from mosaic.planner.peaks import ALIGNMENT, PeakFormula, peak_formula
from mosaic.planner.template import Template
from mosaic.units import round_up

_Tables = tuple[float, list[dict[int | None, float]], list[tuple[str, ...]]]
"""Seconds that no knob changes, seconds by setting of each knob, and the groups of nested knobs."""

__all__ = ["Config", "Ids", "Point", "Space", "Tables", "Variant"]

Ids: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Where a variant's numbers come from: ids, and rows of its body's polynomials.

    Parameters
    ----------
    bytes, rotates
        Of each buffer, the row of one slot's bytes, and its slots.
    aliases, alias_roots, alias_offsets
        Buffers that are aliases, their roots, and the rows of their offsets.
    shapes, ends
        Rows of all axes of all buffers, and where each buffer's end.
    stacks
        By pool that no solver places, its buffers in the order in which they lie there.
    """

    bytes: Ids
    rotates: npt.NDArray[np.int64]
    aliases: Ids
    alias_roots: Ids
    alias_offsets: Ids
    shapes: Ids
    ends: Sequence[tuple[int, int]]
    stacks: Sequence[Ids]


@dataclass(slots=True, kw_only=True)
class Variant:
    """A body with some of its regions on.

    `orders` are packings found at reference sizes, each with a checker of its answers and the solver's name; they are
    replayed for new sizes. `last_solved` is the last solution from scratch, kept because a refusal asks for the same
    packing several times. The last three fields keep the variant's part of plans; the document module fills them.
    """

    body: Body
    life: Lifetimes
    formula: PeakFormula
    orders: dict[tuple[int, ...], tuple[Order, Guard, str]] = field(default_factory=dict)
    last_solved: tuple[tuple[str, tuple[int, ...]], Solution] | None = None
    records: Records | None = None
    tables: Tables | None = None
    formula_lines: list[dict[str, str]] = field(default_factory=list)


class Space:
    """All variants of a template on one device, whose profile predicts times.

    With `batch_invariant`, only those in which no request's results depend on others in its step.
    """

    def __init__(self, template: Template, device: Device, *, batch_invariant: bool = False) -> None:
        self.template, self.device, self.batch_invariant = template, device, batch_invariant
        self._variants: dict[tuple[tuple[str, ...], tuple[bool, ...]], Variant] = {}
        self._times: dict[tuple[str, ...], OpTimes] = {}
        self._pool_rows: dict[tuple[tuple[str, ...], str], Mapping[int, int]] = {}
        self._state_pools: dict[tuple[str, ...], Sequence[str]] = {}

    def on(self, device: Device) -> Space:
        """Return the same variants on another device of the backend."""
        other = Space(self.template, device, batch_invariant=self.batch_invariant)
        other._variants = self._variants
        return other

    def variant(self, config: Config) -> Variant:
        """Return the compiled variant of a configuration."""
        key = (config.choices, tuple([rows is not None for rows in config.rows]))
        if key not in self._variants:
            active = {knob.name for knob, on in zip(self.template.knobs, key[1], strict=True) if on}
            body = self.template.bodies[config.choices]
            life = derive(body, active)
            self._variants[key] = Variant(body=body, life=life, formula=peak_formula(body, life))
        return self._variants[key]

    def times(self, choices: tuple[str, ...]) -> OpTimes:
        """Return the cost classes of the body with these choices."""
        if choices not in self._times:
            self._times[choices] = OpTimes(
                self.template.bodies[choices], self.device, batch_invariant=self.batch_invariant
            )
        return self._times[choices]

    def pool_rows(self, choices: tuple[str, ...], pool: str) -> Mapping[int, int]:
        """Return how many buffer slots of each size (a row of the body's polynomials) a pool holds."""
        key = (choices, pool)
        if key not in self._pool_rows:
            rows: Counter[int] = Counter()
            for b in self.template.bodies[choices].buffers:
                if b.pool == pool and b.alias_of is None:
                    rows[b.bytes] += b.rotate
            self._pool_rows[key] = rows
        return self._pool_rows[key]

    def has_counted(self, choices: tuple[str, ...], pool: str) -> bool:
        """Return whether `pool_rows` of a pool is cached."""
        return (choices, pool) in self._pool_rows

    def state_pools(self, choices: tuple[str, ...]) -> Sequence[str]:
        """Return the pools of the states and carries of a body, in order of registration."""
        if choices not in self._state_pools:
            buffers = self.template.bodies[choices].buffers
            self._state_pools[choices] = [b.pool for b in buffers if b.kind in ("state", "carry")]
        return self._state_pools[choices]

    def known(self, settings: Mapping[str, int | str | None]) -> dict[str, int | str | None]:
        """Return the given settings that this kind of step has."""
        options = {choice.name: choice.options for choice in self.template.choices}
        knobs = {knob.name for knob in self.template.knobs}
        return {name: v for name, v in settings.items() if name in knobs or v in options.get(name, ())}

    def at(self, dims: Mapping[str, int], *, pinned: Mapping[str, str] | None = None) -> Point:
        """Return the space at given dims, with pinned choices."""
        unlike = {choice.name: choice.options[0] for choice in self.template.choices if choice.unlike}
        return Point(self, self.template.dims_of(dims), {**(pinned or {}), **(unlike if self.batch_invariant else {})})


class Point(Grid):
    """A space at fixed dims: evaluates configurations of its grid. One evaluation of the peak formula takes microseconds.

    Parameters
    ----------
    pinned
        Choices that are fixed, with their option.
    """

    def __init__(self, space: Space, dims: Mapping[str, int], pinned: Mapping[str, str]) -> None:
        super().__init__(space.template, dims, pinned)
        self.space = space
        self._tables: dict[tuple[str, ...], _Tables] = {}
        self._by_time: dict[tuple[tuple[str, ...], int], list[int | None]] = {}
        self._fixed: dict[tuple[str, ...], int] = {}
        self._host: dict[tuple[str, ...], int] = {}
        self._peaks: dict[Config, tuple[int, int]] = {}
        self._seconds: dict[Config, float] = {}
        self._nested: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[int | None, ...], float]] = {}
        self.evaluations = 0

    # -- bytes ------------------------------------------------------------------------------------------------------

    def polynomials(self, config: Config) -> npt.NDArray[np.int64]:
        """Return every symbolic quantity of the configuration's body."""
        return self.space.template.bodies[config.choices].evaluate(self.values(config))

    def form_values(self, config: Config) -> npt.NDArray[np.int64]:
        """Return the bytes of each undominated live set: one evaluation of the peak formula."""
        self.evaluations += 1
        variant = self.space.variant(config)
        return variant.formula.values(variant.body.monomials(self.values(config)))

    def root_sizes(self, config: Config) -> npt.NDArray[np.int64]:
        """Return the bytes of every workspace root, in the order of the variant's `formula.roots`."""
        variant = self.space.variant(config)
        return variant.formula.root_sizes(variant.body.monomials(self.values(config)))

    def dominating(self, config: Config) -> tuple[int, int]:
        """Return the bytes of the largest live set, and the number of live sets of that size."""
        if config not in self._peaks:
            values = self.form_values(config).tolist()
            peak = max(values)
            self._peaks[config] = peak, values.count(peak)
        return self._peaks[config]

    def lower_bound(self, config: Config) -> int:
        """Return the bytes of the largest live set: the minimum of any offset assignment."""
        return self.dominating(config)[0]

    def pool_bytes(self, config: Config, pool: str) -> int:
        """Return the bytes of a pool outside the workspace (weights, host, a state's), packed at `ALIGNMENT`."""
        polynomials = self.polynomials(config)
        rows = self.space.pool_rows(config.choices, pool)
        return sum(round_up(int(polynomials[row]), ALIGNMENT) * count for row, count in rows.items())

    def state_bytes(self, config: Config) -> dict[str, int]:
        """Return the bytes of the pool of each state and carry, in whole pages: pool -> bytes, in order of registration."""
        pages = self.space.device.page_bytes
        pools = self.space.state_pools(config.choices)
        return {pool: round_up(self.pool_bytes(config, pool), pages) for pool in pools}

    def fixed_bytes(self, config: Config) -> int:
        """Return the bytes of context, libraries, weights and state, in whole pages."""
        if config.choices not in self._fixed:
            device = self.space.device
            weights = round_up(self.pool_bytes(config, "weights"), device.page_bytes)
            states = sum(self.state_bytes(config).values())
            self._fixed[config.choices] = device.context_bytes + device.library_bytes + weights + states
        return self._fixed[config.choices]

    def host_bytes(self, choices: tuple[str, ...]) -> int:
        """Return pinned host memory, in whole pages: streamed weights and hidden states. No knob changes it."""
        if choices not in self._host:
            config = Config(choices, (None,) * len(self.knobs))
            self._host[choices] = round_up(self.pool_bytes(config, "host"), self.space.device.page_bytes)
        return self._host[choices]

    def fits(self, config: Config, budget_bytes: int, host_budget_bytes: int = 0) -> bool:
        """Return whether device and host have room for a configuration, the workspace at its lower bound."""
        return self.host_bytes(config.choices) <= host_budget_bytes and self.total_bytes(config) <= budget_bytes

    def total_bytes(self, config: Config, workspace_bytes: int | None = None) -> int:
        """Return the bytes of the whole request; the workspace at its lower bound unless given."""
        workspace = self.lower_bound(config) if workspace_bytes is None else workspace_bytes
        return self.fixed_bytes(config) + round_up(workspace, self.space.device.page_bytes)

    def lowest(self, choices: tuple[str, ...]) -> Config:
        """Return the configuration with the lowest peak under some choices.

        Starts from the smallest chunk of every knob, and turns loops around the peak off if that lowers it. A region
        extends lifetimes only up to its own borders, so no other region need be considered.
        """
        settings = [self.options(choices, k) for k in self.knobs]
        config, better = Config(choices, tuple(options[-1] for options in settings)), True
        while better:
            better = False
            for knob in self._around_peak(config):
                rows = settings[knob][0]
                flipped = Config(choices, (*config.rows[:knob], rows, *config.rows[knob + 1 :]))
                if rows is None and self.dominating(flipped) < self.dominating(config):
                    config, better = flipped, True
        return config

    def _around_peak(self, config: Config) -> list[int]:
        """Knobs that are on and whose loops hold an op at which the live set is the largest."""
        body, formula = self.space.template.bodies[config.choices], self.space.variant(config).formula
        values = self.form_values(config)
        around: set[str] = set()
        for at in np.flatnonzero(values == values.max()).tolist():
            region = body.ops[formula.at[at]].region
            while region is not None:
                around.add(body.regions[region].knob)
                region = body.regions[region].parent
        return [
            k for k, knob in enumerate(self.space.template.knobs) if knob.name in around and config.rows[k] is not None
        ]

    # -- time -------------------------------------------------------------------------------------------------------

    def seconds(self, config: Config) -> float:
        """Return the predicted time of the step."""
        found = self._seconds.get(config)
        if found is None:
            found = self._seconds[config] = self._predict(config)
        return found

    def _predict(self, config: Config) -> float:
        """Seconds that no knob changes, of each knob's own ops, and of nested knobs; or of the timeline."""
        if self.space.template.bodies[config.choices].has_streams:
            return self._exact_seconds(config)
        if config.choices not in self._tables:
            self._tables[config.choices] = self._tabulate(config.choices)
        total, tables, nested = self._tables[config.choices]
        for table, rows in zip(tables, config.rows, strict=True):
            if rows not in table:  # a setting off the grid
                return self._exact_seconds(config)
            total += table[rows]
        return total + sum(self._group_seconds(config, group) for group in nested)

    def _group_seconds(self, config: Config, group: tuple[str, ...]) -> float:
        """Seconds of the ops in loops of exactly these knobs; no other knob matters. All settings at once."""
        known = self._nested.setdefault((config.choices, group), {})
        names = [knob.name for knob in self.space.template.knobs]
        rows = tuple([config.rows[names.index(name)] for name in group])
        if rows not in known:
            settings = list(product(*(self.options(config.choices, names.index(name)) for name in group)))
            if rows not in settings:  # off the grid
                settings = [rows]
            whole = [self.extents[name] for name in group]
            counts = [
                [n if n is not None and n < most else most for n, most in zip(setting, whole, strict=True)]
                for setting in settings
            ]
            times = self.space.times(config.choices)
            seconds = times.group_seconds({group: counts}, self.values(config), self.extents)[group]
            known.update(zip(settings, seconds, strict=True))
        return known[rows]

    def by_time(self, choices: tuple[str, ...], knob: int) -> list[int | None]:
        """Return a knob's settings, fastest first, larger first if equal, with other knobs at their largest chunks."""
        key = (choices, knob)
        if key not in self._by_time:
            first = tuple(self.options(choices, k)[0] for k in self.knobs)
            settings = self.options(choices, knob)
            configs = {rows: Config(choices, (*first[:knob], rows, *first[knob + 1 :])) for rows in settings}
            self._by_time[key] = sorted(settings, key=lambda rows: self.seconds(configs[rows]))
        return self._by_time[key]

    def _exact_seconds(self, config: Config) -> float:
        times, values = self.space.times(config.choices), self.values(config)
        if times.has_streams:
            return times.total_seconds(values, self.extents)
        asked = {group: [[values[times.columns[knob]] for knob in group]] for group in times.groups}
        return sum(seconds for (seconds,) in times.group_seconds(asked, values, self.extents).values())

    def _tabulate(self, choices: tuple[str, ...]) -> _Tables:
        """Times of every knob at all its settings, in one evaluation."""
        times, knobs = self.space.times(choices), self.space.template.knobs
        options = {(knob.name,): self.options(choices, index) for index, knob in enumerate(knobs)}
        asked: dict[tuple[str, ...], list[list[int]]] = {
            group: [[self.extents[group[0]] if rows is None else rows] for rows in settings]
            for group, settings in options.items()
            if group in times.groups
        }
        values = self.values(Config(choices, (None,) * len(knobs)))
        found = times.group_seconds(asked | {(): [[]]} if () in times.groups else asked, values, self.extents)
        tables = [
            dict(zip(settings, found.get(group, [0.0] * len(settings)), strict=True))
            for group, settings in options.items()
        ]
        return found.get((), [0.0])[0], tables, [group for group in times.groups if len(group) > 1]
