"""Pick a row of a plan document to break, in a copy; keep the totals true where they are not what breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]
Pick = Callable[[Sequence[Any]], Any]
Broken = tuple[Document, str] | None
Mutation = Callable[[Document, Pick], Broken]


def choose(
    document: Document, key: str, pick: Pick, suits: Callable[[Row], bool] = lambda row: True
) -> tuple[Document, Row] | None:
    """Copy a document and pick one of its rows; None if none suits."""
    suitable = [k for k, row in enumerate(document[key]) if suits(row)]
    if not suitable:
        return None
    mutated = copy.deepcopy(document)
    return mutated, mutated[key][pick(suitable)]


def changed(document: Document, **fields: Any) -> Document:
    """Copy a document with other values of some fields."""
    mutated = copy.deepcopy(document)
    mutated.update(fields)
    return mutated


def settle_totals(document: Document) -> None:
    """Adjust peak, bounds, components, pools and total to the buffers' sizes and lifetimes."""
    page, components = document["page_bytes"], document["components"]
    roots = [row for row in document["buffers"] if row["pool"] == "workspace" and row["alias_of"] is None]
    live = [
        sum(r["size"] for r in roots if r["start"] <= t < r["end"] and not any(a <= t < b for a, b in r["gaps"]))
        for t in range(len(document["ops"]))
    ]  # fmt: skip
    for pool in document["pools"]:
        tops = [row["offset"] + row["size"] for row in document["buffers"] if row["pool"] == pool["name"]]
        pool["capacity"] = -(-max(tops, default=0) // page) * page
        if pool["name"] == "host":
            document["host_bytes"] = pool["capacity"]
        elif pool["name"] in components:
            components[pool["name"]] = pool["capacity"]
    states = (pool["capacity"] for pool in document["pools"] if pool["name"].startswith(("state/", "carry/")))
    components["state"] = sum(states)
    peak = max((row["offset"] + row["size"] for row in roots), default=0)
    document.update(peak_bytes=peak, lower_bound_bytes=max(live), optimal=peak == max(live))
    document["total_bytes"] = sum(components.values())
    document["fits"] = (
        document["total_bytes"] <= document["budget_bytes"] and document["host_bytes"] <= document["host_budget_bytes"]
    )
