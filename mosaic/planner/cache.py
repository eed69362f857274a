"""The templates of this process: planners of one model share what they compile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mosaic.models import Model
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner.template import Template, compile_template
from mosaic.registrar.schemes.plain import PLAIN

_compiled: dict[tuple[Any, ...], Template] = {}


def template_of(model: Model, *, backend: str = "cuda", phase: Phase = FULL_STEP) -> Template:
    """Return the template of a model's phase; what is compiled of it is kept."""
    key = (model.family, model.architecture, backend, phase)
    if key not in _compiled:
        _compiled[key] = compile_template(partial(_register, model, backend, phase))
    return _compiled[key]


def forget() -> None:
    """Drop all templates."""
    _compiled.clear()


def _register(model: Model, backend: str, phase: Phase, choices: Mapping[str, str] | None) -> Any:
    """A phase with parts of a user's own, or a scheme, has all of its layers registered: nothing says that they are of one kind."""
    brief = phase.shipped and model.architecture.scheme is PLAIN
    return model.graph(backend=backend, choices=choices, phase=phase, brief=brief)
