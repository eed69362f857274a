"""Blocks of sparse attention beside exact ones: milliseconds of a block by preset, prefix, batch and steps, and their floors.

    python -m benchmarks.sparse sdar-8b --device h200 --prefix 32k,128k --batch 1,4 --steps 32,8 --k 1024

writes `sparse-<model>-<device>.json`. Requests decode by a fixed schedule. The prefill is left out: weights
are random, and so are the keys in the state. Requests of a batch begin together (lockstep), or are spread over a block (staggered).
A block's time is that of its steps, in the middle of a generation. `plain` is the exact step in plain PyTorch
(`benchmarks.plain_blocks`), of one request; `flashinfer` is Mosaic's own exact step with FlashInfer's attention in it
(`benchmarks.flashinfer_steps`), of requests that begin together, and `flashinfer, own layout` the same over keys that lie as it
prefers. The floor is that of the steps (`benchmarks.floor`): weights, and the keys that are attended to, or ranked, read once, or
the FLOPs where these take longer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

import mosaic
from benchmarks.block import fill, with_block
from benchmarks.cases import Clock, device_of, options, reaching, tag_of, token_counts
from benchmarks.flashinfer_steps import FlashInferSteps, with_flashinfer
from benchmarks.floor import Floor, keys_read
from benchmarks.plain_blocks import plain_step_ms
from benchmarks.record import environment, table, write
from mosaic.decoding import GenerationConfig, OnStep, Session
from mosaic.devices import Device
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models import Model
from mosaic.models.policies.flashblock import REUSES, PrefixReuse
from mosaic.models.policies.mage_options import PRESETS, SparseAttention
from mosaic.models.policies.registry import attention_policy
from mosaic.registrar.request_table import Column
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.request_table import RequestTable
from mosaic.runtime.steps import StepRequest, StepResult, StepRunner

__all__ = ["HEADER", "NoPrefill", "floor_s", "main", "measured", "rows_of", "timings"]

HEADER = (
    "prefix", "requests", "steps of a block", "begin", "attention", "a block, ms", "a step, ms", "floor of a block, ms", "of it",
    "exact / this",
)  # fmt: skip
BLOCK: Final = 32
WARM, BLOCKS = 2, 3
METHOD: Final = f"a block's time is the median of {BLOCKS} whole blocks after {WARM} that are not counted"
"""Blocks that are decoded before any is timed, and that are timed."""
GENERATED: Final = (WARM + BLOCKS + 2) * BLOCK
EXACT: Final = "exact"
PLAIN: Final = "plain"
FLASHINFER: Final = "flashinfer"
BASELINES: Final = (EXACT, PLAIN, FLASHINFER)
OWN_LAYOUT: Final = "flashinfer, own layout"
SHIFTED: Final = "fast-dllm-v2"
"""Whose blocks begin with a known token, which the step that commits the one before decides."""
STATIC: Final = {"remasking": "low_confidence_static"}
CASE: Final = ("prefix", "requests", "steps", "staggered")


class NoPrefill:
    """A runner that takes the keys of prompts as written, and of generators writes those of the first block alone."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def request_table(self) -> RequestTable | None:
        """Return a table for the requests of a session."""
        table: RequestTable | None = self._runner.request_table()
        if table is not None:
            enter = table.enter

            def entered(row: NDArray[np.int64], *rest: Any) -> int | None:
                row[Column.WRITTEN] = row[Column.PREFIX]
                return enter(row, *rest)

            table.enter = entered  # type: ignore[method-assign,assignment]
        return table

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step."""
        return self._runner.step([self._shortened(request) for request in requests])

    def _shortened(self, request: StepRequest) -> StepRequest:
        if request.rows.numel() or request.start:
            return request
        block = self._runner.architecture.block
        return replace(request, token_ids=request.token_ids[:block], key_len=block)


def measured(
    model: CompiledModel,
    attention: str | SparseAttention | PrefixReuse,
    *,
    prefix: int,
    requests: int,
    steps: int,
    staggered: bool,
    on_step: OnStep | None = None,
    attending: FlashInferSteps | None = None,
) -> list[float]:
    """Milliseconds of the steps of some blocks, in the middle of a generation; `on_step` gets each outcome.

    `attending` is whose attention the model was compiled with, if it is not its own.
    """
    family, quota = model.model.family, BLOCK // steps
    config = GenerationConfig(
        gen_length=GENERATED, stop_at_eos=False, attention=None if attention == EXACT else attention,
        **_schedule(family, steps),
    )  # fmt: skip
    found = list[float]()
    with Session(NoPrefill(model if attending is None else attending.runs(model))) as session:
        for number in range(requests):
            known = number * BLOCK // requests // quota * quota if staggered else 0  # of the first block
            ids = torch.arange(prefix + max(known, int(family == SHIFTED))) % model.architecture.mask_token_id
            session.submit(ids, config, on_step=on_step)
        session.advance()
        fill(model)
        session.advance(WARM * steps)
        if attending is not None:
            attending.verify()
        for _ in range(BLOCKS * steps):
            began = time.perf_counter()
            session.advance()
            found.append(1e3 * (time.perf_counter() - began))
    return found


def _schedule(family: str, steps: int) -> dict[str, Any]:
    """Options by which a block takes so many steps, the one that commits it among them if it has one of its own.

    Raises
    ------
    UsageError
        If steps of the family commit one token each, and it takes another number of steps.
    """
    if family == SHIFTED:
        if steps != BLOCK:
            raise UsageError(f"a block of {family} takes {BLOCK} steps where no token is confident, not {steps}.")
        return {"threshold": 1.0}
    return {"steps": steps} | ({"threshold": 1.0} if family == "llada2" else STATIC)


def _policy(name: str, k: int) -> SparseAttention | PrefixReuse:
    """The options of a preset's name, with this number of keys if it selects keys."""
    chosen = attention_policy(name)
    return replace(chosen, k=k) if isinstance(chosen, SparseAttention) else chosen


def floor_s(
    model: Model,
    attention: str | SparseAttention | PrefixReuse,
    device: Device,
    *,
    prefix: int,
    requests: int,
    steps: int,
) -> float:
    """Seconds of the floors of one block's steps; a step unembeds the rows that are still masked."""
    arch, floor = model.architecture, Floor(model.architecture, device)
    chosen = None if attention == EXACT else attention_policy(attention)
    reuse = chosen if isinstance(chosen, PrefixReuse) else chosen and chosen.reuse
    refreshing = steps if reuse is None else sum(map(reuse.refreshes_in, range(steps)))  # whichever these are
    seconds = 0.0
    for step in range(steps):
        selects = isinstance(chosen, SparseAttention) and chosen.selects_in(step, steps)
        keys = keys_read(chosen, arch, prefix, refreshes=step < refreshing, selects=selects)
        masked = requests * (BLOCK - step * BLOCK // steps)
        seconds += floor.of(
            requests=requests, tokens=requests * BLOCK, rows=masked, keys=[requests * read for read in keys]
        )
    return seconds


def floor_of(result: Mapping[str, Any], point: Mapping[str, Any]) -> float:
    """Return the seconds of a point's floor."""
    described = with_block(result["model"], BLOCK, result.get("layers"))
    named = point["attention"].split(",")[0]
    attention = EXACT if named in BASELINES else _policy(named, result["k"])
    asked = {name: point[name] for name in ("prefix", "requests", "steps")}
    return floor_s(described, attention, device_of(result), **asked)


def timings(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each timing's name, its seconds, and its floor."""
    for point in result["points"]:
        name = ", ".join(str(point[name]) for name in (*CASE, "attention"))
        yield name, _block_ms(point) / 1e3, floor_of(result, point)


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a case."""
    blocks = {tuple(point[name] for name in (*CASE, "attention")): _block_ms(point) for point in result["points"]}
    for point in result["points"]:
        case, block, floor = tuple(point[name] for name in CASE), _block_ms(point), 1e3 * floor_of(result, point)
        exact = blocks.get((*case, EXACT))
        yield [
            f"{point['prefix']:,}", f"{point['requests']}", f"{point['steps']}", "staggered" if point["staggered"] else "lockstep",
            point["attention"], f"{block:.1f}", f"{block / point['steps']:.2f}", f"{floor:.1f}",
            f"{block / floor:.2f}", "" if exact is None else f"{exact / block:.2f}",
        ]  # fmt: skip


def _block_ms(point: Mapping[str, Any]) -> float:
    """The middle one of the blocks that were timed."""
    blocks = point["blocks_ms"] if "blocks_ms" in point else _blocks(point["step_ms"], point["steps"])
    return statistics.median(blocks)


def _blocks(times: Sequence[float], steps: int) -> list[float]:
    """Milliseconds of each block, of those of its steps."""
    return [sum(times[start : start + steps]) for start in range(0, len(times), steps)]


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.add_argument("--prefix", type=token_counts, default=token_counts("32k,128k"), help="keys before the blocks")
    parser.add_argument("--batch", type=token_counts, default=(1,), help="requests")
    parser.add_argument("--steps", type=token_counts, default=(32,), help="steps of a block")
    parser.add_argument("--k", type=int, default=1024, help="keys that are selected")
    parser.add_argument(
        "--attention", default=f"{EXACT},{','.join([*PRESETS, *REUSES])}", help="presets, separated by commas"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    on_card, clock = asked.device != "cpu", Clock.start(asked.minutes)
    wanted = asked.attention.split(",")
    named: dict[str, Any] = {EXACT: EXACT} if EXACT in wanted else {}
    named |= {name: _policy(name, asked.k) for name in wanted if name not in BASELINES}
    cases = [
        case for case in product(asked.prefix, asked.batch, asked.steps, (False, True), named) if case[1] > 1 or not case[3]
    ]  # fmt: skip
    plain = [*product(asked.prefix, asked.steps)] if PLAIN in wanted else []
    flashinfer = [*product(asked.prefix, asked.batch, asked.steps)] if FLASHINFER in wanted else []
    for name in asked.models:
        described = reaching(with_block(name, BLOCK, asked.layers), max(asked.prefix) + BLOCK + GENERATED)
        result: dict[str, Any] = {
            "environment": environment(METHOD),
            "model": name,
            "device": asked.device,
            "layers": asked.layers,
        }
        result |= {
            "block": BLOCK,
            "k": asked.k,
            "card": torch.cuda.get_device_name() if on_card else "cpu",
            "points": [],
        }

        def keep(case: Sequence[Any], attention: str, times: Sequence[float], result: Any = result) -> None:
            point = {**dict(zip(CASE, case, strict=True)), "attention": attention}
            result["points"].append({**point, "blocks_ms": _blocks(times, point["steps"])})
            write(f"sparse-{result['model']}-{asked.device}{tag_of(asked)}", result)

        for prefix, steps in clock.while_left(plain, print):
            times = plain_step_ms(described, prefix=prefix, steps=steps, blocks=BLOCKS, cuda=on_card)
            keep((prefix, 1, steps, False), PLAIN, times)
        for (prefix, requests, steps), layout in clock.while_left(
            [*product(flashinfer, (FLASHINFER, OWN_LAYOUT))], print
        ):
            torch.cuda.empty_cache()
            case: dict[str, Any] = {"prefix": prefix, "requests": requests, "steps": steps, "staggered": False}
            apart = (requests, (prefix + GENERATED) // BLOCK * BLOCK + BLOCK) if layout == OWN_LAYOUT else None
            with (
                with_flashinfer(described.architecture, apart=apart) as attending,
                mosaic.compile(described, device=asked.device, seed=3) as model,
            ):
                keep((*case.values(),), layout, measured(model, EXACT, **case, attending=attending))
            del attending, model  # and the keys that are apart
        torch.cuda.empty_cache()
        with mosaic.compile(described, device=asked.device, seed=3) if cases else nullcontext() as model:
            for *case, attention in clock.while_left(cases, print):
                try:
                    keep(case, attention, measured(model, named[attention], **dict(zip(CASE, case, strict=True))))
                except (DoesNotFit, UsageError) as error:
                    print(case, attention, error)
        print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
