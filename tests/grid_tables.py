"""Random tables of bytes and seconds in the place of a program: points of the planner's whose grids are full of ties.

Seconds are whole numbers, and the fastest configurations take about 400: one second more is the tolerance to the bit. A
smaller chunk never needs more, as in programs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import product
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt

from mosaic.planner.space import Config, Point, Space, Variant

PAGE = 4
Choices = tuple[str, ...]
Rows = tuple[int | None, ...]


class Tables:
    """Bytes and seconds of every configuration: one plain choice, two escalating ones, three knobs.

    Parameters
    ----------
    apart
        Every knob has a live set of its own, and smaller chunks are never faster: what is cheapest for each knob is
        cheapest for all. Otherwise live sets hold rows of several knobs, chunks of any size may be the fastest, and the
        first two knobs nest: a few seconds hang on both.
    """

    def __init__(self, seed: int, *, apart: bool) -> None:
        rng = random.Random(f"{seed} {apart}")
        self.apart = apart
        self.choice_options = (("a", "b"), ("off", "on"), ("none", "half", "all"))
        if rng.random() < 0.5:
            self.choice_options = (("b", "a"), *self.choice_options[1:])
        self.knobs = ("first", "second", "third")
        self.ways = {way: _Way(rng, apart=apart) for way in self.choice_options[0]}
        self.num_sets, self.tokens = self.ways["a"].num_sets, 1

    def at(self, tokens: int) -> Tables:
        """The tables of as many tokens, each of which takes as much again of the live sets."""
        found = copy(self)
        found.tokens = tokens
        return found

    def combinations(self) -> list[Choices]:
        return list(product(*self.choice_options))

    def options(self, choices: Choices, knob: int) -> list[int | None]:
        return self.ways[choices[0]].options[knob]

    def configs(self) -> Iterator[Config]:
        for choices in self.combinations():
            for rows in product(*(self.options(choices, knob) for knob in range(len(self.knobs)))):
                yield Config(choices, rows)

    def live(self, config: Config) -> list[int]:
        """Bytes of every live set."""
        way = self.ways[config.choices[0]]
        return [
            base + self.tokens * sum(of[rows] for of, rows in zip(sizes, config.rows, strict=True))
            for base, sizes in zip(way.bases, way.sizes, strict=True)
        ]

    def bytes(self, config: Config) -> tuple[int, int]:
        """Bytes of the device, and of the host."""
        return self.fixed(config.choices) + round_up(max(self.live(config))), self.host_bytes(config.choices)

    def fixed(self, choices: Choices) -> int:
        return self.ways[choices[0]].fixed[self.rung(choices)]

    def host_bytes(self, choices: Choices) -> int:
        """Bytes of the host: with every rung more of the weights, and of some programs' hidden states."""
        way, rung = self.ways[choices[0]], self.rung(choices)
        return way.host[rung] + (self.tokens - 1) * rung * way.hidden

    def seconds(self, config: Config) -> float:
        way = self.ways[config.choices[0]]
        shared = 0 if self.apart else way.shared[config.rows[0], config.rows[1]]
        own = sum(of[rows] for of, rows in zip(way.seconds, config.rows, strict=True))
        return float(way.least[self.rung(config.choices)] + own + shared)

    def rung(self, choices: Choices) -> int:
        """The degree of escalation: the second choice is the finer one."""
        return sum(o.index(c) * f for o, c, f in zip(self.choice_options[1:], choices[1:], (3, 1), strict=True))

    def fits(self, config: Config, budget: int, host: int) -> bool:
        device, pinned = self.bytes(config)
        return device <= budget and pinned <= host


def round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class _Way:
    """The random draw of one option of the plain choice."""

    def __init__(self, rng: random.Random, *, apart: bool) -> None:
        knobs, rungs = range(3), range(6)
        tiles = [[None, *(1 << k for k in reversed(range(rng.randrange(4))))] for _ in knobs]
        self.options: list[list[int | None]] = [list(options) for options in tiles]
        self.num_sets = 4
        self.bases = [rng.randrange(12) for _ in range(self.num_sets)]
        self.sizes = [
            [self._falling(rng, knob, 0 if (apart and at != knob) or rng.random() < 0.2 else 9) for knob in knobs]
            for at in range(self.num_sets)
        ]
        self.seconds = [self._times(rng, knob, apart=apart) for knob in knobs]
        self.shared = {pair: rng.randrange(3) for pair in product(*self.options[:2])}
        steps = [rng.randrange(3) * PAGE for _ in rungs]
        self.fixed = [100 + sum(steps[rung:]) for rung in rungs]
        own = rng.choice((0, 0, PAGE))
        self.host = [own + rung * PAGE for rung in rungs]
        self.hidden = rng.choice((0, PAGE))
        late = [rng.choice((0, 0, 1)) for _ in rungs]
        self.least = [400 + sum(late[: rung + 1]) for rung in rungs]

    def _falling(self, rng: random.Random, knob: int, most: int) -> Mapping[int | None, int]:
        """Bytes by rows, no more for smaller chunks."""
        drawn = sorted((rng.randrange(most + 1) for _ in self.options[knob]), reverse=True)
        return dict(zip(self.options[knob], drawn, strict=True))

    def _times(self, rng: random.Random, knob: int, *, apart: bool) -> Mapping[int | None, int]:
        drawn = [rng.choice((0, 0, 1, 1, 2)) for _ in self.options[knob]]
        return dict(zip(self.options[knob], sorted(drawn) if apart else drawn, strict=True))


class Tabulated(Point):
    """A point that looks everything up."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.choice_options, self.evaluations = tables, tables.choice_options, 0
        choices = tuple(SimpleNamespace(escalating=bool(k)) for k in range(3))
        knobs = tuple(SimpleNamespace(name=name) for name in tables.knobs)
        # the op of a live set is told from its index
        variant = SimpleNamespace(formula=SimpleNamespace(at=range(tables.num_sets)))
        template = SimpleNamespace(choices=choices, knobs=knobs)
        self.asked: set[Choices] = set()
        self.peaks: dict[Config, tuple[int, int]] = {}
        self.lows: dict[Choices, Config] = {}
        found = SimpleNamespace(template=template, variant=lambda config: cast(Variant, variant))
        found.has_counted = lambda choices, pool: choices in self.asked
        self.space = cast(Space, found)
        self.template, self.dims = found.template, {"tokens": tables.tokens}

    def options(self, choices: Choices, knob: int) -> list[int | None]:
        return self.tables.options(choices, knob)

    def by_time(self, choices: Choices, knob: int) -> list[int | None]:
        times = self.tables.ways[choices[0]].seconds[knob]
        return sorted(self.options(choices, knob), key=lambda rows: times[rows])

    def nested_knobs(self, choices: Choices) -> list[tuple[int, int]]:
        return [] if self.tables.apart else [(0, 1)]

    def lowest(self, choices: Choices) -> Config:
        if choices not in self.lows:
            settings = product(*(self.options(choices, knob) for knob in range(len(self.tables.knobs))))
            self.lows[choices] = min((Config(choices, rows) for rows in settings), key=self.total_bytes)
        return self.lows[choices]

    def form_values(self, config: Config) -> npt.NDArray[np.int64]:
        self.evaluations += 1
        return np.array(self.tables.live(config))

    def dominating(self, config: Config) -> tuple[int, int]:
        if config not in self.peaks:
            live = self.tables.live(config)
            self.peaks[config] = max(live), live.count(max(live))
        return self.peaks[config]

    def total_bytes(self, config: Config, workspace_bytes: int | None = None) -> int:
        workspace = self.lower_bound(config) if workspace_bytes is None else workspace_bytes
        return self.tables.fixed(config.choices) + round_up(workspace)

    def lower_bound(self, config: Config) -> int:
        return self.dominating(config)[0]

    def host_bytes(self, choices: Choices) -> int:
        self.asked.add(choices)
        return self.tables.host_bytes(choices)

    def seconds(self, config: Config) -> float:
        return self.tables.seconds(config)
