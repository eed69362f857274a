"""One process of the fuzzer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from .cases import explain, run_case
from .findings import Finding, Tally

__all__ = ["work"]


def work(kinds: Sequence[str], first: int, stride: int, deadline: float) -> tuple[dict[str, int], list[str]]:
    """One process: cases in turn, up to the deadline or the first finding."""
    torch.set_num_threads(1)
    tally = Tally()
    for seed in itertools.count(first, stride):
        for kind in kinds:
            if time.time() > deadline:
                return dict(tally), []
            try:
                run_case(kind, seed, tally)
            except Finding as finding:
                return dict(tally), [explain(kind, seed, finding)]
    raise AssertionError
