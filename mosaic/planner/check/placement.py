"""Check sizes, alignment, pools and that buffers that live at the same time share no address.

Addresses are swept upwards with one bit set of op indices per buffer, where packers sweep time with sets of addresses:
O(n log n) in buffers, times N / 64 words for the bit sets of N ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import add, mod, mul
from typing import Final

from mosaic.planner.check.columns import HOST, ITEM_BYTES, PLACED, Columns, Ids, round_up

__all__ = ["Gaps", "check_addresses", "check_placement", "check_sizes", "live_bytes", "sweep"]

UNIT_BYTES: Final = 512  # every root of a placed pool starts and ends on it

Gaps = Mapping[int, Sequence[Sequence[int]]]  # root -> intervals in which it holds no value, in order
Marks = Mapping[int, int]  # buffer -> bit set of op indices


def check_sizes(plan: Columns) -> None:
    """Check each size against shape and dtype, and a root's against its aliases."""
    item_bytes = map(ITEM_BYTES.__getitem__, plan.dtype)
    plan.raw_bytes = list(map(mul, map(mul, map(prod, plan.shape), item_bytes), plan.rotate))
    rounded = [-(-raw // unit) * unit for raw, unit in zip(plan.raw_bytes, plan.alignment, strict=True)]
    odd = set() if rounded == list(plan.size) else {b for b, size in enumerate(rounded) if size != plan.size[b]}
    for b in sorted(odd.union(plan.members)):
        raw, size, unit = plan.raw_bytes[b], plan.size[b], plan.alignment[b]
        slots = plan.rotate[b]
        own = slots * round_up(raw // slots, unit)
        covered = max((plan.alias_offset[m] + plan.size[m] for m in plan.members.get(b, ())), default=0)
        expected = round_up(max(own, covered), unit)
        if size == expected or (size == max(raw, covered) and plan.pool[b] not in PLACED):
            continue
        shape = f"{plan.dtype[b]}{list(plan.shape[b])} needs {raw} bytes"
        aliases = f", aliases reach {covered}" if covered else ""
        plan.fail("size", f"{plan.say(b)}: size {size}, expected {expected}: {shape} in {slots} slots{aliases}", (b,))


def check_placement(plan: Columns) -> None:
    """Check alignment, kinds of pools and pool bounds; fill `top`, `reach` and `roots`."""
    if any(map(mod, plan.offset, plan.alignment)):
        for b, (offset, unit, pool) in enumerate(zip(plan.offset, plan.alignment, plan.pool, strict=True)):
            if offset % unit and pool != "external":
                plan.fail("alignment", f"{plan.say(b)}: offset {offset} is not a multiple of {unit}", (b,))
    for unit in sorted({*plan.alignment}):
        if unit & (unit - 1):
            plan.fail("alignment", f"alignment {unit} is not a power of two")
    if min(plan.alignment, default=UNIT_BYTES) < UNIT_BYTES:
        for b, (unit, pool, root) in enumerate(zip(plan.alignment, plan.pool, plan.alias_of, strict=True)):
            if unit < UNIT_BYTES and pool in PLACED and root is None:
                text = f"{plan.say(b)}: alignment {unit}, in pool '{pool}' at least {UNIT_BYTES}"
                plan.fail("alignment", text, (b,))
    for odd in sorted({*zip(plan.kind, plan.pool, strict=True)}):
        if not _may_live_in(*odd):
            for b, at in enumerate(zip(plan.kind, plan.pool, strict=True)):
                if at == odd and plan.alias_of[b] is None:
                    plan.fail("pool", f"{plan.say(b)}: kind '{odd[0]}' does not belong in pool '{odd[1]}'", (b,))
    plan.top = list(map(add, plan.offset, plan.size))
    for pool in dict.fromkeys(plan.pool):
        ids = [b for b, at in enumerate(plan.pool) if at == pool]
        plan.reach[pool] = max(map(plan.top.__getitem__, ids))
        plan.roots[pool] = [b for b in ids if plan.alias_of[b] is None]
    _check_bounds(plan)


def _check_bounds(plan: Columns) -> None:
    page = plan.document["page_bytes"]
    for pool, capacity in plan.pools.items():
        if pool in PLACED and capacity % page:
            plan.fail("pool-bounds", f"pool '{pool}': capacity {capacity} is not a multiple of the page, {page}")
    for pool, reach in plan.reach.items():
        limit = plan.pools.get(pool)
        if limit is None and pool in PLACED:
            plan.fail("pool-bounds", f"pool '{pool}' is used but not listed", plan.roots[pool])
        elif limit is not None and reach > limit:
            for b, top in enumerate(plan.top):
                if plan.pool[b] == pool and top > limit:
                    plan.fail("pool-bounds", f"{plan.say(b)} ends at {top}, pool '{pool}' has {limit} bytes", (b,))


def _may_live_in(kind: str, pool: str) -> bool:
    """Whether a pool suits a kind: other plans share the workspace, so what outlives a step may not be in it."""
    if kind == "weight":
        return pool not in ("workspace", "state")
    if kind == "state":
        return pool not in ("workspace", "weights")
    return pool != "weights" and (pool == kind or kind not in ("host", "external"))


# Addresses.


def check_addresses(plan: Columns, gaps: Gaps) -> Mapping[str, Ids]:
    """Check that no two roots that are live at the same time share an address.

    Returns
    -------
    mapping
        Roots by pool, for those pools in which none do and values come and go.
    """
    roots = plan.roots if 0 not in plan.size else {p: [b for b in ids if plan.size[b]] for p, ids in plan.roots.items()}
    for pool in ("weights", "state"):
        _check_constants(plan, roots.get(pool, ()))
    live: dict[int, int] = {}
    sound: dict[str, Ids] = {}
    for pool in ("workspace", HOST):
        ids = roots.get(pool, ())
        for b in ids:
            mask = (1 << plan.end[b]) - (1 << plan.start[b])
            for start, end in gaps.get(b, ()):
                mask ^= (1 << end) - (1 << start)
            live[b] = mask
        if sweep(plan, ids, live, live, "overlap", "live at the same time"):
            sound[pool] = ids
    return sound


def _check_constants(plan: Columns, ids: Ids) -> None:
    """Check that buffers that live always share no address."""
    ids = sorted(ids, key=plan.offset.__getitem__)
    reach = 0
    for b in ids:
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


def live_bytes(plan: Columns, gaps: Gaps) -> tuple[list[int], list[int]]:
    """Bytes of the live workspace roots at each op, and by how many of them a formula of unrounded sizes may be lower.

    A formula gives an alias group the size of any one of its members.
    """
    change, loose = [0] * (len(plan.op_name) + 1), [0] * (len(plan.op_name) + 1)
    for b in plan.roots["workspace"]:
        size, first, last = plan.size[b], plan.start[b], plan.end[b]
        change[first] += size
        change[last] -= size
        spare = size - (min(map(plan.raw_bytes.__getitem__, plan.group(b))) if b in plan.members else plan.raw_bytes[b])
        if spare:
            loose[first] += spare
            loose[last] -= spare
        for start, end in gaps.get(b, ()):
            change[start] -= size
            change[end] += size
            loose[start] -= spare
            loose[end] += spare
    return list(accumulate(change)), list(accumulate(loose))
