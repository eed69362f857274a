"""A graph compiled to numbers: symbolic sizes become integer coefficient tables.

What is left of a graph is plain data. A `Template` has one `Body` per combination of
choices; a body's ops and buffers refer to rows of its polynomial table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

from mosaic.errors import GraphError
from mosaic.models import Model
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner.body import Body, ChoiceRecord, DimRecord, KnobRecord
from mosaic.planner.compiling import compile_body
from mosaic.registrar.schemes.plain import PLAIN
from mosaic.registrar.validate import validate

__all__ = ["Bodies", "Register", "Template", "collector_paused", "compile_template", "forget", "template_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The compiled graphs of a phase, for every combination of choices.

    Parameters
    ----------
    name
        The phase.
    dims, knobs
        Symbolic dims and chunk knobs, in order of declaration.
    choices
        The choices; `bodies` has one entry per combination, keyed by the chosen options, compiled on first use.
    """

    name: str
    backend: str
    dims: tuple[DimRecord, ...]
    knobs: tuple[KnobRecord, ...]
    choices: tuple[ChoiceRecord, ...]
    bodies: Mapping[tuple[str, ...], Body]

    @property
    def first(self) -> Body:
        """The body with every choice at its first option."""
        return self.bodies[tuple(choice.options[0] for choice in self.choices)]

    def dims_of(self, given: Mapping[str, int]) -> dict[str, int]:
        """Complete dims with fixed values and check bounds.

        Raises
        ------
        GraphError
            If a dim is missing, below 1 or above its bound.
        """
        values: dict[str, int] = {}
        for dim in self.dims:
            value = given.get(dim.name, dim.value)
            if value is None:
                raise GraphError(
                    f"the plan needs a value for the dim '{dim.name}'; dims: {', '.join(d.name for d in self.dims)}"
                )
            if value < 1:
                raise GraphError(f"the dim '{dim.name}' must be at least 1, got {value}")
            values[dim.name] = int(value)
        for dim in self.dims:
            if dim.at_most is not None and values[dim.name] > values[dim.at_most]:
                raise GraphError(
                    f"{dim.name} = {values[dim.name]:,} exceeds {dim.at_most} = {values[dim.at_most]:,}, which bounds it"
                )
        return values


class Bodies(Mapping[tuple[str, ...], Body]):
    """The bodies of all combinations of choices, each compiled on first use.

    Parameters
    ----------
    choices
        The choices, in order.
    compile_now
        Compiles the body of one combination.
    """

    def __init__(self, choices: Sequence[ChoiceRecord], compile_now: Callable[[tuple[str, ...]], Body]) -> None:
        self._keys = tuple(product(*(choice.options for choice in choices)))
        self._compile, self._known = compile_now, dict[tuple[str, ...], Body]()

    def __getitem__(self, key: tuple[str, ...]) -> Body:
        if key not in self._known:
            if key not in self._keys:
                raise KeyError(key)
            self._known[key] = self._compile(key)
        return self._known[key]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


Register: TypeAlias = Callable[[Mapping[str, str] | None], Any]
"""Builds the graph for given choices (None: the first options), such as `Model.graph` bound to its options."""


def compile_template(register: Register) -> Template:
    """Compile a model; its bodies are compiled on first use."""
    first: Any = register(None)
    shell = Template(
        name=first.name, backend=first.backend, dims=_dims_of(first), knobs=_knobs_of(first),
        choices=_choices_of(first), bodies={},
    )  # fmt: skip
    graphs = {tuple(choice.options[0] for choice in shell.choices): first}  # until its body is asked for

    def body(options: tuple[str, ...]) -> Body:
        return _compile_choices(register, shell, options, graphs.pop(options, None))

    return replace(shell, bodies=Bodies(shell.choices, body))


def _compile_choices(register: Register, shell: Template, options: Sequence[str], graph: Any | None) -> Body:
    """Register the model with one option of every choice, unless its graph exists; validate and compile it.

    Parameters
    ----------
    shell
        The dims, knobs and choices that all bodies share, in order.

    Raises
    ------
    GraphError
        If these options declare other dims, knobs or choices than the first ones: a template has one list of each.
    """
    with collector_paused():
        if graph is None:
            graph = register({choice.name: option for choice, option in zip(shell.choices, options, strict=True)})
        _require_same(shell, graph, options)
        validate(graph)
        return compile_body(graph)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from traversing the unfinished graph repeatedly: that is a third of the time of
    compiling, a fifth of planning.

    Of concurrent threads, the one that found it enabled enables it again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _dims_of(graph: Any) -> tuple[DimRecord, ...]:
    return tuple(DimRecord(name, info.at_most, info.value) for name, info in graph.dims.items())


def _knobs_of(graph: Any) -> tuple[KnobRecord, ...]:
    return tuple(KnobRecord(name, str(graph.knob_dims[name]), tile) for name, tile in graph.tiles.items())


def _choices_of(graph: Any) -> tuple[ChoiceRecord, ...]:
    return tuple(ChoiceRecord(c.name, c.options, c.escalating, not c.alike) for c in graph.choices.values())


def _require_same(shell: Template, graph: Any, options: Sequence[str]) -> None:
    """Compare the declarations of some options with those of the first ones."""
    for what, expected, found in (
        ("dims", shell.dims, _dims_of(graph)),
        ("chunk knobs", shell.knobs, _knobs_of(graph)),
        ("choices", shell.choices, _choices_of(graph)),
    ):
        if tuple(expected) != tuple(found):
            taken = ", ".join(
                f"{choice.name}={option}" for choice, option in zip(shell.choices, options, strict=True)
                if option != choice.options[0]
            )  # fmt: skip
            raise GraphError(
                f"{graph.name} with {taken or 'the first options'} declares the {what} {_listed(found)}, with the first "
                f"options {_listed(expected)}: declare them ahead of what depends on a choice, a knob with g.knob"
            )


def _listed(records: Sequence[Any]) -> str:
    """Names of records with their other fields, such as "body (tokens, 16)"."""
    said = ((record[0], [str(value) for value in record[1:] if value not in (None, False)]) for record in records)
    return ", ".join(f"{name} ({', '.join(more)})" if more else name for name, more in said) or "none"


# -- the templates of this process, which planners of one model share --------------------------------------------------

_compiled: dict[tuple[Any, ...], Template] = {}


def template_of(model: Model, *, backend: str = "cuda", phase: Phase = FULL_STEP) -> Template:
    """Return the template of a model's phase; compiled bodies are kept."""
    key = (model.family, model.architecture, backend, phase)
    if key not in _compiled:
        _compiled[key] = compile_template(partial(_register, model, backend, phase))
    return _compiled[key]


def forget() -> None:
    """Drop all templates."""
    _compiled.clear()


def _register(model: Model, backend: str, phase: Phase, choices: Mapping[str, str] | None) -> Any:
    """Whether layers may be left out: not with a user's own parts or a scheme, whose layers may not be of one kind."""
    brief = phase.shipped and model.architecture.scheme is PLAIN
    return model.graph(backend=backend, choices=choices, phase=phase, brief=brief)
