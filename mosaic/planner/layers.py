"""The layers that a brief graph leaves out, from the records of the two before them.

Layers of one kind have the same records but for numbers: of the layer in names and attributes, and of ops, buffers and
regions. The numbers that differ between two neighbours are counted on. What follows the layers moves behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mosaic.errors import GraphError

__all__ = ["Tables", "copies", "repeat"]

Tables = Sequence[list[Any]]
"""Records of ops, buffers, regions, barriers and edges."""


def copies(earlier: Any, later: Any, more: int) -> Iterator[Any]:
    """Yield what follows two neighbours, as plain lists.

    Raises
    ------
    GraphError
        If more than numbers differ between them.
    """
    before, now = (re.split("([0-9]+)", json.dumps(rows).replace("%", "%%")) for rows in (earlier, later))
    if before[::2] != now[::2]:
        raise GraphError("two layers of one kind differ in more than numbers: let their `kind` say so")
    counted = []
    for at in range(1, len(now), 2):
        if before[at] != now[at]:
            counted.append((int(now[at]), int(now[at]) - int(before[at])))
            now[at] = "%d"
    form = "".join(now)
    for further in range(1, more + 1):
        yield json.loads(form % tuple([number + further * step for number, step in counted]))


def repeat(tables: Tables, run: Any, makers: Sequence[Callable[..., Any]]) -> None:
    """Insert the layers of a run that were left out; `makers` turn plain rows into records."""
    earlier, later = ([table[i:j] for table, i, j in zip(tables, *ends, strict=True)] for ends in pairwise(run.ends))
    _, starts, ends = run.ends
    op, buffer, region, *_ = (_moved(i, run.more * (j - i)) for i, j in zip(starts, ends, strict=True))
    tails = [table[at:] for table, at in zip(tables, ends, strict=True)]
    for table, at in zip(tables, ends, strict=True):
        del table[at:]
    for layer in copies(earlier, later, run.more):
        for table, make, rows in zip(tables, makers, layer, strict=True):
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
    """Map the numbers from `start` on, those of the last layer that a run has or of what follows, to where they come to be."""
    return lambda number: number if number is None or number < start else number + by
