"""Why a request does not fit, and what would: computed from the formula, never canned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from mosaic.devices import DEVICES
from mosaic.planner.plan import Plan
from mosaic.planner.planner import Planner, Request
from mosaic.units import MIB, format_bytes, format_tokens, round_up

__all__ = ["Misfit", "misfit"]

ANY_HOST: Final = 1 << 42
"""More pinned memory than a host has: 4 TiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """What is needed, what holds the floor, and what would fit.

    Parameters
    ----------
    needed_bytes, available_bytes
        Smallest total over all moves, and the budget.
    floor
        What holds the floor: "weights", or the op at whose live set the workspace peaks.
    largest
        Names and bytes of the largest buffers there.
    max_ctx_tokens
        Largest context that fits this budget; 0 if none.
    smallest_budget_bytes
        Smallest budget, in whole MiB, that holds the request.
    device
        The smallest built-in device that holds it, or None.
    suggestion
        The one option that would fix it.
    """

    needed_bytes: int
    available_bytes: int
    floor: str
    largest: tuple[tuple[str, int], ...]
    max_ctx_tokens: int
    smallest_budget_bytes: int
    device: str | None
    suggestion: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The message, a line each."""
        yield f"does not fit: needs {format_bytes(self.needed_bytes)}, available {format_bytes(self.available_bytes)}"
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.largest)
        yield f"the floor is held by {self.floor}: {shown}"
        longest = (
            f"{format_tokens(self.max_ctx_tokens)} tokens"
            if self.max_ctx_tokens
            else "none: the fixed part alone exceeds it"
        )
        yield f"largest context in this budget: {longest}"
        yield f"smallest budget for this request: {format_bytes(self.smallest_budget_bytes)}"
        yield f"would fit: {self.suggestion}"


def misfit(planner: Planner, request: Request, plan: Plan) -> Misfit:
    """Explain a plan that does not fit. Its configuration is the lowest there is, so its peak is the floor."""
    needed = planner.needed(request)
    smallest = round_up(needed, MIB)
    device = _smallest_device(planner, request)
    components = plan.components
    fixed = sum(components.values()) - components["workspace"]
    if fixed > planner.budget_bytes:
        floor, largest = (
            "the fixed part",
            sorted(
                ((name, size) for name, size in components.items() if name != "workspace" and size),
                key=lambda item: -item[1],
            ),
        )
    else:
        floor, largest = _at_peak(plan)
    return Misfit(
        needed_bytes=needed, available_bytes=planner.budget_bytes, floor=floor, largest=tuple(largest[:5]),
        max_ctx_tokens=plan.max_ctx_tokens, smallest_budget_bytes=smallest, device=device,
        suggestion=_suggest(planner, request, plan, device, smallest),
    )  # fmt: skip


def _smallest_device(planner: Planner, request: Request) -> str | None:
    cards = sorted((d for d in DEVICES.values() if d.backend == planner.device.backend), key=lambda d: d.memory_bytes)
    for card in cards:
        if Planner(planner.model, device=card).needed(request) <= card.memory_bytes:
            return card.name
    return None


def _at_peak(plan: Plan) -> tuple[str, list[tuple[str, int]]]:
    """The op of the highest live set of the workspace and what is alive there, largest first."""
    buffers = [b for b in plan.document["buffers"] if b["pool"] == "workspace" and b["alias_of"] is None]
    points = sorted({b["start"] for b in buffers})

    def live(at: int) -> list[dict[str, Any]]:
        return [
            b for b in buffers if b["start"] <= at < b["end"] and not any(low <= at < high for low, high in b["gaps"])
        ]

    at = max(points, key=lambda point: sum(b["size"] for b in live(point)))
    found = sorted(((b["name"], b["size"]) for b in live(at)), key=lambda item: -item[1])
    return plan.document["ops"][at]["name"], found


def _host_budget(planner: Planner, request: Request) -> int:
    """Pinned host memory, in whole MiB, with which the request would fit the budget; 0 if none would do."""
    made = planner.with_host_budget(ANY_HOST).plan(request)
    return round_up(made.document["host_bytes"], MIB) if made.fits else 0


def _suggest(planner: Planner, request: Request, plan: Plan, device: str | None, smallest: int) -> str:
    """One option: the budget if the device has room for it, else host memory, a shorter context, another device."""
    if smallest <= planner.device.memory_bytes:
        return f"--budget {smallest // MIB}MiB"
    if host := _host_budget(planner, request):
        return f"--host-budget {host // MIB}MiB, to keep weights and hidden states in pinned host memory"
    if plan.max_ctx_tokens and len(request.seq_lens) == 1:
        other = f", or --device {device} for all {format_tokens(request.tokens)}" if device else ""
        return f"--ctx {plan.max_ctx_tokens}{other}"
    return f"--device {device}" if device else f"a device with {format_bytes(smallest)}"
