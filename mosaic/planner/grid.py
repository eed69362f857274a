"""The grid of configurations at fixed dims: what there is to choose, and how settings by name become one of it.

Nothing here evaluates: what a configuration needs and how long it takes, `mosaic.planner.space` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import NamedTuple

from mosaic.errors import UnknownName, UsageError
from mosaic.planner.template import Template
from mosaic.units import round_up


class Config(NamedTuple):
    """One option per choice and one row count (None: off) per knob, in the template's order."""

    choices: tuple[str, ...]
    rows: tuple[int | None, ...]


class Grid:
    """Every configuration of a template at given dims.

    Parameters
    ----------
    template
        The compiled model.
    dims
        By name, all of the template's.
    pinned
        Choices that are not free, with the option they have.

    Raises
    ------
    UnknownName
        If `pinned` names a choice or an option that there is not.
    """

    def __init__(self, template: Template, dims: Mapping[str, int], pinned: Mapping[str, str]) -> None:
        self.template, self.dims = template, dims
        for name, option in pinned.items():
            _option_of(template, name, option)
        self.choice_options = tuple(
            (pinned[choice.name],) if choice.name in pinned else choice.options for choice in template.choices
        )
        self._dim_values = [dims[dim.name] for dim in template.dims]
        self.extents = {knob.name: dims[knob.over] for knob in template.knobs}
        self._knob_extents = list(self.extents.values())
        self._options: dict[tuple[tuple[str, ...], int], list[int | None]] = {}

    @cached_property
    def choice_combinations(self) -> tuple[tuple[str, ...], ...]:
        """Every combination of choices that is free to be taken, in a fixed order."""
        return tuple(product(*self.choice_options))

    @property
    def knobs(self) -> range:
        """Knobs by number, in the template's order."""
        return range(len(self.template.knobs))

    def options(self, choices: tuple[str, ...], knob: int) -> list[int | None]:
        """Return the settings of one knob, from off through ever smaller chunks: its tile times powers of two.

        A knob without a region under these choices is off; one whose loop holds side ops is never off.
        """
        key = (choices, knob)
        if key not in self._options:
            record, body = self.template.knobs[knob], self.template.bodies[choices]
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
        template = self.template
        known = [choice.name for choice in template.choices] + [knob.name for knob in template.knobs]
        for name in settings:
            if name not in known:
                raise UnknownName("knob", name, known)
        choices = tuple(
            _option_of(template, choice.name, str(settings.get(choice.name, options[0])))
            for choice, options in zip(template.choices, self.choice_options, strict=True)
        )
        return Config(choices, tuple(self._rows(choices, k, settings) for k in self.knobs))

    def _rows(self, choices: tuple[str, ...], knob: int, settings: Mapping[str, int | str | None]) -> int | None:
        record, body = self.template.knobs[knob], self.template.bodies[choices]
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
        index = {knob.name: k for k, knob in enumerate(self.template.knobs)}
        body = self.template.bodies[choices]
        parents = [(body.regions[r.parent].knob, r.knob) for r in body.regions if r.parent is not None]
        return [(index[outer], index[inner]) for outer, inner in dict.fromkeys(parents)]

    def ladders(self) -> Iterator[tuple[tuple[str, ...], list[list[tuple[str, ...]]]]]:
        """Yield, for each combination of the plain choices, it with nothing escalated, and its ladders.

        A ladder varies the last escalating choice, in order, at fixed options of the other ones.
        """
        free = [choice.escalating for choice in self.template.choices]
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
                ladders.append(rungs)
            yield base, ladders

    def configs(self, choices: tuple[str, ...]) -> Iterator[Config]:
        """Yield every configuration of one combination of choices, in a fixed order."""
        for rows in product(*(self.options(choices, k) for k in self.knobs)):
            yield Config(choices, rows)

    def values(self, config: Config) -> list[int]:
        """Return the values of the body's variables: dims, then rows per knob (its whole dim when off)."""
        rows = [
            extent if given is None or given > extent else given
            for given, extent in zip(config.rows, self._knob_extents, strict=True)
        ]
        return self._dim_values + rows


def _option_of(template: Template, name: str, option: str) -> str:
    """Make sure that a choice has an option."""
    options = {choice.name: choice.options for choice in template.choices}
    if name not in options:
        raise UnknownName("choice", name, options)
    if option not in options[name]:
        raise UnknownName(f"option of '{name}'", option, options[name])
    return option
