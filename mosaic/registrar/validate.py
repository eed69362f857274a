"""Proof that a graph makes sense: reads after writes, legal aliases, closed streams, kernels present."""

from __future__ import annotations

from collections.abc import Collection

from mosaic.errors import GraphError
from mosaic.registrar.graph import Buffer, Graph, Op

__all__ = ["validate"]

_DEFINED = frozenset({"input", "weight", "state", "external", "host"})


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
    _reads_follow_writes(graph)
    _aliases_are_legal(graph)
    if graph._waits:
        raise GraphError(f"graph '{graph.name}': wait() with no op after it; side streams join at a main op")
    for op in graph.ops:
        if kernels is not None and op.contract.name not in kernels:
            raise GraphError(f"{op.name} ({op.source}): no kernel '{op.contract.name}'; there are {', '.join(sorted(kernels))}")


def _reads_follow_writes(graph: Graph) -> None:
    written = {b.id for b in graph.buffers if b.kind in _DEFINED}
    for op in graph.ops:
        for buffer in op.reads:
            if buffer.id in written or _written_later_in_loop(graph, op, buffer):
                continue
            raise GraphError(f"{op.name} ({op.source}): reads {buffer} before anything writes it ({buffer.source})")
        written.update(b.id for b in op.writes)
    used = {b.id for op in graph.ops for b in (*op.reads, *op.writes)}
    for buffer in graph.buffers:
        if buffer.kind == "output" and not any(buffer in op.writes for op in graph.ops):
            raise GraphError(f"output {buffer} ({buffer.source}) is never written")
        if buffer.id not in used and buffer.kind not in _DEFINED:
            raise GraphError(f"{buffer} ({buffer.source}) is never used")


def _written_later_in_loop(graph: Graph, op: Op, buffer: Buffer) -> bool:
    """A rotating buffer of a loop's body may be read before the body writes it: iteration i reads what i-1 wrote."""
    if buffer.home is None or buffer.rotate < 2:
        return False
    return any(buffer in later.writes for later in graph.ops[op.index : buffer.home.end])


def _aliases_are_legal(graph: Graph) -> None:
    by_root: dict[int, list[Buffer]] = {}
    for buffer_id, (root, _) in graph.aliases.items():
        by_root.setdefault(root.id, [root]).append(graph.buffers[buffer_id])
    for members in by_root.values():
        for member in members:
            _no_stale_read(graph, member, members)


def _no_stale_read(graph: Graph, new: Buffer, members: list[Buffer]) -> None:
    """After the first write of `new`, no op may read an older value that shares its bytes."""
    first = next((op for op in graph.ops if new in op.writes), None)
    if first is None:
        return
    for old in members:
        if old is new or not _overlap(graph, old, new):
            continue
        wrote = next((op.index for op in graph.ops if old in op.writes), -1)
        if wrote > first.index:
            continue
        rewritten = first.index
        for op in graph.ops[first.index :]:
            if old in op.reads and not (op is first and _works_in_place(op, new, old)):
                raise GraphError(
                    f"alias of {new.name} and {old.name}: {op.name} ({op.source}) reads {old.name} "
                    f"after {first.name} ({first.source}) has overwritten it"
                )
            if old in op.writes and op.index > rewritten and old not in op.reads:
                break


def _overlap(graph: Graph, a: Buffer, b: Buffer) -> bool:
    def extent(buffer: Buffer) -> tuple[object, object]:
        at = graph.aliases.get(buffer.id, (buffer, 0))[1]
        return at, at + buffer.bytes

    (a_low, a_high), (b_low, b_high) = extent(a), extent(b)
    return not (_certainly_at_most(a_high, b_low) or _certainly_at_most(b_high, a_low))


def _certainly_at_most(low: object, high: object) -> bool:
    """Whether low <= high for all positive dims."""
    difference = high - low  # type: ignore[operator]
    return bool(difference >= 0) if isinstance(difference, int) else bool(getattr(difference, "is_nonnegative", False))


def _works_in_place(op: Op, new: Buffer, old: Buffer) -> bool:
    return any(op.operands.get(w) is new and op.operands.get(r) is old for w, r in op.contract.inplace)


