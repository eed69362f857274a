"""A policy of one's own, written as a newcomer would: a state, two phases, two kernels and an algorithm, in one file.

The policy: a `look` at the whole canvas notes, for every block of tokens, the sum of its hidden rows, each at unit length.
A `decide` then commits the rows whose hidden state has moved least from what was noted: those that are settled. Nothing here
is known to any file of the library.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from compiled_runner import CompiledRunner
from reference_runner import Network, random_tensors
from test_decoding import CONFIGS, MASK, prompt_of
from torch import Tensor

import mosaic
from mosaic import Implementation, Operator
from mosaic.decoding import Algorithm, Canvas, GenerationConfig, LiveRequest, Traits
from mosaic.errors import DoesNotFit, GraphError, UsageError
from mosaic.models.inputs import Input, Window
from mosaic.models.parts import KEPT, KV, NO_HEAD, Commit, CommitRule, Part
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize, most_rows
from mosaic.planner.check import check_plan, unverified_operators
from mosaic.registrar.operator import Attrs, Specs
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.page_pool import PAGE_BYTES
from mosaic.runtime.state_rows import OwnedRows, RowTable
from mosaic.runtime.steps import StepRequest
from mosaic.testing import verify_operator

# --- the policy: its state --------------------------------------------------------------------------------------------

WIDTH: Final = 32
BLOCK: Final = 4  # tokens that share a row
SUMMARY: Final = State(name="summary", width=WIDTH, dtype="float32")


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


# --- its kernels ------------------------------------------------------------------------------------------------------


def unit(rows: Tensor, eps: float, out: Tensor) -> Tensor:
    """Rows at unit length, in a buffer that is given."""
    torch.mul(rows, rows, out=out)
    return torch.mul(rows, out.mean(1, keepdim=True).add_(eps).rsqrt_(), out=out)


def note(*, h: Tensor, slots: Tensor, summary: Tensor, eps: float, scratch: Tensor) -> None:
    rows = unit(h, eps, scratch.view(torch.float32)[: h.numel()].view(h.shape))
    summary.index_fill_(0, slots, 0.0).index_add_(0, slots, rows)


def distance(*, h: Tensor, slots: Tensor, summary: Tensor, settled: Tensor, eps: float, scratch: Tensor) -> None:
    rows = unit(h, eps, scratch.view(torch.float32)[: h.numel()].view(h.shape))
    torch.sub(rows, summary[slots], out=rows)
    torch.sum(rows.abs_(), 1, out=settled).neg_()


def scratch(specs: Specs, attrs: Attrs) -> Any:
    return specs["h"].bytes


NOTE = Operator(
    name="note", operands="h:a[T, D] slots:i64[T] summary!@:a[S, D]", attrs="eps",
    implementations=(Implementation(backend="cpu", kernel=note, scratch=scratch),),
)  # fmt: skip
DISTANCE = Operator(
    name="distance", operands="h:a[T, D] slots:i64[T] summary@:a[S, D] -> settled:f32[T]", attrs="eps",
    implementations=(Implementation(backend="cpu", kernel=distance, scratch=scratch),),
    reference=lambda *, h, slots, summary, eps: -(
        (h * (h.square().mean(1, keepdim=True) + eps).rsqrt() - summary[slots]).abs().sum(1)
    ),
)  # fmt: skip


# --- its phases: a part that writes the state, and a rule that reads it --------------------------------------------------


def slots_of(request: StepRequest, positions: Tensor) -> Tensor:
    """Rows of the state, one a position."""
    rows: OwnedRows = request.states[SUMMARY]  # type: ignore[assignment]
    return rows.slots()[positions // BLOCK]


def block_slots(window: Window) -> Tensor:
    return slots_of(window.request, torch.arange(window.start, window.end))


@dataclass(frozen=True, slots=True)
class Noted(Part):
    """Notes the summary of every block."""

    @property
    def states(self) -> Sequence[State]:
        return (SUMMARY,)

    def inputs(self, arch: Any) -> Sequence[Input]:
        return (Input(name="block_slots", dtype="int64", per="token", value=block_slots),)

    @property
    def reads_hidden(self) -> bool:
        return True

    def finish(self, step: Any) -> None:
        slots, summary = step.inputs["block_slots"], step.g["summary"]
        step.g.add_op(NOTE, step.hidden.buffer, slots, summary, eps=step.arch.norm_eps)


@dataclass(frozen=True, slots=True)
class Settled(CommitRule):
    """Commits the rows that have moved least from the summary of their block."""

    @property
    def states(self) -> Sequence[State]:
        return (SUMMARY,)

    def inputs(self, arch: Any) -> Sequence[Input]:
        own = Input(name="row_slots", dtype="int64", per="row", value=lambda r: slots_of(r, r.rows + r.start))
        return (*TOP.inputs(arch), own)

    @property
    def reads_hidden(self) -> bool:
        return True

    def register(self, end: Any, token: Any, figures: Any) -> None:
        g, inputs, shape = end.g, end.inputs, (end.masked,)
        rows = g.add_op("gather_rows", end.hidden, inputs["rows"], name="rows_to_settle")
        score = g.output("score", shape, "float32")
        g.add_op(DISTANCE, rows, inputs["row_slots"], g["summary"], out=score, eps=end.arch.norm_eps)
        g.add_op(
            "transfer", token, score, *(inputs[name] for name in ("current", "cu_rows", "quota", "threshold")), None,
            out=(g.output("chosen", shape, "int64"), g.output("committed", shape, "uint8")), rule="top",
            mask_id=end.arch.mask_token_id,
        )  # fmt: skip


TOP: Final = Commit(score="confidence", rule="top")
LOOK: Final = Phase(head=NO_HEAD, others=(Noted(),))
DECIDE: Final = Phase(commit=Settled())


# --- its algorithm ----------------------------------------------------------------------------------------------------

EVERY: Final = 3  # steps that go by one look


def decode(canvas: Canvas) -> Any:
    while not canvas.finished:
        whole = (0, canvas.length)
        if canvas.step % EVERY == 0:
            yield canvas.ask(LOOK, torch.empty(0, dtype=torch.int64), window=whole)
        positions = canvas.open_rows(0, canvas.length)
        result = yield canvas.ask(DECIDE, positions, window=whole, quota=canvas.config.steps)
        canvas.take(positions, result)


def shapes(config: GenerationConfig, arch: Any, prompt_len: int, request: int) -> list[StepSize | None]:
    tokens = prompt_len + config.gen_length
    rows = {SUMMARY: blocks(tokens)}
    return [
        StepSize(phase=LOOK, windows=(tokens,), states=rows),
        StepSize(phase=DECIDE, windows=(tokens,), rows=config.gen_length, states=rows),
    ]


SETTLING: Final = Algorithm(
    name="settling", decode=decode, shapes=shapes, traits=Traits(options=frozenset({"steps"}), defaults={"steps": 2})
)


# --- an independent statement -----------------------------------------------------------------------------------------


@dataclass
class Plain:
    """The policy by naive code, one token at a time, over a transformer in plain PyTorch."""

    network: Network

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden rows at unit length: the head's inputs without the last norm's weight."""
        network = self.network
        found = network.hidden(tokens, 0, network.new_kv(len(tokens)), len(tokens))
        return found / network.tensors[network.arch.names.final_norm]

    def look(self, tokens: Tensor) -> list[Tensor]:
        found = [torch.zeros(WIDTH) for _ in range(blocks(len(tokens)))]
        for position, row in enumerate(self.hidden(tokens)):
            found[position // BLOCK] += row
        return found

    def decide(self, tokens: Tensor, rows: Tensor, noted: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scores and tokens of rows."""
        hidden, best = self.hidden(tokens), self.network.logits(tokens).argmax(1)
        return torch.stack([-(hidden[row] - noted[row // BLOCK]).abs().sum() for row in rows.tolist()]), best[rows]

    def generate(self, prompt: Tensor, gen_length: int, steps: int) -> list[int]:
        tokens = torch.cat([prompt, torch.full((gen_length,), MASK)])
        masked, step = set(range(len(prompt), len(tokens))), 0
        while masked:
            if step % EVERY == 0:
                noted = self.look(tokens)
            rows = torch.tensor(sorted(masked))
            scores, best = self.decide(tokens, rows, noted)
            for place in scores.argsort(descending=True, stable=True)[:steps].tolist():
                tokens[rows[place]] = best[place]
                masked.remove(int(rows[place]))
            step += 1
        return tokens[len(prompt) :].tolist()


# --- steps ------------------------------------------------------------------------------------------------------------

CONFIG = {**CONFIGS["llada"], "n_layers": 1}
ROW = {SUMMARY: 4 * WIDTH, KV: 4 * 2 * WIDTH}  # bytes; of keys and values, those of one layer
TENSORS = random_tensors(mosaic.models.load(CONFIG).architecture, 3)
PLAIN = Plain(Network(mosaic.models.load(CONFIG).architecture, TENSORS))
NOTHING = torch.empty(0, dtype=torch.int64)
FILL, READ = Phase(cache=KEPT, head=NO_HEAD), Phase(cache=KEPT, commit=TOP)


@pytest.fixture(scope="module")
def runner() -> Iterator[CompiledRunner]:
    found = CompiledRunner(CONFIG, TENSORS, debug="poison")
    yield found
    found.close()


@pytest.fixture
def model(runner: CompiledRunner) -> Iterator[CompiledModel]:
    yield runner.model
    assert not runner.model.state_rows
    runner.model.trim()
    assert not any(size for name, size in runner.model.memory().resident.items() if name.startswith("state/"))


class Canvases:
    """Owners of summaries and of keys and values at random, and what naive code says that they hold."""

    def __init__(self, model: CompiledModel, rng: random.Random) -> None:
        self.model, self.rng = model, rng
        self.noted: dict[OwnedRows, tuple[Tensor, list[Tensor]]] = {}
        self.filled: dict[OwnedRows, tuple[Tensor, Tensor]] = {}

    def tokens(self, count: int) -> Tensor:
        return torch.tensor([self.rng.choice((MASK, self.rng.randrange(8, MASK))) for _ in range(count)])

    def some(self, found: Mapping[OwnedRows, Any]) -> list[OwnedRows]:
        return self.rng.sample(list(found), min(len(found), self.rng.randint(1, 3)))

    def look(self) -> None:
        """Canvases that are new, and some that are there, whose tokens have changed."""
        new = [self.model.open_rows(SUMMARY, number) for number in range(self.rng.randint(1, 2))]
        asked = [*new, *self.some(self.noted)]
        for owner in asked:
            tokens = self.tokens(self.rng.randint(1, 90))
            owner.reserve(blocks(len(tokens)))
            self.noted[owner] = tokens, PLAIN.look(tokens)
        self.step(LOOK, asked, NOTHING)

    def decide(self) -> None:
        """Other tokens in the same canvas go by what was noted."""
        if not self.noted:
            return
        asked = self.some(self.noted)
        chosen = [self.tokens(len(self.noted[owner][0])) for owner in asked]
        rows = [torch.tensor(sorted(self.rng.sample(range(len(t)), self.rng.randint(1, len(t))))) for t in chosen]
        found = self.model.step(
            [
                StepRequest(phase=DECIDE, token_ids=t, rows=r, current=t[r], quota=2, states={SUMMARY: owner})
                for owner, t, r in zip(asked, chosen, rows, strict=True)
            ]
        )
        self.counted(found[0].plan)
        for owner, t, r, result in zip(asked, chosen, rows, found, strict=True):
            scores, best = PLAIN.decide(t, r, self.noted[owner][1])
            torch.testing.assert_close(result.score, scores, rtol=1e-3, atol=1e-3)
            assert torch.equal(result.token, best)
            open_ = result.score.masked_fill(t[r] != MASK, float("-inf"))
            taken = set(open_.argsort(descending=True)[:2].tolist()) & set((t[r] == MASK).nonzero().view(-1).tolist())
            assert set(result.committed.nonzero().view(-1).tolist()) == taken

    def fill(self) -> None:
        owner, tokens = self.model.open_sequence(), self.tokens(self.rng.randint(4, 200))
        owner.reserve(len(tokens))
        self.step(FILL, [owner], NOTHING, tokens)
        self.filled[owner] = tokens, self.read(owner, tokens)

    def read(self, owner: OwnedRows, tokens: Tensor) -> Tensor:
        """Scores of a window at the end of what is kept, which it writes again as it was."""
        return self.step(READ, [owner], torch.arange(4), tokens[-4:], start=len(tokens) - 4)[0].score

    def step(
        self, phase: Phase, asked: list[OwnedRows], rows: Tensor, tokens: Tensor | None = None, **more: Any
    ) -> Any:
        requests = []
        for owner in asked:
            ids = self.noted[owner][0] if tokens is None else tokens
            own = {"states": {SUMMARY: owner}} if tokens is None else {"sequence": owner, "key_len": owner.length}
            requests.append(
                StepRequest(phase=phase, token_ids=ids, rows=rows, current=ids[rows], quota=1, **own, **more)
            )
        found = self.model.step(requests)
        self.counted(found[0].plan)
        return found

    def close(self) -> None:
        for held in (self.noted, self.filled):
            for owner in self.some(held) if self.rng.random() < 0.5 else ():
                del held[owner]
                owner.close()

    def counted(self, plan: Any) -> None:
        """Every plan has all rows of all states, for every owner."""
        rows, committed = self.model.state_rows, self.model.memory().committed
        assert check_plan(plan.document) == []
        for state, size in ROW.items():
            pool = f"state/{state.name}"
            assert plan.pools.get(pool, 0) >= rows.get(state.name, 0) * size
            assert committed.get(pool, 0) >= plan.pools.get(pool, 0)
        if rows:
            assert plan.components["state"] <= sum(
                max(rows.get(s.name, 0), 64) * 9 // 8 * b + PAGE_BYTES for s, b in ROW.items()
            )


@pytest.mark.parametrize("seed", range(2))
def test_two_phases_over_a_state_of_ones_own_beside_steps_that_keep_keys(model: CompiledModel, seed: int) -> None:
    """Under poison, packed at random: scores as naive code has them, keys and values untouched, each state's memory its own."""
    rng = random.Random(seed)
    live = Canvases(model, rng)
    live.look()
    live.fill()
    for _ in range(10):
        rng.choice((live.look, live.decide, live.fill, live.close))()
        live.decide()
        for owner, (tokens, score) in list(live.filled.items())[:1]:
            torch.testing.assert_close(live.read(owner, tokens), score, rtol=0, atol=0)
    live.look()
    live.fill()
    live.counted(model(torch.tensor([9, MASK])).plan)
    order = [("summary", live.noted), ("kv", live.filled)][:: rng.choice((1, -1))]
    while order:
        name, owners = order.pop()
        before, rows = model.memory(), dict(model.state_rows)
        for owner in owners:
            owner.close()
        assert model.memory().committed == before.committed  # for whoever opens rows next
        model.trim()
        after = model.memory()
        assert (
            after.resident[f"state/{name}"] == after.committed[f"state/{name}"] == 0 < before.resident[f"state/{name}"]
        )
        assert model.state_rows == {other: count for other, count in rows.items() if other != name}
        for other, _ in order:
            assert after.resident[f"state/{other}"] > 0


# --- admission --------------------------------------------------------------------------------------------------------


def test_rows_of_a_state_of_ones_own_are_planned_and_refused_like_keys() -> None:
    """To the byte of the smallest budget; also for a phase that does not touch them."""
    tokens, rows = 40, 700
    asked = {
        LOOK: StepSize(phase=LOOK, windows=(tokens,)),
        DECIDE: StepSize(phase=DECIDE, windows=(tokens,), rows=9),
        FULL_STEP: StepSize(windows=(tokens,), rows=9),
    }
    for phase, size in asked.items():
        with mosaic.compile(CONFIG, host_budget=0) as model:
            alone, beside = (model.check([size], more={SUMMARY: count}) for count in (blocks(tokens), rows))
            assert 0 <= alone.components["state"] < beside.components["state"] >= rows * ROW[SUMMARY]
            assert (alone.components["state"] > 0) and beside.dims["summary_rows"] >= rows
        budgets = (beside.total_bytes - PAGE_BYTES, beside.total_bytes)
        for budget, fits in zip(budgets, (False, True), strict=True):
            with mosaic.compile(CONFIG, host_budget=0, budget=budget) as model:
                owner = model.open_rows(SUMMARY)
                owner.reserve(rows)
                if fits:
                    assert model.check([size], more={}).fits and model.check([size], more={SUMMARY: 0}).fits
                else:
                    with pytest.raises(DoesNotFit, match="a step over 40 tokens"):
                        model.check([asked[phase]], more={SUMMARY: rows})


def test_rows_that_nobody_owns_are_handed_out_before_a_state_grows(model: CompiledModel) -> None:
    """Admission with `more` rows agrees with the plan after they are taken."""
    rng, owners, size = random.Random(2), list[tuple[State, OwnedRows]](), StepSize(windows=(9,), rows=4)
    for _ in range(30):
        more = {state: rng.randint(0, 300) for state in rng.sample((SUMMARY, KV), rng.randint(1, 2))}
        admitted = model.check([size], more=more).dims
        for state, count in more.items():
            owners.append((state, model.open_rows(state)))
            owners[-1][1].reserve(count)
        assert model.check([size], more={}).dims == admitted
        for _, owned in rng.sample(owners, rng.randint(0, len(owners))):
            owned.close()
    for _, owned in owners:
        owned.close()


def test_request_says_rows_of_any_state() -> None:
    planner = mosaic.Planner(mosaic.models.load(CONFIG), device="cpu", host_budget=0)
    for phase in (FULL_STEP, LOOK, DECIDE):
        plan = planner.plan(mosaic.Request(seq_lens="1k", phase=phase, states={KV: "2k", SUMMARY: 300}))
        assert {name: plan.dims[name] for name in ("kv_rows", "summary_rows")} == {"kv_rows": 2048, "summary_rows": 300}
        assert plan.components["state"] == 2048 * ROW[KV] + -(-300 * ROW[SUMMARY] // PAGE_BYTES) * PAGE_BYTES
        assert (
            plan.check()
            == unverified_operators(plan.document)
            == {LOOK: ("note",), DECIDE: ("distance",)}.get(phase, ())
        )


def test_the_largest_context_is_the_one_beside_these_rows() -> None:
    planner = mosaic.Planner(mosaic.models.load(CONFIG), device="cpu", host_budget=0, budget="4MiB")
    for state, most in ((SUMMARY, 16_000), (KV, 8_000)):
        sizes = [StepSize(windows=(9,), rows=1, states={state: rows}) for rows in (1, most // 2, most)]
        few, more, many = (planner.max_context(size) for size in sizes)
        assert few > more > many > 0 and planner.max_context(sizes[0]) == few


def test_a_phase_has_its_state_although_nobody_has_rows_of_it() -> None:
    for phase in (FULL_STEP, LOOK, DECIDE):
        found = StepSize(phase=phase, windows=(9,), rows=1).dims()
        assert found.get("summary_rows") == (None if phase is FULL_STEP else 1) and "kv_rows" not in found


def test_largest_steps_have_the_rows_of_all_requests_that_they_serve() -> None:
    def uneven(config: GenerationConfig, arch: Any, prompt_len: int, request: int) -> list[StepSize | None]:
        counts = (prompt_len, 50 - prompt_len)
        return [
            StepSize(phase=LOOK, windows=(window,), states={SUMMARY: rows})
            for window, rows in zip((3, 2), counts, strict=True)
        ]

    own = replace(OPTIONS, algorithm=replace(SETTLING, shapes=uneven))
    for lengths, expected in (([9], [9, 41]), ([9, 30], [41 + 30]), ([30, 9, 4], [30 + 41 + 46])):
        found = mosaic.decoding.shapes(own, lengths, PLAIN.network.arch)
        assert [dict(size.states) for size in found] == [{SUMMARY: rows} for rows in expected]
        for sizes in (found, found[::-1]):
            assert most_rows(sizes) == {SUMMARY: max(expected)}


def test_a_step_over_kept_keys_may_have_another_state() -> None:
    both = Phase(cache=KEPT, commit=Settled())

    def over_keys(config: GenerationConfig, arch: Any, prompt_len: int, request: int) -> list[StepSize | None]:
        return [StepSize(phase=both, windows=(4,), keys=(8,), rows=2, states={SUMMARY: 3})]

    opened: dict[State, Any] = {}
    own = replace(OPTIONS, algorithm=replace(SETTLING, shapes=over_keys))
    (size,) = mosaic.decoding.shapes(own, [9], PLAIN.network.arch)
    canvas = Canvas(
        prompt=prompt_of(9), config=own, architecture=PLAIN.network.arch, request=0, length=22, demand=size.states,
        open_state=lambda state: opened.setdefault(state, RowTable(state.name).open()),
    )  # fmt: skip
    asked = canvas.ask(both, torch.tensor([10]), window=(8, 12))
    assert asked.sequence is opened[KV] and dict(asked.states) == {SUMMARY: opened[SUMMARY]} and asked.key_len == 12
    assert (opened[KV].length, opened[SUMMARY].length) == (22, 3) == (size.states[KV], size.states[SUMMARY])
    canvas.close()
    assert (opened[KV].length, opened[SUMMARY].length) == (0, 0)


def test_the_kernel_is_what_its_reference_says() -> None:
    slots = torch.arange(37) * 7 % 9
    ran = verify_operator(DISTANCE, {"T": 37, "D": 32, "S": 9}, loops="T", attrs={"eps": 1e-5}, values={"slots": slots})
    assert ran == ("cpu",)


# --- a session --------------------------------------------------------------------------------------------------------

OPTIONS: Final = GenerationConfig(algorithm=SETTLING, gen_length=13, stop_at_eos=False)


def test_an_algorithm_of_ones_own_runs_in_a_session_beside_shipped_ones(model: CompiledModel) -> None:
    """Submitted, advanced and cancelled at random: tokens of naive code, and of the others alone."""
    rng = random.Random(5)
    cached = GenerationConfig(algorithm="fast-dllm", cache="dual", gen_length=8, block_length=4, stop_at_eos=False)
    (alone,) = model.generate(prompt_of(9), cached)
    asked: dict[LiveRequest, tuple[Tensor, int]] = {}
    seen = set()
    with model.session() as session:
        while len(asked) < 7 or session.live:
            if len(asked) < 7 and rng.random() < 0.5:
                prompt, steps = prompt_of(rng.randint(1, 30), len(asked)), rng.choice((1, 2, 5))
                asked[session.submit(prompt, OPTIONS, steps=steps)] = prompt, steps
                other = session.submit(prompt_of(9), cached, request_id=0)
            if session.live and rng.random() < 0.04:
                session.cancel(rng.choice(session.live))
            seen.add(tuple(model.state_rows))
            session.advance(rng.randint(1, 3))
    assert (
        other.generation is not None
        and alone.token_ids.tolist()[: len(other.generation.token_ids)] == other.generation.token_ids.tolist()
    )
    assert {("canvas", "held_extents", "kv", "requests", "summary"), ("summary",)} <= seen
    finished = 0
    for request, (prompt, steps) in asked.items():
        assert request.generation is not None
        found, expected = request.generation.token_ids.tolist(), PLAIN.generate(prompt, 13, steps)
        assert found == expected[: len(found)]
        finished += request.generation.finish == "length" and len(found) == 13
    assert finished > 3


def test_generate_takes_an_algorithm_of_ones_own(model: CompiledModel) -> None:
    (found,) = model.generate(prompt_of(7), OPTIONS)
    assert found.token_ids.tolist() == PLAIN.generate(prompt_of(7), 13, 2)


def test_a_session_counts_rows_of_a_state_of_ones_own() -> None:
    """Admitted requests fit: summaries alone fill the budget, so only some requests are admitted."""

    def greedy(config: GenerationConfig, arch: Any, prompt_len: int, request: int) -> list[StepSize | None]:
        return [replace(size, states={SUMMARY: 200}) for size in shapes(config, arch, prompt_len, request) if size]

    own = replace(OPTIONS, algorithm=replace(SETTLING, shapes=greedy))
    with mosaic.compile(CONFIG, host_budget=0) as free:
        one = free.check(mosaic.decoding.shapes(own, [9], free.architecture)).total_bytes
    with (
        mosaic.compile(CONFIG, host_budget=0, budget=one + 3 * 225 * ROW[SUMMARY]) as model,
        model.session() as session,
    ):
        admitted = 0
        with pytest.raises(DoesNotFit):
            while True:
                session.submit(prompt_of(9), own)
                admitted += 1
                assert model.state_rows == {"summary": 200 * admitted}
        assert not session.admits(mosaic.decoding.Submission(prompt=prompt_of(9), config=own))
        assert 2 <= admitted <= 4
        while session.advance():
            assert sum(model.memory().committed.values()) <= model.planner.budget_bytes
        assert not model.state_rows


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_only_phases_that_are_shipped_whole_are_kept_on_disk() -> None:
    class Own(State):
        __slots__ = ()

    assert LOOK.shipped is DECIDE.shipped is False
    for states, shipped in (((SUMMARY, KV), True), ((KV, Own(name="own", width=3)), False)):
        assert FULL_STEP.registered(logits=None, open_states=states).shipped is shipped


def test_what_a_policy_forgets_is_said(model: CompiledModel) -> None:
    class Forgot(Noted):
        __slots__ = ()

        @property
        def states(self) -> Sequence[State]:
            return (SUMMARY,) if self.known else ()

        known = True

        def finish(self, step: Any) -> None:
            summary = step.g.state("elsewhere", (step.g.dim("elsewhere_rows"), WIDTH), "float32")
            step.g.add_op(NOTE, step.hidden.buffer, step.inputs["block_slots"], summary, eps=1e-5)

    with pytest.raises(GraphError, match="no part of the phase has the states elsewhere"):
        mosaic.models.load(CONFIG).graph(phase=Phase(head=NO_HEAD, others=(Forgot(),)))
    with pytest.raises(UsageError, match="a phase without head only fills a state"):
        Phase(head=NO_HEAD)
    with pytest.raises(GraphError, match="unknown dtype 'float33'"):
        State(name="summary", width=3, dtype="float33")
    model.open_rows(SUMMARY)
    with pytest.raises(UsageError, match=r"the state 'summary' is State\(.*give one of them another name"):
        model.open_rows(replace(SUMMARY, width=WIDTH + 1))

    def silent(*given: Any) -> list[StepSize | None]:
        return [replace(size, phase=FULL_STEP, states={}, rows=1) for size in shapes(*given) if size]

    own = replace(SETTLING, shapes=silent)
    with (
        model.session() as session,
        pytest.raises(UsageError, match=r"asks for the state 'summary'.*have none:"),
    ):
        session.submit(prompt_of(3), OPTIONS, algorithm=own)
    with pytest.raises(UsageError, match="top_k means nothing to the algorithm 'settling', which takes steps"):
        model.generate(prompt_of(3), OPTIONS, top_k=4)
    with pytest.raises(UsageError, match="'settling' is not for this model, which attends in both directions"):
        model.generate(prompt_of(3), replace(OPTIONS, algorithm=replace(SETTLING, traits=Traits(blockwise=True))))
