"""Milliseconds of a step's kernels by kind, from the profiler: products, attention, metric and selection, others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

from mosaic.errors import UsageError

__all__ = ["KINDS", "OTHERS", "kernel_ms", "kind_of"]

PRODUCTS, ATTENTION, SELECTION, OTHERS = "products", "attention", "metric and selection", "others"
KINDS: Final = (PRODUCTS, ATTENTION, SELECTION, OTHERS)
OPERATORS: Final[Mapping[str, tuple[str, ...]]] = {
    PRODUCTS: (
        "grouped_linear", "linear", "linear_add", "norm_gate_up", "norm_qkv", "split_linear_add", "unembed_sample",
        "unembed_stats",
    ),
    ATTENTION: (
        "attention", "joined_attention", "kv_attention", "kv_attention_hopper", "prefix_attention", "selected_attention",
    ),
    SELECTION: (
        "evict_tokens", "gather_rows", "key_mass", "pack_keys", "prefix_logsumexp", "score_keys", "select_keys",
        "token_importance", "top_keys",
    ),
}  # fmt: skip
"""The operators, and the modules with kernels of their own, of a kind."""
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    PRODUCTS: ("nvjet", "gemm", "splitk", "cublas"),
    ATTENTION: ("cudnn", "fmha"),
}
"""Parts of the names of libraries' kernels."""


def kernel_ms(kernels: Iterable[tuple[str, float]], steps: int) -> dict[str, float]:
    """Return milliseconds of a step by kind, from names and microseconds of all launches of several steps."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, microseconds in kernels:
        found[_kind(name)] += microseconds / 1e3 / steps
    return found


def kind_of(operator: str) -> str:
    """Return the kind of an operator, by its name.

    >>> kind_of("linear"), kind_of("rotary")
    ('products', 'others')
    """
    return next((kind for kind, operators in OPERATORS.items() if operator in operators), OTHERS)


@cache
def _kind(name: str) -> str:
    for kind, modules in OPERATORS.items():
        if any(name in _own(module) for module in modules):
            return kind
    for kind, parts in LIBRARIES.items():
        if any(part in name.lower() for part in parts):
            return kind
    return OTHERS


@cache
def _own(module: str) -> Mapping[str, Any]:
    """The kernels that a module defines; none if an operator has no module, or if its kernels are not for the installed Triton."""
    try:
        found = vars(import_module(f"mosaic.kernels.cuda.{module}"))
    except (ModuleNotFoundError, UsageError):
        return {}
    return {name: kernel for name, kernel in found.items() if name.endswith("_kernel")}
