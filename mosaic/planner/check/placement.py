"""Check sizes, slices, alignment, pools and their totals, and that buffers that live at the same time share no address.

Addresses are swept upwards with one bit set of op indices per buffer, where packers sweep time with sets of addresses:
O(n log n) in buffers, times N / 64 words for the bit sets of N ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import add, mod, mul
from typing import Any, Final

from mosaic.planner.check.columns import (
    EXTERNAL,
    HOST,
    ITEM_BYTES,
    KNOWN_POOLS,
    Columns,
    Cut,
    Ids,
    Marks,
    Skeleton,
    is_known_pool,
    owner_of,
    round_up,
)

UNIT_BYTES: Final = 512  # every root of a placed pool starts and ends on it


# What no dim changes.


def check_pools(plan: Skeleton) -> None:
    """Check alignments and kinds of pools; fill `item_bytes`, `slot_units`, `located` and `roots`."""
    plan.item_bytes = list(map(mul, map(ITEM_BYTES.__getitem__, plan.dtype), plan.rotate))
    plan.slot_units = list(map(mul, plan.alignment, plan.rotate))
    for unit in sorted({*plan.alignment}):
        if unit & (unit - 1):
            plan.fail("alignment", f"alignment {unit} is not a power of two")
    for pool in dict.fromkeys(plan.pool):
        ids = [b for b, at in enumerate(plan.pool) if at == pool]
        plan.located[pool] = ids
        plan.roots[pool] = [b for b in ids if plan.alias_of[b] is None]
    for pool, ids in plan.roots.items():
        for b in ids:
            if not _may_live_in(plan.kind[b], plan.name[b], pool):
                plan.fail("pool", f"{plan.say(b)}: kind '{plan.kind[b]}' does not belong in pool '{pool}'", (b,))
            if plan.alignment[b] < UNIT_BYTES and pool != EXTERNAL:
                text = f"{plan.say(b)}: alignment {plan.alignment[b]}, in pool '{pool}' at least {UNIT_BYTES}"
                plan.fail("alignment", text, (b,))


def _may_live_in(kind: str, name: str, pool: str) -> bool:
    """Whether a pool suits a buffer: other plans share the workspace, so what outlives a step may not be in it."""
    if (owner := owner_of(pool)) is not None:
        return owner == (kind, name)
    if kind in ("weight", "state"):
        return pool in (HOST, EXTERNAL) or (kind, pool) == ("weight", "weights")
    return pool != "weights" and (pool == kind or kind not in ("host", "external"))


def name_slices(plan: Skeleton) -> None:
    """Check that slices are of operands and loops around their ops, each axis once; fill `cuts` and `odd_cuts`."""
    for i, slices in enumerate(plan.slices):
        if not slices:
            continue
        operands, around = plan.operands[i], plan.around(i)
        for operand, axis, name, factor in slices:
            if name in around and operand in operands:
                b = operands[operand]
                plan.cuts.append(Cut(i, b, axis, name, factor, plan.is_within(plan.home[b], name)))
                continue
            what = "no such operand" if name in around else "no region around it"
            plan.fail("slice", f"{plan.say_op(i)} slices {operand}[{axis}] by '{name}': {what}", (), (i,))
            plan.odd_cuts.add(i)
        if len({(operand, axis) for operand, axis, _, _ in slices}) < len(slices):
            plan.fail("slice", f"{plan.say_op(i)} slices one axis of an operand twice", (), (i,))


def mark_live(plan: Skeleton) -> None:
    """Fill `live`: the ops at which each root of a pool whose values come and go is live."""
    marks: dict[int, int] = {}
    for b in (*plan.roots.get("workspace", ()), *plan.roots.get(HOST, ())):
        mask = (1 << plan.end[b]) - (1 << plan.start[b])
        for start, end in plan.holes.get(b, ()):
            mask ^= (1 << end) - (1 << start)
        marks[b] = mask
    plan.live = marks


# The numbers of one plan.


def check_sizes(plan: Columns) -> None:
    """Check each size against shape and dtype, and a root's against its aliases; fill `raw_bytes`."""
    plan.raw_bytes = list(map(mul, map(prod, plan.shape), plan.item_bytes))
    own = [-(-raw // unit) * unit for raw, unit in zip(plan.raw_bytes, plan.slot_units, strict=True)]
    odd = set() if own == list(plan.size) else {b for b, size in enumerate(own) if size != plan.size[b]}
    for b in sorted(odd.union(plan.members)):
        raw, size = plan.raw_bytes[b], plan.size[b]
        covered = max((plan.alias_offset[m] + plan.size[m] for m in plan.members.get(b, ())), default=0)
        expected = max(own[b], round_up(covered, plan.alignment[b]))
        if size == expected or (size == max(raw, covered) and plan.pool[b] == EXTERNAL):
            continue
        shape = f"{plan.dtype[b]}{list(plan.shape[b])} needs {raw} bytes in {plan.rotate[b]} slots"
        aliases = f", aliases reach {covered}" if covered else ""
        plan.fail("size", f"{plan.say(b)}: size {size}, expected {expected}: {shape}{aliases}", (b,))


def check_slices(plan: Columns) -> None:
    """Check that each sliced axis has the length that the loop's chunks cover; fill `uncut`."""
    inside = {name: loop.full for name, loop in plan.loops.items()}
    outside = {name: loop.extent for name, loop in plan.loops.items()}
    shapes = plan.shape
    for cut in plan.cuts:
        _, b, axis, name, factor, within = cut
        shape = shapes[b]
        if axis >= len(shape) or shape[axis] != factor * (inside if within else outside)[name]:
            _report_slice(plan, cut)


def _report_slice(plan: Columns, cut: Cut) -> None:
    plan.uncut.add(cut.op)
    shape, loop = plan.shape[cut.b], plan.loops[cut.region]
    length = str(shape[cut.axis]) if cut.axis < len(shape) else "no axis"
    sliced = f"{plan.say_op(cut.op)} slices {plan.say(cut.b)} axis {cut.axis} of {length} by '{cut.region}'"
    span = loop.full if cut.inside else loop.extent
    plan.fail("slice", f"{sliced}: {cut.factor} x {span} expected", (cut.b,), (cut.op,))


def check_placement(plan: Columns) -> None:
    """Check alignment and pool bounds; fill `top` and `reach`."""
    if any(map(mod, plan.offset, plan.alignment)):
        for b, (offset, unit, pool) in enumerate(zip(plan.offset, plan.alignment, plan.pool, strict=True)):
            if offset % unit and pool != EXTERNAL:
                plan.fail("alignment", f"{plan.say(b)}: offset {offset} is not a multiple of {unit}", (b,))
    plan.top = list(map(add, plan.offset, plan.size))
    plan.reach = {pool: max(map(plan.top.__getitem__, ids)) for pool, ids in plan.located.items()}
    for pool, ids in plan.roots.items():
        for b in ids:
            if owner_of(pool) is not None and plan.offset[b]:
                plan.fail("pool-bounds", f"{plan.say(b)} starts at {plan.offset[b]} of its own pool, not at 0", (b,))
    page = plan.header["page_bytes"]
    for pool, capacity in plan.pools.items():
        if pool != EXTERNAL and is_known_pool(pool) and capacity % page:
            plan.fail("pool-bounds", f"pool '{pool}': capacity {capacity} is not a multiple of the page, {page}")
    for pool, reach in plan.reach.items():
        limit = plan.pools.get(pool)
        if limit is None and pool != EXTERNAL:
            plan.fail("pool-bounds", f"pool '{pool}' is used but not listed", plan.roots[pool])
        elif limit is not None and reach > limit:
            for b in plan.located[pool]:
                if plan.top[b] > limit:
                    plan.fail(
                        "pool-bounds", f"{plan.say(b)} ends at {plan.top[b]}, pool '{pool}' has {limit} bytes", (b,)
                    )


# Addresses.


def check_addresses(plan: Columns) -> Mapping[str, Ids]:
    """Check that no two roots that are live at the same time share an address.

    Returns
    -------
    mapping
        Roots by pool, for those pools in which none do and values come and go.
    """
    roots = plan.roots if 0 not in plan.size else {p: [b for b in ids if plan.size[b]] for p, ids in plan.roots.items()}
    _check_constants(plan, roots.get("weights", ()))
    sound: dict[str, Ids] = {}
    for pool in ("workspace", HOST):
        ids = roots.get(pool, ())
        if sweep(plan, ids, plan.live, plan.live, "overlap", "live at the same time"):
            sound[pool] = ids
    return sound


def _check_constants(plan: Columns, ids: Ids) -> None:
    """Check that buffers that live always share no address."""
    reach = 0
    for b in sorted(ids, key=plan.offset.__getitem__):
        if plan.offset[b] < reach:
            always = dict.fromkeys(ids, 1)
            _report_clashes(plan, ids, always, always, "overlap", "both live always")
            return
        reach = plan.top[b]


def sweep(plan: Columns, ids: Ids, mark: Marks, clash: Marks, code: str, reason: str) -> bool:
    """Sweep addresses upwards with the union of the marks of the buffers there; False if a buffer clashes with it.

    The marks of buffers that share an address are disjoint up to the first clash, so leaving is an exclusive or.
    """
    offset, top = plan.offset, plan.top
    leaving = sorted(ids, key=top.__getitem__)
    here, k = 0, 0
    for b in sorted(ids, key=offset.__getitem__):
        at = offset[b]
        while top[leaving[k]] <= at:
            here ^= mark[leaving[k]]
            k += 1
        if here & clash[b]:
            _report_clashes(plan, ids, mark, clash, code, reason)
            return False
        here ^= mark[b]
    return True


def _report_clashes(plan: Columns, ids: Ids, mark: Marks, clash: Marks, code: str, reason: str) -> None:
    """Name every pair that shares addresses and clashes. Quadratic; only for plans that are already refused."""
    offset, top = plan.offset, plan.top
    for k, b in enumerate(ids):
        for c in ids[:k]:
            if mark[c] & clash[b] and offset[c] < top[b] and offset[b] < top[c]:
                text = (
                    f"{plan.say(c)} at [{offset[c]}, {top[c]}) and {plan.say(b)} at [{offset[b]}, {top[b]}): {reason}"
                )
                common = (mark[c] & clash[b]).bit_length() - 1
                plan.fail(code, text, (c, b), (common,) if common < len(plan.op_name) else ())


def live_bytes(plan: Columns, sizes: Sequence[int]) -> list[int]:
    """Sum some bytes of each buffer, by id, over the live workspace roots at each op."""
    change = [0] * (len(plan.op_name) + 1)
    for b in plan.roots.get("workspace", ()):
        size = sizes[b]
        change[plan.start[b]] += size
        change[plan.end[b]] -= size
        for start, end in plan.holes.get(b, ()):
            change[start] -= size
            change[end] += size
    return list(accumulate(change))


# Totals.


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
    """What the pool of each state and carry takes, in whole pages."""
    page = plan.header["page_bytes"]
    return {name: round_up(reach, page) for name, reach in plan.reach.items() if owner_of(name)}
