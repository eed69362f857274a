"""selected_attention: random batches against float64 on the CPU. Written apart from the kernel."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_kernels import (
    BF16,
    DTYPES,
    F32,
    OTHERS_SOAK,
    Case,
    assert_within,
    check_allocates_nothing,
    gamma,
    name_of,
    rounding,
    unit,
)
from test_kv import kv_case, rows_of
from test_selection_of_keys import GROUPS, in_tile, tiles_of
from torch import Tensor

from mosaic.kernels import load

UNREAD = 1 << 30  # no page has this number


def selected_case(
    seed: int, dtype: torch.dtype, block: int = 0, longest: int = 90, whole: bool = False, rows: int = 0
) -> Case:
    """Windows behind, or amid, prefixes of which random pages are selected; all pages if `whole`."""
    rng = random.Random(seed)
    group, kv_heads = GROUPS[seed % len(GROUPS)]
    page, size = [1, 2, 4, 16][seed % 4], rng.choice([4, 5, 16])
    windows, prefixes = [], []
    for _ in range(rng.randint(1, 4)):
        prefix, tokens = rng.choice([0, 1, rng.randint(2, longest)]), rng.choice([0, 1, rng.randint(2, 9)])
        keys = prefix + tokens + rng.choice([0, 0, 3])
        first = keys - tokens if rng.random() < 0.8 else rng.randint(0, keys - tokens)
        windows.append((tokens, keys, first))
        prefixes.append(prefix)
    case = kv_case(windows, group * kv_heads, kv_heads, size, dtype, block=block, padding=2)
    sets = kv_heads * rng.choice([n for n in range(1, group + 1) if group % n == 0])
    k = -(-longest // page) * page if whole else page * rng.choice([1, 3, 8])
    slots, slot = 3, rng.randrange(3)
    tiles = -(-block // rows) if rows else 1
    selected = torch.full((len(windows) + 2, slots * sets * tiles * (1 + k // page)), UNREAD, dtype=torch.int32)
    owner = rng.sample(range(len(windows) + 2), len(windows))
    for b, prefix in enumerate(prefixes):
        for own in range(sets * tiles if prefix else 0):
            pages = range(-(-prefix // page))
            count = min(k // page, len(pages)) if whole else rng.randint(0, min(k // page, len(pages)))
            place = selected[owner[b], (slot * sets * tiles + own) * (1 + k // page) :]
            place[: 1 + count] = torch.tensor([count, *sorted(rng.sample(pages, count))])
    operands = case.operands | {
        "selected": selected, "owner": torch.tensor(owner), "captured": torch.tensor(prefixes, dtype=torch.int32)
    }  # fmt: skip
    attrs = {name: case.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
    attrs |= {"slot": slot, "sets": sets, "k": k, "page": page} | (tiles_of(block, rows) if rows else {})
    return Case("selected_attention", operands, case.outputs, attrs)


def attention_to_selected(case: Case, row_start: int = 0, *, absolute: bool = False) -> tuple[Tensor, Tensor]:
    """In float64, one query row and head at a time, and which rows see a key in each head. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    size, kv_heads, sets, page, block = (attrs[n] for n in ("head_size", "kv_heads", "sets", "page", "block"))
    q, heads = given["q"].double(), given["q"].shape[1] // size
    y, sees = torch.zeros_like(q), torch.zeros(q.shape, dtype=torch.bool)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for b, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        seen, prefix = int(given["seen"][b]), int(given["captured"][b])
        pieces = entries[bounds[b] : bounds[b + 1]]
        kept = [x.double() for x in rows_of(given["kv"], pieces, attrs["layer"], kv_heads, size, seen)]
        for row in range(max(first - row_start, 0), min(last - row_start, q.shape[0])):
            for head in range(heads):
                own = (attrs["slot"] * sets + head * sets // heads) * attrs.get("tiles", 1) + in_tile(case, row)
                at = own * (1 + attrs["k"] // page)
                listed = given["selected"][given["owner"][b], at:].tolist() if prefix else [0]
                pages = set(listed[1 : 1 + listed[0]])
                keys = [j for j in range(seen) if j >= prefix or j // page in pages]
                if block:
                    keys = [j for j in keys if j < (int(given["positions"][row]) // block + 1) * block]
                if keys:
                    k, v = torch.stack([kept[j][:, head * kv_heads // heads] for j in keys]).unbind(1)
                    columns = slice(head * size, (head + 1) * size)
                    weights = torch.softmax(k @ q[row, columns] * attrs["scale"], 0)
                    y[row, columns] = weights @ (v.abs() if absolute else v)
                    sees[row, columns] = True
    return y, sees


def attended_bound(case: Case, expected: Tensor, row_start: int = 0, *, triton: bool = False) -> Tensor:
    """Like `kv_bound` and `triton_bound` of `kv_attention`."""
    dtype, attrs = case.operands["q"].dtype, case.attrs
    q, kv = (case.operands[n].double().nan_to_num(0.0).unflatten(1, (-1, attrs["head_size"])) for n in ("q", "kv"))
    delta = gamma(attrs["head_size"] + 4, dtype) * float(q.norm(dim=2).max() * kv.norm(dim=2).max()) * attrs["scale"]
    magnitude, _ = attention_to_selected(case, row_start, absolute=True)
    bound = (2.1 * delta + gamma(2 * int(case.operands["seen"].max()) + 40, dtype)) * magnitude + rounding(
        expected, dtype
    )
    return 2 * bound + unit(dtype) * magnitude if triton else bound


def assert_attended(case: Case, y: Tensor, before: Tensor, row_start: int = 0, *, triton: bool = False) -> None:
    expected, sees = attention_to_selected(case, row_start)
    assert_within(y[sees], expected[sees], attended_bound(case, expected, row_start, triton=triton)[sees])
    torch.testing.assert_close(y[~sees], before[~sees], rtol=0, atol=0, equal_nan=True)


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("block", "rows"), [(0, 0), (4, 0), (4, 3), (32, 2)])
def test_selected_attention(block: int, rows: int, dtype: torch.dtype) -> None:
    for seed in range(10):
        case = selected_case(seed, dtype, block, rows=rows)
        case.launch()
        assert_attended(case, case.outputs["y"], torch.full_like(case.outputs["y"], float("nan")))
        expected, sees = attention_to_selected(case)
        torch.testing.assert_close(case.reference()[sees], expected[sees])


@pytest.mark.parametrize("block", [0, 4])
def test_all_pages_selected_are_all_keys(block: int) -> None:
    """With k not less than a prefix it is kv_attention."""
    for seed in range(8):
        case = selected_case(seed, F32, block, whole=True)
        case.launch()
        names = ("q", "kv", "extents", "cu_extents", "seen", "cu_seqlens", "positions")
        attrs = {name: case.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
        y = torch.empty_like(case.outputs["y"])
        whole = Case("kv_attention", {name: case.operands[name] for name in names}, {"y": y}, attrs)
        whole.launch()
        torch.testing.assert_close(case.outputs["y"], y, rtol=1e-4, atol=1e-5, equal_nan=True)


def long_case(dtype: torch.dtype, tokens: int = 300) -> Case:
    """More selected keys, own keys and rows than a tile has."""
    case = kv_case([(tokens, 3000 + tokens, 3000)], 2, 1, 4, dtype, block=4)
    k, page = 1536, 2
    selected = torch.zeros(1, 1 + k // page, dtype=torch.int32)
    selected[0, 0] = k // page
    selected[0, 1:] = torch.randperm(900, generator=torch.Generator().manual_seed(1))[: k // page].sort().values
    operands = case.operands | {
        "selected": selected, "owner": torch.zeros(1, dtype=torch.int64), "captured": torch.tensor([1799], dtype=torch.int32)
    }  # fmt: skip
    attrs = {name: case.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
    attrs |= {"slot": 0, "sets": 1, "k": k, "page": page}
    return Case("selected_attention", operands, case.outputs, attrs)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_more_selected_keys_than_a_tile_has(dtype: torch.dtype) -> None:
    case = long_case(dtype)
    case.launch()
    torch.testing.assert_close(
        case.outputs["y"].double(), case.reference(), rtol=2e-2 if dtype == BF16 else 1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_selected_attention_may_overwrite_its_queries(dtype: torch.dtype) -> None:
    for seed in range(5):
        case = selected_case(seed, dtype, 4)
        before, q = case.operands["q"].clone(), case.operands["q"]
        expected, sees = attention_to_selected(case)
        bound = attended_bound(case, expected)
        load("selected_attention").launch(**case.operands, **case.attrs, y=q, scratch=case.scratch())
        assert_within(q[sees], expected[sees], bound[sees])
        assert torch.equal(q[~sees], before[~sees])


def slices_of(case: Case) -> list[tuple[int, Case]]:
    """The case in slices of rows, and where each starts."""
    rows, found = case.operands["q"].shape[0], []
    cuts = [0, rows // 3, rows // 3 + 1, rows]
    for start, end in pairwise(cuts):
        part = {name: case.operands[name][start:end] for name in ("q", "positions")}
        y = torch.full_like(case.outputs["y"][start:end], float("nan"))
        found.append((start, replace(case, operands=case.operands | part, outputs={"y": y})))
    return found


def test_a_slice_of_a_window_knows_where_it_starts() -> None:
    for seed in range(5):
        for start, part in slices_of(selected_case(seed, F32, 4, rows=2)):
            y = part.outputs["y"]
            before = y.clone()
            load("selected_attention").launch(
                **part.operands, **part.attrs, y=y, row_start=start, scratch=part.scratch()
            )
            assert_attended(part, y, before, start)


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
def test_selected_attention_allocates_nothing(dtype: torch.dtype) -> None:
    for seed in range(3):
        check_allocates_nothing(selected_case(seed, dtype, block=4, rows=3 * (seed % 2)))
    check_allocates_nothing(long_case(dtype))
