"""Check totals, formula and search steps against what the buffers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mosaic.planner.check.columns import DEVICE_POOLS, HOST, Columns, round_up
from mosaic.planner.check.placement import Gaps, live_bytes

__all__ = ["check_claims"]

_MAX_DIGITS: Final = 40  # of a number in a formula
_POWERS: Final = frozenset("123456789")  # of a dim in a formula


def check_claims(plan: Columns, gaps: Gaps) -> None:
    """Check peak, lower bound, components, whether the plan fits, its formula and its trace."""
    live, slack = live_bytes(plan, gaps)
    for code, key, claimed, derived, meaning in _facts(plan, max(live)):
        if claimed != derived:
            plan.fail(code, f"{key} is {claimed}, {meaning}: {derived}")
    _check_formula(plan, live, slack)
    _check_trace(plan)


def _facts(plan: Columns, lower_bound: int) -> list[tuple[str, str, Any, Any, str]]:
    """Code, field, claim, what it should be, and what that is."""
    document = plan.document
    page, components = document["page_bytes"], document["components"]
    peak, total = plan.reach.get("workspace", 0), sum(components.values())
    budget, host_budget, host = (document[key] for key in ("budget_bytes", "host_budget_bytes", "host_bytes"))
    fits = f"whether {total} is within {budget}, and {host} of the host within {host_budget}"
    pages = {name: round_up(plan.reach.get(name, 0), page) for name in (*DEVICE_POOLS, HOST)}
    return [
        ("peak", "peak_bytes", document["peak_bytes"], peak, "the top of the workspace's buffers"),
        ("lower-bound", "lower_bound_bytes", document["lower_bound_bytes"], lower_bound, "the largest live set"),
        ("optimal", "optimal", document["optimal"], peak == lower_bound, "whether peak and lower bound are equal"),
        ("total", "total_bytes", document["total_bytes"], total, "the sum of the components"),
        ("host", "host_bytes", host, pages[HOST], "the pages in use"),
        ("fits", "fits", document["fits"], total <= budget and host <= host_budget, fits),
        *(
            ("components", f"components.{name}", components[name], pages[name], "the pages in use")
            for name in DEVICE_POOLS
        ),
    ]


# Formula.


def _check_formula(plan: Columns, live: Sequence[int], slack: Sequence[int]) -> None:
    """Check that each line of the formula is what is live at its op, and that no live set exceeds them all."""
    document = plan.document
    values = dict(document["dims"])
    values.update((f"{region.knob}_rows", region.full) for region in plan.regions.values())
    highest = 0
    for form in document["formula"]:
        value = _evaluate_sum(form["expr"], values)
        if value is None or form["at"] not in plan.op_name:
            what = "no sum of products of dims and rows" if value is None else f"at no op: {form['at']!r}"
            plan.fail("formula", f"'{form['expr']}' is {what}")
            continue
        at = plan.op_name.index(form["at"])
        highest = max(highest, value)
        if not live[at] - slack[at] <= value <= live[at]:
            text = f"'{form['expr']}' is {value}, at {plan.say_op(at)} {live[at] - slack[at]} to {live[at]} bytes live"
            plan.fail("formula", text, (), (at,))
    if max(live) > highest + max(slack):
        plan.fail("formula", f"its maximum is {highest}, the largest live set {max(live)}")


def _evaluate_sum(text: str, values: Mapping[str, int]) -> int | None:
    """Evaluate `3*a + 5*b*c**2 + 7`; None if it is written otherwise or names anything else."""
    total = 0
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


def _check_trace(plan: Columns) -> None:
    """Check the search steps against the plan where they speak of it: the same choices have the same fixed bytes."""
    document = plan.document
    config, page = document["config"], document["page_bytes"]
    fixed = document["total_bytes"] - document["components"]["workspace"]
    for k, step in enumerate(document["trace"]):
        other = step["config"]
        if other.keys() != config.keys():
            knobs = ", ".join(other.keys() ^ config.keys())
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
