"""Steps cut inside a layer: a policy that drops rows (`dropping.py`), against the uncut phase and against plain code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from compiled_runner import CompiledRunner
from dropping import ALL, CUT, UNCUT, Dropping, DroppingNetwork, limits, selections
from reference_runner import KV as KeysAndValues
from reference_runner import PlainSequence, random_tensors, rule
from test_decoding import CONFIGS, MASK
from test_parity_block import LLADA2
from torch import Tensor

import mosaic
from mosaic import Implementation, Operator
from mosaic.decoding import Algorithm, Canvas, GenerationConfig, LiveRequest, Traits
from mosaic.decoding.algorithms import canvas_length
from mosaic.errors import BucketOverflow, DoesNotFit, GraphError, UnknownName, UsageError
from mosaic.models import load
from mosaic.models.parts import KEPT, KV, LOGITS, NO_HEAD, NUCLEUS, SAMPLE, STATISTICS, Commit, KeptRows
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.planner.check import weight_map
from mosaic.planner.planner import Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.host_copy import Arriving
from mosaic.runtime.host_inputs import Numbers
from mosaic.runtime.packing import pack_step
from mosaic.runtime.state_rows import OwnedRows
from mosaic.runtime.steps import StepRequest, StepResult

LAYERS = 4
CONFIG = {**CONFIGS["sdar"], "num_hidden_layers": LAYERS}
ARCH = load(CONFIG).architecture
TENSORS = random_tensors(ARCH, 3)
NOTHING = torch.empty(0, dtype=torch.int64)
FILL = Phase(cache=KEPT, head=NO_HEAD)


@pytest.fixture(scope="module")
def runner() -> Iterator[CompiledRunner]:
    found = CompiledRunner(CONFIG, TENSORS, debug="poison")
    yield found
    found.close()


@pytest.fixture
def model(runner: CompiledRunner) -> Iterator[CompiledModel]:
    yield runner.model
    assert not runner.model.state_rows


def filled(model: CompiledModel, tokens: Tensor) -> OwnedRows:
    """A sequence with the keys and values of these tokens."""
    owned, length = model.open_sequence(), len(tokens)
    owned.reserve(length)
    model.step(
        [
            StepRequest(
                phase=FILL, token_ids=tokens.clone(), sequence=owned, key_len=length, rows=NOTHING, current=NOTHING
            )
        ]
    )
    return owned


@dataclass
class Sequence:
    """One sequence of the model, and the same in plain code."""

    model: CompiledModel
    network: DroppingNetwork
    tokens: Tensor
    owned: OwnedRows
    plain: PlainSequence
    rtol: float = 1e-4

    @classmethod
    def filled(cls, model: CompiledModel, length: int, rng: random.Random) -> Sequence:
        """All positions have keys and values: those of some tokens."""
        network = DroppingNetwork(ARCH, TENSORS, layer=LAYERS)  # never cut
        tokens = torch.tensor([rng.choice((MASK, rng.randrange(8, MASK))) for _ in range(length)])
        plain = PlainSequence(network)
        plain.reserve(length)
        network.hidden(tokens, 0, plain.kv, length)
        network.layer = 1
        return cls(model, network, tokens, filled(model, tokens), plain)

    def window(self, rng: random.Random, phase: Phase, block: int = 8) -> StepRequest:
        """A window of whole blocks at random, whose tokens have changed."""
        blocks = len(self.tokens) // block
        first = rng.randrange(blocks)
        start, end = first * block, rng.randint(first + 1, min(blocks, first + 3)) * block
        self.tokens[start:end] = torch.tensor([rng.choice((MASK, rng.randrange(8, MASK))) for _ in range(start, end)])
        tokens = self.tokens[start:end].clone()
        rows = torch.tensor(sorted(rng.sample(range(end - start), rng.randint(1, end - start))))
        return StepRequest(
            phase=phase, token_ids=tokens, start=start, sequence=self.owned, key_len=end, rows=rows,
            current=tokens[rows], quota=rng.randint(0, 4), values={"limit": ALL},
        )  # fmt: skip

    def copies(self) -> KeysAndValues:
        """Keys and values of all layers, to be changed."""
        return [(keys.clone(), values.clone()) for keys, values in self.plain.kv]

    def limited(self, request: StepRequest, count: int) -> StepRequest:
        """The same request, of which `count` rows are kept."""
        self.network.limit = ALL
        self.network.hidden(request.token_ids, request.start, self.copies(), request.key_len)
        return replace(request, values={"limit": limits(self.network.weights, count)})

    def expect(self, request: StepRequest, result: StepResult) -> list[int]:
        """Compare an outcome with plain code; gives the rows that are kept."""
        self.network.limit = torch.tensor(request.values["limit"]).item()
        hidden = self.network.hidden(request.token_ids, request.start, self.plain.kv, request.key_len)
        kept = self.network.kept
        logits = self.network.unembed(hidden[request.rows])
        mine = torch.tensor([row in kept for row in request.rows.tolist()])
        token, score = logits.argmax(1), logits.softmax(-1).max(-1).values
        assert torch.equal(result.token[mine], token[mine])
        torch.testing.assert_close(result.score[mine], score[mine], rtol=self.rtol, atol=1e-6)
        assert bool((result.score[~mine] == float("-inf")).all()) and torch.equal(result.values["kept"], mine)
        assert torch.equal(result.token[~mine], request.current[~mine])
        few = replace(request, phase=UNCUT, rows=request.rows[mine], current=request.current[mine])
        committed = torch.zeros(len(mine), dtype=torch.bool)
        committed[mine] = rule(few, token[mine], score[mine], MASK)
        assert torch.equal(result.committed, committed)
        assert torch.equal(result.chosen, torch.where(committed, token, request.current))
        return kept

    def close(self) -> None:
        self.owned.close()


def opened(model: CompiledModel, rng: random.Random, count: int) -> list[Sequence]:
    return [Sequence.filled(model, 8 * rng.randint(2, 9), rng) for _ in range(count)]


@pytest.mark.some
@pytest.mark.parametrize("seed", range(3))
def test_a_cut_that_keeps_every_row_changes_nothing(model: CompiledModel, seed: int) -> None:
    """Under poison, random windows packed at random: tokens, scores and decisions to the bit, and the keys that are left."""
    rng = random.Random(seed)
    live = opened(model, rng, 3)
    twins = [filled(model, one.tokens) for one in live]
    for _ in range(6):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        asked = [live[n].window(rng, CUT) for n in chosen]
        found = model.step(asked)
        whole = model.step([replace(r, phase=UNCUT, sequence=twins[n]) for n, r in zip(chosen, asked, strict=True)])
        assert found[0].plan.dims["kept"] == found[0].plan.dims["tokens"]
        for mine, other in zip(found, whole, strict=True):
            for name in ("token", "score", "committed", "chosen"):
                assert torch.equal(getattr(mine, name), getattr(other, name))
    for one in live:
        one.close()
    for twin in twins:
        twin.close()


@pytest.mark.some
@pytest.mark.parametrize("seed", range(3))
def test_dropped_rows_have_no_keys_in_later_layers_and_are_not_decided(model: CompiledModel, seed: int) -> None:
    """Under poison, packed at random, against plain code that keeps stale keys where rows were dropped."""
    rng = random.Random(100 * seed)
    cut = Dropping(layer=1)
    phase = replace(CUT, cut=cut)
    live, sizes = opened(model, rng, 3), set()
    for turn in range(12):
        asked = []
        for one in rng.sample(live, rng.randint(1, 3)):
            request = one.window(rng, phase)
            few = rng.randint(1, max(len(request.token_ids) // 4, 1))
            asked.append(
                (one, one.limited(request, rng.choice([few, few, len(request.token_ids)]) if turn > 3 else few))
            )
        found = model.step([request for _, request in asked])
        kept = sum(len(one.expect(request, result)) for (one, request), result in zip(asked, found, strict=True))
        size = found[0].plan.dims["kept"]
        assert size == min(bucket for bucket in cut.buckets(found[0].plan.dims["tokens"]) if bucket >= kept)
        sizes.add(size)
    assert len(sizes) > 2
    for one in live:
        one.close()


def test_graphs_are_bound_once_for_each_size(model: CompiledModel) -> None:
    rng = random.Random(4)
    one = Sequence.filled(model, 64, rng)
    request = one.window(rng, CUT)
    for _ in range(3):
        model.step([request])
    bound = {id(executor) for executor in model.executors}
    changes = model.workspace.changes()
    for _ in range(3):
        model.step([request])
    assert {id(executor) for executor in model.executors} == bound and model.workspace.changes() == changes
    latest = [executor.document["phase"] for executor in model.executors[-2:]]
    assert latest == ["denoise_prefix", "denoise_suffix"]
    one.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeing(Dropping):
    """Has an op say how many keys each sequence sees."""

    def supplied(self, step: Any) -> Any:
        return {"seen": lambda: step.g.add_op("copy", step.inputs.given("seen"), name="seen_now")}


def test_a_cut_may_compute_an_input_of_another_part(model: CompiledModel) -> None:
    rng = random.Random(6)
    phase = replace(CUT, cut=Seeing())
    for graph in phase.graphs:
        ops = {op.name: op for op in load(CONFIG).graph(phase=graph).ops}
        attention = [op for name, op in ops.items() if name.endswith("/attention")]
        assert attention and all(op.operands["seen"].name == "seen_now" for op in attention)
    one = Sequence.filled(model, 64, rng)
    for _ in range(4):
        request = one.window(rng, phase)
        request = one.limited(request, 3)
        one.expect(request, model.step([request])[0])
    one.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Dropping):
    """Keeps the rows to decide, and the first of each window."""

    def select(self, step: Any, into: KeptRows) -> None:
        inputs = step.inputs["rows"], step.inputs["cu_rows"], step.positions, step.cu_seqlens
        step.g.add_op(SELECT_ASKED, *inputs, out=tuple(into))

    def inputs(self, arch: Any) -> list[Any]:
        return []


def select_asked(
    *, asked: Tensor, cu_rows: Tensor, positions: Tensor, cu_seqlens: Tensor, rows: Tensor, bounds: Tensor, total: Tensor,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    found, ends = list[int](), [0]
    for sequence, first in enumerate(cu_seqlens.tolist()[:-1]):
        start, end = cu_rows.tolist()[sequence : sequence + 2]
        found += sorted({first, *asked[start:end].tolist()})
        ends.append(len(found))
    rows.zero_()[: len(found)] = torch.tensor(found)
    bounds.copy_(torch.tensor(ends))
    total.fill_(len(found))


SELECT_ASKED: Final = Operator(
    name="select_asked", operands="""
        asked@:i64[M] cu_rows@:i32[B+1] positions@:i32[T] cu_seqlens@:i32[B+1] -> rows:i64[T] bounds:i32[B+1] total:i64[1]
    """,
    implementations=(Implementation(backend="cpu", kernel=select_asked),),
)  # fmt: skip


def test_a_cut_may_go_by_the_rows_to_decide(model: CompiledModel) -> None:
    """All of them are decided, however few are kept beside them; both graphs read them."""
    rng = random.Random(8)
    phase = replace(CUT, cut=Asked())
    live = opened(model, rng, 3)
    for _ in range(6):
        asked = [one.window(rng, phase) for one in rng.sample(live, rng.randint(1, 3))]
        found = model.step(asked)
        kept = sum(len({0, *request.rows.tolist()}) for request in asked)
        assert kept <= found[0].plan.dims["kept"]
        for request, result in zip(asked, found, strict=True):
            assert bool(result.values["kept"].all())
            assert int(result.committed.sum()) == min(request.quota, int((request.current == MASK).sum()))
    for one in live:
        one.close()


def select_none(
    *, positions: Tensor, cu_seqlens: Tensor, rows: Tensor, bounds: Tensor, total: Tensor, scratch: Tensor | None = None
) -> None:
    for out in (rows, bounds, total):
        out.zero_()


SELECT_NONE: Final = Operator(
    name="select_none", operands="positions@:i32[T] cu_seqlens@:i32[B+1] -> rows:i64[T] bounds:i32[B+1] total:i64[1]",
    implementations=(Implementation(backend="cpu", kernel=select_none),),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing(Dropping):
    """Keeps no row at all."""

    def inputs(self, arch: Any) -> list[Any]:
        return []

    def select(self, step: Any, into: KeptRows) -> None:
        step.g.add_op(SELECT_NONE, step.positions, step.cu_seqlens, out=tuple(into))


def test_a_step_that_keeps_no_row_decides_nothing(model: CompiledModel) -> None:
    """It runs for the fewest rows, and keys of later layers stay what they are."""
    rng = random.Random(9)
    cut = Nothing()
    one = Sequence.filled(model, 64, rng)
    for _ in range(3):
        request = one.window(rng, replace(CUT, cut=cut))
        (result,) = model.step([request])
        assert not result.committed.any() and not result.values["kept"].any()
        assert torch.equal(result.chosen, request.current)
        assert result.plan.dims["kept"] == cut.buckets(len(request.token_ids))[0]
        one.network.hidden(request.token_ids, request.start, copies := one.copies(), request.key_len)
        for layer in range(2):  # up to the one that is cut, all rows have new keys
            one.plain.kv[layer] = copies[layer]
    request = one.limited(one.window(rng, CUT), 4)
    one.expect(request, model.step([request])[0])
    one.close()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Phase(commit=UNCUT.commit, cut=Dropping()), "a phase that is cut has a cache and a commit rule"),
    (lambda: Phase(cache=KEPT, cut=Dropping()), "a phase that is cut has a cache and a commit rule"),
    (lambda: replace(CUT, logits=LOGITS), "and returns no logits"),
    (lambda: Phase(graph="suffix"), "a phase that is not cut has no suffix"),
    (lambda: load(CONFIG).graph(phase=CUT), "unknown step 'denoise'"),
    (lambda: load(CONFIG).graph(phase=replace(CUT, cut=Dropping(layer=3)).graphs[0]), "before the last, which is layer 3; got"),
    (lambda: packed(replace(CUT, cut=Dropping(sizes=(8, 8)))).graphs, "buckets must be ascending numbers from 1"),
    (lambda: replace(packed(UNCUT), kept=4), "the second graph of a step that is cut computes 1 to 1,280 rows, got 4"),
    (lambda: replace(packed(CUT), phase=CUT.graphs[1]), "computes 1 to 1,280 rows, got 0"),
    (lambda: replace(packed(CUT), phase=CUT.graphs[1], kept=1281), "computes 1 to 1,280 rows, got 1,281"),
])  # fmt: skip
def test_cuts_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises((UsageError, GraphError, UnknownName), match=message):
        make()


def test_settings_of_a_step_are_those_of_its_graphs(model: CompiledModel) -> None:
    """Each graph takes what it has; a name that none of them has is refused before anything runs."""
    rng = random.Random(7)
    one = Sequence.filled(model, 96, rng)
    request, before = one.window(rng, CUT), len(selections)
    with pytest.raises(UnknownName, match="unknown knob 'logit'"):
        model.step([request], config={"proj": 128, "logit": 64})
    assert len(selections) == before
    result = model.step([request], config={"proj": 128, "head": "fused", "ffn": 128})[0]
    assert result.plan.config["head"] == "fused"
    one.expect(request, result)
    one.close()


# --- more rows than there were, or than there is a size for -------------------------------------------------------------


def few_and_all(model: CompiledModel, rng: random.Random, phase: Phase) -> tuple[Sequence, StepRequest]:
    """A sequence of which steps have kept few rows, and a window of it of which all are kept."""
    one = Sequence.filled(model, 96, rng)
    for _ in range(4):
        request = one.window(rng, phase)
        request = one.limited(request, 1)
        one.expect(request, model.step([request])[0])
    while (request := one.window(rng, phase)).token_ids.numel() < 16:
        pass
    return one, request


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_step_runs_again(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the graphs, whatever runs in between: the outcome, and all that outlives the step, is that of one run."""
    rng = random.Random(0)
    phase = replace(CUT, cut=Dropping(sizes=(2, 8, 64)))
    for beside in (False, True):
        one, request = few_and_all(model, rng, phase)
        other = Sequence.filled(model, 16, rng)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Arriving, "wait", interrupted)
            model.step([request])
        if beside:
            model.step([replace(other.window(rng, UNCUT), quota=1)])
        (result,) = model.step([request])
        assert result.plan.dims["kept"] == len(request.token_ids)
        one.expect(request, result)
        again = one.window(rng, phase)  # which reads the keys that the step has left
        one.expect(again, model.step([again])[0])
        one.close()
        other.close()


def test_more_rows_than_there_is_a_size_for_are_an_error(model: CompiledModel) -> None:
    """The next steps run."""
    rng = random.Random(1)
    phase = replace(CUT, cut=Dropping(sizes=(2, 8)))
    one, request = few_and_all(model, rng, phase)
    count = len(request.token_ids)
    with pytest.raises(
        BucketOverflow, match=rf"'denoise_prefix' computed count = {count}, the largest bucket of 'kept' is 8"
    ):
        model.step([request])
    small = one.limited(request, 3)
    one.expect(small, model.step([small])[0])
    one.close()


# --- memory -------------------------------------------------------------------------------------------------------------


def packed(phase: Phase, requests: int = 40) -> StepSize:
    return StepSize(phase=phase, windows=(32,) * requests, keys=(96,) * requests, rows=24 * requests)


def test_plans_of_both_graphs_are_proved_and_need_no_more_than_the_uncut_one() -> None:
    """Carries have one place and one size in all of them; what a step that is cut needs is what the largest of them needs."""
    planner = Planner(load(CONFIG), device="h200")
    whole, plans = planner.plan(packed(UNCUT)), planner.plans(packed(CUT))
    assert [plan.document["phase"] for plan in plans] == ["denoise_prefix"] + ["denoise_suffix"] * 4
    assert [plan.dims["kept"] for plan in plans[1:]] == [160, 320, 640, 1280]
    for plan in plans:
        assert plan.check() == (("weigh_rows", "select_rows") if plan is plans[0] else ())
        assert weight_map(plan.document) == weight_map(whole.document)
        carries = {b["name"]: (b["offset"], b["size"]) for b in plan.document["buffers"] if b["kind"] == "carry"}
        assert carries.keys() == {"cut_hidden", "cut_queries", "cut_rows", "cut_bounds"}
        assert all(offset == 0 for offset, _ in carries.values())
        assert carries == {
            b["name"]: (b["offset"], b["size"]) for b in plans[0].document["buffers"] if b["kind"] == "carry"
        }
        assert plan.pools["workspace"] <= whole.pools["workspace"]
    for plan in plans[1:-1]:
        assert plan.peak_bytes < whole.peak_bytes
    assert planner.plan(packed(CUT)).total_bytes == max(plan.total_bytes for plan in plans)
    needed = planner.needed(packed(CUT))
    assert needed == max(planner.needed(graph) for graph in packed(CUT).graphs)
    for budget, fits in ((needed, True), (needed - 1, False)):
        assert planner.with_budgets(budget=budget).fits(packed(CUT)) is fits
    assert planner.max_context(packed(CUT)) == min(planner.max_context(graph) for graph in packed(CUT).graphs)


def test_what_is_admitted_fits_and_what_is_not_runs_no_part() -> None:
    """At the budget of its largest graph a step runs, within it at every moment; a byte below nothing of it does."""
    phase = CUT
    sizes = [StepSize(phase=phase, windows=(1024,), keys=(1024,), rows=512)]
    with closing(CompiledRunner(CONFIG, TENSORS, host_budget=0)) as free:
        most = free.model.check(sizes)
    for budget in (most.total_bytes, most.total_bytes - 1):
        with closing(CompiledRunner(CONFIG, TENSORS, host_budget=0, budget=budget)) as runner:
            model, before = runner.model, len(selections)
            admitted = budget == most.total_bytes
            assert model.admits(sizes) is admitted
            rng = random.Random(0)
            owned = model.open_sequence()
            owned.reserve(1024)
            for count in (1024, 100, 300, 1024):
                tokens = torch.tensor([rng.choice((MASK, rng.randrange(8, MASK))) for _ in range(1024)])
                request = StepRequest(
                    phase=phase, token_ids=tokens, sequence=owned, key_len=1024, rows=torch.arange(512), quota=3,
                    current=tokens[:512], values={"limit": ALL if count == 1024 else 40.0 / count},
                )  # fmt: skip
                if not admitted:
                    with pytest.raises(DoesNotFit):
                        model.step([request])
                    assert len(selections) == before
                    break
                plan = model.step([request])[0].plan
                assert sum(model.memory().committed.values()) <= budget
                assert all(model.memory().committed[name] >= size for name, size in plan.pools.items() if size)
            owned.close()


# --- decoding -----------------------------------------------------------------------------------------------------------

BLOCK: Final = 8


def algorithm(phase: Phase, limit: float = ALL) -> Algorithm:
    """Block diffusion, whose steps but the first of each block are of this phase: rows below the limit are dropped."""

    def decode(canvas: Canvas) -> Any:
        prefix = canvas.prompt_len // BLOCK * BLOCK
        if prefix:
            yield canvas.fill(0, prefix)
        for start in range(prefix, canvas.length, BLOCK):
            decided = 0
            while canvas.masked[start : start + BLOCK].any():
                positions = canvas.open_rows(start, start + BLOCK)
                result = yield canvas.ask(
                    phase if decided else UNCUT, positions, window=(start, start + BLOCK), quota=2, values={"limit": limit}
                )  # fmt: skip
                canvas.take(positions, result)
                decided = int(result.committed.sum())
                if canvas.finished:
                    return

    def shapes(config: GenerationConfig, arch: Any, prompt_len: int, request: int) -> list[StepSize | None]:
        length, prefix = canvas_length(config, arch, prompt_len), prompt_len // BLOCK * BLOCK
        sizes = [StepSize(phase=one, windows=(BLOCK,), keys=(length,), rows=BLOCK) for one in (UNCUT, phase)]
        return [StepSize(phase=FILL, windows=(prefix,), keys=(prefix,)) if prefix else None, *sizes]

    return Algorithm(name="dropping", decode=decode, shapes=shapes, traits=Traits(blockwise=True))


def test_sessions_run_steps_that_are_cut_for_many_requests(model: CompiledModel) -> None:
    """Requests come and go; each gets the tokens that it gets alone, and where every row is kept those of the uncut phase."""
    rng = random.Random(2)
    ways = {limit: algorithm(CUT, limit) for limit in (ALL, 0.0, 3.0)}
    asked = []
    for _ in range(24):
        prompt = torch.tensor([rng.randrange(8, MASK) for _ in range(rng.randint(1, 20))])
        limit = rng.choice([*ways])
        config = GenerationConfig(algorithm=ways[limit], gen_length=rng.choice([8, 21]), stop_at_eos=False)
        asked.append((prompt, limit, config))
    alone = [model.generate([prompt], config)[0].token_ids for prompt, _, config in asked]
    before, live = len(selections), dict[int, LiveRequest]()
    with model.session() as session:
        waiting = [*range(len(asked))]
        while waiting or session.live:
            coming, waiting = waiting[:2], waiting[2:]
            for number in coming:
                prompt, _, config = asked[number]
                live[number] = session.submit(prompt, config)
            if rng.random() < 0.15 and session.live:
                session.cancel(rng.choice(session.live))
            session.advance(rng.randint(1, 3))
    assert max(selections[before:]) >= 4 * BLOCK
    ended = {number: request.generation for number, request in live.items()}
    assert {answer.finish for answer in ended.values() if answer is not None} == {"length", "cancelled"}
    for number, answer in ended.items():
        assert answer is not None
        if answer.finish == "length":
            assert torch.equal(answer.token_ids, alone[number]), number
    for (prompt, limit, config), tokens in zip(asked, alone, strict=True):
        if limit == ALL:
            uncut = replace(config, algorithm=algorithm(UNCUT))
            assert torch.equal(model.generate([prompt], uncut)[0].token_ids, tokens)


# --- one mechanism ------------------------------------------------------------------------------------------------------


def test_a_models_steps_run_as_a_program_of_ones_own_would(model: CompiledModel) -> None:
    """Prefill and a step that is cut, as graphs of a compiled program: what the model itself gives."""
    rng = random.Random(5)
    one = Sequence.filled(model, 32, rng)
    fill = StepRequest(
        phase=FILL, token_ids=one.tokens.clone(), sequence=one.owned, key_len=32, rows=NOTHING, current=NOTHING
    )  # fmt: skip
    request = one.limited(one.window(rng, CUT), 6)
    request = replace(request, rows=torch.tensor([0]), current=request.token_ids[:1])  # which is always kept
    program = load(CONFIG).program(FILL, CUT)
    assert program.steps == ("commit", "denoise_prefix", "denoise_suffix") and [*program.bucketed] == ["denoise"]
    with mosaic.compile(program, weights=TENSORS, debug="poison") as compiled:
        for name, asked in (("commit", fill), ("denoise", request)):
            packed = pack_step([asked], ARCH, states={KV: 64})
            inputs = {
                name: value.tensor() if isinstance(value, Numbers) else value for name, value in packed.inputs.items()
            }
            dims = packed.size.dims(ARCH) | {"decided": 1, "kv_rows": 64}
            read = {"tokens", "seqs", "masked", "extents"}  # from inputs' shapes
            used = {
                b.name for graph in compiled.program.steps for b in program.graph(graph).buffers if b.kind == "input"
            }
            given = {name: value for name, value in inputs.items() if name in used}
            expected = model.step([asked])[0]
            found = compiled.run(name, given, dims={dim: size for dim, size in dims.items() if dim not in read})
        assert compiled.current.dims["kept"] >= len(one.expect(request, expected)) and found["place"].tolist() == [0]
        torch.testing.assert_close(found["score"], expected.score)
        assert torch.equal(found["token"], expected.token) and torch.equal(found["chosen"], expected.chosen)
    one.close()


# --- other models, heads and rules --------------------------------------------------------------------------------------

HEADS: Final = (
    (STATISTICS, Commit(score="confidence", rule="top")),
    (SAMPLE, Commit(score="random", rule="edit")),
    (NUCLEUS, Commit(score="margin", rule="top", perturb=True)),
)


FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llada": {**CONFIGS["llada"], "n_layers": 3},
    "fast-dllm-v2": {**CONFIGS["fast-dllm-v2"], "num_hidden_layers": 3},
    "llada2": LLADA2,
}


@pytest.mark.parametrize("family", [pytest.param("llada", marks=pytest.mark.soak), "fast-dllm-v2", "llada2"])
def test_other_models_heads_and_rules_may_be_cut(family: str) -> None:
    """Both directions, shifted with biases, experts: where every row is kept, to the bit what the uncut phase gives."""
    rng = random.Random(family)
    with mosaic.compile(FAMILIES[family], debug="poison", host_budget=0) as model:
        block, mask = model.architecture.block or 8, model.mask_token_id
        tokens = torch.tensor([rng.randrange(8, 60) for _ in range(2 * block)])
        owned = [filled(model, tokens) for _ in range(2)]
        for head, commit in HEADS:
            window = tokens[block:].masked_fill(torch.arange(block) % 3 > 0, mask)
            rows = torch.tensor(sorted(rng.sample(range(block), block - 2)))
            asked = StepRequest(
                phase=replace(CUT, head=head, commit=commit), token_ids=window, start=block, key_len=2 * block, rows=rows,
                current=window[rows], quota=3, keys=77 * rows, edit_threshold=0.1,
                temperature=0.7 if head.samples else 0.0, top_p=0.9 if head is NUCLEUS else 1.0,
                score_temperature=0.5 if commit.perturb else 0.0,
            )  # fmt: skip
            mine, other = (
                model.step([replace(asked, phase=replace(asked.phase, cut=cut), sequence=sequence)])[0]
                for cut, sequence in zip((asked.phase.cut, None), owned, strict=True)
            )
            for name in ("token", "score", "committed", "chosen"):
                assert torch.equal(getattr(mine, name), getattr(other, name)), (head, name)
            assert bool(mine.values["kept"].all())
        for sequence in owned:
            sequence.close()
