"""The kernels, one operator a file: `KERNELS` lists them, `load` imports one; only `load` imports torch (and triton)."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from mosaic.errors import UnknownName
from mosaic.registrar.implementations import BACKENDS

__all__ = ["KERNELS", "load"]

KERNELS: Final[dict[str, str]] = {
    name: f"mosaic.kernels.{name}"
    for name in (
        "attention",
        "confidence",
        "embedding",
        "gather_rows",
        "grouped_linear",
        "head_norm",
        "linear",
        "linear_add",
        "moe_combine",
        "moe_gather",
        "moe_route",
        "moe_sort",
        "rms_norm",
        "rotary",
        "row_stats",
        "shift_rows",
        "silu_mul",
        "unembed_stats",
    )
}
"""Operator name -> module that holds its `launch` and its `reference`."""


def load(name: str, backend: str = "cpu") -> ModuleType:
    """Import the module of one operator for a backend: "cpu" or "cuda", with the same `launch` signature.

    Raises
    ------
    UnknownName
        If there is no such operator, or no such backend.
    MissingExtra
        If the backend is "cuda" and triton is not installed.

    Examples
    --------
    >>> "attention" in KERNELS
    True
    """
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS)
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    return importlib.import_module(KERNELS[name] if backend == "cpu" else f"mosaic.kernels.cuda.{name}")
