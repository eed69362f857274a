"""A plan as the memory snapshot that PyTorch's viewer (pytorch.org/memory_viz) opens.

A pickle of protocol 4 that contains only dicts, lists, tuples, strings, integers and booleans. The pool is one segment,
each buffer an allocation at its planned address, each op one microsecond and the frame of its allocations. Source of
the structure: the documentation of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

from mosaic.viz.profile import Document, check_schema, held_intervals, placed_roots, pool_names, root_categories

_FIRST_ADDRESS: Final = 0x7000_0000_0000  # where addresses of this size are usual, and exact in JavaScript's doubles
_POOL_STRIDE: Final = 1 << 40  # pools lie apart, as the address ranges that are reserved for them do

_Record = dict[str, Any]


def snapshot_pickle(doc: Document, *, pools: Iterable[str] = ("workspace",)) -> bytes:
    """Return `memory_snapshot(doc)` as the bytes of a `.pickle` file."""
    return pickle.dumps(memory_snapshot(doc, pools=pools), protocol=4)


def memory_snapshot(doc: Document, *, pools: Iterable[str] = ("workspace",)) -> _Record:
    """Return a plan in the form of `torch.cuda.memory._snapshot()`.

    Before each op, buffers that have ended are freed, then new ones are allocated. A buffer with gaps in its lifetime
    is freed and allocated again, so that live blocks never overlap. Buffers that outlive the step (outputs, weights)
    are still allocated at the end, and the segments' blocks show them.

    Parameters
    ----------
    doc
        A plan document.
    pools
        The pools that become segments, one for each state; add `"weights"` and `"state"` for all that is placed.
    """
    check_schema(doc)
    ranges = [pool for name in pools for pool in doc["pools"] if name in pool_names(pool["name"])]
    devices = [_device_index(pool["device"]) for pool in ranges]
    traces: list[list[_Record]] = [[] for _ in range(max(devices, default=0) + 1)]
    segments = []
    for number, (pool, device) in enumerate(zip(ranges, devices, strict=True)):
        address = _FIRST_ADDRESS + number * _POOL_STRIDE
        traces[device].append(_entry("segment_alloc", address, pool["capacity"], 0, [_frame(doc, -1)]))
        traces[device] += _buffer_events(doc, pool["name"], address)
        segments.append(_segment(doc, pool, device, address))
    for trace in traces:
        trace.sort(key=itemgetter("time_us"))  # stable: within a microsecond the order of a pool's events stays
    return {"segments": segments, "device_traces": traces}


def _device_index(device: str) -> int:
    _, _, index = device.partition(":")
    return int(index) if index.isdigit() else 0


def _frame(doc: Document, index: int) -> _Record:
    """Return the frame of an allocation: the op, in the model, at its index; -1 for memory from before the step."""
    name = doc["ops"][index]["name"] if index >= 0 else "before the step"
    return {"filename": doc["model"], "line": max(index, 0), "name": name}


def _entry(action: str, address: int, size: int, time_us: int, frames: list[_Record], **more: str) -> _Record:
    entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": frames}
    return {**entry, **more}


def _buffer_events(doc: Document, pool: str, base: int) -> list[_Record]:
    num_ops = len(doc["ops"])
    category_of = root_categories(doc)
    frees: list[list[_Record]] = [[] for _ in range(num_ops + 1)]
    allocs: list[list[_Record]] = [[] for _ in range(num_ops + 1)]
    for buffer in placed_roots(doc, (pool,)):
        if not buffer["size"]:
            continue
        what = {"category": category_of[buffer["id"]], "user_metadata": buffer["name"]}
        for start, end in held_intervals(buffer):
            place = (base + buffer["offset"], buffer["size"])
            allocs[start].append(_entry("alloc", *place, start, [_frame(doc, start)], **what))
            if end < num_ops:
                for action in ("free_requested", "free_completed"):
                    frees[end].append(_entry(action, *place, end, [_frame(doc, end)], **what))
    return [entry for index in range(num_ops) for entry in (*frees[index], *allocs[index])]


def _segment(doc: Document, pool: Mapping[str, Any], device: int, address: int) -> _Record:
    """Describe a pool at the end of the step: blocks that tile it, with free ones between the held ones."""
    num_ops = len(doc["ops"])
    held = [
        (buffer, start)
        for buffer in placed_roots(doc, (pool["name"],))
        for start, end in held_intervals(buffer)
        if end == num_ops and buffer["size"]
    ]
    held.sort(key=lambda pair: int(pair[0]["offset"]))
    blocks, at, in_use = [], 0, 0
    for buffer, start in held:
        if buffer["offset"] > at:
            blocks.append(_block(address + at, buffer["offset"] - at, "inactive", []))
        block = _block(address + buffer["offset"], buffer["size"], "active_allocated", [_frame(doc, start)])
        blocks.append({**block, "user_metadata": buffer["name"]})
        at = buffer["offset"] + buffer["size"]
        in_use += buffer["size"]
    if at < pool["capacity"]:
        blocks.append(_block(address + at, pool["capacity"] - at, "inactive", []))
    return {
        "device": device,
        "address": address,
        "total_size": pool["capacity"],
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": in_use,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [_frame(doc, -1)],
        "blocks": blocks,
    }


def _block(address: int, size: int, state: str, frames: list[_Record]) -> _Record:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
