"""Streams of requests: each gets the answer that it gets alone, in order or as they end, with no more live than are admitted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from test_decoding import CONFIGS, prompt_of
from test_session import Family

import mosaic
from mosaic.decoding import GenerationConfig, LiveRequest, Outcome, Session, Stream, Submission, generate
from mosaic.errors import DoesNotFit, UsageError
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.host_copy import Arriving

SDAR = GenerationConfig(gen_length=8, threshold=0.3, stop_at_eos=False)


@pytest.fixture(scope="module")
def family() -> Iterator[Family]:
    """A tiny model, whose budget holds some of its requests."""
    found = Family("sdar", room=3, spare_bytes=1 << 16)
    yield found
    found.model.close()


@cache
def asked_of(family: Family) -> list[tuple[int, list[Submission]]]:
    """Random requests, up to three an entry; a third of the numbers is left out, as where a job is taken up again."""
    rng, found = random.Random(3), []
    for number in sorted(rng.sample(range(12), 8)):
        prompt, temperature = prompt_of(rng.choice((3, 9, 22))), rng.choice((0.0, 1.0))
        config = replace(SDAR, gen_length=8 if found else 32, temperature=temperature)
        ids = [number + (place << 32) for place in range(rng.randint(1, 3) if found else 1)]
        found.append((number, [Submission(prompt=prompt, config=config, request_id=each) for each in ids]))
    return found


@cache
def alone(family: Family, number: int, place: int) -> list[int]:
    one = dict(asked_of(family))[number][place]
    (found,) = generate(family.model, [one.prompt], one.config, request_ids=[one.request_id])
    return found.token_ids.tolist()


@pytest.mark.parametrize(("ordered", "most_live"), [(True, 1), (True, 64), (False, 4)])
def test_each_gets_the_answer_that_it_gets_alone(family: Family, ordered: bool, most_live: int) -> None:
    asked, most = asked_of(family), 0

    def look(stream: Stream) -> None:
        nonlocal most
        most = max(most, len(session.live))

    with Session(family.model) as session:
        stream = Stream(session, most_live=most_live, after_step=look)
        found = [*stream.run(iter(asked), ordered=ordered)]
        assert not session.live
    numbers = [outcome.number for outcome in found]
    assert (numbers == sorted(numbers)) == (ordered or most_live == 1)
    assert sorted(numbers) == [number for number, _ in asked]
    assert 0 < most <= most_live and (most_live == 1 or most > 1)
    tokens = 0
    for outcome in found:
        assert outcome.error is None
        answered = [one.token_ids.tolist() for one in outcome.generations]
        assert answered == [alone(family, outcome.number, place) for place in range(len(dict(asked)[outcome.number]))]
        tokens += sum(map(len, answered))
    assert stream.tokens == tokens and stream.forwards > 0


def test_what_can_never_fit_is_refused_at_once_and_the_others_go_on(family: Family) -> None:
    never = Submission(prompt=prompt_of(400), config=SDAR)
    empty = Submission(prompt=torch.tensor([], dtype=torch.int64), config=SDAR)
    few = [Submission(prompt=prompt_of(9), config=SDAR, request_id=number) for number in range(5)]
    asked = [[few[0]], [few[1]], [never], [few[2], empty], *([one] for one in few[3:])]
    expected = [one.token_ids.tolist() for one in generate(family.model, [one.prompt for one in few], SDAR)]
    with Session(family.model) as session:
        stream, seen = Stream(session), dict[int, tuple[Any, int]]()
        for outcome in stream.run(enumerate(asked), ordered=False):
            seen[outcome.number] = outcome, stream.forwards
        (first, *_) = Stream(session).run([(0, [few[0]]), (1, [never])], ordered=False)
    assert first.number == 1 and stream.tokens == 4 * 8  # the one beside the empty prompt was cancelled
    assert isinstance(seen[2][0].error, DoesNotFit) and seen[2][0].error.never
    assert isinstance(seen[3][0].error, UsageError) and "is empty" in str(seen[3][0].error)
    assert seen[2][1] == seen[3][1] == 1 < seen[0][1]  # before the ones before them had ended
    assert not seen[2][0].generations and not seen[3][0].generations
    for place in (0, 1, 4, 5):
        (answer,) = seen[place][0].generations
        assert answer.token_ids.tolist() == expected[asked[place][0].request_id or 0]


def test_who_is_refused_is_asked_again_when_a_request_has_ended_and_not_before(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refused = Session.submit_all, list[tuple[int | None, int]]()
    lives, requests = list[int](), list[LiveRequest]()

    def counted(session: Session, submissions: Any) -> Any:
        try:
            requests.extend(found := submit(session, submissions))
        except DoesNotFit:
            refused.append((submissions[0].request_id, sum(one.generation is not None for one in requests)))
            raise
        return found

    monkeypatch.setattr(Session, "submit_all", counted)
    config = replace(SDAR, gen_length=24, threshold=1.0)  # as many steps as tokens
    asked = [(number, [Submission(prompt=prompt_of(22), config=config, request_id=number)]) for number in range(8)]
    with Session(family.model) as session:
        stream = Stream(session, after_step=lambda _: lives.append(len(session.live)))
        assert len([*stream.run(asked)]) == 8
    assert refused and len(refused) == len({*refused}) and max(lives) > 1
    assert stream.forwards > 2 * len(refused)


@pytest.mark.parametrize("quick", [True, False])
def test_a_device_begins_with_prompts_that_fill_a_step_while_others_are_submitted(
    family: Family, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """A step is launched when five are there. Others come until it has ended, and are served by the one after it."""
    monkeypatch.setattr(CompiledModel, "asynchronous", property(lambda _: True))
    monkeypatch.setattr(Arriving, "are_here", property(lambda _: quick or len(session.live) >= 13))
    config, served = GenerationConfig(gen_length=4, stop_at_eos=False), list[tuple[int, int]]()
    asked = [(number, [Submission(prompt=prompt_of(9), config=config, request_id=number)]) for number in range(20)]
    (expected,) = {tuple(one.token_ids.tolist()) for one in generate(family.model, [asked[0][1][0].prompt], config)}

    def look(stream: Stream) -> None:
        served.append((len(stream.steps), len(session.live)))

    with Session(family.model, max_num_batched_tokens=40) as session:
        found = [*Stream(session, after_step=look).run(asked)]
        assert not session.live
    assert [tuple(one.token_ids.tolist()) for outcome in found for one in outcome.generations] == [expected] * 20
    assert served[0] == (5, 5 if quick else 13)


def test_steps_that_are_shorter_than_the_hosts_work_let_in_an_eighth_of_those_who_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device there is always one on its way, which has ended when the host asks."""
    monkeypatch.setattr(CompiledModel, "asynchronous", property(lambda _: True))
    with mosaic.compile(CONFIGS["sdar"], seed=3) as model, Session(model) as session:
        stream, came = Stream(session), 0
        for most in (8, 100, 100, 100):
            while stream.wants and came < most:
                stream.put(came, [Submission(prompt=prompt_of(9), config=SDAR, request_id=came)])
                came += 1
            stream.advance()
            assert len(session.live) == came
    assert came == 14  # two each time


def test_a_step_of_those_who_have_left_keeps_nobody_out(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledModel, "asynchronous", property(lambda _: True))
    with Session(family.model, max_num_batched_tokens=16) as session:
        stream = Stream(session)
        for number in range(2):
            assert stream.wants
            stream.put(number, [Submission(prompt=prompt_of(9), config=SDAR, request_id=number)])
        assert not stream.wants and not stream.holds
        for number in range(2):
            stream.cancel(number)
        assert len(stream.advance()) == 2 and stream.wants
        stream.put(8, [Submission(prompt=prompt_of(3), config=SDAR, request_id=8)])
        while session.live:
            (*_, last) = stream.advance() or [None]
    assert last is not None and [one.token_ids.tolist() for one in last.generations] == [
        one.token_ids.tolist() for one in generate(family.model, [prompt_of(3)], SDAR)
    ]


def test_who_is_cancelled_while_it_waits_holds_nobody_up(family: Family) -> None:
    with Session(family.model) as session:
        stream = Stream(session, most_live=1)
        for number in (0, 1):
            ids = [number, number + 100]
            stream.put(number, [Submission(prompt=prompt_of(3), config=SDAR, request_id=one) for one in ids])
            assert stream.holds and not stream.wants
            stream.cancel(7)
            assert stream.holds
            stream.cancel(number)
            assert stream.wants and not session.live
        assert [outcome.number for outcome in stream.advance()] == [0, 1]


def test_entries_are_taken_as_they_are_needed_and_none_runs_ahead_of_the_oldest(family: Family) -> None:
    taken = 0

    def source() -> Iterator[tuple[int, list[Submission]]]:
        nonlocal taken
        for number in range(20):
            taken += 1
            config = GenerationConfig(
                gen_length=64 if number == 3 else 8, threshold=1.0 if number == 3 else 0.1, stop_at_eos=False
            )
            yield number, [Submission(prompt=prompt_of(3), config=config, request_id=number)]

    for ordered in (True, False):
        taken, done = 0, list[int]()
        with Session(family.model) as session:
            for outcome in Stream(session, most_live=2, most_ahead=5).run(source(), ordered=ordered):
                oldest = min(set(range(20)) - {*done})
                assert outcome.number < oldest + 5 and taken <= oldest + 5 + 1
                done.append(outcome.number)
        assert sorted(done) == [*range(20)] and (done == sorted(done)) == ordered


def test_who_has_nothing_to_submit_waits_for_nobody(family: Family) -> None:
    """Its outcome is known, however far it is ahead of the oldest; who comes after it is served."""
    entries = [
        (0, [Submission(prompt=prompt_of(9), config=SDAR)]),
        (1, []),
        (2, [Submission(prompt=prompt_of(3), config=SDAR)]),
    ]
    with Session(family.model) as session:
        found = [*Stream(session, most_ahead=1).run(entries, ordered=False)]
    assert [(outcome.number, len(outcome.generations)) for outcome in found] == [(1, 0), (0, 1), (2, 1)]


def test_an_error_of_the_source_comes_after_the_answers_and_an_early_end_cancels(family: Family) -> None:
    def source() -> Iterator[tuple[int, list[Submission]]]:
        yield 0, []
        for number, length in ((1, 8), (5, 40)):
            yield number, [Submission(prompt=prompt_of(3), config=replace(SDAR, gen_length=length))]
        raise OSError("the disk is gone")

    with Session(family.model) as session:
        answered = list[Outcome]()
        with pytest.raises(OSError, match="the disk is gone"):
            answered.extend(Stream(session).run(source()))
        outcomes = Stream(session).run(source())
        assert next(outcomes) == Outcome(number=0) and len(next(outcomes).generations) == 1 and session.live
        outcomes.close()  # type: ignore[attr-defined]
        assert not session.live
    with pytest.raises(UsageError, match="most_live: expected a number, at least 1, got 0"):
        Stream(session, most_live=0)
