"""Tables for tests from the records of the shipped operators: scratch by operator, attention by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mosaic.registrar.operator import Dim, Spec
from mosaic.registrar.operators import OPERATORS, operator

Rule = Callable[[Mapping[str, tuple[Dim, ...]], Mapping[str, str], Mapping[str, Any]], Dim]


def scratch_rules(backend: str) -> dict[str, Rule]:
    """Scratch bytes of the operators that have any on a backend, from shapes and dtypes by operand, and attributes."""

    def rule(name: str) -> Rule:
        def scratch(shapes: Mapping[str, tuple[Dim, ...]], dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
            specs = {key: Spec(tuple(shape), dtypes.get(key, "float32")) for key, shape in shapes.items()}
            return operator(name).scratch_bytes(backend, specs, attrs)

        return scratch

    return {name: rule(name) for name in OPERATORS if any(way.scratch for way in operator(name).on(backend))}


def scratch_bytes(backend: str, name: str, specs: Mapping[str, Spec], attrs: Mapping[str, Any]) -> Dim:
    """Scratch of one launch of a shipped operator."""
    return operator(name).scratch_bytes(backend, specs, attrs)


def attention_options(backend: str, *, seqs: int, head_size: int, dtype: str, block: int = 0) -> tuple[str, ...]:
    """Implementations of attention for a step of this many sequences; none if the backend has only one."""
    record = operator("attention")
    specs = {"q": Spec((8, head_size), dtype), "cu_seqlens": Spec((seqs + 1,), "int32")}
    serving = record.serving(backend, specs, {"head_size": head_size, "block": block})
    return serving if len(record.on(backend)) > 1 else ()
