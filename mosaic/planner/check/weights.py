"""Compare a plan with the addresses at which weights were loaded: a step must read each weight where it is.

A plan file cannot prove where weights lie; the program that loaded them can. One plan loads, many plans read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

from mosaic.planner.check.columns import EXTERNAL, Columns

WeightMap: TypeAlias = Mapping[str, tuple[str, int, int]]
"""Tensor name (of a weight without one, the buffer's name) -> pool, offset and size in bytes."""


def weight_map(document: Mapping[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Say where a plan has its weights: those of the device, and the streamed ones in host memory.

    Examples
    --------
    >>> row = {"name": "w", "kind": "weight", "pool": "weights", "offset": 512, "size": 1024, "tensor": "a.weight"}
    >>> weight_map({"buffers": [{**row, "alias_of": None}]})
    {'a.weight': ('weights', 512, 1024)}
    """
    return {
        row["name"] if row["tensor"] is None else row["tensor"]: (row["pool"], row["offset"], row["size"])
        for row in document["buffers"]
        if _is_loaded(row["kind"], row["tensor"], row["alias_of"])
    }


def check_weights(plan: Columns, weights: WeightMap) -> None:
    """Check that each weight of a plan lies where it was loaded, and nothing else where a weight was."""
    at: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, (pool, offset, size) in weights.items():
        if size:
            at[pool].append((offset, offset + size, name))
    for b, kind in enumerate(plan.kind):
        if _is_loaded(kind, plan.tensor[b], plan.alias_of[b]):
            _check_weight(plan, b, weights)
        elif plan.alias_of[b] is None and plan.pool[b] != EXTERNAL and plan.size[b]:
            _check_other(plan, b, at[plan.pool[b]])


def _is_loaded(kind: str, tensor: str | None, root: int | None) -> bool:
    return root is None and (kind == "weight" or (kind == "host" and tensor is not None))


def _check_weight(plan: Columns, b: int, weights: WeightMap) -> None:
    tensor = plan.tensor[b]
    name = plan.name[b] if tensor is None else tensor
    here, loaded = (plan.pool[b], plan.offset[b], plan.size[b]), weights.get(name)
    if loaded is None:
        plan.fail("weight-address", f"{plan.say(b)} is the weight '{name}', which was not loaded", (b,))
    elif tuple(loaded) != here:
        claims = f"{plan.say(b)} reads the weight '{name}' as {here[2]} bytes at {here[1]} of pool '{here[0]}'"
        text = f"{claims}; it was loaded as {loaded[2]} bytes at {loaded[1]} of pool '{loaded[0]}'"
        plan.fail("weight-address", text, (b,))


def _check_other(plan: Columns, b: int, loaded: list[tuple[int, int, str]]) -> None:
    start, end = plan.offset[b], plan.offset[b] + plan.size[b]
    for first, last, name in loaded:
        if start < last and first < end:
            text = f"{plan.say(b)} at [{start}, {end}) lies on the weight '{name}', loaded at [{first}, {last})"
            plan.fail("weight-address", text, (b,))
