"""Token eviction beside whole blocks: tokens per second of block diffusion by batch, for what steps compute.

    python -m benchmarks.eviction sdar-8b --device h200 --batch 1,16,64 --prompt 256 --steps 8

writes `eviction-<model>-<device>.json`. Weights are random, so which tokens are decided says nothing about quality. The schedule
is fixed: so many tokens a step where there are enough, which is what an eviction expects of the next one. Ways: `whole`, all
tokens of a block in each step; `dc+`, those that are not frozen; `focus` and `focus, dc+`, what the paper's main text keeps of
these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import torch

import mosaic
from benchmarks.block import with_block
from benchmarks.cases import Clock, options, tag_of, token_counts
from benchmarks.record import environment, table, write
from mosaic.decoding import GenerationConfig
from mosaic.runtime.compiled import CompiledModel

__all__ = ["HEADER", "WAYS", "main", "measured", "rows_of"]

HEADER = ("requests", "steps of a block", "way", "tokens/s", "a step, ms", "steps", "of whole blocks")
BLOCKS: Final = 3
WHOLE: Final = "whole"
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    WHOLE: {"ahead": False}, "dc+": {"block_cache": "dc+"}, "focus": {"eviction": "focus"},
    "focus, dc+": {"eviction": "focus", "block_cache": "dc+"},
}  # fmt: skip


def measured(model: CompiledModel, way: str, *, prompt: int, requests: int, steps: int) -> dict[str, float]:
    """Tokens per second, steps, and milliseconds of each, of a generation that ran once before."""
    block = model.architecture.block
    config = GenerationConfig(
        gen_length=BLOCKS * block, steps=steps, remasking="low_confidence_static", stop_at_eos=False, **WAYS[way]
    )
    ids = [(torch.arange(prompt) + number) % model.architecture.mask_token_id for number in range(requests)]
    model.generate(ids, config)
    began = time.perf_counter()
    answers = model.generate(ids, config)
    seconds = time.perf_counter() - began
    tokens, most = sum(len(answer.token_ids) for answer in answers), max(answer.steps for answer in answers)
    return {"tokens_per_s": tokens / seconds, "step_ms": 1e3 * seconds / most, "steps": most}


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a case."""
    whole = {(p["requests"], p["steps_of_block"]): p["tokens_per_s"] for p in result["points"] if p["way"] == WHOLE}
    for point in result["points"]:
        base = whole.get((point["requests"], point["steps_of_block"]))
        yield [
            f"{point['requests']}", f"{point['steps_of_block']}", point["way"], f"{point['tokens_per_s']:,.0f}",
            f"{point['step_ms']:.2f}", f"{point['steps']}", "" if base is None else f"{point['tokens_per_s'] / base:.2f}",
        ]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.add_argument("--batch", type=token_counts, default=(1, 16, 64), help="requests")
    parser.add_argument("--steps", type=token_counts, default=(8,), help="steps of a block")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    on_card, clock = asked.device != "cpu", Clock.start(asked.minutes)
    for name in asked.models:
        result: dict[str, Any] = {"environment": environment(), "model": name, "block": asked.block}
        result |= {"prompt": asked.prompt, "card": torch.cuda.get_device_name() if on_card else "cpu", "points": []}
        with mosaic.compile(with_block(name, asked.block, asked.layers), device=asked.device, seed=3) as model:
            for requests, steps, way in clock.while_left([*product(asked.batch, asked.steps, WAYS)], print):
                found = measured(model, way, prompt=asked.prompt, requests=requests, steps=steps)
                result["points"].append({"requests": requests, "steps_of_block": steps, "way": way, **found})
                write(f"eviction-{name}-{asked.device}{tag_of(asked)}", result)
        print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
