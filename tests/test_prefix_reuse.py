"""Reuse of attention outputs over a prefix: against a model in float64 that keeps them key by key, and in sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_stated import BLOCK, CONFIG, HEADS, KV_HEADS, LAYERS, SIZE, Plain
from telling import Telling
from test_session import FAMILIES
from torch import Tensor

import mosaic
from mosaic.decoding import GenerationConfig
from mosaic.decoding.session import Session
from mosaic.errors import UnknownName, UsageError
from mosaic.models.parts import Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.flashblock import PrefixReuse, Reused
from mosaic.models.policies.mage import Selected
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.models.step import StepSize
from mosaic.planner import Planner, Request
from mosaic.runtime.compiled import CompiledModel

STATIC: dict[str, Any] = {"steps": 4, "remasking": "low_confidence_static", "stop_at_eos": False}


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIG, device="cpu", host_budget=0, debug="poison", seed=3) as compiled:
        generator = torch.Generator().manual_seed(11)
        for name, view in compiled.weights().items():
            if not name.startswith("="):
                vector = view.dim() == 1
                view.copy_(torch.empty(view.shape).normal_(1.0 if vector else 0.0, 0.3, generator=generator))
        yield compiled


class Again(Plain):
    """SDAR in float64, whose outputs over a block's prefix are kept: of every layer, row and head, as a sum and a total.

    Written from FlashBlock's formula: with e_j = exp(q k_j / sqrt(H)) a row's attention is (sum of e_j v_j over the prefix, plus
    that over the block) / (sum of e_j over the prefix, plus that over the block). The sums over the prefix are those of the last
    refresh.
    """

    def __init__(self, model: CompiledModel, chosen: SparseAttention | PrefixReuse, prompt: Tensor) -> None:
        sparse = isinstance(chosen, SparseAttention)
        super().__init__(model, chosen if sparse else None, prompt)
        self.reuse = chosen.reuse if isinstance(chosen, SparseAttention) else chosen
        self.layers = chosen.exact_layers if isinstance(chosen, SparseAttention) else LAYERS
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.refreshes: bool | None = None  # of a step of a block
        self.changes: list[float] = []
        self.refreshed: list[bool] = []

    def denoise(self, ids: Tensor, start: int, step: int, steps: int, *, carries: bool) -> Tensor:
        assert self.reuse is not None
        bound, age = self.reuse.change, self.reuse.steps
        if step == 0:
            self.refreshes, self.age = True, 0
        else:
            self.age += 1
            changed = bound is not None and self.changes[-1] >= bound
            self.refreshes = changed or (age is not None and self.age >= age)
            self.age = 0 if self.refreshes else self.age
        self.refreshed.append(self.refreshes)
        logits = super().denoise(ids, start, step, steps, carries=carries)
        self.refreshes = None
        return logits

    def attended(self, layer: int, q: Tensor, kept: Tensor, start: int, mode: str) -> list[Tensor]:
        if self.refreshes is None or layer >= self.layers or not start:
            return super().attended(layer, q, kept, start, mode)
        heads = []
        for head in range(HEADS):
            k, v = kept[:, :, head // (HEADS // KV_HEADS)].unbind(1)
            e = torch.exp(q[:, head] @ k.T * SIZE**-0.5)
            if self.refreshes:
                self.kept[layer, head] = e[:, :start] @ v[:start], e[:, :start].sum(1)
            top, total = self.kept[layer, head]
            heads.append((top + e[:, start:] @ v[start:]) / (total + e[:, start:].sum(1))[:, None])
        if layer == self.layers - 1:
            self.queries = q if self.refreshes else self.queries
            self.changes.append(float((q - self.queries).norm() / self.queries.norm()))
        return heads


MAGE = SparseAttention(k=8, exact_layers=2)
WAYS: dict[str, SparseAttention | PrefixReuse] = {
    "flashblock": PrefixReuse(),
    "two steps": PrefixReuse(steps=2),
    "a bound": PrefixReuse(change=0.4),
    "both": PrefixReuse(steps=3, change=0.5),
    "beside sparse layers, a bound": replace(
        MAGE, exact_layers=3, reuse=PrefixReuse(steps=2, change=0.4), carried=True, every=3
    ),
    "beside an oracle": replace(MAGE, exact_layers=1, exact_last=1, selects="every", reuse=PrefixReuse(steps=3)),
}


@pytest.mark.some
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in ("two steps", "both") else ()) for name in WAYS],
)
def test_answers_are_those_of_the_policy_in_float64(name: str, model: CompiledModel) -> None:
    """And exact attention would have answered otherwise."""
    source, others, refreshed = random.Random(name), 0, list[bool]()
    for length in (3, 38):
        prompt, gen = torch.tensor([source.randrange(60) for _ in range(length)]), source.randint(13, 20)
        plain = Again(model, WAYS[name], prompt)
        expected = plain.generate(prompt, gen, 4)
        assert torch.equal(
            model.generate(prompt, attention=WAYS[name], gen_length=gen, **STATIC)[0].token_ids, expected
        )
        others += int((model.generate(prompt, gen_length=gen, **STATIC)[0].token_ids != expected).sum())
        refreshed += plain.refreshed
    assert others and 0 < sum(refreshed) < len(refreshed)


@pytest.mark.parametrize("chosen", [pytest.param(None, marks=pytest.mark.soak), MAGE], ids=["exact", "mage"])
def test_with_a_refresh_in_every_step_nothing_is_reused(chosen: SparseAttention | None, model: CompiledModel) -> None:
    """Alone, in steps that tell how much queries changed; and beside sparse layers."""
    prompts = [torch.arange(n) % 60 for n in (1, 50)]
    every = PrefixReuse(change=0.0) if chosen is None else replace(chosen, reuse=PrefixReuse(steps=1))
    expected = model.generate(prompts, gen_length=10, attention=chosen, **STATIC)
    found = model.generate(prompts, gen_length=10, attention=every, **STATIC)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine.token_ids, other.token_ids)
        torch.testing.assert_close(mine.confidence, other.confidence)


@pytest.mark.parametrize("family", [pytest.param("llada2", marks=pytest.mark.soak), "fast-dllm-v2"])
def test_other_families_reuse(family: str) -> None:
    """With a refresh in every step they answer as with exact attention, with one in the first alone they do not."""
    prompts = [torch.arange(n) % 60 for n in (1, 50)]
    dual: dict[str, Any] = {"cache": "dual", "small_block_length": 2} if family == "fast-dllm-v2" else {}
    with mosaic.compile(FAMILIES[family], device="cpu", host_budget=0, debug="poison", seed=3) as other:
        for name, view in other.weights().items():
            if not name.startswith("=") and view.dim() > 1:
                view.mul_(8)  # attention that is not all but even
        for more in ({}, dual) if dual else ({},):
            expected = [one.token_ids for one in other.generate(prompts, gen_length=20, **more)]
            for way, same in ((PrefixReuse(steps=1), True), ("flashblock", False)):
                found = [one.token_ids for one in other.generate(prompts, gen_length=20, attention=way, **more)]
                assert all(map(torch.equal, found, expected)) == same, (way, more)


def test_tokens_that_are_left_out_of_steps_reuse_nothing(model: CompiledModel) -> None:
    """Rows stand apart then; with a refresh in every step answers are those without reuse."""
    prompts = [torch.arange(n) % 60 for n in (3, 30)]
    options: dict[str, Any] = {"gen_length": 10, "block_cache": "dc", **STATIC}
    plain, every, half = (
        [one.token_ids for one in model.generate(prompts, attention=attention, **options)]
        for attention in (None, PrefixReuse(steps=1), PrefixReuse(steps=2, change=0.5))
    )
    assert all(map(torch.equal, every, plain)) and not all(map(torch.equal, half, plain))
    for number, prompt in enumerate(prompts):
        alone = model.generate(prompt, attention=PrefixReuse(steps=2, change=0.5), **options)[0].token_ids
        assert torch.equal(alone, half[number])


@pytest.mark.parametrize("name", [pytest.param("two steps", marks=pytest.mark.soak), "beside sparse layers, a bound"])
def test_requests_at_any_step_share_a_forward_and_get_what_they_get_alone(name: str, model: CompiledModel) -> None:
    """One that refreshes beside others that reuse, in one phase; each to the bit."""
    source, mixed = random.Random(name), 0
    options = GenerationConfig(gen_length=13, attention=WAYS[name], **STATIC)
    prompts = [torch.tensor([source.randrange(60) for _ in range(source.randint(3, 40))]) for _ in range(4)]
    telling, kept = Telling(model), []
    with Session(telling) as session:
        for number, prompt in enumerate(prompts):
            kept.append(session.submit(prompt, options, request_id=number))
            session.advance(source.randint(1, 4))
        while session.live:
            session.advance()
    for asked in telling.asked:
        mixed += len({one.values["refreshes"] for one in asked if isinstance(one.phase.cache, Reused | Selected)}) == 2
        assert len({one.phase for one in asked}) == 1
    assert mixed > 2, mixed
    for number, live in enumerate(kept):
        with Session(model) as alone:
            one = alone.submit(prompts[number], options, request_id=number)
            while alone.live:
                alone.advance()
        assert live.generation is not None and one.generation is not None
        assert torch.equal(live.generation.token_ids, one.generation.token_ids)
        assert torch.equal(live.generation.confidence, one.generation.confidence)
    assert model.state_rows == {}


def test_what_is_kept_is_planned_memory(model: CompiledModel) -> None:
    """A row a request: of every layer that keeps, or of one, all heads of a block's tokens."""
    expected = {
        "prefix_outputs_all": ([1, LAYERS * BLOCK * HEADS * SIZE], "float32"),
        "prefix_sums_all": ([1, LAYERS * BLOCK * HEADS], "float32"),
        "prefix_queries": ([1, BLOCK * HEADS * SIZE], "float32"),
        "prefix_outputs_2": ([1, 2 * BLOCK * HEADS * SIZE], "float32"),
        "prefix_sums_2": ([1, 2 * BLOCK * HEADS], "float32"),
    }
    seen = set()
    for chosen in (PrefixReuse(change=0.2), replace(MAGE, reuse=PrefixReuse())):
        with Session(model) as session:
            session.submit(torch.arange(30), gen_length=5, attention=chosen, stop_at_eos=False)
            while session.live:
                (step,) = session.advance()
                found = [
                    b for b in step.plan.document["buffers"] if b["name"].startswith("prefix_") and b["kind"] == "state"
                ]
                for buffer in found:
                    assert (buffer["shape"], buffer["dtype"]) == expected[buffer["name"]]
                    assert buffer["pool"] == f"state/{buffer['name']}"
                seen |= {buffer["name"] for buffer in found}
    assert seen == {*expected} and model.state_rows == {}


def test_a_step_that_reuses_reads_no_prefix() -> None:
    """Its plan on a card, which the checker proves, has no attention to the prefix and takes less time."""
    took = {}
    for refreshes in (True, False):
        policy = Reused(reuse=PrefixReuse(change=0.1), refreshes=refreshes)
        phase = Phase(cache=policy, commit=Commit(score="confidence", rule="dynamic"))
        plan = Planner(CONFIG, device="h200").plan(Request(seq_lens=(4,), key_lens=(400_000,), phase=phase, masked=4))
        assert plan.fits and plan.check() == ()
        kernels = [op["kernel"] for op in plan.document["ops"]]
        assert kernels.count("joined_attention") == LAYERS and kernels.count("query_change") == 1
        assert kernels.count("prefix_attention") == LAYERS * refreshes and "kv_attention" not in kernels
        took[refreshes] = plan.predicted_step_ms
    assert took[False] < 0.6 * took[True]


def test_one_plan_serves_the_same_step_of_every_block(model: CompiledModel) -> None:
    phase = Phase(cache=Reused(reuse=PrefixReuse(), refreshes=False), commit=Commit(score="confidence", rule="top"))
    sizes = [StepSize(phase=phase, windows=(4,), keys=(n,), owned=(600,), rows=4) for n in range(4, 600, 4)]
    assert len({tuple(size.rounded().dims(model.architecture).items()) for size in sizes}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "serves 0 steps; it must be an integer of at least 1"),
        ({"steps": True}, "serves True steps"),
        ({"change": -0.1}, "change is -0.1; it must be a number of at least 0"),
        ({"change": float("nan")}, "change is nan"),
        ({"change": "little"}, "change is 'little'"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PrefixReuse(**wrong)


def test_what_a_model_or_another_option_cannot_is_refused(model: CompiledModel) -> None:
    prompt = torch.arange(3)
    with pytest.raises(UnknownName, match="Did you mean 'flashblock'"):
        model.generate(prompt, attention="flashblok")
    with pytest.raises(UnknownName, match=r"Did you mean 'mage\+flashblock'"):
        model.generate(prompt, attention="mage+flashblok")
    with pytest.raises(UsageError, match="eviction: dropped rows keep no output over their prefix"):
        model.generate(prompt, attention="flashblock", eviction="focus")
    with pytest.raises(UsageError, match=r"reuse is 4; it must be PrefixReuse\(…\)"):
        SparseAttention(reuse=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="with exact first layers, of which there are 0"):
        SparseAttention(exact_layers=0, reuse=PrefixReuse())
    with (
        mosaic.compile(FAMILIES["llada"], device="cpu", host_budget=0) as both_ways,
        pytest.raises(UsageError, match="attends in both directions, so its keys change in every step and no output"),
    ):
        both_ways.generate(prompt, attention="flashblock")


def test_a_step_that_reuses_what_is_not_kept_is_refused(model: CompiledModel) -> None:
    """Rows before the block have no place, and what says nothing of its prefix is told what to say."""
    options = GenerationConfig(gen_length=13, attention=PrefixReuse(), **STATIC)
    telling = Telling(model)
    with Session(telling) as session:
        session.submit(torch.arange(8), options)
        session.advance(2)
        (asked,) = telling.asked[-1]
        for values, message in (
            ({"prefix": 9, "refreshes": False}, "a window from position 8 on reuses what is kept from 9 on; refresh"),
            ({"prefix": 8}, 'a request says values={"prefix"'),
        ):
            with pytest.raises(UsageError, match=message):
                model.step([replace(asked, values=values)])
        reusing = replace(asked.phase, cache=Reused(reuse=PrefixReuse(), refreshes=False))
        with pytest.raises(UsageError, match="a request that refreshes is for a phase whose steps do"):
            model.step([replace(asked, phase=reusing, values={"prefix": 8, "refreshes": True})])
