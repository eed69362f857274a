"""One turn of `benchmarks.paired`, in a process of its own: prints figures of whichever Mosaic is first on the path.

It uses what the checkouts have in common: `compile`, calls, `generate`, sessions, `Executor.run`, and `benchmarks` of each.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any

import torch

import mosaic
from mosaic.runtime.executor import Executor

STEPS = (1024, 4096, 16384)
GENERATED = {
    "llada-8b": (512, {"gen_length": 64, "block_length": 32, "steps": 64}),
    "sdar-8b": (256, {"gen_length": 128}),
}
BLOCKS = {"sdar-8b": (256, 32_768, 131_072)}
"""Keys before the block, by model."""
EVICTED = (64, 256)
"""Requests that sessions evict tokens of."""
SETTLED, STEPS_TIMED = 32, 64
"""Steps of each request that evicts which are not timed, and those that are after them: a block, and two."""
Figures = dict[str, list[float]]


class Brackets:
    """Events before and after every step that an executor runs."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        run, events = Executor.run, self.events

        def bracketed(executor: Executor) -> None:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run(executor)
            last.record()
            events.append((first, last))

        Executor.run = bracketed  # type: ignore[method-assign]

    def times(self) -> tuple[list[float], list[float]]:
        """Milliseconds of the steps on the device, and between the end of each and the start of the next."""
        torch.cuda.synchronize()
        inside = [first.elapsed_time(last) for first, last in self.events]
        between = [a[1].elapsed_time(b[0]) for a, b in pairwise(self.events)]
        self.events.clear()
        return inside, between


def steps_of(model: Any, name: str) -> Figures:
    """Wall time of full steps, half of the rows masked."""
    found: Figures = {}
    for tokens in STEPS:
        ids = torch.arange(tokens) % 50_000
        rows = torch.arange(0, tokens, 2)
        seconds = []
        for repeat in range(3 + (20 if tokens < 10_000 else 8)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(ids, masked=rows)
            torch.cuda.synchronize()
            if repeat >= 3:
                seconds.append(1e3 * (time.perf_counter() - began))
        found[f"{name}, step of {tokens:,} tokens"] = seconds
    return found


def generation_of(model: Any, name: str, brackets: Brackets) -> Figures:
    """Wall time of a generation, and of its small steps: on the device, and between them."""
    length, options = GENERATED[name]
    prompt = torch.arange(length) % 50_000 + 100
    found: Figures = {}

    def generate() -> None:
        model.generate(prompt, seed=1, stop_at_eos=False, **options)

    generate()
    generate()
    brackets.times()
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate()
        seconds.append(1e3 * (time.perf_counter() - began))
    found[f"{name}, generation"] = seconds
    inside, between = brackets.times()
    found[f"{name}, a step of it on the card"] = inside
    found[f"{name}, from the end of a step to the next"] = between
    return found


def blocks_of(model: Any, name: str) -> Figures:
    """Wall time of steps behind long prefixes, exact and sparse, and of steps of many requests with eviction."""
    from benchmarks.sparse import measured

    found: Figures = {}
    for prefix in BLOCKS[name]:
        for attention in ("exact", "mage"):
            times = measured(model, attention, prefix=prefix, requests=1, steps=32, staggered=False)
            found[f"{name}, {attention} step behind {prefix:,} keys"] = times
    for requests in EVICTED:
        found[f"{name}, evicting step of {requests} requests"] = evicting(model, requests)
    return found


def evicting(model: Any, requests: int) -> list[float]:
    """Wall time in which each of some requests gets a step.

    Time counts by the requests that were served: a step of an older checkout serves half of them, and the host takes up the outcome
    of the other half meanwhile.
    """
    generator = torch.Generator().manual_seed(requests)
    with model.session() as session:
        for _ in range(requests):
            prompt = torch.randint(100, 600, (128,), generator=generator)
            session.submit(prompt, gen_length=256, eviction="focus", stop_at_eos=False)
        served, times = 0, []
        while served < SETTLED * requests:
            served += len(session.advance())
        while served < (SETTLED + STEPS_TIMED) * requests:
            began = time.perf_counter()
            count = len(session.advance())
            times.append(1e3 * (time.perf_counter() - began) * requests / count)
            served += count
    return times


def main(device: str, models: list[str]) -> None:
    """Measure the models in turn."""
    from benchmarks.block import with_block

    figures: dict[str, Any] = {"card": torch.cuda.get_device_name()}
    brackets = Brackets()
    for name in models:
        with mosaic.compile(name, device=device, seed=3) as model:
            if name == "llada-8b":
                figures |= steps_of(model, name)
            figures |= generation_of(model, name, brackets)
        if name in BLOCKS:
            longer = with_block(name, 32, None).with_rope_scaling("yarn", 8)
            with mosaic.compile(longer, device=device, seed=3) as model:
                figures |= blocks_of(model, name)
    figures["files"] = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
