"""Proof that a graph makes sense: reads after writes, legal aliases, closed streams, kernels present."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, permutations

from mosaic.errors import GraphError
from mosaic.registrar.graph import MAIN, Buffer, Graph, Op, Region
from mosaic.registrar.operator import Dim

__all__ = ["validate"]

_DEFINED = frozenset({"input", "weight", "state", "external", "host"})
_HANDED_ON = frozenset({"output", "state", "external"})


def validate(graph: Graph, *, kernels: Collection[str] | None = None) -> None:
    """Check a graph whole.

    Parameters
    ----------
    kernels
        Names of the kernels there are; given, every op must have one (a graph can be planned without).

    Raises
    ------
    GraphError
        Naming the op or buffer, what is wrong and the source line.
    """
    if not graph.ops:
        raise GraphError(f"graph '{graph.name}' has no ops")
    _edges_lead_forward(graph)
    _reads_follow_writes(graph)
    _aliases_are_legal(graph)
    _streams_are_closed(graph)
    for op in graph.ops:
        if kernels is not None and op.operator.name not in kernels:
            raise GraphError(
                f"{op.name} ({op.source}): no kernel '{op.operator.name}'; there are {', '.join(sorted(kernels))}"
            )


def _reads_follow_writes(graph: Graph) -> None:
    written = {b.id for b in graph.buffers if b.kind in _DEFINED or b.name in graph.handed}
    for op in graph.ops:
        for buffer in op.reads:
            if buffer.id in written or _written_later_in_loop(graph, op, buffer):
                continue
            raise GraphError(f"{op.name} ({op.source}): reads {buffer} before anything writes it ({buffer.source})")
        for buffer in (*op.reads, *op.writes):
            if buffer.home is not None and not buffer.home.encloses(op.region):
                raise GraphError(
                    f"{op.name} ({op.source}): touches {buffer} ({buffer.source}) outside its region {buffer.home.name}, "
                    "where only a slice of it ever exists; define it outside"
                )
        written.update(b.id for b in op.writes)
    used = {b.id for op in graph.ops for b in (*op.reads, *op.writes)}
    outputs = {b.id for op in graph.ops for b in op.writes}
    for buffer in graph.buffers:
        if buffer.kind == "output" and buffer.id not in outputs:
            raise GraphError(f"output {buffer} ({buffer.source}) is never written")
        if buffer.id not in used and buffer.kind not in _DEFINED:
            raise GraphError(f"{buffer} ({buffer.source}) is never used")


def _written_later_in_loop(graph: Graph, op: Op, buffer: Buffer) -> bool:
    """A rotating buffer of a loop's body may be read before the body writes it: iteration i reads what i-1 wrote."""
    if buffer.home is None or buffer.rotate < 2:
        return False
    return any(buffer in later.writes for later in graph.ops[op.index : buffer.home.end])


# Aliases: no op may read a value whose bytes another member of the group has overwritten.


def _aliases_are_legal(graph: Graph) -> None:
    by_root: dict[int, list[Buffer]] = {}
    for buffer_id, (root, _) in graph.aliases.items():
        by_root.setdefault(root.id, [root]).append(graph.buffers[buffer_id])
    touching: dict[int, dict[int, Op]] = {root_id: {} for root_id in by_root}
    for op in graph.ops:
        for buffer in (*op.reads, *op.writes):
            group = touching.get(graph.root(buffer).id)
            if group is not None:
                group[op.index] = op
    order = _Order(graph)
    for root_id, members in by_root.items():
        ops = list(touching[root_id].values())
        for old, new in permutations(members, 2):
            if _overlap(graph, old, new):
                _no_stale_read(graph, ops, old, new)
                _no_write_beside(graph, order, ops, old, new)
                _no_write_while_kept(graph, old, new)


def _no_stale_read(graph: Graph, ops: Sequence[Op], old: Buffer, new: Buffer) -> None:
    """Follow `old` through the ops, loop bodies twice: from a write of `new` to its own next one it holds nothing."""
    lost: Op | None = None
    advanced: list[Region] = []  # loops that went on to their next iteration since
    for step in _replayed(ops):
        if isinstance(step, Region):
            advanced.append(step)
            continue
        if new in step.writes and old in step.writes:
            raise GraphError(f"alias of {new.name} and {old.name}: {step.name} ({step.source}) writes both")
        in_place = _works_in_place(graph, step, new, old)
        overwrites = new in step.writes and not in_place
        if old in step.reads and (
            overwrites or (lost is not None and not _reads_another_slice(step, old, lost, new, advanced))
        ):
            culprit = lost or step
            raise GraphError(
                f"alias of {new.name} and {old.name}: {step.name} ({step.source}) reads {old.name} "
                f"after {culprit.name} ({culprit.source}) has overwritten it"
            )
        if new in step.writes:
            lost, advanced = step, []
        if old in step.writes and old not in step.reads and not _restores_a_slice(step, old, lost, new):
            lost = None
    if lost is not None and old.kind in _HANDED_ON:
        raise GraphError(
            f"alias of {new.name} and {old.name}: {lost.name} ({lost.source}) overwrites the {old.kind} {old.name}, "
            "which must hold its value when the step ends"
        )


def _no_write_beside(graph: Graph, order: _Order, ops: Sequence[Op], old: Buffer, new: Buffer) -> None:
    """What a side op touches stays as it is until it is joined."""
    for side in ops:
        if side.stream == MAIN or old not in (*side.reads, *side.writes):
            continue
        start, end = order.window(side)
        for op in graph.ops[start:end]:
            meets = new in op.writes or (new in op.reads and old in side.writes)
            if meets and op.stream != side.stream:
                raise GraphError(
                    f"alias of {new.name} and {old.name}: {op.name} ({op.source}) touches {new.name} "
                    f"while {side.name} ({side.source}) may use {old.name} on stream '{side.stream}'"
                )


def _no_write_while_kept(graph: Graph, old: Buffer, new: Buffer) -> None:
    """What a barrier keeps holds its value until there, once it has one."""
    first = 0 if old.kind in _DEFINED else next((op.index for op in graph.ops if old in op.writes), len(graph.ops))
    for barrier in graph.barriers:
        if old not in barrier.buffers:
            continue
        for op in graph.ops[max(first, barrier.start or 0) : barrier.end]:
            last = op.index == barrier.end - 1 and old in op.reads and _works_in_place(graph, op, new, old)
            if new in op.writes and not last:
                raise GraphError(
                    f"alias of {new.name} and {old.name}: {op.name} ({op.source}) overwrites {old.name}, "
                    f"which {barrier.name} ({barrier.source}) keeps"
                )


class _Order:
    """The forks and waits of every side stream, as pairs (side op, main op) in order of registration.

    Edges lead forward in the order of registration, so a graph has no cycles, and what happens before what is a bisection:
    0.15 ms for the 225 side ops of llada-8b with streamed weights. Ancestors and descendants by networkx are the same and
    take 118 ms, besides 160 ms to import it.
    """

    def __init__(self, graph: Graph) -> None:
        self._num_ops = len(graph.ops)
        self._forks = defaultdict[str, list[tuple[int, int]]](list)
        self._waits = defaultdict[str, list[tuple[int, int]]](list)
        for edge in graph.edges:
            if edge.kind == "fork":
                self._forks[graph.ops[edge.target].stream].append((edge.target, edge.source))
            else:
                self._waits[graph.ops[edge.source].stream].append((edge.source, edge.target))

    def fork(self, op: Op) -> int | None:
        """Return the last main op that a side op waits for."""
        forks = self._forks[op.stream]
        at = bisect_right(forks, (op.index, self._num_ops))
        return forks[at - 1][1] if at else None

    def join(self, op: Op) -> int | None:
        """Return the first main op that waits for a side op."""
        waits = self._waits[op.stream]
        at = bisect_left(waits, (op.index,))
        return waits[at][1] if at < len(waits) else None

    def window(self, side: Op) -> tuple[int, int]:
        """Return the ops over which a side op holds what it touches: from after its fork to its join, or all of its loop."""
        if side.region is not None:
            return side.region.start, side.region.end
        fork, join = self.fork(side), self.join(side)
        return 0 if fork is None else fork + 1, self._num_ops if join is None else join


def _replayed(ops: Sequence[Op], depth: int = 0) -> Iterator[Op | Region]:
    """Ops in order of execution, loop bodies twice with the region itself between the two."""

    def loop(op: Op) -> Region | None:
        chain = op.region.chain if op.region is not None else ()
        return chain[depth] if depth < len(chain) else None

    for region, run in groupby(ops, key=loop):
        body = list(run)
        if region is None:
            yield from body
        else:
            yield from _replayed(body, depth + 1)
            yield region
            yield from _replayed(body, depth + 1)


def _reads_another_slice(op: Op, old: Buffer, lost: Op, new: Buffer, advanced: Sequence[Region]) -> bool:
    """Whether loops that cut both members alike have moved on from the bytes that were overwritten."""
    cuts = _cuts(op, old)
    return (
        bool(cuts)
        and cuts == _cuts(lost, new)
        and old.spec == new.spec
        and any(r.name in {c[1] for c in cuts} for r in advanced)
    )


def _restores_a_slice(op: Op, old: Buffer, lost: Op | None, new: Buffer) -> bool:
    """Whether loops that cut what is written here go on to overwrite it: slices of earlier iterations stay lost.

    Loops around one of the two ops alone have gone through all their slices when the other op's turn comes.
    """
    if lost is None or lost.region is None or op.region is None:
        return False
    shared = {region.name for region in lost.region.chain} & {region.name for region in op.region.chain}
    written, overwritten = ({cut for cut in cuts if cut[1] in shared} for cuts in (_cuts(op, old), _cuts(lost, new)))
    return bool(written) and (written != overwritten or old.spec != new.spec)


def _cuts(op: Op, buffer: Buffer) -> set[tuple[int, str, int]]:
    """How the loops around `op` cut a buffer that lives outside them: (axis, region, factor)."""
    names = {key for key, operand in op.operands.items() if operand is buffer}
    inside = {region.name for region in buffer.home.chain} if buffer.home is not None else set()
    return {(s.axis, s.region, s.factor) for s in op.slices if s.operand in names and s.region not in inside}


def _works_in_place(graph: Graph, op: Op, new: Buffer, old: Buffer) -> bool:
    """Whether an op may write `new` over `old`: byte for byte, as the operand that its operator names and as no other."""
    operands = op.operands
    named = any(operands.get(w) is new and operands.get(r) is old for w, r in op.inplace)
    alone = sum(buffer is old for buffer in operands.values()) == 1
    return named and alone and _extent(graph, new) == _extent(graph, old) and _cuts(op, new) == _cuts(op, old)


def _overlap(graph: Graph, a: Buffer, b: Buffer) -> bool:
    (a_low, a_high), (b_low, b_high) = _extent(graph, a), _extent(graph, b)
    return not (_certainly_at_most(a_high, b_low) or _certainly_at_most(b_high, a_low))


def _extent(graph: Graph, buffer: Buffer) -> tuple[Dim, Dim]:
    """The bytes of its root's storage that a buffer takes."""
    at = graph.aliases[buffer.id][1] if buffer.id in graph.aliases else 0
    return at, at + buffer.bytes


def _certainly_at_most(low: Dim, high: Dim) -> bool:
    """Whether low <= high for all positive dims."""
    difference = high - low
    return difference >= 0 if isinstance(difference, int) else bool(difference.is_nonnegative)


# Streams: what runs beside the main stream is joined, inside the loop it runs in.


def _edges_lead_forward(graph: Graph) -> None:
    """A fork leads from a main op to a later side op, a wait from a side op to a later main op; so there is no cycle."""
    for edge in graph.edges:
        forward = 0 <= edge.source < edge.target < len(graph.ops)
        main = [graph.ops[index].stream == MAIN for index in (edge.source, edge.target)] if forward else []
        if main != [edge.kind == "fork", edge.kind == "wait"]:
            raise GraphError(
                f"graph '{graph.name}': the edge '{edge.kind}' from op {edge.source} to op {edge.target} must lead to a later "
                f"op, {'from main to a side stream' if edge.kind == 'fork' else 'from a side stream to main'}"
            )


def _streams_are_closed(graph: Graph) -> None:
    if graph.open_waits:
        raise GraphError(f"graph '{graph.name}': wait() with no op after it; side streams join at a main op")
    order = _Order(graph)
    for op in graph.ops:
        if op.stream != MAIN and not (op.region is not None and _rotates(op, op.region)):
            _is_forked_and_joined(order, op)
        if op.stream != MAIN:
            _is_left_alone(graph, order, op)


def _is_left_alone(graph: Graph, order: _Order, side: Op) -> None:
    """What a side op touches, no later op of another stream does before it is waited for, where one of the two writes.

    Earlier main ops have ended: a stream is forked after the last of them.
    """
    join, end = order.join(side), len(graph.ops) if side.region is None else side.region.end
    touched, written = {b.id for b in (*side.reads, *side.writes)}, {b.id for b in side.writes}
    for op in graph.ops[side.index + 1 : end if join is None else min(join, end)]:
        if op.stream == side.stream:
            continue
        for buffer in (*op.writes, *op.reads):
            if buffer.id in (touched if buffer in op.writes else written):
                raise GraphError(
                    f"{op.name} ({op.source}): touches {buffer} while {side.name} ({side.source}) may use it on stream "
                    f"'{side.stream}'; wait for the stream first"
                )


def _rotates(op: Op, region: Region) -> bool:
    """Whether iterations may overlap: what the op touches in the workspace has slots that iterations take in turn."""
    touched = [b for b in (*op.reads, *op.writes) if b.pool == "workspace"]
    return all(b.home is region and b.rotate > 1 for b in touched)


def _is_forked_and_joined(order: _Order, op: Op) -> None:
    join = order.join(op)
    workspace = next((b for b in (*op.reads, *op.writes) if b.pool == "workspace"), None)
    if join is None and workspace is not None:
        raise GraphError(
            f"{op.name} ({op.source}): stream '{op.stream}' is never joined, yet it touches {workspace}; wait for it"
        )
    region = op.region
    if region is None:
        return
    fork = order.fork(op)
    if fork is None or join is None or fork < region.start or join >= region.end:
        raise GraphError(
            f"{op.name} ({op.source}): stream '{op.stream}' must fork and join inside region {region.name}, whose "
            "iterations follow each other, or touch only buffers of the region that rotate"
        )
