"""How operators are carried out, torch-free: per backend, scratch bytes, and which kernels of attention are legal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mosaic.errors import UnknownName

if TYPE_CHECKING:  # the planner asks for `attention_options` alone, and starts without sympy
    from mosaic.registrar.contract import Dim, Spec

    Scratch: TypeAlias = Callable[[Mapping[str, tuple[Dim, ...]], Mapping[str, str], Mapping[str, Any]], Dim]

__all__ = ["BACKENDS", "attention_options", "scratch_bytes"]

BACKENDS: Final = ("cuda", "cpu")


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


def attention_options(backend: str, *, seqs: int, head_size: int, dtype: str, block: int = 0) -> tuple[str, ...]:
    """Name the implementations of attention that a backend has for such a step, the fastest first; none: it has one.

    cuDNN's static graphs serve one sequence that sees all of itself (`block` 0), heads of a multiple of 8 up to 128, in
    16 bits; the Triton kernel serves every batch.

    >>> attention_options("cuda", seqs=1, head_size=128, dtype="bfloat16")
    ('cudnn', 'triton')
    >>> attention_options("cuda", seqs=2, head_size=128, dtype="bfloat16")
    ('triton',)
    """
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    if backend != "cuda":
        return ()
    heads = head_size % 8 == 0 and head_size <= 128
    served = seqs == 1 and block == 0 and heads and dtype in ("bfloat16", "float16")
    return ("cudnn", "triton") if served else ("triton",)
