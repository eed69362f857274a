"""Attention over kept keys alone: one layer of blocks at the end of prefixes, and of a prefill, against its floor.

    python -m benchmarks.kv_attention --device h200

writes `kv-attention-<device>.json`. Launches are captured, over layers in turn that together exceed the card's cache, and timed in
two ways: sustained, for so long that the card's clock settles, as in a step; and in bursts of 20 after a rest. The floor is that of
`benchmarks.floor`. Where FlashInfer is installed, each of its backends is timed in the same way, over keys that lie as it prefers
and over those of Mosaic; the faster one of each is recorded. Every kernel's results are held against plain attention first.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from benchmarks.cases import Clock, device_of, options, tag_of
from benchmarks.flashinfer_steps import TOLERANCE, error_of, keys_of, pages_of
from benchmarks.floor import Best
from benchmarks.record import environment, table, write
from mosaic.calibration.measure import Bench, Call
from mosaic.devices import Device
from mosaic.errors import UsageError
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator
from mosaic.registrar.operators.kv_attention import kv_parts

__all__ = ["CASES", "HEADER", "Case", "card_burst_s", "floor_s", "main", "measured", "rows_of", "timings"]

HEADER = (
    "query heads on KV heads", "requests", "queries of each", "keys of each", "us", "in bursts", "floor, us", "of it",
    "FlashInfer, us", "in bursts", "by", "over Mosaic's keys, us", "in bursts", "by",
)  # fmt: skip
Burst: TypeAlias = Callable[[Sequence[Call]], float]
"""Seconds of a launch in bursts."""
METHOD: Final = (
    "sustained: the median replay of a captured turn of launches over layers that exceed the cache, after replays that let the "
    "clock settle; in bursts: the median of 7 captured runs of 20 launches, each after a rest of 50 ms"
)
TURNS_BYTES: Final = 1 << 29
"""Least bytes of the layers that take turns."""
BURST, BURSTS, REST_S = 20, 7, 0.05
BACKENDS: Final = ("fa2", "fa3")
OWN, MOSAICS = "own layout", "Mosaic's layout"
"""Whose keys FlashInfer reads."""
PAGE: Final = 32
CHECKED: Final = 64
"""Query rows of a request, at most, that are held against plain attention."""


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


def floor_s(case: Case, device: Device) -> float:
    """Seconds of reading all keys and values once, or of the products."""
    seen = case.requests * case.keys
    pairs = case.queries * (seen - case.requests * (case.queries - case.blocks) / 2 if case.blocks else seen)
    return Best.of(device).attention_s(
        pairs=pairs, keys=seen, heads=case.heads, kv_heads=case.kv_heads, size=case.size, item=2
    )


class Layers:
    """Queries of a case, and keys and values of the layers that take turns, as Mosaic stores them."""

    def __init__(self, case: Case, bench: Bench, layers: int | None = None) -> None:
        of_layer = 4 * case.keys * case.requests * case.kv_heads * case.size
        self.case, self.bench = case, bench
        self.count = layers or max(2, math.ceil(TURNS_BYTES / of_layer))
        where: dict[str, Any] = {"dtype": torch.bfloat16, "device": bench.device}
        self.q = torch.randn(case.queries * case.requests, case.heads * case.size, **where)
        self.kv = torch.randn(case.keys * case.requests, self.count * 2 * case.kv_heads * case.size, **where)

    def first(self, request: int) -> int:
        """Where a request's keys begin in the result of `views`."""
        return request * self.case.keys * 2 * self.count * self.case.kv_heads

    def views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [keys, K, H]."""
        return keys_of(self.kv, layer, rows=self.case.keys, heads=self.case.kv_heads, size=self.case.size)

    def of(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """The keys of one request."""
        mine = slice(self.first(request), self.first(request) + self.case.keys)
        k, v = self.views(layer)
        return k[mine], v[mine]

    def copied(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys of all requests side by side, in separate memory."""
        both = zip(*(self.of(layer, request) for request in range(self.case.requests)), strict=True)
        k, v = (torch.cat(parts) for parts in both)
        return k, v

    def error(self, launch: Call, layer: int, y: Tensor) -> float:
        """Run a launch over a layer; the largest difference from plain attention, relative to the largest result."""
        case = self.case
        y.zero_()
        launch()
        worst = 0.0
        rows = slice(None, None, -(-case.queries // CHECKED))
        for request in range(case.requests):
            mine = slice(request * case.queries, (request + 1) * case.queries)
            q, given = (tensor[mine].view(-1, case.heads, case.size)[rows] for tensor in (self.q, y))
            k, v = self.of(layer, request)
            if not case.blocks:
                worst = max(worst, error_of(q, k, v, given))
                continue
            for number, row in enumerate(range(0, case.queries, rows.step)):
                end = ((case.keys - case.queries + row) // case.blocks + 1) * case.blocks
                one = slice(number, number + 1)
                worst = max(worst, error_of(q[one], k[:end], v[:end], given[one]))
        return worst


def mosaic_launches(layers: Layers) -> tuple[list[Call], Tensor]:
    """One launch of Mosaic's kernel a layer, its second one included, and where they write."""
    case, bench = layers.case, layers.bench
    where = bench.device

    def whole(values: Sequence[int], kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=kind, device=where)

    everyone = range(case.requests)
    operands: dict[str, Any] = {
        "q": layers.q,
        "kv": layers.kv,
        "extents": torch.tensor([[case.keys * n, case.keys, 0, 0] for n in everyone], device=where),
        "cu_extents": whole([*everyone, case.requests]),
        "cu_seqlens": whole([case.queries * n for n in (*everyone, case.requests)]),
        "seen": whole([case.keys] * case.requests),
        "positions": whole([*range(case.keys - case.queries, case.keys)] * case.requests),
    }
    attrs = {"kv_heads": case.kv_heads, "head_size": case.size, "scale": case.size**-0.5, "block": case.blocks}
    parts = kv_parts([case.queries] * case.requests, [case.keys] * case.requests)
    specs = {name: Spec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in operands.items()}
    record = operator("kv_attention")
    needed = record.scratch_bytes(bench.backend, specs, {**attrs, "parts": parts})
    way, *_ = record.serving(bench.backend, specs, attrs, bench.capability)
    scratch = torch.empty(int(needed), dtype=torch.uint8, device=where)
    y, launch = torch.empty_like(layers.q), load("kv_attention", bench.backend, way).launch
    return [partial(launch, **operands, **attrs, layer=layer, y=y, scratch=scratch) for layer in range(layers.count)], y


def flashinfer_launches(layers: Layers, layout: str, backend: str) -> tuple[list[Call], Tensor]:
    """One launch of FlashInfer's kernels a layer, over keys that lie in one of two ways, and where they write."""
    import flashinfer

    case, device = layers.case, layers.bench.device
    paged = layout == MOSAICS and case.requests > 1
    wrapper, name = (
        (flashinfer.BatchPrefillWithPagedKVCacheWrapper, "HND")
        if paged
        else (flashinfer.BatchPrefillWithRaggedKVCacheWrapper, "NHD")
    )
    kernels = wrapper(torch.empty(1 << 28, dtype=torch.uint8, device=device), name, backend=backend)
    counts = torch.arange(case.requests + 1, dtype=torch.int32, device=device)
    heads = case.heads, case.kv_heads, case.size
    common: dict[str, Any] = {"causal": False, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if paged:
        pages = case.keys // PAGE
        indices = torch.cat(
            [torch.arange(pages, dtype=torch.int32) + layers.first(n) // PAGE for n in range(case.requests)]
        )
        last = torch.full((case.requests,), PAGE, dtype=torch.int32, device=device)
        kernels.plan(counts * case.queries, counts * pages, indices.to(device), last, *heads, PAGE, **common)
    else:
        kernels.plan(counts * case.queries, counts * case.keys, *heads, **common)
    q = layers.q.view(-1, case.heads, case.size)
    y = torch.empty_like(q)

    def of_layer(layer: int) -> Call:
        k, v = layers.copied(layer) if layout == OWN else layers.views(layer)
        if paged:
            both = pages_of(k, PAGE), pages_of(v, PAGE)
            return partial(kernels.run, q, both, out=y)
        return partial(kernels.run, q, k, v, out=y)

    return [of_layer(layer) for layer in range(layers.count)], y


def timed(layers: Layers, launches: Sequence[Call], y: Tensor, burst_s: Burst) -> dict[str, float]:
    """Seconds of a launch, sustained and in bursts, once every layer's results are held against plain attention.

    Raises
    ------
    UsageError
        If one is off by more than bfloat16 explains.
    """
    for layer, launch in enumerate(launches):
        error = layers.error(launch, layer, y)
        if not error < TOLERANCE:
            raise UsageError(f"{layers.case}: layer {layer} is off by {error:.3f} of the largest result.")
    return {"sustained_s": layers.bench.timer.captured(launches), "burst_s": burst_s(launches)}


def card_burst_s(launches: Sequence[Call]) -> float:
    """Median seconds of a launch in captured runs of `BURST` over layers in turn, each after a rest."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(BURST):
            launches[number % len(launches)]()
    graph.replay()
    found = []
    for _ in range(BURSTS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        time.sleep(REST_S)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / BURST)
    return statistics.median(found)


def measured(case: Case, bench: Bench, burst_s: Burst, *, layers: int | None = None) -> dict[str, Any]:
    """The timings of a case: Mosaic's kernel, and FlashInfer's fastest over either layout, if it is installed.

    FlashInfer has no kernel whose rows see the blocks before their own; a backend that fails, or is wrong, is left out and named.
    """
    of, found = Layers(case, bench, layers), dict[str, Any]()
    found["mosaic"] = timed(of, *mosaic_launches(of), burst_s)
    if case.blocks or importlib.util.find_spec("flashinfer") is None:
        return found
    for layout in (OWN, MOSAICS):
        tried = list[dict[str, Any]]()
        for backend in BACKENDS:
            try:
                tried.append({"by": backend, **timed(of, *flashinfer_launches(of, layout, backend), burst_s)})
            except (RuntimeError, ValueError, NotImplementedError, UsageError) as error:
                found.setdefault("failed", {})[f"{layout}, {backend}"] = str(error).splitlines()[0][:200]
        if tried:
            found[layout] = min(tried, key=lambda one: one["sustained_s"])
    return found


def timings(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each timing's name, its seconds, and its floor."""
    for point in result["points"]:
        of = _case_of(point)
        for name in ("mosaic", OWN, MOSAICS):
            if (seconds := _seconds(point, name)) is not None:
                yield f"{of}: {name}", min(seconds), floor_s(of, device_of(result))


def _case_of(point: Mapping[str, Any]) -> Case:
    return Case(**{field.name: point[field.name] for field in fields(Case)})


def _seconds(point: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Sustained, and in bursts; older records have the former of Mosaic's kernel alone."""
    if name == "mosaic" and "seconds" in point:
        return point["seconds"], point["seconds"]
    return (point[name]["sustained_s"], point[name]["burst_s"]) if name in point else None


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a case."""
    for point in result["points"]:
        floor, mosaic = floor_s(_case_of(point), device_of(result)), _seconds(point, "mosaic")
        assert mosaic is not None
        cells = list[str]()
        for layout in (OWN, MOSAICS):
            seconds = _seconds(point, layout)
            cells += [*(f"{1e6 * one:,.1f}" for one in seconds), point[layout]["by"]] if seconds else [""] * 3
        yield [
            f"{point['heads']} on {point['kv_heads']}", f"{point['requests']}", f"{point['queries']:,}", f"{point['keys']:,}",
            *(f"{1e6 * one:,.1f}" for one in mosaic), f"{1e6 * floor:,.1f}", f"{mosaic[0] / floor:.2f}", *cells,
        ]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Measure all cases, and record the figures."""
    from mosaic.calibration.cuda_card import cuda_bench

    asked = options(__doc__, models="*").parse_args(arguments)
    described = environment(METHOD)
    bench, clock, points = cuda_bench(target_s=0.02), Clock.start(asked.minutes), list[dict[str, Any]]()
    for case in clock.while_left(CASES, print):
        points.append({**asdict(case), **measured(case, bench, card_burst_s)})
        torch.cuda.empty_cache()
    result = {"environment": described, "card": bench.title, "device": asked.device, "points": points}
    write(f"kv-attention-{asked.device}{tag_of(asked)}", result)
    print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
