"""Regions, each op's and buffer's place in them, in-place pairs and edges: what all later checks rely on."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, pairwise

from mosaic.planner.check.columns import MAIN, Columns, Region

__all__ = ["check_ops", "check_structure"]


def check_structure(plan: Columns) -> bool:
    """Check the region tree and each op's and buffer's place in it; False if later checks could not rely on it."""
    if not _link_regions(plan):
        return False
    sound = _check_places(plan)
    for home in sorted({at for at in plan.home if at is not None}.difference(plan.regions)):
        sound = False
        owners = [b for b, name in enumerate(plan.home) if name == home]
        plan.fail("region", f"{plan.say(owners[0])} has its home in unknown region {home!r}", owners)
    for barrier in plan.barriers:
        if not 0 <= barrier.start < barrier.end <= len(plan.op_name):
            sound = False
            plan.fail("barrier-mismatch", f"barrier '{barrier.name}' covers no op: [{barrier.start}, {barrier.end})")
    return sound


def _link_regions(plan: Columns) -> bool:
    """Check each region alone and the nesting of all; fill `enclosing`."""
    before = len(plan.found)
    siblings: dict[str | None, list[Region]] = defaultdict(list)
    for region in plan.regions.values():
        _check_region(plan, region)
        siblings[region.parent].append(region)
    for family in siblings.values():
        family.sort(key=lambda r: r.start)
        for left, right in pairwise(family):
            if right.start < left.end:
                text = f"regions '{left.name}' and '{right.name}' overlap and neither is the other's parent"
                plan.fail("region", text)
    for name in plan.regions:
        names: list[str] = []
        at: str | None = name
        while at is not None and at in plan.regions and at not in names:
            names.append(at)
            at = plan.regions[at].parent
        if at is not None:
            plan.fail("region", f"region '{name}': its parents never end")
        plan.enclosing[name] = tuple(names)
    return len(plan.found) == before


def _check_region(plan: Columns, region: Region) -> None:
    where, rows, extent = f"region '{region.name}'", region.rows, region.extent
    if not 0 <= region.start < region.end <= len(plan.op_name):
        plan.fail("region", f"{where} covers no op: [{region.start}, {region.end}) of {len(plan.op_name)}")
    if rows < 1 or extent < 1 or region.num_chunks != -(-extent // rows):
        text = f"{where}: {region.num_chunks} chunks of {rows} rows do not cover {extent} exactly"
        plan.fail("region", text)
    if region.parent is None:
        return
    parent = plan.regions.get(region.parent)
    if parent is None or not parent.start <= region.start < region.end <= parent.end:
        plan.fail("region", f"{where} does not lie inside its parent {region.parent!r}")


def _check_places(plan: Columns) -> bool:
    """Check that each op claims the innermost region around it."""
    expected: list[str | None] = [None] * len(plan.op_name)
    for region in sorted(plan.regions.values(), key=lambda r: len(plan.enclosing[r.name])):
        expected[region.start : region.end] = [region.name] * (region.end - region.start)
    if list(plan.op_region) == expected:
        return True
    for i, (claimed, derived) in enumerate(zip(plan.op_region, expected, strict=True)):
        if claimed != derived:
            plan.fail("region", f"{plan.say_op(i)} claims region {claimed!r}, the intervals say {derived!r}", (), (i,))
    return False


def check_ops(plan: Columns) -> None:
    """Check in-place pairs, edges and that no op writes a constant; keep the edges that are sound."""
    for i, pairs in enumerate(plan.inplace):
        for written, read in pairs:
            if written == read or written not in plan.writes[i] or read not in plan.reads[i]:
                text = f"{plan.say_op(i)} in place: {written} is not written or {read} not read"
                plan.fail("operands", text, (written, read), (i,))
    plan.edges = [edge for edge in plan.edges if _is_edge(plan, *edge)]
    for b in sorted({*chain.from_iterable(plan.writes)}):
        if plan.kind[b] == "weight" or (plan.kind[b] == "host" and plan.tensor[b] is not None):
            plan.fail("read-only", f"{plan.say(b)} holds a tensor of the checkpoint and is written", (b,))


def _is_edge(plan: Columns, kind: str, a: int, b: int) -> bool:
    sides = (plan.stream[a] != MAIN, plan.stream[b] != MAIN)
    if kind in ("fork", "wait") and a < b and sides == ((False, True) if kind == "fork" else (True, False)):
        return True
    text = f"'{kind}' from {plan.say_op(a)} on {plan.stream[a]!r} to {plan.say_op(b)} on {plan.stream[b]!r}"
    plan.fail("edge", f"{text}: a fork goes on from main to a side stream, a wait back", (), (a, b))
    return False
