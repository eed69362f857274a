"""Unroll a plan into the launches of every iteration and find unordered launches that touch common bytes.

The long way round, to hold the checker against: loops are walked, not reasoned about. Slices on the first axis only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]
Iteration = Mapping[str, int]  # loop -> which iteration of it

MAIN = "main"
ITEM_BYTES = {"int32": 4, "float32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(slots=True)
class Launch:
    """One op in one iteration: the launches that have ended when it starts, and the bytes (pool, start, end) it touches."""

    op: int
    before: int
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    writes: list[tuple[str, int, int]] = field(default_factory=list)


def races(document: Document) -> list[tuple[int, int]]:
    """Find pairs of ops that touch common bytes in some iterations, one of them writing, in no order."""
    launches = _Unroller(document).launches
    found = []
    for k, late in enumerate(launches):
        unordered = ~late.before & ((1 << k) - 1)
        while unordered:
            early = launches[(unordered & -unordered).bit_length() - 1]
            unordered &= unordered - 1
            if _meet(early.writes, late.reads + late.writes) or _meet(early.reads, late.writes):
                found.append((early.op, late.op))
    return sorted({*found})


def _meet(some: list[tuple[str, int, int]], others: list[tuple[str, int, int]]) -> bool:
    return any(p == q and a < d and c < b for p, a, b in some for q, c, d in others)


class _Unroller:
    """Walks a plan, loops and all, and keeps what has ended at each stream's position as a bit set of launches."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.launches: list[Launch] = []
        self._ops, self._buffers = document["ops"], document["buffers"]
        self._loops: dict[str, Row] = {row["name"]: row for row in document["regions"]}
        self._ended: dict[str, int] = defaultdict(int)
        self._latest: dict[int, int] = {}  # op -> its latest launch and all that had ended before that
        self._walk(None, 0, len(self._ops), {})

    def _walk(self, inside: str | None, start: int, end: int, iteration: Iteration) -> None:
        at = start
        while at < end:
            loop = next((row for row in self._loops.values() if row["parent"] == inside and row["start"] == at), None)
            if loop is None:
                self._launch(self._ops[at], iteration)
                at += 1
            else:
                self._loop(loop, iteration)
                at = loop["end"]

    def _loop(self, loop: Row, iteration: Iteration) -> None:
        mine = [op for op in self._ops if op["region"] == loop["name"] and op["stream"] != MAIN]
        streams = {op["stream"] for op in mine}
        touched = {b for op in mine for b in (*op["reads"], *op["writes"])}
        apart = min(
            (row["rotate"] for row in self._buffers if row["id"] in touched and row["region"] == loop["name"]),
            default=0,
        )
        for stream in streams:
            self._ended[stream] |= self._ended[MAIN]
        ends: list[int] = []
        for i in range(loop["count"]):
            if apart and i >= apart:
                for stream in (MAIN, *streams):
                    self._ended[stream] |= ends[i - apart]
            self._walk(loop["name"], loop["start"], loop["end"], {**iteration, loop["name"]: i})
            ends.append(0)
            for stream in (MAIN, *streams):
                ends[i] |= self._ended[stream]
        for stream in streams:
            self._ended[MAIN] |= self._ended[stream]

    def _launch(self, op: Row, iteration: Iteration) -> None:
        before = self._ended[op["stream"]]
        for edge in self.document["edges"]:
            if edge["to"] == op["index"]:
                before |= self._latest[edge["from"]]
        launch = Launch(op["index"], before)
        for ids, side in ((op["reads"], launch.reads), (op["writes"], launch.writes)):
            side += [touched for b in ids for touched in self._bytes(op, self._buffers[b], iteration)]
        self._latest[op["index"]] = self._ended[op["stream"]] = before | 1 << len(self.launches)
        self.launches.append(launch)

    def _bytes(self, op: Row, row: Row, iteration: Iteration) -> Iterator[tuple[str, int, int]]:
        """Bytes of a buffer that an op touches, operand by operand."""
        slot = iteration[row["region"]] % row["rotate"] if row["region"] in iteration else 0
        base, rows = row["offset"] + slot * (row["size"] // row["rotate"]), row["shape"][0] if row["shape"] else 1
        size = prod(row["shape"]) * ITEM_BYTES[row["dtype"]]
        for operand in (name for name, b in op["operands"].items() if b == row["id"]):
            first, last = 0, rows
            for name, axis, by, factor in op["slices"]:
                if name == operand and axis == 0 and not self._is_within(row["region"], by):
                    loop = self._loops[by]
                    first = factor * iteration[by] * loop["rows"]
                    last = factor * min((iteration[by] + 1) * loop["rows"], loop["extent"])
            yield row["pool"], base + size * first // rows, base + size * last // rows

    def _is_within(self, home: str | None, loop: str) -> bool:
        while home is not None and home != loop:
            home = self._loops[home]["parent"]
        return home is not None
