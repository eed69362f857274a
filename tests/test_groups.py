"""The groups of a session's requests: steps that warm sessions have ready serve every choice of groups."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mosaic.decoding import GenerationConfig
from mosaic.decoding.algorithms import table_row
from mosaic.decoding.config import resolve
from mosaic.decoding.groups import Groups
from mosaic.kernels.shared.requests import Wanted
from mosaic.models import load

POLICIES = ({}, {"attention": "mage:k=64"}, {"attention": "sparsed:k=64"}, {"attention": "flashblock"}, {"eviction": "focus"},
            {"attention": "mage:k=64", "eviction": "focus"}, {"eviction": "focus:keep=2"})  # fmt: skip


ARCH = load("small-sdar").architecture


def numbered(groups: Groups, policy: dict[str, str]) -> int:
    row = table_row(resolve(GenerationConfig(gen_length=32, **policy), ARCH), ARCH, 256, 0)
    assert row is not None
    return groups.number(row.phase)


def asking(numbers: list[int], fills: list[bool]) -> Wanted:
    none = np.zeros(len(numbers), dtype=np.int64)
    prompts = np.array(fills, dtype=np.bool_)
    return Wanted(none == 0, prompts, none, none + 4, none + 4, none + 4, np.where(prompts, 0, numbers), none > 0)


def test_requests_that_ask_for_the_same_are_one_group() -> None:
    groups = Groups()
    found = [numbered(groups, policy) for policy in POLICIES]
    assert found == [*range(len(POLICIES))] == [numbered(groups, policy) for policy in POLICIES]
    exact, mage, _, flashblock, focus, both, _ = found
    assert not any(groups.mixes([one]) for one in found)
    assert not groups.mixes([exact, focus]) and not groups.mixes([mage, both])
    assert groups.mixes([exact, mage]) and groups.mixes([mage, flashblock]) and groups.mixes([focus, both])


@pytest.mark.parametrize("seed", range(8))
def test_who_has_waited_longest_is_served_next(seed: int) -> None:
    """Among groups, of which one that was never served comes first, and the prompts of all, which have one turn together."""
    rng, groups, last, prompts = random.Random(seed), Groups(), dict[int, int](), -1
    for policy in rng.sample(POLICIES, rng.randint(2, len(POLICIES))):
        numbered(groups, policy)
    for launch in range(1, 80):
        count = rng.randint(1, 6)
        numbers, fills = rng.choices(range(len(groups)), k=count), rng.choices((False, True), k=count)
        asks = {prompts if fill else number for number, fill in zip(numbers, fills, strict=True)}
        choices = groups.choices(asking(numbers, fills))
        longest = min(last.get(one, 0) for one in asks)
        for choice in choices:
            assert {*choice} <= asks | ({0} if prompts in asks else set()), "nobody is served who has not asked"
            served = {*choice} | ({prompts} if choice == (0,) else set())
            assert any(last.get(one, 0) == longest for one in served & asks)
        taken = rng.choice(choices)
        groups.served(taken)
        last |= dict.fromkeys({*taken} | ({prompts} if taken == (0,) else set()), launch)
    assert groups.choices(asking([], [])) == []


@pytest.mark.parametrize("seed", range(8))
def test_shared_steps_serve_every_choice(seed: int) -> None:
    rng, groups = random.Random(seed), Groups()
    for policy in rng.sample(POLICIES, rng.randint(1, len(POLICIES))):
        numbered(groups, policy)
    ready = [*groups.shared(range(len(groups)))]
    assert len({*ready}) == len(ready)
    for _ in range(50):
        numbers = rng.choices(range(len(groups)), k=rng.randint(1, 6))
        for choice in groups.choices(asking(numbers, rng.choices((False, True), k=len(numbers)))):
            assert any(
                {*choice} <= {*other} and (len(choice) == 1 or groups.mixes(choice) == groups.mixes(other))
                for other in ready
            ), (choice, ready)
        groups.served(choice)
