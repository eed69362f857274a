"""Threads that share a model get what one thread gets, steps and generations mixed, without a word about it in their code."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_runtime_compiled import LLADA, sequences_of

import mosaic
from mosaic.models.parts import KEPT, NO_HEAD, Commit
from mosaic.models.phase import Phase
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.steps import StepRequest
from mosaic.runtime.turns import Turns

THREADS = 16
LENGTHS = (5, 40, 150)
GENERATIONS: list[dict[str, Any]] = [
    {"gen_length": 8, "block_length": 4, "steps": 4},
    {"gen_length": 8, "block_length": 4, "steps": 4, "temperature": 0.7},
    {"gen_length": 8, "block_length": 4, "algorithm": "fast-dllm", "threshold": 0.2, "cache": "dual"},
]


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(LLADA) as compiled:
        generator = torch.Generator().manual_seed(7)
        for name, view in compiled.weights().items():
            if not name.startswith("="):
                view.normal_(1.0 if "norm" in name or "ln_f" in name else 0.0, 0.12, generator=generator)
        yield compiled


def stepped(model: CompiledModel, length: int, config: dict[str, Any] | None) -> list[float]:
    """A call, its outputs read at leisure."""
    step = model(sequences_of((length,), LLADA)[0], config=config)
    time.sleep(0.001)
    return [*step.confidence.tolist(), *step.entropy.tolist(), *map(float, step.token_ids)]


def decided(model: CompiledModel, length: int) -> list[float]:
    ids = sequences_of((length,), LLADA)[0]
    rows = torch.arange(0, length, 2)
    phase = Phase(commit=Commit(score="confidence", rule="top"))
    (result,) = model.step([StepRequest(phase=phase, token_ids=ids, rows=rows, current=ids[rows], quota=2)])
    return [*result.score.tolist(), *map(float, result.chosen)]


def generated(model: CompiledModel, length: int, options: dict[str, Any]) -> list[float]:
    prompt = torch.arange(1, length + 1)
    (answer,) = model.generate(prompt, stop_at_eos=False, **options)
    return [*map(float, answer.token_ids), *answer.confidence.tolist()]


def kept(model: CompiledModel, length: int) -> list[float]:
    """Keys of its own, filled and looked at by steps between which others may have their turn."""
    ids, nothing = sequences_of((length,), LLADA)[0], torch.empty(0, dtype=torch.int64)
    sequence = model.open_sequence()
    sequence.reserve(length)
    own: dict[str, Any] = {"sequence": sequence, "key_len": length, "token_ids": ids}
    model.step([StepRequest(phase=Phase(cache=KEPT, head=NO_HEAD), rows=nothing, current=nothing, **own)])
    time.sleep(0.001)
    rows = torch.arange(length)
    phase = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
    (result,) = model.step([StepRequest(phase=phase, rows=rows, current=ids, quota=1, **own)])
    sequence.close()
    return [*result.score.tolist(), *map(float, result.token)]


def jobs() -> list[Callable[[CompiledModel], list[float]]]:
    """One of every kind and size."""
    configs: list[dict[str, Any] | None] = [
        None,
        {"attention": "heads", "heads": 1},
        {"attention": "queries", "head": "fused"},
    ]
    found: list[Callable[[CompiledModel], list[float]]] = []
    for length in LENGTHS:
        found += [lambda m, n=length, c=config: stepped(m, n, c) for config in configs]
        found += [lambda m, n=length: decided(m, n), lambda m, n=length: kept(m, n)]
    return found + [lambda m, o=options: generated(m, 6, o) for options in GENERATIONS]


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let threads change places as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_sixteen_threads_get_what_one_gets(model: CompiledModel, eager_switches: None) -> None:
    work = jobs()
    expected = [job(model) for job in work]
    order = [number for number in range(len(work)) for _ in range(5)]
    random.Random(5).shuffle(order)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda number: work[number](model), order))
    wrong = [
        number
        for number, result in zip(order, found, strict=True)
        if result != pytest.approx(expected[number], rel=1e-4)
    ]
    assert not wrong, f"{len(wrong)} of {len(order)} results are not those of one thread"
    assert not model.state_rows


def test_outcomes_are_their_callers_whoever_steps_meanwhile(model: CompiledModel, eager_switches: None) -> None:
    """Another thread's outcome arrives in the same memory."""
    phase = Phase(commit=Commit(score="confidence", rule="top"))
    requests = [
        StepRequest(phase=phase, token_ids=ids, rows=torch.arange(4), current=ids[:4], quota=number)
        for number, ids in enumerate(torch.arange(32).view(4, 8))
    ]
    expected = [model.step([request])[0].score.tolist() for request in requests]

    def stepped(number: int) -> bool:
        return model.step([requests[number % 4]])[0].score.tolist() == expected[number % 4]

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(stepped, range(400)))


def test_outputs_are_views_where_nobody_else_can_call_and_copies_elsewhere(model: CompiledModel) -> None:
    first, second = sequences_of((40,), LLADA)[0], sequences_of((41,), LLADA)[0]
    with model.exclusive():
        view = model(first)
        before = view.confidence.clone()
        model(second)
        assert not torch.equal(view.confidence, before), "a view shows the next call's results"
    stay = threading.Event()
    other = threading.Thread(target=stay.wait)
    other.start()
    try:
        copy = model(first)
        model(second)
        assert torch.equal(copy.confidence, before)
    finally:
        stay.set()
        other.join()


def test_a_call_waits_for_the_block_of_another_thread(model: CompiledModel) -> None:
    order: list[str] = []

    def call() -> None:
        model([1, 256])
        order.append("call")

    with model.exclusive():
        waiting = threading.Thread(target=call)
        waiting.start()
        time.sleep(0.05)
        model([1, 256])
        order.append("block")
    waiting.join()
    assert order == ["block", "call"]


def test_a_generation_is_one_call(model: CompiledModel) -> None:
    """A step that another thread asks for meanwhile comes after it; one of its own callback comes at once."""
    order: list[str] = []
    threads: list[threading.Thread] = []

    def on_step(step: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=lambda: (model([1, 256]), order.append("other"))))
            threads[0].start()
            time.sleep(0.05)
        model([1, 2, 256])
        order.append("own")

    model.generate(torch.tensor([1, 2]), gen_length=8, block_length=4, steps=4, on_step=on_step)
    threads[0].join()
    assert order == ["own"] * 4 + ["other"]


def test_an_error_in_one_thread_lets_the_others_go_on(model: CompiledModel) -> None:
    expected = stepped(model, 40, None)

    def attempt(number: int) -> object:
        try:
            return stepped(model, 40, {"proj": 3} if number % 2 else None)
        except mosaic.MosaicError as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(attempt, range(32)))
    assert all(isinstance(result, mosaic.MosaicError) for result in found[1::2])
    assert all(result == pytest.approx(expected) for result in found[::2])


def test_a_turn_comes_after_what_the_last_one_launched_though_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback may raise while a step is on its way, and the next turn belong to a thread with another stream.

    The streams are those of the model's device, also where another one is the thread's current device.
    """

    class Stream:
        def __init__(self) -> None:
            self.after: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.after.append(other)

    first, second, elsewhere = Stream(), Stream(), Stream()
    device, current = torch.device("cuda", 1), {0: elsewhere, 1: first}
    turns = Turns(device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: current[0 if of is None else of.index])
    with pytest.raises(ValueError, match="a callback's"), turns:
        raise ValueError("a callback's")
    current[1] = second
    with turns:
        assert second.after == [first]
    with turns, turns:
        assert second.after == [first] and first.after == elsewhere.after == []


def test_rows_are_handed_out_once_to_many_threads(eager_switches: None) -> None:
    memory = RowTable("kv")

    def take(number: int) -> list[int]:
        source, sequence = random.Random(number), memory.open()
        for _ in range(20):
            sequence.reserve(sequence.length + source.randint(1, 9))
            if source.random() < 0.2:
                sequence.close()
        return list(map(int, sequence.slots()))

    with ThreadPoolExecutor(THREADS) as pool:
        slots = [slot for own in pool.map(take, range(64)) for slot in own]
    assert len(slots) == len(set(slots)) and max(slots) < memory.rows


def test_a_turn_is_alone_within_another_or_where_there_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    for threads in (1, 2, 7):
        monkeypatch.setattr(threading, "active_count", lambda threads=threads: threads)
        with turns:
            assert turns.is_alone == (threads == 1)
            with turns:
                assert turns.is_alone
            assert turns.is_alone == (threads == 1)
