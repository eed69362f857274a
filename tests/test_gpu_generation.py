"""Generation on a CUDA card: the CPU's tokens, replayed from graphs, in exactly the memory that was planned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from test_decoding import CONFIGS
from test_parity_block import LLADA2
from test_runtime_compiled import MOE
from torch import Tensor

import mosaic
from mosaic import decoding
from mosaic.decoding.canvas import COMMIT
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.steps import StepRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False"),
]

DEVICE = "h200"
_HF = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {**CONFIGS["llada"], "d_model": 64, "mlp_hidden_size": 96},
    "dream": {**CONFIGS["dream"], **_HF},
    "llada-moe": {**MOE, "eos_token_id": 7},
    "sdar": {**CONFIGS["sdar"], **_HF, "num_hidden_layers": 3},
    "fast-dllm-v2": {**CONFIGS["fast-dllm-v2"], **_HF},
    "llada2": {**LLADA2, "eos_token_id": 7, "num_hidden_layers": 3},
}
_BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 16, "steps": 16}
_FAST: dict[str, Any] = {"gen_length": 32, "block_length": 16, "algorithm": "fast-dllm"}
BESIDE = mosaic.SparseAttention(k=16, exact_layers=1, reuse=mosaic.PrefixReuse(steps=3))
_STATIC = {"gen_length": 40, "remasking": "low_confidence_static", "steps": 4}
SPARSE = mosaic.SparseAttention(k=8, exact_layers=1)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", _BLOCKS),
    "llada sampled": ("llada", {**_BLOCKS, "temperature": 0.8}),
    "llada random": ("llada", {**_BLOCKS, "remasking": "random"}),
    "llada guided": ("llada", {**_BLOCKS, "cfg_scale": 1.0, "temperature": 0.5}),
    "llada-moe": ("llada-moe", _BLOCKS),
    "dream origin": ("dream", {"gen_length": 24, "steps": 12, "temperature": 0.5}),
    "dream maskgit": ("dream", {"gen_length": 24, "steps": 8, "alg": "maskgit_plus", "alg_temp": 0.3}),
    "dream margin": ("dream", {"gen_length": 24, "steps": 8, "alg": "topk_margin"}),
    "dream entropy": (
        "dream",
        {"gen_length": 24, "steps": 8, "alg": "entropy", "temperature": 0.7, "top_p": 0.9, "top_k": 20},
    ),
    "fast-dllm": ("llada", {**_FAST, "threshold": 0.3}),
    "fast-dllm factor": ("llada", {**_FAST, "factor": 1.0}),
    "fast-dllm prefix": ("llada", {**_FAST, "threshold": 0.3, "cache": "prefix"}),
    "fast-dllm dual": ("llada", {**_FAST, "threshold": 0.3, "cache": "dual"}),
    "sparse keys": ("llada", {**_FAST, "threshold": 0.3, "cache": "sparse:retention=0.3"}),
    "sparse keys, delayed and shared": (
        "llada",
        {**_BLOCKS, "cache": "sparse:retention=0.2:delay=1:interval=2:pool=5"},
    ),
    "uniform sparse keys on dream": (
        "dream",
        {**_FAST, "threshold": 0.3, "cache": "sparse:retention=0.4:selection=uniform"},
    ),
    "fast-dllm dual on dream": ("dream", {**_FAST, "threshold": 0.3, "cache": "dual"}),
    "sdar": ("sdar", {"gen_length": 40, "threshold": 0.3}),
    "sdar sampled": ("sdar", {"gen_length": 40, "temperature": 0.7, "top_k": 20, "threshold": 0.3}),
    "sdar static": ("sdar", {"gen_length": 40, "remasking": "low_confidence_static", "steps": 4}),
    "llada2 sampled": ("llada2", {"gen_length": 64, "threshold": 0.3, "temperature": 0.7}),
    "sdar sequential": ("sdar", {"gen_length": 40, "remasking": "sequential", "temperature": 1.0}),
    "sdar reusing": ("sdar", {"gen_length": 40, "threshold": 0.3, "attention": "flashblock"}),
    "sdar reusing by steps": ("sdar", {"gen_length": 40, "steps": 4, "attention": mosaic.PrefixReuse(steps=2)}),
    "sdar reusing by change": (
        "sdar",
        {"gen_length": 40, "threshold": 0.5, "attention": mosaic.PrefixReuse(change=0.2)},
    ),
    "llada2 sparse and reusing": ("llada2", {"gen_length": 64, "threshold": 0.3, "attention": BESIDE}),
    "sdar evicting": ("sdar", {"gen_length": 40, "threshold": 0.3, "eviction": "focus"}),
    "sdar evicting, dc+": ("sdar", {**_STATIC, "eviction": "focus-public", "block_cache": "dc+"}),
    "sdar dc": ("sdar", {**_STATIC, "block_cache": "dc", "block_commit": "cached"}),
    "sdar evicting and selecting": ("sdar", {**_STATIC, "eviction": "focus", "attention": SPARSE}),
    "llada2 evicting": ("llada2", {"gen_length": 64, "threshold": 0.3, "eviction": "focus", "block_cache": "dc+"}),
    "fast-dllm-v2": ("fast-dllm-v2", {"gen_length": 40, "small_block_length": 4, "threshold": 0.3}),
    "fast-dllm-v2 dual": ("fast-dllm-v2", {"gen_length": 40, "small_block_length": 4, "cache": "dual"}),
    "llada2": ("llada2", {"gen_length": 64, "threshold": 0.3}),
    "llada2.1": ("sdar", {"gen_length": 40, "algorithm": "llada2.1", "threshold": 0.2, "edit_threshold": 0.1}),
}
LENGTHS = (45, 9, 70)  # no multiples of a block


def prompts_of(config: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(8, config["mask_token_id"], (length,), generator=generator) for length in lengths]


def draw(model: CompiledModel) -> None:
    """Weights under which answers vary, and no two tokens are nearly as likely."""
    generator = torch.Generator().manual_seed(7)
    for name, view in model.weights().items():
        if not name.startswith("="):
            vector = view.dim() == 1 and "bias" not in name
            values = torch.empty(view.shape).normal_(1.0 if vector else 0.0, 0.2, generator=generator)
            view.copy_(values)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Compile a family with the same weights on any device; closed afterwards."""
    with ExitStack() as stack:

        def make(family: str, device: str, **options: Any) -> CompiledModel:
            model = stack.enter_context(mosaic.compile(FAMILIES[family], device=device, **options))
            draw(model)
            return model

        yield make


def generated(
    model: CompiledModel, family: str, options: dict[str, Any], lengths: tuple[int, ...] = LENGTHS, **more: Any
) -> list[decoding.Generation]:
    config = decoding.GenerationConfig(stop_at_eos=False, **options)
    return decoding.generate(model, prompts_of(FAMILIES[family], lengths), config, **more)


def tokens_of(answers: list[decoding.Generation]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


@pytest.mark.parametrize("way", WAYS)
def test_the_card_generates_the_cpus_tokens(way: str, opened: Any) -> None:
    """All requests together, poisoned, and each alone."""
    family, options = WAYS[way]
    expected = generated(opened(family, "cpu"), family, options)
    model = opened(family, DEVICE)
    together = generated(model, family, options)
    for found in (together, generated(opened(family, DEVICE, debug="poison"), family, options)):
        assert tokens_of(found) == tokens_of(expected)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.confidence, other.confidence, rtol=1e-3, atol=1e-5)
    assert len({token for answer in tokens_of(expected) for token in answer}) > 3
    config = decoding.GenerationConfig(stop_at_eos=False, **options)
    for number, prompt in enumerate(prompts_of(FAMILIES[family])):
        alone = decoding.generate(model, [prompt], config, request_ids=[number])
        assert tokens_of(alone) == tokens_of(together[number : number + 1])


@pytest.mark.parametrize(
    "way",
    [
        "llada",
        "llada sampled",
        "fast-dllm dual",
        "sdar",
        "sdar static",
        "sdar reusing",
        "sdar evicting",
        "fast-dllm-v2",
        "llada2.1",
    ],
)
def test_steps_are_replayed_and_ask_pytorch_for_nothing(way: str, opened: Any) -> None:
    """Once every size has run twice, all of a generation's steps are graphs, which give the tokens of the first run."""
    family, options = WAYS[way]
    model = opened(family, DEVICE)
    first = generated(model, family, options, LENGTHS[:1])
    generated(model, family, options, LENGTHS[:1])
    executors = list(model.executors)
    assert executors and all(executor.captured for executor in executors), [e.not_captured for e in executors]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_reserved()
    again = generated(model, family, options, LENGTHS[:1])
    torch.cuda.synchronize()
    assert (torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_reserved()) == before
    assert tokens_of(again) == tokens_of(first)


def test_pages_are_the_plans_at_every_step(opened: Any) -> None:
    family, options = WAYS["sdar"]
    model = opened(family, DEVICE)
    highest = model.check(
        decoding.shapes(decoding.GenerationConfig(**options), list(LENGTHS), model.architecture)
    ).total_bytes
    peaks: list[int] = []
    model.trim()
    most = model.workspace.committed_bytes()

    def measure(step: decoding.Step) -> None:
        for pool, size in step.plan.pools.items():
            most[pool] = max(most.get(pool, 0), size)
        held = model.workspace.committed_bytes()  # to the byte, the most that a step has needed
        assert {pool: size for pool, size in held.items() if size} == {p: n for p, n in most.items() if n}
        peaks.append(step.peak_bytes)

    first, changes = tokens_of(generated(model, family, options, on_step=measure)), model.workspace.changes()
    assert max(peaks) <= highest and not model.state_rows
    assert tokens_of(generated(model, family, options, on_step=measure)) == first
    assert model.workspace.changes() == changes  # a second generation finds all its memory
    free = torch.cuda.mem_get_info()[0]
    state = model.workspace.committed_bytes()["state/kv"]
    model.trim()
    assert model.workspace.committed_bytes()["state/kv"] == 0 < state <= torch.cuda.mem_get_info()[0] - free


def test_the_state_grows_where_it_is(opened: Any) -> None:
    """Pages come at the end of the state: what a sequence has written stays at its address, unmoved."""
    model = opened("sdar", DEVICE)
    sequence, state = model.open_sequence(), model.workspace.range("state/kv")
    (prompt,) = prompts_of(FAMILIES["sdar"], (64,))
    nothing = torch.empty(0, dtype=torch.int64)
    row_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
    sizes, places, first = [], set(), None
    for start, rows in ((0, 64), (64, 10_000), (128, 50_000), (192, 120_000)):
        sequence.reserve(rows)
        window: dict[str, Any] = {"token_ids": prompt, "start": start, "key_len": start + 64}
        (done,) = model.step([StepRequest(phase=COMMIT, sequence=sequence, rows=nothing, current=nothing, **window)])
        assert state.committed_bytes == done.plan.components["state"] >= rows * row_bytes
        kept = model.workspace.view("state/kv", 0, (64 * row_bytes,), "uint8")
        places.add(kept.data_ptr())
        first = kept.cpu() if first is None else first
        assert torch.equal(first, kept.cpu()) and first.any()
        sizes.append(state.committed_bytes)
    assert len(places) == 1 and len(set(sizes)) == 4
    sequence.close()


def test_steps_run_whose_states_begin_with_rows_that_nobody_owns(opened: Any) -> None:
    """Their pages are given back, but launchers are told of the state by its first byte."""
    model = opened("sdar", DEVICE)
    (prompt,) = prompts_of(FAMILIES["sdar"], (96,))
    with model.open_sequence() as first, model.open_sequence() as sequence:
        first.reserve(20_000)  # 10 MiB
        sequence.reserve(96)
        for length in (32, 96):
            window: dict[str, Any] = {"token_ids": prompt[:length], "start": 0, "key_len": length}
            nothing = torch.empty(0, dtype=torch.int64)
            (done,) = model.step(
                [StepRequest(phase=COMMIT, sequence=sequence, rows=nothing, current=nothing, **window)]
            )
            first.close()
            model.trim()
        assert model.workspace.committed_bytes()["state/kv"] < done.plan.components["state"]
    torch.cuda.synchronize()


_WITHIN = """
import json, sys, torch, mosaic
from mosaic import decoding
config, options, device, prompts = json.loads(sys.argv[1])
prompts = [torch.tensor(prompt) for prompt in prompts]
asked = decoding.GenerationConfig(stop_at_eos=False, **options)
with mosaic.compile(config, device=device) as model:
    shapes = decoding.shapes(asked, [len(prompt) for prompt in prompts], model.architecture)
    budget = model.check(shapes).total_bytes
    del shapes
with mosaic.compile(config, device=device, budget=budget) as model:
    most = 0
    def measure(step):
        global most
        free, total = torch.cuda.mem_get_info()
        most = max(most, total - free)
    for _ in range(3):
        model.generate(prompts, asked, on_step=measure)
print(json.dumps([most, budget]))
"""


@pytest.mark.alone
@pytest.mark.parametrize("way", ["llada", "sdar", "fast-dllm dual"])
def test_the_drivers_counter_stays_within_the_budget(way: str) -> None:
    """In a process of its own, whose context, modules and graphs the budget has to cover as well."""
    family, options = WAYS[way]
    prompts = [prompt.tolist() for prompt in prompts_of(FAMILIES[family])]
    given = json.dumps([FAMILIES[family], options, DEVICE, prompts])
    idle = torch.cuda.mem_get_info()
    ran = subprocess.run(
        [sys.executable, "-c", _WITHIN, given], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    most, budget = json.loads(ran.stdout)
    others = idle[1] - idle[0]  # this process has the card too
    assert 0 < most - others <= budget


@pytest.mark.parametrize("way", ["sdar", "sdar evicting"])
def test_many_get_their_own_tokens_though_the_card_begins_with_the_first(way: str, opened: Any) -> None:
    family, options = WAYS[way]
    model, config = opened(family, DEVICE), decoding.GenerationConfig(stop_at_eos=False, **options)
    prompts, taken, begun = prompts_of(FAMILIES[family], tuple(range(20, 60))), list[int](), list[int]()

    def entries() -> Iterator[tuple[int, list[decoding.Submission]]]:
        for number, prompt in enumerate(prompts):
            taken.append(number)
            yield number, [decoding.Submission(prompt=prompt, config=config, request_id=number)]

    with model.session(max_num_batched_tokens=256) as session:
        stream = decoding.Stream(session, after_step=lambda _: begun.append(len(taken)))
        found = [outcome.generations[0] for outcome in stream.run(entries())]
    assert begun[0] < len(prompts) == begun[-1]  # a step had ended before the last ones were taken
    for number, prompt in enumerate(prompts):
        alone = decoding.generate(model, [prompt], config, request_ids=[number])
        assert tokens_of(alone) == tokens_of(found[number : number + 1])


@pytest.mark.parametrize("delay_ms", [0.0, 0.01])
def test_others_step_between_the_parts_of_a_refresh(delay_ms: float) -> None:
    """A generator's Refresh is launched in parts beside a row of the table; both get what they get alone."""
    long = mosaic.GenerationConfig(**_FAST, threshold=1.0, cache="sparse:retention=0.3:sample=0.25")
    short = mosaic.GenerationConfig(**{**_FAST, "gen_length": 480}, threshold=1.0, cache="dual")
    prompts = [torch.arange(count) % 40 + 6 for count in (464, 9)]
    with mosaic.compile(FAMILIES["llada"], device=DEVICE, seed=3) as model:
        alone = [model.generate([prompt], config)[0] for prompt, config in zip(prompts, (long, short), strict=True)]
        with model.session(max_delay_ms=delay_ms) as session:
            beside = session.submit(prompts[1], short)
            session.advance(3)
            request, others = session.submit(prompts[0], long), 0
            while not request.steps:
                others += all(step.request != request.number for step in session.advance())
            assert others > 4
            cancelled = session.submit(prompts[0].flip(0), long)
            session.advance(2)
            session.cancel(cancelled)
            while session.live:
                session.advance()
        for found, expected in zip((request.generation, beside.generation), alone, strict=True):
            assert found is not None and found.token_ids.tolist() == expected.token_ids.tolist()
