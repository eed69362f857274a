"""Sessions over a runner that decides by a rule of the test: who is stepped when, and what each request is told.

The rule: the position p of a request is decided for `token(p)`, from low positions to high ones, as many a step as asked
for. What every request will be is known beforehand, step by step, without a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from own_algorithms import as_generator
from torch import Tensor

from mosaic import models
from mosaic.decoding import (
    Algorithm,
    Canvas,
    Generation,
    GenerationConfig,
    LiveRequest,
    Session,
    Step,
    Submission,
    shapes,
)
from mosaic.decoding.algorithms import canvas_length
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models.architecture import Architecture
from mosaic.models.parts import KEPT, KV, Commit
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.packing import group_of
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.steps import StepResult

MASK, EOS, END = 95, 7, 30
KEEPING = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
TOKENS = {"vocab_size": 96, "mask_token_id": MASK, "eos_token_id": EOS, "torch_dtype": "float32"}
SDAR = {"model_type": "sdar", "block_size": 4, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 64, **TOKENS}  # fmt: skip
LLADA = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
         "embedding_size": 96, "max_sequence_length": 64, **TOKENS}  # fmt: skip


@cache
def architecture(blockwise: bool) -> Architecture:
    return models.load(SDAR if blockwise else LLADA).architecture


def token(position: int) -> int:
    """Nothing ends before the position END."""
    return EOS if position >= END else 10 + position


class Rows:
    """The rows of one sequence, counted by the runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.length = runner, 0

    def reserve(self, count: int) -> None:
        self.runner.held += count - self.length
        self.length = count

    def close(self) -> None:
        assert self.runner.entered, "another thread may be stepping"
        self.reserve(0)


class Runner:
    """Decides by the rule, and writes down what it was asked."""

    def __init__(self, *, blockwise: bool = False, room: int = 1 << 30) -> None:
        self.architecture, self.room = architecture(blockwise), room
        self.held = self.entered = 0
        self.shared = WeakSet[SharedSizes]()
        self.stepped: list[list[Any]] = []
        self.checked: list[tuple[list[StepSize], dict[State, int]]] = []

    def sharing(self) -> SharedSizes:
        return SharedSizes(self.shared)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.entered += 1
        yield
        self.entered -= 1

    def open_rows(self, state: State) -> Rows:
        assert state is KV
        return Rows(self)

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        assert self.entered
        self.checked.append((list(sizes), dict(more or {})))
        return self.held + sum((more or {}).values()) <= self.room

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> None:
        assert not self.admits(sizes, more=more), "plans are made to say why something does not fit"
        raise DoesNotFit("too many rows")

    def step(self, requests: Sequence[Any]) -> list[Any]:
        assert self.entered and len({group_of(request, self.architecture) for request in requests}) == 1
        self.stepped.append(list(requests))
        return [self.result(request) for request in requests]

    def result(self, request: Any) -> Any:
        at = request.rows + request.start
        committed = torch.arange(len(at)) < max(request.quota, 1)
        drawn = torch.tensor([token(p) for p in at.tolist()], dtype=torch.int64)
        plan: Any = SimpleNamespace(total_bytes=1_000 + len(self.stepped))
        return StepResult(
            token=drawn, score=at / 64, committed=committed, chosen=torch.where(committed, drawn, request.current), plan=plan,
            seconds=len(self.stepped) / 8,
        )  # fmt: skip


class Shown:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.put_.append(value.tolist())
        value.zero_()  # it is the streamer's own

    def end(self) -> None:
        self.ended += 1


class ShownAsDraft(Shown):
    def __init__(self) -> None:
        super().__init__()
        self.drafts: list[tuple[list[int], list[float]]] = []

    def put_draft(self, token_ids: Tensor, confidence: Tensor) -> None:
        self.drafts.append((token_ids.tolist(), confidence.tolist()))
        token_ids.zero_()
        confidence.zero_()


def story(prompt: list[int], gen: int, block: int, steps: int, stop: bool) -> Iterator[tuple[int, list[int]]]:
    """Give the block and the positions that each step of a whole canvas decides, up to the end of the text."""
    per, p = steps * block // gen, len(prompt)
    for number in range(gen // block):
        at = p + number * block
        for step in range(per):
            count = block // per + (step < block % per)
            if not count:
                continue
            yield number, list(range(at, at + count))
            at += count
            if stop and at > END:
                return


def test_a_request_is_told_what_each_step_did() -> None:
    finishes = set()
    for seed in range(40):
        draw, runner = random.Random(seed), Runner()
        prompt = [draw.randrange(10, 60) for _ in range(draw.choice((3, 12, 24)))]
        block, stop, told = draw.choice((2, 4)), draw.random() < 0.7, list[Step]()
        gen = block * draw.randrange(1, 5)
        steps = draw.choice((gen // block, 2 * gen // block, 2 * gen))
        shown = draw.choice((Shown, ShownAsDraft))()
        with Session(runner) as session:  # type: ignore[arg-type]
            session.submit(torch.tensor([1]), gen_length=1)  # takes the number 0
            session.cancel(session.live[0])
            request = session.submit(
                torch.tensor(prompt), gen_length=gen, block_length=block, steps=steps, stop_at_eos=stop,
                streamer=shown, on_step=told.append,
            )  # fmt: skip
            assert shown.put_ == [prompt] and request.number == 1 and request.config.gen_length == gen
            p, seen, done = len(prompt), list[list[int]](), [prompt]
            canvas, scores = [MASK] * gen, [0.0] * gen
            expected = [*story(prompt, gen, block, steps, stop)]
            for count, (number, at) in enumerate(expected, 1):
                (step,) = session.advance()
                for a in at:
                    canvas[a - p], scores[a - p] = token(a), a / 64
                assert step is told[-1] and len(told) == request.steps == step.step == count
                assert (step.request, step.block, step.phase) == (1, number, "full_step")
                assert (step.positions.tolist(), step.token_ids.tolist()) == (at, [token(a) for a in at])
                assert step.confidence.tolist() == [a / 64 for a in at] and step.masked == canvas.count(MASK)
                assert (step.peak_bytes, step.seconds) == (1_000 + count, count / 8)
                assert step.plan.total_bytes == 1_000 + count
                last = at[-1] + 1 if not stop else min(at[-1] + 1, max(END + 1, p + 1))
                done.append([token(a) for a in range(sum(map(len, done)), last)])
                assert shown.put_ == done
                seen.append([*canvas])
                if isinstance(shown, ShownAsDraft):
                    assert shown.drafts[-1] == (canvas, scores) and len(shown.drafts) == count
                assert shown.ended == (count == len(expected)) and (request.generation is None) == (not shown.ended)
            answer = [at for part in done[1:] for at in part]
            assert session.live == () and session.advance() == [] and not request.pending
        found = request.generation
        assert found is not None and found.prompt_ids.tolist() == prompt and found.text is None
        assert found.token_ids.tolist() == answer and found.steps == len(expected)
        assert found.confidence.tolist() == [(p + at) / 64 for at in range(len(answer))]
        assert found.finish == ("eos" if stop and EOS in answer else "length")
        finishes.add(found.finish)
    assert finishes == {"eos", "length"}


WAYS: list[dict[str, Any]] = [
    {"gen_length": 8, "block_length": 4, "steps": 4},
    {"gen_length": 8, "block_length": 4, "steps": 8, "temperature": 0.5},
    {"gen_length": 4, "block_length": 4, "steps": 2, "cfg_scale": 1.0},
    {"gen_length": 8, "block_length": 4, "algorithm": "fast-dllm", "threshold": 0.5, "cache": "dual"},
]
BLOCKWISE: list[dict[str, Any]] = [
    {"gen_length": 8, "remasking": "sequential"},
    {"gen_length": 9, "threshold": 0.5, "temperature": 0.5},
    {"gen_length": 4, "threshold": 0.5},
]


@pytest.mark.parametrize("blockwise", [False, True])
def test_the_group_that_has_waited_longest_is_stepped_whole(blockwise: bool) -> None:
    for seed in range(5):
        draw, runner = random.Random(seed), Runner(blockwise=blockwise)
        ways, since, turn, prompts = (
            BLOCKWISE if blockwise else WAYS,
            dict[LiveRequest, int](),
            0,
            dict[LiveRequest, int](),
        )
        with Session(runner) as session:  # type: ignore[arg-type]
            for number in range(60):
                if number < 30 and draw.random() < 0.5:
                    length = draw.randrange(1, 10)
                    one = session.submit(torch.arange(10, 10 + length), stop_at_eos=False, **draw.choice(ways))
                    assert one.number == len(prompts) and one.waiting_since == turn
                    since[one], prompts[one] = turn, length
                if session.live and draw.random() < 0.05:
                    one = draw.choice(session.live)
                    session.cancel(one)
                    session.cancel(one)
                    assert one.generation is not None and one.generation.finish == "cancelled" and one.pending is None
                    del since[one]
                assert session.live == tuple(since)
                owned = [{size.owned[0] for size in one.largest if size.phase.cached} for one in since]
                assert runner.held == sum(max(one, default=0) for one in owned)  # from the first on, or never
                groups = {one: group_of(one.pending, runner.architecture) for one in since if one.pending is not None}
                asked = [one.pending for one in since]
                longest = min(since, key=lambda one: since[one], default=None)
                stepped = [one for one in since if longest is not None and groups[one] == groups[longest]]
                steps = session.advance()
                assert [step.request for step in steps] == [one.number for one in stepped]
                if not stepped:
                    assert not session.live
                    continue
                turn += 1
                pending = [ask for one, ask in zip(since, asked, strict=True) if one in stepped]
                assert (
                    all(a.token_ids is b.token_ids for a, b in zip(runner.stepped[-1], pending, strict=True))
                    and len(runner.stepped) == turn
                )
                for one in stepped:
                    since[one] = turn
                    if one.generation is not None:
                        found = one.generation.token_ids.tolist()
                        assert found == [token(prompts[one] + at) for at in range(one.config.gen_length)]
                        del since[one]
        assert runner.held == 0 and all(one.generation is not None for one in prompts)


def test_several_steps_are_run_at_once_until_nothing_is_left() -> None:
    runner = Runner()
    with Session(runner) as session:  # type: ignore[arg-type]
        session.submit_all([Submission(prompt=torch.tensor([1]), config=GenerationConfig(**way)) for way in WAYS[:3]])
        assert session.advance(0) == []
        assert [step.request for step in session.advance(3)] == [0, 1, 2, 0, 1]
        assert len(session.advance(100)) == 4 + 8 + 2 - 5
        assert len(runner.stepped) == 8 + 2 and session.advance(5) == []


def test_what_is_admitted_is_what_would_be_submitted() -> None:
    for room in (0, 11, 12, 23, 24, 48):
        runner = Runner(blockwise=True, room=room)
        with Session(runner) as session:  # type: ignore[arg-type]
            one = Submission(
                prompt=torch.arange(10, 15),
                config=as_generator(GenerationConfig(gen_length=7), runner.architecture),
                request_id=3,
            )  # 12 rows
            for count in range(room // 12):
                assert session.admits(one) and session.admits(*[one] * (room // 12 - count))
                assert not session.admits(*[one] * (room // 12 - count + 1))
                submitted = session.submit(one.prompt, one.config, request_id=3)
                alone = shapes(one.config, [5], runner.architecture, [3])
                together = shapes(one.config, [5] * (count + 1), runner.architecture, [3] * (count + 1))
                assert runner.checked[-1] == (together, {KV: 12})
                assert list(submitted.largest) == alone and runner.held == 12 * (count + 1)
            assert not session.admits(one)
            with pytest.raises(DoesNotFit):
                session.submit_all([one])
            assert len(session.live) == room // 12 and runner.held == 12 * len(session.live)
            runner.checked.clear()
            assert session.submit_all([]) == [] and (runner.checked == []) == (not session.live)
    with pytest.raises(UsageError, match="session is closed"):
        session.submit(torch.tensor([1]))


def test_an_algorithm_that_asks_for_nothing_has_ended_at_once() -> None:
    def decode(canvas: Canvas) -> Iterator[Any]:
        canvas.tokens[canvas.prompt_len :] = 5
        canvas.masked[:] = False
        yield from ()

    nothing: Any = Algorithm(name="nothing", decode=decode, shapes=lambda *_: [])  # type: ignore[arg-type]
    shown = Shown()
    with Session(Runner()) as session:  # type: ignore[arg-type]
        request = session.submit(torch.tensor([1]), algorithm=nothing, gen_length=2, streamer=shown)
        assert session.live == () and session.advance() == []
    assert request.generation is not None and request.generation.token_ids.tolist() == [5, 5]
    assert (request.generation.finish, request.generation.steps) == ("length", 0)
    assert (shown.put_, shown.ended) == ([[1], [5, 5]], 1)


def test_a_streamer_is_told_that_a_request_was_cancelled() -> None:
    """Once, by a cancel or by the end of the session, with what was final by then."""
    shown, other = Shown(), Shown()
    with Session(Runner()) as session:  # type: ignore[arg-type]
        options = {"gen_length": 8, "block_length": 4, "steps": 8}
        first = session.submit(torch.tensor([1, 2]), streamer=shown, **options)
        session.submit(torch.tensor([1]), streamer=other, **options)
        session.advance(3)
        assert (shown.ended, other.ended) == (0, 0)
        session.cancel(first)
        session.cancel(first)
        assert (shown.ended, other.ended) == (1, 0)
    assert (shown.ended, other.ended) == (1, 1)
    assert first.generation is not None and first.generation.finish == "cancelled"
    assert [token for part in shown.put_[1:] for token in part] == first.generation.token_ids.tolist()


def test_prompts_that_cannot_be_are_named_by_their_place() -> None:
    runner = Runner()
    good, bad = (
        Submission(prompt=torch.tensor(ids), config=GenerationConfig(gen_length=4)) for ids in ([1], [1, MASK])
    )
    with Session(runner) as session:  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"^prompt 2 has the mask token"):
            session.submit_all([good, good, bad])
        with pytest.raises(UsageError, match=r"^the prompt has the mask token"):
            session.submit_all([bad])
        assert session.live == () and not runner.checked
        first = session.submit(
            torch.tensor([1], dtype=torch.int32), GenerationConfig(gen_length=2, seed=4), gen_length=4
        )
        assert (first.config.gen_length, first.config.seed) == (4, 4) and first.pending is not None
        assert first.pending.token_ids.dtype == torch.int64
    assert first.generation is not None and first.generation.finish == "cancelled"


def test_records_of_requests_are_named_and_stay_as_they_are() -> None:
    plain = Submission(prompt=torch.tensor([1]))
    assert (plain.config, plain.request_id, plain.streamer, plain.on_step) == (GenerationConfig(), None, None, None)
    ids, scores = torch.tensor([1]), torch.ones(1)
    ended = Generation(prompt_ids=ids, token_ids=ids, confidence=scores, finish="length", steps=1)
    for record in (plain, ended):
        assert not hasattr(record, "__dict__")
        with pytest.raises(TypeError, match="positional"):
            type(record)(ids)  # type: ignore[arg-type, call-arg]
    with pytest.raises(FrozenInstanceError):
        plain.request_id = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        ended.steps = 2  # type: ignore[misc]


def test_callbacks_may_cancel_any_request() -> None:
    """Its own too, at its last step too: what has ended stays as it is, and a streamer is told once."""
    finishes = set()
    for seed in range(30):
        draw, shown = random.Random(seed), [Shown() for _ in range(3)]
        requests = list[LiveRequest]()
        with Session(Runner()) as session:  # type: ignore[arg-type]

            def stop(step: Step, session: Session = session, draw: random.Random = draw) -> None:
                if draw.random() < 0.2:
                    session.cancel(requests[draw.randrange(3)])  # noqa: B023

            requests += session.submit_all(
                [
                    Submission(prompt=torch.tensor([1]), config=GenerationConfig(**WAYS[0]), streamer=one, on_step=stop)
                    for one in shown
                ]
            )
            ended: dict[int, Generation] = {}
            while session.live:
                session.advance()
                for number, request in enumerate(requests):
                    if (found := request.generation) is not None:
                        assert ended.setdefault(number, found) is found and request not in session.live
                        assert shown[number].ended == 1
        finishes |= {one.finish for one in ended.values()}
    assert finishes == {"length", "cancelled"}


class Fault(Exception):
    """Raised by what a user brings."""


def test_what_steps_did_before_an_error_is_told_by_the_next_call() -> None:
    """Callbacks that raise now and then: every outcome is returned once and in order, and streamers end."""
    raised = 0
    for seed in range(30):
        draw, told, returned = random.Random(seed), list[Step](), list[Step]()

        def tell(step: Step, draw: random.Random = draw, told: list[Step] = told) -> None:
            told.append(step)
            if draw.random() < 0.3:
                raise Fault

        shown = [Shown() for _ in range(3)]
        with Session(Runner()) as session:  # type: ignore[arg-type]
            requests = session.submit_all(
                [
                    Submission(prompt=torch.tensor([1]), config=GenerationConfig(**way), streamer=one, on_step=tell)
                    for way, one in zip(WAYS[:3], shown, strict=True)
                ]
            )
            while session.live:
                try:
                    returned += session.advance(draw.randrange(1, 6))
                except Fault:
                    raised += 1
            returned += session.advance()
            assert all(one is other for one, other in zip(returned, told, strict=True)) and session.advance() == []
        assert [one.generation.finish for one in requests if one.generation is not None] == ["length"] * 3
        assert [one.ended for one in shown] == [1] * 3
    assert raised > 30


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_request_whose_algorithm_raises_has_failed(error: type[BaseException]) -> None:
    """In any of its steps, the first one too: it ends with what was final, the others go on, and no row is kept."""
    for fails_at in range(4):

        def decode(canvas: Canvas, fails_at: int = fails_at) -> Iterator[Any]:
            for number, at in enumerate(range(canvas.prompt_len, canvas.end)):
                if number == fails_at:
                    raise error
                asked = canvas.ask(KEEPING, torch.tensor([at]), window=(0, canvas.length), quota=1)
                canvas.take(asked.rows, (yield asked))

        def sizes(config: Any, arch: Any, prompt_len: int, _: int) -> list[StepSize]:
            length = canvas_length(config, arch, prompt_len)
            return [StepSize(phase=KEEPING, windows=(length,), keys=(length,), rows=1)]

        runner, shown, other = Runner(), Shown(), Shown()
        broken: Any = Algorithm(name="broken", decode=decode, shapes=sizes)  # type: ignore[arg-type]
        asked = Submission(
            prompt=torch.tensor([1]), config=GenerationConfig(algorithm=broken, gen_length=6), streamer=shown
        )
        with Session(runner) as session:  # type: ignore[arg-type]
            going = session.submit(torch.tensor([1]), streamer=other, **WAYS[3])
            before = runner.held
            if not fails_at:  # nothing of what was submitted with it stays
                whole = Submission(prompt=torch.tensor([1]), config=GenerationConfig(**WAYS[3]))
                with pytest.raises(error):
                    session.submit_all([whole, asked])
            else:
                (request,) = session.submit_all([asked])
                with pytest.raises(error):
                    session.advance(30)
                assert request.generation is not None and request.generation.finish == "failed"
                assert request.generation.token_ids.tolist() == [token(1 + at) for at in range(fails_at)]
                assert (request.steps, request.pending) == (fails_at, None)
                assert [one for part in shown.put_[1:] for one in part] == request.generation.token_ids.tolist()
            assert shown.ended == 1 and runner.held == before and session.live == (going,)
            while session.advance():
                pass
        assert going.generation is not None and going.generation.finish == "length" and other.ended == 1
        assert runner.held == 0
