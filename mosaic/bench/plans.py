"""What a plan document says of its launches: their shapes, and the average of what is alive, weighted by predicted time.
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, TypeVar

from mosaic.devices import Device

__all__ = ["alive_by_plan", "launch_shapes", "op_seconds", "weight_slots"]

T = TypeVar("T")


def launch_shapes(document: Mapping[str, Any], op: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of an op's operands in one full iteration of the loops around it, by operand."""
    rows = {region["name"]: region["rows"] for region in document["regions"]}
    shapes = {name: list(document["buffers"][buffer]["shape"]) for name, buffer in op["operands"].items()}
    for operand, axis, region, factor in op["slices"]:
        shapes[operand][axis] = min(shapes[operand][axis], factor * rows[region])
    return {name: tuple(shape) for name, shape in shapes.items()}


def weight_slots(document: Mapping[str, Any]) -> set[int]:
    """The buffers into which weights are fetched from the host: weights, not activations."""
    buffers = document["buffers"]
    return {
        op["operands"]["y"]
        for op in document["ops"]
        if op["kernel"] == "copy" and _is_host_weight(buffers[op["operands"]["x"]])
    }


def _is_host_weight(buffer: Mapping[str, Any]) -> bool:
    return buffer["pool"] == "host" and buffer["tensor"] is not None


def op_seconds(document: Mapping[str, Any], device: Device) -> list[float]:
    """Predicted seconds of every op, all iterations together, at the profile's rates of the nearest size.

    Ops of side streams take none: they run beside the others.
    """
    seconds = []
    for op in document["ops"]:
        if op["stream"] != "main":
            seconds.append(0.0)
            continue
        rate = _rate(document, op, device)
        work = op["flops"] / rate if rate is not None else 0.0
        seconds.append(max(work, op["bytes"] / device.bandwidth))
    return seconds


def _rate(document: Mapping[str, Any], op: Mapping[str, Any], device: Device) -> float | None:
    """FLOP/s of an op's launches; None where bytes bound it."""
    kernel = op["kernel"]
    if kernel == "attention":
        shapes = launch_shapes(document, op)
        chosen = document.get("implementations", {}).get("attention")
        rates = device.attention_rates.get(chosen, next(iter(device.attention_rates.values())))
        return _nearest(rates, shapes["q"][0] * shapes["q"][1] // op["attrs"]["head_size"])
    if kernel not in ("linear", "linear_add", "grouped_linear", "unembed_stats", "unembed_sample"):
        return None
    shapes = launch_shapes(document, op)
    rows, columns = shapes["x"][0], shapes["weight"][-2]
    if kernel.startswith("unembed") and device.unembed_rates:
        return _nearest(device.unembed_rates, rows)
    return _nearest(_nearest(device.gemm_rates, columns), rows)


def _nearest(table: Mapping[int, T], size: int) -> T:
    """The entry of the size that is nearest by ratio."""
    return table[min(table, key=lambda known: abs(math.log2(known / max(size, 1))))]


def alive_by_plan(document: Mapping[str, Any], device: Device) -> tuple[int, float]:
    """Peak of the activations a plan holds, and their average weighted by the predicted time of every op.

    Activations are what lives in the workspace but for the slots of fetched weights.

    Returns
    -------
    tuple
        Bytes of the largest live set, and the average bytes alive.
    """
    slots, count = weight_slots(document), len(document["ops"])
    changes = [0] * (count + 1)
    for buffer in document["buffers"]:
        if buffer["pool"] != "workspace" or buffer["alias_of"] is not None or buffer["id"] in slots:
            continue
        edges = [buffer["start"], *(at for gap in sorted(buffer["gaps"]) for at in gap), buffer["end"]]
        for index, at in enumerate(edges):
            changes[at] += buffer["size"] if index % 2 == 0 else -buffer["size"]
    alive = list(accumulate(changes[:count]))
    seconds = op_seconds(document, device)
    return max(alive), sum(size * share for size, share in zip(alive, seconds, strict=True)) / sum(seconds)
