"""The kernels, one operator a file, found by what the operator's record says; only `load` imports torch (and triton)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mosaic.registrar.operators import operator

if TYPE_CHECKING:
    from mosaic.kernels.binding import Kernel

__all__ = ["load"]


def load(name: str, backend: str = "cpu", implementation: str | None = None) -> Kernel:
    """Get the kernel of one operator for a backend, whose launches are checked.

    Parameters
    ----------
    name
        An operator that Mosaic ships.
    backend
        "cpu" or "cuda".
    implementation
        Which one, where the backend has several (a plan's `implementations` says): "triton" or "cudnn" for attention
        on "cuda". None takes the first that serves every launch.

    Raises
    ------
    UnknownName
        If there is no such operator, no such backend, or no such implementation.
    MissingExtra
        If the backend is "cuda" and triton is not installed. Attention by cuDNN loads without cuDNN, and raises this
        at its first launch; the `available()` of its module tells before.

    Examples
    --------
    >>> load("silu_mul").module.__name__
    'mosaic.kernels.silu_mul'
    """
    from mosaic.kernels.binding import Kernel, kernel_of

    record = operator(name)
    way = record.implementation(backend, implementation)
    return Kernel(record, way, kernel_of(way))
