"""Check that no op reads a value that an alias has overwritten, and that gaps in lifetimes hold no value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mosaic.planner.check.columns import FROM_START, ITEM_BYTES, TO_END, Columns, Ids
from mosaic.planner.check.placement import Gaps

__all__ = ["check_aliases", "checked_gaps"]

_Slicing = tuple[Any, ...]  # where a loop's iterations cut a buffer; equal ones cut the same bytes
_Passes = Mapping[str, int]  # loop -> which of the two replayed iterations
_Held = tuple[_Slicing | None, set[tuple[int, ...]]]  # what of a value other members overwrote: how cut, which cuts


def check_aliases(plan: Columns) -> None:
    """Check where aliases lie and that no op reads a value that another member has overwritten."""
    if any(plan.alias_offset):
        for b, at in enumerate(plan.alias_offset):
            if at and plan.alias_of[b] is None:
                plan.fail("alias", f"{plan.say(b)} is no alias but has alias_offset {at}", (b,))
    for root, b in sorted((root, b) for root, aliases in plan.members.items() for b in aliases):
        _check_alias(plan, root, b)
    for root in plan.members:
        group = plan.group(root)
        if any(plan.rotate[b] > 1 for b in group):
            names = ", ".join(map(plan.say, group))
            plan.fail("alias", f"slots that rotate have no fixed address to share: {names}", group)
        if not _is_plainly_legal(plan, group):
            _Walk(plan, group).report()


def _check_alias(plan: Columns, root: int, b: int) -> None:
    """Check that an alias lies inside its root."""
    if root == b or plan.alias_of[root] is not None:
        plan.fail("alias", f"{plan.say(b)} is an alias of {plan.say(root)}, which is not a root", (b, root))
        return
    at, size = plan.alias_offset[b], plan.size[root]
    if plan.pool[b] != plan.pool[root]:
        text = f"{plan.say(b)} in pool '{plan.pool[b]}' is an alias in pool '{plan.pool[root]}'"
        plan.fail("alias", text, (b, root))
    if plan.offset[b] != plan.offset[root] + at:
        text = f"{plan.say(b)} is at {plan.offset[b]}, its root {plan.say(root)} at {plan.offset[root]} + {at}"
        plan.fail("alias", text, (b, root))
    if at < 0 or at + plan.size[b] > size:
        text = f"{plan.say(b)}: [{at}, {at + plan.size[b]}) is not inside the {size} bytes of {plan.say(root)}"
        plan.fail("alias", text, (b, root))


def _is_plainly_legal(plan: Columns, group: Sequence[int]) -> bool:
    """Whether members that share bytes never hold values at the same time, but for plain in-place ops."""
    own = {b: plan.own.get(b, (plan.start[b], plan.end[b])) for b in group}
    ordered = sorted(group, key=lambda b: own[b])
    for k, later in enumerate(ordered):
        t = own[later][0]
        for earlier in ordered[:k]:
            end = own[earlier][1]
            if (
                end > t
                and plan.share_bytes(earlier, later)
                and not (end == t + 1 and _is_plain_inplace(plan, t, earlier, later))
            ):
                return False
    return True


def _is_plain_inplace(plan: Columns, t: int, old: int, new: int) -> bool:
    """Whether op t reads `old` last and writes `new` over it, in one and the same loop body, as it says it may."""
    return (
        plan.op_region[t] == plan.home[old] == plan.home[new]
        and old in plan.reads[t]
        and old not in plan.writes[t]
        and new not in plan.reads[t]
        and _may_overwrite(plan, t, old, new)
    )


def _may_overwrite(plan: Columns, t: int, old: int, new: int) -> bool:
    return (
        any(written == new and read == old for written, read in plan.inplace[t])
        and plan.alias_offset[old] == plan.alias_offset[new]
        and plan.raw_bytes[old] == plan.raw_bytes[new]
    )


class _Walk:
    """Follow an alias group's values through the program, each loop body twice, and collect stale reads.

    Parameters
    ----------
    plan
        The plan.
    group
        A root and its aliases.
    """

    def __init__(self, plan: Columns, group: Sequence[int]) -> None:
        self._plan, self._group = plan, group
        self._held: dict[int, _Held] = {
            b: (None, set()) for b in group if plan.kind[b] in FROM_START or plan.kind[b] in ("carry", "host")
        }
        self._lost: dict[int, int] = {}  # member -> op that overwrote it
        self._stale: dict[tuple[int, int], str] = {}

    def report(self) -> None:
        """Walk, and report what was found."""
        plan = self._plan
        events = sorted({i for ops in _accesses(plan, self._group).values() for i in ops})
        for i, passes in _replay(plan, events, 0, {}):
            self._read(i, passes)
            self._write(i, passes)
        for b, i in self._lost.items():
            if (plan.kind[b] in TO_END or plan.kind[b] == "carry") and plan.end[b] == len(plan.op_name):
                text = f"{plan.say_op(i)} overwrites {plan.say(b)}, which the step hands on"
                self._stale.setdefault((i, b), text)
        for (i, b), text in self._stale.items():
            plan.fail("alias-stale-read", text, (b,), (i,))

    def _read(self, i: int, passes: _Passes) -> None:
        plan = self._plan
        for b in self._group:
            if b in plan.reads[i] and b in self._lost and not self._still_holds(i, b, passes):
                text = f"{plan.say_op(i)} reads {plan.say(b)}, overwritten by {plan.say_op(self._lost[b])}"
                self._stale.setdefault((i, b), text)

    def _still_holds(self, i: int, b: int, passes: _Passes) -> bool:
        """Whether the slice that op i reads is one that no other member has overwritten yet."""
        slicing, held = _slicing(self._plan, i, b), self._held.get(b)
        return (
            held is not None
            and slicing is not None
            and slicing == held[0]
            and _iteration(slicing, passes) not in held[1]
        )

    def _write(self, i: int, passes: _Passes) -> None:
        plan = self._plan
        for new in self._group:
            if new not in plan.writes[i]:
                continue
            slicing = _slicing(plan, i, new)
            for old in self._group:
                if old != new and plan.share_bytes(old, new):
                    self._check_overwrite(i, old, new, slicing)
                    self._lose(i, old, slicing, passes)
            if new not in plan.reads[i]:
                self._held[new] = (None, set())
                self._lost.pop(new, None)

    def _check_overwrite(self, i: int, old: int, new: int, slicing: _Slicing | None) -> None:
        """Check that op i may write `new` over `old`: not over its own operand, nor over what is held."""
        plan = self._plan
        reads = old in plan.reads[i]
        in_place = _may_overwrite(plan, i, old, new) and slicing == _slicing(plan, i, old)
        if old in plan.writes[i] or (reads and not in_place):
            text = f"{plan.say_op(i)} writes {plan.say(new)} over its own operand {plan.say(old)}"
            self._stale.setdefault((i, old), text)
        last = i + 1 if reads and in_place else i  # an overwritten operand may be held up to this op
        if old in self._held and any(start <= i and end > last for start, end in plan.windows[old]):
            text = f"{plan.say_op(i)} overwrites {plan.say(old)}, which a barrier or stream holds"
            self._stale.setdefault((i, old), text)

    def _lose(self, i: int, old: int, slicing: _Slicing | None, passes: _Passes) -> None:
        if old not in self._held:
            return
        self._lost[old] = i
        before, cut = self._held[old]
        if slicing is None or (before is not None and before != slicing):
            del self._held[old]
        else:
            self._held[old] = (slicing, {*cut, _iteration(slicing, passes)})


def _accesses(plan: Columns, ids: Collection[int]) -> dict[int, list[int]]:
    """Each buffer's ops, in order."""
    wanted = frozenset(ids)
    accesses: dict[int, list[int]] = {b: [] for b in ids}
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        if not (wanted.isdisjoint(reads) and wanted.isdisjoint(writes)):
            for b in wanted.intersection((*reads, *writes)):
                accesses[b].append(i)
    return accesses


def _replay(plan: Columns, events: Sequence[int], depth: int, passes: _Passes) -> Iterator[tuple[int, _Passes]]:
    """Yield ops in execution order, the bodies of loops twice, with the iteration of each loop around."""
    k = 0
    while k < len(events):
        around = plan.around(events[k])[::-1]
        if len(around) <= depth:
            yield events[k], passes
            k += 1
            continue
        loop = plan.regions[around[depth]]
        body = [i for i in events[k:] if i < loop.end]
        for iteration in range(min(loop.num_chunks, 2)):
            yield from _replay(plan, body, depth + 1, {**passes, loop.name: iteration})
        k += len(body)


def _slicing(plan: Columns, i: int, b: int) -> _Slicing | None:
    """How loops outside which a buffer lives cut it at op i; None if op i sees the same bytes in each iteration."""
    names = {operand for operand, at in plan.operands[i].items() if at == b}
    cuts = [(axis, name, factor) for operand, axis, name, factor in plan.slices[i] if operand in names]
    cuts = [cut for cut in cuts if not plan.is_within(plan.home[b], cut[1])]
    if not cuts or len(names) != 1:
        return None
    return (plan.alias_offset[b], tuple(plan.shape[b]), ITEM_BYTES[plan.dtype[b]], *sorted(cuts))


def _iteration(slicing: _Slicing | None, passes: _Passes) -> tuple[int, ...]:
    return () if slicing is None else tuple(passes[name] for _, name, _ in slicing[3:])


# Gaps.


def checked_gaps(plan: Columns) -> Gaps:
    """Check that each gap holds no value; return those of roots that hold none, in order."""
    owners = [b for b, gaps in enumerate(plan.gaps) if gaps]
    if not owners:
        return {}
    touched = _accesses(plan, {m for b in owners for m in plan.group(b)})
    sound: dict[int, list[Sequence[int]]] = {}
    for b in owners:
        last = plan.start[b]
        for start, end in plan.gaps[b]:
            if not last <= start < end <= plan.end[b]:
                text = f"{plan.say(b)}: gap [{start}, {end}) is empty, out of order or outside its lifetime"
                plan.fail("gap", text, (b,))
                continue
            last = end
            reasons = [r for m in plan.group(b) for r in _values_in_gap(plan, m, touched[m], start, end)]
            if plan.pool[b] != "workspace":
                reasons.append(f"pool '{plan.pool[b]}' holds its values always")
            if not reasons and plan.alias_of[b] is None:
                sound.setdefault(b, []).append((start, end))
            for reason in reasons:
                plan.fail("gap", f"{plan.say(b)} claims no value in [{start}, {end}), but {reason}", (b,))
    return sound


def _values_in_gap(plan: Columns, b: int, touched: Ids, start: int, end: int) -> Iterator[str]:
    """Say why a buffer holds a value somewhere in [start, end)."""
    for i in touched:
        if start <= i < end:
            yield f"{plan.say_op(i)} touches {plan.say(b)}"
    for held_start, held_end in plan.windows.get(b, ()):
        if held_start < end and start < held_end:
            yield f"a barrier or a side stream holds {plan.say(b)} over [{held_start}, {held_end})"
    following = next((i for i in touched if i >= end), len(plan.op_name))
    firsts = [following] if following < len(plan.op_name) else []
    handed_on = plan.kind[b] in TO_END or (plan.kind[b] == "carry" and plan.end[b] == len(plan.op_name))
    if not firsts and handed_on:
        yield f"{plan.say(b)} is handed on at the end of the step"
    for region in plan.regions.values():  # the way round: from the gap, or from after it, back to the loop's start
        if region.start < start < region.end and following >= region.end:
            firsts += [i for i in touched if region.start <= i < start][:1]
    for i in firsts:
        if not _overwrites_whole(plan, i, b):
            yield f"{plan.say_op(i)} does not overwrite the whole of {plan.say(b)} after it"


def _overwrites_whole(plan: Columns, i: int, b: int) -> bool:
    return b in plan.writes[i] and b not in plan.reads[i] and _slicing(plan, i, b) is None
