"""Generation with token eviction and with delayed caches: against the paper's loop in float64, alone and in sessions."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from focus_published import Published, PublishedExperts
from focus_stated import Dual, Experts, Generated, StatedStep
from reference_runner import random_tensors
from test_cut import ARCH, CONFIG, TENSORS
from test_decoding import CONFIGS, MASK
from test_session import FAMILIES
from torch import Tensor

import mosaic
from benchmarks.quality.evaluation import evaluation_set
from benchmarks.quality.vocabulary import vocabulary
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Submission, generate, resolve
from mosaic.decoding.algorithms import largest_steps, shared_sizes
from mosaic.decoding.llada import schedule
from mosaic.decoding.noise import row_keys
from mosaic.errors import DoesNotFit, MosaicError, UnknownName, UsageError
from mosaic.kernels.shared.sampling import uniforms
from mosaic.models import load
from mosaic.models.architecture import Architecture
from mosaic.models.parts import KEPT, Commit
from mosaic.models.parts.windows import APART
from mosaic.models.phase import Phase
from mosaic.models.policies.focus import Focus
from mosaic.models.policies.focus_options import PRESETS, Eviction
from mosaic.models.policies.mage_options import PRESETS as SPARSE
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.models.policies.registry import token_eviction
from mosaic.models.state import State
from mosaic.models.step import StepSize, most_rows
from mosaic.planner.planner import Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.steps import StepRequest, StepResult

BLOCK = ARCH.block
READINGS: Mapping[str, Eviction | None] = {
    "none": None,
    **PRESETS,
    "ema": Eviction(history="ema", placeholders="masked", alpha=1.2),
    "mixed": Eviction(history="block", threshold="mean", pool=5, first_step="whole", alpha=1.0),
    "fixed": Eviction(keep=3),
    "bottom": Eviction(keep=1, rank="bottom"),
    "random": Eviction(rank="random"),
}
EXACTLY = {name: tensor.double() for name, tensor in TENSORS.items()}
KEYS = [(None, None), ("dc", "exact"), ("dc", "cached"), ("dc+", "exact"), ("dc+", "cached")]


@pytest.fixture(scope="module")
def runner() -> Iterator[CompiledRunner]:
    found = CompiledRunner(CONFIG, TENSORS, debug="poison")
    yield found
    found.close()


@pytest.fixture
def model(runner: CompiledRunner) -> Iterator[CompiledModel]:
    yield runner.model
    assert not runner.model.state_rows


@dataclass
class Recorder:
    """A model whose steps are noted, with what came of them."""

    model: CompiledModel
    steps: list[tuple[tuple[StepRequest, ...], list[StepResult]]] = field(default_factory=list)
    admitted: list[StepSize] = field(default_factory=list)

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def asynchronous(self) -> bool:
        return False

    def changed(self, request: StepRequest) -> StepRequest:
        """The request as it is run."""
        return request

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        self.steps.append((tuple(requests), self.model.step([self.changed(request) for request in requests])))
        return self.steps[-1][1]

    def open_rows(self, state: State, /) -> Any:
        return self.model.open_rows(state)

    def sharing(self) -> SharedSizes:
        return self.model.sharing()

    def exclusive(self) -> AbstractContextManager[object]:
        return self.model.exclusive()

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Any:
        return self.model.check(sizes, more=more)

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        self.admitted = list(sizes)
        return self.model.admits(sizes, more=more)

    def pays(self, size: StepSize) -> bool:
        return self.model.pays(size)

    def of_requests(self) -> list[list[StatedStep]]:
        """The steps of each request in its blocks, in the order of their first ones."""
        found: dict[int, list[StatedStep]] = {}
        for asked, results in self.steps:
            for request, result in zip(asked, results, strict=True):
                if request.phase.head.decides:
                    found.setdefault(id(request.sequence), []).append(done_in(request, result, self.architecture.block))
        return [*found.values()]


def positions_of(request: StepRequest) -> Tensor:
    first = request.start
    return torch.as_tensor(request.values.get("positions", torch.arange(first, first + len(request.token_ids)))).long()


def statement(name: str) -> type[Generated]:
    """Of the paper, or of the public implementation."""
    return Published if name == "focus-public" else Generated


def drawn(rng: random.Random, *, slowly: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """A prompt and options, by which blocks take several steps; `slowly`: one a token."""
    prompt = torch.tensor([rng.randrange(8, MASK) for _ in range(rng.choice([3, BLOCK, 2 * BLOCK + 5]))])
    dynamic = slowly or rng.random() < 0.7
    return prompt, {
        "gen_length": rng.choice([5, 16, 21]), "stop_at_eos": False,
        "steps": BLOCK if slowly else rng.choice([BLOCK, 4]), "threshold": 0.99 if slowly else rng.choice([0.35, 0.6]),
        "remasking": "low_confidence_dynamic" if dynamic else "low_confidence_static",
    }  # fmt: skip


CASES = [
    ("none", KEYS[2]), ("focus", KEYS[0]), ("mixed", KEYS[3]), ("fixed", KEYS[1]),
    *(
        pytest.param(name, KEYS[n], marks=pytest.mark.soak)
        for name, n in (("none", 3), ("none", 4), ("focus", 1), ("focus", 4), ("focus-public", 0), ("focus-public", 1),
                        ("focus-public", 3), ("focus-public", 4), ("ema", 2), ("bottom", 0), ("random", 4))
    ),
]  # fmt: skip


@pytest.mark.some
@pytest.mark.parametrize(("name", "keys"), CASES)
def test_generation_is_that_of_the_paper_in_float64(
    model: CompiledModel, name: str, keys: tuple[str | None, str | None]
) -> None:
    """Under poison: the tokens, those that each step computes, keeps and decides."""
    rng, gone = random.Random(f"{name} {keys}"), 0
    for slowly in (True, False) if name == "focus" else (True,):
        prompt, options = drawn(rng, slowly=slowly)
        recorder = Recorder(model)
        config = GenerationConfig(eviction=READINGS[name], block_cache=keys[0], block_commit=keys[1], **options)
        (found,) = generate(recorder, [prompt], config)
        stated = statement(name)(
            ARCH, EXACTLY, prompt, options["gen_length"], options["threshold"], schedule(BLOCK, options["steps"]),
            dynamic=options["remasking"] == "low_confidence_dynamic", eviction=READINGS[name], cache=keys[0],
            commit=keys[1] or "exact", noise=lambda step, place: float(uniforms(row_keys(0, 0, step, torch.tensor([place])))),
        )  # fmt: skip
        assert torch.equal(found.token_ids, stated.run())
        (steps,) = recorder.of_requests()
        assert steps == stated.steps
        for (request,), _ in recorder.steps:  # none is larger than those that were admitted
            asked = len(request.token_ids), request.key_len, len(request.rows)
            largest = [size for size in recorder.admitted if size.phase == request.phase]
            assert any(all(map(int.__ge__, (size.tokens, size.keys[0], size.rows), asked)) for size in largest)
        gone += sum(len(step.computed) - len(step.kept) for step in steps)
    assert (gone > 0) == (READINGS[name] is not None)


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_random_answers_are_those_of_the_public_implementation(model: CompiledModel, count: int) -> None:
    """In float64, with its delayed cache: the tokens, and what each step computes, keeps and decides."""
    rng = random.Random(count)
    public: dict[str, Any] = {"block_cache": "dc+", "block_commit": "cached"}
    for _ in range(count):
        prompt, options = drawn(rng, slowly=rng.random() < 0.5)
        config, recorder = GenerationConfig(**options, **public), Recorder(model)
        (found,) = generate(recorder, [prompt], replace(config, eviction="focus-public"))
        stated = Published(
            ARCH, EXACTLY, prompt, options["gen_length"], options["threshold"], schedule(BLOCK, options["steps"]),
            dynamic=options["remasking"] == "low_confidence_dynamic", eviction=PRESETS["focus-public"], cache="dc+",
            commit="cached",
        )  # fmt: skip
        assert torch.equal(found.token_ids, stated.run())
        assert recorder.of_requests() == [stated.steps]


@pytest.mark.some
@pytest.mark.parametrize(("name", "keys", "exact_layers", "every", "rows"), [
    ("focus", KEYS[0], 2, 0, 0), ("focus", KEYS[4], 1, 3, 1), ("none", KEYS[3], 0, 2, 3),
])  # fmt: skip
def test_queries_are_evicted_and_keys_selected_by_the_same_steps(
    model: CompiledModel, name: str, keys: tuple[str | None, str | None], exact_layers: int, every: int, rows: int
) -> None:
    """The tokens, and what each step computes, keeps and decides, as in float64; not those of attention to all keys."""
    rng = random.Random(f"sparse {name}")
    prompt = torch.tensor([rng.randrange(8, MASK) for _ in range(rng.randint(30, 50))])
    config = GenerationConfig(
        eviction=READINGS[name],
        block_cache=keys[0],
        block_commit=keys[1],
        gen_length=21,
        threshold=0.6,
        stop_at_eos=False,
    )
    recorder, attention = Recorder(model), SparseAttention(k=5, exact_layers=exact_layers, every=every, rows=rows)
    (found,) = generate(recorder, [prompt], replace(config, attention=attention))
    stated = Generated(
        ARCH, EXACTLY, prompt, 21, 0.6, [1] * BLOCK, eviction=READINGS[name], cache=keys[0], commit=keys[1] or "exact",
        selected=5, exact_layers=exact_layers, every=every, rows=rows,
    )  # fmt: skip
    assert torch.equal(found.token_ids, stated.run()) and recorder.of_requests() == [stated.steps]
    assert not torch.equal(found.token_ids, generate(model, [prompt], config)[0].token_ids)


@pytest.mark.parametrize("way", [pytest.param("mage", marks=pytest.mark.soak), "quest"])
def test_sparse_attention_to_every_key_changes_nothing_that_eviction_does(model: CompiledModel, way: str) -> None:
    """With as many keys selected as there are; requests in their first steps share them with others."""
    rng = random.Random(way)
    prompts = [torch.tensor([rng.randrange(8, MASK) for _ in range(count)]) for count in (3, 30, 16)]
    config = GenerationConfig(eviction="focus", block_cache="dc+", gen_length=16, stop_at_eos=False, threshold=0.6)
    expected = Recorder(model)
    exact = generate(expected, prompts, config)
    attention = replace(SPARSE[way], exact_layers=1, page=2 if way == "quest" else 1)
    found = Recorder(model)
    for mine, other in zip(generate(found, prompts, replace(config, attention=attention)), exact, strict=True):
        assert torch.equal(mine.token_ids, other.token_ids)
    assert found.of_requests() == expected.of_requests()


@pytest.mark.soak
@pytest.mark.parametrize("way", ["focus:alpha=1.2", "focus:rank=random", "focus-public"])
def test_generation_of_the_trained_model_is_that_of_the_paper_in_float64(way: str) -> None:
    """A chain that small-sdar follows through a document: tokens, and what each step computes, keeps and decides."""
    (item, *_) = evaluation_set(tasks=("chain",), lengths=(1024,))
    prompt, eviction = torch.tensor(vocabulary().encode(item.prompt)), token_eviction(way)
    with mosaic.compile("small-sdar", device="cpu", dtype="float32") as trained:
        arch, recorder = trained.architecture, Recorder(trained)
        exactly = {name: view.double() for name, view in trained.weights().items()}
        config = GenerationConfig(gen_length=40, eviction=eviction, block_cache="dc+", threshold=0.9, stop_at_eos=False)
        (found,) = generate(recorder, [prompt], config)
    stated = statement(way)(
        arch, exactly, prompt, 40, 0.9, [1], eviction=eviction, cache="dc+",
        noise=lambda step, place: float(uniforms(row_keys(0, 0, step, torch.tensor([place])))),
    )  # fmt: skip
    assert torch.equal(found.token_ids, stated.run())
    (steps,) = recorder.of_requests()
    assert len(steps) > 16 and steps == stated.steps


@pytest.fixture(scope="module")
def shifted() -> Iterator[CompiledRunner]:
    """Fast-dLLM v2: a token's row predicts the next one."""
    config = {**CONFIGS["fast-dllm-v2"], "num_hidden_layers": 4}
    found = CompiledRunner(config, random_tensors(load(config).architecture, 3), debug="poison")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("name", "cache"), [("focus", "dc+"), pytest.param("focus-public", None, marks=pytest.mark.soak)]
)
def test_generation_on_a_shifted_model_is_that_of_the_paper_in_float64(
    shifted: CompiledRunner, name: str, cache: str | None
) -> None:
    """A token that is kept decides the next one; requests get what they get alone."""
    rng, arch = random.Random(f"{name} {cache}"), shifted.architecture
    exactly = {key: tensor.double() for key, tensor in random_tensors(arch, 3).items()}
    prompts = [torch.tensor([rng.randrange(8, MASK) for _ in range(count)]) for count in (BLOCK, 2 * BLOCK + 5)]
    config = GenerationConfig(
        eviction=READINGS[name], block_cache=cache, gen_length=14, threshold=0.6, top_p=1.0, stop_at_eos=False
    )
    together = generate(shifted.model, prompts, config)
    for mine, prompt in zip(together, prompts, strict=True):
        recorder, stated = Recorder(shifted.model), statement(name)(arch, exactly, prompt, 14, 0.6, [1], cache=cache)
        stated.eviction = READINGS[name]
        generate(recorder, [prompt], config)
        assert torch.equal(mine.token_ids, stated.run())
        steps = [(asked[0], results[0]) for asked, results in recorder.steps if asked[0].phase.cut is not None]
        for (request, result), step in zip(steps, stated.steps, strict=True):
            places = positions_of(request)
            rows, kept, committed = places[request.rows], result.values["kept"], result.committed
            assert places.tolist() == step.computed
            assert rows[kept].tolist() == [place for place in rows.tolist() if place - 1 in step.kept]
            assert dict(zip(rows[committed].tolist(), result.chosen[committed].tolist(), strict=True)) == step.decided
            assert int(result.values["reach"]) > max(step.kept)


@pytest.mark.parametrize("options", [{}, {"block_cache": "dc+"}])
def test_a_finished_block_of_a_shifted_model_shares_a_step_with_blocks_that_are_not(
    shifted: CompiledRunner, options: dict[str, Any]
) -> None:
    prompts = [torch.arange(8, 8 + count) for count in (2 * BLOCK, 2 * BLOCK + 5)]
    config = GenerationConfig(gen_length=4 * BLOCK, threshold=0.6, top_p=1.0, stop_at_eos=False, **options)
    recorder = Recorder(shifted.model)
    together = generate(recorder, prompts, config)
    shared = [
        {int(request.rows[0]) == request.token_ids.numel() for request in asked}
        for asked, _ in recorder.steps
        if len(asked) == 2
    ]
    assert {True, False} in shared  # whose row to decide lies beyond the window, and not
    for mine, prompt in zip(together, prompts, strict=True):
        (alone,) = generate(shifted.model, [prompt], config)
        assert torch.equal(mine.token_ids, alone.token_ids)


@pytest.mark.some
@pytest.mark.parametrize(("expected", "evicts"), [(0, True), (1, False), (64, True)])
def test_eviction_that_does_not_pay_for_the_requests_that_are_expected_is_left_out(
    model: CompiledModel, caplog: pytest.LogCaptureFixture, expected: int, evicts: bool
) -> None:
    """The tokens are those of whole blocks, or those of eviction; how many requests there are does not matter."""
    prompt = torch.arange(8, 8 + BLOCK + 3)
    config = GenerationConfig(gen_length=BLOCK, threshold=0.6, stop_at_eos=False)
    options: dict[str, Any] = {"eviction": Eviction(requests=expected), "block_cache": "dc+", "block_commit": "cached"}
    recorder = Recorder(model)
    with caplog.at_level(logging.WARNING):
        (found,) = generate(recorder, [prompt], replace(config, **options))
    like = options | {"eviction": Eviction()} if evicts else {}
    (alone,) = generate(model, [prompt], replace(config, **like))
    assert torch.equal(found.token_ids, alone.token_ids)
    cut = [request.phase.cut is not None for asked, _ in recorder.steps for request in asked if len(request.rows)]
    assert cut and {*cut} == {evicts}
    said = [record.getMessage() for record in caplog.records]
    line = (
        "request 0: eviction left out: by the plans it saves no time with 1 a step; expect more to evict (requests=64)"
    )
    assert said == ([] if evicts else [line])


@pytest.mark.parametrize(
    "requests", [1, 13, 64, 79]
)  # of 13 and 79 tokens and rows are rounded otherwise once it is not cut
def test_what_pays_is_what_plans_predict(model: CompiledModel, requests: int) -> None:
    phase = Phase(
        cache=KEPT, tokens=APART, commit=Commit(score="confidence", rule="dynamic"), cut=Focus(eviction=Eviction())
    )
    size = StepSize(phase=phase, windows=(BLOCK,) * requests, keys=(64,) * requests, rows=BLOCK * requests)
    whole, prefix, suffix = (
        model.planner.plan(step.rounded(), limit=False).predicted_step_ms
        for step in (replace(size, phase=replace(phase, cut=None)), size.graphs[0], size.graphs[1])
    )
    assert size.graphs[1].kept == size.buckets[0] and model.pays(size) == (prefix + suffix <= 0.98 * whole)
    assert model.pays(size) == (requests > 16)


@pytest.mark.parametrize("name", [pytest.param("focus", marks=pytest.mark.soak), "focus-public"])
def test_the_active_block_of_a_dual_cache_is_evicted_from_as_in_float64(name: str) -> None:
    """On LLaDA, which sees all keys: the tokens, those that each step keeps and decides, and what requests get alone."""
    rng, config, eviction = random.Random(name), {**CONFIGS["llada"], "n_layers": 3}, PRESETS[name]
    arch = load(config).architecture
    tensors = random_tensors(arch, 3)
    exactly = {key: tensor.double() for key, tensor in tensors.items()}
    prompts = [torch.tensor([rng.randrange(8, MASK) for _ in range(count)]) for count in (3, 17)]
    options = GenerationConfig(
        algorithm="fast-dllm",
        cache="dual",
        block_length=8,
        gen_length=16,
        threshold=0.6,
        stop_at_eos=False,
        eviction=eviction,
    )
    dual = CompiledRunner(config, tensors, debug="poison")
    together, gone = generate(dual.model, prompts, options), 0
    for mine, prompt in zip(together, prompts, strict=True):
        recorder = Recorder(dual.model)
        generate(recorder, [prompt], options)
        stated = Dual(
            arch, exactly, prompt, 16, 0.6, [1], eviction=replace(eviction, first_step="evicts", reach="block")
        )
        assert torch.equal(mine.token_ids, stated.run())
        cut = [(asked[0], results[0]) for asked, results in recorder.steps if asked[0].phase.cut is not None]
        for (request, result), step in zip(cut, stated.steps, strict=True):
            rows, kept, committed = request.rows + request.start, result.values["kept"], result.committed
            assert rows[kept].tolist() == [place for place in rows.tolist() if place in step.kept]
            assert dict(zip(rows[committed].tolist(), result.chosen[committed].tolist(), strict=True)) == step.decided
            gone += int((~kept).sum())
    assert gone
    plain, whole = (
        generate(dual.model, prompts, replace(options, eviction=eviction)) for eviction in (None, Eviction(alpha=1e6))
    )
    assert all(torch.equal(one.token_ids, other.token_ids) for one, other in zip(plain, whole, strict=True))
    dual.close()


@pytest.fixture(scope="module")
def experts() -> Iterator[CompiledModel]:
    """A LLaDA2.0 with groups of experts, attention that is far from even, and half of each head turned."""
    config = {
        **FAMILIES["llada2"], "num_hidden_layers": 3, "num_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    with mosaic.compile(config, device="cpu", host_budget=0, debug="poison", seed=3) as found:
        generator = torch.Generator().manual_seed(7)
        for name, view in found.weights().items():
            if view.dim() > 1 or name.endswith("bias"):
                view.copy_(torch.randn(view.shape, generator=generator) * (2 if "query_key" in name else 0.5))
        found.weights()["model.word_embeddings.weight"][95] *= 0.2  # masks, which are most of what there is, say little
        yield found


@pytest.mark.parametrize(
    ("name", "keys"), [("focus", KEYS[4]), pytest.param("focus-public", KEYS[0], marks=pytest.mark.soak)]
)
def test_generation_of_llada2_is_that_of_the_paper_in_float64(
    experts: CompiledModel, name: str, keys: tuple[str | None, str | None]
) -> None:
    """Experts route the rows that are kept: tokens, and what is computed, kept and decided, of requests together."""
    rng, gone = random.Random(name), 0
    exactly = {key: view.double() for key, view in experts.weights().items()}
    prompts = [torch.tensor([rng.randrange(8, 60) for _ in range(count)]) for count in (3, 12)]
    config = GenerationConfig(
        eviction=READINGS[name], block_cache=keys[0], block_commit=keys[1], gen_length=14, threshold=0.3, stop_at_eos=False
    )  # fmt: skip
    recorder = Recorder(experts)
    found = generate(recorder, prompts, config)
    for prompt, mine, steps in zip(prompts, found, recorder.of_requests(), strict=True):
        stated = (PublishedExperts if name == "focus-public" else Experts)(
            experts.architecture, exactly, prompt, 14, 0.3, [1], eviction=READINGS[name], cache=keys[0], commit=keys[1] or "exact"
        )  # fmt: skip
        assert torch.equal(mine.token_ids, stated.run()) and steps == stated.steps
        gone += sum(len(step.computed) - len(step.kept) for step in steps)
    assert gone > 0


def done_in(request: StepRequest, result: StepResult, block: int) -> StatedStep:
    """The outcome of a step in its block."""
    places = positions_of(request)
    open_ = places[request.rows]
    dropped = open_[~result.values.get("kept", torch.ones(len(open_), dtype=torch.bool))]
    computed = places[places >= places[-1] // block * block].tolist()
    decided = zip(open_[result.committed].tolist(), result.chosen[result.committed].tolist(), strict=True)
    return StatedStep(computed, [place for place in computed if place not in dropped.tolist()], dict(decided))


@pytest.mark.parametrize("keys", [KEYS[n] for n in (0, 2)])
def test_with_a_large_alpha_generation_is_that_without_eviction(
    model: CompiledModel, keys: tuple[str | None, str | None]
) -> None:
    """To the bit, with the same tokens computed: what it decides, how sure of it, and in how many steps."""
    rng = random.Random(f"alpha {keys}")
    prompts, options = zip(*(drawn(rng) for _ in range(3)), strict=True)
    config = GenerationConfig(block_cache=keys[0], block_commit=keys[1], **options[0])
    every = generate(model, prompts, replace(config, eviction=Eviction(alpha=1e6)))
    for mine, other in zip(every, generate(model, prompts, config), strict=True):
        assert torch.equal(mine.token_ids, other.token_ids) and torch.equal(mine.confidence, other.confidence)
        assert mine.steps == other.steps


@pytest.mark.parametrize(
    ("name", "keys"), [("random", KEYS[4]), pytest.param("focus-public", KEYS[0], marks=pytest.mark.soak)]
)
def test_requests_at_any_progress_share_steps_and_get_what_they_get_alone(
    model: CompiledModel, name: str, keys: tuple[str | None, str | None]
) -> None:
    """The same tokens, computed and kept by the same steps; while others come and are cancelled."""
    rng, recorder, live, shared = random.Random(name), Recorder(model), list[LiveRequest](), 0
    base = GenerationConfig(
        eviction=READINGS[name], block_cache=keys[0], block_commit=keys[1], stop_at_eos=False, threshold=0.5
    )
    asked = [(drawn(rng)[0], replace(base, gen_length=rng.choice([5, 16]))) for _ in range(5)]
    with Session(recorder) as session:
        for number, (prompt, config) in enumerate(asked):
            live.append(session.submit(prompt, config, request_id=number))
            session.advance(rng.randint(1, 4))
        session.cancel(live[2])
        while session.live:
            session.advance()
    for requests, results in recorder.steps:
        blocks = {request.start // BLOCK for request in requests if request.phase.head.decides}
        shared += len(blocks) > 1
        planned, computed = results[0].plan.dims["tokens"], sum(len(request.token_ids) for request in requests)
        rounded = keys[0] is not None and bool(blocks)  # so that windows of any lengths need few plans
        assert not rounded or computed <= planned == 1 << (planned - 1).bit_length() < 2 * computed
    assert shared > 3
    for number, ((prompt, config), mine, steps) in enumerate(zip(asked, live, recorder.of_requests(), strict=True)):
        if number == 2:
            continue
        alone = Recorder(model)
        (other,) = generate(alone, [prompt], config, request_ids=[number])
        assert mine.generation is not None and torch.equal(mine.generation.token_ids, other.token_ids)
        assert alone.of_requests() == [steps]
        torch.testing.assert_close(mine.generation.confidence, other.confidence)


def test_what_is_admitted_runs_to_its_end() -> None:
    """Within a budget of just the largest steps, whatever the requests decide."""
    rng = random.Random(4)
    way: dict[str, Any] = {"eviction": "focus", "block_cache": "dc+", "threshold": 0.5, "stop_at_eos": False}
    submissions = [
        Submission(prompt=drawn(rng)[0], config=GenerationConfig(gen_length=16, **way), request_id=n) for n in range(4)
    ]
    planner = Planner(load(CONFIG), device="cpu", host_budget=0)
    arch = planner.model.architecture
    largest = [largest_steps(resolve(s.config, arch), arch, s.prompt.numel(), s.request_id) for s in submissions]
    sizes = shared_sizes(largest)
    budget = max(planner.needed(size.beside(most_rows(sizes))) for size in sizes)
    small = CompiledRunner(CONFIG, TENSORS, budget=budget, host_budget=0)
    with Session(small.model) as session:
        live = session.submit_all(submissions)
        with pytest.raises(DoesNotFit):
            session.submit(torch.arange(8, 72) % 80 + 8, GenerationConfig(gen_length=128, **way))
        while session.live:
            session.advance()
    assert all(one.generation is not None and one.generation.finish == "length" for one in live)
    small.close()


# --- schedules --------------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows of a state, which only their owner tells apart."""

    length: int = 0

    def reserve(self, count: int) -> None:
        self.length = count

    def close(self) -> None:
        self.length = 0


@dataclass
class Truth:
    """The state of one request, from outcomes alone; the rules of section 4.3 give the computed tokens."""

    config: GenerationConfig
    tokens: list[int]
    prompt_len: int
    decided: dict[int, int] = field(default_factory=dict)  # by position, the step of its block that decided it
    keys: dict[int, int] = field(default_factory=dict)  # by position, the step that wrote its keys of later layers last
    start: int = 0
    step: int = 0
    reached: int = 0
    before: int | None = None
    blocks: int = 0
    last: int = 0  # steps of the block before

    def computes(self, place: int, step: int) -> bool:
        """Whether a step of a block computes a position of it: one step more after it was decided, and its neighbour."""
        never = 10**9
        after = self.decided.get(place, never)
        if self.config.block_cache == "dc+" and (place + 1) % BLOCK:
            after = max(after, self.decided.get(place + 1, never))
        return self.config.block_cache is None or step <= after + 1

    def fill(self, request: StepRequest) -> None:
        """A prefill, of the prompt's whole blocks."""
        assert not self.keys and positions_of(request).tolist() == list(range(self.prompt_len // BLOCK * BLOCK))
        self.start = len(request.token_ids)
        self.keys |= dict.fromkeys(range(self.start), -1)

    def take(self, request: StepRequest, rng: random.Random) -> StepResult:
        """Check what is asked for, drop and decide at random, and check which keys are read."""
        if not self.step and not self.blocks and not self.decided:
            self.decided |= dict.fromkeys(range(self.start, self.prompt_len), -1)
        places, end = positions_of(request).tolist(), self.start + BLOCK
        block = [place for place in range(self.start, end) if self.computes(place, self.step)]
        again = [*range(self.start - BLOCK, self.start)] if self.blocks and not self.step else []
        if self.config.block_commit == "cached":
            again = [place for place in again if self.computes(place, self.last)]
        assert places == [*again, *block]
        assert request.token_ids.tolist() == [self.tokens[place] for place in places] and request.key_len == end
        masked = [place for place in block if place not in self.decided]
        assert [places[row] for row in request.rows.tolist()] == masked
        kept = set(masked)
        if self.config.eviction is not None:
            told = request.values["block"]
            assert (told.start, told.step, told.decoded) == (self.start, self.step, self.before)
            assert [self.start + offset for offset in told.masked] == masked
            assert self.start + told.processed == max(self.reached, self.start)
            kept = set(rng.sample(masked, rng.randint(1, len(masked))))
            kept |= {place for place in masked if place < max(kept) and self.keys.get(place, -2) < 0}
        for place in places:
            if place not in masked or place in kept:
                self.keys[place] = self.step if place >= self.start else -1
        self.reached = max(self.reached, max(place for place in places if place in kept or place not in masked) + 1)
        assert all(self.keys.get(place, -2) >= 0 for place in range(self.start, self.reached))
        taken = set(rng.sample(sorted(kept), min(rng.choice([1, 1, 2, 5]), len(kept))))
        for place in taken:
            assert place not in self.decided
            self.decided[place], self.tokens[place] = self.step, place % 90
        self.before, self.step = len(taken), self.step + 1
        if len([place for place in range(self.start, end) if place in self.decided]) == BLOCK:
            self.finish()
        chosen = torch.tensor([place % 90 if place in taken else MASK for place in masked])
        return StepResult(
            token=chosen, score=torch.ones(len(masked)), committed=torch.tensor([place in taken for place in masked]),
            chosen=chosen, plan=PLAN, seconds=0.0,
            values={} if self.config.eviction is None else {"kept": torch.tensor([place in kept for place in masked])},
        )  # fmt: skip

    def finish(self) -> None:
        """A block's keys are those of the last step that computed them, or of a later one than decided."""
        for place in range(self.start, self.start + BLOCK):
            assert self.keys[place] == max(step for step in range(self.step) if self.computes(place, step))
        self.last, self.start, self.step, self.blocks = self.step, self.start + BLOCK, 0, self.blocks + 1


PLAN: Any = SimpleNamespace(total_bytes=1)


class Chance:
    """Runs the steps of one request without a model."""

    architecture = ARCH

    def __init__(self, rng: random.Random, truth: Truth) -> None:
        self._rng, self._truth = rng, truth

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        (request,) = requests
        if request.phase.head.decides:
            return [self._truth.take(request, self._rng)]
        self._truth.fill(request)
        nothing = torch.empty(0, dtype=torch.int64)
        return [
            StepResult(
                token=nothing, score=torch.empty(0), committed=nothing.bool(), chosen=nothing, plan=PLAN, seconds=0.0
            )
        ]

    def open_rows(self, state: State, /) -> Any:
        return Rows()

    def sharing(self) -> SharedSizes:
        return SharedSizes()

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Any:
        return PLAN

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        return True


@pytest.mark.parametrize("count", [15, pytest.param(3000, marks=pytest.mark.soak)])
def test_over_random_schedules_no_token_is_lost_and_no_key_is_another_than_it_should_be(count: int) -> None:
    """Each token is decided once, every key that is read was written in its block, by the step that the rules name."""
    for number in range(count):
        for keys in KEYS:
            for eviction in (None, Eviction()):
                rng = random.Random(number)
                prompt, options = drawn(rng)
                config = GenerationConfig(
                    gen_length=options["gen_length"], stop_at_eos=False, eviction=eviction, block_cache=keys[0],
                    block_commit=keys[1],
                )  # fmt: skip
                length = -(-(len(prompt) + config.gen_length) // BLOCK) * BLOCK
                truth = Truth(config, [*prompt.tolist(), *[MASK] * (length - len(prompt))], len(prompt))
                (found,) = generate(Chance(rng, truth), [prompt], config)
                assert found.token_ids.tolist() == truth.tokens[len(prompt) : len(prompt) + config.gen_length]
                assert MASK not in found.token_ids.tolist()


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"eviction": "fokus"}, UnknownName, "eviction 'fokus'.*focus"),
    ({"eviction": "focus:keeps=4"}, UnknownName, "option of 'focus' 'keeps'.*keep"),
    ({"eviction": "focus:keep=-4"}, UsageError, "keep is -4"), ({"eviction": "focus:keep"}, UsageError, "expected option=value"),
    ({"eviction": 3}, UsageError, "eviction is 3; it must be Eviction"),
    ({"eviction": "focus:keep=4:keep=8"}, UsageError, "'keep' is given twice"),
    ({"eviction": "focus:threshold=0.9"}, UnknownName, "eviction's threshold '0.9'. Known: deviation, mean"),
    ({"block_cache": "dc++"}, UnknownName, r"block_cache 'dc\+\+'"),
    ({"block_commit": "never"}, UnknownName, "block_commit 'never'"),
    ({"block_commit": "cached"}, UsageError, "is about tokens that a block cache has frozen; give block_cache"),
    ({"eviction": "focus", "remasking": "sequential"}, UsageError, "eviction: 'sequential' decides the first masks"),
    (
        {"block_cache": "dc", "block_commit": "cached", "attention": "oracle"}, UsageError,
        "block_commit 'cached': attention that selects",
    ),
    (
        {"block_cache": "dc", "algorithm": "fast-dllm-v2"}, UsageError,
        "on this model a token predicts its right neighbour, so it is computed until that is decided; use 'dc\\+'",
    ),
    (
        {"eviction": "focus", "small_block_length": 4, "algorithm": "fast-dllm-v2"}, UsageError,
        "not small blocks of 4; leave small_block_length out",
    ),
    (
        {"block_cache": "dc+", "cache": "dual", "algorithm": "fast-dllm-v2"}, UsageError,
        "cache 'dual' and block_cache 'dc\\+' both say which tokens of a block are computed; give one",
    ),
    ({"algorithm": "llada2.1", "eviction": "focus"}, UsageError, "eviction means nothing to the algorithm 'llada2.1'"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options: dict[str, Any], error: type[MosaicError], message: str) -> None:
    arch = load({**CONFIGS["fast-dllm-v2"], "num_hidden_layers": 4} if "v2" in str(options) else CONFIG).architecture
    with pytest.raises(error, match=message) as caught:
        resolve(GenerationConfig(gen_length=8, **options), arch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "message"), [
    ("llada-8b", "eviction: this model attends in both directions"), ("dream-7b", "attends in both directions"),
    ({**CONFIG, "num_hidden_layers": 2}, "the model's 2 leave none to save"),
])  # fmt: skip
def test_models_whose_tokens_cannot_be_evicted_are_refused(config: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(GenerationConfig(eviction="focus"), load(config).architecture)


def test_rows_that_are_chosen_before_a_step_are_not_evicted() -> None:
    config = GenerationConfig(eviction="focus", cache="dual", remasking="random", algorithm="llada", gen_length=8)
    with pytest.raises(UsageError, match="eviction: 'random' chooses rows before a step runs"):
        resolve(config, load("llada-8b").architecture)


def test_with_a_block_cache_blocks_are_committed_exactly() -> None:
    static = GenerationConfig(remasking="low_confidence_static")
    found = resolve(replace(static, eviction="focus-public", block_cache="dc+"), ARCH)
    assert found.eviction == PRESETS["focus-public"] and found.block_commit == "exact"
    assert resolve(static, ARCH).block_commit is None
