"""Check totals against the buffers, and formula and search steps against live bytes and totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub
from typing import Any, Final

from mosaic.planner.check.columns import EXTERNAL, HOST, KNOWN_POOLS, Columns, is_known_pool, owner_of, round_up
from mosaic.planner.check.placement import live_bytes

_MAX_DIGITS: Final = 40  # of a number in a formula
_POWERS: Final = frozenset("123456789")  # of a dim in a formula


def check_totals(plan: Columns) -> None:
    """Check peak, lower bound, components, capacities, and whether the plan fits."""
    lower_bound = max(live_bytes(plan, plan.size))
    for code, key, claimed, derived, meaning in _facts(plan, lower_bound):
        if claimed != derived:
            plan.fail(code, f"{key} is {claimed}, {meaning}: {derived}")
    _check_capacities(plan)


def _check_capacities(plan: Columns) -> None:
    """Check that pools are known, as large as the totals say, and on the device that the backend has them on."""
    header = plan.header
    stated = {name: header["components"][name] for name in ("workspace", "weights")} | {HOST: header["host_bytes"]}
    for name, size in stated.items():
        if plan.pools.get(name, 0) != size:
            plan.fail("pool", f"pool '{name}' has {plan.pools.get(name)} bytes, the totals say {size}")
    states = _state_pages(plan)
    for name in sorted({*states, *filter(owner_of, plan.pools)}):
        if plan.pools.get(name, 0) != states.get(name, 0):
            text = f"pool '{name}' has {plan.pools.get(name)} bytes, its buffer takes {states.get(name, 0)} in pages"
            plan.fail("pool", text)
    for pool in header["pools"]:
        name, device = pool["name"], pool["device"]
        on_cpu = name == HOST or header["backend"] == "cpu"
        if not is_known_pool(name):
            plan.fail("pool", f"unknown pool {name!r}; known: {KNOWN_POOLS}")
        elif name != EXTERNAL and device != ("cpu" if on_cpu else "cuda:0"):
            plan.fail("pool", f"pool '{name}' is on {device!r}, the backend is {header['backend']!r}")


def _facts(plan: Columns, lower_bound: int) -> list[tuple[str, str, Any, Any, str]]:
    """Code, field, claim, what it should be, and what that is."""
    document = plan.header
    page, components = document["page_bytes"], document["components"]
    peak, total = plan.reach.get("workspace", 0), sum(components.values())
    budget, host_budget, host = (document[key] for key in ("budget_bytes", "host_budget_bytes", "host_bytes"))
    fits = f"whether {total} is within {budget}, and {host} of the host within {host_budget}"
    pages = {name: round_up(plan.reach.get(name, 0), page) for name in ("workspace", "weights", HOST)}
    pages["state"] = sum(_state_pages(plan).values())
    return [
        ("peak", "peak_bytes", document["peak_bytes"], peak, "the top of the workspace's buffers"),
        ("lower-bound", "lower_bound_bytes", document["lower_bound_bytes"], lower_bound, "the largest live set"),
        ("optimal", "optimal", document["optimal"], peak == lower_bound, "whether peak and lower bound are equal"),
        ("total", "total_bytes", document["total_bytes"], total, "the sum of the components"),
        ("host", "host_bytes", host, pages[HOST], "the pages in use"),
        ("fits", "fits", document["fits"], total <= budget and host <= host_budget, fits),
        *(
            ("components", f"components.{name}", components[name], pages[name], "the pages in use")
            for name in ("workspace", "weights", "state")
        ),
    ]


def _state_pages(plan: Columns) -> dict[str, int]:
    """Bytes of the pool of each state and carry, in whole pages."""
    page = plan.header["page_bytes"]
    return {name: round_up(reach, page) for name, reach in plan.reach.items() if owner_of(name)}


# Formula.


def check_formula(plan: Columns) -> None:
    """Check that each line of the formula is what is live at its op, and that no live set exceeds them all."""
    header, op_names = plan.header, plan.op_name
    live, slack = live_bytes(plan, plan.size), live_bytes(plan, _spare_bytes(plan))
    values = dict(header["dims"])
    values.update((f"{region.knob}_rows", plan.loops[name].full) for name, region in plan.regions.items())
    highest = 0
    for form in header["formula"]:
        value = _evaluate_sum(form["expr"], values)
        if value is None or form["at"] not in op_names:
            what = "no sum of products of dims and rows" if value is None else f"at no op: {form['at']!r}"
            plan.fail("formula", f"'{form['expr']}' is {what}")
            continue
        at = op_names.index(form["at"])
        highest = max(highest, value)
        if not live[at] - slack[at] <= value <= live[at]:
            text = f"'{form['expr']}' is {value}, at {plan.say_op(at)} {live[at] - slack[at]} to {live[at]} bytes live"
            plan.fail("formula", text, (), (at,))
    if max(live) > highest + max(slack):
        plan.fail("formula", f"its maximum is {highest}, the largest live set {max(live)}")


def _spare_bytes(plan: Columns) -> Sequence[int]:
    """By how many bytes a formula of unrounded sizes may be lower, which gives a group the size of any one member."""
    spare = list(map(sub, plan.size, plan.raw_bytes))
    for root in plan.members:
        spare[root] = plan.size[root] - min(map(plan.raw_bytes.__getitem__, plan.group(root)))
    return spare


def _evaluate_sum(text: str, values: Mapping[str, int]) -> int | None:
    """Evaluate `3*a + 5*b*c**2 + 7`; None if it is written otherwise or names anything else."""
    total = 0
    if "^" in text:
        return None
    for term in text.split(" + "):
        number, *factors = term.replace("**", "^").split("*")
        digits = number.removeprefix("-")
        if not (digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS):
            return None
        product = int(number)
        for factor in factors:
            name, caret, power = factor.partition("^")
            if name not in values or (caret and power not in _POWERS):
                return None
            product *= values[name] ** int(power or 1)
        total += product
    return total


# Trace.


def check_trace(plan: Columns) -> None:
    """Check the search steps against the plan where they speak of it: the same choices have the same fixed bytes."""
    document = plan.header
    config, page = document["config"], document["page_bytes"]
    fixed = document["total_bytes"] - document["components"]["workspace"]
    for k, step in enumerate(document["trace"]):
        other = step["config"]
        if other.keys() != config.keys():
            knobs = ", ".join(sorted(other.keys() ^ config.keys()))
            plan.fail("config", f"trace[{k}] and the plan have different knobs: {knobs}")
            continue
        if any(type(value) is str and other[key] != value for key, value in config.items()):
            continue
        if step["bottleneck"] not in plan.op_name:
            plan.fail("trace", f"trace[{k}]: no op is named {step['bottleneck']!r}")
        total = fixed + round_up(step["peak_bytes"], page)
        if step["total_bytes"] != total:
            text = f"trace[{k}].total_bytes is {step['total_bytes']}, fixed bytes and its peak give {total}"
            plan.fail("trace", text)
        if other == config:
            repeated = (step["peak_bytes"], step["predicted_ms"])
            expected = (document["lower_bound_bytes"], document["predicted_step_ms"])
            if repeated != expected:
                plan.fail("trace", f"trace[{k}] has the plan's configuration and {repeated}, the plan {expected}")
