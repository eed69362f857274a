"""evict_tokens: on the CPU and in Triton against the paper's equations, one request at a time, and what it refuses."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_kernels import F32, Case, check_allocates_nothing, strided
from test_kv import starts
from torch import Tensor

from mosaic.errors import GraphError, MosaicError, RuntimeMemoryError
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator
from mosaic.registrar.polynomial import symbol

if importlib.util.find_spec("triton") is not None:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")

I32 = torch.int32
HISTORIES, THRESHOLDS, PLACEHOLDERS = (
    ("cumulative", "ema", "block"), ("deviation", "mean"), ("masked", "unprocessed"),
)  # fmt: skip


def drawn(seed: int, *, sequences: int = 0) -> Case:
    """Requests at any progress. Importances are floats, or quarters of which many tie; some are not numbers."""
    rng = random.Random(seed)
    block, heads = rng.choice([1, 4, 7, 16]), rng.randint(1, 3)
    count = sequences or rng.choice([1, 2, 5])
    tied, broken, masks = rng.random() < 0.5, rng.random() < 0.15, rng.choice([0.0, 0.5, 0.8, 1.0])
    importance = torch.zeros(2, count, heads, block)
    first, progress, status, positions, windows, listed = [], [], [], [], [], []
    for sequence in range(count):
        begin, done = rng.choice([0, 5, 40]), rng.randint(0, block)
        some = sorted(rng.sample(range(block), rng.choice([block, rng.randint(0, block)])))
        extra = range(begin - rng.choice([0, 5, 30]), begin) if begin else ()
        window = [position for position in extra if position >= 0]
        status += [0] * len(window)
        for offset in some:
            window.append(begin + offset)
            masked = rng.random() < masks
            status.append((1 if offset < done else 2) if masked else 0)
        named = [offset for offset in range(block) if offset in some or rng.random() < 0.5]
        for offset in named:
            for layer in range(2):
                for head in range(heads):
                    value = rng.randint(0, 3) / 4 if tied else rng.random()
                    importance[layer, sequence, head, offset] = math.nan if broken and rng.random() < 0.1 else value
        listed.append(named + [-1] * (block - len(named)))
        first.append(begin)
        progress.append(done)
        positions += window
        windows.append(len(window))
    rows, padding = len(status), rng.choice([1, 3])
    owned = rng.sample(range(count + 3), count)
    state = torch.full((count + 3, 4), math.nan)
    kind = rng.choice(HISTORIES)
    state[owned] = torch.tensor(
        [[rng.randint(0, 90), rng.choice([0, rng.randint(1, 60)]), 7, 9] for _ in owned], dtype=F32
    )
    state[owned, 0] *= state[owned, 1] > 0
    operands = {
        "before": importance[0], "after": importance[1], "listed": torch.tensor(listed, dtype=I32),
        "first": torch.tensor(first, dtype=I32), "progress": torch.tensor(progress, dtype=I32),
        "status": torch.tensor(status + [1] * padding, dtype=torch.uint8),
        "positions": torch.tensor(positions + [0] * padding, dtype=I32), "cu_seqlens": starts(windows),
        "decoded": torch.tensor([rng.randint(-2, 6) for _ in owned], dtype=I32), "owner": torch.tensor(owned),
        "state": strided(state),
    }  # fmt: skip
    if rng.random() < 0.25:
        operands["ranks"] = torch.tensor([[rng.choice([rng.random(), 0.5]) for _ in range(block)] for _ in owned])
    outputs = {
        "rows": torch.empty(rows + padding, dtype=torch.int64), "bounds": torch.empty(count + 1, dtype=I32),
        "total": torch.empty(1, dtype=torch.int64), "seen": torch.empty(count, dtype=I32),
    }  # fmt: skip
    attrs = {
        "alpha": rng.choice([1.0, 1.2, 1.5, 1.8, 100.0]), "history": kind, "threshold": rng.choice(THRESHOLDS),
        "placeholders": rng.choice(PLACEHOLDERS), "weight": rng.choice([0.0, 0.25, 1.0]),
        "keep": rng.choice([0, 0, 0, 1, 2, 8]), "rank": rng.choice(["importance", "importance", "bottom"]),
    }  # fmt: skip
    return Case("evict_tokens", operands, outputs, attrs)


def stated(case: Case) -> dict[str, Any]:
    """Sections 4.1 and 4.2 request by request, over positions, with exact budgets. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    state, found, sizes, ends = given["state"].clone(), list[int](), [0], []
    change = (given["after"].double() - given["before"].double()).sum(1)
    for b, (low, high) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        begin, done = int(given["first"][b]), int(given["progress"][b])
        at = {int(given["positions"][row]): row for row in range(low, high)}
        kinds = {position: int(given["status"][row]) for position, row in at.items()}
        masked = [position for position in sorted(at) if kinds[position]]
        delta = {position: float(change[b, position - begin]) for position in masked}
        own = state[given["owner"][b]]
        own[:2] = torch.tensor(counted(own, int(given["decoded"][b]), attrs))
        target = max(
            budget_of(state[given["owner"][b]], attrs), candidates(delta, change[b], given["listed"][b], attrs)
        )
        numbers = [position for position in masked if not math.isnan(delta[position])]
        least = attrs["rank"] == "bottom"
        rank = {position: -delta[position] if least else delta[position] for position in numbers}  # table 3
        if "ranks" in given:
            rank = {position: float(given["ranks"][b, position - begin]) for position in numbers}
        chosen = set(sorted(numbers, key=lambda position: (-rank[position], position))[: attrs["keep"] or target])
        chosen |= {position for position in masked if position not in numbers}
        chosen |= {position for position in masked if position + 1 in chosen}
        kept = chosen | {position for position in at if not kinds[position]}
        kept |= {position for position in masked if kinds[position] == 2 and position < max(chosen)}
        if attrs["placeholders"] == "masked":
            kept |= {position for position in masked if position < max(chosen)}
        found += sorted(at[position] for position in kept)
        sizes.append(len(found))
        ends.append(max(begin + done, max(kept, default=-1) + 1))
    rows = found + [0] * (len(given["status"]) - len(found))
    return {"rows": rows, "bounds": sizes, "total": [len(found)], "seen": ends, "state": state}


def counted(own: Tensor, decoded: int, attrs: dict[str, Any]) -> list[float]:
    """Equations 17 and 18, or an exponential average."""
    summed, steps, *_ = own.tolist()
    if decoded < 0:
        return [0.0, 0.0] if decoded == -1 else [summed, steps]
    if attrs["history"] == "block" and not decoded:
        return [summed, steps]
    if attrs["history"] == "ema" and steps:
        return [(1 - attrs["weight"]) * summed + attrs["weight"] * decoded, steps + 1]
    return [summed + decoded, steps + 1]


def budget_of(own: Tensor, attrs: dict[str, Any]) -> int:
    """Equation 4's budget by history, exactly."""
    summed, steps = (Fraction(value) for value in own.tolist()[:2])
    average = summed if attrs["history"] == "ema" else summed / (steps or 1)
    return math.ceil(Fraction(str(attrs["alpha"])) * max(average, Fraction(1)))


def candidates(delta: dict[int, float], change: Tensor, listed: Tensor, attrs: dict[str, Any]) -> int:
    """Equation 5, or E.2.2."""
    of = [float(change[offset]) for offset in listed.tolist() if offset >= 0]
    mean = 0.0
    if attrs["threshold"] == "mean":
        of = list(delta.values())
        mean = sum(of) / max(len(of), 1)
    square = sum((value - mean) ** 2 for value in of) / max(len(of), 1)
    return sum(value >= mean and (value - mean) ** 2 >= square for value in delta.values())


def assert_stated(case: Case, found: dict[str, Tensor]) -> None:
    for name, expected in stated(case).items():
        if name == "state":
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=0, equal_nan=True)
        else:
            assert found[name].tolist() == expected, name


@pytest.mark.some
@pytest.mark.parametrize("part", range(4))
def test_on_the_cpu(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        case = drawn(seed)
        reference = case.reference()
        assert_stated(case, reference | {"state": reference["state"].float()})
        given = case.operands["state"].clone()
        case.launch()
        after = case.operands["state"].clone()
        case.operands["state"].copy_(given)
        assert_stated(case, case.outputs | {"state": after})
    check_allocates_nothing(case)


@triton_test
def test_in_triton() -> None:
    for seed in range(200, 240):
        assert_stated(case := drawn(seed), run(case, DEVICE))


@triton_test
def test_more_sequences_than_are_added_up_at_once_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from mosaic.kernels.cuda import evict_tokens

    monkeypatch.setattr(evict_tokens, "SEQUENCES", 2)
    monkeypatch.setattr(evict_tokens, "ROWS", 4)
    assert_stated(case := drawn(7, sequences=7), run(case, DEVICE))


KINDS: list[Callable[[Case], bool]] = [
    lambda case: (case.operands["after"] - case.operands["before"]).isnan().any().item() is True,
    lambda case: stated(case)["total"][0] < int(case.operands["cu_seqlens"][-1]),
    lambda case: case.attrs["alpha"] == 1.2,
    lambda case: case.attrs["keep"] in (1, 2) and case.attrs["rank"] == "bottom" and "ranks" not in case.operands,
    lambda case: "ranks" in case.operands and stated(case)["total"][0] < int(case.operands["cu_seqlens"][-1]),
]


@pytest.mark.some
@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_drawn_have_it(kind: Callable[[Case], bool]) -> None:
    assert sum(kind(drawn(seed)) for seed in range(240)) > 8


@pytest.mark.parametrize(
    ("alpha", "average", "budget"), [(1.2, 5, 6), (1.8, 5, 9), (1.5, 2, 3), (1.1, 10, 11), (1.4, 15, 21)]
)
@pytest.mark.parametrize("steps", [1, 3, 17, 171])
def test_rounding_adds_no_token(alpha: float, average: int, budget: int, steps: int) -> None:
    """A budget that is a whole number, all importances alike but that the threshold leaves out all but one."""
    case = whole_number(alpha, average * steps, steps)
    case.launch()
    assert int(case.outputs["total"]) == budget


@triton_test
@pytest.mark.parametrize(("alpha", "average", "budget"), [(1.2, 5, 6), (1.8, 5, 9), (1.4, 15, 21)])
def test_rounding_adds_no_token_in_triton(alpha: float, average: int, budget: int) -> None:
    for steps, decoded in ((1, 0), (3, -2), (171, 0)):
        assert int(run(whole_number(alpha, average * steps, steps, decoded), DEVICE)["total"]) == budget


def whole_number(alpha: float, summed: int, steps: int, decoded: int = 0) -> Case:
    """A block of 32 masks that were all processed, of which the first has all the importance."""
    after = torch.zeros(1, 1, 32)
    after[0, 0, 0] = 1.0
    operands = {
        "before": torch.zeros(1, 1, 32), "after": after, "listed": torch.arange(32, dtype=I32)[None],
        "first": torch.zeros(1, dtype=I32), "progress": torch.full((1,), 32, dtype=I32),
        "status": torch.ones(32, dtype=torch.uint8), "positions": torch.arange(32, dtype=I32), "cu_seqlens": starts([32]),
        "decoded": torch.tensor([decoded], dtype=I32), "owner": torch.zeros(1, dtype=torch.int64),
        "state": strided(torch.tensor([[float(summed), float(steps), 0.0, 0.0]])),
    }  # fmt: skip
    outputs = {
        "rows": torch.empty(32, dtype=torch.int64), "bounds": torch.empty(2, dtype=I32),
        "total": torch.empty(1, dtype=torch.int64), "seen": torch.empty(1, dtype=I32),
    }  # fmt: skip
    attrs = {"alpha": alpha, "history": "block", "threshold": "deviation", "placeholders": "unprocessed"}
    return Case("evict_tokens", operands, outputs, attrs)


TOKENS, SEQS, ROWS = (symbol(name) for name in "tbr")
PER_SEQUENCE = Spec((SEQS,), "int32")
GIVEN: dict[str, Any] = {
    "before": Spec((SEQS, 2, 8), "float32"), "after": Spec((SEQS, 2, 8), "float32"), "listed": Spec((SEQS, 8), "int32"),
    "first": PER_SEQUENCE, "progress": PER_SEQUENCE, "status": Spec((TOKENS,), "uint8"), "positions": Spec((TOKENS,), "int32"),
    "cu_seqlens": Spec((SEQS + 1,), "int32"), "decoded": PER_SEQUENCE, "owner": Spec((SEQS,), "int64"),
    "state": Spec((ROWS, 4), "float32"),
}  # fmt: skip
ATTRS: dict[str, Any] = {
    "alpha": 1.5,
    "history": "ema",
    "threshold": "mean",
    "placeholders": "masked",
    "weight": 0.25,
}


def test_shapes_follow_from_operands() -> None:
    found = operator("evict_tokens").work(**GIVEN, **ATTRS).outputs
    assert found == operator("evict_tokens").work(**GIVEN, **ATTRS, ranks=Spec((SEQS, 8), "float32")).outputs
    assert found == (Spec((TOKENS,), "int64"), GIVEN["cu_seqlens"], Spec((1,), "int64"), PER_SEQUENCE)


@pytest.mark.parametrize(("changed", "message"), [
    ({"before": Spec((SEQS, 1, 8), "float32")}, r"operand 'after' is .*, expected float32\[b, 1, 8\]"),
    ({"after": Spec((SEQS, 2, 7), "float32")}, r"operand 'after' is .*, expected float32\[b, 2, 8\]"),
    ({"after": Spec((SEQS, 8), "float32")}, r"operand 'after' is .*, expected float32\[b, 2, 8\]"),
    ({"listed": Spec((SEQS, 8), "int64")}, r"operand 'listed' is .*, expected int32\[b, 8\]"),
    ({"first": Spec((SEQS + 1,), "int32")}, r"operand 'first' is .*, expected int32\[b\]"),
    ({"progress": Spec((SEQS,), "int64")}, r"operand 'progress' is .*, expected int32\[b\]"),
    ({"decoded": Spec((SEQS,), "int64")}, r"operand 'decoded' is .*, expected int32\[b\]"),
    ({"status": Spec((TOKENS,), "int32")}, r"operand 'status' is .*, expected uint8\[[tT]\]"),
    ({"status": Spec((TOKENS, 1), "uint8")}, r"operand 'status' is .*, expected uint8\[[tT]\]"),
    ({"positions": Spec((TOKENS,), "int64")}, r"operand 'positions' is .*, expected int32\[t\]"),
    ({"owner": PER_SEQUENCE}, r"operand 'owner' is .*, expected int64\[b\]"),
    ({"state": Spec((ROWS, 3), "float32")}, r"operand 'state' is .*, expected float32\[[rE], 4\]"),
    ({"state": Spec((ROWS,), "float32")}, r"operand 'state' is .*, expected float32\[[rE], 4\]"),
    ({"history": "mean"}, "history must be one of cumulative, ema, block, not 'mean'"),
    ({"threshold": "sum"}, "threshold must be one of deviation, mean"),
    ({"placeholders": "all"}, "placeholders must be one of masked, unprocessed"),
    ({"rank": "least"}, "rank must be one of importance, bottom, not 'least'"),
    ({"ranks": Spec((SEQS, 7), "float32")}, r"operand 'ranks' is .*, expected float32\[b, 8\]"),
    ({"ranks": Spec((SEQS, 8), "int32")}, r"operand 'ranks' is .*, expected float32\[b, 8\]"),
    ({"keep": -1}, "keep must be a number of rows, not -1"),
    ({"alpha": 0.9}, "alpha must be at least 1, not 0.9"),
    ({"weight": 1.1}, "weight must be a share"),
    ({"weight": -0.1}, "weight must be a share"),
])  # fmt: skip
def test_operands_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        operator("evict_tokens").work(**{**GIVEN, **ATTRS, **changed})


@pytest.mark.parametrize(("changed", "error", "message"), [
    ({"history": "emma"}, GraphError, "history must be one of cumulative, ema, block, not 'emma'"),
    ({"threshold": "means"}, GraphError, "threshold must be one of deviation, mean"),
    ({"placeholders": "mask"}, GraphError, "placeholders must be one of masked"),
    ({"rank": "botom"}, GraphError, "rank must be one of importance, bottom"),
    ({"after": torch.zeros(1, 2, 64)[..., :32]}, GraphError, "operand 'after' is"),
    ({"listed": torch.zeros(1, 64, dtype=I32)[:, ::2]}, GraphError, "stride 2 inside a row"),
])  # fmt: skip
def test_a_launch_that_does_not_fit_is_refused(changed: dict[str, Any], error: type[MosaicError], message: str) -> None:
    case = whole_number(1.5, 2, 1)
    with pytest.raises(error, match=message):
        load("evict_tokens").launch(**{**case.operands, **case.outputs, **case.attrs, **changed})


@pytest.mark.parametrize("name", ["before", "after", "listed", "ranks"])
def test_importances_that_do_not_lie_side_by_side_are_refused(name: str) -> None:
    case = drawn(next(seed for seed in range(99) if drawn(seed).operands["listed"].shape == (2, 7)))
    given = case.operands.get(name, case.operands["before"][:, 0])
    apart = torch.zeros(*given.shape[:-1], 9, dtype=given.dtype)[..., :7]
    with pytest.raises(GraphError, match="must lie side by side"):
        load("evict_tokens").launch(**{**case.operands, **case.outputs, **case.attrs, name: apart})


@triton_test
def test_scratch_that_is_too_small_is_refused() -> None:
    case = whole_number(1.5, 2, 1)
    with pytest.raises(RuntimeMemoryError, match="scratch of 0 bytes, 132 needed"):
        load("evict_tokens", "cuda").launch(**case.operands, **case.outputs, **case.attrs)
