"""Some seconds of the fuzzer: what it found once is tested elsewhere, what is new it finds here."""

from __future__ import annotations

import pytest
import torch
from fuzz.cases import explain, run_case
from fuzz.findings import Finding, Tally

PARTS = {
    "programs": (range(0, 20), range(20, 40)),
    "requests": (range(0, 4), range(4, 12)),
    "packing": (range(0, 16), range(16, 40)),
}
"""Seeds of each kind, of which the later ones soak."""


@pytest.mark.some
@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        pytest.param(kind, seeds, marks=pytest.mark.soak if seeds.start else ())
        for kind, parts in PARTS.items()
        for seeds in parts
    ],
    ids=str,
)
def test_a_minute(kind: str, seeds: range) -> None:
    torch.set_num_threads(1)
    tally = Tally()
    for seed in seeds:
        try:
            run_case(kind, seed, tally)
        except Finding as finding:
            pytest.fail(explain(kind, seed, finding, seconds=20.0))
    assert tally[kind] == len(seeds) and tally.total() > 4 * len(seeds)
