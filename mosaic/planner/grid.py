"""The grid of configurations at fixed dims: options and row counts, and how settings by name become a configuration.

Memory and time of a configuration are computed in `mosaic.planner.space`.
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
        All of the template's dims, by name.
    pinned
        Choices that are fixed, with their option.

    Raises
    ------
    UnknownName
        If `pinned` names an unknown choice or option.
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
        """Every combination of choices that `pinned` allows, in a fixed order."""
        return tuple(product(*self.choice_options))

    @property
    def knobs(self) -> range:
        """Knobs by number, in the template's order."""
        return range(len(self.template.knobs))

    def options(self, choices: tuple[str, ...], knob: int) -> list[int | None]:
        """Return the settings of one knob, from off through ever smaller chunks: its tile times powers of two.

        A knob without a region under these choices is off; a knob whose loop holds side ops is never off.
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
        """Return the configuration for settings by name.

        A knob that is not named is off, a choice takes its first option. A chunk as large as its dim is off too, except
        in a loop with side ops, which then runs once.

        Raises
        ------
        UnknownName
            If a name is no knob or choice, or an option is unknown.
        UsageError
            If rows are not a positive multiple of the knob's tile.
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
        """Return the pairs of knobs whose loops nest."""
        index = {knob.name: k for k, knob in enumerate(self.template.knobs)}
        body = self.template.bodies[choices]
        parents = [(body.regions[r.parent].knob, r.knob) for r in body.regions if r.parent is not None]
        return [(index[outer], index[inner]) for outer, inner in dict.fromkeys(parents)]

    def ladders(self) -> Iterator[tuple[tuple[str, ...], list[list[tuple[str, ...]]]]]:
        """Yield each combination of the plain choices, with nothing escalated, and its ladders.

        A ladder varies the last escalating choice, in order, with the options of the others fixed.
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
        """Return the values of the body's variables: dims, then rows per knob (its whole dim if off)."""
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
