"""Check formula and search steps against what is live and the totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub
from typing import Final

from mosaic.planner.check.columns import Columns, round_up
from mosaic.planner.check.placement import live_bytes

_MAX_DIGITS: Final = 40  # of a number in a formula
_POWERS: Final = frozenset("123456789")  # of a dim in a formula


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
