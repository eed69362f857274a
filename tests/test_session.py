"""Sessions: requests come and go, each gets the tokens that it would get alone, and what is admitted always fits."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import dropwhile
from threading import Event, Thread
from typing import Any

import pytest
import torch
from test_decoding import CONFIGS, MASK, prompt_of

import mosaic
from mosaic import decoding, models
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Step, Submission
from mosaic.decoding.algorithms import largest_steps, shared_sizes
from mosaic.decoding.config import resolve
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models.step import most_rows
from mosaic.planner.planner import Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.workspace import Workspace
from mosaic.units import KIB

_EXPERTS: dict[str, Any] = {**CONFIGS["sdar"], "num_experts": 4, "num_experts_per_tok": 2}
del _EXPERTS["block_size"]
FAMILIES: Mapping[str, dict[str, Any]] = {
    **CONFIGS,
    "llada-moe": {**_EXPERTS, "model_type": "lladamoe", "expert_intermediate_size": 24},
    "llada2": {
        **_EXPERTS, "model_type": "llada2_moe", "block_size": 8, "moe_intermediate_size": 24, "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
_BIDIRECTIONAL: list[dict[str, Any]] = [
    {"gen_length": 8, "block_length": 4, "steps": 4},
    {"gen_length": 8, "block_length": 4, "steps": 4, "temperature": 0.6},
    {"gen_length": 8, "block_length": 4, "steps": 4, "cfg_scale": 1.0},
    {"gen_length": 12, "block_length": 4, "algorithm": "fast-dllm", "threshold": 0.4, "cache": "dual"},
    {"gen_length": 8, "block_length": 4, "algorithm": "fast-dllm", "factor": 1.0, "cache": "prefix"},
]
_BY_BLOCKS: list[dict[str, Any]] = [
    {"gen_length": 16, "threshold": 0.3},
    {"gen_length": 16, "algorithm": "llada2.1", "threshold": 0.2, "edit_threshold": 0.1},
]
WAYS: Mapping[str, list[dict[str, Any]]] = {
    "llada": _BIDIRECTIONAL,
    "llada-moe": _BIDIRECTIONAL[1:4:2],
    "dream": [
        {"gen_length": 8, "steps": 4, "alg": "entropy"},
        {"gen_length": 8, "steps": 4, "alg": "maskgit_plus", "temperature": 0.7, "top_p": 0.9},
    ],
    "sdar": [
        *_BY_BLOCKS,
        {**_BY_BLOCKS[0], "temperature": 0.8, "top_p": 0.9},
        {"gen_length": 8, "remasking": "sequential", "temperature": 0.8},
    ],
    "llada2": [*_BY_BLOCKS, {**_BY_BLOCKS[0], "temperature": 0.8}],
    "fast-dllm-v2": [{"gen_length": 16, "threshold": 0.4}, {"gen_length": 16, "threshold": 0.4, "cache": "dual"}],
}
LENGTHS = (3, 9, 22)


class Family:
    """A tiny random model of a family, its requests, and what they get alone.

    Parameters
    ----------
    room
        Requests, the longest of them, that the budget holds at once; it is without limit, if not given.
    spare_bytes
        What the budget has beyond.
    """

    def __init__(self, name: str, *, room: int | None = None, spare_bytes: int = 0, **options: Any) -> None:
        self.submissions = [
            Submission(
                prompt=prompt_of(n), config=GenerationConfig(seed=5, stop_at_eos=False, **way), request_id=number
            )
            for number, (n, way) in enumerate((n, way) for n in LENGTHS for way in WAYS[name])
        ]
        self.budget = None if room is None else needed(name, self.submissions[-room:]) + spare_bytes
        self.model = mosaic.compile(FAMILIES[name], budget=self.budget, host_budget=0, **options)
        generator = torch.Generator().manual_seed(3)
        for tensor, view in self.model.weights().items():
            if not tensor.startswith("="):
                norm = "norm" in tensor or "ln_f" in tensor
                view.normal_(1.0 if norm else 0.0, 0.2 if norm else 3 * view.shape[-1] ** -0.5, generator=generator)
        self.alone = cache(self._alone)

    def _alone(self, kind: int) -> tuple[list[int], list[Step]]:
        asked, steps = self.submissions[kind], list[Step]()
        (found,) = decoding.generate(
            self.model, [asked.prompt], asked.config, request_ids=[asked.request_id], on_step=steps.append
        )
        assert found.steps == len(steps)
        return found.token_ids.tolist(), steps


def beyond_prompt(steps: Sequence[Step]) -> int:
    """How many steps come once the prompt is read, in as many chunks as steps had room for."""
    return len([*dropwhile(lambda step: not len(step.positions), steps)])


def needed(name: str, submissions: Sequence[Submission]) -> int:
    """Bytes of the smallest budget that holds some requests together."""
    planner = Planner(models.load(FAMILIES[name]), device="cpu", host_budget=0)
    arch = planner.model.architecture
    largest = [largest_steps(resolve(s.config, arch), arch, s.prompt.numel(), s.request_id) for s in submissions]
    sizes = shared_sizes(largest)
    return max(planner.needed(size.beside(most_rows(sizes))) for size in sizes)


class Watch:
    """A thread that looks at a model's memory all the time.

    Attributes
    ----------
    most_bytes
        The most that was ever resident, weights included.
    in_steps
        How often it looked while a step ran.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.most_bytes, self.in_steps = workspace, 0, 0
        self._ended, self._running = Event(), False
        self._thread = Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.0005):
            running, changes = self._running, self.workspace.changes()
            resident = sum(self.workspace.resident_bytes().values())
            if self.workspace.changes() == changes:  # else memory went from one pool to another meanwhile
                self.most_bytes = max(self.most_bytes, resident)
                self.in_steps += running and self._running

    @contextmanager
    def step(self) -> Iterator[None]:
        self._running = True
        yield
        self._running = False

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.parametrize("count", [6, pytest.param(84, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sdar" else pytest.mark.soak) for name in WAYS]
)
def test_requests_that_come_and_go_get_what_they_get_alone(name: str, count: int) -> None:
    """Submitted, advanced and cancelled at random, in memory for six of them, which is watched from outside."""
    for_the_table = 16 * KIB if name == "dream" else 0  # keys of others are larger
    family = Family(name, room=6, spare_bytes=for_the_table, debug="poison" if name == "sdar" else None)
    rng, model = random.Random(11), family.model
    kinds: dict[LiveRequest, int] = {}
    cancelled: list[LiveRequest] = []
    most = refused = 0
    given: defaultdict[int, list[Step]] = defaultdict(list)
    with Watch(model.workspace) as watch, Session(model) as session:
        while len(kinds) < count or session.live:
            if len(kinds) < count and rng.random() < 0.7:
                chosen = [rng.randrange(len(family.submissions)) for _ in range(rng.randrange(1, 4))]
                try:
                    new = session.submit_all([family.submissions[kind] for kind in chosen])
                    kinds.update(zip(new, chosen, strict=True))
                except DoesNotFit:
                    refused += 1
            if session.live and rng.random() < 0.05:
                cancelled.append(rng.choice(session.live))
                session.cancel(cancelled[-1])
            with watch.step():
                advanced = session.advance(rng.randrange(1, 4))
            most = max(most, len({step.request for step in advanced}))
            for step in advanced:
                given[step.request].append(step)
        assert not model.state_rows
        model.trim()
        assert not any(size for pool, size in model.workspace.committed_bytes().items() if pool.startswith("state/"))
    assert most > 2 and watch.in_steps > 5
    assert family.budget is not None and watch.most_bytes <= family.budget
    assert refused or count < 20
    for request, kind in kinds.items():
        tokens, steps = family.alone(kind)
        assert request.generation is not None and request.steps == len(given[request.number])
        if request in cancelled:
            assert request.generation.finish == "cancelled"
            assert beyond_prompt(given[request.number]) <= beyond_prompt(steps)
            known = request.generation.token_ids.tolist()
            assert family.submissions[kind].config.algorithm == "llada2.1" or known == tokens[: len(known)]
        else:
            assert request.generation.token_ids.tolist() == tokens
            assert beyond_prompt(given[request.number]) == beyond_prompt(steps)
    model.close()
    assert not any(model.workspace.committed_bytes().values())


def test_a_session_in_its_stride_maps_nothing() -> None:
    """The same requests again and again, some of them always live: once the most has been needed, sizes alternate."""
    family = Family("llada-moe")
    changes, sizes = list[int](), set[int]()
    with Session(family.model) as session:
        for asked in 6 * family.submissions:
            changes.append(family.model.workspace.changes())
            session.submit_all([asked])
            while len(session.live) > 3:
                sizes |= {step.plan.pools["workspace"] for step in session.advance()}
        warm = 4 * len(family.submissions)
        assert changes[0] < changes[warm] == family.model.workspace.changes()
        assert len(sizes) > 4
    family.model.close()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, *range(2, 40)))])
def test_what_is_admitted_always_fits_and_what_is_refused_has_no_plan(seed: int) -> None:
    """Under tight budgets, beside steps of other sizes: whatever fits by plan runs, however much earlier steps needed."""
    rng = random.Random(seed)
    name = rng.choice(["llada", "sdar", "fast-dllm-v2"])
    family = Family(name, room=rng.randrange(1, 3), spare_bytes=4096 * rng.choice((5, 8, 16)))
    model, budget = family.model, family.budget
    assert budget is not None
    admitted, refused = list[LiveRequest](), 0
    with Watch(model.workspace) as watch, Session(model) as session:
        for _ in range(10):
            for asked in rng.sample(family.submissions, 3):
                if session.admits(asked):
                    admitted.append(session.submit_all([asked])[0])
                    continue
                refused += 1
                with pytest.raises(DoesNotFit):  # says what its plans say
                    session.submit_all([asked])
            if rng.random() < 0.3 and session.live:
                session.cancel(rng.choice(session.live))
            session.advance(rng.randrange(8))
            if rng.random() < 0.4:
                run_if_it_fits(model, rng.choice((3, 17, 40, 90)))
            assert sum(model.memory().committed.values()) <= budget
        while session.advance():
            pass
    assert watch.most_bytes <= budget
    assert all(request.generation is not None for request in admitted)
    assert len(admitted) > 1 and refused > 0
    model.close()


def run_if_it_fits(model: CompiledModel, tokens: int) -> None:
    """Run a step of the whole sequence, if there is a plan for it beside the rows that are taken."""
    try:
        model.plan(tokens, masked=tokens)
    except DoesNotFit:
        return
    model(prompt_of(tokens), torch.arange(tokens))


def test_groups_take_turns() -> None:
    """A request finishes although others, of another phase, keep coming."""
    family = Family("sdar")
    with Session(family.model) as session:
        first = session.submit(prompt_of(3), gen_length=16, threshold=0.3, stop_at_eos=False)
        turns = 0
        while first.generation is None:
            session.submit(prompt_of(22), gen_length=8, stop_at_eos=False)  # begins with a prefill
            session.advance()
            turns += 1
            assert turns <= 2 * family.model.architecture.block * 4
    family.model.close()


def test_requests_that_cannot_be_are_refused_together_with_those_beside_them() -> None:
    family = Family("sdar")
    model = family.model
    with Session(model) as session:
        good = Submission(prompt=prompt_of(9), config=GenerationConfig(gen_length=8))
        bad = Submission(prompt=torch.tensor([1, MASK]), config=GenerationConfig(gen_length=8))
        with pytest.raises(UsageError, match="prompt 1 has the mask token"):
            session.submit_all([good, bad])
        assert session.live == ()
        assert not model.state_rows
        request = session.submit_all([good])[0]
        assert model.state_rows == {"canvas": 24, "held_extents": 1, "kv": 24, "requests": 16}
        session.cancel(request)
        session.cancel(request)
        assert not model.state_rows
        assert request.generation is not None
        assert request.generation.finish == "cancelled"
        assert session.advance() == []
    with pytest.raises(UsageError, match="session is closed"):
        session.submit(prompt_of(3))
    family.model.close()


SAMPLINGS: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llada": ({"gen_length": 8, "block_length": 8, "steps": 4}, [{}, {"temperature": 0.7}, {"temperature": 0.8}]),
    "dream": (
        {"gen_length": 8, "steps": 4, "alg": "entropy"},
        [
            {},
            {"top_p": 0.7},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.6},
            {"temperature": 1.4, "top_k": 3},
        ],
    ),
    "sdar": (
        {"gen_length": 16, "remasking": "low_confidence_static"},
        [
            {},
            {"temperature": 1.0},
            {"temperature": 0.7},
            {"temperature": 0.9, "top_p": 0.6},
            {"temperature": 1.2, "top_k": 4},
        ],
    ),
    "llada2": (
        {"gen_length": 16, "threshold": 0.2},
        [{}, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}],
    ),
    "fast-dllm-v2": (
        {"gen_length": 16, "threshold": 0.4},
        [{}, {"temperature": 1.0}, {"temperature": 0.8}],
    ),
}


@pytest.mark.some
@pytest.mark.parametrize(("name", "chosen"), [*((name, None) for name in SAMPLINGS), ("llada", [0, 0])])
def test_requests_of_any_sampling_share_steps_and_get_what_they_get_alone(name: str, chosen: list[int] | None) -> None:
    """As many steps as the longest of them takes, whatever their temperatures, top-p and top-k; greedy ones alone draw nothing."""
    common, ways = SAMPLINGS[name]
    family = Family(name, debug="poison" if name == "dream" else None)
    family.submissions = [
        Submission(
            prompt=prompt_of(8), config=GenerationConfig(seed=kind, stop_at_eos=False, **common, **way), request_id=kind
        )
        for kind, way in enumerate(ways)
    ]
    kinds, turns, kernels = chosen or range(len(ways)), 0, set[str]()
    with Session(family.model) as session:
        live = session.submit_all([family.submissions[kind] for kind in kinds])
        while session.live:
            kernels |= {op["kernel"] for step in session.advance() for op in step.plan.document["ops"]}
            turns += 1
    assert kernels.isdisjoint({"row_sample", "unembed_sample", "row_nucleus"}) == (chosen is not None)
    found = [(one.generation.token_ids.tolist(), one.steps) for one in live if one.generation is not None]
    assert found == [(tokens, len(steps)) for tokens, steps in map(family.alone, kinds)]
    assert turns <= max(steps for _, steps in found) + 2  # a prefill, and the keys of what it ends with
    family.model.close()
