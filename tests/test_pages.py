"""page_extrema and page_bounds: random batches against float64 on the CPU. Written apart from the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
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
    strided,
    unit,
)
from test_kv import kv_case, rows_of, starts
from test_selection_of_keys import GROUPS
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract

UNREAD = 1 << 40  # no row has this number


def paged(rng: random.Random, counts: list[int], slots: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of a state for the pages of each sequence, in any order; entries after the last belong to none."""
    total = sum(counts)
    rows = rng.sample(range(total + 3), total)
    keys = torch.randn(total + 3, slots, 2, width, generator=torch.Generator().manual_seed(total)).sort(2).values
    return {
        "page_table": torch.tensor([*rows, UNREAD, UNREAD]), "cu_pages": starts(counts),
        "extrema": strided(keys.flatten(1).to(dtype)),
    }  # fmt: skip


def extrema_case(seed: int, dtype: torch.dtype, longest: int = 70) -> Case:
    """Sequences of 0 to `longest` keys in scattered extents; of their whole pages the last are written, some, all or none."""
    rng = random.Random(seed)
    group, kv_heads = GROUPS[seed % len(GROUPS)]
    size, page = rng.choice([4, 5, 16]), rng.choice([1, 2, 3, 8, 16, 20])
    lengths = [rng.choice([1, rng.randint(1, longest)]) for _ in range(rng.randint(1, 3))] + [longest]
    given = kv_case([(1, keys, 0) for keys in lengths], group * kv_heads, kv_heads, size, dtype, padding=2)
    counts = [rng.choice([0, keys // page, keys // page]) for keys in lengths]
    operands = {name: given.operands[name] for name in ("kv", "extents", "cu_extents")}
    operands |= paged(rng, counts, 3, kv_heads * size, dtype)
    operands["first_page"] = torch.tensor(
        [rng.choice([0, 0, rng.randint(0, count)]) for count in counts], dtype=torch.int32
    )
    attrs = {
        "layer": given.attrs["layer"],
        "slot": rng.randrange(3),
        "page": page,
        "kv_heads": kv_heads,
        "head_size": size,
    }
    return Case("page_extrema", operands, attrs=attrs)


def stated_extrema(case: Case) -> Tensor:
    """The state afterwards, key by key and element by element."""
    given, attrs = case.operands, case.attrs
    after, heads, size = given["extrema"].clone(), attrs["kv_heads"], attrs["head_size"]
    for b in range(len(given["first_page"])):
        begin, end = given["cu_extents"][b : b + 2].tolist()
        mine = [tuple(entry) for entry in given["extents"][begin:end].tolist()]
        low, high = given["cu_pages"][b : b + 2].tolist()
        for number in range(int(given["first_page"][b]), high - low):
            last = (number + 1) * attrs["page"]
            kept = rows_of(given["kv"], mine, attrs["layer"], heads, size, last)[last - attrs["page"] :]
            keys = torch.stack(kept)[:, 0]
            row = after[given["page_table"][low + number]].view(-1, 2, heads, size)[attrs["slot"]]
            row[0], row[1] = keys.sort(0).values[0], keys.sort(0).values[-1]
    return after


OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "max": torch.max, "worst": torch.min}


def bounds_case(seed: int, dtype: torch.dtype, statistic: str = "mean", most: int = 60, rows: int = 0) -> Case:
    """Sequences of 0 to `most` pages and 0 to 9 rows, some of which vote; some columns of `bound` belong to none."""
    rng = random.Random(seed)
    group, kv_heads = GROUPS[seed % len(GROUPS)]
    size = rng.choice([4, 5, 16])
    counts = [rng.choice([0, 1, rng.randint(2, most)]) for _ in range(rng.randint(1, 3))] + [most]
    rng.shuffle(counts)
    windows = [rng.choice([0, 1, rng.randint(2, 9)]) for _ in counts]
    tokens, generator = sum(windows) + 2, torch.Generator().manual_seed(seed)
    operands = paged(rng, counts, 2, kv_heads * size, dtype) | {
        "q": strided(torch.randn(tokens, group * kv_heads * size, generator=generator).to(dtype)),
        "votes": torch.tensor([rng.random() < 0.7 for _ in range(tokens)], dtype=torch.uint8), "cu_seqlens": starts(windows),
    }  # fmt: skip
    sets = kv_heads * rng.choice([n for n in range(1, group + 1) if group % n == 0])
    columns = sum(counts) + 3
    attrs: dict[str, Any] = {"slot": rng.randrange(2), "kv_heads": kv_heads, "head_size": size, "sets": sets}
    attrs |= {"columns": columns, "statistic": statistic}
    if rows:  # of blocks of 4, at any place
        attrs |= {"block": 4, "rows": rows, "tiles": -(-4 // rows)}
        operands["positions"] = torch.tensor([rng.randint(0, 50) for _ in range(tokens)], dtype=torch.int32)
    return Case("page_bounds", operands, {"bound": strided(torch.empty(sets * attrs.get("tiles", 1), columns))}, attrs)


def stated_bounds(case: Case) -> tuple[Tensor, Tensor]:
    """Of every set and page the mean or the largest of the voting rows' bounds, and how much was added up; NaN for nobody's."""
    given, attrs = case.operands, case.attrs
    sets, size, heads = attrs["sets"], attrs["head_size"], attrs["kv_heads"]
    tiles = attrs.get("tiles", 1)
    found = torch.full((2, sets * tiles, attrs["columns"]), float("nan"), dtype=F64)
    q, extrema = given["q"].double(), given["extrema"].double()
    members = q.shape[1] // size // sets
    for b in range(len(given["cu_pages"]) - 1):
        low, high = given["cu_pages"][b : b + 2].tolist()
        start, end = given["cu_seqlens"][b : b + 2].tolist()
        voting = [row for row in range(start, end) if given["votes"][row]]
        for number in range(sets * tiles if voting else 0):
            own, tile = number // tiles, number % tiles
            of_tile = [
                row for row in voting if tiles == 1 or given["positions"][row] % 4 // attrs["rows"] == tile
            ] or voting
            for at in range(low, high):
                row = extrema[given["page_table"][at]].view(-1, 2, heads, size)[attrs["slot"], :, own * heads // sets]
                queries = torch.stack(
                    [q[r].view(-1, size)[own * members + member] for r in of_tile for member in range(members)]
                )
                upper = torch.stack([queries * row[0], queries * row[1]]).amax(0)
                each = upper.sum(1)
                found[0, number, at] = OF_ROWS[attrs["statistic"]](each)
                terms = (queries.abs()[:, None] * row.abs()).sum((1, 2))
                found[1, number, at] = terms.mean() if attrs["statistic"] == "mean" else terms.max()
    return found[0], found[1]


def assert_bounds(case: Case, bound: Tensor, slack: float = 1) -> None:
    """Bounds are sums of `terms` rounded in float32, turned by a map that rises by at most 1, and rounded four times more."""
    value, terms = stated_bounds(case)
    known, wide = ~value.isnan(), case.operands["q"].dtype == F64
    expected = (1 + value.clamp(min=0)) / (1 + (-value).clamp(min=0))
    count = 2 * case.attrs["head_size"] + case.operands["q"].numel()
    error = gamma(count + 4, F64 if wide else F32) * terms + 4 * unit(F32) * expected
    assert_within(bound[known], expected[known], slack * error[known])
    assert bound[~known].isnan().all()


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_extrema_of_pages(dtype: torch.dtype) -> None:
    for seed in range(20):
        case = extrema_case(seed, dtype)
        expected = stated_extrema(case)
        assert torch.equal(load("page_extrema").reference(**case.operands, **case.attrs), expected)
        case.launch()
        assert torch.equal(case.operands["extrema"], expected)


@pytest.mark.some
@pytest.mark.parametrize("statistic", OF_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bounds_of_pages(dtype: torch.dtype, statistic: str) -> None:
    for seed in range(10):
        case = bounds_case(seed, dtype, statistic, most=30, rows=[0, 0, 1, 3][seed % 4])
        case.launch()
        assert_bounds(case, case.outputs["bound"])
        if dtype == F64:
            assert_bounds(case, case.reference())


def test_bounds_of_more_pages_and_rows_than_a_tile_has() -> None:
    for statistic in OF_ROWS:
        given = bounds_case(1, F32, statistic, most=1100)
        operands = given.operands | {
            "q": torch.randn(70, given.operands["q"].shape[1]),
            "votes": torch.ones(70, dtype=torch.uint8),
        }
        operands["cu_seqlens"] = starts([70 if n == 1100 else 0 for n in given.operands["cu_pages"].diff().tolist()])
        case = Case("page_bounds", operands, given.outputs, given.attrs)
        wide = {name: value.double() if value.is_floating_point() else value for name, value in operands.items()}
        expected = load("page_bounds").reference(**wide, **case.attrs)
        case.launch()
        known = ~expected.isnan()
        assert known.sum() == 1100 * case.attrs["sets"]
        torch.testing.assert_close(case.outputs["bound"].double()[known], expected[known], rtol=1e-5, atol=1e-6)


def test_a_bound_is_one_and_keeps_the_order() -> None:
    """No key of a page gives a product above the page's bound; the bound of a page of one key is the product."""
    generator = torch.Generator().manual_seed(2)
    q, keys = torch.randn(1, 8, generator=generator), torch.randn(30, 2, 8, generator=generator)
    extrema = torch.stack([keys.amin(1), keys.amax(1)], 1).flatten(1)
    operands = {
        "q": q, "extrema": extrema, "page_table": torch.arange(30), "cu_pages": starts([30]), "cu_seqlens": starts([1]),
        "votes": torch.ones(1, dtype=torch.uint8),
    }  # fmt: skip
    attrs = {"slot": 0, "kv_heads": 1, "head_size": 8, "sets": 1, "columns": 30}
    case = Case("page_bounds", operands, {"bound": torch.empty(1, 30)}, attrs)
    case.launch()
    bound = case.outputs["bound"][0].double()
    value = torch.where(bound >= 1, bound - 1, 1 - 1 / bound)
    products = keys.double() @ q[0].double()
    best = products.amax(1)
    assert (value >= best - 1e-5).all() and (value > best + 0.1).any() and (value < 0).any()
    assert (bound > 0).all()


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    for seed in range(3):
        check_allocates_nothing(extrema_case(seed, dtype))
        for statistic in OF_ROWS:
            check_allocates_nothing(bounds_case(seed, dtype, statistic, rows=seed % 2))


def specs_of(case: Case) -> dict[str, Spec]:
    """Operands and outputs, by shape and dtype."""
    return {name: Spec(tuple(x.shape), name_of(x.dtype)) for name, x in (case.operands | case.outputs).items()}


def test_contracts_count_this_layers_work() -> None:
    made, bounds = extrema_case(1, BF16), bounds_case(1, BF16)
    one, other = contract("page_extrema"), contract("page_bounds")
    given, attrs = specs_of(made), made.attrs | {"tokens": 40}
    assert one.work(**given, **attrs).outputs == ()
    width = attrs["kv_heads"] * attrs["head_size"]
    read = sum(given[name].bytes for name in ("extents", "cu_extents", "page_table", "cu_pages", "first_page"))
    assert one.work(**given, **attrs).bytes == read + 40 * 2 * width * 2
    given, attrs = specs_of(bounds), bounds.attrs | {"page_span": 7}
    bound = given.pop("bound")
    assert other.work(**given, **attrs).outputs == (bound,)
    assert other.work(**given, **attrs).flops == 2 * 2 * 7 * given["q"].elements
    read = sum(given[name].bytes for name in ("q", "page_table", "cu_pages", "votes", "cu_seqlens"))
    width = attrs["kv_heads"] * attrs["head_size"]
    assert other.work(**given, **attrs).bytes == read + bound.bytes + attrs["columns"] * 2 * width * 2
    heads = given["q"].shape[1] // attrs["head_size"]
    assert other.work(**given, **attrs).rate_rows == given["q"].shape[0] * heads


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("page_extrema", {"page": 0}, "a page has at least one key, not 0"),
        ("page_extrema", {"layer": 3}, "'kv' has keys and values of 3 layers, not layer 3"),
        ("page_extrema", {"slot": 3}, "'extrema' has keys and values of 3 layers, not layer 3"),
        ("page_extrema", {"first_page": Spec((9,), "int32")}, r"operand 'first_page' is .*, expected int32\[2\]"),
        ("page_extrema", {"page_table": Spec((9,), "int32")}, r"operand 'page_table' is .*, expected int64\[9\]"),
        ("page_extrema", {"extents": Spec((9, 4), "int32")}, r"operand 'extents' is .*, expected int64\[9, 4\]"),
        ("page_extrema", {"kv": Spec((9, 1), "bfloat16")}, r"operand 'kv' is .*, expected bfloat16\[9, L\*2\*2\*4\]"),
        ("page_bounds", {"slot": -1}, "not layer -1"),
        ("page_bounds", {"sets": 0}, r"operand 'q' is .*, expected float32\[5, M\*0\*4\]"),
        ("page_bounds", {"statistic": "median"}, "statistic must be one of mean, max, worst, not 'median'"),
        ("page_bounds", {"votes": Spec((3,), "bool")}, r"operand 'votes' is .*, expected uint8\[5\]"),
        ("page_bounds", {"cu_seqlens": Spec((9,), "int32")}, r"operand 'cu_seqlens' is .*, expected int32\[5\]"),
        ("page_bounds", {"cu_pages": Spec((9, 1), "int32")}, r"operand 'cu_pages' is .*, expected int32\[B\+1\]"),
        ("page_bounds", {"q": Spec((9, 8), "bfloat16")}, r"operand 'q' is .*, expected bfloat16\[9, M\*8\*4\]"),
    ],
)  # fmt: skip
def test_contracts_refuse(name: str, change: dict[str, Any], message: str) -> None:
    case = extrema_case(1, F32) if name == "page_extrema" else bounds_case(1, F32)
    given = {**specs_of(case), **case.attrs, "tokens" if name == "page_extrema" else "page_span": 3}
    given.pop("bound", None)
    with pytest.raises(GraphError, match=message):
        contract(name).work(**given | change)


def test_launches_refuse_wrong_operands() -> None:
    case, bounds = extrema_case(1, F32), bounds_case(1, F32)
    wrong = [
        (case, {"slot": 3}, "'extrema' has keys and values of 3 layers, not layer 3"), (case, {"slot": -1}, "not layer -1"),
        (case, {"page": 0}, "at least one key"),
        (case, {"layer": 9}, "not layer 9"), (bounds, {"slot": 2}, "not layer 2"),
        (bounds, {"sets": 3}, r"operand 'q' is .*, expected float32\[.*M\*3\*"),
    ]  # fmt: skip
    for one, change, message in wrong:
        with pytest.raises(GraphError, match=message):
            load(one.kernel).launch(**one.operands, **one.outputs, **one.attrs | change)
    with pytest.raises(GraphError, match="statistic must be one of mean, max, worst, not 'meen'"):
        load("page_bounds").launch(**bounds.operands, **bounds.outputs, **bounds.attrs | {"statistic": "meen"})
