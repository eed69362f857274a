"""Check that ops of two streams, in no order, touch no common value or address; in one iteration and across them.

A loop with side ops: where it begins, each of its side streams waits for main's position; where it ends, main waits for
them. Inside, a fork or wait orders ops of the same iteration. Before iteration i touches anything, each stream waits
until iteration i - r has ended on all streams, r the least number of slots of the loop's own buffers that its side ops
touch. So iterations less than r apart may overlap, each stream in program order, and there a buffer is safe if its slots
rotate, or if each iteration touches rows of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from mosaic.planner.check.columns import MAIN, Columns, Ids, Region, Skeleton
from mosaic.planner.check.placement import sweep


def order_streams(plan: Skeleton) -> None:
    """Fill what no dim changes: `beside`, `rivals`, `touched` and `clash`."""
    before = _ops_before(plan)
    unordered = _unordered_ops(before)
    plan.beside = list(_beside(plan, before))
    touched, clash = [0] * len(plan.name), [0] * len(plan.name)
    for i, others in enumerate(unordered):
        for b in (*plan.reads[i], *plan.writes[i]):
            touched[b] |= 1 << i
            clash[b] |= others
    plan.rivals = list(_rivals(plan, unordered, touched))
    for marks in (touched, clash):
        for root, aliases in plan.members.items():
            for b in aliases:
                marks[root] |= marks[b]
    plan.touched, plan.clash = dict(enumerate(touched)), dict(enumerate(clash))


def check_streams(plan: Columns, roots: Mapping[str, Ids]) -> None:
    """Check all side ops; `roots` are, by pool, those of which no two live at the same time at one address."""
    _check_iterations(plan)
    _check_order(plan, roots)


def _ops_before(plan: Skeleton) -> list[int]:
    """For each op, the bit set of the ops that have ended when it starts, all of one iteration of the loops around.

    By program order on a stream, by edges, and by the borders of loops with side ops. An edge out of a loop goes on from
    its last iteration, one into it is waited for in the first.
    """
    waits_for: dict[int, list[int]] = defaultdict(list)
    for _, a, b in plan.edges:
        waits_for[b].append(a)
    opening, closing = _borders(plan)
    before: list[int] = []
    done: dict[str, int] = defaultdict(int)  # stream -> what has ended at its position
    for i, stream in enumerate(plan.stream):
        for side in closing.get(i, ()):
            done[MAIN] |= done[side]
        for side in opening.get(i, ()):
            done[side] |= done[MAIN]
        now = done[stream]
        for a in waits_for.get(i, ()):
            now |= before[a] | 1 << a
        before.append(now)
        done[stream] = now | 1 << i
    return before


def _borders(plan: Skeleton) -> tuple[Mapping[int, Sequence[str]], Mapping[int, Sequence[str]]]:
    """By op index, the side streams that fork from main at a loop's start, and those that join it at a loop's end."""
    opening: dict[int, list[str]] = defaultdict(list)
    closing: dict[int, list[str]] = defaultdict(list)
    for name, stream in dict.fromkeys(zip(plan.op_region, plan.stream, strict=True)):
        if name is not None and stream != MAIN:
            opening[plan.regions[name].start].append(stream)
            closing[plan.regions[name].end].append(stream)
    return opening, closing


# Iterations of one loop.


def _beside(plan: Skeleton, before: Sequence[int]) -> Iterator[tuple[int, str, int]]:
    """Yield side ops beside which other iterations of their loop run, if it runs more than once, with all they touch."""
    main = sum(1 << i for i, stream in enumerate(plan.stream) if stream == MAIN)
    for i, stream in enumerate(plan.stream):
        name = plan.op_region[i]
        if stream != MAIN and name is not None and not _is_within_main(plan.regions[name], i, before, main):
            for b in sorted({*plan.reads[i], *plan.writes[i]}):
                yield i, name, b


def _check_iterations(plan: Columns) -> None:
    """Check that what a side op of a loop touches is safe from other iterations."""
    written: dict[str, set[int]] = {}
    for i, name, b in plan.beside:
        if plan.loops[name].num_chunks == 1:
            continue
        loop = plan.regions[name]
        if name not in written:
            written[name] = {*chain.from_iterable(plan.writes[loop.start : loop.end])}
        reason = _iterations_clash(plan, loop, b, written[name])
        if reason:
            text = f"{plan.say_op(i)} runs beside other iterations of loop '{name}': {plan.say(b)} {reason}"
            plan.fail("stream-race", text, (b,), (i,))


def _is_within_main(loop: Region, i: int, before: Sequence[int], main: int) -> bool:
    """Whether ops of the same iteration fork and join a side op, so that it follows main through the iterations."""
    inside = main & (1 << loop.end) - (1 << loop.start)
    if not before[i] & inside:
        return False
    return bool(before[inside.bit_length() - 1] & 1 << i)


def _iterations_clash(plan: Columns, loop: Region, b: int, written: set[int]) -> str:
    """Say why two iterations of a loop that overlap would clash in a buffer; empty if they do not."""
    if plan.home[b] == loop.name:
        if len(plan.group_of(b)) > 1:
            return "shares its storage with aliases"
        return "" if plan.rotate[b] > 1 else "has one slot"
    if plan.pool[b] == "workspace":
        return f"has its home outside, in {plan.home[b]!r}"
    shared = {m for m in plan.group_of(b) if plan.share_bytes(b, m)}
    if written.isdisjoint(shared):
        return ""
    if shared != {b}:
        return "shares its storage with aliases"
    return "" if _is_cut(plan, loop, b) else "is written in the loop, and not all its ops see the same rows of it"


def _is_cut(plan: Skeleton, loop: Region, b: int) -> bool:
    """Whether each iteration touches rows of its own: all ops of a loop slice a buffer on one axis, by one factor."""
    cuts: set[tuple[int, int] | None] = set()
    for i in range(loop.start, loop.end):
        if b in plan.reads[i] or b in plan.writes[i]:
            for operand, at in plan.operands[i].items():
                if at == b:
                    found = [cut for cut in plan.slices[i] if cut[0] == operand and cut[2] == loop.name]
                    cuts.add((found[0][1], found[0][3]) if found else None)
    return len(cuts) == 1 and None not in cuts


# Ops of one iteration, or outside of loops.


def _rivals(plan: Skeleton, unordered: Sequence[int], touched: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield each op that writes a buffer while another may touch one of its group: op, buffer, the other's, the other."""
    for i, others in enumerate(unordered):
        for b in plan.writes[i] if others else ():
            for m in plan.group_of(b):
                racing = touched[m] & others
                if racing:
                    yield i, b, m, racing.bit_length() - 1


def _check_order(plan: Columns, roots: Mapping[str, Ids]) -> None:
    """Check that unordered ops share no value that one of them writes, and touch no buffers at common addresses."""
    for i, b, m, other in plan.rivals:
        if plan.share_bytes(b, m):
            text = f"{plan.say_op(i)} writes {plan.say(b)}, {plan.say_op(other)} touches {plan.say(m)}"
            plan.fail("stream-race", f"{text}, in no order", sorted({b, m}), sorted((i, other)))
    for ids in roots.values():
        sweep(plan, ids, plan.touched, plan.clash, "stream-race", "ops of two streams touch them in no order")


def _unordered_ops(before: Sequence[int]) -> list[int]:
    """For each op, the bit set of the ops unordered with it: neither is known to end before the other starts."""
    unordered = [0] * len(before)
    for i, done in enumerate(before):
        missing = done ^ ((1 << i) - 1)  # earlier in program order, unordered with i
        unordered[i] |= missing
        while missing:
            a = missing & -missing
            unordered[a.bit_length() - 1] |= 1 << i
            missing ^= a
    return unordered
