"""Sparse attention in block diffusion: against a model in float64 that attends key by key, and in sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_stated import BLOCK, CONFIG, KV_HEADS, LAYERS, SIZE, Plain
from telling import Telling
from test_session import FAMILIES

import mosaic
from mosaic.decoding import GenerationConfig
from mosaic.decoding.session import Session
from mosaic.errors import UnknownName, UsageError
from mosaic.models.parts import NO_HEAD, Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.mage import Selected, Summarized
from mosaic.models.policies.mage_options import PRESETS, SparseAttention
from mosaic.models.step import StepSize
from mosaic.planner import Planner, Request
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.steps import StepRequest, StepResult


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIG, device="cpu", host_budget=0, debug="poison", seed=3) as compiled:
        generator = torch.Generator().manual_seed(7)
        for name, view in compiled.weights().items():
            if not name.startswith("="):
                vector = view.dim() == 1
                view.copy_(torch.empty(view.shape).normal_(1.0 if vector else 0.0, 0.25, generator=generator))
        yield compiled


WAYS = {
    "mage": SparseAttention(k=8),
    "one layer exact": SparseAttention(k=4, exact_layers=1),
    "all layers sparse": SparseAttention(k=6, exact_layers=0, per="query_head"),
    "pages": SparseAttention(k=8, page=4, exact_layers=1),
    "the largest": SparseAttention(k=5, statistic="max", exact_layers=1, voters="answer"),
    "by tiles of rows": SparseAttention(k=4, rows=2, exact_layers=1, voters="answer", statistic="worst"),
    "by tiles of rows, carried": SparseAttention(k=3, rows=3, per="query_head", carried=True, every=2, exact_layers=0),
    "a share": SparseAttention(k=16, ratio=0.2, exact_layers=1),
    "enough of the attention": SparseAttention(k=24, mass=0.5, exact_layers=1),
    "carried": SparseAttention(k=6, carried=True, exact_layers=1),
    "oracle": SparseAttention(k=5, selects="every", exact_layers=1),
    "sparsed": SparseAttention(k=6, exact_steps=0.3, exact_layers=1),
    "again, after a share of exact steps, the last layer exact": SparseAttention(
        k=4, every=2, exact_steps=0.3, exact_layers=0, exact_last=1
    ),
    "quest": SparseAttention(k=9, page=3, selects="every", by="bounds", exact_layers=1),
    "quest, the last layer exact, by tiles of rows": SparseAttention(
        k=6, page=2, rows=3, selects="every", by="bounds", exact_layers=1, exact_last=1, statistic="worst"
    ),
    "quest, the largest": SparseAttention(
        k=20,
        ratio=0.25,
        page=5,
        selects="every",
        by="bounds",
        exact_layers=0,
        statistic="max",
        voters="answer",
        per="query_head",
    ),
}


COVERING = (
    "mage", "the largest", "by tiles of rows, carried", "enough of the attention",
    "again, after a share of exact steps, the last layer exact", "quest, the last layer exact, by tiles of rows",
    "quest, the largest",
)  # fmt: skip
"""Ways that have every option among them; the others soak."""


def named(*names: str) -> list[Any]:
    """All ways by name, of which only these do not soak."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.soak) for name in WAYS]


@pytest.mark.parametrize("name", named(*COVERING))
def test_answers_are_those_of_the_algorithm_in_float64(name: str, model: CompiledModel) -> None:
    """And not those of exact attention."""
    source, others = random.Random(name), 0
    for longest in (12, 12) if name in COVERING else (20, 20):
        prompt = torch.tensor([source.randrange(60) for _ in range(source.randint(20, 60))])
        gen, steps = source.randint(5, longest), source.choice([2, 4])
        options = {"gen_length": gen, "steps": steps, "remasking": "low_confidence_static", "stop_at_eos": False}
        expected = Plain(model, WAYS[name], prompt).generate(prompt, gen, steps)
        found = model.generate(prompt, attention=WAYS[name], **options)[0].token_ids
        assert torch.equal(found, expected)
        others += int((model.generate(prompt, **options)[0].token_ids != expected).sum())
    assert others


def test_exact_answers_are_those_of_the_algorithm_in_float64(model: CompiledModel) -> None:
    for length, gen, steps in ((20, 20, 2), (33, 5, 4), (60, 13, 4)):
        prompt = torch.arange(length) * 7 % 60
        (found,) = model.generate(
            prompt, gen_length=gen, steps=steps, remasking="low_confidence_static", stop_at_eos=False
        )
        assert torch.equal(found.token_ids, Plain(model, None, prompt).generate(prompt, gen, steps))


@pytest.mark.parametrize("name", named("mage", "by tiles of rows, carried", COVERING[-2]))
def test_with_the_whole_prefix_every_way_is_exact(name: str, model: CompiledModel) -> None:
    prompts, way = [torch.arange(n) % 60 for n in (1, 9, 50)], WAYS[name]
    expected = model.generate(prompts, gen_length=10)
    whole = replace(way, k=60 * way.page, ratio=0.0, mass=0.0)
    for mine, other in zip(model.generate(prompts, gen_length=10, attention=whole), expected, strict=True):
        assert torch.equal(mine.token_ids, other.token_ids)
        torch.testing.assert_close(mine.confidence, other.confidence)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize(
    "way", ["mage", *(pytest.param(way, marks=pytest.mark.soak) for way in ("oracle", "sparsed")), "quest"]
)
@pytest.mark.parametrize("family", ["llada2", "fast-dllm-v2"])
def test_other_families_attend_so(family: str, way: str) -> None:
    """With the whole prefix they answer as with exact attention, with less of it they do not."""
    prompts = [torch.arange(n) % 60 for n in (1, 9, 50)]
    with mosaic.compile(FAMILIES[family], device="cpu", host_budget=0, debug="poison", seed=3) as other:
        for name, view in other.weights().items():
            if not name.startswith("=") and view.dim() > 1:
                view.mul_(8)  # attention that is not all but even
        expected = [one.token_ids for one in other.generate(prompts, gen_length=20)]
        for k, same in ((512, True), (2, False)):
            attention = replace(PRESETS[way], k=k, exact_layers=0, page=2 if way == "quest" else 1)
            if way == "sparsed":
                attention = replace(attention, every=2, rows=3)
            found = [one.token_ids for one in other.generate(prompts, gen_length=20, attention=attention)]
            assert all(map(torch.equal, found, expected)) == same


@pytest.mark.parametrize("way", [pytest.param("mage", marks=pytest.mark.soak), "by tiles of rows, carried"])
def test_requests_at_any_step_share_a_forward_and_get_what_they_get_alone(way: str, model: CompiledModel) -> None:
    """One in its block's first step beside others in theirs: a step that selects serves both. Or one that selects again, beside
    the ones that do not yet."""
    source, mixed = random.Random(1), 0
    options = GenerationConfig(gen_length=17, steps=4, remasking="low_confidence_static", attention=WAYS[way])
    prompts = [torch.tensor([source.randrange(60) for _ in range(source.randint(3, 40))]) for _ in range(5)]
    telling, kept = Telling(model), []
    with Session(telling) as session:
        for number, prompt in enumerate(prompts):
            kept.append(session.submit(prompt, options, request_id=number))
            session.advance(source.randint(1, 4))
        while session.live:
            session.advance()
    for asked in telling.asked:
        stages = {one.values["exactly"] for one in asked if isinstance(one.phase.cache, Selected)}
        mixed += len(stages) == 2
        assert len({one.phase for one in asked}) == 1
    assert mixed > 3, mixed
    for number, live in enumerate(kept):
        with Session(model) as alone:
            one = alone.submit(prompts[number], options, request_id=number)
            while alone.live:
                alone.advance()
        assert live.generation is not None and one.generation is not None
        assert torch.equal(live.generation.token_ids, one.generation.token_ids)
    assert model.state_rows == {}


@pytest.mark.parametrize(("way", "tiles"), [("mage", 1), ("by tiles of rows", 2)])
def test_what_is_selected_is_planned_memory(way: str, tiles: int, model: CompiledModel) -> None:
    chosen = WAYS[way]
    with Session(model) as session:
        session.submit(torch.arange(30), gen_length=9, attention=chosen, stop_at_eos=False)
        (state,) = (name for name in model.state_rows if name.startswith("selected"))
        while session.live:
            (step,) = session.advance()
            if step.phase == "denoise":
                (kept,) = (buffer for buffer in step.plan.document["buffers"] if buffer["name"] == state)
                assert kept["shape"] == [1, (LAYERS - chosen.exact_layers) * KV_HEADS * tiles * (1 + chosen.k)]
                assert kept["dtype"] == "int32" and kept["pool"] == f"state/{state}" and step.plan.check() == ()


def test_extrema_of_pages_are_planned_memory_and_come_from_final_keys(model: CompiledModel) -> None:
    """A row for each whole page of the canvas, while blocks of another request come and go beside; cancelled ones go back."""
    chosen, source = WAYS["quest"], random.Random(5)
    options = GenerationConfig(gen_length=21, steps=2, remasking="low_confidence_static", attention=chosen)
    prompts = [torch.tensor([source.randrange(60) for _ in range(count)]) for count in (1, 30, 2, 7, 41)]
    kept, widths = [], set()
    with Session(model) as session:
        for number, prompt in enumerate(prompts):
            kept.append(session.submit(prompt, options, request_id=number))
            for step in session.advance() if number else session.advance() + session.advance():
                state = next(b for b in step.plan.document["buffers"] if b["name"] == "pages_3_1")
                widths.add((state["shape"][1], state["pool"], state["dtype"]))
            if number == 3:
                session.cancel(kept[1])
        canvases = [-(-(len(prompts[n]) + 21) // BLOCK) * BLOCK for n in (0, 2, 3, 4)]
        assert model.state_rows["pages_3_1"] >= sum(length // chosen.page for length in canvases)
        while session.live:
            session.advance()
    assert widths == {((LAYERS - 1) * 2 * KV_HEADS * SIZE, "state/pages_3_1", "float32")}
    assert model.state_rows == {}
    for number, live in enumerate(kept):
        if number != 1:
            alone = model.generate(prompts[number], options)[0]
            assert live.generation is not None and torch.equal(live.generation.token_ids, alone.token_ids)


def test_one_plan_serves_the_same_step_of_every_block(model: CompiledModel) -> None:
    """The planned size, a request's rows, stays while its keys grow."""
    for chosen in (SparseAttention(k=512), SparseAttention(ratio=0.3)):
        phase = Phase(cache=Selected(attention=chosen, selects=False), commit=Commit(score="confidence", rule="top"))
        sizes = [StepSize(phase=phase, windows=(4,), keys=(n,), owned=(600,), rows=4) for n in range(4, 600, 4)]
        assert len({size.key for size in sizes}) == 1
        assert len({tuple(size.rounded().dims(model.architecture).items()) for size in sizes}) == 1


SELECTING = {"prefix_logsumexp": "logsumexp", "key_mass": "mass", "top_keys": "select"}


def test_selection_runs_beside_the_feed_forward(model: CompiledModel) -> None:
    """On a stream of its own, from a layer's attention to the next layer's keys; in a loop of its own nowhere."""
    ways = [Selected(attention=WAYS["one layer exact"], selects=selects) for selects in (True, False)]
    for policy in ways:
        phase = Phase(cache=policy, commit=Commit(score="confidence", rule="top"))
        plan = Planner(CONFIG, device="h200").plan(Request(seq_lens=(8,), key_lens=(400,), phase=phase, masked=4))
        assert plan.fits and plan.check() == ()
        ops = {op["name"]: op for op in plan.document["ops"]}
        found = {name: op["stream"] for name, op in ops.items() if op["kernel"] in SELECTING}
        streams = {1: "select", 2: "select", 3: "main"} if policy.selects else {}
        assert found == {f"layers.{layer}/{name}": streams[layer] for layer in streams for name in SELECTING.values()}
        for layer in (1, 2) if policy.selects else ():
            names = [f"layers.{layer}/mass", f"layers.{layer}/down", f"layers.{layer + 1}/store"]
            edges = {(edge["kind"], edge["from"], edge["to"]) for edge in plan.document["edges"]}
            joined = [f"layers.{layer}/select", f"layers.{layer + 1}/store"]
            assert ("wait", *(ops[name]["index"] for name in joined)) in edges
            assert [ops[name]["index"] for name in names] == sorted(ops[name]["index"] for name in names)


def test_log_sum_exps_come_from_where_the_plan_says(model: CompiledModel) -> None:
    """From a read of the keys beside the main stream, or from the attention to the prefix: the same sets, the same answers. Long
    prefixes are read once less."""
    policy = Selected(attention=WAYS["one layer exact"], selects=True)
    phase = Phase(cache=policy, commit=Commit(score="confidence", rule="top"))
    taken = {}
    for keys in (400, 2_000_000):
        planner, request = (
            Planner(CONFIG, device="h200"),
            Request(seq_lens=(8,), key_lens=(keys,), phase=phase, masked=4),
        )
        best = planner.plan(request, limit=False)
        for way in ("apart", "inside"):
            plan = planner.plan(request, config={**best.config, "statistics": way}, limit=False)
            assert plan.check() == () and plan.config["statistics"] == way
            kernels = [op["kernel"] for op in plan.document["ops"]]
            assert kernels.count("prefix_logsumexp") == (LAYERS - 1) * (way == "apart")
            assert (
                kernels.count("prefix_attention")
                == kernels.count("joined_attention")
                == (LAYERS - 1) * (way == "inside")
            )
            assert plan.predicted_step_ms >= best.predicted_step_ms
        taken[keys] = best.config["statistics"]
    assert taken == {400: "apart", 2_000_000: "inside"}
    prompts, answers = [torch.arange(n) % 60 for n in (1, 9, 50)], {}
    for way in ("apart", "inside"):
        session_of = Stating(model, way)
        with Session(session_of) as session:
            live = [session.submit(prompt, gen_length=14, attention=WAYS["one layer exact"]) for prompt in prompts]
            while session.live:
                session.advance()
            answers[way] = [one.generation for one in live]
            assert session_of.selected > 3
    for mine, other in zip(answers["apart"], answers["inside"], strict=True):
        assert mine is not None and other is not None and torch.equal(mine.token_ids, other.token_ids)
        torch.testing.assert_close(mine.confidence, other.confidence)


class Stating(Telling):
    """A model that takes log-sum-exps from where it is told."""

    def __init__(self, model: CompiledModel, way: str) -> None:
        super().__init__(model)
        self.way, self.selected = way, 0

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        cache = requests[0].phase.cache
        selects = isinstance(cache, Selected) and cache.selects
        self.selected += selects
        found = self._model.step(requests, config={"statistics": self.way} if selects else None)
        if selects:
            assert found[0].plan is not None and found[0].plan.config["statistics"] == self.way
        return found


def test_plans_summarize_final_keys_and_rank_pages_before_a_layer_attends() -> None:
    """One row of the state for each whole page that the sequence owns; nothing on a stream of its own."""
    chosen = replace(PRESETS["quest"], exact_layers=1)
    last = f"layers.{LAYERS - 1}"
    phases = {
        "denoise": Phase(cache=Selected(attention=chosen, selects=True), commit=Commit(score="confidence", rule="top")),
        "commit": Phase(cache=Summarized(attention=chosen), head=NO_HEAD),
    }
    for name, phase in phases.items():
        plan = Planner(CONFIG, device="h200").plan(Request(seq_lens=(8,), key_lens=(410,), phase=phase))
        assert plan.fits and plan.check() == ()
        (state,) = (buffer for buffer in plan.document["buffers"] if buffer["name"] == "pages_16_1")
        assert state["shape"] == [410 // 16, (LAYERS - 1) * 2 * KV_HEADS * SIZE]
        ops = {op["name"]: op for op in plan.document["ops"]}
        assert {op["stream"] for op in ops.values()} == {"main"}
        order = ["store", "bounds", "select", "sparse_attention"] if name == "denoise" else ["store", "extrema"]
        for layer in range(LAYERS):
            found = [n.split("/")[1] for n in ops if n.startswith(f"layers.{layer}/") and n.split("/")[1] in order]
            assert found == (order if layer else order[:1])
        assert (f"{last}/extrema" in ops) == (name == "commit")


def test_a_share_of_steps_is_rounded_up_as_it_is_written() -> None:
    """0.28 * 25 is above 7 in floating point, 28 hundredths of 25 are not."""
    for hundredths in range(1, 101):
        for steps in (1, 7, 25, 32, 50):
            attention = SparseAttention(exact_steps=hundredths / 100)
            selecting = max(-(-hundredths * steps // 100), 1)
            assert [attention.selects_in(step, steps) for step in range(steps)] == [True] * selecting + [False] * (
                steps - selecting
            )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k is 0; it must be an integer of at least 1"),
        ({"k": -3}, "k is -3; it must be"),
        ({"k": True}, "k is True; it must be"),
        ({"k": 2**62}, f"k is {2**62}; keys are counted in 32 bits, use at most {2**31 - 1}"),
        ({"k": 24, "page": 16}, "k 24 is not whole pages of 16 keys; use k 16"),
        ({"k": 8, "page": 16}, "k 8 is not whole pages of 16 keys; use k 16"),
        ({"page": 0}, "page is 0"),
        ({"exact_layers": -1}, "exact_layers is -1"),
        ({"exact_last": -1}, "exact_last is -1; it must be an integer of at least 0"),
        ({"exact_steps": -0.1}, "exact_steps is -0.1; it must be a share of a block's steps"),
        ({"exact_steps": 0.1, "selects": "every"}, "exact_steps are those before a selection"),
        ({"every": -1}, "every is -1; it must be an integer of at least 0"),
        ({"every": 1}, "every=1 leaves no sparse step to a block; use every=2 or more, or selects='every'"),
        ({"every": 4, "selects": "every"}, "each step selects for itself; leave every out"),
        ({"carried": True, "exact_steps": 0.5}, "carried=True leaves no exact step"),
        ({"carried": True, "selects": "every"}, "carried=True leaves no exact step"),
        ({"carried": "False"}, "carried is 'False'; it must be true or false"),
        ({"rows": -1}, "rows is -1; it must be an integer of at least 0"),
        ({"ratio": 1.5}, r"ratio is 1.5; it must be a share of the prefix, in \[0, 1\]"),
        ({"mass": -1}, r"mass is -1; it must be a share of the prefix's attention, in \[0, 1\]"),
        ({"mass": 0.9, "statistic": "max"}, "mass is a share of the mean attention; leave it out"),
        (
            {"by": "bounds", "selects": "every"},
            "the minimum and maximum of a page of 1 key are the key itself, twice; use page 16",
        ),
        ({"by": "bounds", "page": 16}, "estimates what a step attends to before it does; use selects='every'"),
        ({"by": "keys"}, "attention's by 'keys'"),
        ({"per": "head"}, "attention's per 'head'"),
        ({"per": 8}, "attention's per '8'. Known: kv_head, query_head"),
        ({"statistic": "median"}, "statistic 'median'"),
        ({"selects": "last"}, "selects 'last'"),
        ({"voters": "all"}, "voters 'all'"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SparseAttention(**wrong)


def test_what_a_model_cannot_is_refused(model: CompiledModel) -> None:
    prompt = torch.arange(3)
    with pytest.raises(UsageError, match="attention: 4 exact layers of the model's 4 leave none sparse; use at most 3"):
        model.generate(prompt, attention=SparseAttention(exact_layers=4))
    with pytest.raises(UsageError, match="attention: 5 exact layers of the model's 4 leave none sparse; use at most 3"):
        model.generate(prompt, attention=SparseAttention(exact_layers=2, exact_last=3))
    with pytest.raises(
        UsageError, match="attention: 5 rows of a block of 4 cannot have sets of their own; use at most 4"
    ):
        model.generate(prompt, attention=SparseAttention(rows=5))
    with pytest.raises(UnknownName, match="mages"):
        model.generate(prompt, attention="mages")
    for other in (512, True, ["mage"], {"k": 4}):
        with pytest.raises(
            UsageError,
            match=r"it must be SparseAttention\(…\), PrefixReuse\(…\), or one of mage, oracle, sparsed, quest, exact-ends, flash",
        ):
            model.generate(prompt, attention=other)
    with (
        mosaic.compile(FAMILIES["llada"], device="cpu", host_budget=0) as both_ways,
        pytest.raises(UsageError, match="attends in both directions"),
    ):
        both_ways.generate(prompt, attention="mage")
