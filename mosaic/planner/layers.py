"""Layers that a brief graph leaves out, extrapolated from the records of the two layers before them.

Records of layers of one kind differ only in numbers: the layer in names and attributes, and ids of ops, buffers and
regions. The differences between two neighbours are continued. Records after the layers move behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mosaic.errors import GraphError
from mosaic.planner.body import BufferRecord, OpRecord, RegionRecord
from mosaic.registrar.parts import Run

__all__ = ["Tables", "copies", "repeat"]

Tables = Sequence[list[Any]]
"""Records of ops, buffers, regions, barriers and edges."""


def copies(earlier: Any, later: Any, more: int) -> Sequence[Any]:
    """Return the layer that follows two neighbours, as plain lists.

    Raises
    ------
    GraphError
        If the neighbours differ in more than numbers.
    """
    return _copies(json.dumps(earlier), json.dumps(later), more)


@lru_cache(maxsize=128)
def _copies(earlier: str, later: str, more: int) -> Sequence[Any]:
    """Cached: bodies that differ only in their ending have the same layers."""
    before, now = (re.split("([0-9]+)", text.replace("%", "%%")) for text in (earlier, later))
    if before[::2] != now[::2]:
        raise GraphError("two layers of one kind differ in more than numbers: let their `kind` say so")
    counted = []
    for at in range(1, len(now), 2):
        if before[at] != now[at]:
            counted.append((int(now[at]), int(now[at]) - int(before[at])))
            now[at] = "%d"
    form = "".join(now)
    return [
        json.loads(form % tuple([number + further * step for number, step in counted]))
        for further in range(1, more + 1)
    ]


def repeat(tables: Tables, run: Run) -> None:
    """Insert the omitted layers of a run."""
    earlier, later = ([table[i:j] for table, i, j in zip(tables, *ends, strict=True)] for ends in pairwise(run.ends))
    _, starts, ends = run.ends
    op, buffer, region, *_ = (_moved(i, run.more * (j - i)) for i, j in zip(starts, ends, strict=True))
    tails = [table[at:] for table, at in zip(tables, ends, strict=True)]
    for table, at in zip(tables, ends, strict=True):
        del table[at:]
    for layer in copies(earlier, later, run.more):
        for table, make, rows in zip(tables, _MAKERS, layer, strict=True):
            table.extend(make(*row) for row in rows)
    tables[0].extend(
        o._replace(
            region=region(o.region), reads=[*map(buffer, o.reads)], writes=[*map(buffer, o.writes)],
            updates=[*map(buffer, o.updates)], operands={name: buffer(b) for name, b in o.operands.items()},
            inplace=[[*map(buffer, pair)] for pair in o.inplace],
        )
        for o in tails[0]
    )  # fmt: skip
    tables[1].extend(b._replace(home=region(b.home), alias_of=buffer(b.alias_of)) for b in tails[1])
    tables[2].extend(r._replace(parent=region(r.parent), start=op(r.start), end=op(r.end)) for r in tails[2])
    tables[3].extend((name, [*map(buffer, ids)], op(start), op(end)) for name, ids, start, end in tails[3])
    tables[4].extend((kind, op(source), op(target)) for kind, source, target in tails[4])


def _moved(start: int, by: int) -> Callable[[Any], Any]:
    """Map ids from `start` on, of a run's last layer or of records after it, to their final ids."""
    return lambda number: number if number is None or number < start else number + by


def _row(*fields: Any) -> tuple[Any, ...]:
    return fields


_MAKERS: tuple[Callable[..., Any], ...] = (OpRecord, BufferRecord, RegionRecord, _row, _row)
