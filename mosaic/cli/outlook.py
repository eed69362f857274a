"""Warnings before a generation that is long or exceeds the machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from mosaic.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

LARGE: Final = 500_000_000
"""Parameters of a model from which on warnings are given."""
LONG_S: Final = 60.0


def outlook(plan: Plan, steps: int, *, memory: int | None = None) -> list[str]:
    """Return warnings about a generation whose largest step is planned; none if it is short and fits the machine.

    Parameters
    ----------
    steps
        The most steps.
    memory
        Bytes that the machine can give, if the plan lives in its memory; None: unknown.

    Examples
    --------
    >>> from mosaic.planner import plan
    >>> outlook(plan("llada-8b", tokens=160, device="cpu"), 128, memory=8 << 30)[0]
    'llada-8b takes 14.95 GiB on cpu, and this machine has 8.00 GiB to give: it will swap, or be stopped.'
    """
    found = []
    if memory is not None and plan.total_bytes > memory:
        found.append(
            f"{plan.model} takes {format_bytes(plan.total_bytes)} on {plan.device}, and this machine has "
            f"{format_bytes(memory)} to give: it will swap, or be stopped."
        )
    step_s = plan.predicted_step_ms / 1e3
    if step_s * steps > LONG_S:
        guess = ", by an estimated profile" if plan.document["estimated"] else ""
        found.append(
            f"{plan.model} on {plan.device}: up to {steps:,} steps of {format_seconds(step_s)}, "
            f"{format_seconds(step_s * steps)} in all{guess}; Ctrl-C stops it, --gen-length and --steps shorten it."
        )
    return found


def available_bytes() -> int | None:
    """Return the memory that this machine can give without swapping, as Linux reports it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
