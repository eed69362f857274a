"""Steps that stand in for others: random ladders of which only some steps are ready."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any, cast

import pytest
from test_request_table import CONFIGS
from test_warm import DRAWN, GREEDY, come_and_go, counted

import mosaic
from mosaic.decoding.ready import Substitutes
from mosaic.decoding.rows import RULE
from mosaic.models.parts import CANVAS, KEPT, SAMPLE, STATISTICS, TABLED
from mosaic.models.phase import Phase
from mosaic.runtime.engine import MAKING_MS
from mosaic.runtime.graph_memory import MOST_BYTES
from mosaic.runtime.room import Room, Shape

PHASES = [Phase(tokens=TABLED, cache=KEPT, head=head, commit=RULE) for head in (STATISTICS, SAMPLE)]


class Ladder:
    """A table, as far as who looks for a step sees it."""

    def __init__(self, rng: random.Random) -> None:
        self.planned, self.fixed_ms = frozenset[Any](), rng.choice([1.0, 5.0])
        self.ready = dict.fromkeys(shape_of(rng) for _ in range(rng.choice([3, 100])))
        self.gone = {shape for shape in self.ready if rng.random() < 0.1}

    def is_ready(self, shape: Shape) -> bool:
        return shape in self.ready and shape not in self.gone

    def predicted_ms(self, room: Room) -> float:
        return self.fixed_ms + room.tokens / 8 + room.rows / 64


def shape_of(rng: random.Random) -> Shape:
    room = Room.of(rng.choice(PHASES), rng.choice([1, 9]), rng.randint(1, 40), 16, rng.randint(1, 400))
    return Shape(room, rng.choice([1, 3]), rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(40))
def test_a_step_that_stands_in_does_as_much_and_costs_no_more_than_making_the_other(seed: int) -> None:
    rng = random.Random(seed)
    ladder, lost, few = Ladder(rng), defaultdict[Shape, float](float), 0
    substitutes = Substitutes(cast(Any, ladder), most_tokens=320)
    asked = [shape_of(rng) for _ in range(6)]
    for _ in range(400):
        shape = rng.choice(asked)
        fewest, longest = max(shape.room.blocks - rng.choice([0, 10]), 1), rng.choice([24, math.inf])
        found = substitutes.of(shape, fewest, longest)
        if found == shape:
            if shape not in ladder.ready and rng.random() < 0.5:
                ladder.ready[shape] = None  # it was made
            continue
        assert ladder.is_ready(found) and not ladder.is_ready(shape)
        room, other = shape.room, found.room
        assert other.blocks >= fewest and other.rows >= min(room.rows, other.tokens)
        assert found.groups | shape.groups == found.groups and found.marked >= shape.marked
        assert other.windows > 1 or room.windows == 1
        assert other.phase in (room.phase, PHASES[1]) and other.tokens <= max(room.tokens, 320)
        assert other.blocks <= longest
        lost[shape] += ladder.predicted_ms(other) * max(room.blocks / other.blocks, 1) - ladder.predicted_ms(room)
        assert other.blocks <= 2 * room.blocks
        few += 1
    assert all(most <= MAKING_MS for most in lost.values())
    assert few or len(ladder.ready) < 20


def test_what_stands_in_without_end_ends_where_steps_are_planned_for_other_rows() -> None:
    """Of those that were made ready none is left then."""
    ladder, small, large = Ladder(random.Random(1)), *(Room.of(PHASES[0], 9, blocks, 16, 64) for blocks in (4, 40))
    ladder.ready, ladder.gone = {Shape(large, 1, False): None}, set()
    substitutes = Substitutes(cast(Any, ladder), most_tokens=640)
    substitutes.warm_for = ladder.planned
    assert {substitutes.of(Shape(small, 1, False), 4) for _ in range(1000)} == {Shape(large, 1, False)}
    ladder.planned = frozenset({(CANVAS, 64)})
    assert Shape(small, 1, False) in [substitutes.of(Shape(small, 1, False), 4) for _ in range(1000)]


def test_a_session_that_is_warm_for_fewer_sizes_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others stand in for the rest, in all groups."""
    monkeypatch.setattr("mosaic.runtime.graph_memory.USUAL_BYTES", MOST_BYTES // 40)
    said, rng = list[str](), random.Random(7)
    config = {**CONFIGS["sdar"], "num_hidden_layers": 4}
    configs = [GREEDY, DRAWN, GREEDY.__class__(gen_length=8, stop_at_eos=False, attention="mage:k=16")]
    with mosaic.compile(config, seed=3) as model, model.session(max_num_batched_tokens=64) as session:
        session.warm(configs, requests=8, tokens=64, progress=said.append)
        assert len(said) <= 41  # a line for each step, and one for all
        with counted(monkeypatch) as made:
            come_and_go(session, rng, 40, most=8, tokens=64, configs=configs)
        assert made["runs"] and not made["executors"] and made["plans"] < 8
