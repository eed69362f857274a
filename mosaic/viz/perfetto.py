"""A plan as a Chrome trace (JSON) that ui.perfetto.dev and chrome://tracing open.

Ops are slices on one track per stream inside the slices of their chunk loops, live bytes are counters, the peak is an
instant. Time is the op index in microseconds, or the predicted durations if every op has one (`predicted_us`). Source:
the Trace Event Format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mosaic.units import format_bytes
from mosaic.viz.profile import CATEGORIES, Document, LiveProfile, check_schema, largest_live, live_profile, sizes_text

_PID: Final = 1
_POOLS: Final = ("workspace", "state", "weights")
_ORDER: Final = {"M": 0, "X": 1, "C": 2, "i": 3}

_Event = dict[str, Any]


def trace_json(doc: Document) -> str:
    """Return the trace as one JSON object, ready to be written to a file."""
    check_schema(doc)
    clock = "predicted time" if _has_durations(doc["ops"]) else "one microsecond per op"
    about = {"model": doc["model"], "device": doc["device"], "dims": doc["dims"], "clock": clock}
    trace = {"traceEvents": trace_events(doc), "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(trace, separators=(",", ":"))


def trace_events(doc: Document) -> list[_Event]:
    """Return the events, metadata first, then by time; of slices that begin together the longest first."""
    check_schema(doc)
    times = _op_times(doc)
    marks = _boundaries(doc["ops"], times)
    events = [*_metadata(doc), *_slices(doc, times, marks), *_counters(doc, marks), *_peak(doc, times)]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0), _ORDER[event["ph"]], -event.get("dur", 0)))
    return events


def _has_durations(ops: Sequence[Mapping[str, Any]]) -> bool:
    return bool(ops) and all("predicted_us" in op for op in ops)


def _op_times(doc: Document) -> list[tuple[float, float]]:
    """Return the begin and end of each op, in microseconds.

    With predicted durations every stream has its own clock, and forks and waits order the clocks like the streams.
    Without them, op `i` fills the microsecond `i`.
    """
    ops = doc["ops"]
    if not _has_durations(ops):
        return [(index, index + 1) for index in range(len(ops))]
    before: dict[int, list[int]] = {}
    for edge in doc["edges"]:
        before.setdefault(edge["to"], []).append(edge["from"])
    clocks: dict[str, float] = {}
    times: list[tuple[float, float]] = []
    for op in ops:
        begin = max([clocks.get(op["stream"], 0.0), *(times[source][1] for source in before.get(op["index"], ()))])
        clocks[op["stream"]] = begin + op["predicted_us"]
        times.append((begin, clocks[op["stream"]]))
    return times


def _boundaries(ops: Sequence[Mapping[str, Any]], times: Sequence[tuple[float, float]]) -> list[float]:
    """Return when the live set of op `i` begins: when the main stream reaches it. One more entry for the end."""
    marks = [max((end for _, end in times), default=0)]
    for op, (begin, _) in zip(reversed(ops), reversed(times), strict=True):
        marks.append(begin if op["stream"] == "main" else marks[-1])
    return marks[::-1]


def _tracks(doc: Document) -> dict[str, int]:
    streams = ["main", *(op["stream"] for op in doc["ops"])]
    return {stream: number for number, stream in enumerate(dict.fromkeys(streams), start=1)}


def _metadata(doc: Document) -> list[_Event]:
    name = f"{doc['model']}, {doc['phase']}, {sizes_text(doc)} on {doc['device']}"
    events = [{"ph": "M", "pid": _PID, "tid": 0, "name": "process_name", "args": {"name": name}}]
    for stream, tid in _tracks(doc).items():
        common = {"ph": "M", "pid": _PID, "tid": tid}
        events.append({**common, "name": "thread_name", "args": {"name": f"stream {stream}"}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return events


def _slices(doc: Document, times: Sequence[tuple[float, float]], marks: Sequence[float]) -> list[_Event]:
    tracks = _tracks(doc)
    events = []
    # Parents come before their children in time order only by length; equal lengths keep this order, outermost first.
    for region in sorted(doc["regions"], key=lambda region: (region["start"], -region["end"])):
        begin, end = marks[region["start"]], marks[region["end"]]
        args = {key: region[key] for key in ("knob", "dim", "extent", "rows", "count")}
        name = f"{region['name']} x {region['count']}"
        events.append(_slice(name, "region", tracks["main"], begin, end - begin, args))
    for op, (begin, end) in zip(doc["ops"], times, strict=True):
        args = {"op": op["index"], "kernel": op["kernel"], "flops": op["flops"], "bytes": op["bytes"]}
        args["reads"] = [doc["buffers"][buffer_id]["name"] for buffer_id in op["reads"]]
        args["writes"] = [doc["buffers"][buffer_id]["name"] for buffer_id in op["writes"]]
        events.append(_slice(op["name"], op["kernel"], tracks[op["stream"]], begin, end - begin, args))
    return events


def _slice(name: str, category: str, tid: int, ts: float, dur: float, args: _Event) -> _Event:
    return {"ph": "X", "pid": _PID, "tid": tid, "name": name, "cat": category, "ts": ts, "dur": dur, "args": args}


def _counters(doc: Document, marks: Sequence[float]) -> list[_Event]:
    """One counter for the workspace and one per category, with an event at each change of value."""
    profile = live_profile(doc, _POOLS)
    workspace = live_profile(doc)
    series = {"live workspace": workspace.total_bytes}
    series |= {f"live {name}": profile.live_bytes[name] for name in CATEGORIES if name in profile.live_bytes}
    events = []
    for name, values in series.items():
        last: int | None = None
        for index, value in enumerate((*values, 0)):
            if value != last:
                events.append({
                    "ph": "C", "pid": _PID, "tid": 0, "name": name, "ts": marks[index], "args": {"bytes": value},
                })  # fmt: skip
            last = value
    return events


def _peak(doc: Document, times: Sequence[tuple[float, float]]) -> list[_Event]:
    profile: LiveProfile = live_profile(doc)
    if not profile.num_ops:
        return []
    op = doc["ops"][profile.peak_index]
    args: _Event = {"op": op["name"], "live_bytes": profile.peak_bytes, "placed_bytes": doc["peak_bytes"]}
    args |= {buffer.name: format_bytes(buffer.size_bytes) for buffer in largest_live(doc)}
    name = f"peak {format_bytes(profile.peak_bytes)}"
    event = {"ph": "i", "pid": _PID, "tid": _tracks(doc)[op["stream"]], "name": name, "s": "g", "args": args}
    return [{**event, "ts": times[profile.peak_index][0]}]
