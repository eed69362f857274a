"""The safety part of the proof: in a plan that passes, no two live values share an address.

The skeleton, which no dim changes, is checked first; then the numbers of one plan. A planner reuses its `Records`
with other numbers: the skeleton is derived once for each and kept, from the records and by this room's own rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, pairwise
from typing import Any, Final
from weakref import WeakKeyDictionary

from mosaic.planner.check.columns import MAIN, Columns, Ids, Region, Skeleton, Violation
from mosaic.planner.check.lifetimes import derive_lifetimes
from mosaic.planner.check.operators import OPERATORS
from mosaic.planner.check.placement import (
    check_addresses,
    check_placement,
    check_pools,
    check_sizes,
    check_slices,
    check_totals,
    mark_live,
    name_slices,
)
from mosaic.planner.check.reading import Numbers, Records, read_columns, read_header, read_skeleton
from mosaic.planner.check.streams import check_streams, order_streams
from mosaic.planner.check.values import check_aliases, check_fills, check_roots, checked_gaps, derive_fills

_derived: Final[WeakKeyDictionary[Records, Skeleton]] = WeakKeyDictionary()
"""Skeletons by records; the violations of a skeleton are reported with each of its plans."""


def prove_safe(records: Records, header: Mapping[str, Any], numbers: Numbers) -> list[Violation]:
    """List what is unsafe in a plan, from the records and numbers that its document is written from.

    Parameters
    ----------
    records
        What dims do not change. Handed over again, the same object, it is not derived again.
    header
        All fields of the document but its lists; formula and trace may be missing.
    numbers
        What dims change, by columns.

    Returns
    -------
    list of Violation
        What `check_safety` finds in the document.
    """
    found: list[Violation] = []
    if read_header(header, found):
        proved_columns(records, header, numbers, found)
    return found


def proved_columns(
    records: Records, header: Mapping[str, Any], numbers: Numbers, found: list[Violation]
) -> Columns | None:
    """Read a plan whose header is sound and prove it safe; None if nothing further can be said of it."""
    skeleton = _skeleton_of(records, found)
    plan = None if skeleton is None else read_columns(skeleton, header, numbers, found)
    if plan is None:
        return None
    sound = check_loops(plan)
    if sound:
        check_numbers(plan)
    found.extend(plan.found)
    return plan if sound else None


def _skeleton_of(records: Records, found: list[Violation]) -> Skeleton | None:
    skeleton = _derived.get(records)
    if skeleton is None:
        own: list[Violation] = []
        skeleton = read_skeleton(records, own)
        if skeleton is None or not derive(skeleton):
            found.extend(own)
            return None
        _derived[records] = skeleton
    return skeleton


def derive(plan: Skeleton) -> bool:
    """Derive and check all that no dim changes; False if nothing could be derived."""
    if not check_structure(plan):
        return False
    check_ops(plan)
    name_slices(plan)
    derive_lifetimes(plan)
    derive_fills(plan)
    check_pools(plan)
    check_roots(plan)
    plan.holes = checked_gaps(plan)
    mark_live(plan)
    if plan.has_side_streams:
        order_streams(plan)
    return True


def check_numbers(plan: Columns) -> None:
    """Check the numbers of one plan against its skeleton."""
    check_sizes(plan)
    check_slices(plan)
    check_placement(plan)
    check_fills(plan)
    check_aliases(plan)
    roots = check_addresses(plan)
    if plan.has_side_streams:
        check_streams(plan, roots)
    check_totals(plan)


# Regions, each op's and buffer's place in them, in-place pairs, operands and edges: what all other checks rely on.


def check_structure(plan: Skeleton) -> bool:
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


def _link_regions(plan: Skeleton) -> bool:
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


def _check_region(plan: Skeleton, region: Region) -> None:
    where = f"region '{region.name}'"
    if not 0 <= region.start < region.end <= len(plan.op_name):
        plan.fail("region", f"{where} covers no op: [{region.start}, {region.end}) of {len(plan.op_name)}")
    if region.parent is None:
        return
    parent = plan.regions.get(region.parent)
    if parent is None or not parent.start <= region.start < region.end <= parent.end:
        plan.fail("region", f"{where} does not lie inside its parent {region.parent!r}")


def check_loops(plan: Columns) -> bool:
    """Check that each region's chunks cover its extent; False if later checks could not rely on it."""
    sound = True
    for name, (extent, rows, num_chunks) in plan.loops.items():
        if rows < 1 or extent < 1 or num_chunks != -(-extent // rows):
            text = f"region '{name}': {num_chunks} chunks of {rows} rows do not cover {extent} exactly"
            plan.fail("region", text)
            sound = False
    return sound


def _check_places(plan: Skeleton) -> bool:
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


# Ops.


def check_ops(plan: Skeleton) -> None:
    """Check operands, in-place pairs, edges and that no op writes a constant; keep the edges that are sound."""
    for i in range(len(plan.op_name)):
        _check_operands(plan, i)
        for written, read in plan.inplace[i]:
            _check_inplace(plan, i, written, read)
    plan.edges = [edge for edge in plan.edges if _is_edge(plan, *edge)]
    for b in sorted({*chain.from_iterable(plan.writes)}):
        if plan.kind[b] == "weight" or (plan.kind[b] == "host" and plan.tensor[b] is not None):
            plan.fail("read-only", f"{plan.say(b)} holds a tensor of the checkpoint and is written", (b,))


def _check_operands(plan: Skeleton, i: int) -> None:
    """Check that an op reads and writes its operands: each side has the operator's operands, if it is known."""
    operands, known = plan.operands[i], OPERATORS.get(plan.kernel[i])
    reads, writes = plan.reads[i], plan.writes[i]
    if known is None or not known.names.issuperset(operands):
        _check_side(plan, i, "touches", [*reads, *writes], [*operands.values()])
        return
    _check_side(plan, i, "reads", reads, [operands[name] for name in known.reads if name in operands])
    _check_side(plan, i, "writes", writes, [operands[name] for name in known.fills if name in operands])


def _check_side(plan: Skeleton, i: int, side: str, touched: Ids, named: Ids) -> None:
    if touched != named and {*touched} != {*named}:
        text = f"{plan.say_op(i)} {side} {sorted(touched)}, its operands are {sorted(named)}"
        plan.fail("operands", text, sorted({*touched} ^ {*named}), (i,))


def _check_inplace(plan: Skeleton, i: int, written: int, read: int) -> None:
    """Check that an in-place pair is of a write and a read, and one that the operator allows, where it is known."""
    if written == read or written not in plan.writes[i] or read not in plan.reads[i]:
        text = f"{plan.say_op(i)} in place: {written} is not written or {read} not read"
        plan.fail("operands", text, (written, read), (i,))
        return
    known, operands = OPERATORS.get(plan.kernel[i]), plan.operands[i]
    if known is not None and not any(operands.get(a) == written and operands.get(b) == read for a, b in known.inplace):
        text = f"{plan.say_op(i)}: {plan.kernel[i]} does not write {plan.say(written)} over {plan.say(read)} in place"
        plan.fail("operands", text, (written, read), (i,))


def _is_edge(plan: Skeleton, kind: str, a: int, b: int) -> bool:
    sides = (plan.stream[a] != MAIN, plan.stream[b] != MAIN)
    if kind in ("fork", "wait") and a < b and sides == ((False, True) if kind == "fork" else (True, False)):
        return True
    text = f"'{kind}' from {plan.say_op(a)} on {plan.stream[a]!r} to {plan.say_op(b)} on {plan.stream[b]!r}"
    plan.fail("edge", f"{text}: a fork goes on from main to a side stream, a wait back", (), (a, b))
    return False
