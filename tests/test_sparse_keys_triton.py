"""The operators of sparse keys in Triton's interpreter, or on a GPU: random batches against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32
from test_sparse_keys_kernels import (
    assert_attended,
    assert_rows,
    assert_scores,
    attention_case,
    bound_case,
    pack_case,
    score_case,
    select_case,
    stated_bounds,
    stated_packed,
)
from test_triton_kernels import INTERPRETED, run

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize(("each", "over"), [("kv", "max"), ("kv", "mean"), ("query", "max")])
def test_scores_of_keys_in_triton(each: str, over: str) -> None:
    for seed in range(4):
        case = score_case(seed, [F32, BF16][seed % 2], each, over, longest=90 if seed == 2 else 20)
        assert_scores(case, run(case, DEVICE)["scores"])


def test_selected_rows_in_triton() -> None:
    for seed in range(12):
        case = select_case(seed, longest=[40, 40, 330][seed % 3])
        assert_rows(case, run(case, DEVICE)["chosen"])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_packed_keys_in_triton(dtype: torch.dtype) -> None:
    for seed in range(5):
        case = pack_case(seed, dtype, BF16 if seed == 3 else None, longest=50)
        expected = stated_packed(case)
        assert torch.equal(run(case, DEVICE)["kv"], expected)


def test_bounds_of_parts_in_triton() -> None:
    for seed in range(6):
        case = bound_case(seed, longest=400 if seed == 5 else 40)
        expected = stated_bounds(case)
        assert torch.equal(run(case, DEVICE)["held"], expected)


def test_many_parts_are_bounded_in_triton() -> None:
    """More than one program takes at a time."""
    case = bound_case(1)
    case.operands["chosen"] = (
        torch.arange(0, 300, 3, dtype=torch.int32).expand(len(case.operands["chosen"]), 100).clone()
    )
    spans = [[300, 301, 300, 301, 100], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    case.operands |= {"spans": torch.tensor(spans).int(), "cu_seqlens": torch.tensor([0, 301, 301, 301]).int()}
    case.operands |= {
        "held_rows": torch.tensor([[2, 150], [0, 0], [0, 0]]),
        "held": case.operands["held"][:1].expand(160, -1).clone(),
    }
    expected = stated_bounds(case)
    assert torch.equal(run(case, DEVICE)["held"], expected)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_attention_to_packed_keys_in_triton(dtype: torch.dtype) -> None:
    for seed in range(5):
        case = attention_case(seed, dtype, BF16 if seed == 3 else None, longest=90 if seed == 2 else 30)
        assert_attended(case, run(case, DEVICE)["y"], rounded=True)
    case = attention_case(6, dtype)
    assert_attended(case, run(case, DEVICE)["y"], rounded=True)
    taken = run(case, DEVICE, {"y": "q"})["q"]
    rows = int(case.operands["cu_seqlens"][-1])
    assert torch.equal(taken[:rows], run(case, DEVICE)["y"][:rows])
