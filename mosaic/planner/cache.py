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
