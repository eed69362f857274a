"""The viz room: what it draws and writes agrees with the plan document, byte for byte."""

from __future__ import annotations

import copy
import doctest
import errno
import importlib
import json
import os
import pickle
import pickletools
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mosaic import viz
from mosaic.errors import MissingExtra, PlanFormatError, UnknownName, UsageError
from mosaic.files import write_atomic
from mosaic.units import GIB, format_bytes
from mosaic.viz.profile import peak_index, root_categories

Doc = dict[str, Any]


class Builder:
    """Writes a plan document by hand: ops in order, lifetimes from accesses, offsets by first fit."""

    def __init__(self, tokens: int, rows: int | None) -> None:
        self.tokens, self.rows = tokens, rows
        self.ops: list[Doc] = []
        self.buffers: list[Doc] = []
        self.regions: list[Doc] = []
        self.region: str | None = None

    def buffer(self, name: str, size: int, kind: str = "transient", **fields: Any) -> int:
        pool = {"weight": "weights", "state": f"state/{name}"}.get(kind, "workspace")
        self.buffers.append(
            {
                "id": len(self.buffers),
                "name": name,
                "kind": kind,
                "pool": pool,
                "offset": 0,
                "size": -(-size // 512) * 512,
                "start": -1,
                "end": -1,
                "gaps": [],
                "alias_of": None,
                "alias_offset": 0,
                "dtype": "bfloat16",
                "shape": [size // 2],
                "alignment": 512,
                "region": self.region,
                "tensor": name if kind == "weight" else None,
                "rotate": 1,
            }
            | fields
        )
        return len(self.buffers) - 1

    def op(self, name: str, kernel: str, reads: dict[str, int], writes: dict[str, int]) -> None:
        index = len(self.ops)
        in_place = kernel in ("rotary", "linear_add", "silu_mul")
        self.ops.append(
            {
                "index": index,
                "name": name,
                "kernel": kernel,
                "stream": "main",
                "region": self.region,
                "reads": [*reads.values(), *(writes.values() if in_place else ())],
                "writes": list(writes.values()),
                "flops": 1000 * index,
                "bytes": 10 * index,
                "operands": {**reads, **writes},
                "attrs": {},
                "inplace": [],
                "slices": [],
            }
        )
        for buffer_id in (*reads.values(), *writes.values()):
            root = self.buffers[buffer_id]
            for buffer in (root, self.buffers[root["alias_of"]] if root["alias_of"] is not None else root):
                buffer["start"] = index if buffer["start"] < 0 else buffer["start"]
                buffer["end"] = index + 1

    def chunk(self, name: str, first: int, dim: str, extent: int, knob: str) -> None:
        """Close a region that began at op `first`, and stretch what crosses its border."""
        end, rows = len(self.ops), self.rows or extent
        self.regions.append(
            {"name": name, "knob": knob, "dim": dim, "extent": extent, "rows": rows, "count": -(-extent // rows)}
            | {"start": first, "end": end, "parent": None}
        )
        for op in self.ops[first:]:
            for buffer_id in op["reads"] + op["writes"]:
                buffer = self.buffers[buffer_id]
                if buffer["region"] != name:
                    buffer["end"] = max(buffer["end"], end)
                    if buffer_id in op["writes"]:
                        buffer["start"] = min(buffer["start"], first)

    def document(self, **fields: Any) -> Doc:
        num_ops = len(self.ops)
        capacity = dict.fromkeys(("workspace", "weights", *(b["pool"] for b in self.buffers)), 0)
        for buffer in self.buffers:
            if buffer["kind"] in ("weight", "state", "input"):
                buffer["start"] = 0
            if buffer["kind"] in ("weight", "state", "output"):
                buffer["end"] = num_ops
        for pool in capacity:
            placed: list[Doc] = []
            for buffer in (b for b in self.buffers if b["pool"] == pool and b["alias_of"] is None):
                for other in sorted(placed, key=lambda b: b["offset"]):
                    alive = other["start"] < buffer["end"] and buffer["start"] < other["end"]
                    if alive and buffer["offset"] + buffer["size"] > other["offset"]:
                        buffer["offset"] = max(buffer["offset"], other["offset"] + other["size"])
                placed.append(buffer)
                capacity[pool] = max(capacity[pool], buffer["offset"] + buffer["size"])
        roots = [b for b in self.buffers if b["pool"] == "workspace" and b["alias_of"] is None]
        bound = max(sum(b["size"] for b in roots if b["start"] <= t < b["end"]) for t in range(num_ops))
        for buffer in self.buffers:
            if buffer["alias_of"] is not None:
                buffer["offset"] = self.buffers[buffer["alias_of"]]["offset"] + buffer["alias_offset"]
        states = sum(size for pool, size in capacity.items() if pool.startswith("state/"))
        components = {"context": 600 << 20, "library": 64 << 20, "state": states}
        components |= {pool: capacity[pool] for pool in ("workspace", "weights")}
        return {
            "schema": "mosaic.plan/1",
            "mosaic_version": "0.1.0",
            "model": "synthetic-8b",
            "phase": "full_step",
            "dtype": "bfloat16",
            "dims": {"tokens": self.tokens, "masked": self.tokens // 2, "seqs": 1, "span": self.tokens},
            "device": "rtx-4090",
            "estimated": True,
            "page_bytes": 2 << 20,
            "mesh": {"size": 1, "axes": {"tensor": 1}},
            "pools": [
                {"name": name, "device": "cuda:0", "capacity": -(-size // (2 << 20)) * (2 << 20)}
                for name, size in capacity.items()
            ],
            "regions": self.regions,
            "barriers": [],
            "edges": [],
            "budget_bytes": 24 << 30,
            "config": {"ffn": self.rows, "head": self.rows, "head_kernel": "row_stats"},
            "fits": sum(components.values()) <= 24 << 30,
            "components": components,
            "total_bytes": sum(components.values()),
            "peak_bytes": capacity["workspace"],
            "lower_bound_bytes": bound,
            "optimal": bound == capacity["workspace"],
            "max_ctx_tokens": 277_000,
            "predicted_step_ms": 21_000.5,
            "formula": [
                {"expr": "32768*tokens", "at": "layers.0/attn/attention"},
                {"expr": "8192*tokens + 57344*ffn_rows", "at": "layers.0/ffn/up"},
            ],
            "trace": [
                {
                    "config": {"ffn": None},
                    "bottleneck": "57344*tokens",
                    "at": "layers.0/ffn/up",
                    "peak_bytes": 8 << 30,
                    "total_bytes": 24 << 30,
                    "predicted_ms": 21_000.0,
                    "move": "start",
                }
            ],
            "solver": "first-fit",
            "ops": self.ops,
            "buffers": self.buffers,
        } | fields


def transformer(layers: int = 32, tokens: int = 131_072, rows: int | None = 2_048, **fields: Any) -> Doc:
    """A plan of the shape of LLaDA-8B: `layers` layers, chunked FFN and head."""
    d, f, v, masked = 4096, 12288, 126464, tokens // 2
    b = Builder(tokens, rows)
    ids = b.buffer("ids", 8 * tokens, "input")
    selected = b.buffer("rows", 8 * masked, "input")
    table = b.buffer("embed/table", 2 * v * d, "weight")
    hidden = b.buffer("hidden", 2 * tokens * d)
    b.op("embed", "embedding", {"ids": ids, "table": table}, {"y": hidden})
    for i in range(layers):
        p = f"layers.{i}"
        w = {n: b.buffer(f"{p}/{n}", 2 * d * d, "weight") for n in ("wq", "wk", "wv", "wo")}
        normed = b.buffer(f"{p}/attn/normed", 2 * tokens * d)
        b.op(f"{p}/attn/norm", "rms_norm", {"x": hidden}, {"y": normed})
        heads = {n: b.buffer(f"{p}/attn/{n}", 2 * tokens * d) for n in "vkq"}
        for n in "vkq":
            b.op(f"{p}/attn/{n}_proj", "linear", {"x": normed, "weight": w[f"w{n}"]}, {"y": heads[n]})
        for n in "qk":
            b.op(f"{p}/attn/rotary_{n}", "rotary", {}, {"x": heads[n]})
        out = b.buffer(f"{p}/attn/out", 2 * tokens * d, alias_of=heads["q"])
        b.op(f"{p}/attn/attention", "attention", heads, {"y": out})
        b.op(f"{p}/attn/o_proj", "linear_add", {"x": out, "weight": w["wo"]}, {"y": hidden})
        w = {n: b.buffer(f"{p}/{n}", 2 * d * f, "weight") for n in ("gate", "up", "down")}
        first, b.region = len(b.ops), f"{p}/ffn"
        chunk = min(rows or tokens, tokens)
        normed = b.buffer(f"{p}/ffn/normed", 2 * chunk * d)
        gate, up = (b.buffer(f"{p}/ffn/{n}", 2 * chunk * f) for n in ("gate", "up"))
        scratch = b.buffer(f"{p}/ffn/scratch", 4096, "scratch")
        b.op(f"{p}/ffn/norm", "rms_norm", {"x": hidden}, {"y": normed})
        b.op(f"{p}/ffn/gate", "linear", {"x": normed, "weight": w["gate"]}, {"y": gate, "scratch": scratch})
        b.op(f"{p}/ffn/up", "linear", {"x": normed, "weight": w["up"]}, {"y": up})
        b.op(f"{p}/ffn/act", "silu_mul", {"up": up}, {"gate": gate})
        b.op(f"{p}/ffn/down", "linear_add", {"x": gate, "weight": w["down"]}, {"y": hidden})
        b.chunk(f"{p}/ffn", first, "tokens", tokens, "ffn")
        b.region = None
    head = b.buffer("head/weight", 2 * v * d, "weight")
    stats = {n: b.buffer(f"head/{n}", (8 if n == "token" else 4) * masked, "output") for n in ("token", "maximum")}
    first, b.region = len(b.ops), "head"
    chunk = min(rows or masked, masked)
    gathered, logits = b.buffer("head/rows", 2 * chunk * d), b.buffer("head/logits", 2 * chunk * v)
    b.op("head/gather", "gather_rows", {"x": hidden, "rows": selected}, {"y": gathered})
    b.op("head/norm", "rms_norm", {"x": gathered}, {"y": gathered})
    b.op("head/unembed", "linear", {"x": gathered, "weight": head}, {"y": logits})
    b.op("head/stats", "row_stats", {"logits": logits}, stats)
    b.chunk("head", first, "masked", masked, "head")
    return b.document(**fields)


@pytest.fixture(scope="module")
def doc() -> Doc:
    return transformer()


@pytest.fixture(scope="module")
def small() -> Doc:
    return transformer(layers=2, tokens=4096, rows=512)


def held(buffer: Doc, index: int) -> bool:
    """Whether a buffer holds a value at an op, by the definition and not by the code under test."""
    return buffer["start"] <= index < buffer["end"] and not any(a <= index < b for a, b in buffer["gaps"])


def workspace(doc: Doc) -> list[Doc]:
    return [b for b in doc["buffers"] if b["pool"] == "workspace" and b["alias_of"] is None]


def with_gaps(doc: Doc) -> Doc:
    """A copy in which one buffer holds nothing for two ops, and another lies in its place meanwhile."""
    doc = copy.deepcopy(doc)
    hidden = next(b for b in doc["buffers"] if b["name"] == "hidden")
    hidden["gaps"] = [[6, 8]]
    guest = copy.deepcopy(hidden) | {"id": len(doc["buffers"]), "name": "guest", "start": 6, "end": 8, "gaps": []}
    doc["buffers"].append(guest)
    return doc


def hostile(doc: Doc) -> Doc:
    """A copy whose names try to leave whatever they are put into."""
    doc = copy.deepcopy(doc)
    evil = """</script><script>alert("x")</script>&'"<!--\u2028"""
    doc["model"] = doc["device"] = doc["solver"] = evil
    for item in (*doc["ops"], *doc["buffers"], *doc["regions"], *doc["formula"]):
        for key in ("name", "kernel", "expr", "at", "knob"):
            if key in item:
                item[key] = f"{evil}{item[key]}"
    return doc


# --- profile ---


def test_profile_is_the_definition_at_every_op(small: Doc) -> None:
    for plan in (small, with_gaps(small)):
        profile = viz.live_profile(plan)
        expected = [sum(b["size"] for b in workspace(plan) if held(b, i)) for i in range(len(plan["ops"]))]
        assert list(profile.total_bytes) == expected
        assert [sum(column) for column in zip(*profile.live_bytes.values(), strict=True)] == expected
        assert profile.peak_bytes == max(expected) == plan["lower_bound_bytes"]
        assert profile.peak_index == expected.index(max(expected))
        assert peak_index(plan) == profile.peak_index
        assert profile.peak_to_average == pytest.approx(max(expected) * len(expected) / sum(expected))


def test_profile_of_every_pool_adds_weights(small: Doc) -> None:
    profile = viz.live_profile(small, ("workspace", "weights"))
    weights = sum(b["size"] for b in small["buffers"] if b["kind"] == "weight")
    assert set(profile.live_bytes["weights"]) == {weights}
    assert profile.peak_bytes == small["lower_bound_bytes"] + weights


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("ids", "inputs"),
        ("hidden", "hidden"),
        ("layers.0/attn/q", "attention"),
        ("layers.0/attn/normed", "attention"),
        ("layers.1/ffn/gate", "ffn"),
        ("layers.1/ffn/normed", "ffn"),
        ("layers.1/ffn/scratch", "scratch"),
        ("head/rows", "logits and head"),
        ("head/logits", "logits and head"),
        ("head/token", "statistics"),
        ("layers.0/wq", "weights"),
    ],
)
def test_categories(small: Doc, name: str, category: str) -> None:
    buffer = next(b for b in small["buffers"] if b["name"] == name)
    assert root_categories(small)[buffer["id"]] == category


def test_words_of_a_name_decide_where_operands_do_not(small: Doc) -> None:
    plan = copy.deepcopy(small)
    for buffer in plan["buffers"]:
        buffer["name"] = buffer["name"].replace("attn/normed", "attention_in").replace("ffn/normed", "ffn_in")
    for op in plan["ops"]:
        op["name"] = "op"
    found = {plan["buffers"][key]["name"]: category for key, category in root_categories(plan).items()}
    assert (found["layers.0/attention_in"], found["layers.0/ffn_in"]) == ("attention", "ffn")


def test_a_streamed_weight_counts_as_weights(small: Doc) -> None:
    plan = copy.deepcopy(small)
    weight = next(b for b in plan["buffers"] if b["name"] == "layers.1/gate")
    weight |= {"kind": "transient", "pool": "workspace"}
    assert root_categories(plan)[weight["id"]] == "weights"


def test_largest_live_are_the_peak(small: Doc) -> None:
    profile = viz.live_profile(small)
    everything = viz.largest_live(small, 10_000)
    assert sum(buffer.size_bytes for buffer in everything) == profile.peak_bytes
    sizes = [buffer.size_bytes for buffer in everything]
    assert sizes == sorted(sizes, reverse=True)
    assert viz.largest_live(small, 2) == everything[:2]
    assert {b.name for b in viz.largest_live(small, at=0)} == {b["name"] for b in workspace(small) if held(b, 0)}


def test_an_unknown_schema_is_refused(small: Doc) -> None:
    wrong = small | {"schema": "mosaic.plan/9"}
    renderers: list[Callable[[Doc], object]] = [viz.live_profile, viz.html_report, viz.trace_json, viz.snapshot_pickle]
    for render in [*renderers, viz.text_timeline]:
        with pytest.raises(PlanFormatError, match=r"mosaic\.plan/9"):
            render(wrong)


# --- charts ---


def image_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_plan_png_is_a_picture_and_deterministic(doc: Doc) -> None:
    pytest.importorskip("matplotlib")
    png = viz.plan_png(doc)
    width, height = image_size(png)
    assert width > 1000 and height > 600 and len(png) > 20_000
    assert png == viz.plan_png(doc)


def test_timeline_marks_the_peak_and_the_bound(small: Doc) -> None:
    pytest.importorskip("matplotlib")
    figure = viz.plan_figure(small)
    axes = figure.axes[0]
    heights = [list(line.get_ydata()) for line in axes.lines]
    assert [small["lower_bound_bytes"] / GIB] in heights  # the marker
    assert [small["lower_bound_bytes"] / GIB] * 2 in heights  # the line
    top = max(path.vertices[:, 1].max() for band in axes.collections for path in band.get_paths())
    assert top == pytest.approx(small["lower_bound_bytes"] / GIB)
    text = " ".join(t.get_text() for t in (*axes.texts, *figure.texts))
    assert format_bytes(small["lower_bound_bytes"]) in text


def test_map_draws_each_held_interval_once(small: Doc) -> None:
    pytest.importorskip("matplotlib")
    plan = with_gaps(small)
    axes = viz.plan_figure(plan).axes[1]
    drawn = sorted(tuple(path.get_extents().bounds) for group in axes.collections for path in group.get_paths())
    expected = []
    for b in workspace(plan):
        edges = [b["start"], *(edge for gap in b["gaps"] for edge in gap), b["end"]]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            expected.append((start, b["offset"] / GIB, end - start, b["size"] / GIB))
    assert len(drawn) == len(expected)
    for got, wanted in zip(drawn, sorted(expected), strict=True):
        assert got == pytest.approx(wanted)


def test_before_and_after_share_a_scale(small: Doc) -> None:
    pytest.importorskip("matplotlib")
    unchunked = transformer(layers=2, tokens=4096, rows=None)
    figure = viz.before_after_figure(unchunked, small)
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim()[1] > unchunked["lower_bound_bytes"] / GIB
    assert "falls to" in figure.texts[0].get_text()
    assert "grows" in viz.before_after_figure(small, unchunked).texts[0].get_text()


def test_no_matplotlib_is_one_clear_sentence(small: Doc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingExtra, match=r"pip install 'mosaic-dllm\[viz\]'"):
        viz.plan_png(small)
    assert viz.html_report(small)


def test_importing_viz_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, mosaic.viz; print(sorted({'torch', 'triton', 'matplotlib', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- report ---

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Checks that every element closes, and collects what the page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)


def test_report_says_what_the_plan_says(doc: Doc) -> None:
    html = viz.html_report(doc)
    page = Page(html)
    data = json.loads(page.scripts[0])
    assert data["peak"] == {"bytes": doc["lower_bound_bytes"], "index": viz.live_profile(doc).peak_index}
    assert (data["placed"], data["bound"]) == (doc["peak_bytes"], doc["lower_bound_bytes"])
    assert len(data["buffers"]) == len(workspace(doc)) and len(data["ops"]) == len(doc["ops"])
    assert [b["held"] for b in data["buffers"]] == [[[b["start"], b["end"]]] for b in workspace(doc)]
    text = " ".join(page.text)
    for size in (doc["total_bytes"], doc["budget_bytes"], doc["peak_bytes"], *doc["components"].values()):
        assert format_bytes(size) in text
    assert "Fits" in text and "estimated" in text and doc["formula"][1]["expr"] in text
    assert len(html.encode()) < 1_000_000


def test_report_that_does_not_fit_says_by_how_much(small: Doc) -> None:
    tight = small | {"fits": False, "budget_bytes": small["total_bytes"] - (3 << 30)}
    assert "Does not fit</span>: 3.00 GiB more than the budget" in viz.html_report(tight)


def test_report_is_self_contained(small: Doc) -> None:
    html = viz.html_report(small)
    page = Page(html)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|\bfetch\(|XMLHttp|import\(", html.lower())
    assert not [item for item in page.attributes if item[1] in ("src", "href")]
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'") in (
        page.attributes
    )
    assert "prefers-color-scheme: dark" in html and "innerHTML" not in html


def test_report_escapes_names(small: Doc) -> None:
    page = Page(viz.html_report(hostile(small)))
    assert len(page.scripts) == 2
    assert json.loads(page.scripts[0])["ops"][0][0] == hostile(small)["ops"][0]["name"]
    ours = [script for script in page.scripts if "alert" in script]
    assert len(ours) == 1 and "<" not in ours[0]


def test_report_ids_are_unique_and_the_script_finds_them(small: Doc) -> None:
    page = Page(viz.html_report(small))
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("(\w+)"\)', page.scripts[1])) <= set(ids)


# --- perfetto ---


def test_trace_events_are_sorted_and_complete(doc: Doc) -> None:
    trace = json.loads(viz.trace_json(doc))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(doc["ops"]) + len(doc["regions"])
    assert all(event["dur"] > 0 for event in slices)
    top = max(e["args"]["bytes"] for e in events if e["name"] == "live workspace")
    assert top == doc["lower_bound_bytes"]
    (peak,) = [event for event in events if event["ph"] == "i"]
    assert peak["ts"] == viz.live_profile(doc).peak_index and peak["args"]["placed_bytes"] == doc["peak_bytes"]


def assert_nested(slices: list[Doc]) -> None:
    """On one track a slice lies inside another or beside it."""
    stack: list[float] = []
    for event in slices:
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1]
        stack.append(event["ts"] + event["dur"])


def test_trace_counters_follow_the_profile_and_slices_nest(small: Doc) -> None:
    events = viz.trace_events(small)
    profile = viz.live_profile(small)
    for category, values in profile.live_bytes.items():
        changes = {e["ts"]: e["args"]["bytes"] for e in events if e["name"] == f"live {category}"}
        now, rebuilt = 0, []
        for index in range(profile.num_ops):
            now = changes.get(index, now)
            rebuilt.append(now)
        assert rebuilt == list(values)
    assert_nested([event for event in events if event["ph"] == "X"])


def test_trace_with_durations_runs_streams_side_by_side(small: Doc) -> None:
    plan = copy.deepcopy(small)
    for op in plan["ops"]:
        op["predicted_us"] = 10
    plan["ops"][3]["stream"] = "copy"
    plan["edges"] = [{"kind": "fork", "from": 1, "to": 3}, {"kind": "wait", "from": 3, "to": 6}]
    slices = [event for event in viz.trace_events(plan) if event["ph"] == "X"]
    begin = {event["args"]["op"]: event["ts"] for event in slices if "op" in event["args"]}
    assert (begin[2], begin[3], begin[4], begin[6]) == (20, 20, 30, 50)
    for track in {event["tid"] for event in slices}:
        assert_nested([event for event in slices if event["tid"] == track])
    times = [event["ts"] for event in viz.trace_events(plan) if event["ph"] != "M"]
    assert times == sorted(times)


# --- snapshot ---


def replay(snapshot: Doc) -> tuple[int, dict[int, int]]:
    """Run the trace as the viewer does; return the most bytes live at once and what is live at the end."""
    (trace,) = snapshot["device_traces"]
    live: dict[int, int] = {}
    highest = 0
    requested: tuple[int, int] | None = None
    for entry in trace:
        place = (entry["addr"], entry["size"])
        if entry["action"] == "alloc":
            for addr, size in live.items():
                assert entry["addr"] + entry["size"] <= addr or addr + size <= entry["addr"]
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_requested":
            assert live[entry["addr"]] == entry["size"]
            requested = place
        elif entry["action"] == "free_completed":
            assert requested == place
            del live[entry["addr"]]
        highest = max(highest, sum(live.values()))
    return highest, live


def test_snapshot_replays_to_the_peak_without_overlap(doc: Doc, small: Doc) -> None:
    for plan in (doc, small):
        snapshot = pickle.loads(viz.snapshot_pickle(plan))
        highest, live = replay(snapshot)
        assert highest == plan["lower_bound_bytes"]
        (segment,) = snapshot["segments"]
        active = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
        assert live == active
        assert sum(live.values()) == segment["allocated_size"] == segment["active_size"]
        ends = [entry["addr"] + entry["size"] - segment["address"] for entry in snapshot["device_traces"][0][1:]]
        assert max(ends) == plan["peak_bytes"]


def test_snapshot_gives_back_what_holds_no_value(small: Doc) -> None:
    highest, live = replay(viz.memory_snapshot(with_gaps(small)))
    assert highest == small["lower_bound_bytes"] and live


def test_snapshot_blocks_tile_their_segments(small: Doc) -> None:
    snapshot = viz.memory_snapshot(small, pools=("workspace", "weights", "state"))
    assert [segment["total_size"] for segment in snapshot["segments"]] == [p["capacity"] for p in small["pools"]]
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at and block["size"] > 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


def test_snapshot_names_ops_and_buffers(small: Doc) -> None:
    trace = viz.memory_snapshot(small)["device_traces"][0]
    (entry,) = [e for e in trace if e["action"] == "alloc" and e["user_metadata"] == "layers.1/attn/q"]
    op = next(op for op in small["ops"] if op["name"] == "layers.1/attn/q_proj")
    assert entry["frames"] == [{"name": op["name"], "filename": small["model"], "line": op["index"]}]
    assert (entry["category"], entry["time_us"]) == ("attention", op["index"])


VIEWER_OPCODES = """APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST
    EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
    SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3"""


def test_snapshot_is_plain_types_in_opcodes_the_viewer_knows(small: Doc) -> None:
    data = viz.snapshot_pickle(hostile(small))
    known = re.findall(r"\w+", VIEWER_OPCODES)
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= set(known)
    assert data[:2] == b"\x80\x04"

    def walk(value: object) -> None:
        assert type(value) in (dict, list, tuple, str, int, bool)
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list | tuple):
            for item in value:
                walk(item)

    walk(pickle.loads(data))


# --- text ---


def test_sparkline_keeps_peaks_and_width() -> None:
    (row,) = viz.sparkline([1] * 500 + [800] + [1] * 500, 40)
    assert len(row) == 40 and row.count("█") == 1 and " " not in row
    assert viz.sparkline([0, 8], 10, height=2) == [" █", " █"]
    assert viz.sparkline([], 10) == [""] and viz.sparkline([0, 0], 10) == ["  "]


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_text_timeline_fits_its_width(doc: Doc, width: int) -> None:
    text = viz.text_timeline(doc, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert format_bytes(doc["lower_bound_bytes"]) in text
    assert viz.text_timeline(doc, width, ascii_only=True).isascii()


def test_text_timeline_points_at_the_peak() -> None:
    plan = transformer(layers=2, tokens=4096, rows=None)
    lines = viz.text_timeline(plan).splitlines()
    pointer = next(line for line in lines if "▲" in line).index("▲")
    assert lines[1][pointer] == "█" and "peak at head/unembed" in "\n".join(lines)


def test_text_timeline_too_narrow(small: Doc) -> None:
    with pytest.raises(UsageError, match="at least 24"):
        viz.text_timeline(small, 10)


# --- files ---


def test_a_plan_without_ops_is_drawn_as_empty(small: Doc) -> None:
    nothing = {"ops": [], "buffers": [], "regions": [], "peak_bytes": 0, "lower_bound_bytes": 0, "optimal": True}
    empty = small | nothing
    Page(viz.html_report(empty))
    assert "no ops" in viz.text_timeline(empty)
    assert len(viz.memory_snapshot(empty)["device_traces"][0]) == 1
    assert {event["ph"] for event in viz.trace_events(empty)} <= {"M", "C"}
    pytest.importorskip("matplotlib")
    image_size(viz.plan_png(empty))


@pytest.mark.parametrize("ending", [".html", ".png", ".perfetto.json", ".pickle", ".txt"])
def test_save_writes_by_ending(small: Doc, tmp_path: Path, ending: str) -> None:
    if ending == ".png":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{ending}"
    viz.save(small, path)
    content = viz.FORMATS[ending](small)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_save_refuses_an_unknown_ending(small: Doc, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"Known: \.html"):
        viz.save(small, tmp_path / "plan.docx")
    assert not list(tmp_path.iterdir())


def test_write_atomic_replaces_whole_files_and_follows_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    write_atomic(link, "new \u00fc\n")
    assert real.read_bytes() == "new \u00fc\n".encode() and link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link.txt", "real.txt"]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.html"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_write_atomic_says_why_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        write_atomic(tmp_path / "missing" / "plan.html", "x")
    with pytest.raises(UsageError, match="Is a directory"):
        write_atomic(tmp_path, "x")
    assert not list(tmp_path.iterdir())


def test_examples_in_docstrings() -> None:
    for name in ("mosaic.files", *(f"mosaic.viz.{m}" for m in ("profile", "palette", "text", "snapshot", "report"))):
        assert doctest.testmod(importlib.import_module(name)).failed == 0
