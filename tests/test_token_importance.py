"""token_importance: random batches against float64, on the CPU and in Triton, and what it refuses."""

from __future__ import annotations

import importlib.util
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_kernels import (
    BF16,
    DTYPES,
    F32,
    F64,
    Case,
    assert_within,
    check_allocates_nothing,
    gamma,
    name_of,
    rounding,
    unit,
)
from test_kv import kv_case, rows_of
from torch import Tensor

from mosaic.errors import GraphError
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

NAMES = ("q", "kv", "extents", "cu_extents", "cu_seqlens")
GROUPS = [(1, 2), (4, 2), (7, 1), (8, 1), (3, 3)]  # query heads of a key-value head, and how many of these


def drawn(seed: int, dtype: torch.dtype, most: int = 11) -> Case:
    """Windows that end with a block, or with some of its rows; of the block any positions are listed, and any rows vote."""
    rng = random.Random(seed)
    group, kv_heads = GROUPS[seed % len(GROUPS)]
    positions = rng.choice([1, 4, rng.randint(2, most)])
    windows, first, listed = [], [], []
    for _ in range(rng.randint(1, 3)):
        begin, before = rng.choice([0, 3, 8]), rng.choice([0, 2])
        windows.append((rng.randint(0, positions + before), begin + positions, begin))
        first.append(begin)
        some = sorted(rng.sample(range(positions), rng.choice([positions, rng.randint(0, positions)])))
        listed.append(some + [-1] * (positions - len(some)))
    given = kv_case(windows, group * kv_heads, kv_heads, rng.choice([4, 5, 16]), dtype, padding=2)
    operands = {name: given.operands[name] for name in NAMES}
    rows, often = operands["q"].shape[0], rng.choice([0.3, 1.0])
    operands |= {
        "votes": torch.tensor([rng.random() < often for _ in range(rows)], dtype=torch.uint8),
        "first": torch.tensor(first, dtype=torch.int32),
        "listed": torch.tensor(listed, dtype=torch.int32),
    }
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    outputs = {"importance": torch.empty(len(windows), kv_heads, positions)}
    return Case("token_importance", operands, outputs, attrs | {"pool": rng.choice([1, 3, 3, 5, 31])})


def stated(case: Case) -> Tensor:
    """Equation 15 in float64, one voting row, query head and key at a time. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    size, kv_heads, reach = attrs["head_size"], attrs["kv_heads"], attrs["pool"] // 2
    q = given["q"].double()
    heads = q.shape[1] // size
    found = torch.zeros(case.outputs["importance"].shape, dtype=F64)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for b, (low, high) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        pieces, begin = entries[bounds[b] : bounds[b + 1]], int(given["first"][b])
        offsets = [offset for offset in given["listed"][b].tolist() if offset >= 0]
        kept = rows_of(given["kv"], pieces, attrs["layer"], kv_heads, size, begin + max(offsets, default=0) + 1)
        for row in [row for row in range(low, high) if offsets and given["votes"][row]]:
            for head in range(heads):
                own = head * kv_heads // heads
                query = q[row, head * size : (head + 1) * size]
                scores = [float(kept[begin + offset][0, own].double() @ query) * attrs["scale"] for offset in offsets]
                pooled = [max(scores[max(j - reach, 0) : j + reach + 1]) for j in range(len(scores))]
                for offset, p in zip(offsets, torch.tensor(pooled, dtype=F64).softmax(0).tolist(), strict=True):
                    found[b, own, offset] += p
    return found


def assert_stated(case: Case, found: Tensor, slack: float = 1.0) -> None:
    """Probabilities of scores off by delta change by that share twice; then the roundings of a softmax and of a sum."""
    expected, dtype, size = stated(case), case.operands["q"].dtype, case.attrs["head_size"]
    largest = size * float(case.operands["q"].double().abs().nan_to_num().max()) * float(
        case.operands["kv"].double().abs().nan_to_num().max()
    )  # fmt: skip
    delta = 2.1 * gamma(size + 8, dtype) * largest * case.attrs["scale"]
    terms = case.operands["q"].shape[0] * case.operands["q"].shape[1] // size
    share = 2.1 * delta + gamma(expected.shape[2] + 8 + 2 * terms, dtype)
    assert_within(found, expected, slack * (expected * share + rounding(expected, F32) + unit(F32)))


SEEDS = range(16)


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_on_the_cpu(dtype: torch.dtype) -> None:
    for seed in SEEDS:
        case = drawn(seed, dtype)
        case.launch()
        assert_stated(case, case.outputs["importance"])
        check_allocates_nothing(case)


def test_reference() -> None:
    for seed in SEEDS:
        case = drawn(seed, F64)
        torch.testing.assert_close(case.reference(), stated(case), rtol=1e-10, atol=1e-12)


def test_a_block_whose_rows_are_more_than_a_tile_has() -> None:
    """32 tokens of 20 query heads of one key-value head, on the CPU in several tiles."""
    given = kv_case([(32, 38, 6)], 20, 1, 4, F32)
    operands = {name: given.operands[name] for name in NAMES}
    operands |= {
        "votes": torch.ones(32, dtype=torch.uint8), "first": torch.tensor([6], dtype=torch.int32),
        "listed": torch.arange(32, dtype=torch.int32)[None],
    }  # fmt: skip
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    case = Case("token_importance", operands, {"importance": torch.empty(1, 1, 32)}, attrs | {"pool": 3})
    case.launch()
    assert_stated(case, case.outputs["importance"])
    assert case.outputs["importance"].sum() == pytest.approx(32 * 20, rel=1e-5)


@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_in_triton(dtype: torch.dtype) -> None:
    for seed in range(10) if dtype == F32 else (3, 5, 11):
        case = drawn(seed, dtype, most=20)
        assert_stated(case, run(case, DEVICE)["importance"], slack=2)


TOKENS, SEQS, ROWS, EXTENTS = (symbol(name) for name in ("t", "b", "r", "x"))
GIVEN: dict[str, Any] = {
    "q": Spec((TOKENS, 32), "bfloat16"), "kv": Spec((ROWS, 3 * 2 * 16), "bfloat16"), "extents": Spec((EXTENTS, 4), "int64"),
    "cu_extents": Spec((SEQS + 1,), "int32"), "cu_seqlens": Spec((SEQS + 1,), "int32"), "votes": Spec((TOKENS,), "uint8"),
    "first": Spec((SEQS,), "int32"), "listed": Spec((SEQS, 8), "int32"),
}  # fmt: skip
ATTRS: dict[str, Any] = {"layer": 1, "kv_heads": 2, "head_size": 8, "scale": 0.5, "pool": 3}


def test_the_shape_follows_from_operands() -> None:
    assert operator("token_importance").work(**GIVEN, **ATTRS).outputs == (Spec((SEQS, 2, 8), "float32"),)


@pytest.mark.parametrize(("changed", "message"), [
    ({"kv": Spec((ROWS, 96), "float32")}, r"operand 'kv' is .*, expected bfloat16\[r, 96\]"),
    ({"kv_heads": 3}, r"operand 'q' is .*, expected bfloat16\[t, G\*3\*8\]"),
    ({"layer": 3}, "layer 3"),
    ({"extents": Spec((EXTENTS, 4), "int32")}, r"operand 'extents' is .*, expected int64\[x, 4\]"),
    ({"votes": Spec((TOKENS,), "bool")}, r"operand 'votes' is .*, expected uint8\[t\]"),
    ({"first": Spec((SEQS + 1,), "int32")}, r"operand 'first' is .*, expected int32\[b\]"),
    ({"listed": Spec((SEQS,), "int32")}, r"operand 'listed' is .*, expected int32\[b, P\]"),
    ({"listed": Spec((TOKENS, 8), "int32")}, r"operand 'listed' is .*, expected int32\[b, [8P]\]"),
    ({"listed": Spec((SEQS, 8), "int64")}, r"operand 'listed' is .*, expected int32\[b, [8P]\]"),
    ({"pool": 2}, "pool must be odd, not 2"),
    ({"pool": -1}, "pool must be odd, not -1"),
])  # fmt: skip
def test_operands_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        operator("token_importance").work(**{**GIVEN, **ATTRS, **changed})


@pytest.mark.parametrize(("changed", "message"), [
    ({"pool": 4}, "pool must be odd, not 4"),
    ({"layer": 3}, "not layer 3"),
    ({"listed": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]}, "stride 2 inside a row"),
    ({"importance": torch.empty(2, 1, 6)[..., :3]}, "must lie side by side"),
    ({"first": torch.zeros(2)}, "operand 'first' is"),
])  # fmt: skip
def test_a_launch_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = kv_case([(3, 5, 2), (2, 4, 1)], 2, 1, 4, F32)
    operands = {name: given.operands[name] for name in NAMES}
    operands |= {
        "votes": torch.ones(5, dtype=torch.uint8), "first": torch.tensor([2, 1], dtype=torch.int32),
        "listed": torch.arange(3, dtype=torch.int32).repeat(2, 1), "importance": torch.empty(2, 1, 3),
    }  # fmt: skip
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    with pytest.raises(GraphError, match=message):
        load("token_importance").launch(**{**operands, **attrs, **changed})
