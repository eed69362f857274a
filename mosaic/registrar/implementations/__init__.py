"""How operators are carried out, torch-free: per backend, the scratch bytes each one asks the plan for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

from mosaic.errors import UnknownName
from mosaic.registrar.contract import Dim, Spec

__all__ = ["BACKENDS", "Scratch", "scratch_bytes"]

BACKENDS: Final = ("cuda", "cpu")

Scratch: TypeAlias = Callable[[Mapping[str, tuple[Dim, ...]], Mapping[str, str], Mapping[str, Any]], Dim]


def scratch_bytes(backend: str, operator: str, specs: Mapping[str, Spec], attrs: Mapping[str, Any]) -> Dim:
    """Scratch that one launch of `operator` needs on `backend`, in bytes; 0 if none."""
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    table: Mapping[str, Scratch] = import_module(f"mosaic.registrar.implementations.{backend}").SCRATCH
    rule = table.get(operator)
    if rule is None:
        return 0
    shapes = {key: spec.shape for key, spec in specs.items()}
    return rule(shapes, {key: spec.dtype for key, spec in specs.items()}, attrs)
