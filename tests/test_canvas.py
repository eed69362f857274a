"""A request's canvas against lists of tokens kept by hand: what is decided, what is final, and what a step is asked for."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mosaic import models
from mosaic.decoding.canvas import COMMIT, Canvas, Decision, Sampling, cached_shape, whole_blocks
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.noise import row_keys
from mosaic.errors import UsageError
from mosaic.models.parts import KEPT, KV, NO_HEAD, NUCLEUS, SAMPLE, STATISTICS
from mosaic.models.parts import Commit as Rule
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.steps import StepResult

MASK, EOS = 99, (7, 11)
SEEDS = range(120)


class Rows:
    """The cache of one request: what was asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.length = 0

    def reserve(self, count: int) -> None:
        self.asked.append(count)

    def close(self) -> None:
        self.asked.append("close")


def canvas_of(
    prompt: list[int], *, extra: int = 0, demand: dict[State, int] | None = None, opened: Any = None, **options: Any
) -> Canvas:
    """A canvas; rows that it opens are kept in `opened` by their state."""

    def open_state(state: State) -> Rows:
        assert state not in opened
        opened[state] = Rows()
        found: Rows = opened[state]
        return found

    config = GenerationConfig(**options)
    architecture: Any = SimpleNamespace(mask_token_id=MASK, eos_token_ids=EOS)
    length = len(prompt) + config.gen_length + extra
    ids = torch.tensor(prompt, dtype=torch.int64)
    return Canvas(
        prompt=ids, config=config, architecture=architecture, request=5, length=length,
        demand=demand or {}, open_state=open_state,
    )  # fmt: skip


def result_of(committed: list[bool], chosen: list[int], score: list[float]) -> StepResult:
    plan: Any = None
    return StepResult(
        token=torch.tensor(chosen, dtype=torch.int64), score=torch.tensor(score, dtype=torch.float32),
        committed=torch.tensor(committed, dtype=torch.bool), chosen=torch.tensor(chosen, dtype=torch.int64), plan=plan, seconds=0.0,
    )  # fmt: skip


def drawn_canvas(draw: random.Random) -> Canvas:
    prompt = [draw.randrange(20) for _ in range(draw.randrange(1, 6))]
    return canvas_of(prompt, extra=draw.randrange(4), gen_length=draw.randrange(1, 9), stop_at_eos=draw.random() < 0.7)


def test_what_steps_decide_is_kept_and_what_is_final_is_said() -> None:
    ended = 0
    for seed in SEEDS:
        draw = random.Random(seed)
        canvas = drawn_canvas(draw)
        prompt, n = canvas.prompt.tolist(), canvas.length
        p, gen = len(prompt), canvas.config.gen_length
        tokens, masked = [*prompt, *[MASK] * (n - p)], [at >= p for at in range(n)]
        scores = [1.0] * p + [0.0] * (n - p)
        assert (canvas.prompt_len, canvas.end) == (p, p + gen) and canvas.last is None
        assert (canvas.step, canvas.block, canvas.settled) == (0, 0, None)
        assert canvas.tokens.dtype == torch.int64 and canvas.masked.dtype == torch.bool
        for step in range(8):
            at = sorted(draw.sample(range(p, n), draw.randrange(n - p + 1)))
            committed = [draw.random() < 0.6 for _ in at]
            chosen = [
                draw.choice((3, 4, 7, 11, MASK)) if taken else tokens[a] for a, taken in zip(at, committed, strict=True)
            ]
            score = [draw.randrange(1, 64) / 64 for _ in at]
            canvas.take(torch.tensor(at, dtype=torch.int64), result_of(committed, chosen, score))
            taken = [(a, c, s) for a, c, s, yes in zip(at, chosen, score, committed, strict=True) if yes]
            for a, c, s in taken:
                tokens[a], masked[a], scores[a] = c, False, s
            assert canvas.tokens.tolist() == tokens and canvas.masked.tolist() == masked
            assert canvas.confidence.tolist() == scores and canvas.step == step + 1
            last = canvas.last
            assert last is not None
            assert [
                *zip(last.positions.tolist(), last.token_ids.tolist(), last.confidence.tolist(), strict=True)
            ] == taken
            canvas.settled = settled = draw.choice((None, draw.randrange(n + 1)))
            start = draw.randrange(n)
            end = draw.randrange(start, n + 1)
            assert canvas.open_rows(start, end).tolist() == [a for a in range(start, end) if masked[a]]
            final = p
            while final < p + gen and not masked[final] and (settled is None or final < settled):
                final += 1
            ends = [a for a in range(p, final) if tokens[a] in EOS] if canvas.config.stop_at_eos else []
            assert (canvas.final, canvas.eos) == (final, ends[0] if ends else None)
            assert canvas.finished == (final == p + gen or len(ends) > 0)
            ended += canvas.finished
    assert ended > 100


def test_a_model_without_an_end_goes_on_to_the_last_token() -> None:
    canvas = canvas_of([1], gen_length=2)
    canvas.architecture = SimpleNamespace(mask_token_id=MASK, eos_token_ids=())  # type: ignore[assignment]
    canvas.take(torch.tensor([1]), result_of([True], [7], [0.5]))
    assert canvas.eos is None and not canvas.finished


def test_the_head_computes_no_more_than_is_needed() -> None:
    grid = product((0.0, 0.5, 1.0, 1.7), (None, 0.5, 1.0), (None, 0, 3), (False, True), (False, True))
    for temperature, top_p, top_k, scaled, cuts_greedy in grid:
        config = GenerationConfig(temperature=temperature, top_p=top_p, top_k=top_k)
        greedy = temperature == 0
        uncut = top_p in (None, 1.0) and top_k in (None, 0)
        if uncut or (greedy and not cuts_greedy):
            whole = Sampling(head=SAMPLE, temperature=temperature, top_p=1.0, top_k=0)
            if greedy:
                whole = Sampling(head=STATISTICS, temperature=0.0, top_p=1.0, top_k=0)
            elif scaled and temperature != 1:  # the probability at the temperature takes a pass of its own
                whole = replace(whole, head=NUCLEUS)
        else:
            whole = Sampling(head=NUCLEUS, temperature=temperature, top_p=top_p or 1.0, top_k=top_k or 0)
        assert Sampling.of(config, scaled=scaled, cuts_greedy=cuts_greedy) == whole
    cut = GenerationConfig(top_k=3)
    assert Sampling.of(cut, scaled=True) == Sampling(head=STATISTICS)


RULE = Rule(score="confidence", rule="dynamic")
PHASES = (
    Phase(),
    Phase(commit=RULE),
    Phase(head=SAMPLE, commit=RULE),
    Phase(cache=KEPT, commit=RULE),
    Phase(cache=KEPT, head=NUCLEUS, commit=RULE),
)


def test_a_request_says_what_a_step_needs() -> None:
    sampling = Sampling(head=NUCLEUS, temperature=0.5, top_p=0.9, top_k=3)
    for seed in SEEDS:
        draw, opened = random.Random(seed), dict[State, Rows]()
        canvas = canvas_of([1, 2, 3], extra=2, demand={KV: 13}, opened=opened, gen_length=8, seed=seed)
        canvas.step = draw.randrange(9)
        canvas.tokens[:] = torch.arange(13) * 2
        phase, start = draw.choice(PHASES), draw.randrange(12)
        end = draw.randrange(start + 1, 14)
        at = torch.tensor(sorted(draw.sample(range(start, end), draw.randrange(end - start))), dtype=torch.int64)
        key_len = draw.choice((0, draw.randrange(end, 14)))
        with_sampling = draw.random() < 0.5
        asked = canvas.ask(
            phase, at, window=(start, end), key_len=key_len, sampling=sampling if with_sampling else None, quota=4
        )
        assert asked.phase is phase and (asked.start, asked.quota) == (start, 4)
        assert asked.token_ids.tolist() == [2 * a for a in range(start, end)]
        assert asked.rows.tolist() == [a - start for a in at.tolist()] and asked.current.tolist() == [2 * a for a in at]
        expected = (0.5, 0.9, 3) if with_sampling else (0.0, 1.0, 0)
        assert (asked.temperature, asked.top_p, asked.top_k) == expected
        cached = phase.name != "full_step"
        assert asked.key_len == ((key_len or end) if cached else 0)
        assert asked.sequence is (opened[KV] if cached else None) and not asked.states
        assert [rows.asked for rows in opened.values()] == [[13]] * cached
        if phase.head in (SAMPLE, NUCLEUS):
            assert asked.keys is not None and asked.keys.tolist() == row_keys(seed, 5, canvas.step, at).tolist()
        else:
            assert asked.keys is None
        canvas.tokens[:] = 0  # the window is the request's own
        assert asked.token_ids.tolist() == [2 * a for a in range(start, end)]


def test_filling_the_cache_decides_nothing() -> None:
    opened: dict[State, Rows] = {}
    canvas = canvas_of([4, 5, 6], demand={KV: 5}, opened=opened, gen_length=2)
    asked = canvas.fill(1, 3)
    assert asked.phase == COMMIT == Phase(cache=KEPT, head=NO_HEAD) and asked.token_ids.tolist() == [5, 6]
    assert (asked.start, asked.key_len, asked.rows.tolist()) == (1, 3, []) and asked.rows.dtype == torch.int64
    assert asked.sequence is opened[KV]


def test_rows_of_states_are_taken_at_once_and_given_back_once() -> None:
    opened: dict[State, Rows] = {}
    own = State(name="summary", width=4)
    canvas = canvas_of([1, 2], demand={KV: 8, own: 3}, opened=opened, gen_length=4)
    canvas.close()
    assert not opened
    canvas.reserve()
    canvas.reserve()
    assert {state: rows.asked for state, rows in opened.items()} == {KV: [8], own: [3]}
    assert canvas.rows_of(KV) is opened[KV] and canvas.rows_of(own) is opened[own]
    with pytest.raises(UsageError, match=r"asks for the state 'other', its largest steps have kv, summary:"):
        canvas.rows_of(State(name="other", width=1))
    canvas.close()
    canvas.close()
    assert {state: rows.asked for state, rows in opened.items()} == {KV: [8, "close"], own: [3, "close"]}
    opened.clear()
    assert canvas.rows_of(own) is opened[own] and {state: rows.asked for state, rows in opened.items()} == {
        KV: [8],
        own: [3],
    }
    with pytest.raises(UsageError, match=r"asks for the state 'summary', its largest steps have none:"):
        canvas_of([1], gen_length=1).rows_of(own)


def test_shapes_of_cached_steps() -> None:
    phase = Phase(cache=KEPT, commit=RULE)
    assert cached_shape(phase, 4, 9, 3) == StepSize(phase=phase, windows=(4,), keys=(9,), rows=3)
    assert cached_shape(COMMIT, 1, 1) == StepSize(phase=COMMIT, windows=(1,), keys=(1,), rows=0)
    assert cached_shape(COMMIT, 0, 4) is None
    for block, prompt, gen in product((None, 1, 3, 4), range(7), range(1, 6)):
        config, size = GenerationConfig(block_length=block, gen_length=gen), block or 1
        whole = [at for at in range(0, 30, size) if at <= prompt]
        assert whole_blocks(config, prompt) == (whole[-1], min(at for at in range(0, 30, size) if at >= prompt + gen))


def test_records_are_named_and_stay_as_they_are() -> None:
    canvas = canvas_of([1], gen_length=1)
    one = torch.tensor([1])
    sampling, commit = Sampling(head=SAMPLE), Decision(positions=one, token_ids=one, confidence=one)
    for record in (canvas, sampling, commit):
        assert not hasattr(record, "__dict__")
        with pytest.raises(TypeError, match="positional"):
            type(record)(one)  # type: ignore[arg-type, call-arg]
    with pytest.raises(FrozenInstanceError):
        sampling.top_k = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        commit.positions = one  # type: ignore[misc]


# --- options that are left out ----------------------------------------------------------------------------------------


def test_a_threshold_is_taken_only_where_fast_dllm_has_no_factor() -> None:
    arch = models.load("llada-8b").architecture
    lengths = {"gen_length": 64, "block_length": 32}
    assert resolve(GenerationConfig(algorithm="fast-dllm", **lengths), arch).threshold == 0.9
    assert resolve(GenerationConfig(algorithm="fast-dllm", threshold=0.4, **lengths), arch).threshold == 0.4
    assert resolve(GenerationConfig(algorithm="fast-dllm", factor=1.0, **lengths), arch).threshold is None
    assert resolve(GenerationConfig(algorithm="llada", **lengths), arch).threshold is None


def test_a_checkpoints_own_block_is_the_longest_that_length_and_steps_allow() -> None:
    base = models.load("llada-8b").architecture
    for wanted, length, steps in product((1, 6, 8, 32), (6, 8, 30, 64, 96), (None, 4, 6, 8, 24, 48)):
        allowed = [
            block
            for block in range(1, min(wanted, length) + 1)
            if not length % block and not (steps or length) % (length // block)
        ]
        asked = GenerationConfig(algorithm="llada", gen_length=length, steps=steps)
        found = resolve(asked, replace(base, decode_block=wanted))
        assert found.block_length == max(allowed, default=length), (wanted, length, steps)
