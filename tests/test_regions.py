"""Loops of random nestings against their intervals: who holds whom, and the rows that every iteration has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from inspect import signature
from typing import Any

import pytest

from mosaic.planner.plan_records import PlanRecords, PlanRegion
from mosaic.runtime.regions import Chunk, Regions

Row = dict[str, Any]
NO_BARRIER: Row = {"name": "b", "region": None, "start": 0, "end": 1, "inputs": [], "outputs": [], "carried": []}


def nested(rng: random.Random, start: int, end: int, parent: str | None, depth: int) -> Iterator[Row]:
    """Loops over [start, end), one after the other, each with loops inside; now and then over the dim around them."""
    while start < end:
        stop = rng.randint(start + 1, end)
        if rng.random() < 0.7 and depth:
            name, rows = f"r{start}.{depth}", rng.randint(1, 5)
            extent = rng.randint(1, 20)
            yield {
                "name": name, "parent": parent, "dim": rng.choice("ab"), "start": start, "end": stop, "rows": rows,
                "extent": extent, "count": -(-extent // rows),
            }  # fmt: skip
            yield from nested(rng, start, stop, name, depth - 1)
        start = stop


def document(seed: int) -> tuple[int, dict[str, Row], Regions]:
    """The number of ops, the loops by name, and the same as the runtime reads them."""
    rng = random.Random(seed)
    ops = rng.randint(1, 12)
    rows = [*nested(rng, 0, ops, None, 3)]
    rng.shuffle(rows)
    barriers = [
        {**NO_BARRIER, "region": row["name"], "carried": rng.sample(range(5), rng.randint(1, 3))}
        for row in rows
        if rng.random() < 0.5
    ]
    row_of = {row["name"]: row for row in rows}
    loops = [{**row, "knob": "k"} for row in rows]
    regions = Regions(PlanRecords({"regions": loops, "barriers": [*barriers, NO_BARRIER]}))
    assert regions.by_name == {name: PlanRegion(**row, knob="k") for name, row in row_of.items()}
    return ops, row_of, regions


def around(rows: dict[str, Row], name: str | None) -> list[str]:
    """A loop and those that it lies in, from the inside out."""
    found: list[str] = []
    while name is not None:
        found.append(name)
        name = rows[name]["parent"]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_loops_nest_as_their_intervals_do(seed: int) -> None:
    ops, rows, regions = document(seed)
    for name in (None, *rows):
        inside = [row for row in rows.values() if row["parent"] == name]
        assert {op: loop.name for op, loop in regions.children(name).items()} == {r["start"]: r["name"] for r in inside}
        assert [*regions.chain(name)] == around(rows, name)
        if name is not None:
            assert regions[name] is regions.by_name[name]
        for other in (None, *rows):
            both = [loop for loop in around(rows, name) if loop in around(rows, other)]
            assert regions.common(name, other) == (both[0] if both else None)
        for op in range(ops) if name is None else range(rows[name]["start"], rows[name]["end"]):
            held = [row["name"] for row in rows.values() if row["start"] <= op < row["end"]]
            innermost = max(held, key=lambda loop: len(around(rows, loop)), default=None)
            expected = [(r["start"], r["end"]) for r in inside if r["start"] <= op < r["end"]] or [(op, op + 1)]
            assert regions.item(name, op, innermost) == expected[0]


@pytest.mark.parametrize("seed", range(60))
def test_iterations_are_what_a_loop_over_rows_runs(seed: int) -> None:
    _, rows, regions = document(seed)

    def descend(name: str, outer: dict[str, Chunk]) -> None:
        row = rows[name]
        same = [loop for loop in around(rows, row["parent"]) if rows[loop]["dim"] == row["dim"]]
        left = row["extent"]
        if same:
            left = min(left, outer[same[0]].end - outer[same[0]].start)
        chunks = regions.iterations(regions[name], outer)
        assert chunks is regions.iterations(regions[name], outer)
        first = 0
        for index, chunk in enumerate(chunks):
            end = min(first + row["rows"], left)
            assert chunk == Chunk(index=index, start=first, end=end) and first < end
            first = end
            for loop in regions.children(name).values() if index in (0, len(chunks) - 1) else ():
                descend(loop.name, {**outer, name: chunk})
        assert first == left

    for loop in regions.children(None).values():
        descend(loop.name, {})


def test_regions_and_chunks_are_frozen_keyword_only_and_slotted() -> None:
    for kind in (PlanRegion, Chunk):
        assert all(p.kind is p.KEYWORD_ONLY for p in signature(kind).parameters.values())
        assert kind.__slots__ == tuple(field.name for field in fields(kind))
    chunk = Chunk(index=0, start=0, end=1)
    with pytest.raises(FrozenInstanceError):
        chunk.end = 2  # type: ignore[misc]
    _, _, regions = document(3)
    with pytest.raises(FrozenInstanceError):
        next(iter(regions.by_name.values())).end = 2  # type: ignore[misc]
