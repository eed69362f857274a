"""The configurations of a model on a device: what each one needs and how long it takes.

A configuration fixes every choice and every knob (rows per chunk, or off). Its
variant, the lifetimes and the peak formula, depends on which knobs are on
only; variants are compiled on demand and kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mosaic.devices import Device
from mosaic.errors import UnknownName, UsageError
from mosaic.planner.check import Records
from mosaic.planner.cost import OpTimes
from mosaic.planner.lifetimes import Lifetimes, derive
from mosaic.planner.offsets import Guard, Order
from mosaic.planner.peaks import ALIGNMENT, PeakFormula, peak_formula
from mosaic.planner.template import Body, Template
from mosaic.units import round_up

if TYPE_CHECKING:
    from mosaic.planner.records import Tables

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

    `orders` are packings found at reference sizes, with what checks their answers and the solver that found them; they
    are replayed for new sizes. The last three fields keep what plans say of this variant whatever the dims; the document
    module fills them.
    """

    body: Body
    life: Lifetimes
    formula: PeakFormula
    orders: list[tuple[Order, Guard, str]] = field(default_factory=list)
    records: Records | None = None
    tables: Tables | None = None
    formula_lines: list[dict[str, str]] = field(default_factory=list)


class Space:
    """All variants of a template on one device, whose profile predicts times."""

    def __init__(self, template: Template, device: Device) -> None:
        self.template, self.device = template, device
        self._variants: dict[tuple[tuple[str, ...], tuple[bool, ...]], Variant] = {}
        self._times: dict[tuple[str, ...], OpTimes] = {}
        self._pool_rows: dict[tuple[tuple[str, ...], str], Mapping[int, int]] = {}
        self._state_pools: dict[tuple[str, ...], Sequence[str]] = {}

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
            self._times[choices] = OpTimes(self.template.bodies[choices], self.device)
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
        """Return whether `pool_rows` has been asked for a pool."""
        return (choices, pool) in self._pool_rows

    def state_pools(self, choices: tuple[str, ...]) -> Sequence[str]:
        """Return the pools of the states and carries of a body, in order of registration."""
        if choices not in self._state_pools:
            buffers = self.template.bodies[choices].buffers
            self._state_pools[choices] = [b.pool for b in buffers if b.kind in ("state", "carry")]
        return self._state_pools[choices]

    def known(self, settings: Mapping[str, int | str | None]) -> dict[str, int | str | None]:
        """Return those of some settings that this kind of step has."""
        options = {choice.name: choice.options for choice in self.template.choices}
        knobs = {knob.name for knob in self.template.knobs}
        return {name: v for name, v in settings.items() if name in knobs or v in options.get(name, ())}

    def at(self, dims: Mapping[str, int], *, pinned: Mapping[str, str] | None = None) -> Point:
        """Return the space at given dims, some choices pinned to one of their options."""
        return Point(self, self.template.dims_of(dims), pinned or {})


class Point:
    """A space at fixed dims: evaluates configurations. One evaluation of the peak formula takes microseconds.

    Parameters
    ----------
    pinned
        Choices that are not free, with the option they have.
    """

    def __init__(self, space: Space, dims: dict[str, int], pinned: Mapping[str, str]) -> None:
        self.space, self.dims = space, dims
        template = space.template
        for name, option in pinned.items():
            _option_of(template, name, option)
        self.choice_options = tuple(
            (pinned[choice.name],) if choice.name in pinned else choice.options for choice in template.choices
        )
        self._dim_values = [dims[dim.name] for dim in template.dims]
        self.extents = {knob.name: dims[knob.over] for knob in template.knobs}
        self._knob_extents = list(self.extents.values())
        self._options: dict[tuple[tuple[str, ...], int], list[int | None]] = {}
        self._tables: dict[tuple[str, ...], _Tables] = {}
        self._by_time: dict[tuple[tuple[str, ...], int], list[int | None]] = {}
        self._fixed: dict[tuple[str, ...], int] = {}
        self._host: dict[tuple[str, ...], int] = {}
        self._peaks: dict[Config, tuple[int, int]] = {}
        self._seconds: dict[Config, float] = {}
        self._nested: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[int | None, ...], float]] = {}
        self.evaluations = 0

    # -- configurations -----------------------------------------------------------------------------------------

    @cached_property
    def choice_combinations(self) -> tuple[tuple[str, ...], ...]:
        """Every combination of choices that is free to be taken, in a fixed order."""
        return tuple(product(*self.choice_options))

    def options(self, choices: tuple[str, ...], knob: int) -> list[int | None]:
        """Return the settings of one knob, from off through ever smaller chunks: its tile times powers of two.

        A knob without a region under these choices is off; one whose loop holds side ops is never off.
        """
        key = (choices, knob)
        if key not in self._options:
            record, body = self.space.template.knobs[knob], self.space.template.bodies[choices]
            found: list[int | None] = []
            rows = record.tile
            while record.name in body.knobs and rows < self.extents[record.name]:
                found.append(rows)
                rows *= 2
            found.append(rows if record.name in body.looping else None)
            self._options[key] = found[::-1]
        return self._options[key]

    def config(self, settings: Mapping[str, int | str | None]) -> Config:
        """Return the configuration that settings by name describe.

        What is not named is off, or the first option. A chunk as large as its dim is off too, except in a loop with side
        ops, which then runs once.

        Raises
        ------
        UnknownName
            A name that is no knob or choice, or an option that is none.
        UsageError
            Rows that are not a positive multiple of the knob's tile.
        """
        template = self.space.template
        known = [choice.name for choice in template.choices] + [knob.name for knob in template.knobs]
        for name in settings:
            if name not in known:
                raise UnknownName("knob", name, known)
        choices = tuple(
            _option_of(template, choice.name, str(settings.get(choice.name, options[0])))
            for choice, options in zip(template.choices, self.choice_options, strict=True)
        )
        return Config(choices, tuple(self._rows(choices, k, settings) for k in self._knobs))

    def _rows(self, choices: tuple[str, ...], knob: int, settings: Mapping[str, int | str | None]) -> int | None:
        record, body = self.space.template.knobs[knob], self.space.template.bodies[choices]
        value = settings.get(record.name)
        if value is not None and (not isinstance(value, int) or value <= 0 or value % record.tile):
            raise UsageError(
                f"'{record.name}' takes rows that are a multiple of {record.tile}, or none; got {value!r}."
            )
        if record.name not in body.knobs:
            return None
        if value is not None and value < self.extents[record.name]:
            return value
        return round_up(self.extents[record.name], record.tile) if record.name in body.looping else None

    def nested_knobs(self, choices: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the pairs of knobs of which one has a loop inside a loop of the other."""
        index = {knob.name: k for k, knob in enumerate(self.space.template.knobs)}
        body = self.space.template.bodies[choices]
        parents = [(body.regions[r.parent].knob, r.knob) for r in body.regions if r.parent is not None]
        return [(index[outer], index[inner]) for outer, inner in dict.fromkeys(parents)]

    def grid(self, host_budget_bytes: int = 0) -> Iterator[Config]:
        """Yield every configuration of the stated grid that the host has room for, in a fixed order."""
        combinations = dict[tuple[str, ...], None]()
        for base, ladders in self.groups():
            combinations[base] = None
            for ladder in ladders if host_budget_bytes else ():
                combinations.update(dict.fromkeys(self.affordable(ladder, host_budget_bytes)))
        for choices in combinations:
            for rows in product(*(self.options(choices, k) for k in self._knobs)):
                yield Config(choices, rows)

    def smallest(self, host_budget_bytes: int = 0, *, slack: float = inf) -> Iterator[Config]:
        """Yield the configuration with the lowest total, then the others with up to `slack` bytes more.

        There is one for each combination of plain choices and for each ladder: the one that needs least of the device and
        that the host has room for. Where the host has room for none, they are those with nothing escalated.

        The highest rung of a ladder bounds the others from below, so bodies of those are compiled only where the bound
        is low enough.
        """
        groups = list(self.groups())
        bases = [[base] for base, _ in groups]
        ladders = [ladder for _, found in groups for ladder in found if ladder and host_budget_bytes]
        held = [self.lowest(rungs[-1]) for rungs in (*bases, *ladders)]
        waiting: list[tuple[int, int, Sequence[tuple[str, ...]]]] = [
            (self.total_bytes(held[k]), k, rungs) for k, rungs in enumerate((*bases, *ladders))
        ]
        heapify(waiting)
        given, most = set[Config](), inf
        while waiting and waiting[0][0] <= most:
            total, k, rungs = heappop(waiting)
            room = self.affordable(rungs, host_budget_bytes)
            if room and len(room) < len(rungs):
                held[k] = self.lowest(room[-1])
                heappush(waiting, (self.total_bytes(held[k]), k, room))
            elif room and held[k] not in given:
                most = min(most, total + slack)
                given.add(held[k])
                yield held[k]
        if not given:
            yield from sorted(held[: len(bases)], key=self.total_bytes)

    def lowest(self, choices: tuple[str, ...]) -> Config:
        """Return the configuration with the lowest peak under some choices.

        Starts from the smallest chunk of every knob, and turns loops around the peak off where that lowers it. A region
        stretches lifetimes only up to its own borders, so no other region need be looked at.
        """
        settings = [self.options(choices, k) for k in self._knobs]
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

    def affordable(self, ladder: Sequence[tuple[str, ...]], host_budget_bytes: int) -> Sequence[tuple[str, ...]]:
        """Return the lower rungs of a ladder, those that the host has room for; higher ones need more of it."""
        if not ladder or self.host_bytes(ladder[-1]) <= host_budget_bytes:
            return ladder
        low, high = 0, len(ladder) - 1
        for k, rung in enumerate(ladder[:-1]):
            if self.space.has_counted(rung, "host"):  # its body is there, so that asking it costs nothing
                low, high = (k + 1, high) if self.host_bytes(rung) <= host_budget_bytes else (low, min(k, high))
        return ladder[: bisect_right(ladder, host_budget_bytes, low, high, key=self.host_bytes)]

    def groups(self) -> Iterator[tuple[tuple[str, ...], list[list[tuple[str, ...]]]]]:
        """Yield, for each combination of the plain choices, it with nothing escalated, and its ladders.

        A ladder varies the last escalating choice, in order, at fixed options of the other ones. Each rung needs less of the
        device than the one before: beside returned logits, where the last may not, it is left out.
        """
        free = [choice.escalating for choice in self.space.template.choices]
        escalating = [k for k, on in enumerate(free) if on]
        plain = [options if not on else options[:1] for on, options in zip(free, self.choice_options, strict=True)]
        for base in product(*plain):
            ladders = []
            for others in product(*(self.choice_options[k] for k in escalating[:-1])):
                rungs = []
                for option in self.choice_options[escalating[-1]] if escalating else ():
                    rung = list(base)
                    for k, value in zip(escalating, (*others, option), strict=True):
                        rung[k] = value
                    rungs.append(tuple(rung))
                while len(rungs) > 1 and "logit_rows" in self.dims and self._least(rungs[-1]) >= self._least(rungs[-2]):
                    rungs.pop()
                ladders.append(rungs)
            yield base, ladders

    def _least(self, choices: tuple[str, ...]) -> int:
        return self.total_bytes(self.lowest(choices))

    @property
    def _knobs(self) -> range:
        return range(len(self.space.template.knobs))

    def values(self, config: Config) -> list[int]:
        """Return the values of the body's variables: dims, then rows per knob (its whole dim when off)."""
        rows = [
            extent if given is None or given > extent else given
            for given, extent in zip(config.rows, self._knob_extents, strict=True)
        ]
        return self._dim_values + rows

    # -- evaluation ---------------------------------------------------------------------------------------------

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
        """Return the bytes of the largest live set, and how many of the formula's live sets are as large."""
        if config not in self._peaks:
            values = self.form_values(config).tolist()
            peak = max(values)
            self._peaks[config] = peak, values.count(peak)
        return self._peaks[config]

    def lower_bound(self, config: Config) -> int:
        """Return the bytes of the largest live set: what any offset assignment needs at least."""
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
            config = Config(choices, (None,) * len(self._knobs))
            self._host[choices] = round_up(self.pool_bytes(config, "host"), self.space.device.page_bytes)
        return self._host[choices]

    def fits(self, config: Config, budget_bytes: int, host_budget_bytes: int = 0) -> bool:
        """Return whether device and host have room for a configuration, the workspace at its lower bound."""
        return self.host_bytes(config.choices) <= host_budget_bytes and self.total_bytes(config) <= budget_bytes

    def total_bytes(self, config: Config, workspace_bytes: int | None = None) -> int:
        """Return the bytes of the whole request; the workspace at its lower bound unless given."""
        workspace = self.lower_bound(config) if workspace_bytes is None else workspace_bytes
        return self.fixed_bytes(config) + round_up(workspace, self.space.device.page_bytes)

    def seconds(self, config: Config) -> float:
        """Return the predicted time of the step."""
        found = self._seconds.get(config)
        if found is None:
            found = self._seconds[config] = self._predict(config)
        return found

    def _predict(self, config: Config) -> float:
        """What no knob changes, each knob's own ops, and what nested knobs share; or two clocks beside each other."""
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
        """Seconds of the ops in loops of exactly these knobs; they depend on no other knob. All settings at once."""
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
            seconds = self.space.times(config.choices).group_seconds(group, self.values(config), counts, self.extents)
            known.update(zip(settings, seconds, strict=True))
        return known[rows]

    def by_time(self, choices: tuple[str, ...], knob: int) -> list[int | None]:
        """Return the settings of one knob, the fastest first, larger chunks first where equal, at the others' largest chunks."""
        key = (choices, knob)
        if key not in self._by_time:
            first = tuple(self.options(choices, k)[0] for k in self._knobs)
            settings = self.options(choices, knob)
            configs = {rows: Config(choices, (*first[:knob], rows, *first[knob + 1 :])) for rows in settings}
            self._by_time[key] = sorted(settings, key=lambda rows: self.seconds(configs[rows]))
        return self._by_time[key]

    def _exact_seconds(self, config: Config) -> float:
        times, values = self.space.times(config.choices), self.values(config)
        if times.has_streams:
            return times.total_seconds(values, self.extents)
        at = times.columns
        return sum(
            times.group_seconds(group, values, [[values[at[knob]] for knob in group]], self.extents)[0]
            for group in times.groups
        )

    def _tabulate(self, choices: tuple[str, ...]) -> _Tables:
        """Times of every knob at all its settings: a few vector operations instead of a few each."""
        times = self.space.times(choices)
        values = self.values(Config(choices, (None,) * len(self._knobs)))
        tables: list[dict[int | None, float]] = []
        for index, knob in enumerate(self.space.template.knobs):
            options = self.options(choices, index)
            if (knob.name,) not in times.groups:
                tables.append(dict.fromkeys(options, 0.0))
                continue
            settings = [[self.extents[knob.name] if rows is None else rows] for rows in options]
            seconds = times.group_seconds((knob.name,), values, settings, self.extents)
            tables.append(dict(zip(options, seconds, strict=True)))
        fixed = times.group_seconds((), values, [()], self.extents)[0] if () in times.groups else 0.0
        return fixed, tables, [group for group in times.groups if len(group) > 1]


def _option_of(template: Template, name: str, option: str) -> str:
    """Make sure that a choice has an option."""
    options = {choice.name: choice.options for choice in template.choices}
    if name not in options:
        raise UnknownName("choice", name, options)
    if option not in options[name]:
        raise UnknownName(f"option of '{name}'", option, options[name])
    return option
