"""How many tokens of prompts steps have time for: a device whose steps take what they take, whatever plans say."""

from __future__ import annotations

import random

import pytest

from mosaic.decoding.pace import Pace


@pytest.mark.parametrize("seed", range(20))
def test_times_of_steps_are_found_among_some_that_waited_for_a_plan(seed: int) -> None:
    """Groups have times of their own; those that nobody is in any more do not count."""
    rng, pace = random.Random(seed), Pace()
    alone = {1: rng.uniform(4, 8), 2: rng.uniform(9, 20), 6: rng.uniform(21, 40)}
    token_ms = rng.uniform(0.01, 0.1)
    assert pace.alone_ms(7) is None and pace.token_ms is None
    for number in range(200):
        waited_ms = 500.0 if number % 12 == 11 else 0.0
        groups = rng.choice([*alone])
        tokens = 0 if number < 60 or rng.random() < 0.5 else rng.randint(1, 4000)
        pace.note(groups, tokens, alone[groups] + token_ms * tokens + waited_ms)
    assert pace.alone_ms(7) == pytest.approx(alone[6]) and pace.alone_ms(3) == pytest.approx(alone[2])
    assert pace.alone_ms(1) == pytest.approx(alone[1]) and pace.alone_ms(4) is None
    assert pace.token_ms == pytest.approx(token_ms)
