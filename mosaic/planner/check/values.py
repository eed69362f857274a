"""Check that no op reads slices that are not written yet, or a value that an alias has overwritten, and that gaps in
lifetimes hold no value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, Final, NamedTuple

from mosaic.planner.check.columns import FROM_START, TO_END, Columns, Gaps, Ids, Skeleton

_Passes = Mapping[str, int]  # loop -> which of the two replayed iterations
_Cut = tuple[int, str, int]  # axis, loop, factor
_Piece = frozenset[tuple[_Cut, int]]  # of a value, by the iterations of the loops that cut it

_WHOLE: Final[_Piece] = frozenset()


def derive_fills(plan: Skeleton) -> None:
    """Note each read inside a loop that sees more of a buffer than the slices that the loop's iterations have written."""
    held = {b for b, kind in enumerate(plan.kind) if kind in FROM_START or kind == "carry"}
    written: dict[int, list[Sequence[_Cut]]] = {}
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        around = frozenset(plan.around(i))
        for b in reads:
            if b not in written:
                held.add(b)  # carried through a loop, a constant, or reported as read before it is written
            if b in held or not around:
                continue
            views = _cuts_by_operand(plan, i, b) or [[]]
            open_loops = [
                [around.intersection(cut[1] for cut in cuts if cut not in seen) for cuts in written[b]]
                for seen in views
            ]
            plan.fills += [(i, b, loops) for loops in open_loops if all(loops)]
        for b in writes:
            if b not in reads:
                written.setdefault(b, []).append(_cuts(plan, i, b))


def check_fills(plan: Columns) -> None:
    """Check that loops around a read that have written slices alone so far run only once: then the slice is the whole."""
    early = {
        (i, b): f"{plan.say_op(i)} reads slices of {plan.say(b)} that no iteration has written yet"
        for i, b, open_loops in plan.fills
        if all(any(plan.loops[name].num_chunks > 1 for name in loops) for loops in open_loops)
    }
    for (i, b), text in early.items():  # once, though the buffer may be several operands
        plan.fail("read-before-write", text, (b,), (i,))


def check_roots(plan: Skeleton) -> None:
    """Check that each alias is of a root in its own pool, and that no slots rotate in what is shared."""
    for root, b in sorted((root, b) for root, aliases in plan.members.items() for b in aliases):
        if root == b or plan.alias_of[root] is not None:
            plan.fail("alias", f"{plan.say(b)} is an alias of {plan.say(root)}, which is not a root", (b, root))
        if plan.pool[b] != plan.pool[root]:
            text = f"{plan.say(b)} in pool '{plan.pool[b]}' is an alias in pool '{plan.pool[root]}'"
            plan.fail("alias", text, (b, root))
    for root in plan.members:
        group = plan.group(root)
        if any(plan.rotate[b] > 1 for b in group):
            names = ", ".join(map(plan.say, group))
            plan.fail("alias", f"slots that rotate have no fixed address to share: {names}", group)


def check_aliases(plan: Columns) -> None:
    """Check where aliases lie and that no op reads a value that another member has overwritten."""
    if any(plan.alias_offset):
        for b, at in enumerate(plan.alias_offset):
            if at and plan.alias_of[b] is None:
                plan.fail("alias", f"{plan.say(b)} is no alias but has alias_offset {at}", (b,))
    repeats = frozenset(name for name, loop in plan.loops.items() if loop.num_chunks > 1)
    for root, aliases in plan.members.items():
        for b in aliases:
            _check_alias(plan, root, b)
        lie = _Lie.of(plan, plan.group(root), repeats)
        if lie in plan.legal[root]:
            continue
        before = len(plan.found)
        if not _is_plainly_legal(plan, lie):
            _Walk(plan, lie).report(plan)
        if len(plan.found) == before:
            plan.legal[root].add(lie)


def _check_alias(plan: Columns, root: int, b: int) -> None:
    """Check that an alias lies inside its root."""
    at, size = plan.alias_offset[b], plan.size[root]
    if plan.offset[b] != plan.offset[root] + at:
        text = f"{plan.say(b)} is at {plan.offset[b]}, its root {plan.say(root)} at {plan.offset[root]} + {at}"
        plan.fail("alias", text, (b, root))
    if at + plan.size[b] > size:
        text = f"{plan.say(b)}: [{at}, {at + plan.size[b]}) is not inside the {size} bytes of {plan.say(root)}"
        plan.fail("alias", text, (b, root))


class _Lie(NamedTuple):
    """The relative layout of an alias group's members: the only numbers of a plan that its values depend on.

    So a valid group is valid in every plan of its skeleton with the same layout.
    """

    group: tuple[int, ...]
    shared: frozenset[tuple[int, int]]  # pairs, either way round, that overlap in bytes
    alike: frozenset[tuple[int, int]]  # those of them that begin at one address and have as many bytes
    views: tuple[int, ...]  # per member the first one of its offset, dtype and shape: equal cuts are the same bytes
    repeats: frozenset[str]  # loops that run more than once

    @classmethod
    def of(cls, plan: Columns, group: Sequence[int], repeats: frozenset[str]) -> _Lie:
        """Compare the members pair by pair."""
        shared = [pair for pair in combinations(group, 2) if plan.share_bytes(*pair)]
        shared += [(b, a) for a, b in shared]
        at, raw = plan.alias_offset, plan.raw_bytes
        views: dict[Any, int] = {}
        return cls(
            group=tuple(group),
            shared=frozenset(shared),
            alike=frozenset((a, b) for a, b in shared if at[a] == at[b] and raw[a] == raw[b]),
            views=tuple(views.setdefault((at[b], plan.dtype[b], *plan.shape[b]), b) for b in group),
            repeats=repeats,
        )


def _own_life(plan: Skeleton, b: int) -> tuple[int, int]:
    """The lifetime of a buffer's own value: of a root without its aliases'."""
    return plan.own.get(b, (plan.start[b], plan.end[b]))


def _is_handed_on(plan: Skeleton, b: int) -> bool:
    """Whether a buffer's value is there after the last op."""
    return plan.kind[b] in TO_END or (plan.kind[b] == "carry" and _own_life(plan, b)[1] == len(plan.op_name))


def _is_plainly_legal(plan: Skeleton, lie: _Lie) -> bool:
    """Whether members that share bytes never hold values at the same time, but for plain in-place ops."""
    own = {b: _own_life(plan, b) for b in lie.group}
    return all(
        own[new] < own[old]  # the other way round is a pair, too
        or own[old][1] <= own[new][0]
        or (own[old][1] == own[new][0] + 1 and _is_plain_inplace(plan, lie, own[new][0], old, new))
        for old, new in lie.shared
    )


def _is_plain_inplace(plan: Skeleton, lie: _Lie, t: int, old: int, new: int) -> bool:
    """Whether op t reads `old` last and writes `new` over it, in one and the same loop body, as it says it may.

    The last op of a step is no last reader of what the step hands on.
    """
    return (
        not _is_handed_on(plan, old)
        and plan.op_region[t] == plan.home[old] == plan.home[new]
        and old in plan.reads[t]
        and old not in plan.writes[t]
        and new not in plan.reads[t]
        and _may_overwrite(plan, lie, t, old, new)
    )


def _may_overwrite(plan: Skeleton, lie: _Lie, t: int, old: int, new: int) -> bool:
    return any(written == new and read == old for written, read in plan.inplace[t]) and (old, new) in lie.alike


class _Walk:
    """Follow an alias group's values through the program, each loop body twice, and collect stale reads."""

    def __init__(self, plan: Skeleton, lie: _Lie) -> None:
        self._plan, self._lie, self._group = plan, lie, lie.group
        self._view = dict(zip(lie.group, lie.views, strict=True))
        self._held = {b for b in lie.group if plan.kind[b] in FROM_START or plan.kind[b] in ("carry", "host")}
        self._lost: dict[int, set[_Piece]] = {b: set() for b in lie.group}
        self._culprit: dict[int, int] = {}  # member -> op that overwrote it last
        self._stale: dict[tuple[int, int], str] = {}

    def report(self, to: Columns) -> None:
        """Walk, and report what was found."""
        plan = self._plan
        events = sorted({i for ops in _accesses(plan, self._group).values() for i in ops})
        for i, passes in _replay(plan, self._lie.repeats, events, 0, {}):
            self._read(i, passes)
            self._write(i, passes)
        for b in self._group:
            if self._lost[b] and _is_handed_on(plan, b):
                i = self._culprit[b]
                text = f"{plan.say_op(i)} overwrites {plan.say(b)}, which the step hands on"
                self._stale.setdefault((i, b), text)
        for (i, b), text in self._stale.items():
            to.fail("alias-stale-read", text, (b,), (i,))

    def _read(self, i: int, passes: _Passes) -> None:
        plan = self._plan
        for b in self._group:
            if b in plan.reads[i] and not all(_are_apart(self._piece(i, b, passes), lost) for lost in self._lost[b]):
                text = f"{plan.say_op(i)} reads {plan.say(b)}, overwritten by {plan.say_op(self._culprit[b])}"
                self._stale.setdefault((i, b), text)

    def _write(self, i: int, passes: _Passes) -> None:
        plan = self._plan
        for new in self._group:
            if new not in plan.writes[i]:
                continue
            piece = self._piece(i, new, passes)
            for old in self._group:
                if (old, new) in self._lie.shared:
                    self._check_overwrite(i, old, new)
                    if old in self._held:
                        self._lost[old].add(piece if self._view[old] == self._view[new] else _WHOLE)
                        self._culprit[old] = i
            if new not in plan.reads[i]:
                self._held.add(new)
                self._lost[new] = {rest for lost in self._lost[new] for rest in self._without(lost, piece)}

    def _check_overwrite(self, i: int, old: int, new: int) -> None:
        """Check that op i may write `new` over `old`: not over its own operand, nor over what is held."""
        plan = self._plan
        reads = old in plan.reads[i]
        cuts = _cuts(plan, i, new)
        same = cuts == _cuts(plan, i, old) and (not cuts or self._view[old] == self._view[new])
        in_place = same and _may_overwrite(plan, self._lie, i, old, new)
        if old in plan.writes[i] or (reads and not in_place):
            text = f"{plan.say_op(i)} writes {plan.say(new)} over its own operand {plan.say(old)}"
            self._stale.setdefault((i, old), text)
        last = i + 1 if in_place else i  # an overwritten operand may be held up to this op
        holds = old in self._held and _WHOLE not in self._lost[old]
        if holds and any(start <= i and end > last for start, end in plan.windows[old]):
            text = f"{plan.say_op(i)} overwrites {plan.say(old)}, which a barrier or stream holds"
            self._stale.setdefault((i, old), text)

    def _piece(self, i: int, b: int, passes: _Passes) -> _Piece:
        """The part of a member that op i sees in these iterations of the loops around, if the member lives outside."""
        return frozenset((cut, passes[cut[1]]) for cut in _cuts(self._plan, i, b))

    def _without(self, lost: _Piece, written: _Piece) -> Iterator[_Piece]:
        """Yield the parts of a lost piece that stay lost when another piece is written."""
        if _are_apart(lost, written):
            yield lost
            return
        finer = sorted({cut for cut, _ in written} - {cut for cut, _ in lost})
        for passes in product(*(range(2 if cut[1] in self._lie.repeats else 1) for cut in finer)):
            part = lost.union(zip(finer, passes, strict=True))
            if not written <= part:
                yield part


def _are_apart(a: _Piece, b: _Piece) -> bool:
    """Whether two pieces of a value have no bytes in common: one loop cuts both alike, in different iterations."""
    return any(cut == other and k != n for cut, k in a for other, n in b)


def _accesses(plan: Skeleton, ids: Collection[int]) -> dict[int, list[int]]:
    """Each buffer's ops, in order."""
    wanted = frozenset(ids)
    accesses: dict[int, list[int]] = {b: [] for b in ids}
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        if not (wanted.isdisjoint(reads) and wanted.isdisjoint(writes)):
            for b in wanted.intersection((*reads, *writes)):
                accesses[b].append(i)
    return accesses


def _replay(
    plan: Skeleton, repeats: Collection[str], events: Sequence[int], depth: int, passes: _Passes
) -> Iterator[tuple[int, _Passes]]:
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
        for iteration in range(2 if loop.name in repeats else 1):
            yield from _replay(plan, repeats, body, depth + 1, {**passes, loop.name: iteration})
        k += len(body)


def _cuts(plan: Skeleton, i: int, b: int) -> Sequence[_Cut]:
    """Axis, loop and factor of each slice of a buffer at op i, by loops outside which it lives; none if it is several
    operands of the op."""
    found = _cuts_by_operand(plan, i, b)
    return found[0] if len(found) == 1 else []


def _cuts_by_operand(plan: Skeleton, i: int, b: int) -> list[list[_Cut]]:
    around = {name for name in plan.around(i) if not plan.is_within(plan.home[b], name)}
    return [
        sorted(
            (axis, name, factor) for operand, axis, name, factor in plan.slices[i] if operand == key and name in around
        )
        for key, at in plan.operands[i].items()
        if at == b
    ]


# Gaps.


def checked_gaps(plan: Skeleton) -> Gaps:
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


def _values_in_gap(plan: Skeleton, b: int, touched: Ids, start: int, end: int) -> Iterator[str]:
    """Say why a buffer holds a value somewhere in [start, end)."""
    for i in touched:
        if start <= i < end:
            yield f"{plan.say_op(i)} touches {plan.say(b)}"
    for held_start, held_end in plan.windows.get(b, ()):
        if held_start < end and start < held_end:
            yield f"a barrier or a side stream holds {plan.say(b)} over [{held_start}, {held_end})"
    following = next((i for i in touched if i >= end), len(plan.op_name))
    firsts = [following] if following < len(plan.op_name) else []
    if not firsts and _is_handed_on(plan, b):
        yield f"{plan.say(b)} is handed on at the end of the step"
    for region in plan.regions.values():  # the way round: from the gap, or from after it, back to the loop's start
        if start < region.end <= following:
            firsts += [i for i in touched if region.start <= i < start][:1]
    for i in firsts:
        overwritten = b in plan.writes[i] and b not in plan.reads[i] and not _cuts(plan, i, b)
        if not overwritten and not _begins(plan, i, b, touched, end):
            yield f"{plan.say_op(i)} does not overwrite the whole of {plan.say(b)} after it"


def _begins(plan: Skeleton, i: int, b: int, touched: Ids, end: int) -> bool:
    """Whether op i is the first of all that touch a buffer, in loops that begin after a gap: then there is no value to
    lose, and loops may fill the buffer slice by slice."""
    holds_before = plan.kind[b] in FROM_START or plan.kind[b] in ("carry", "host")
    begins = all(plan.regions[name].start >= end for name in plan.around(i) if not plan.is_within(plan.home[b], name))
    return begins and not holds_before and touched[0] == i and b in plan.writes[i] and b not in plan.reads[i]
