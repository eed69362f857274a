"""Sessions whose requests are rows of a table: each gets what a generator on the host, alone, gets.

Random requests come and go in two sessions of one model, some of them generators beside those of the table. The generator's way
is the reference: it shares the steps' kernels with the table's, and nothing of who is served when or how a request goes on.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from own_algorithms import as_generator
from test_session_interrupts import Striking, Struck, handled
from test_session_turns import Shown, ShownAsDraft
from torch import Tensor

import mosaic
from mosaic.decoding import (
    Algorithm,
    GenerationConfig,
    LiveRequest,
    Session,
    Step,
    Submission,
    block_diffusion,
    fast_dllm_v2,
)
from mosaic.decoding.config import ALGORITHMS
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models import load
from mosaic.models.step import StepSize
from mosaic.planner import Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import KIB

MASK = 63
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 64, "mask_token_id": MASK, "eos_token_id": 5, "torch_dtype": "float32",
    "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "sdar": {**_SIZES, "model_type": "sdar", "block_size": 4},
    "llada2": {
        **_SIZES, "model_type": "llada2_moe", "block_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "num_shared_experts": 1, "first_k_dense_replace": 0,
    },
    "llada": {
        "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64,
        "mask_token_id": MASK, "eos_token_id": 5, "torch_dtype": "float32", "max_sequence_length": 8192,
    },
    "fast-dllm-v2": {**_SIZES, "model_type": "Fast_dLLM_Qwen", "bd_size": 8},
    "dream": {**_SIZES, "model_type": "Dream"},
}  # fmt: skip
USERS_OWN: Any = Algorithm(
    name="mine", decode=block_diffusion.decode, shapes=block_diffusion.shapes, traits=ALGORITHMS["llada2"]
)
OWN_V2: Any = Algorithm(
    name="mine", decode=fast_dllm_v2.decode, shapes=fast_dllm_v2.shapes, traits=ALGORITHMS["fast-dllm-v2"]
)


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    """One model of each family for all tests, which reads no row that nobody has written; none may keep any."""
    made = {name: mosaic.compile(config, seed=3, host_budget=0, debug="poison") for name, config in CONFIGS.items()}
    yield made
    for model in made.values():
        assert model.state_rows == {}
        model.trim()
        assert not any(size for pool, size in model.workspace.committed_bytes().items() if pool.startswith("state/"))
        model.close()
        assert not any(model.workspace.committed_bytes().values())


@contextmanager
def no_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every request inside the block is a generator."""
    with monkeypatch.context() as patch:
        patch.setattr("mosaic.decoding.described.table_row", lambda *_: None)
        yield


def prompt_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(6, MASK, (length,), generator=torch.Generator().manual_seed(seed + 100 * length))


def drawn(rng: random.Random, family: str, longest: int) -> dict[str, Any]:
    """Random options, some of which only generators take."""
    config: dict[str, Any] = {
        "gen_length": round(longest ** rng.random()), "seed": rng.randrange(5), "stop_at_eos": rng.random() < 0.6,
        "temperature": rng.choice([0, 0, 0.7, 1.0, 1.3]),
    }  # fmt: skip
    if family == "fast-dllm-v2":
        ways = rng.choice([{}, {"cache": "dual"}, {"cache": "dual"}, {"algorithm": OWN_V2, "block_length": 8}])
        return config | ways | {
            "small_block_length": rng.choice([2, 4, 8]),
            "threshold": rng.choice([0.02, 0.03, 0.5]), "top_p": rng.choice([None, 0.8]),
        }  # fmt: skip
    if family == "dream" and rng.random() < 0.4:
        return config | {
            "steps": rng.choice([1, 3, 8, 40]), "alg": rng.choice(["origin", "maskgit_plus", "topk_margin", "entropy"]),
            "alg_temp": rng.choice([None, None, 0.4]), "top_p": rng.choice([None, 0.8]),
        }  # fmt: skip
    if family in ("llada", "dream"):
        block = config["block_length"] = rng.choice([4, 8])
        config["gen_length"] = -(-config["gen_length"] // block) * block
        config["cache"] = rng.choice(["dual", "prefix", "dual", "prefix", None])
        if rng.random() < 0.5:
            rule = {"factor": 1.5} if rng.random() < 0.2 else {"threshold": rng.choice([0.02, 0.03, 0.5])}
            config |= {"algorithm": "fast-dllm", **rule}
        else:
            config |= {"algorithm": "llada", "steps": config["gen_length"] // block * rng.choice([1, 2, block])}
            config["remasking"] = rng.choice(["low_confidence", "random"])
        if family == "dream" and config["algorithm"] == "fast-dllm":
            config["top_p"] = rng.choice([None, 0.8])
        return config
    if family == "llada2" and rng.random() < 0.4:
        return config | {
            "algorithm": "llada2.1", "threshold": rng.choice([0.02, 0.03, 0.2]), "top_k": rng.choice([None, 5]),
            "edit_threshold": rng.choice([0.015, 0.03, 0.9]), "max_post_steps": rng.choice([0, 1, 4]),
        }  # fmt: skip
    if family == "sdar":
        config["remasking"] = rng.choice(["low_confidence_static", "low_confidence_dynamic", "sequential"])
    config["steps"] = rng.randint(1, 4)
    if config.get("remasking", "low_confidence_dynamic") == "low_confidence_dynamic":
        config["threshold"] = rng.choice([0.02, 0.03, 0.2])
    if rng.random() < 0.3:
        config |= rng.choice([{"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.9, "top_k": 9}])
    if rng.random() < 0.25:
        ways: list[dict[str, Any]] = [
            {"block_cache": "dc"},
            {"algorithm": USERS_OWN},
        ]
        config |= rng.choice(ways)
        config.pop("remasking", None)
    return config


class Asked(NamedTuple):
    """A request: its prompt, its options, and the number that it draws by."""

    prompt: Tensor
    config: GenerationConfig
    number: int


class Got(NamedTuple):
    """What it got: the answer, how it ended, and what each step that decided did."""

    tokens: list[int]
    confidence: Tensor
    finish: str
    steps: list[tuple[int, int, list[int], list[int]]]


def decided(steps: Sequence[Step]) -> list[tuple[int, int, list[int], list[int]]]:
    """Block, masks left, positions and tokens of the steps that decided; prompts may be cut into any chunks."""
    return [
        (step.block, step.masked, step.positions.tolist(), step.token_ids.tolist())
        for step in steps
        if len(step.positions)
    ]


class Caller:
    """Submits requests, keeps what they are told, and compares it with what they get alone."""

    def __init__(self, model: CompiledModel, asked: Sequence[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.asked, self._patch = model, asked, monkeypatch
        self.requests: dict[int, LiveRequest] = {}
        self.cancelled = set[int]()
        self.shown: dict[int, Shown] = {}
        self.told: dict[int, list[Step]] = {}
        self.given: dict[int, list[Step]] = {}
        self.alone = cache(self._alone)

    def submission(self, place: int, **more: Any) -> Submission:
        one = self.asked[place]
        return Submission(prompt=one.prompt, config=one.config, request_id=one.number, **more)

    def submit(self, session: Session, place: int, rng: random.Random) -> None:
        """With a streamer or a callback, which may cancel this request or another one."""
        more: dict[str, Any] = {"priority": place % 3 * 4}
        if rng.random() < 0.3:
            more["streamer"] = self.shown[place] = rng.choice([Shown, ShownAsDraft])()
        if rng.random() < 0.3:
            told, ends = self.told.setdefault(place, []), rng.randrange(1, 40)

            def tell(step: Step) -> None:
                told.append(step)
                assert self.requests[place].steps == step.step
                if len(told) == ends:
                    self.cancel(session, rng.choice(session.live or [self.requests[place]]))

            more["on_step"] = tell
        (self.requests[place],) = session.submit_all([self.submission(place, **more)])

    def cancel(self, session: Session, request: LiveRequest) -> None:
        """Cancel a request, unless a third of all have been: the others run to their ends, however many steps that takes."""
        place = next(place for place, one in self.requests.items() if one is request)
        if request.generation is None:
            if len(self.cancelled) == len(self.asked) // 3:
                return
            self.cancelled.add(place)
        session.cancel(request)

    def _alone(self, place: int) -> Got:
        steps: list[Step] = []
        one = self.asked[place]
        with no_table(self._patch):
            (found,) = self.model.generate([one.prompt], one.config, request_ids=[one.number], on_step=steps.append)
        return Got(found.token_ids.tolist(), found.confidence, found.finish, decided(steps))

    def check(self, place: int) -> None:
        expected, found = self.alone(place), self.requests[place].generation
        assert found is not None
        tokens, count = found.token_ids.tolist(), len(found.token_ids)
        if place in self.cancelled:
            assert found.finish == "cancelled" and tokens == expected.tokens[:count]
        else:
            assert (tokens, found.finish) == (expected.tokens, expected.finish), self.asked[place]
        torch.testing.assert_close(found.confidence, expected.confidence[:count], rtol=1e-6, atol=1e-6)
        for steps in (self.told.get(place), self.given[place]):
            if steps is not None:
                mine = decided(steps)
                assert mine == (expected.steps[: len(mine)] if place in self.cancelled else expected.steps)
                assert [step.step for step in steps] == [*range(1, len(steps) + 1)]
        assert self.requests[place].steps == len(self.given[place])
        if (shown := self.shown.get(place)) is not None:
            prompt, *parts = shown.put_
            assert prompt == self.asked[place].prompt.tolist() and shown.ended == 1
            assert [token for part in parts for token in part] == tokens


def come_and_go(caller: Caller, rng: random.Random, most: int, **options: Any) -> tuple[int, int]:
    """Submit all requests to two sessions, a few at a time, and advance these to their ends; return how many steps both took, and
    how many of them served several."""
    waiting, steps, shared = [*range(len(caller.asked))], 0, 0
    limit = random.Random(len(caller.asked[0].prompt)).choice([64, 256, 8192])
    model = caller.model
    with model.session(max_num_batched_tokens=limit, **options) as one, model.session(**options) as other:
        numbers: dict[tuple[int, int], int] = {}
        while waiting or one.live or other.live:
            at, session = rng.choice([(0, one), (1, other)])
            while waiting and len(session.live) < most and rng.random() < 0.5:
                place = waiting.pop(0)
                caller.submit(session, place, rng)
                numbers[at, caller.requests[place].number] = place
                caller.given[place] = []
            if session.live and rng.random() < 0.02:
                caller.cancel(session, rng.choice(session.live))
            served = session.advance()
            for step in served:
                caller.given[numbers[at, step.request]].append(step)
            steps, shared = steps + (len(served) > 0), shared + (len(served) > 1)
            assert steps < 5_000 * len(caller.asked)
    return steps, shared


def asked_at_random(rng: random.Random, family: str, count: int, longest: int) -> list[Asked]:
    found = []
    for number in range(count):
        config = GenerationConfig(**drawn(rng, family, longest // 2))
        found.append(Asked(prompt_of(round((longest // 2) ** rng.random()), number), config, number))
    return found


SOAKED = [
    pytest.param(family, seed, 40, 256 if seed % 4 else 4096, marks=pytest.mark.soak)
    for family in CONFIGS
    for seed in range(1, 18)
]


@pytest.mark.some
@pytest.mark.parametrize(("family", "seed", "count", "longest"), [*((family, 0, 6, 48) for family in CONFIGS), *SOAKED])
def test_random_requests_get_what_they_get_alone(
    models: dict[str, CompiledModel], family: str, seed: int, count: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{family} {seed}")
    caller = Caller(models[family], asked_at_random(rng, family, count, longest), monkeypatch)
    steps, shared = come_and_go(caller, rng, most=6)
    for place in range(count):
        caller.check(place)
    assert shared >= steps // 8
    assert models[family].state_rows == {}


@pytest.mark.soak
@pytest.mark.parametrize("edit_threshold", [0.015, 0.1])
def test_blocks_that_are_edited_end_where_the_mask_is_the_surest_token(
    edit_threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens decided as the mask look open to the next step, and edits go round in circles."""
    options: dict[str, Any] = {"algorithm": "llada2.1", "gen_length": 31, "threshold": 0.9, "stop_at_eos": False}
    config = GenerationConfig(edit_threshold=edit_threshold, **options)
    with mosaic.compile(CONFIGS["llada2"], seed=3, host_budget=0) as model:
        usual = model.generate([prompt_of(9)], config)[0].token_ids.tolist()
    mask = max(set(usual), key=usual.count)
    with mosaic.compile({**CONFIGS["llada2"], "mask_token_id": mask}, seed=3, host_budget=0) as model:
        prompts = [torch.where(prompt_of(length) == mask, mask - 1, prompt_of(length)) for length in (9, 3, 17)]
        caller = Caller(model, [Asked(prompt, config, place) for place, prompt in enumerate(prompts)], monkeypatch)
        with model.session() as session:
            start(caller, session, 0, 1, 2)
            finish(session)
        check_tokens(caller, 0, 1, 2)


# --- rows that come and go --------------------------------------------------------------------------------------------

WAY: dict[str, Any] = {"gen_length": 12, "stop_at_eos": False, "seed": 3, "temperature": 1.0}


def asked_for(lengths: Sequence[int]) -> list[Asked]:
    return [Asked(prompt_of(length, number), GenerationConfig(**WAY), number) for number, length in enumerate(lengths)]


def finish(session: Session) -> None:
    while session.live:
        session.advance()


def check_tokens(caller: Caller, *places: int) -> None:
    for place in places:
        found = caller.requests[place].generation
        assert found is not None and (found.token_ids.tolist(), found.finish) == caller.alone(place)[:3:2]


def start(caller: Caller, session: Session, *places: int) -> None:
    caller.requests |= dict(
        zip(places, session.submit_all([caller.submission(place) for place in places]), strict=True)
    )


@pytest.mark.parametrize("lengths", [(9, 9, 5), (3000, 9, 5)])
def test_a_request_that_is_cancelled_before_any_step_writes_over_nobody(
    models: dict[str, CompiledModel], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows of the canvas are another session's by then, or nobody's any more."""
    caller = Caller(models["sdar"], asked_for(lengths), monkeypatch)
    with caller.model.session() as one, caller.model.session() as other:
        start(caller, one, 0)
        one.cancel(caller.requests[0])
        start(caller, other, 1)
        other.advance(2)
        start(caller, one, 2)
        finish(one)
        finish(other)
    check_tokens(caller, 1, 2)


class Cancels(Shown):
    """A streamer that cancels requests once, as it is given the prompt."""

    def __init__(self, session: Session, gone: Sequence[LiveRequest] = ()) -> None:
        super().__init__()
        self._session, self._gone = session, gone

    def put(self, value: Tensor) -> None:
        super().put(value)
        for request in self._gone or self._session.live:
            self._session.cancel(request)


@pytest.mark.parametrize("tabled", [True, False])
def test_a_streamer_that_cancels_requests_at_their_prompt_is_told_their_end(
    models: dict[str, CompiledModel], tabled: bool
) -> None:
    """Its own, and another that is submitted beside it, whose streamer has not been given anything."""
    config = GenerationConfig(**WAY)
    config = config if tabled else as_generator(config, models["sdar"].architecture)
    with models["sdar"].session() as session:
        shown = [Cancels(session), Shown()]
        asked = [Submission(prompt=prompt_of(5), config=config, streamer=streamer) for streamer in shown]
        requests = session.submit_all(asked)
        assert session.live == () and session.advance() == []
        assert [one.generation.finish for one in requests if one.generation is not None] == ["cancelled"] * 2
        assert [len(streamer.put_) for streamer in shown] == [1, 0] and [one.ended for one in shown] == [1, 1]


def test_a_streamer_that_makes_holes_as_others_begin_scatters_no_keys(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's keys lie in one extent more than there were holes when it was admitted, at most."""
    caller = Caller(models["sdar"], asked_for([5, 5, 5, 5, 5, 5, 5, 60, 9]), monkeypatch)
    with caller.model.session() as session:
        start(caller, session, *range(6))
        session.advance(3)
        gone = [caller.requests[place] for place in (1, 3)]
        asked = [caller.submission(6, streamer=Cancels(session, gone)), caller.submission(7), caller.submission(8)]
        caller.requests |= dict(zip((6, 7, 8), session.submit_all(asked), strict=True))
        finish(session)
    check_tokens(caller, 0, 2, 4, 5, 6, 7, 8)


def test_a_live_request_says_how_many_steps_it_has_had(models: dict[str, CompiledModel]) -> None:
    with models["sdar"].session() as session:
        request = session.submit(prompt_of(9), **WAY)
        for count in range(4):
            assert request.steps == count
            session.advance()
        session.cancel(request)
        assert request.steps == 4 and request.generation is not None and request.generation.steps == 4


@pytest.mark.parametrize("rows", [1, 3])
def test_requests_wait_for_a_row_of_the_table(
    models: dict[str, CompiledModel], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order; some are cancelled while they wait, and rows are used again."""
    for most in ("ROWS", "MOST_ROWS"):
        monkeypatch.setattr(f"mosaic.runtime.request_table.{most}", rows)
    caller = Caller(models["sdar"], asked_for([3, 9, 5, 12, 7, 4, 8]), monkeypatch)
    ended: list[int] = []
    with caller.model.session() as session:
        start(caller, session, *range(7))
        gone = caller.requests[5]
        session.cancel(gone)
        assert gone.generation is not None and (gone.steps, gone.generation.token_ids.tolist()) == (0, [])
        while session.live:
            served = {step.request for step in session.advance()}
            assert len(served) <= rows and caller.model.state_rows.get("requests", rows) == rows
            ended += [place for place, one in caller.requests.items() if one.generation and place not in ended]
    check_tokens(caller, 0, 1, 2, 3, 4, 6)
    assert rows > 1 or ended == [5, 0, 1, 2, 3, 4, 6]


def test_a_table_doubles_for_those_who_wait(models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """While others are in the middle of their blocks, and again; nobody waits then."""
    monkeypatch.setattr("mosaic.runtime.request_table.ROWS", 2)
    caller = Caller(models["sdar"], asked_for([3, 9, 5, 12, 7, 4, 8]), monkeypatch)
    with caller.model.session() as session:
        start(caller, session, 0, 1)
        session.advance(3)
        for places, rows in (((2,), 4), ((3, 4, 5, 6), 8)):
            start(caller, session, *places)
            served = {step.request for step in session.advance()}
            assert caller.model.state_rows["requests"] == rows and len(served) == len(session.live)
            session.advance()  # or who has not begun would wait for the prompts of the next ones
        while session.live:
            session.advance()
    check_tokens(caller, *range(7))


def test_prompts_come_in_chunks_that_a_step_has_room_for(models: dict[str, CompiledModel]) -> None:
    """A long prompt beside a request that decides: steps have 16 tokens, and the other one waits for one step at most."""
    model = models["sdar"]
    prompt, way = torch.arange(200) % 50, {"gen_length": 8, "stop_at_eos": False}
    expected = model.generate([prompt[:5], prompt], **way)
    with model.session(max_num_batched_tokens=16) as session:
        first = session.submit(prompt[:5], **(way | {"gen_length": 200}))
        session.advance()
        second, served = session.submit(prompt, **way), list[set[int]]()
        while second.generation is None:
            steps = [*session.advance()]
            assert all(step.plan.dims["tokens"] <= 16 for step in steps)
            served.append({step.request for step in steps})
            assert first.generation is not None or first.number in set.union(*served[-2:])
        assert sum(len(both) == 2 for both in served) > 10 and torch.equal(
            second.generation.token_ids, expected[1].token_ids
        )


def test_a_table_does_not_grow_into_the_room_of_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests as there is room for, half of them generators of another session, beside a table with too few rows."""
    monkeypatch.setattr("mosaic.runtime.request_table.ROWS", 4)
    one_step = StepSize(windows=(8,), rows=4)
    least = Planner(load(CONFIGS["sdar"]), device="cpu", host_budget=0).needed(one_step)
    config = GenerationConfig(gen_length=4, stop_at_eos=False)
    with (
        mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0, budget=least + 500 * KIB) as model,
        model.session() as tabled,
        model.session() as generators,
    ):
        ways = cycle([(tabled, config), (generators, replace(config, algorithm=USERS_OWN))])
        for session, way in ways:
            asked = Submission(prompt=prompt_of(80), config=way)
            if not session.admits(asked):
                break
            session.submit_all([asked])
        assert len(generators.live) > 15
        for _ in range(4):
            tabled.advance()
            generators.advance()


@pytest.mark.parametrize(("options", "message"), [
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: expected a number of tokens, at least 1, got 0"),
    ({"max_num_batched_tokens": "8k"}, "max_num_batched_tokens: .* got '8k'"),
    ({"max_delay_ms": -1.0}, "max_delay_ms: expected milliseconds, at least 0, got -1.0"),
    ({"max_delay_ms": float("nan")}, "max_delay_ms: .* got nan"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(
    models: dict[str, CompiledModel], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        models["sdar"].session(**options)


def test_a_table_grows_beside_anothers(models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows move behind the other's, before it has sent any of them; a third one comes where they were."""
    monkeypatch.setattr("mosaic.runtime.request_table.ROWS", 2)
    caller = Caller(models["sdar"], asked_for([3, 9, 5, 12, 7, 4, 8, 3]), monkeypatch)
    with caller.model.session() as one, caller.model.session() as other, caller.model.session() as third:
        start(caller, one, 0, 1)
        start(caller, other, 2)
        start(caller, one, 3, 4, 5)
        start(caller, third, 6)
        third.advance()
        one.advance()
        assert caller.model.state_rows["requests"] == 14
        start(caller, third, 7)
        for session in (third, other, one):
            finish(session)
    check_tokens(caller, *range(8))


@pytest.mark.parametrize("length", [3, 60])
def test_whoever_comes_later_goes_before_nobody_who_waits(
    models: dict[str, CompiledModel], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have room for two blocks, and two requests of one step each come every time, into rows before that of one who waits."""
    monkeypatch.setattr("mosaic.decoding.scheduler.MOST_TOKENS", 8)
    caller = Caller(models["sdar"], asked_for([3, 3, length]), monkeypatch)
    with caller.model.session() as session:
        start(caller, session, 0, 1, 2)
        session.cancel(caller.requests[0])
        session.cancel(caller.requests[1])
        for _ in range(16):
            for _ in range(2):
                session.submit(prompt_of(1), gen_length=3, steps=1)
            session.advance()
        assert caller.requests[2].steps > 3
        finish(session)
    check_tokens(caller, 2)


# --- admission --------------------------------------------------------------------------------------------------------


ADMITTED = [
    pytest.param(family, seed, marks=pytest.mark.soak)
    for family in ("llada", "sdar")
    for seed in range(1, 20)
    if (family, seed) != ("llada", 11)
]


@pytest.mark.some
@pytest.mark.parametrize(("family", "seed"), [("llada", 0), ("sdar", 0), ("llada", 11), *ADMITTED])
def test_what_is_admitted_never_fails_and_what_is_refused_changes_nothing(family: str, seed: int) -> None:
    """In a budget for a few requests, of which each gets what it gets in a budget without limit."""
    rng, options = random.Random(f"{family} {seed}"), {"gen_length": 16, "stop_at_eos": False}
    if family == "llada":
        options |= {"block_length": 8, "steps": 4, "cache": rng.choice(["dual", "prefix", None])}
    asked = [
        Submission(prompt=prompt_of(length), config=GenerationConfig(**options), request_id=0)
        for length in (3, 17, 60, 130, 200)
    ]
    alone: dict[int, list[int]] = {}
    with mosaic.compile(CONFIGS[family], seed=3, host_budget=0) as model:
        for one in asked:
            (found,) = model.generate([one.prompt], one.config)
            alone[len(one.prompt)] = found.token_ids.tolist()
        with model.session() as session:
            most, told = 0, session.submit_all([asked[rng.choice([2, 4])]])
            while any(request.generation is None for request in told):
                most = max(most, *(step.peak_bytes for step in session.advance()))
    budget = most + 4096 * rng.choice([0, 1, 3])
    admitted, refused = list[LiveRequest](), 0
    with mosaic.compile(CONFIGS[family], seed=3, host_budget=0, budget=budget) as model, model.session() as session:
        for _ in range(5 if seed == 0 else 20):  # prompts come in chunks where memory is short
            for one in rng.choices(asked, k=4):
                before = session.live, model.state_rows, model.memory().committed
                if session.admits(one):
                    admitted += session.submit_all([one])
                    continue
                refused += 1
                with pytest.raises(DoesNotFit):
                    session.submit_all([one])
                assert (session.live, model.state_rows, model.memory().committed) == before
            session.advance(rng.randrange(1, 6))
            assert sum(model.memory().committed.values()) <= budget
        finish(session)
    for request in admitted:
        assert request.generation is not None
        assert request.generation.token_ids.tolist() == alone[len(request.generation.prompt_ids)]
    keeps = options.get("cache", "") is not None
    assert len(admitted) > 2 and (refused > 2 or not keeps)


def test_a_request_that_another_sessions_step_has_no_room_beside_is_refused() -> None:
    """This session is idle, and its own steps would fit; nobody knows how long the other one takes."""
    large = Submission(prompt=prompt_of(900), config=GenerationConfig(gen_length=8, steps=4, cfg_scale=1.0))
    small: dict[str, Any] = {"gen_length": 8, "block_length": 8, "cache": "dual"}
    with (
        mosaic.compile(CONFIGS["llada"], seed=3, host_budget=0, budget=1600 * KIB) as model,
        model.session() as session,
        pytest.raises(DoesNotFit) as refused,
    ):
        session.submit_all([large])
    enough = refused.value.needed_bytes
    assert enough is not None
    with (
        mosaic.compile(CONFIGS["llada"], seed=3, host_budget=0, budget=enough) as model,
        model.session() as one,
        model.session() as other,
    ):
        other.submit(prompt_of(9), **small)
        finish(other)
        one.submit_all([large])
        with pytest.raises(DoesNotFit) as refused:
            other.submit(prompt_of(9), **small)
    assert refused.value.steps is None and not refused.value.never


# --- signals ----------------------------------------------------------------------------------------------------------


def interrupted(caller: Caller, at: int, file: str) -> int:
    """Requests that come, go on and are cancelled, with a signal at one event of the library, or of one file of it, whose number
    is returned; 0: no signal."""
    caller.requests.clear()
    with caller.model.session() as one, caller.model.session() as other:

        def run() -> None:
            for session, places in ((one, (0, 1, 2)), (other, (3,)), (one, (4,))):
                start(caller, session, *places)
                session.advance(3)
            one.cancel(caller.requests[1])
            start(caller, other, 5)
            other.advance(2)
            one.advance(2)

        with handled(signal.SIGINT), suppress(Struck), Striking(signal.SIGINT, at, file) as strikes:
            run()
        for session, places in ((one, (0, 2, 4)), (other, (3, 5))):
            missing = [place for place in places if place not in caller.requests]
            if missing:  # whoever is interrupted gets no request, and none is left
                start(caller, session, *missing)
            for _ in range(400):
                if session.live:
                    session.advance()
            assert not session.live
        check_tokens(caller, 0, 2, 3, 4, 5)
    assert caller.model.state_rows == {}
    return strikes.seen


STRUCK = [
    pytest.param(family, 100, file, marks=pytest.mark.soak)
    for family in CONFIGS
    for file in ("", "request_table.py", "scheduler.py", "tabled.py", "advance_requests.py")
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as generators are dropped
@pytest.mark.parametrize(("family", "strikes", "file"), [("sdar", 3, "request_table.py"), *STRUCK])
def test_a_signal_anywhere_leaves_all_requests_their_tokens(
    models: dict[str, CompiledModel], family: str, strikes: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several requests, some of them generators: what a step did that was struck in its midst is done again, once."""
    rng, options = random.Random(file), {**WAY, "gen_length": 8}
    if family == "llada":
        options |= {"algorithm": "fast-dllm", "block_length": 4, "cache": "dual"}
    config = GenerationConfig(**options)
    own = as_generator(config, models[family].architecture)
    asked = [
        Asked(prompt_of(length, place), own if place % 3 == 2 else config, place)
        for place, length in enumerate([9, 5, 3, 12, 1, 7])
    ]
    caller = Caller(models[family], asked, monkeypatch)
    events = interrupted(caller, 0, file)
    for _ in range(strikes):
        interrupted(caller, rng.randrange(1, events), file)
    assert events > 20
