"""prefix_attention, joined_attention and query_change in Triton's interpreter, or on a GPU: random batches against float64."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32, assert_within, name_of, unit
from test_kv import kv_bound, kv_case, softmax_rows
from test_prefix_reuse_kernels import (
    assert_change,
    assert_joined,
    assert_summed,
    change_case,
    halves,
    joined_case,
    prefix_case,
    summed,
)
from test_triton_kernels import INTERPRETED, run

from mosaic.registrar.operators.kv_attention import KV_SEGMENT_KEYS

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.mark.parametrize(("name", "dtype"), [("blocks end with the keys", BF16), ("no tokens", F32)], ids=str)
def test_prefix_attention_in_triton(name: str, dtype: torch.dtype) -> None:
    case = prefix_case(name, dtype)
    assert_summed(case, run(case, DEVICE), slack=2)


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.soak)], ids=name_of)
def test_sums_of_segments_are_joined_in_triton(dtype: torch.dtype) -> None:
    """In programs of their own, and in one; to the same bits."""
    case = summed(
        kv_case([(3, 2 * KV_SEGMENT_KEYS + 70, 2 * KV_SEGMENT_KEYS + 64), (2, 0, 0)], 4, 2, 4, dtype, block=4)
    )
    assert case.attrs["parts"] > 1
    apart = run(case, DEVICE)
    assert_summed(case, apart, slack=2)
    together = run(replace(case, attrs=case.attrs | {"parts": 1}), DEVICE)
    for name, found in apart.items():
        torch.testing.assert_close(together[name], found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("fresh", "dtype", "seeds"),
    [
        (True, F32, (0, 1, 4, 6, 7)),
        (False, BF16, (2, 3, 9)),
        pytest.param(True, BF16, range(10, 40), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_joined_attention_in_triton(fresh: bool, dtype: torch.dtype, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        case = joined_case(seed, dtype, fresh=fresh)
        assert_joined(case, run(case, DEVICE), slack=2)


def test_joined_attention_without_states_in_triton() -> None:
    for seed in (1, 4, 6):
        case = joined_case(seed, F32, fresh=True, held=False)
        assert_joined(case, run(case, DEVICE), slack=2)


def test_joined_attention_over_its_queries_in_triton() -> None:
    case = joined_case(6, F32, fresh=True)
    apart, over = run(case, DEVICE)["y"], run(case, DEVICE, alias={"y": "q"})["q"]
    assert torch.equal(over, torch.where(apart.isnan(), case.operands["q"], apart))


def test_prefix_and_block_joined_are_attention_to_both_in_triton() -> None:
    whole, part, joined = halves(BF16)
    found = run(part, DEVICE)
    given = joined.operands | {"fresh": found["y"], "fresh_sums": found["logsumexp"]}
    y, (expected, _) = run(replace(joined, operands=given), DEVICE)["y"], softmax_rows(whole)
    roundings = 8 * unit(BF16) * softmax_rows(whole, absolute=True)[0]  # of weights and results, twice
    assert_within(y, expected, kv_bound(whole, expected) + roundings)


@pytest.mark.parametrize(("fresh", "dtype"), [(True, F32), (False, BF16), (False, F32)], ids=str)
def test_change_of_queries_in_triton(fresh: bool, dtype: torch.dtype) -> None:
    for seed in (0, 3, 5):
        case = change_case(seed, dtype, fresh=fresh)
        assert_change(case, run(case, DEVICE))
