"""Block diffusion over kept keys: exact and sparse steps of one block by prefix, prefills, and generation.

    python -m benchmarks.block sdar-8b --device h200 --prefix 256,32k,128k --prefill 32k,128k

writes `block-<model>-<device>.json`. Weights are random, and so are the keys in the state. A step is timed with the host
included, and on a card also by events around it alone. A floor is that of `benchmarks.floor`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import mosaic
from benchmarks.cases import device_of, options, tag_of, token_counts, with_block
from benchmarks.floor import Floor, keys_read
from benchmarks.paired_worker import Brackets
from benchmarks.record import environment, table, write
from mosaic.decoding.canvas import COMMIT
from mosaic.models import load
from mosaic.models.parts import KEPT, KV, Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.mage import Selected
from mosaic.models.policies.mage_options import SparseAttention, index_sets
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.steps import StepRequest

__all__ = [
    "HEADER",
    "fill",
    "generation_of",
    "main",
    "prefill_of",
    "rows_of",
    "stages_of",
    "steps_of",
    "timings",
    "with_block",
]

HEADER = ("", "a step, ms", "on the card, ms", "floor, ms", "of it")
REPEATS, WARM = 20, 3
FEW = 3
"""Prefills and generations that are timed, after one that is not."""
METHOD = (
    f"a step is the median of {REPEATS} after {WARM} that are not counted; "
    f"a prefill and a generation that of {FEW} whole ones after one; a second generation is one"
)
GENERATED, SHORT = 128, 256
EXACT = Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic"))


def stages_of(attention: SparseAttention) -> dict[str, Phase]:
    """The steps that are timed, by name: exact, a block's first under sparse attention, and a later one."""
    stages = {"exact": EXACT}
    for name, selects in (("first", True), ("later", attention.selects == "every")):
        stages[name] = replace(EXACT, cache=Selected(attention=attention, selects=selects))
    return stages


def steps_of(
    model: CompiledModel, prefix: int, attention: SparseAttention, brackets: Brackets | None
) -> dict[str, Any]:
    """Milliseconds of one block's steps at the end of a prefix."""
    block, chosen = model.architecture.block, index_sets(attention)
    kept, sets = model.open_rows(KV), model.open_rows(chosen)
    kept.reserve(prefix + block)
    sets.reserve(1)
    ids, rows = torch.arange(block), torch.arange(block)
    asked = StepRequest(
        phase=EXACT, token_ids=ids, start=prefix, sequence=kept, key_len=prefix + block, rows=rows,
        current=torch.full((block,), model.architecture.mask_token_id), quota=1, threshold=0.99, states={chosen: sets},
        values={"captured": prefix, "candidates": prefix, "exactly": True, "votes_from": prefix},
    )  # fmt: skip
    found: dict[str, Any] = {}
    try:
        for name, phase in stages_of(attention).items():
            captures = (
                {"candidates": prefix, "exactly": True} if name == "first" else {"candidates": 0, "exactly": False}
            )
            request = replace(asked, phase=phase, values={**asked.values, **captures})
            model.step([request])
            if not found:
                fill(model)
            found[name] = _timed(model, request, brackets)
    finally:
        kept.close()
        sets.close()
    return found


def fill(model: CompiledModel) -> None:
    """Random keys, values and extrema of pages in the states; unwritten memory would make scores of any size."""
    dtype = model.architecture.dtype
    for name in [name for name in model.workspace.pages.ranges if name.startswith(("state/kv", "state/pages"))]:
        elements = (
            model.workspace.range(name).committed_bytes // torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        )
        model.workspace.view(name, 0, (elements,), dtype).normal_()


def _timed(
    model: CompiledModel, request: StepRequest, brackets: Brackets | None, *, warm: int = WARM, repeats: int = REPEATS
) -> dict[str, float]:
    """Medians in milliseconds, with the host and on the card alone, and the least and the most of the former."""
    times = []
    if brackets is not None:
        brackets.times()
    for repeat in range(warm + repeats):
        began = time.perf_counter()
        model.step([request])
        if brackets is not None:
            torch.cuda.synchronize()
        if repeat >= warm:
            times.append(1e3 * (time.perf_counter() - began))
    found = {"step_ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}
    return found if brackets is None else {**found, "card_ms": statistics.median(brackets.times()[0][-repeats:])}


def prefill_of(model: CompiledModel, tokens: int, brackets: Brackets | None) -> dict[str, float]:
    """Milliseconds of the step that writes the keys of a prompt."""
    kept, none = model.open_rows(KV), torch.empty(0, dtype=torch.int64)
    kept.reserve(tokens)
    ids = torch.arange(tokens) % model.architecture.mask_token_id
    asked = StepRequest(
        phase=COMMIT, token_ids=ids, start=0, sequence=kept, key_len=tokens, rows=none, current=none, quota=0
    )
    try:
        return _timed(model, asked, brackets, warm=1, repeats=FEW)
    finally:
        kept.close()


def generation_of(model: CompiledModel, prefix: int) -> dict[str, float]:
    """Milliseconds a step of whole generations by a fixed schedule."""
    prompt, times = torch.arange(prefix) % 50_000 % model.architecture.mask_token_id, []
    for _ in range(1 + FEW):
        began = time.perf_counter()
        (answer,) = model.generate(prompt, remasking="low_confidence_static", gen_length=GENERATED, stop_at_eos=False)
        times.append(1e3 * (time.perf_counter() - began) / answer.steps)
    return {"table": statistics.median(times[1:])}


def again_of(model: CompiledModel, tokens: int) -> dict[str, float]:
    """Milliseconds of a generation after a long prompt and of the same one again, and its steps, the prefill not among them."""
    prompt = torch.arange(tokens) % 50_000 % model.architecture.mask_token_id
    found = {}
    for which in ("first_ms", "second_ms"):
        began = time.perf_counter()
        (answer,) = model.generate(prompt, remasking="low_confidence_static", gen_length=GENERATED, stop_at_eos=False)
        found[which] = 1e3 * (time.perf_counter() - began)
    return {**found, "steps": answer.steps - 1.0}


def excess_of(result: Mapping[str, Any], tokens: int) -> float:
    """A second generation's time over that of its prefill and as many exact steps, each timed alone."""
    again, step = result["again"][str(tokens)], result["steps"][str(tokens)]["exact"]["step_ms"]
    parts: float = result["prefill"][str(tokens)]["step_ms"] + again["steps"] * step
    return float(again["second_ms"]) / parts


def timings(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each timing's name, its seconds, and its floor."""
    for name, times, floor in _floors(result):
        yield name, (_middle(times["step_ms"]) or 0.0) / 1e3, floor


def _floors(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """Each timing's name, its milliseconds, and its floor in seconds: steps by prefix, prefills, generations."""
    arch = with_block(result["model"], result["block"], result.get("layers")).architecture
    floor, attention = Floor(arch, device_of(result)), SparseAttention(k=result["k"])
    for prefix, steps in result["steps"].items():
        for name, times in steps.items():
            phase = stages_of(attention)[name].cache
            chosen = phase.attention if isinstance(phase, Selected) else None
            selects = isinstance(phase, Selected) and phase.selects
            keys = keys_read(chosen, arch, int(prefix), selects=selects, refreshes=True)
            yield f"{int(prefix):,} keys, {name}", times, floor.of(tokens=arch.block, rows=arch.block, keys=keys)
    for tokens, times in result.get("prefill", {}).items():
        keys = [float(tokens)] * arch.layers
        yield f"prefill of {int(tokens):,} tokens", times, floor.of(tokens=int(tokens), rows=0, keys=keys, prefill=True)
    for tokens, times in result.get("again", {}).items():
        keys = [float(tokens)] * arch.layers
        prompt = floor.of(tokens=int(tokens), rows=0, keys=keys, prefill=True)
        least = floor.of(tokens=arch.block, rows=1, keys=keys)  # whenever rows are decided
        name, milliseconds = f"a second generation after {int(tokens):,} tokens", times["second_ms"]
        yield name, {"step_ms": milliseconds}, prompt + times["steps"] * least
    for name, milliseconds in result["generation"].items():
        least = floor.of(tokens=arch.block, rows=1, keys=[float(SHORT)] * arch.layers)  # whenever rows are decided
        yield f"generation, {name}", {"step_ms": milliseconds}, least


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table: of each prefix the steps, then the generation."""
    for name, times, floor in _floors(result):
        step, card = (_middle(times.get(kind)) for kind in ("step_ms", "card_ms"))
        assert step is not None
        yield [
            name, f"{step:.3f}", "" if card is None else f"{card:.3f}", f"{1e3 * floor:.3f}", f"{step / (1e3 * floor):.2f}",
        ]  # fmt: skip


def _middle(times: float | Sequence[float] | None) -> float | None:
    """The median; of all times, as older records have them, too."""
    return statistics.median(times) if isinstance(times, Sequence) and times else times or None


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.add_argument(
        "--prefix", type=token_counts, default=token_counts("256,32k,128k"), help="keys before the block"
    )
    parser.add_argument("--prefill", type=token_counts, default=(), help="tokens of prompts")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--k", type=int, default=1024, help="keys that are selected")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    attention, on_card = SparseAttention(k=asked.k), torch.cuda.is_available() and asked.device != "cpu"
    brackets = Brackets() if on_card else None
    for name in asked.models:
        result: dict[str, Any] = {
            "environment": environment(METHOD),
            "model": name,
            "device": asked.device,
            "layers": asked.layers,
        }
        result |= {"block": asked.block, "k": asked.k}
        result["card"] = torch.cuda.get_device_name() if on_card else "cpu"
        described = with_block(name, asked.block, asked.layers)
        if asked.prefill:  # beyond the trained positions, too
            described = load({**described.config, "max_position_embeddings": max(asked.prefill) + GENERATED + SHORT})
        with mosaic.compile(described, device=asked.device, seed=3) as model:
            result["generation"] = generation_of(model, SHORT)
            result["prefill"] = {str(tokens): prefill_of(model, tokens, brackets) for tokens in asked.prefill}
            result["again"] = {str(tokens): again_of(model, tokens) for tokens in asked.prefill}
            result["steps"] = {str(prefix): steps_of(model, prefix, attention, brackets) for prefix in asked.prefix}
        write(f"block-{name}-{asked.device}{tag_of(asked)}", result)
        print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
