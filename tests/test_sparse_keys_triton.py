"""score_keys, select_keys and pack_keys in Triton's interpreter, or on a GPU: random batches against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32
from test_sparse_keys_kernels import assert_rows, assert_scores, pack_case, score_case, select_case, stated_packed
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
