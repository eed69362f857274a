"""The unembedding with statistics against cuBLAS's bare product of the same rows, with and without Gumbel sampling.

    python -m benchmarks.unembed llada-8b --rows 32,64,128,256,512,1024,2048,4096,8192,16384

For each number of rows: the bare `torch.mm(out=)` of all of them at once, and of the best chunk; the chunked variant (product
of a chunk, one pass over its logits) at every chunk; the fused kernel; and which of them the planner picks. Writes
`unembed-<model>-<device>[-tag].json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.cases import Clock, options, tag_of, token_counts
from benchmarks.record import environment, table, write
from mosaic.devices import Device, load_device
from mosaic.models import load
from mosaic.models.parts import SAMPLE, Commit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner import Planner, Request
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract

ROWS = "32,64,128,256,512,1024,2048,4096,8192,16384"
CHUNKS = (128, 256, 512, 1024, 2048, 4096)
TARGETS = {"statistics": 1.08, "sampling": 1.15}
_ROUNDS = 3
_SETTLING_S, _READING_S = 0.06, 0.04
PHASES = {"statistics": FULL_STEP, "sampling": Phase(head=SAMPLE, commit=Commit(score="confidence", rule="top"))}
_PASSES = {"statistics": ("row_stats", "unembed_stats"), "sampling": ("row_sample", "unembed_sample")}


class Bench:
    """Operands of one head, and timings over slices of their rows."""

    def __init__(self, model: str, device: Device, seed: int) -> None:
        import torch

        from mosaic import kernels
        from mosaic.runtime.workspace import torch_dtype

        self.torch, self.kernels, self.device = torch, kernels, device
        arch = load(model).architecture
        self.cuda = device.backend == "cuda"
        self.where = "cuda" if self.cuda else "cpu"
        self.dtype = torch_dtype(arch.dtype)
        self.arch = arch
        generator = torch.Generator(self.where).manual_seed(seed)
        self.weight = self._random(generator, arch.vocabulary, arch.hidden).mul_(0.02)
        self.generator = generator

    def _random(self, generator: Any, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.where, generator=generator).to(self.dtype)

    def seconds(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds of each call: medians of readings that take turns, each once the card has settled on the call's own clock.

        A card that draws less power in one call runs the next one faster for a while: without settling, a product that
        follows a slower kernel looks a tenth faster than the same product anywhere else.
        """
        from benchmarks.engines.meters import sustained

        readings: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                sustained(call, cuda=self.cuda, least_s=_SETTLING_S)
                readings[name].append(sustained(call, cuda=self.cuda, least_s=_READING_S))
        return {name: statistics.median(found) for name, found in readings.items()}

    def _bound(self, operator: str, reads: dict[str, Any]) -> Callable[[], object]:
        """An operator with outputs and scratch of its own."""
        specs = {name: Spec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in reads.items()}
        meaning = contract(operator)
        made = {
            name: self.torch.empty(spec.shape, dtype=getattr(self.torch, spec.dtype), device=self.where)
            for name, spec in zip(meaning.writes, meaning.work(**specs).outputs, strict=True)
        }
        size = meaning.scratch_bytes(self.device.backend, specs, {})
        scratch = self.torch.empty(int(size), dtype=self.torch.uint8, device=self.where) if size else None
        launch = self.kernels.load(operator, self.device.backend).launch
        return lambda: launch(**reads, **made, scratch=scratch)

    def _random_reads(self, kind: str, rows: int) -> dict[str, Any]:
        if kind == "statistics":
            return {}
        keys = self.torch.arange(rows, dtype=self.torch.int64, device=self.where) * 7919
        return {"keys": keys, "temperature": self.torch.ones(rows, device=self.where)}

    def bare(self, rows: int, chunk: int) -> Callable[[], object]:
        """cuBLAS alone, in chunks of rows."""
        x = self._random(self.generator, rows, self.arch.hidden)
        out = self.torch.empty(min(chunk, rows), self.arch.vocabulary, dtype=self.dtype, device=self.where)
        parts = x.split(chunk)

        def call() -> None:
            for part in parts:
                self.torch.mm(part, self.weight.t(), out=out[: part.shape[0]])

        return call

    def chunked(self, kind: str, rows: int, chunk: int) -> Callable[[], object]:
        """Product of a chunk, then one pass over its logits."""
        x = self._random(self.generator, rows, self.arch.hidden)
        out = self.torch.empty(min(chunk, rows), self.arch.vocabulary, dtype=self.dtype, device=self.where)
        steps: list[tuple[Any, Callable[[], object]]] = []
        passes: dict[int, Callable[[], object]] = {}
        for part in x.split(chunk):
            count = part.shape[0]
            if count not in passes:
                passes[count] = self._bound(
                    _PASSES[kind][0], {"logits": out[:count], **self._random_reads(kind, count)}
                )
            steps.append((part, passes[count]))

        def call() -> None:
            for part, row_pass in steps:
                self.torch.mm(part, self.weight.t(), out=out[: part.shape[0]])
                row_pass()

        return call

    def fused(self, kind: str, rows: int, chunk: int) -> Callable[[], object]:
        """The kernel whose logits never exist, in chunks of rows."""
        x = self._random(self.generator, rows, self.arch.hidden)
        calls = [
            self._bound(_PASSES[kind][1], {"x": part, "weight": self.weight, **self._random_reads(kind, part.shape[0])})
            for part in x.split(chunk)
        ]

        def call() -> None:
            for one in calls:
                one()

        return call


def picked(model: str, rows: int, device: Device, kind: str) -> tuple[str, int | None]:
    """Return the variant and the chunk that the planner takes for `rows` masked rows of twice as many tokens."""
    request = Request(seq_lens=(2 * rows,), masked=rows, phase=PHASES[kind])
    config = Planner(model, device=device).plan(request).config
    chunk = config["logits"]
    return str(config["head"]), int(chunk) if isinstance(chunk, int) else None


def measure(bench: Bench, model: str, rows: int, kinds: Sequence[str]) -> dict[str, Any]:
    """All variants at one number of rows."""
    variants = {kind: picked(model, rows, bench.device, kind) for kind in kinds}
    heads = {kind: head for kind, (head, _) in variants.items()}
    planned = {kind: min(chunk or rows, rows) for kind, (_, chunk) in variants.items()}
    chunks = sorted({min(size, rows) for size in CHUNKS} | {planned[kind] for kind in kinds if heads[kind] != "fused"})
    calls = {"bare": bench.bare(rows, rows), **{f"bare {size}": bench.bare(rows, size) for size in chunks}}
    for kind in kinds:
        calls |= {f"{kind} {size}": bench.chunked(kind, rows, size) for size in chunks}
        calls[f"{kind} fused"] = bench.fused(kind, rows, rows)
        if heads[kind] == "fused" and planned[kind] < rows:
            calls[f"{kind} fused in chunks"] = bench.fused(kind, rows, planned[kind])
    seconds = bench.seconds(calls)
    found: dict[str, Any] = {
        "rows": rows, "bare_s": seconds["bare"], "bare_chunked_s": min(seconds[f"bare {size}"] for size in chunks),
    }  # fmt: skip
    for kind in kinds:
        whole = "fused" if planned[kind] == rows else "fused in chunks"
        name = f"{kind} {whole if heads[kind] == 'fused' else planned[kind]}"
        found[kind] = {
            "chunked_s": {size: seconds[f"{kind} {size}"] for size in chunks}, "fused_s": seconds[f"{kind} fused"],
            "picked_s": seconds[name], "picked": variants[kind],
        }  # fmt: skip
    return found


_COLUMNS = ("best chunks", "fused", "planned", "by the variant")
HEADER = ("rows", "bare ms", "bare in chunks, ms")


def rows_of(found: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """One line per number of rows; times of the variants as ratios to the bare product of all rows at once."""
    rows = list[tuple[str, ...]]()
    for entry in found:
        bare, cells = entry["bare_s"], list[str]()
        for kind in kinds:
            (head, chunk), best = entry[kind]["picked"], min(entry[kind]["chunked_s"].values())
            cells += [f"{value / bare:.3f}" for value in (best, entry[kind]["fused_s"], entry[kind]["picked_s"])]
            part = f"chunks of {chunk:,}" if chunk else "all rows"
            cells.append(f"fused, {part}" if head == "fused" else part)
        rows.append(
            (f"{entry['rows']:,}", *(f"{entry[name] * 1e3:.3f}" for name in ("bare_s", "bare_chunked_s")), *cells)
        )
    return rows


def header_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """The columns of `rows_of`."""
    return (*HEADER, *(f"{kind}: {variant}" for kind in kinds for variant in _COLUMNS))


def main(argv: list[str] | None = None) -> None:
    """Measure one model after the other."""
    parser = options(__doc__)
    parser.add_argument("--rows", default=token_counts(ROWS), type=token_counts)
    parser.add_argument("--kinds", default=list(_PASSES), nargs="+", choices=_PASSES)
    arguments = parser.parse_args(argv)
    from benchmarks.bench.meters import card

    device, clock = load_device(arguments.device), Clock.start(arguments.minutes)
    for model in arguments.models:
        described = environment(
            f"medians of {_ROUNDS} readings in turns, each after {_SETTLING_S:g} s of the same call"
        )
        bench, name = Bench(model, device, arguments.seed), load(model).name
        found = [measure(bench, model, rows, arguments.kinds) for rows in clock.while_left(arguments.rows, print)]
        result = {
            "environment": described,
            "card": card(bench.cuda),
            "model": name,
            "targets": TARGETS,
            "rows": found,
        }
        write(f"unembed-{name}-{device.name}{tag_of(arguments)}", result)
        print(f"\n{name}: times as ratios to cuBLAS's bare product; targets {TARGETS}")
        print(table(header_of(arguments.kinds), rows_of(found, arguments.kinds)))


if __name__ == "__main__":
    main()
