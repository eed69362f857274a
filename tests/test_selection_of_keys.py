"""key_mass, top_keys and selected_attention: random batches against float64, on the CPU and in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import sympy
import torch
from operator_tables import scratch_bytes
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
    strided,
    unit,
)
from test_kv import kv_case, rows_of, starts
from torch import Tensor

from mosaic.errors import GraphError, RuntimeMemoryError, UnknownName
from mosaic.kernels import load
from mosaic.planner import plan_graph
from mosaic.planner.check import check_plan
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.operators.key_mass import splits_of

GROUPS = [(1, 2), (4, 2), (7, 1), (8, 1), (3, 3)]  # query heads of a key-value head, and how many of these
UNREAD = 1 << 30  # no page has this number


def key_mass_case(seed: int, dtype: torch.dtype, statistic: str = "mean", longest: int = 90, gaps: int = 2) -> Case:
    """Sequences with prefixes of 0 to `longest` keys, of which some rows vote; columns of `mass` that are nobody's."""
    rng = random.Random(seed)
    group, kv_heads = GROUPS[seed % len(GROUPS)]
    size = rng.choice([4, 5, 16])
    prefixes = [rng.choice([0, 1, rng.randint(2, longest)]) for _ in range(rng.randint(1, 3))] + [
        rng.randint(2, longest)
    ]
    rng.shuffle(prefixes)
    windows = [
        (tokens, keys + tokens, keys) for keys in prefixes for tokens in (rng.choice([0, 1, rng.randint(2, 9)]),)
    ]
    given = kv_case(windows, group * kv_heads, kv_heads, size, dtype, padding=2)
    operands = {name: given.operands[name] for name in ("q", "kv", "extents", "cu_extents", "cu_seqlens")}
    rows = operands["q"].shape[0]
    operands |= {
        "captured": torch.tensor(prefixes, dtype=torch.int32),
        "cu_keys": starts([keys + rng.choice([0, gaps]) for keys in prefixes]),
        "votes": torch.tensor([rng.random() < 0.7 for _ in range(rows)], dtype=torch.uint8),
    }
    sets = kv_heads * rng.choice([n for n in range(1, group + 1) if group % n == 0])
    columns = int(operands["cu_keys"][-1]) + 3
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    attrs |= {"sets": sets, "columns": columns, "statistic": statistic}
    return Case("key_mass", operands, {"mass": strided(torch.empty(sets, columns))}, attrs)


def equation_3(case: Case) -> Tensor:
    """In float64, one voting row and query head at a time; NaN where nothing is written. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    size, kv_heads, sets = attrs["head_size"], attrs["kv_heads"], attrs["sets"]
    q, heads = given["q"].double(), given["q"].shape[1] // attrs["head_size"]
    mass = torch.full((sets, attrs["columns"]), float("nan"), dtype=F64)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for b, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        prefix = int(given["captured"][b])
        pieces = entries[bounds[b] : bounds[b + 1]]
        kept = [x[0].double() for x in rows_of(given["kv"], pieces, attrs["layer"], kv_heads, size, prefix)]
        voting = [row for row in range(first, last) if given["votes"][row]]
        if not prefix or not voting:
            continue
        k_SKH = torch.stack(kept)
        start = int(given["cu_keys"][b])
        for own in range(sets):
            mine = range(own * heads // sets, (own + 1) * heads // sets)
            p = [
                torch.softmax(
                    k_SKH[:, head * kv_heads // heads] @ q[row, head * size : (head + 1) * size] * attrs["scale"], 0
                )
                for row in voting
                for head in mine
            ]
            both = torch.stack(p)
            found = both.mean(0) if attrs["statistic"] == "mean" else both.max(0).values
            mass[own, start : start + prefix] = found
    return mass


def mass_bound(case: Case, expected: Tensor) -> Tensor:
    """As `kv_bound`: scores off by delta, roundings of two sums and of the log-sum-exp, which is at most as large as they."""
    dtype, attrs = case.operands["q"].dtype, case.attrs
    q, kv = (case.operands[n].double().nan_to_num(0.0).unflatten(1, (-1, attrs["head_size"])) for n in ("q", "kv"))
    largest = float(q.norm(dim=2).max() * kv.norm(dim=2).max()) * attrs["scale"]
    relative = 2.1 * gamma(attrs["head_size"] + 8, dtype) * largest + gamma(2 * expected.shape[1] + 200, dtype)
    return relative * expected + rounding(expected, F32)


def assert_mass(case: Case, found: Tensor, slack: float = 1.0) -> None:
    expected = equation_3(case)
    written = ~expected.isnan()
    assert_within(found[written], expected[written], slack * mass_bound(case, expected)[written])
    assert found[~written].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("statistic", ["mean", "max"])
def test_mass_of_keys(statistic: str, dtype: torch.dtype) -> None:
    for seed in range(10):
        case = key_mass_case(seed, dtype, statistic)
        case.launch()
        assert_mass(case, case.outputs["mass"])
        expected = equation_3(case)
        torch.testing.assert_close(case.reference(), expected, equal_nan=True)


def test_mass_of_more_keys_and_rows_than_a_tile_has() -> None:
    case = key_mass_case(3, F32, longest=3000)
    assert int(case.operands["captured"].max()) > 2048
    given = kv_case([(3, 5, 2), (600, 1700, 1100)], 7, 1, 4, F32, padding=1)
    operands = {name: given.operands[name] for name in ("q", "kv", "extents", "cu_extents", "cu_seqlens")}
    lengths = [2, 1100]
    operands |= {"captured": torch.tensor(lengths, dtype=torch.int32), "cu_keys": starts(lengths)}
    operands |= {"votes": (torch.arange(604) % 3 != 0).to(torch.uint8)}
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    attrs |= {"sets": 7, "columns": 1102, "statistic": "mean"}
    for one in (case, Case("key_mass", operands, {"mass": torch.empty(7, 1102)}, attrs)):
        one.launch()
        assert_mass(one, one.outputs["mass"])
    check_allocates_nothing(one)


# --- the pages with the most mass --------------------------------------------------------------------------------------


def top_case(seed: int, kind: str, ratio: float = 0.0, longest: int = 60) -> Case:
    """Masses with ties at every page; rows of a state in another order than the sequences, two slots of it."""
    rng = random.Random(seed)
    page = 1 if kind == "floats" else [1, 2, 3, 4, 16][seed % 5]
    k, sets = page * rng.choice([1, 2, 5, 8]), rng.randint(1, 3)
    prefixes = [rng.choice([0, 1, rng.randint(2, longest)]) for _ in range(3)] + [longest]
    cu_keys = starts([keys + rng.choice([0, 2]) for keys in prefixes])
    generator = torch.Generator().manual_seed(seed)
    columns = int(cu_keys[-1]) + 1
    mass = torch.rand(sets, columns, generator=generator)
    if kind == "ties":
        mass = torch.randint(0, 6, (sets, columns), generator=generator) / 64  # sums are exact in any order
    operands = {
        "mass": strided(mass), "captured": torch.tensor(prefixes, dtype=torch.int32), "cu_keys": cu_keys,
        "owner": torch.tensor(rng.sample(range(6), len(prefixes))),
        "selected": strided(torch.full((6, 2 * sets * (1 + k // page)), -5, dtype=torch.int32).float()).to(torch.int32),
    }  # fmt: skip
    attrs = {"slot": rng.randrange(2), "sets": sets, "k": k, "page": page, "ratio": ratio}
    return Case("top_keys", operands, attrs=attrs)


def stated_selection(case: Case) -> Tensor:
    """The state afterwards: pages sorted by sum and number in plain lists."""
    given, attrs = case.operands, case.attrs
    after, page, k = given["selected"].clone(), attrs["page"], attrs["k"]
    for b, prefix in enumerate(given["captured"].tolist()):
        for own in range(attrs["sets"] if prefix else 0):
            start = int(given["cu_keys"][b])
            masses = given["mass"][own, start : start + prefix].double().tolist()
            sums = [sum(masses[at : at + page]) for at in range(0, prefix, page)]
            count = min(k // page, len(sums))
            if attrs["ratio"]:
                wanted = -int(-attrs["ratio"] * prefix // 1)  # rounded up; the ratios of the tests are exact
                count = min(count, (wanted + page - 1) // page)
            best = sorted(range(len(sums)), key=lambda number: (-sums[number], number))[:count]
            at = (attrs["slot"] * attrs["sets"] + own) * (1 + k // page)
            after[given["owner"][b], at : at + 1 + count] = torch.tensor([count, *sorted(best)], dtype=torch.int32)
    return after


TOPS = [("floats", 0.0), ("ties", 0.0), ("ties", 0.25)]


@pytest.mark.parametrize(("kind", "ratio"), TOPS)
def test_pages_with_the_most_mass(kind: str, ratio: float) -> None:
    for seed in range(20):
        case = top_case(seed, kind, ratio)
        expected = stated_selection(case)
        wide = load("top_keys").reference(**case.operands, **case.attrs)
        case.launch()
        assert torch.equal(case.operands["selected"], expected) and torch.equal(wide, expected)
    check_allocates_nothing(case)


def chosen_by(mass: Tensor, case: Case, k: int, device: str) -> list[set[int]]:
    """What top_keys chooses of these masses, of each sequence that has any, and set."""
    given, sets = case.operands, case.attrs["sets"]
    sequences = given["captured"].shape[0]
    operands = {
        "mass": mass, "captured": given["captured"], "cu_keys": given["cu_keys"],
        "owner": torch.arange(sequences), "selected": torch.zeros(sequences, sets * (1 + k), dtype=torch.int32),
    }  # fmt: skip
    one = Case("top_keys", operands, attrs={"slot": 0, "sets": sets, "k": k, "page": 1})
    if device == "cpu":
        one.launch()
        selected = operands["selected"]
    else:
        selected = run(one, DEVICE)["selected"]
    return [set(row[1 : row[0] + 1].tolist()) for row in selected.view(-1, 1 + k)]


def assert_selection_of_equation_3(device: str) -> None:
    """Keys whose mass is within 1e-5 of that of the last that is chosen may be others."""
    k = 5
    for seed in range(8) if device == "cpu" else (1,):
        case = key_mass_case(seed, F32, longest=40)
        expected = equation_3(case)
        case.launch()
        found = case.outputs["mass"] if device == "cpu" else run(case, DEVICE)["mass"]
        chosen = iter(chosen_by(found, case, k, device))
        for b, prefix in enumerate(case.operands["captured"].tolist()):
            for own in range(case.attrs["sets"]):
                mine, start = next(chosen), int(case.operands["cu_keys"][b])
                masses = expected[own, start : start + prefix]
                if prefix and not masses.isnan().any():
                    least = float(masses.sort(descending=True).values[min(k, prefix) - 1])
                    sure = {at for at, mass in enumerate(masses.tolist()) if mass > least * (1 + 1e-5)}
                    maybe = {at for at, mass in enumerate(masses.tolist()) if mass >= least * (1 - 1e-5)}
                    assert sure <= mine <= maybe and len(mine) == min(k, prefix)


def test_selection_of_equation_3() -> None:
    assert_selection_of_equation_3("cpu")


# --- attention to what was selected ------------------------------------------------------------------------------------


def selected_case(seed: int, dtype: torch.dtype, block: int = 0, longest: int = 90, whole: bool = False) -> Case:
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
    selected = torch.full((len(windows) + 2, slots * sets * (1 + k // page)), UNREAD, dtype=torch.int32)
    owner = rng.sample(range(len(windows) + 2), len(windows))
    for b, prefix in enumerate(prefixes):
        for own in range(sets if prefix else 0):
            pages = range(-(-prefix // page))
            count = min(k // page, len(pages)) if whole else rng.randint(0, min(k // page, len(pages)))
            place = selected[owner[b], (slot * sets + own) * (1 + k // page) :]
            place[: 1 + count] = torch.tensor([count, *sorted(rng.sample(pages, count))])
    operands = case.operands | {
        "selected": selected, "owner": torch.tensor(owner), "captured": torch.tensor(prefixes, dtype=torch.int32)
    }  # fmt: skip
    attrs = {name: case.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
    attrs |= {"slot": slot, "sets": sets, "k": k, "page": page}
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
                own = head * sets // heads
                at = (attrs["slot"] * sets + own) * (1 + attrs["k"] // page)
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
    """As `kv_bound` and `triton_bound` of `kv_attention`."""
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


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("block", [0, 4, 32])
def test_selected_attention(block: int, dtype: torch.dtype) -> None:
    for seed in range(10):
        case = selected_case(seed, dtype, block)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    for seed in range(3):
        check_allocates_nothing(key_mass_case(seed, dtype))
        check_allocates_nothing(key_mass_case(seed, dtype, "max"))
        check_allocates_nothing(selected_case(seed, dtype, block=4))
    check_allocates_nothing(long_case(dtype))


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
        for start, part in slices_of(selected_case(seed, F32, 4)):
            y = part.outputs["y"]
            before = y.clone()
            load("selected_attention").launch(
                **part.operands, **part.attrs, y=y, row_start=start, scratch=part.scratch()
            )
            assert_attended(part, y, before, start)


# --- in Triton --------------------------------------------------------------------------------------------------------

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")


def split_as(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    from mosaic.kernels.cuda import key_mass, selected_attention

    monkeypatch.setattr(selected_attention, "kv_splits", lambda *sizes: splits)
    monkeypatch.setattr(selected_attention, "KV_SPLIT_KEYS", 1)
    monkeypatch.setattr(key_mass, "splits_of", lambda *sizes: splits)
    monkeypatch.setattr(key_mass, "SPLIT_KEYS", 1)


@triton_test
@pytest.mark.parametrize(
    ("splits", "statistic", "dtype", "seeds"),
    [
        (1, "max", F32, (0, 1, 4)), (3, "mean", BF16, (7, 10, 15)),
        *(pytest.param(3, statistic, F32, range(5, 15), marks=pytest.mark.soak) for statistic in ("mean", "max")),
    ],
    ids=str,
)  # fmt: skip
def test_mass_of_keys_in_triton(
    splits: int, statistic: str, dtype: torch.dtype, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_as(monkeypatch, splits)
    for seed in seeds:
        case = key_mass_case(seed, dtype, statistic, longest=50 if splits == 1 else 200)
        assert_mass(case, run(case, DEVICE)["mass"], slack=2)


@triton_test
def test_mass_of_a_wide_group_in_triton() -> None:
    """More heads of a set than a tile has rows."""
    given = kv_case([(2, 40, 38)], 67, 1, 4, F32)
    operands = {name: given.operands[name] for name in ("q", "kv", "extents", "cu_extents", "cu_seqlens")}
    operands |= {"captured": torch.tensor([38], dtype=torch.int32), "cu_keys": starts([38])}
    operands |= {"votes": torch.ones(2, dtype=torch.uint8)}
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    attrs |= {"sets": 1, "columns": 38, "statistic": "mean"}
    case = Case("key_mass", operands, {"mass": torch.empty(1, 38)}, attrs)
    assert_mass(case, run(case, DEVICE)["mass"], slack=2)


@triton_test
@pytest.mark.parametrize(("kind", "ratio"), TOPS)
def test_pages_with_the_most_mass_in_triton(kind: str, ratio: float) -> None:
    for seed in (7, 3, 4):
        case = top_case(seed, kind, ratio)
        assert torch.equal(run(case, DEVICE)["selected"], stated_selection(case))


@triton_test
@pytest.mark.parametrize("kind", ["floats", "ties"])
def test_more_pages_than_a_tile_has_in_triton(kind: str) -> None:
    case = top_case(1, kind, longest=9000)
    assert torch.equal(run(case, DEVICE)["selected"], stated_selection(case))


@triton_test
def test_selection_of_equation_3_in_triton() -> None:
    assert_selection_of_equation_3("cuda")


@triton_test
@pytest.mark.parametrize(
    ("splits", "dtype", "block", "seeds"),
    [
        (1, F32, 4, (*range(5), 11, 21)), (1, BF16, 0, (5, 6)), (3, BF16, 0, (38,)), (2, F32, 32, (35,)),
        *(pytest.param(splits, BF16, 4, range(5, 15), marks=pytest.mark.soak) for splits in (1, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_selected_attention_in_triton(
    splits: int, dtype: torch.dtype, block: int, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_as(monkeypatch, splits)
    for seed in seeds:
        case = selected_case(seed, dtype, block, longest=50)
        y = run(case, DEVICE)["y"]
        assert_attended(case, y, torch.full_like(y, float("nan")), triton=True)


@triton_test
def test_more_selected_keys_than_a_split_has_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, 3)
    case = selected_case(13, BF16, 4, longest=200, whole=True)
    y = run(case, DEVICE)["y"]
    assert_attended(case, y, torch.full_like(y, float("nan")), triton=True)


@triton_test
@pytest.mark.parametrize("splits", [1, 3])
def test_selected_attention_in_triton_may_overwrite_its_queries(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, splits)
    case = selected_case(35, BF16, 4, longest=50)
    assert_attended(case, run(case, DEVICE, {"y": "q"})["y"], case.operands["q"], triton=True)


@triton_test
@pytest.mark.parametrize("splits", [1, 3])
def test_a_slice_of_a_window_in_triton(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, splits)
    for start, part in slices_of(selected_case(38, BF16, 4, longest=50)):
        y = run(part, DEVICE, row_start=start)["y"]
        assert_attended(part, y, torch.full_like(y, float("nan")), start, triton=True)


@triton_test
def test_missing_scratch_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, 2)
    for case in (key_mass_case(0, F32), selected_case(0, F32)):
        with pytest.raises(RuntimeMemoryError, match=rf"{case.kernel}: scratch of 0 bytes, \d[\d,]* needed"):
            load(case.kernel, "cuda").launch(**case.operands, **case.outputs, **case.attrs)


def test_splits_fit_into_the_scratch_buffer() -> None:
    for heads, rows, tiles, keys in (
        (32, 32, 8, 1 << 17),
        (16, 4096, 2048, 1 << 17),
        (8, 4, 4, 100),
        (64, 256, 1, 1 << 17),
    ):
        specs = {"q": Spec((rows, heads * 128), "bfloat16")}
        available = int(scratch_bytes("cuda", "key_mass", specs, {"head_size": 128}))
        splits = splits_of(tiles, heads * rows, keys, 264)
        assert 4 * splits * heads * rows <= available and splits * tiles <= max(264, tiles)
        assert splits == 1 or (splits - 1) * 256 < keys
    assert splits_of(8, 1024, 1 << 17, 264) == 33


# --- contracts --------------------------------------------------------------------------------------------------------

TOKENS, ROWS, SEQS, SPAN, EXTENTS, COLUMNS = (
    sympy.Symbol(name, positive=True, integer=True)
    for name in ("tokens", "kv_rows", "seqs", "span", "extents", "columns")
)
BOUNDS, LENGTHS = Spec((SEQS + 1,), "int32"), Spec((SEQS,), "int32")
KEPT = {
    "q": Spec((TOKENS, 64), "bfloat16"), "kv": Spec((ROWS, 96), "bfloat16"), "extents": Spec((EXTENTS, 4), "int64"),
    "cu_extents": BOUNDS, "captured": LENGTHS, "cu_seqlens": BOUNDS,
}  # fmt: skip
MASS = KEPT | {"cu_keys": BOUNDS, "votes": Spec((TOKENS,), "uint8")}
HEADS: dict[str, Any] = {"layer": 2, "kv_heads": 2, "head_size": 8, "scale": 1.0, "sets": 4}
OWNED = {"owner": Spec((SEQS,), "int64"), "captured": LENGTHS, "selected": Spec((9, 3 * 4 * 5), "int32")}
TOP = OWNED | {"mass": Spec((4, COLUMNS), "float32"), "cu_keys": BOUNDS}
PAGES: dict[str, Any] = {"slot": 2, "sets": 4, "k": 8, "page": 2}
ATTENDED = KEPT | OWNED | {"seen": LENGTHS, "positions": Spec((TOKENS,), "int32")}


def test_contracts_count_this_layers_work() -> None:
    mass, top, attend = (contract(name) for name in ("key_mass", "top_keys", "selected_attention"))
    attrs = HEADS | {"columns": COLUMNS, "span": SPAN}
    result = Spec((4, COLUMNS), "float32")
    assert mass.infer(**MASS, **attrs) == (result,)
    assert sympy.expand(mass.flops(**MASS, **attrs)) == 4 * SPAN * TOKENS * 64
    where = 8 * (SEQS + 1) + 32 * EXTENTS + 4 * SEQS
    moved = where + 4 * (SEQS + 1) + TOKENS * (128 + 1) + 16 * COLUMNS + 2 * COLUMNS * 16 * 2
    assert sympy.expand(mass.moved(MASS | {"mass": result}, attrs) - moved) == 0
    assert top.infer(**TOP, **PAGES) == ()
    moved = 16 * COLUMNS + 4 * SEQS + 4 * (SEQS + 1) + 8 * SEQS + 4 * SEQS * 4 * 5
    assert sympy.expand(top.moved(TOP, PAGES) - moved) == 0
    attrs = HEADS | PAGES | {"attended": SPAN}
    assert attend.infer(**ATTENDED, **attrs) == (ATTENDED["q"],)
    assert sympy.expand(attend.flops(**ATTENDED, **attrs)) == 4 * SPAN * TOKENS * 64
    moved = where + 4 * SEQS + 8 * SEQS + TOKENS * (2 * 128 + 4) + SEQS * 8 * 2 * 4 * 8 * 2 + 4 * SEQS * 4 * 5
    assert sympy.expand(attend.moved(ATTENDED | {"y": ATTENDED["q"]}, attrs) - moved) == 0
    for rule, specs in ((mass, MASS), (attend, ATTENDED)):
        assert rule.rate == "attention" and sympy.expand(rule.rate_rows(**specs, **attrs)) == 8 * TOKENS


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("key_mass", {"sets": 3}, "sets must be a multiple of the 2 KV heads that divides the 8 query heads, not 3"),
    ("key_mass", {"sets": 6}, "not 6"),
    ("key_mass", {"sets": 0}, "not 0"),
    ("key_mass", {"kv_heads": 5}, "q must have all heads of 8 for 5 KV heads, it has 64 columns"),
    ("key_mass", {"layer": 3}, "not layer 3"),
    ("key_mass", {"kv": Spec((ROWS, 96), "float32")}, "kv must be bfloat16 as q is, not float32"),
    ("key_mass", {"captured": BOUNDS}, r"captured must be int32\[seqs\]"),
    ("key_mass", {"cu_keys": LENGTHS}, "cu_keys must be"),
    ("key_mass", {"votes": Spec((TOKENS,), "bool")}, r"votes must be uint8\[tokens\]"),
    ("key_mass", {"extents": Spec((EXTENTS, 4), "int32")}, "extents must be int64"),
    ("key_mass", {"statistic": "median"}, "statistic must be one of mean, max, not 'median'"),
    ("top_keys", {"k": 7}, "k must be whole pages of 2 keys, not 7"),
    ("top_keys", {"k": 0}, "k must be"),
    ("top_keys", {"page": 0}, "k must be whole pages of 0 keys"),
    ("top_keys", {"slot": 3}, "selected has 3 slots of 20 numbers, not slot 3"),
    ("top_keys", {"slot": -1}, "not slot -1"),
    ("top_keys", {"k": 10}, r"selected must be int32\[rows, slots \* 24\]"),
    ("top_keys", {"selected": Spec((9, 60), "int64")}, "selected must be int32"),
    ("top_keys", {"owner": LENGTHS}, r"owner must be int64\[seqs\]"),
    ("top_keys", {"captured": BOUNDS}, r"captured must be int32\[seqs\]"),
    ("top_keys", {"cu_keys": Spec((SEQS + 1,), "int64")}, "cu_keys must be int32"),
    ("top_keys", {"mass": Spec((2, COLUMNS), "float32")}, r"mass must be float32\[4, keys\]"),
    ("top_keys", {"ratio": 1.5}, "ratio must be a share"),
    ("selected_attention", {"sets": 3}, "sets must be a multiple"),
    ("selected_attention", {"slot": 3}, "not slot 3"),
    ("selected_attention", {"block": -1}, "block must be"),
    ("selected_attention", {"seen": BOUNDS}, "seen must be"),
    ("selected_attention", {"layer": 3}, "not layer 3"),
    ("selected_attention", {"kv": Spec((ROWS, 96), "float32")}, "kv must be bfloat16"),
    ("selected_attention", {"positions": Spec((TOKENS,), "int64")}, r"positions must be int32\[tokens\]"),
    ("selected_attention", {"cu_extents": LENGTHS}, "cu_seqlens and cu_extents must be int32"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_contracts_refuse(name: str, change: dict[str, Any], message: str) -> None:
    whole = {
        "key_mass": MASS | HEADS | {"columns": COLUMNS, "span": SPAN}, "top_keys": TOP | PAGES,
        "selected_attention": ATTENDED | HEADS | PAGES | {"attended": SPAN},
    }[name]  # fmt: skip
    with pytest.raises(GraphError, match=message):
        contract(name).infer(**{**whole, **change})


def test_launches_refuse_wrong_operands() -> None:
    case = key_mass_case(1, F32)
    with pytest.raises(GraphError, match="8 query heads do not divide into 3 sets, and these into 2 groups"):
        load("key_mass").launch(**case.operands, **case.outputs, **case.attrs | {"sets": 3})
    with pytest.raises(UnknownName, match="statistic 'meen'"):
        load("key_mass").launch(**case.operands, **case.outputs, **case.attrs | {"statistic": "meen"})
    top = top_case(1, "ties")
    with pytest.raises(GraphError, match="3 keys are not whole pages of 2"):
        load("top_keys").launch(**top.operands, **top.attrs | {"k": 3, "page": 2})
    with pytest.raises(GraphError, match=r"slot 2 of \d sets with \d+ each does not fit"):
        load("top_keys").launch(**top.operands, **top.attrs | {"slot": 2})


# --- planned and checked -----------------------------------------------------------------------------------------------


def sparse(g: Graph) -> None:
    """One layer: the mass of a prefix, its selection, and attention to it."""
    tokens, rows, seqs, extents, columns = (g.dim(n) for n in ("tokens", "kv_rows", "seqs", "extents", "captured_keys"))
    kv, selected = g.state("kv", (rows, 2 * 2 * 16), "bfloat16"), g.state("selected", (5, 4 * 3), "int32")
    q = g.input("q", (tokens, 4 * 8), "bfloat16")
    where = g.input("extents", (extents, 4), "int64"), g.input("cu_extents", (seqs + 1,), "int32")
    cu_seqlens, cu_keys = (g.input(name, (seqs + 1,), "int32") for name in ("cu_seqlens", "cu_keys"))
    captured, seen = (g.input(name, (seqs,), "int32") for name in ("captured", "seen"))
    votes, positions = g.input("votes", (tokens,), "uint8"), g.input("positions", (tokens,), "int32")
    owner = g.input("owner", (seqs,), "int64")
    heads: dict[str, Any] = {"layer": 1, "kv_heads": 2, "head_size": 8, "scale": 0.3, "sets": 4}
    pages: dict[str, Any] = {"slot": 0, "k": 4, "page": 2}
    mass = g.add_op(
        "key_mass", q, kv, *where, captured, cu_keys, votes, cu_seqlens, **heads, columns=columns, span=g.dim("span")
    )
    g.add_op("top_keys", mass, captured, cu_keys, owner, selected, sets=4, **pages)
    y = g.output("y", (tokens, 4 * 8), "bfloat16")
    reads = (q, kv, *where, selected, owner, captured, seen, cu_seqlens, positions)
    with g.chunk("rows", over=tokens, tile=4):
        g.add_op("selected_attention", *reads, out=y, **heads, **pages, attended=g.dim("attended"))


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plans_are_proved(device: str) -> None:
    dims = {
        "tokens": 10, "kv_rows": 90, "seqs": 2, "extents": 3, "captured_keys": 40, "span": 20, "attended": 9
    }  # fmt: skip
    plan = plan_graph(sparse, dims=dims, device=device, config={"rows": 4})
    assert check_plan(plan.document) == []
    mass, top, attend = plan.document["ops"]
    assert mass["flops"] == 4 * 20 * 10 * 32 and attend["flops"] == 4 * 9 * 10 * 32
    assert top["bytes"] == 4 * (4 * 40 + 2 + 3 + 2 * 2) + 4 * 2 * 4 * 3
