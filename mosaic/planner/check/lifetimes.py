"""Derive each buffer's lifetime from accesses, regions, barriers and streams, and compare it with the claim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

from mosaic.planner.check.columns import FROM_START, MAIN, TO_END, Skeleton, owner_of


def derive_lifetimes(plan: Skeleton) -> None:
    """Fill the derived lifetimes, windows and alias groups; report claims that differ."""
    _stretch_regions(plan, _derive_base(plan))
    for barrier in plan.barriers:
        if barrier.region is None:
            if barrier.outputs or barrier.carried:
                text = f"barrier '{barrier.name}' is explicit and lists outputs or carried buffers"
                plan.fail("barrier-mismatch", text)
            for b in barrier.inputs:
                _hold(plan, b, barrier.start, barrier.end)
    if plan.has_side_streams:
        _stretch_streams(plan)
    for b, root in enumerate(plan.alias_of):
        if root is not None:
            plan.own.setdefault(root, (plan.start[root], plan.end[root]))
            plan.members[root].append(b)
            _stretch(plan, root, plan.start[b], plan.end[b])
    if plan.start != list(plan.claimed_start) or plan.end != list(plan.claimed_end):
        _report_lifetimes(plan)


def _derive_base(plan: Skeleton) -> list[int]:
    """Fill `start` and `end` from accesses and kinds; return the buffers that are read before they are written."""
    num_ops, kind = len(plan.op_name), plan.kind
    first = [-1] * len(kind)
    last = first.copy()
    read_first: list[int] = []
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        for b in reads:
            if first[b] < 0:
                first[b] = i
                read_first.append(b)
            last[b] = i
        for b in writes:
            if first[b] < 0:
                first[b] = i
            last[b] = i
    plan.start = [0 if k in FROM_START else i for k, i in zip(kind, first, strict=True)]
    plan.end = [num_ops if k in TO_END else i + 1 for k, i in zip(kind, last, strict=True)]
    written = set(chain.from_iterable(plan.writes))
    for b in read_first:
        if kind[b] == "carry":
            plan.start[b] = 0
        elif kind[b] == "host" and b not in written:
            plan.start[b], plan.end[b] = 0, num_ops
        elif kind[b] not in FROM_START and not (plan.home[b] is not None and b in written and plan.rotate[b] == 1):
            text = f"{plan.say(b)} is read by {plan.say_op(first[b])} before any write"
            plan.fail("read-before-write", text, (b,), (first[b],))
    for b in written:
        if kind[b] == "carry":
            plan.end[b] = num_ops
    _settle_untouched(plan, [b for b, at in enumerate(first) if at < 0])
    for b, home in enumerate(plan.home if plan.regions else ()):
        if home is None or first[b] < 0:
            continue
        if first[b] < plan.regions[home].start or last[b] >= plan.regions[home].end:
            plan.fail("region", f"{plan.say(b)} is touched outside its home region '{home}'", (b,), (first[b], last[b]))
    return read_first


def _settle_untouched(plan: Skeleton, untouched: Sequence[int]) -> None:
    """Set the lifetimes of buffers that no op touches."""
    roots = {*plan.alias_of}
    for b in untouched:
        kind = plan.kind[b]
        if kind in FROM_START and kind in TO_END:
            continue
        if kind == "input":
            plan.end[b] = 1
        elif kind == "host" and plan.tensor[b] is not None:  # a weight that this phase does not use
            plan.start[b], plan.end[b] = 0, len(plan.op_name)
        elif b in roots:  # storage only: its aliases give it a lifetime
            plan.start[b], plan.end[b] = len(plan.op_name), 0
        else:
            plan.start[b] = plan.end[b] = 0
            plan.fail("unused", f"{plan.say(b)} is touched by no op", (b,))


def _stretch(plan: Skeleton, b: int, start: int, end: int) -> None:
    """Stretch a buffer's lifetime over an interval."""
    plan.start[b] = min(plan.start[b], start)
    plan.end[b] = max(plan.end[b], end)


def _hold(plan: Skeleton, b: int, start: int, end: int) -> None:
    """Stretch a buffer's lifetime over an interval in which it may have no gap either."""
    _stretch(plan, b, start, end)
    plan.windows[b].append((start, end))


# Regions.


def _stretch_regions(plan: Skeleton, read_first: Sequence[int]) -> None:
    """Stretch lifetimes over loops and compare what crosses each loop's border with its barrier."""
    inside: dict[str, set[int]] = {name: set() for name in plan.regions}  # region -> buffers at home in it or deeper
    carried: dict[str, set[int]] = {name: set() for name in plan.regions}
    for b, home in enumerate(plan.home):
        if home is not None:
            for name in plan.enclosing[home]:
                inside[name].add(b)
    for b in read_first:
        at = plan.home[b]
        for name in plan.enclosing[at] if at is not None else ():
            carried[name].add(b)
            _stretch(plan, b, plan.regions[name].start, plan.regions[name].end)
    expected = {}
    weights = {b for b, kind in enumerate(plan.kind) if kind == "weight"}  # they live always and are not listed
    unlisted = {b for b, pool in enumerate(plan.pool) if pool != "workspace" and owner_of(pool) is None}
    for name, region in plan.regions.items():
        first, last = region.start, region.end
        outputs = set(chain.from_iterable(plan.writes[first:last])) - inside[name]
        inputs = set(chain.from_iterable(plan.reads[first:last])) - weights - outputs - inside[name]
        for b in inputs:
            _stretch(plan, b, last, last)
        for b in outputs:
            _stretch(plan, b, first, last)
        crossing = {"inputs": inputs, "outputs": outputs, "carried": carried[name]}
        expected[name] = {which: held - unlisted for which, held in crossing.items()}
    _check_barriers(plan, expected)


def _check_barriers(plan: Skeleton, expected: Mapping[str, Mapping[str, set[int]]]) -> None:
    """Check that each region has one barrier and that it lists what the region holds."""
    seen: set[str] = set()
    for barrier in plan.barriers:
        label, name, first, last = barrier[:4]
        if name is None:
            continue
        if name not in expected or name in seen:
            plan.fail("barrier-mismatch", f"barrier '{label}' is of no region or a second one: '{name}'")
            continue
        seen.add(name)
        region = plan.regions[name]
        if first != region.start or last != region.end:
            text = f"barrier '{label}' covers [{first}, {last}), its region [{region.start}, {region.end})"
            plan.fail("barrier-mismatch", text)
        for which, derived in expected[name].items():
            claimed = getattr(barrier, which)
            if sorted(claimed) != sorted(derived):
                text = f"barrier '{label}' lists {which} {sorted(claimed)}, the ops say {sorted(derived)}"
                plan.fail("barrier-mismatch", text, sorted({*claimed} ^ derived))
    for name, held in expected.items():
        if name not in seen:
            plan.fail("barrier-missing", f"region '{name}' has no barrier", sorted(set().union(*held.values())))


# Streams.


def _stretch_streams(plan: Skeleton) -> None:
    """Hold what side ops touch: over the loop around them, else from their fork to their join."""
    forked: dict[int, list[int]] = defaultdict(list)
    joined: dict[int, list[int]] = defaultdict(list)
    for kind, a, b in plan.edges:
        if kind == "fork":
            forked[b].append(a + 1)
        else:
            joined[a].append(b)
    lanes: dict[str, list[int]] = defaultdict(list)
    for i, stream in enumerate(plan.stream):
        if stream != MAIN:
            lanes[stream].append(i)
    for lane in lanes.values():
        starts = accumulate((max(forked[i], default=0) for i in lane), max)
        ends = accumulate((min(joined[i], default=len(plan.op_name)) for i in reversed(lane)), min)
        for i, start, end in zip(lane, starts, reversed([*ends]), strict=True):
            _hold_side_op(plan, i, start, end)


def _hold_side_op(plan: Skeleton, i: int, start: int, end: int) -> None:
    name = plan.op_region[i]
    if name is not None:  # its streams are forked where the loop begins and joined where it ends
        start, end = plan.regions[name].start, plan.regions[name].end
    touched = {*plan.reads[i], *plan.writes[i]}
    for b in touched:
        _hold(plan, b, start, end)
    if name is None and end == len(plan.op_name):
        loose = sorted(b for b in touched if plan.pool[b] == "workspace")
        if loose:
            text = f"{plan.say_op(i)} is never joined and touches the workspace: {', '.join(map(plan.say, loose))}"
            plan.fail("stream-race", text, loose, (i,))


def _report_lifetimes(plan: Skeleton) -> None:
    rows = zip(plan.claimed_start, plan.claimed_end, plan.start, plan.end, strict=True)
    for b, (start, end, first, last) in enumerate(rows):
        text = f"{plan.say(b)} claims [{start}, {end}), the ops, regions, barriers and streams give [{first}, {last})"
        if start > first or end < last:
            plan.fail("lifetime-short", text, (b,))
        if start < first or end > last:
            plan.fail("lifetime-long", text, (b,))
