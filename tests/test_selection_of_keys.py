"""prefix_logsumexp, key_mass, top_keys and selected_attention: random batches against float64 on the CPU.

Written apart from the kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from test_kernels import (
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
from test_kv import kv_case, rows_of, starts
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.registrar.operators.top_keys import keys_of

GROUPS = [(1, 2), (4, 2), (7, 1), (8, 1), (3, 3)]  # query heads of a key-value head, and how many of these
SUMMED = ("q", "kv", "extents", "cu_extents", "captured", "votes", "cu_seqlens")


def tiles_of(block: int, rows: int) -> dict[str, int]:
    """A launch's attributes for tiles of this many rows of a block."""
    return {"block": block, "rows": rows, "tiles": -(-block // rows)}


def key_mass_case(
    seed: int,
    dtype: torch.dtype,
    statistic: str = "mean",
    longest: int = 90,
    gaps: int = 2,
    tiled: dict[str, int] | None = None,
) -> Case:
    """Sequences with prefixes of 0 to `longest` keys and some voting rows; some columns of `mass` belong to none."""
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
    attrs |= {"sets": sets, "columns": columns, "statistic": statistic, **(tiled or {})}
    case = mass_case(operands, attrs, strided(torch.empty(sets * attrs.get("tiles", 1), columns)))
    if tiled:
        case.operands["positions"] = given.operands["positions"]
    return case


def mass_case(operands: dict[str, Tensor], attrs: dict[str, Any], mass: Tensor) -> Case:
    """The case with the log-sum-exps of voting rows, and NaN for the others."""
    case = Case("key_mass", operands, {"mass": mass}, attrs)
    sums = strided(sums_of_prefixes(case).float())
    return replace(case, operands=operands | {"logsumexp": sums})


def sums_case(seed: int, dtype: torch.dtype, longest: int = 90) -> Case:
    """The same batches, and their log-sum-exps."""
    given = key_mass_case(seed, dtype, longest=longest)
    operands = {name: given.operands[name] for name in SUMMED}
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    return Case(
        "prefix_logsumexp", operands, {"logsumexp": strided(torch.empty_like(given.operands["logsumexp"]))}, attrs
    )


def sums_of_prefixes(case: Case) -> Tensor:
    """In float64, one voting row and query head at a time; NaN for the others. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    size, kv_heads = attrs["head_size"], attrs["kv_heads"]
    q, heads = given["q"].double(), given["q"].shape[1] // attrs["head_size"]
    sums = torch.full((q.shape[0], heads), float("nan"), dtype=F64)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for b, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        prefix = int(given["captured"][b])
        pieces = entries[bounds[b] : bounds[b + 1]]
        if not prefix:
            continue
        keys = torch.stack(
            [x[0] for x in rows_of(given["kv"], pieces, attrs["layer"], kv_heads, size, prefix)]
        ).double()
        for row in [row for row in range(first, last) if given["votes"][row]]:
            for head in range(heads):
                scores = keys[:, head * kv_heads // heads] @ q[row, head * size : (head + 1) * size]
                sums[row, head] = torch.logsumexp(scores * attrs["scale"], 0)
    return sums


def assert_sums(case: Case, found: Tensor, slack: float = 1.0) -> None:
    """Scores off by delta, the roundings of a sum, and of the result."""
    expected, attrs = sums_of_prefixes(case), case.attrs
    given, sure = ~expected.isnan(), case.operands["captured"].max()
    delta = 2.1 * gamma(attrs["head_size"] + 8, case.operands["q"].dtype) * largest_score(case)
    bound = delta + gamma(2 * int(sure) + 200, case.operands["q"].dtype) + rounding(expected, F32) + unit(F32)
    assert_within(found[given], expected[given], slack * bound[given])


def equation_3(case: Case) -> Tensor:
    """In float64, one voting row and query head at a time; NaN where nothing is written. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    size, kv_heads, sets = attrs["head_size"], attrs["kv_heads"], attrs["sets"]
    q, heads = given["q"].double(), given["q"].shape[1] // attrs["head_size"]
    tiles = attrs.get("tiles", 1)
    mass = torch.full((sets * tiles, attrs["columns"]), float("nan"), dtype=F64)
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
        for own, tile in product(range(sets), range(tiles)):
            mine = range(own * heads // sets, (own + 1) * heads // sets)
            of_tile = [row for row in voting if in_tile(case, row) == tile] or voting
            p = [
                torch.softmax(
                    k_SKH[:, head * kv_heads // heads] @ q[row, head * size : (head + 1) * size] * attrs["scale"], 0
                )
                for row in of_tile
                for head in mine
            ]
            both = torch.stack(p)
            found = {"mean": both.mean(0), "max": both.max(0).values, "worst": both.min(0).values}
            mass[own * tiles + tile, start : start + prefix] = found[attrs["statistic"]]
    return mass


def in_tile(case: Case, row: int) -> int:
    """The tile of its block that a row is in."""
    rows = case.attrs.get("rows", 0)
    return int(case.operands["positions"][row]) % case.attrs["block"] // rows if rows else 0


def mass_bound(case: Case, expected: Tensor) -> Tensor:
    """As `kv_bound`: scores off by delta, roundings of two sums and of the log-sum-exp, which is at most as large as they."""
    dtype, attrs = case.operands["q"].dtype, case.attrs
    relative = 2.1 * gamma(attrs["head_size"] + 8, dtype) * largest_score(case) + gamma(
        2 * expected.shape[1] + 200, dtype
    )
    sums = float(case.operands["logsumexp"].nan_to_num(0.0).abs().max()) * unit(F32)  # it is given in float32
    return (relative + 2 * sums) * expected + rounding(expected, F32)


def largest_score(case: Case) -> float:
    """A bound of all scores."""
    q, kv = (case.operands[n].double().nan_to_num(0.0).unflatten(1, (-1, case.attrs["head_size"])) for n in ("q", "kv"))
    return float(q.norm(dim=2).max() * kv.norm(dim=2).max()) * float(case.attrs["scale"])


def assert_mass(case: Case, found: Tensor, slack: float = 1.0) -> None:
    expected = equation_3(case)
    written = ~expected.isnan()
    assert_within(found[written], expected[written], slack * mass_bound(case, expected)[written])
    assert found[~written].isnan().all()


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("statistic", ["mean", "max", "worst"])
def test_mass_of_keys(statistic: str, dtype: torch.dtype) -> None:
    for seed in range(10):
        tiled = [None, tiles_of(4, 3), tiles_of(32, 2)][max(seed - 6, 0) % 3]
        case = key_mass_case(seed, dtype, statistic, tiled=tiled)
        case.launch()
        assert_mass(case, case.outputs["mass"])
        expected = equation_3(case)
        exactly = replace(case, operands=case.operands | {"logsumexp": sums_of_prefixes(case)})
        torch.testing.assert_close(exactly.reference(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sums_of_prefixes(dtype: torch.dtype) -> None:
    for seed in range(10):
        case = sums_case(seed, dtype)
        case.launch()
        assert_sums(case, case.outputs["logsumexp"])
        torch.testing.assert_close(case.reference(), sums_of_prefixes(case), equal_nan=True)


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
    for one in (case, mass_case(operands, attrs, torch.empty(7, 1102))):
        one.launch()
        assert_mass(one, one.outputs["mass"])
    check_allocates_nothing(one)


# --- the pages with the most mass --------------------------------------------------------------------------------------


def top_case(seed: int, kind: str, ratio: float = 0.0, enough: float = 0.0, longest: int = 60) -> Case:
    """Masses with ties at every page; rows of a state in another order than the sequences, two slots of it."""
    rng = random.Random(seed)
    page = [1, 2, 3, 4, 16][seed % 5] if kind == "ties" else 1
    k, sets = page * rng.choice([1, 2, 5, 8]), rng.randint(1, 3)
    prefixes = [rng.choice([0, 1, rng.randint(2, longest)]) for _ in range(3)] + [longest]
    cu_keys = starts([keys + rng.choice([0, 2]) for keys in prefixes])
    generator = torch.Generator().manual_seed(seed)
    columns = int(cu_keys[-1]) + 1
    mass = torch.rand(sets, columns, generator=generator)
    if kind == "ties":
        mass = torch.randint(0, 6, (sets, columns), generator=generator) / 64  # sums are exact in any order
    if kind == "steep":
        mass = torch.exp2(-60 * mass)
    if kind == "close":
        mass = 1 + mass / 128  # as bounds of pages may be
    operands = {
        "mass": strided(mass), "captured": torch.tensor(prefixes, dtype=torch.int32), "cu_keys": cu_keys,
        "owner": torch.tensor(rng.sample(range(6), len(prefixes))),
        "selected": strided(torch.full((6, 2 * sets * (1 + k // page)), -5, dtype=torch.int32).float()).to(torch.int32),
    }  # fmt: skip
    attrs = {"slot": rng.randrange(2), "sets": sets, "k": k, "page": page, "ratio": ratio, "enough": enough}
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
                wanted = math.ceil(Fraction(str(attrs["ratio"])) * prefix)  # as written
                count = min(count, (wanted + page - 1) // page)
            best = sorted(range(len(sums)), key=lambda number: (-sums[number], number))[:count]
            if attrs["enough"]:
                before = [sum(sums[number] for number in best[:at]) for at in range(count)]
                best = [number for number, weight in zip(best, before, strict=True) if weight < attrs["enough"]]
            at = (attrs["slot"] * attrs["sets"] + own) * (1 + k // page)
            after[given["owner"][b], at : at + 1 + len(best)] = torch.tensor(
                [len(best), *sorted(best)], dtype=torch.int32
            )
    return after


TOPS = [
    ("floats", 0.0, 0.0), ("steep", 0.0, 0.0), ("close", 0.0, 0.0), ("ties", 0.0, 0.0), ("ties", 0.25, 0.0), ("ties", 0.0, 0.375),
    ("ties", 0.5, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "ratio", "enough"), TOPS)
def test_pages_with_the_most_mass(kind: str, ratio: float, enough: float) -> None:
    for seed in range(20):
        case = top_case(seed, kind, ratio, enough)
        expected = stated_selection(case)
        wide = load("top_keys").reference(**case.operands, **case.attrs)
        case.launch()
        assert torch.equal(case.operands["selected"], expected) and torch.equal(wide, expected)
    check_allocates_nothing(case)


@pytest.mark.parametrize("parts", [100, 1000])
def test_a_ratio_is_the_decimal_that_was_written(parts: int) -> None:
    """`keys_of` of up to 4,096 keys, for many shares."""
    keys = np.arange(1, 4097)
    for number in range(1, parts + 1):
        assert np.array_equal(keys_of(number / parts, keys), -(-keys * number // parts))


def share_case(ratio: float, lengths: Sequence[int]) -> Case:
    """Prefixes of these lengths, whose first keys have the most mass; all share their masses."""
    count = len(lengths)
    operands = {
        "mass": torch.arange(max(lengths), 0, -1)[None].float(), "captured": torch.tensor(lengths, dtype=torch.int32),
        "cu_keys": torch.zeros(count + 1, dtype=torch.int32), "owner": torch.arange(count),
        "selected": torch.zeros(count, 1 + max(lengths), dtype=torch.int32),
    }  # fmt: skip
    return Case("top_keys", operands, attrs={"slot": 0, "sets": 1, "k": max(lengths), "page": 1, "ratio": ratio})


SHARES = [
    (0.15, 100, 15),
    (0.15, 101, 16),
    (0.7, 10, 7),
    (0.07, 100, 7),
    (5 / 6, 6, 5),
    (1e-12, 100, 1),
    (1.0, 100, 100),
]


@pytest.mark.parametrize(("ratio", "keys", "chosen"), SHARES)
def test_so_many_keys_are_chosen(ratio: float, keys: int, chosen: int) -> None:
    case = share_case(ratio, [keys])
    case.launch()
    assert case.operands["selected"][0].tolist() == [chosen, *range(chosen), *[0] * (keys - chosen)]


def test_every_percentage_is_chosen_exactly() -> None:
    for number in range(1, 101):
        lengths = [1, 99, 100, 101, 300, 997]
        case = share_case(number / 100, lengths)
        case.launch()
        expected = [-(-number * keys // 100) for keys in lengths]
        assert case.operands["selected"][:, 0].tolist() == expected, number


Launched = Callable[[Case], dict[str, Tensor]]
"""Launches a case; gives what it wrote or updated."""


def on_the_cpu(case: Case) -> dict[str, Tensor]:
    case.launch()
    return case.operands | case.outputs


def chosen_by(mass: Tensor, case: Case, k: int, launch: Launched) -> list[set[int]]:
    """The choice of top_keys from these masses, for each sequence with keys, and set."""
    given, sets = case.operands, case.attrs["sets"]
    sequences = given["captured"].shape[0]
    operands = {
        "mass": mass, "captured": given["captured"], "cu_keys": given["cu_keys"],
        "owner": torch.arange(sequences), "selected": torch.zeros(sequences, sets * (1 + k), dtype=torch.int32),
    }  # fmt: skip
    one = Case("top_keys", operands, attrs={"slot": 0, "sets": sets, "k": k, "page": 1})
    return [set(row[1 : row[0] + 1].tolist()) for row in launch(one)["selected"].view(-1, 1 + k)]


def assert_selection_of_equation_3(launch: Launched, seeds: Iterable[int]) -> None:
    """Keys whose mass is within 1e-5 of that of the last that is chosen may be others."""
    k = 5
    for seed in seeds:
        case = key_mass_case(seed, F32, longest=40)
        expected = equation_3(case)
        chosen = iter(chosen_by(launch(case)["mass"], case, k, launch))
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
    assert_selection_of_equation_3(on_the_cpu, range(8))


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    for seed in range(3):
        check_allocates_nothing(key_mass_case(seed, dtype))
        check_allocates_nothing(key_mass_case(seed, dtype, "max"))
        check_allocates_nothing(key_mass_case(seed, dtype, "worst", tiled=tiles_of(4, 2)))
        check_allocates_nothing(sums_case(seed, dtype))


def test_launches_refuse_wrong_operands() -> None:
    case = key_mass_case(1, F32)
    with pytest.raises(GraphError, match=r"operand 'q' is .*, expected float32\[6, M\*3\*4\]"):
        load("key_mass").launch(**case.operands, **case.outputs, **case.attrs | {"sets": 3})
    with pytest.raises(GraphError, match="statistic must be one of mean, max, worst, not 'meen'"):
        load("key_mass").launch(**case.operands, **case.outputs, **case.attrs | {"statistic": "meen"})
    top = top_case(1, "ties")
    with pytest.raises(GraphError, match="k must be whole pages of 2 keys, not 3"):
        load("top_keys").launch(**top.operands, **top.attrs | {"k": 3, "page": 2})
    with pytest.raises(GraphError, match=r"selected has \d slots of \d+ numbers, not slot 2|selected must be int32"):
        load("top_keys").launch(**top.operands, **top.attrs | {"slot": 2})
