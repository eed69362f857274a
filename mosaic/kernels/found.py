"""What an implementation names, imported when it is first bound."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mosaic.registrar.operator import Implementation

__all__ = ["kernel_of"]


def kernel_of(implementation: Implementation) -> Any:
    """Get what launches an implementation: an object with a `launch`, such as its module, or the launcher itself."""
    kernel = implementation.kernel
    if not isinstance(kernel, str):
        return kernel
    module, _, launcher = kernel.partition(":")
    return getattr(import_module(module), launcher) if launcher else import_module(module)
