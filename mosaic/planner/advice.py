"""Why a request does not fit, and the ways to make it fit. Each option is planned, so its bytes and time are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Final

from mosaic.devices import DEVICES
from mosaic.planner.limits import QUICK, is_feasible, smallest_host
from mosaic.planner.plan import Plan
from mosaic.planner.plan_records import PlanBuffer
from mosaic.planner.planner import Planner
from mosaic.planner.request import Request
from mosaic.planner.search import TOLERANCE
from mosaic.planner.template import collector_paused
from mosaic.units import MIB, format_bytes, format_seconds, format_tokens, round_up

ANY_HOST: Final = 1 << 42
"""More pinned memory than a host has: 4 TiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One planned way to make a request fit: its memory, and its predicted time.

    Parameters
    ----------
    what
        What changes: "budget", "host-budget", "device", "masked", "ctx" or "seq-lens".
    arguments
        The change on the command line.
    device_bytes, host_bytes
        Device memory of the whole process, and pinned host memory.
    predicted_ms
        The step that would fit; a shorter one if the request is changed.
    at_most
        Whether the search may find a faster step in that memory: only one configuration of choices was planned.
    """

    what: str
    arguments: str
    device_bytes: int
    host_bytes: int
    predicted_ms: float
    at_most: bool = False

    def line(self, width: int) -> str:
        """Return the option in words, its arguments padded to a width."""
        host = f" and {format_bytes(self.host_bytes)} pinned on the host" if self.host_bytes else ""
        shown = format_seconds(self.predicted_ms / 1e3)
        most = "at most " if self.at_most else ""
        return (
            f"  {self.arguments:<{width}}  {format_bytes(self.device_bytes)} on the device{host}, {most}{shown} a step"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """The bytes that are needed, the live set of the floor, and the options that would fit.

    Parameters
    ----------
    needed_bytes, available_bytes
        Smallest total over all moves, and the budget.
    floor, largest
        "the fixed part", or the op at which the workspace peaks; names and bytes of the largest buffers there.
    max_ctx_tokens
        Largest context that fits this budget; 0 if none.
    smallest_budget_bytes
        Smallest budget, in whole MiB, that holds the request.
    device
        The smallest other built-in device that holds it, or None.
    options
        All options: first the same request on this device, the fastest first; then another device; then less.
    suggestion
        The first of them, or the device that would be needed.
    """

    needed_bytes: int
    available_bytes: int
    floor: str
    largest: tuple[tuple[str, int], ...]
    max_ctx_tokens: int
    smallest_budget_bytes: int
    device: str | None
    options: tuple[Option, ...]
    suggestion: str

    def lines(self) -> Iterator[str]:
        """Yield the message, a line each."""
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
        if not self.options:
            yield f"would fit: {self.suggestion}"
            return
        yield "any of these would fit:"
        width = max(len(option.arguments) for option in self.options)
        for option in self.options:
            yield option.line(width)


@collector_paused()
def misfit(planner: Planner, request: Request, plan: Plan) -> Misfit:
    """Explain a plan that does not fit. Its configuration is the lowest, so its peak is the floor."""
    needed = planner.needed(request)
    smallest = round_up(needed, MIB)
    components = plan.components
    fixed = sum(components.values()) - components["workspace"]
    if fixed > planner.budget_bytes:
        sizes = [(name, size) for name, size in components.items() if name != "workspace" and size]
        floor, largest = "the fixed part", sorted(sizes, key=lambda item: -item[1])
    else:
        floor, largest = _at_peak(plan)
    card = _smallest_device(planner, request)
    on_host = _on_host if fixed <= planner.budget_bytes else partial(_one_on_host, plan)
    here = [*_larger_budget(planner, request, smallest), *on_host(planner, request)]
    here.sort(key=lambda option: option.predicted_ms)
    whole = planner.device.memory_bytes
    if not here and whole > planner.budget_bytes:
        here = [*on_host(planner.with_budgets(budget=whole), request, also=f"--budget {whole // MIB}MiB ")]
    elsewhere = _planned(card, request, "device", _named(card, planner)) if card is not None else ()
    less = (*_fewer_rows(planner, request), *_shorter(planner, request, plan), *_fewer_sequences(planner, request))
    options = (*here, *elsewhere, *less)
    return Misfit(
        needed_bytes=needed, available_bytes=planner.budget_bytes, floor=floor, largest=tuple(largest[:5]),
        max_ctx_tokens=plan.max_ctx_tokens, smallest_budget_bytes=smallest, options=options,
        device=None if card is None else card.device.name,
        suggestion=options[0].arguments if options else f"a device with {format_bytes(smallest)}",
    )  # fmt: skip


def _at_peak(plan: Plan) -> tuple[str, list[tuple[str, int]]]:
    """The op of the highest live set of the workspace and the buffers alive there, largest first."""
    buffers = [b for b in plan.records.buffers if b.pool == "workspace" and b.alias_of is None]
    points = sorted({b.start for b in buffers})

    def live(at: int) -> list[PlanBuffer]:
        return [b for b in buffers if b.start <= at < b.end and not any(low <= at < high for low, high in b.gaps)]

    at = max(points, key=lambda point: sum(b.size for b in live(point)))
    found = sorted(((b.name, b.size) for b in live(at)), key=lambda item: -item[1])
    return plan.records.ops[at].name, found


# -- the options: each is planned and found to fit before it is offered ---------------------------------------------


def _planned(planner: Planner, request: Request, what: str, arguments: str, solver: str = "auto") -> Iterator[Option]:
    """The option, if its plan fits: placement may need more than the lower bound."""
    graphs = planner.plans(request, limit=False, solver=solver)
    if all(made.fits for made in graphs):
        yield Option(
            what=what, arguments=arguments, device_bytes=max(made.total_bytes for made in graphs),
            host_bytes=max(made.host_bytes for made in graphs),
            predicted_ms=sum(made.predicted_step_ms for made in (*graphs[:-1][:1], graphs[-1])),
        )  # fmt: skip


def _larger_budget(planner: Planner, request: Request, smallest: int) -> Iterator[Option]:
    """The smallest budget that works, if the device has as much, and the one that is fastest."""
    whole = planner.device.memory_bytes
    if smallest > whole:
        return
    fastest = round_up(planner.with_budgets(budget=whole).plan(request, limit=False).total_bytes, MIB)
    ways = [
        (planner.with_budgets(budget=budget), f"--budget {budget // MIB}MiB")
        for budget in dict.fromkeys((smallest, fastest))
        if budget <= whole
    ]
    yield from _worthwhile(request, "budget", ways)


def _on_host(planner: Planner, request: Request, *, also: str = "") -> Iterator[Option]:
    """Weights and hidden states in pinned host memory: the least that works, and the most that saves time."""
    least = _least_host(planner, request)
    if least is None:
        return
    fastest = planner.with_budgets(host_budget=ANY_HOST).plan(request, limit=False).host_bytes
    ways = [
        (planner.with_budgets(host_budget=host), f"{also}--host-budget {host // MIB}MiB")
        for host in dict.fromkeys((least, round_up(fastest, MIB)))
    ]
    yield from _worthwhile(request, "host-budget", ways)


def _least_host(planner: Planner, request: Request) -> int | None:
    most = 0
    for graph in request.size.graphs:
        host = smallest_host(planner.at(graph), planner.budget_bytes, ANY_HOST)
        if host is None:
            return None
        most = max(most, host)
    return round_up(most, MIB)


def _one_on_host(plan: Plan, planner: Planner, request: Request, *, also: str = "") -> Iterator[Option]:
    """The least pinned host memory with a plan's plain choices; hidden states stay on the device if that is enough.

    It is tried if the fixed part alone is too large, because planning all options of streaming would take a second.
    """
    templates = [planner.space(graph.kind).template for graph in request.size.graphs]
    shared = [choice for choice in templates[0].choices if all(choice in template.choices for template in templates)]
    plain = {choice.name: str(plan.config[choice.name]) for choice in shared if not choice.escalating}
    lowest = {choice.name: choice.options[0] for choice in [c for c in shared if c.escalating][:-1]}
    for pinned in ({**plain, **lowest}, plain):
        one = planner.with_pinned(pinned)
        least = _least_host(one, request)
        if least is not None:
            way, arguments = one.with_budgets(host_budget=least), f"{also}--host-budget {least // MIB}MiB"
            tried = (_planned(way, request, "host-budget", arguments, solver=solver) for solver in (QUICK, "auto"))
            yield from (replace(option, at_most=True) for option in islice(chain.from_iterable(tried), 1))
            return


def _worthwhile(request: Request, what: str, ways: Sequence[tuple[Planner, str]]) -> Iterator[Option]:
    """Options by increasing memory, without any that is no faster than an earlier one."""
    best = inf
    for planner, arguments in ways:
        for option in _planned(planner, request, what, arguments):
            if option.predicted_ms * (1 + TOLERANCE) < best:
                best = option.predicted_ms
                yield option


def _smallest_device(planner: Planner, request: Request) -> Planner | None:
    """A planner for the smallest built-in device, other than this one, that holds the request."""
    cards = [d for d in DEVICES.values() if d.backend == planner.device.backend and d.name != planner.device.name]
    for card in sorted(cards, key=lambda d: d.memory_bytes):
        other = planner.with_device(card)
        if other.needed(request) <= card.memory_bytes:
            return other
    return None


def _named(other: Planner, planner: Planner) -> str:
    """The device on the command line, and its given budget if that still suffices."""
    given = planner.budget_bytes != planner.device.memory_bytes
    return f"--device {other.device.name}" + (f" --budget {other.budget_bytes // MIB}MiB" if given else "")


def _fewer_rows(planner: Planner, request: Request) -> Iterator[Option]:
    """The most masked rows that fit."""
    if not request.size.has_rows or request.phase.cut is not None or request.sized is not None:
        return
    rows = _most(request.size.rows, lambda n: _fits(planner, replace(request, masked=n)))
    if rows:
        yield from _planned(planner, replace(request, masked=rows), "masked", f"--masked {rows}")


def _shorter(planner: Planner, request: Request, plan: Plan) -> Iterator[Option]:
    """The largest context that fits, of one sequence."""
    tokens = plan.max_ctx_tokens
    if tokens and len(request.seq_lens) == 1 and not request.phase.cached:
        shorter = _cut(request, (tokens,))
        yield from _planned(planner, shorter, "ctx", f"--ctx {tokens}{_rows(request, shorter)}")


def _fewer_sequences(planner: Planner, request: Request) -> Iterator[Option]:
    """The most sequences of a packed batch that fit, in their order."""
    if request.phase.cached:
        return
    lengths = request.seq_lens
    many = _most(len(lengths), lambda n: _fits(planner, _cut(request, lengths[:n])))
    if many:
        fewer = _cut(request, lengths[:many])
        arguments = f"--seq-lens {','.join(map(str, fewer.seq_lens))}{_rows(request, fewer)}"
        yield from _planned(planner, fewer, "seq-lens", arguments)


def _cut(request: Request, lengths: tuple[int, ...]) -> Request:
    """A request for fewer tokens, with at most as many masked rows."""
    tokens = sum(lengths)
    masked = None if request.masked is None else min(request.masked, tokens)
    return replace(request, seq_lens=lengths, masked=masked, logit_rows=min(request.logit_rows, tokens))


def _rows(request: Request, cut: Request) -> str:
    return "" if cut.masked == request.masked else f" --masked {cut.masked}"


def _fits(planner: Planner, request: Request) -> bool:
    return is_feasible(planner.at(request), planner.budget_bytes, planner.host_budget_bytes)


def _most(too_many: int, fitting: Callable[[int], bool]) -> int:
    """The largest number below one that does not fit that does; 0 if none does."""
    low, high = 0, too_many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    return low
