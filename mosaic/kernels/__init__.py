"""The kernels, one operator a file, found by what the operator's record says; only `load` imports torch (and triton)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mosaic.registrar.operator import Implementation
from mosaic.registrar.operators import operator

__all__ = ["kernel_of", "load"]


def load(name: str, backend: str = "cpu", implementation: str | None = None) -> Any:
    """Import the module of one operator for a backend: "cpu" or "cuda", with the same `launch` signature.

    Parameters
    ----------
    name
        An operator that Mosaic ships.
    implementation
        Which one, where the backend has several (a plan's `implementations` says): "triton" or "cudnn" for attention
        on "cuda". None takes the first that serves every launch.

    Raises
    ------
    UnknownName
        If there is no such operator, no such backend, or no such implementation.
    MissingExtra
        If the backend is "cuda" and triton is not installed. Attention by cuDNN imports without cuDNN, and raises this
        at its first launch; its `available()` tells before.

    Examples
    --------
    >>> load("silu_mul").__name__
    'mosaic.kernels.silu_mul'
    """
    return kernel_of(operator(name).implementation(backend, implementation))


def kernel_of(implementation: Implementation) -> Any:
    """Get what launches an implementation: an object with a `launch`, such as its module, or the launcher itself."""
    kernel = implementation.kernel
    if not isinstance(kernel, str):
        return kernel
    module, _, launcher = kernel.partition(":")
    return getattr(import_module(module), launcher) if launcher else import_module(module)
