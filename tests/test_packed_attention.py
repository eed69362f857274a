"""bound_parts and packed_attention: random batches against statements in float64. Written apart from the kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_kernels import (
    BF16,
    DTYPES,
    F32,
    F64,
    OTHERS_SOAK,
    Case,
    assert_within,
    check_allocates_nothing,
    gamma,
    name_of,
    rounding,
    strided,
    unit,
)
from test_kv import starts
from test_sparse_keys_kernels import HEADS, held_by, held_in
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract


def bound_case(seed: int, longest: int = 40) -> Case:
    """Chosen rows of sequences whose first rows are cut into parts; behind their span others may be chosen."""
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 5), rng.randint(1, longest // 5), rng.randint(1, 9), rng.randint(0, 3)) for _ in range(3)]
    sizes[seed % 3] = (0, 0, 0, 0)
    lengths = [parts * size + span + after for parts, size, span, after in sizes]
    spans, lists, heads = [], 1, rng.choice([1, 2, 3])
    if rng.randint(0, 1):
        lists, heads = heads, 1
    chosen = torch.full((lists, sum(lengths) + 2), -1, dtype=torch.int32)
    for start, (parts, size, span, after) in zip(starts(lengths)[:-1].tolist(), sizes, strict=True):
        low = parts * size
        candidates = [start + r for r in (*range(low), *range(low + span, low + span + after))]
        kept = rng.randint(1, len(candidates)) if candidates else 0
        spans.append([low, low + 1, low, low + span, kept])
        for own in chosen:
            own[start : start + kept] = torch.tensor(sorted(rng.sample(candidates, kept)), dtype=torch.int32)
    rows, slot = torch.tensor([[7, 0], [12, 0], [1, 0]]), rng.randint(0, 2)
    rows[:, 1] = torch.tensor([parts for parts, *_ in sizes])
    operands = {
        "chosen": chosen, "spans": torch.tensor(spans, dtype=torch.int32), "cu_seqlens": starts(lengths), "held_rows": rows,
        "held": torch.full((18, 3 * 2 * lists * heads), -5, dtype=torch.int32),
    }  # fmt: skip
    return Case("bound_parts", operands, attrs={"slot": slot, "kv_heads": lists * heads, "heads": heads})


def stated_bounds(case: Case) -> Tensor:
    """Every part's packed rows, found among all of them one by one."""
    given, heads = case.operands, case.attrs["heads"]
    after = given["held"].clone()
    for b, (_, _, low, _, kept) in enumerate(given["spans"].tolist()):
        (row, parts), start = given["held_rows"][b].tolist(), int(given["cu_seqlens"][b])
        for part in range(parts):
            for head in range(len(given["chosen"]) * heads):
                of_part = range(start + low // parts * part, start + low // parts * (part + 1))
                mine = given["chosen"][head // heads, start : start + kept].tolist()
                first = len([r for r in mine if r < of_part.start])
                at = 2 * (case.attrs["slot"] * case.attrs["kv_heads"] + head)
                after[row + part, at] = first
                after[row + part, at + 1] = first + len([r for r in mine if r in of_part])
    return after


def attention_case(
    seed: int, dtype: torch.dtype, kept_in: torch.dtype | None = None, longest: int = 40, size: int = 0
) -> Case:
    """Rows of a few sequences, and packed keys of which each head leaves out some, none or all."""
    rng = random.Random(seed)
    (heads, kv_heads), size, layers = HEADS[seed % len(HEADS)], size or rng.choice([4, 5, 16]), rng.randint(1, 3)
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 3))]
    lengths.insert(rng.randint(0, len(lengths)), 0)
    kept = [rng.randint(1, longest) if length else 0 for length in lengths]
    tokens, generator = sum(lengths) + 2, torch.Generator().manual_seed(seed)
    rows = [count + rng.randint(1, 4) for count in kept]
    held, slot = held_by(rng, kept, kv_heads)
    extents = [[3 + sum(rows[:b]), rows[b], 0, 0] for b in range(len(rows))]
    kv = torch.randn(sum(rows) + 4, layers * 2 * kv_heads * size, generator=generator)
    operands = {
        name: strided(torch.randn(tokens, count * size, generator=generator).to(dtype))
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    } | {
        "kv": kv.to(kept_in or dtype), "extents": torch.tensor(extents), **held, "cu_seqlens": starts(lengths),
        "spans": torch.tensor([[0, 1, 0, 1, count] for count in kept], dtype=torch.int32),
    }  # fmt: skip
    attrs = {
        "layer": rng.randrange(layers), "slot": slot, "kv_heads": kv_heads, "head_size": size, "scale": size**-0.5,
        "span": longest, "keys": longest,
    }  # fmt: skip
    return Case("packed_attention", operands, {"y": torch.empty(tokens, heads * size, dtype=dtype)}, attrs)


def stated_attention(case: Case, *, absolute: bool = False) -> Tensor:
    """In float64, a row and head at a time; NaN in rows of nobody."""
    given, size, heads = case.operands, case.attrs["head_size"], case.attrs["kv_heads"]
    flat, columns = given["kv"].double().view(-1), given["kv"].shape[1]
    q, k, v = (given[name].double() for name in "qkv")
    y, bounds, group = torch.full_like(q, float("nan")), given["cu_seqlens"].tolist(), q.shape[1] // size // heads
    for b, (row, rows, *_) in enumerate(given["extents"].tolist()):
        for head in range(q.shape[1] // size):
            mine, keys, values = head // group, [], []
            first, last = held_in(case, b, mine)
            for j in (j for j in range(int(given["spans"][b, 4])) if not first <= j < last):
                places = [
                    row * columns + ((2 * case.attrs["layer"] + place) * heads + mine) * rows * size + j * size
                    for place in (0, 1)
                ]
                keys.append(flat[places[0] : places[0] + size])
                values.append(flat[places[1] : places[1] + size])
            for r in range(bounds[b], bounds[b + 1]):
                keys.append(k[r, mine * size : (mine + 1) * size])
                values.append(v[r, mine * size : (mine + 1) * size])
            of_head = slice(head * size, (head + 1) * size)
            for r in range(bounds[b], bounds[b + 1]):
                weights = torch.softmax(torch.stack(keys) @ q[r, of_head] * case.attrs["scale"], 0)
                both = torch.stack(values)
                y[r, of_head] = weights @ (both.abs() if absolute else both)
    return y


def assert_attended(case: Case, y: Tensor, *, rounded: bool = False) -> None:
    """As `attention_bound` of `test_kernels`; `rounded`: weights are rounded before they meet values, and exp2 errs as they do."""
    expected, magnitude = stated_attention(case), stated_attention(case, absolute=True)
    dtype, known = case.operands["q"].dtype, ~expected.isnan()
    size, keys = case.attrs["head_size"], case.operands["q"].shape[0] + int(case.operands["spans"][:, 4].max())
    longest = {
        name: float(case.operands[name].double().unflatten(1, (-1, size)).norm(dim=2).max())
        for name in ("q", "k", "kv")
    }
    delta = gamma(size + 4, dtype) * longest["q"] * max(longest["k"], longest["kv"]) * case.attrs["scale"]
    bound = (2.1 * delta + gamma(2 * keys + 40, dtype)) * magnitude + rounding(expected, dtype)
    bound = 2 * bound + unit(dtype) * magnitude if rounded else bound
    assert_within(y[known], expected[known], bound[known])
    assert y[~known].isnan().all()  # as it was


def test_bounds_of_parts() -> None:
    for seed in range(20):
        case = bound_case(seed)
        expected = stated_bounds(case)
        assert torch.equal(case.reference(), expected)
        case.launch()
        assert torch.equal(case.operands["held"], expected)


def test_heads_at_a_time_bound_their_own_parts() -> None:
    case = next(
        case for case in map(bound_case, range(50)) if len(case.operands["chosen"]) == 3 and case.attrs["heads"] == 1
    )
    expected = stated_bounds(case)
    for first, end in ((0, 2), (2, 3)):
        part = case.operands | {"chosen": case.operands["chosen"][first:end]}
        load("bound_parts").launch(**part, **case.attrs, row_start=first)
    assert torch.equal(case.operands["held"], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_attention_to_packed_keys_and_own_ones(dtype: torch.dtype) -> None:
    for seed in range(6):
        case = attention_case(seed, dtype, BF16 if seed % 3 == 0 else None)
        case.launch()
        assert_attended(case, case.outputs["y"])
        if dtype == F64:
            assert_attended(case, case.reference())
    case = attention_case(2, F32, longest=1500, size=4)  # several tiles of keys and of queries
    case.launch()
    torch.testing.assert_close(case.outputs["y"][:-2], case.reference()[:-2].float(), rtol=1e-4, atol=1e-5)


def test_attention_to_packed_keys_may_overwrite_queries() -> None:
    case = attention_case(7, F32)
    case.launch()
    given = case.operands | {"y": case.operands["q"]}
    load("packed_attention").launch(**given, **case.attrs, scratch=case.scratch())
    rows = int(case.operands["cu_seqlens"][-1])
    assert torch.equal(case.operands["q"][:rows], case.outputs["y"][:rows])


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    for seed in range(3):
        check_allocates_nothing(bound_case(seed))
        check_allocates_nothing(attention_case(seed, dtype))


@pytest.mark.parametrize(
    ("case", "attrs", "message"),
    [
        (attention_case(0, F32), {"layer": 7}, "not layer 7"),
        (attention_case(0, F32), {"slot": 3}, "not layer 3"),
        (bound_case(0), {"slot": -1}, "not layer -1"),
        (bound_case(0), {"heads": 9}, "heads must be 1 or all"),
        (attention_case(0, F32), {"scale": 0.0}, "scale must be positive, not 0.0"),
    ],
)
def test_bad_operands(case: Case, attrs: dict[str, Any], message: str) -> None:
    record = contract(case.kernel)
    given = [case.operands[name] for read in record.reads if (name := read.removesuffix("?")) in case.operands]
    specs = [Spec(tuple(operand.shape), name_of(operand.dtype)) for operand in given]
    with pytest.raises(GraphError, match=message):
        record.work(*specs, **case.attrs | attrs)
