"""Attention over kept keys alone: one layer of blocks at the end of prefixes, and of a prefill, against its bound.

    python -m benchmarks.kv_attention --device h200

writes `kv-attention-<device>.json`. Launches are captured, over layers in turn that together exceed the card's cache. The bound is
the larger of reading keys and values once at the profile's bandwidth and of the products at 620 TFLOP/s, what cuDNN reaches on an
H200; a launch beside it would be of no use. Where FlashInfer is installed, its kernels are timed in the same way, over keys that
lie as it prefers.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.cases import options, tag_of
from benchmarks.record import environment, table, write
from mosaic.calibration.measure import Bench
from mosaic.devices import Device, load_device
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator
from mosaic.registrar.operators.kv_attention import kv_parts

__all__ = ["CASES", "HEADER", "Case", "bound_s", "main", "measured", "rows_of"]

HEADER = (
    "query heads on KV heads", "requests", "queries of each", "keys of each", "us", "bound, us", "of the bound", "FlashInfer, us",
)  # fmt: skip
RATE: Final = 620e12
TURNS_BYTES: Final = 1 << 29
"""Least bytes of the layers that take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that have `keys` keys each, and attend with `queries` rows: a block, or a prefill (`blocks` of positions)."""

    keys: int
    queries: int = 32
    requests: int = 1
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    blocks: int = 0


CASES: Final = (
    *(Case(keys=keys) for keys in (288, 1056, 4128, 8224, 32_800, 131_104)),
    Case(keys=32_800, queries=64),
    Case(keys=131_104, queries=64),
    Case(keys=131_104, heads=28, kv_heads=4),
    Case(keys=131_104, heads=32, kv_heads=4),
    Case(keys=4_096, requests=64),
    Case(keys=32_800, requests=6),
    Case(keys=131_104, requests=6),
    Case(keys=32_768, queries=8_192, blocks=32),
)


def bound_s(case: Case, bandwidth: float) -> float:
    """Seconds of reading all keys and values once, or of the products."""
    seen = case.requests * case.keys
    pairs = case.queries * (seen - case.requests * (case.queries - case.blocks) / 2 if case.blocks else seen)
    return max(4 * seen * case.kv_heads * case.size / bandwidth, 4 * pairs * case.heads * case.size / RATE)


def measured(case: Case, bench: Bench, layers: int | None = None) -> float:
    """Seconds of a launch, its second one included."""
    bytes_of_layer = 4 * case.keys * case.requests * case.kv_heads * case.size
    turns = layers or max(2, math.ceil(TURNS_BYTES / bytes_of_layer))
    where, dtype, width = bench.device, torch.bfloat16, case.kv_heads * case.size
    rows, tokens = case.keys * case.requests, case.queries * case.requests

    def whole(values: Sequence[int], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=where)

    everyone = range(case.requests)
    operands: dict[str, Any] = {
        "q": torch.randn(tokens, case.heads * case.size, dtype=dtype, device=where),
        "kv": torch.randn(rows, turns * 2 * width, dtype=dtype, device=where),
        "extents": torch.tensor([[case.keys * n, case.keys, 0, 0] for n in everyone], device=where),
        "cu_extents": whole([*everyone, case.requests]),
        "cu_seqlens": whole([case.queries * n for n in (*everyone, case.requests)]),
        "seen": whole([case.keys] * case.requests),
        "positions": whole([*range(case.keys - case.queries, case.keys)] * case.requests),
    }
    attrs = {"kv_heads": case.kv_heads, "head_size": case.size, "scale": case.size**-0.5, "block": case.blocks}
    parts = kv_parts([case.queries] * case.requests, [case.keys] * case.requests)
    specs = {name: Spec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in operands.items()}
    needed = operator("kv_attention").scratch_bytes(bench.backend, specs, {**attrs, "parts": parts})
    scratch = torch.empty(int(needed), dtype=torch.uint8, device=where)
    y, launch = torch.empty_like(operands["q"]), load("kv_attention", bench.backend).launch

    def of_layer(layer: int) -> Any:
        return lambda: launch(**operands, **attrs, layer=layer, y=y, scratch=scratch)

    return bench.timer.captured([of_layer(layer) for layer in range(turns)])


def flashinfer_s(case: Case, bench: Bench) -> float | None:
    """Seconds of a launch of FlashInfer's kernels for the same rows, all of which see all keys; None where there are none."""
    if case.blocks or importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    turns = max(2, math.ceil(TURNS_BYTES / (4 * case.keys * case.requests * case.kv_heads * case.size)))
    shape, where = (
        (case.keys * case.requests, case.kv_heads, case.size),
        {"dtype": torch.bfloat16, "device": bench.device},
    )
    layers = [(torch.randn(shape, **where), torch.randn(shape, **where)) for _ in range(turns)]
    q = torch.randn(case.queries * case.requests, case.heads, case.size, **where)
    begins = torch.arange(case.requests + 1, dtype=torch.int32, device=bench.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(1 << 28, dtype=torch.uint8, device=bench.device), "NHD", backend="fa2"
    )
    wrapper.plan(
        begins * case.queries, begins * case.keys, case.heads, case.kv_heads, case.size, causal=False,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    y = torch.empty_like(q)

    def of_layer(k: torch.Tensor, v: torch.Tensor) -> Any:
        return lambda: wrapper.run(q, k, v, out=y)

    return bench.timer.captured([of_layer(*layer) for layer in layers])


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a case."""
    for point in result["points"]:
        seconds, bound = point["seconds"], point["bound_s"]
        yield [
            f"{point['heads']} on {point['kv_heads']}", f"{point['requests']}", f"{point['queries']:,}", f"{point['keys']:,}",
            f"{1e6 * seconds:,.1f}", f"{1e6 * bound:,.1f}", f"{seconds / bound:.2f}",
            f"{1e6 * point['flashinfer_s']:,.1f}" if point.get("flashinfer_s") else "",
        ]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Measure all cases, and record the figures."""
    from mosaic.calibration.cuda_card import cuda_bench

    asked = options(__doc__, models="*").parse_args(arguments)
    device: Device = load_device(asked.device)
    bench = cuda_bench(target_s=0.02)
    points = []
    for case in CASES:
        seconds = measured(case, bench)
        point = {
            name: getattr(case, name) for name in ("keys", "queries", "requests", "heads", "kv_heads", "size", "blocks")
        }
        other = flashinfer_s(case, bench)
        points.append(point | {"seconds": seconds, "bound_s": bound_s(case, device.bandwidth), "flashinfer_s": other})
        torch.cuda.empty_cache()
    result = {"environment": environment(), "card": bench.title, "points": points}
    write(f"kv-attention-{asked.device}{tag_of(asked)}", result)
    print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
