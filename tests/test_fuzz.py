"""A fixed minute of the fuzzer: what it found once is tested elsewhere, what is new it finds here."""

from __future__ import annotations

import pytest
import torch
from fuzz.cases import explain, run_case
from fuzz.findings import Finding, Tally

PARTS = {
    "programs": [range(start, start + 20) for start in range(0, 40, 20)],
    "requests": [range(start, start + 6) for start in range(0, 12, 6)],
    "packing": [range(start, start + 40) for start in range(0, 40, 40)],
}
"""Seeds of each kind, in parts that take about five seconds each."""


@pytest.mark.parametrize(
    ("kind", "seeds"), [(kind, seeds) for kind, parts in PARTS.items() for seeds in parts], ids=str
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
