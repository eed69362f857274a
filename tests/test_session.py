"""Sessions: requests come and go, each gets the tokens that it would get alone, and what is admitted always fits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from reference_runner import random_tensors
from test_decoding import CONFIGS, MASK, prompt_of

from mosaic import decoding, models
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Submission
from mosaic.errors import DoesNotFit, UsageError

WAYS: Mapping[str, list[dict[str, Any]]] = {
    "llada": [
        {"gen_length": 8, "block_length": 4, "steps": 4},
        {"gen_length": 8, "block_length": 4, "steps": 4, "temperature": 0.6},
        {"gen_length": 8, "block_length": 4, "steps": 4, "cfg_scale": 1.0},
        {"gen_length": 12, "block_length": 4, "algorithm": "fast-dllm", "threshold": 0.4, "cache": "dual"},
        {"gen_length": 8, "block_length": 4, "algorithm": "fast-dllm", "factor": 1.0, "cache": "prefix"},
    ],
    "dream": [
        {"gen_length": 8, "steps": 4, "alg": "entropy"},
        {"gen_length": 8, "steps": 4, "alg": "maskgit_plus", "temperature": 0.7, "top_p": 0.9},
    ],
    "sdar": [
        {"gen_length": 16, "threshold": 0.3},
        {"gen_length": 8, "remasking": "sequential", "temperature": 0.8},
        {"gen_length": 16, "algorithm": "llada2.1", "threshold": 0.2, "edit_threshold": 0.1},
    ],
    "fast-dllm-v2": [{"gen_length": 16, "threshold": 0.4}, {"gen_length": 16, "threshold": 0.4, "cache": "dual"}],
}
LENGTHS = (3, 9, 22)


class Family:
    """A tiny random model of a family, and what its requests get alone."""

    def __init__(self, name: str, **options: Any) -> None:
        self.runner = CompiledRunner(
            CONFIGS[name], random_tensors(models.load(CONFIGS[name]).architecture, 3), **options
        )
        self.submissions = [
            Submission(
                prompt=prompt_of(n), config=GenerationConfig(seed=5, stop_at_eos=False, **way), request_id=number
            )
            for number, (n, way) in enumerate((n, way) for n in LENGTHS for way in WAYS[name])
        ]
        self.alone = cache(self._alone)

    def _alone(self, kind: int) -> tuple[list[int], int]:
        asked = self.submissions[kind]
        (found,) = decoding.generate(self.runner, [asked.prompt], asked.config, request_ids=[asked.request_id])
        return found.token_ids.tolist(), found.steps


@pytest.fixture(params=list(WAYS))
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    found = Family(request.param, debug="poison" if request.param == "sdar" else None)
    yield found
    found.runner.close()


@pytest.mark.parametrize("count", [25, pytest.param(125, marks=pytest.mark.soak)])
def test_requests_that_come_and_go_get_what_they_get_alone(family: Family, count: int) -> None:
    """Submitted, advanced and cancelled at random."""
    rng, model = random.Random(11), family.runner.model
    kinds: dict[LiveRequest, int] = {}
    cancelled: list[LiveRequest] = []
    most = 0
    with Session(family.runner) as session:
        while len(kinds) < count or session.live:
            if len(kinds) < count and len(session.live) < 8 and rng.random() < 0.7:
                chosen = [rng.randrange(len(family.submissions)) for _ in range(rng.randrange(1, 4))]
                new = session.submit_all([family.submissions[kind] for kind in chosen])
                kinds.update(zip(new, chosen, strict=True))
            if session.live and rng.random() < 0.05:
                cancelled.append(rng.choice(session.live))
                session.cancel(cancelled[-1])
            most = max(most, len({step.request for step in session.advance(rng.randrange(1, 4))}))
    assert most > 3
    assert not model.state_rows
    for request, kind in kinds.items():
        tokens, steps = family.alone(kind)
        assert request.generation is not None
        if request in cancelled:
            assert request.generation.finish == "cancelled"
            assert request.steps <= steps
            known = request.generation.token_ids.tolist()
            assert family.submissions[kind].config.algorithm == "llada2.1" or known == tokens[: len(known)]
        else:
            assert (request.generation.token_ids.tolist(), request.steps) == (tokens, steps)


@pytest.mark.parametrize("spare_pages", [0, 3, 20])
def test_what_is_admitted_always_fits(spare_pages: int) -> None:
    """Under budgets in which few requests have room; memory is looked at from outside after every step."""
    roomy = Family("sdar")
    alone = roomy.runner.model.check(decoding.shapes(roomy.submissions[2].config, [9], roomy.runner.architecture))
    roomy.runner.close()
    budget = alone.total_bytes + spare_pages * 4096
    family, rng = Family("sdar", budget=budget), random.Random(spare_pages)
    model = family.runner.model
    admitted, refused = 0, 0
    with Session(family.runner) as session:
        for _ in range(40):
            asked = rng.choice(family.submissions)
            try:
                session.submit_all([asked])
                admitted += 1
            except DoesNotFit:
                assert not session.admits(asked)
                refused += 1
            if session.live and rng.random() < 0.1:
                session.cancel(rng.choice(session.live))
            session.advance(rng.randrange(4))
            memory = model.memory()
            assert sum(memory.committed.values()) <= budget
        while session.advance():
            pass
    family.runner.close()
    assert admitted > 5
    assert refused > 0 or spare_pages > 8


def test_groups_take_turns() -> None:
    """A request finishes although others, of another phase, keep coming."""
    family = Family("sdar")
    with Session(family.runner) as session:
        first = session.submit(prompt_of(3), gen_length=16, threshold=0.3, stop_at_eos=False)
        turns = 0
        while first.generation is None:
            session.submit(prompt_of(22), gen_length=8, stop_at_eos=False)  # begins with a prefill
            session.advance()
            turns += 1
            assert turns <= 2 * family.runner.architecture.block * 4
    family.runner.close()


def test_requests_that_cannot_be_are_refused_together_with_those_beside_them() -> None:
    family = Family("sdar")
    model = family.runner.model
    with Session(family.runner) as session:
        good = Submission(prompt=prompt_of(9), config=GenerationConfig(gen_length=8))
        bad = Submission(prompt=torch.tensor([1, MASK]), config=GenerationConfig(gen_length=8))
        with pytest.raises(UsageError, match="prompt 1 has the mask token"):
            session.submit_all([good, bad])
        assert session.live == ()
        assert not model.state_rows
        request = session.submit_all([good])[0]
        assert model.state_rows == {"kv": 24}
        session.cancel(request)
        session.cancel(request)
        assert not model.state_rows
        assert request.generation is not None
        assert request.generation.finish == "cancelled"
        assert session.advance() == []
    with pytest.raises(UsageError, match="session is closed"):
        session.submit(prompt_of(3))
    family.runner.close()
