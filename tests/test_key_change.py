"""key_change: random batches against float64, on the CPU, in Triton's interpreter or on a GPU. Written apart from the kernels."""

from __future__ import annotations

import importlib.util
import math
import random

import pytest
import torch
from test_kernels import BF16, DTYPES, F32, F64, Case, check_allocates_nothing, gamma, name_of, strided
from test_kv import scattered, starts, tables

from mosaic.errors import GraphError
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract


def change_case(seed: int, dtype: torch.dtype, kept_in: torch.dtype | None = None) -> Case:
    """Windows of sequences whose rows lie in one extent or several; some keys are as they were, some positions have no row."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, size, layers = rng.choice([1, 2, 3]), rng.choice([4, 5, 16]), rng.randint(1, 3)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 3))]
    owned, rows = scattered(lengths, seed)
    windows = [rng.randint(0, length) for length in lengths]
    firsts = [rng.randint(0, length - window) for length, window in zip(lengths, windows, strict=True)]
    firsts[0] += seed % 2
    positions = [first + at for first, window in zip(firsts, windows, strict=True) for at in range(window)]
    kv = torch.randn(rows, layers * 2 * heads * size, generator=generator).to(kept_in or dtype)
    operands = {
        "k": strided(torch.randn(len(positions) + 1, heads * size, generator=generator).to(dtype)), "kv": kv, **tables(owned),
        "cu_seqlens": starts(windows), "positions": torch.tensor([*positions, 0], dtype=torch.int32),
    }  # fmt: skip
    attrs = {"layer": rng.randrange(layers), "head_size": size}
    if seed % 3 == 0:  # nothing has changed
        for row, key in enumerate(old_keys(Case("key_change", operands, {}, attrs))[:-1]):
            if key is not None:
                operands["k"][row] = key.to(dtype)
    return Case("key_change", operands, {"change": torch.empty(len(lengths))}, attrs)


def old_keys(case: Case) -> list[torch.Tensor | None]:
    """The kept key of each row in float64, by the layout of one long vector; None where there is none, or no sequence."""
    given, size = case.operands, case.attrs["head_size"]
    flat, columns = given["kv"].double().view(-1), given["kv"].shape[1]
    heads, found = given["k"].shape[1] // size, []
    for row in range(len(given["k"])):
        found.append(None)
        for b, (start, end) in enumerate(
            zip(given["cu_seqlens"][:-1].tolist(), given["cu_seqlens"][1:].tolist(), strict=True)
        ):
            mine = given["extents"][given["cu_extents"][b] : given["cu_extents"][b + 1]].tolist()
            for number, (base, rows, first, before) in enumerate(mine):
                last = mine[number + 1][2] if number + 1 < len(mine) else first + rows - before
                position = int(given["positions"][row])
                if not (start <= row < end and first <= position < last):
                    continue
                token = position - first + before
                at = [
                    base * columns + (2 * case.attrs["layer"] * heads + head) * rows * size + token * size
                    for head in range(heads)
                ]
                found[-1] = torch.cat([flat[place : place + size] for place in at])
    return found


def assert_changes(case: Case, change: torch.Tensor, dtype: torch.dtype) -> None:
    old, bounds = old_keys(case), case.operands["cu_seqlens"].tolist()
    for b in range(len(bounds) - 1):
        pairs = [
            (case.operands["k"][row].double(), key)
            for row in range(bounds[b], bounds[b + 1])
            if (key := old[row]) is not None
        ]
        apart = sum(float((new - kept).square().sum()) for new, kept in pairs)
        expected = math.sqrt(apart / sum(float(kept.square().sum()) for _, kept in pairs)) if apart else 0.0
        terms = 2 + len(pairs) * case.operands["k"].shape[1]
        assert float(change[b]) == pytest.approx(expected, rel=gamma(terms + 8, dtype), abs=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_changes_of_keys(dtype: torch.dtype) -> None:
    for seed in range(12):
        case = change_case(seed, dtype, BF16 if seed == 4 else None)
        case.launch()
        assert_changes(case, case.outputs["change"], F32)
        if dtype == F64:
            assert_changes(case, case.reference(), F64)
    check_allocates_nothing(change_case(1, dtype))


def test_a_layer_that_is_not_kept_is_refused() -> None:
    case, record = change_case(1, F32), contract("key_change")
    specs = [Spec(tuple(case.operands[name].shape), name_of(case.operands[name].dtype)) for name in record.reads]
    with pytest.raises(GraphError, match="not layer 7"):
        record.work(*specs, **case.attrs | {"layer": 7})


if importlib.util.find_spec("triton") is not None:
    from test_triton_kernels import INTERPRETED, run

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
    @(lambda function: function) if INTERPRETED else pytest.mark.gpu
    def test_changes_of_keys_in_triton(dtype: torch.dtype) -> None:
        for seed in range(6):
            case = change_case(seed, dtype, BF16 if seed == 4 else None)
            assert_changes(case, run(case, "cpu" if INTERPRETED else "cuda")["change"], F32)
