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


@pytest.mark.parametrize("seed", range(8))
def test_shared_steps_serve_every_choice(seed: int) -> None:
    rng, arch, groups = random.Random(seed), load("small-sdar").architecture, Groups()
    for policy in rng.sample(POLICIES, rng.randint(1, len(POLICIES))):
        row = table_row(resolve(GenerationConfig(gen_length=32, **policy), arch), arch, 256, 0)
        assert row is not None
        groups.number(row)
    ready = [*groups.shared(range(len(groups)))]
    assert len({*ready}) == len(ready)
    for _ in range(50):
        asking = np.array(rng.choices(range(len(groups)), k=rng.randint(1, 6)))
        none = np.zeros(len(asking), dtype=np.int64)
        fills, running = np.array(rng.choices((False, True), k=len(asking))), none == 0
        wanted = Wanted(running, fills, none, none + 4, none + 4, none + 4, np.where(fills, 0, asking), none > 0)
        for choice in groups.choices(wanted):
            assert any(
                {*choice} <= {*other} and (len(choice) == 1 or groups.mixes(choice) == groups.mixes(other))
                for other in ready
            ), (choice, ready)
        groups.served(choice)
