"""The viz room: what it draws and writes agrees with the plan document, byte for byte."""

from __future__ import annotations

from typing import Any

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
        pool = {"weight": "weights", "state": "state"}.get(kind, "workspace")
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
        capacity = dict.fromkeys(("workspace", "weights", "state"), 0)
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
        components = {"context": 600 << 20, "library": 64 << 20} | capacity
        return {
            "schema": "mosaic.plan/1",
            "mosaic_version": "0.1.0",
            "model": "synthetic-8b",
            "phase": "full_step",
            "dtype": "bfloat16",
            "dims": {"tokens": self.tokens, "masked": self.tokens // 2, "seqs": 1, "pairs": self.tokens**2},
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
