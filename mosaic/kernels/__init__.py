"""The kernels, one operator a file: `KERNELS` lists them, `load` imports one; only `load` imports torch (and triton)."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from mosaic.errors import UnknownName
from mosaic.registrar.implementations import BACKENDS

__all__ = ["IMPLEMENTATIONS", "KERNELS", "load"]

KERNELS: Final[dict[str, str]] = {
    name: f"mosaic.kernels.{name}"
    for name in (
        "attention",
        "confidence",
        "copy",
        "embedding",
        "gather_rows",
        "grouped_linear",
        "guide",
        "head_norm",
        "kv_attention",
        "kv_store",
        "linear",
        "linear_add",
        "moe_combine",
        "moe_gather",
        "moe_route",
        "moe_sort",
        "perturb_score",
        "rms_norm",
        "rotary",
        "row_nucleus",
        "row_sample",
        "row_score",
        "row_stats",
        "shift_rows",
        "silu_mul",
        "transfer",
        "unembed_sample",
        "unembed_stats",
    )
}
"""Operator name -> module that holds its `launch` and its `reference`."""


IMPLEMENTATIONS: Final[dict[tuple[str, str], dict[str, str]]] = {
    ("attention", "cuda"): {
        "triton": "mosaic.kernels.cuda.attention",
        "cudnn": "mosaic.kernels.cuda.attention_cudnn",
    }
}
"""(Operator, backend) -> implementation -> module, where there are several."""


def load(name: str, backend: str = "cpu", implementation: str | None = None) -> ModuleType:
    """Import the module of one operator for a backend: "cpu" or "cuda", with the same `launch` signature.

    Parameters
    ----------
    implementation
        Which one, where the backend has several (a plan's `implementations` says): "triton" or "cudnn" for attention
        on "cuda". None takes the one that serves every batch.

    Raises
    ------
    UnknownName
        If there is no such operator, no such backend, or no such implementation.
    MissingExtra
        If the backend is "cuda" and triton is not installed. Attention by cuDNN imports without cuDNN, and raises this
        at its first launch; its `available()` tells before.

    Examples
    --------
    >>> "attention" in KERNELS
    True
    """
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS)
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    if implementation is not None:
        known = IMPLEMENTATIONS.get((name, backend), {})
        if implementation not in known:
            raise UnknownName(f"implementation of {name} on {backend}", implementation, known)
        return importlib.import_module(known[implementation])
    return importlib.import_module(KERNELS[name] if backend == "cpu" else f"mosaic.kernels.cuda.{name}")
