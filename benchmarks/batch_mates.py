"""What `batch_invariant` takes, and what it is for: steps of eight requests, and requests that differ from themselves alone.

    python -m benchmarks.batch_mates --device h200

writes `batch-mates-<device>.json`. Weights are random, in bfloat16, and blocks of 32 tokens. Steps: one model with the option
beside one without, on sessions of eight requests each, in turns. Requests: each alone, then in batches of eight of all lengths,
by policy. Two models may be named: the one whose steps are timed, and the one whose requests are compared.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

import mosaic
from benchmarks.block import with_block
from benchmarks.cases import options
from benchmarks.record import environment, table, write
from mosaic import decoding
from mosaic.runtime.compiled import CompiledModel

__all__ = ["HEADER", "main", "rows_of"]

METHOD: Final = (
    "median of 60 steps in turns, after 70, in the last of three passes over the same requests, so that no step is captured while "
    "it is timed; requests that differ are counted"
)
HEADER: Final = (
    "policy",
    "a step, ms",
    "batch_invariant, ms",
    "times",
    "requests that differ",
    "batch_invariant",
    "of",
)
MODELS: Final = ("sdar-8b", "sdar-1.7b")
BLOCK: Final = 32
POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "exact": {}, "mage": {"attention": "mage:k=128"}, "flashblock": {"attention": "flashblock"}, "focus": {"eviction": "focus"},
    "caches": {"block_cache": "dc+"},
}  # fmt: skip
TIMED: Final = ("exact", "focus")
TOGETHER, REQUESTS = 8, 16
PASSES, WARM, STEPS = 3, 70, 60
BUDGET: Final = "48GiB"
"""Of each of two models beside each other."""


def prompts_of(count: int) -> list[torch.Tensor]:
    """Draw prompts of 16 to 600 tokens."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    return [torch.randint(100, 600, (rng.randint(16, 600),), generator=generator) for _ in range(count)]


def opened(stack: ExitStack, name: str, device: str) -> list[CompiledModel]:
    """Open a model without the option, and with it; the same weights."""
    return [
        stack.enter_context(
            mosaic.compile(with_block(name, BLOCK, None), device=device, budget=BUDGET, batch_invariant=asked)
        )
        for asked in (False, True)
    ]


def step_times(models: Sequence[CompiledModel], policy: str) -> list[float]:
    """Median milliseconds of a step of eight requests, of each model, once every size of a step has run twice."""
    for _ in range(PASSES):
        found = _pass(models, policy)
    return [statistics.median(times[WARM:]) for times in found]


def _pass(models: Sequence[CompiledModel], policy: str) -> list[list[float]]:
    """Milliseconds of each step of eight requests, of each model."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(model.session()) for model in models]
        for session in sessions:
            for prompt in prompts_of(TOGETHER):  # one token a step: blocks of 32 steps, one request more each in turn
                session.submit(
                    prompt,
                    gen_length=256,
                    remasking="low_confidence_static",
                    steps=BLOCK,
                    stop_at_eos=False,
                    **POLICIES[policy],
                )
        found: list[list[float]] = [[] for _ in sessions]
        for _ in range(WARM + STEPS):
            for times, session in zip(found, sessions, strict=True):
                _settle()
                began = time.perf_counter()
                session.advance()
                _settle()
                times.append((time.perf_counter() - began) * 1e3)
    return found


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def different(model: CompiledModel, policy: str) -> int:
    """Count the requests whose tokens in a batch are not those that they get alone."""
    config = decoding.GenerationConfig(gen_length=64, steps=8, stop_at_eos=False, **POLICIES[policy])
    prompts = prompts_of(REQUESTS)
    count = 0
    for first in range(0, REQUESTS, TOGETHER):
        numbers = list(range(first, first + TOGETHER))
        together = decoding.generate(model, prompts[first : first + TOGETHER], config, request_ids=numbers)
        for number, found in zip(numbers, together, strict=True):
            (alone,) = decoding.generate(model, [prompts[number]], config, request_ids=[number])
            count += alone.token_ids.tolist() != found.token_ids.tolist()
    return count


def rows_of(result: Mapping[str, Any]) -> list[list[str]]:
    """Rows for a table, one a policy."""
    rows = []
    for policy, (default, asked) in result["different"].items():
        times = result["step_ms"].get(policy)
        shown = ["", "", ""] if times is None else [*(f"{ms:.2f}" for ms in times), f"{times[1] / times[0]:.2f}"]
        rows.append([policy, *shown, str(default), str(asked), str(result["requests"])])
    return rows


def main(arguments: Sequence[str]) -> None:
    """Measure and record."""
    asked = options(__doc__, models="*").parse_args(arguments)
    steps_model, tokens_model = asked.models or MODELS
    result: dict[str, Any] = {
        "environment": environment(METHOD), "card": asked.device, "model": steps_model, "tokens_model": tokens_model,
        "requests": REQUESTS, "step_ms": {}, "different": {},
    }  # fmt: skip
    with ExitStack() as stack:
        models = opened(stack, steps_model, asked.device)
        for policy in TIMED:
            result["step_ms"][policy] = step_times(models, policy)
            print(policy, result["step_ms"][policy], flush=True)
    with ExitStack() as stack:
        models = opened(stack, tokens_model, asked.device)
        for policy in POLICIES:
            result["different"][policy] = [different(model, policy) for model in models]
            print(policy, result["different"][policy], flush=True)
    print(table(HEADER, rows_of(result)))
    write(f"batch-mates-{asked.device}", result)


if __name__ == "__main__":
    main(sys.argv[1:])
