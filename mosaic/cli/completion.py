"""Shell completion of names; `mosaic --install-completion` enables it."""

from __future__ import annotations


def device_names(incomplete: str) -> list[str]:
    """Return built-in profiles; the shell completes profile files by itself.

    >>> device_names("h")
    ['h100', 'h200']
    """
    from mosaic.devices import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Return presets and the small models that ship.

    >>> model_names("llada-8")
    ['llada-8b']
    """
    from mosaic.models import PRESETS, SHIPPED

    return [name for name in (*SHIPPED, *PRESETS) if name.startswith(incomplete)]


def solver_names(incomplete: str) -> list[str]:
    """Return offset solvers.

    >>> solver_names("greedy_by_s")
    ['greedy_by_size']
    """
    from mosaic.planner.offsets import SOLVERS

    return [name for name in SOLVERS if name.startswith(incomplete)]
