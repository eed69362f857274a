"""Operators of eviction for requests of a table: on the CPU and in Triton against plain Python, over random tables."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from test_kernels import Case, check_allocates_nothing, strided
from test_request_kernels import HAS_TRITON, I32, Requests, triton_test, values

from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import Column

if HAS_TRITON:
    from test_request_kernels import DEVICE, run

BLOCK, OWN = 8, Column.OWN


class Focused(Requests):
    """Random requests with progress in their blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.canvas = torch.cat([self.canvas, torch.full((BLOCK,), OPEN)])
        count = len(self.table)
        self.table[:, OWN] = torch.tensor(rng.sample(range(count + 2), count))
        self.table[torch.tensor([random.Random(number).random() < 0.2 for number in range(count)]), OWN] = -1
        self.table[:, Column.STEP] = self.table[:, Column.NUMBER] + rng.choice([0, 0, 3])
        rows = [[9.5, 3, rng.randint(0, BLOCK), rng.randint(-2, BLOCK)] for _ in range(count + 2)]
        self.state = torch.tensor(rows, dtype=torch.float32)
        self.attrs = {
            "own": int(OWN), "processed": rng.choice([0, 0, BLOCK]), "first_step": rng.choice(["evicts", "whole", "prefill"]),
        }  # fmt: skip

    def focus(self) -> Case:
        placing = self.place()
        given = {name: placing.operands[name] for name in ("table", "row", "cu_seqlens")}
        given |= {"canvas": self.canvas, "state": strided(self.state), "positions": placing.reference()["positions"]}
        windows, tokens, rng = len(given["row"]), len(given["positions"]), self.rng
        outputs = {name: torch.empty(windows, dtype=I32) for name in ("first", "progress", "decoded")}
        outputs |= {"listed": torch.empty(windows, BLOCK, dtype=I32), "owner": torch.empty(windows, dtype=torch.int64)}
        outputs |= {name: torch.empty(tokens, dtype=torch.uint8) for name in ("votes", "status")}
        attrs = {
            **self.attrs, "block": BLOCK, "importance": rng.choice(["block", "masked"]),
            "reach": rng.choice(["block", "step"]), "history": rng.choice(["cumulative", "block"]),
        }  # fmt: skip
        return Case("focus_requests", given, outputs, attrs)

    def note(self) -> Case:
        placing, rng = self.place(), self.rng
        bounds = placing.operands["cu_seqlens"].tolist()
        windows = [rng.choice([0, end - start]) for start, end in itertools.pairwise(bounds)]
        given = {name: placing.operands[name] for name in ("table", "row", "cu_rows")}
        kept = torch.tensor([0, *windows]).cumsum(0).int()
        committed = torch.tensor([rng.randrange(2) for _ in placing.reference()["decided_rows"]], dtype=torch.uint8)
        begins = self.table[given["row"], Column.START]
        seen = torch.tensor([int(begin) + rng.randint(-2, BLOCK) for begin in begins], dtype=I32)
        given |= {"state": strided(self.state), "cu_seqlens": kept, "seen": seen, "committed": committed}
        return Case("note_focus", given, {}, self.attrs)


def expected(case: Case) -> dict[str, list[float]]:
    found = case.reference()
    return values(found if isinstance(found, dict) else {"state": found})


@pytest.mark.parametrize("kind", ["focus", "note"])
@pytest.mark.parametrize("seed", range(32))
def test_on_the_cpu(seed: int, kind: str) -> None:
    case: Case = getattr(Focused(seed), kind)()
    found = expected(case)
    case.launch()
    assert {name: values({**case.operands, **case.outputs})[name] for name in found} == found
    if seed < 4:
        check_allocates_nothing(case)


@pytest.mark.some
@triton_test
@pytest.mark.parametrize("kind", ["focus", "note"])
@pytest.mark.parametrize("seed", range(32))
def test_in_triton(seed: int, kind: str) -> None:
    case: Case = getattr(Focused(seed), kind)()
    found, ran = expected(case), run(case, DEVICE)
    assert {name: ran[name].tolist() for name in found} == found


def test_the_tables_drawn_have_every_progress() -> None:
    """Of either number of positions kept before: tokens that were kept, tokens that were not; and steps that do not evict."""
    found = [expected(Focused(seed).focus()) for seed in range(32)]
    assert all(sum(kind in each["status"] for each in found) > 4 for kind in (1, 2))
    assert all(sum(not kind.isdisjoint(each["decoded"]) for each in found) > 4 for kind in ({-2}, {-1}, {*range(1, 9)}))
