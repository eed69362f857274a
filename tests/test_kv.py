"""kv_store and kv_attention, and blocks in attention: CPU kernels against float64, and in planned, checked, executed graphs."""

from __future__ import annotations

import copy
import importlib.util
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from operator_tables import attention_options
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
    randn,
    rounding,
    strided,
    unit,
)
from torch import Tensor

from mosaic.devices import load_device
from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.planner import plan_graph
from mosaic.planner.check import check_plan
from mosaic.planner.plan import Plan
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import kv_attention as kv_operator
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.operators.kv_attention import kv_parts, kv_segments
from mosaic.registrar.polynomial import symbol
from mosaic.runtime.executor import Executor
from mosaic.runtime.workspace import Workspace

# --- a window over kept keys -------------------------------------------------------------------------------------------


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


Pieces = list[tuple[int, int, int, int]]
"""A sequence's extents in order of position: first row, rows, first position, tokens of the extent before it."""


def scattered(lengths: Sequence[int], seed: int = 3, most: int = 3) -> tuple[list[Pieces], int]:
    """Sequences of these lengths in extents of random sizes, some with tokens that were dropped, and the rows of the state."""
    rng, extents = random.Random(seed), list[tuple[int, int, int, int, int]]()
    for sequence, length in enumerate(lengths):
        cuts = sorted(rng.sample(range(1, length), min(rng.randrange(most), length - 1))) if length else []
        for first, end in pairwise([0, *cuts, length]) if length else ():
            before, after = rng.choice([0, 0, 2]), rng.choice([0, 0, 3])
            extents.append((sequence, first, end - first, before, after))
    found: list[Pieces] = [[] for _ in lengths]
    row = 1
    for sequence, first, count, before, after in rng.sample(extents, len(extents)):
        rows = before + count + after
        found[sequence].append((row, rows, first, before))
        row += rows + rng.choice([0, 1])
    return [sorted(pieces, key=lambda piece: piece[2]) for pieces in found], row + 2


def tables(owned: Sequence[Pieces]) -> dict[str, Tensor]:
    """The operands for the layout of keys; the last entry belongs to no sequence."""
    entries = torch.tensor([entry for pieces in owned for entry in pieces] + [[1 << 40, 1, 0, 0]])
    return {"extents": entries, "cu_extents": starts([len(pieces) for pieces in owned])}


def rows_of(kv: Tensor, pieces: Pieces, layer: int, heads: int, size: int, length: int) -> list[Tensor]:
    """Keys and values [2, K, H] of one layer, position by position: views of a state, as its layout is documented; NaN before
    the first position that has a place."""
    found = []
    for position in range(length):
        if position < pieces[0][2]:
            found.append(torch.full((2, heads, size), float("nan"), dtype=kv.dtype))
            continue
        row, rows, first, before = next(piece for piece in reversed(pieces) if piece[2] <= position)
        extent = kv.reshape(-1)[row * kv.shape[1] : (row + rows) * kv.shape[1]].view(-1, 2, heads, rows, size)
        found.append(extent[layer, :, :, before + position - first])
    return found


def kv_case(
    windows: Sequence[tuple[int, int, int]], heads: int, kv_heads: int, size: int, dtype: torch.dtype,
    *, block: int = 0, padding: int = 0, layer: int = 1, layers: int = 3, most: int = 3, keys_in: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """Windows of (tokens, keys, position of the first); what no key lies in is NaN, sequences lie in scattered extents."""
    tokens, keys = sum(w[0] for w in windows), sum(w[1] for w in windows)
    owned, rows = scattered([w[1] for w in windows], most=most)
    kv = torch.full((rows, layers * 2 * kv_heads * size), float("nan"), dtype=keys_in or dtype)
    drawn = torch.stack([randn(keys, kv_heads * size, dtype=dtype, seed=seed, scale=3 - seed) for seed in (1, 2)], 1)
    places = [
        row
        for pieces, w in zip(owned, windows, strict=True)
        for row in rows_of(kv, pieces, layer, kv_heads, size, w[1])
    ]
    for place, values in zip(places, drawn.view(-1, 2, kv_heads, size), strict=True):
        place.copy_(values)
    positions = [torch.arange(first, first + count) for count, _, first in windows]
    operands = {
        "q": strided(randn(tokens + padding, heads * size, dtype=dtype, scale=2)),
        "kv": kv,
        **tables(owned),
        "seen": torch.tensor([w[1] for w in windows], dtype=torch.int32),
        "cu_seqlens": starts([w[0] for w in windows]),
        "positions": torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]).to(torch.int32),
    }
    attrs = {
        "layer": layer, "kv_heads": kv_heads, "head_size": size, "scale": size**-0.5, "keys": keys, "block": block,
        "parts": kv_parts([w[0] for w in windows], [w[1] for w in windows]),
    }  # fmt: skip
    return Case("kv_attention", operands, {"y": torch.empty(tokens + padding, heads * size, dtype=dtype)}, attrs)


def softmax_rows(case: Case, row_start: int = 0, *, absolute: bool = False) -> tuple[Tensor, Tensor]:
    """In float64, one query row and head at a time: the attention, and which rows see a key. Written apart from kernels."""
    given, attrs = case.operands, case.attrs
    size, kv_heads, layer, block = (attrs[name] for name in ("head_size", "kv_heads", "layer", "block"))
    q, group = given["q"].double(), given["q"].shape[1] // (kv_heads * size)
    y, sees = torch.zeros_like(q), torch.zeros(q.shape[0], dtype=torch.bool)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for sequence, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        pieces = entries[bounds[sequence] : bounds[sequence + 1]]
        seen = int(given["seen"][sequence])
        kept = [x.double() for x in rows_of(given["kv"], pieces, layer, kv_heads, size, seen)]
        both = torch.stack(kept) if kept else q.new_empty(0, 2, kv_heads, size)
        for row in range(first, last):
            if not 0 <= row - row_start < q.shape[0] or not seen:
                continue
            at, count, least = row - row_start, seen, 0
            if "sees" in given:
                least, count = (min(bound, seen) for bound in given["sees"][at].tolist())
            if block:
                count = min(count, (math.floor(int(given["positions"][at]) / block) + 1) * block)
            sees[at] = True
            for head in range(kv_heads * group):
                k, v = both[least:count, :, head // group].unbind(1)
                columns = slice(head * size, (head + 1) * size)
                weights = torch.softmax(k @ q[at, columns] * attrs["scale"], 0)
                y[at, columns] = weights @ (v.abs() if absolute else v)
    return y, sees


def kv_bound(case: Case, expected: Tensor, row_start: int = 0) -> Tensor:
    """As `attention_bound`: e^(2 d) - 1 for scores off by d, S roundings in each of two sums, applied to the sums of |v|."""
    dtype, attrs = case.operands["q"].dtype, case.attrs
    keys = int(case.operands["seen"].max())
    q, kv = (
        case.operands[name].double().nan_to_num(0.0).unflatten(1, (-1, attrs["head_size"])) for name in ("q", "kv")
    )
    delta = gamma(attrs["head_size"] + 4, dtype) * float(q.norm(dim=2).max() * kv.norm(dim=2).max()) * attrs["scale"]
    magnitude, _ = softmax_rows(case, row_start, absolute=True)
    return (2.1 * delta + gamma(2 * keys + 40, dtype)) * magnitude + rounding(expected, dtype)


WINDOWS = {
    "one of one": ([(1, 1, 0)], 1, 1, 2, 0),
    "whole": ([(5, 5, 0), (31, 31, 0)], 4, 4, 16, 0),
    "decode, groups of 4": ([(4, 37, 33), (7, 1300, 1100), (1, 3, 2)], 8, 2, 16, 0),
    "groups of 8": ([(32, 1030, 998)], 8, 1, 8, 0),
    "prefix sees the suffix": ([(9, 61, 20), (3, 0, 0), (70, 90, 10)], 6, 3, 5, 0),
    "blocks of 4": ([(4, 37, 33), (9, 1100, 1020), (50, 50, 0)], 8, 2, 16, 4),
    "blocks of 32": ([(300, 300, 0), (32, 96, 64), (5, 45, 40)], 4, 1, 8, 32),
    "blocks end with the keys": ([(7, 7, 0)], 2, 1, 4, 32),
    "no tokens": ([(0, 9, 0), (2, 9, 7), (0, 0, 0)], 2, 2, 4, 0),
    "a wide group": ([(2, 9, 7)], 300, 1, 2, 4),
}


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", WINDOWS)
def test_kv_attention(name: str, dtype: torch.dtype) -> None:
    windows, heads, kv_heads, size, block = WINDOWS[name]
    case = kv_case(windows, heads, kv_heads, size, dtype, block=block, padding=3)
    expected, sees = softmax_rows(case)
    case.launch()
    y = case.outputs["y"]
    assert_within(y[sees], expected[sees], kv_bound(case, expected)[sees])
    assert y[~sees].isnan().all() and not sees[-3:].any()
    torch.testing.assert_close(case.reference()[sees], expected[sees])


MIXED = [(F32, BF16), (BF16, F32), (F32, torch.float16), (torch.float16, BF16)]
"""Of queries, and of kept keys."""


@pytest.mark.parametrize(("dtype", "keys_in"), MIXED, ids=name_of)
def test_keys_have_a_dtype_of_their_own(dtype: torch.dtype, keys_in: torch.dtype) -> None:
    windows = [(4, 37, 33), (7, 1300, 1100), (1, 3, 2)]
    case = kv_case(windows, 8, 2, 16, dtype, block=4, padding=3, keys_in=keys_in)
    expected, sees = softmax_rows(case)
    case.launch()
    assert_within(case.outputs["y"][sees], expected[sees], kv_bound(case, expected)[sees])
    torch.testing.assert_close(case.reference()[sees], expected[sees])
    check_allocates_nothing(case)
    store = store_case([[7, 8, 9, 3, 2], [5]], [11, 9], 2, 3, dtype, keys_in=keys_in)
    kept = stored(store, [11, 9])
    store.launch()
    assert kept.dtype == keys_in and torch.equal(store.operands["kv"], kept)


def seeing(case: Case, lengths: Sequence[int]) -> Case:
    """The case in which each row sees its own range of keys, some of them beyond the last key; `lengths` by row."""
    draw = torch.Generator().manual_seed(7)
    first = [int(torch.randint(0, max(length, 1), (1,), generator=draw)) for length in lengths]
    sizes = [1 + int(torch.randint(0, length + 5, (1,), generator=draw)) for length in lengths]
    ranges = [(one, one + size) for one, size in zip(first, sizes, strict=True)]
    operands = case.operands | {"sees": torch.tensor(ranges, dtype=torch.int32)}
    return Case(case.kernel, operands, case.outputs, case.attrs | {"block": 0})


def ranged_case(dtype: torch.dtype, *, short: bool = False) -> Case:
    """`short`: keys have no place before the first that a row of their sequence sees, as in a ring."""
    windows = [(9, 61, 20), (6, 1100, 900), (1, 3, 2)]
    case = kv_case(windows, 6, 3, 5, dtype, padding=2)
    case = seeing(case, [keys for count, keys, _ in windows for _ in range(count)] + [1, 1])
    if not short:
        return case
    entries, found = case.operands["extents"].tolist(), []
    for (start, end), (low, high) in zip(
        pairwise(case.operands["cu_seqlens"].tolist()), pairwise(case.operands["cu_extents"].tolist()), strict=True
    ):
        first = int(case.operands["sees"][start:end, 0].min())
        mine = entries[low:high]
        while len(mine) > 1 and mine[1][2] <= first:
            del mine[0]
        row, rows, position, before = mine[0]
        passed = max(first - position, 0)
        found.append([(row, rows, position + passed, before + passed), *map(tuple, mine[1:])])
    return Case(case.kernel, case.operands | tables(found), case.outputs, case.attrs | {"parts": 1})


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_see_ranges_of_kept_keys(dtype: torch.dtype, short: bool) -> None:
    case = ranged_case(dtype, short=short)
    expected, sees = softmax_rows(case)
    case.launch()
    assert_within(case.outputs["y"][sees], expected[sees], kv_bound(case, expected)[sees])
    torch.testing.assert_close(case.reference()[sees], expected[sees])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("block", [0, 4])
def test_kv_attention_may_overwrite_its_queries(dtype: torch.dtype, block: int) -> None:
    case = kv_case([(3, 60, 57), (300, 400, 90)], 4, 2, 8, dtype, block=block)
    case.launch()
    q = case.operands["q"]
    load("kv_attention").launch(**case.operands, **case.attrs, y=q, scratch=case.scratch())
    assert torch.equal(q, case.outputs["y"])


@pytest.mark.parametrize("block", [0, 4])
def test_a_slice_of_a_window_knows_where_it_starts(block: int) -> None:
    case = kv_case([(50, 90, 40), (3, 7, 0), (80, 80, 0)], 2, 1, 8, F32, block=block)
    whole, _ = softmax_rows(case)
    for start, end in ((0, 20), (20, 52), (52, 133)):
        part = {name: case.operands[name][start:end] for name in ("q", "positions")}
        y = torch.full((end - start, 16), float("nan"))
        operands = case.operands | part
        load("kv_attention").launch(**operands, **case.attrs, y=y, row_start=start, scratch=case.scratch())
        assert_within(y, whole[start:end], kv_bound(case, whole)[start:end])


def store_case(
    windows: Sequence[Sequence[int]], lengths: Sequence[int], heads: int, size: int, dtype: torch.dtype,
    *, keys_in: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """Windows of these positions, over sequences that have rows for so many; two rows that are in no sequence."""
    tokens = sum(map(len, windows)) + 2
    owned, rows = scattered(lengths)
    operands = {
        **{name: strided(randn(tokens, heads * size, dtype=dtype, seed=seed)) for name, seed in (("k", 1), ("v", 2))},
        "kv": randn(rows, 3 * 2 * heads * size, dtype=keys_in or dtype, seed=3),
        **tables(owned),
        "cu_seqlens": starts([len(w) for w in windows]),
        "positions": torch.tensor([p for w in windows for p in w] + [0, 1], dtype=torch.int32),
    }
    return Case("kv_store", operands, attrs={"layer": 1, "head_size": size})


def stored(case: Case, lengths: Sequence[int], row_start: int = 0) -> Tensor:
    """The state afterwards, a token at a time: what there is no row for is not kept."""
    given, size = case.operands, case.attrs["head_size"]
    heads, after = given["k"].shape[1] // size, given["kv"].clone()
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for sequence, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        places = rows_of(after, entries[bounds[sequence] : bounds[sequence + 1]], 1, heads, size, lengths[sequence])
        for row in range(first - row_start, last - row_start):
            if 0 <= row < given["k"].shape[0] and int(given["positions"][row]) < lengths[sequence]:
                both = torch.stack([given["k"][row], given["v"][row]])
                places[int(given["positions"][row])].copy_(both.view(2, heads, size))
    return after


STORED = {
    "one": ([[0]], [1]),
    "scattered": ([[7, 8, 9, 3, 2], [], [5, 6], [0, 1, 2, 3]], [11, 4, 9, 4]),
    "a whole prompt": ([range(40)], [40]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", STORED)
def test_kv_store_writes_its_layer_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    windows, lengths = STORED[name]
    case = store_case(windows, lengths, 2, 3, dtype)
    expected = stored(case, lengths)
    after = load("kv_store").reference(**case.operands, **case.attrs)
    case.launch()
    assert torch.equal(case.operands["kv"], expected) and torch.equal(after, expected)


def test_a_slice_of_what_is_stored_knows_where_it_starts() -> None:
    windows, lengths = STORED["scattered"]
    case = store_case(windows, lengths, 2, 3, F32)
    expected = stored(case, lengths)
    for start, end in ((0, 3), (3, 8), (8, 13)):
        part = {name: case.operands[name][start:end] for name in ("k", "v", "positions")}
        load("kv_store").launch(**case.operands | part, **case.attrs, row_start=start)
    assert torch.equal(case.operands["kv"], expected)


def test_a_token_without_a_row_is_not_kept() -> None:
    """Beyond the last extent, and in a sequence that has none."""
    case = store_case([[3, 900], [2]], [8, 0], 2, 3, F32)
    expected = stored(case, [8, 0])
    case.launch()
    assert torch.equal(case.operands["kv"], expected)


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
@pytest.mark.parametrize("block", [0, 4])
def test_kernels_allocate_nothing(block: int, dtype: torch.dtype) -> None:
    check_allocates_nothing(store_case([[7, 8, 9, 3, 2], [5]], [11, 9], 2, 3, dtype))
    check_allocates_nothing(kv_case([(3, 60, 57), (300, 700, 90)], 4, 2, 8, dtype, block=block))
    check_allocates_nothing(blocked_case((3, 600), 4, 2, 16, block, dtype))


def test_launches_refuse_wrong_operands() -> None:
    with pytest.raises(GraphError, match=r"'kv' has keys and values of 2 layers, not layer 2"):
        wrong = store_case([[0]], [1], 1, 2, F32)
        load("kv_store").launch(**wrong.operands | {"kv": torch.zeros(4, 8)}, layer=2, head_size=2)
    with pytest.raises(GraphError, match="rows of 'kv' lie 24 elements apart, expected 12"):
        wrong = store_case([[0]], [1], 1, 2, F32)
        load("kv_store").launch(**wrong.operands | {"kv": torch.zeros(4, 24)[:, :12]}, **wrong.attrs)
    case = kv_case([(2, 3, 1)], 3, 2, 4, F32)
    with pytest.raises(
        GraphError, match=r"kv_attention: operand '.' is float32\[2, 12\], expected float32\[2, G\*2\*4\]"
    ):
        case.launch()
    case = kv_case([(2, 3, 1)], 4, 2, 4, F32)
    case.operands["positions"] = case.operands["positions"].long()
    with pytest.raises(GraphError, match=r"operand 'positions' is int64\[2\], expected int32\[2\]"):
        case.launch()


# --- attention in blocks --------------------------------------------------------------------------------------------------


def blocked_case(lengths: Sequence[int], heads: int, kv_heads: int, size: int, block: int, dtype: torch.dtype) -> Case:
    """A case of `attention` in blocks; the same in `kv_attention` gives what is expected of it."""
    tokens = sum(lengths)
    operands = {
        "q": strided(randn(tokens, heads * size, dtype=dtype, scale=2)),
        "k": strided(randn(tokens, kv_heads * size, dtype=dtype, seed=1, scale=2)),
        "v": strided(randn(tokens, kv_heads * size, dtype=dtype, seed=2)),
        "cu_seqlens": starts(lengths),
    }
    attrs = {"head_size": size, "scale": size**-0.5, "block": block}
    return Case("attention", operands, {"y": torch.empty(tokens, heads * size, dtype=dtype)}, attrs)


def kept(case: Case, row_start: int = 0) -> Case:
    """The `kv_attention` that a case of `attention` is: one layer, every sequence an extent."""
    given, lengths = case.operands, case.operands["cu_seqlens"].diff().tolist()
    heads, size = given["k"].shape[1] // case.attrs["head_size"], case.attrs["head_size"]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(torch.int32)
    parts = zip(given["k"].split(lengths), given["v"].split(lengths), strict=True)
    flat = [torch.stack([x.view(-1, heads, size).transpose(0, 1) for x in both]).reshape(-1) for both in parts]
    first = given["cu_seqlens"].tolist()
    operands = {
        "q": given["q"], "kv": torch.cat(flat).view(-1, 2 * heads * size),
        **tables([[(row, n, 0, 0)] for row, n in zip(first, lengths, strict=False)]),
        "seen": torch.tensor(lengths, dtype=torch.int32), "cu_seqlens": given["cu_seqlens"],
        "positions": positions[row_start : row_start + given["q"].shape[0]],
        **({"sees": given["sees"]} if "sees" in given else {}),
    }  # fmt: skip
    return Case("kv_attention", operands, attrs=case.attrs | {"layer": 0, "kv_heads": heads, "keys": sum(lengths)})


BLOCKED = [((1,), 1, 1, 2, 4), ((5, 1, 31), 4, 2, 16, 4), ((257,), 2, 1, 8, 32), ((3, 0, 520, 7), 3, 3, 5, 32)]
LONG = [((1030,), 2, 1, 5, 32), ((2100,), 1, 1, 4, 32)]  # two key tiles or all keys at once; three


@pytest.mark.some
@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
@pytest.mark.parametrize("shape", [*BLOCKED, *LONG], ids=str)
def test_attention_in_blocks(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    case = blocked_case(*shape, dtype)
    expected, _ = softmax_rows(kept(case))
    case.launch()
    assert_within(case.outputs["y"], expected, kv_bound(kept(case), expected))
    torch.testing.assert_close(case.reference(), expected)


RANGED = [((1,), 1, 1, 2, 4), ((5, 1, 31), 4, 2, 8, 4), ((3, 0, 70, 7), 2, 1, 5, 32)]
WIDE = [pytest.param(shape, marks=pytest.mark.soak) for shape in LONG]  # two tiles of keys, or all at once; three


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("shape", [*RANGED, *WIDE], ids=str)
def test_rows_see_ranges_of_a_sequence(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    case = seeing(blocked_case(*shape, dtype), [length for length in shape[0] for _ in range(length)])
    expected, _ = softmax_rows(kept(case))
    case.launch()
    assert_within(case.outputs["y"], expected, kv_bound(kept(case), expected))
    torch.testing.assert_close(case.reference(), expected)


def test_a_slice_of_attention_in_blocks_knows_where_it_starts() -> None:
    case = blocked_case((50, 3, 80), 2, 1, 8, 4, F32)
    whole, _ = softmax_rows(kept(case))
    for start, end in ((0, 20), (20, 52), (52, 133)):
        operands = case.operands | {"q": case.operands["q"][start:end]}
        y = torch.full((end - start, 16), float("nan"))
        load("attention").launch(**operands, **case.attrs, y=y, row_start=start, scratch=case.scratch())
        assert_within(y, whole[start:end], kv_bound(kept(case), whole)[start:end])


def test_cudnn_serves_no_blocks() -> None:
    step = {"seqs": 1, "head_size": 128, "dtype": "bfloat16"}
    assert attention_options("cuda", **step, block=4) == ("triton",)
    case = blocked_case((8,), 1, 1, 8, 4, BF16)
    with pytest.raises(GraphError, match=r"see all of it; this step has blocks of 4\. .*'triton'"):
        load("attention", "cuda", "cudnn").module.launch(**case.operands, **case.outputs, **case.attrs)


# --- in Triton --------------------------------------------------------------------------------------------------------

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from test_triton_kernels import INTERPRETED, moved, run, scratch_for

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")


FEW = {  # the interpreter takes milliseconds for each program
    "whole": ([(5, 5, 0), (11, 11, 0)], 2, 2, 16, 0),
    "decode, groups of 4": ([(4, 37, 33), (2, 150, 140), (1, 3, 2)], 8, 2, 16, 0),
    "prefix sees the suffix": ([(9, 61, 20), (3, 0, 0), (2, 90, 10)], 3, 1, 5, 0),
    "blocks of 4": ([(4, 37, 33), (9, 140, 120)], 4, 1, 16, 4),
    "no tokens": ([(0, 9, 0), (2, 9, 7), (0, 0, 0)], 2, 2, 4, 0),
    "a wide group": ([(2, 9, 7)], 67, 1, 2, 4),
}


def triton_bound(case: Case, expected: Tensor, row_start: int = 0) -> Tensor:
    """As on the CPU, and the weights are rounded to the dtype before they meet the values; exp2 errs as scores do."""
    magnitude, _ = softmax_rows(case, row_start, absolute=True)
    return 2 * kv_bound(case, expected, row_start) + unit(case.operands["q"].dtype) * magnitude


def check_in_triton(case: Case, alias: dict[str, str] | None = None, *, row_start: int = 0) -> None:
    """Compare with float64; rows that see no key stay as they were."""
    expected, sees = softmax_rows(case, row_start)
    before = case.operands["q"] if alias else torch.full_like(case.operands["q"], float("nan"))
    y = run(case, DEVICE, alias, row_start=row_start)["y"]
    assert_within(y[sees], expected[sees], triton_bound(case, expected, row_start)[sees])
    torch.testing.assert_close(y[~sees], before[~sees], rtol=0, atol=0, equal_nan=True)


def cut_into(monkeypatch: pytest.MonkeyPatch, segments: int, keys: int = 1, aligned: int = 1) -> None:
    """Let segments have few keys, with at most this many segments."""
    from mosaic.kernels.cuda import kv_attention

    for module in (kv_operator, kv_attention):
        for name, value in (("SEGMENTS", segments), ("SEGMENT_KEYS", keys), ("SEGMENT_ALIGNED", aligned)):
            monkeypatch.setattr(module, f"KV_{name}", value)


@pytest.mark.grid(together=1)
@triton_test
@pytest.mark.parametrize(("segments", "dtype"), [(1, F32), (3, BF16)], ids=["one pass", "split"])
@pytest.mark.parametrize("name", FEW)
def test_kv_attention_in_triton(name: str, segments: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one segment, and in several."""
    windows, heads, kv_heads, size, block = FEW[name]
    cut_into(monkeypatch, segments)
    case = kv_case(windows, heads, kv_heads, size, dtype, block=block, padding=3)
    assert case.attrs["parts"] > 1 or segments == 1
    check_in_triton(case)


@pytest.mark.some
@triton_test
@pytest.mark.parametrize(
    ("segments", "dtype", "short"),
    [(1, F32, False), (3, BF16, False), (3, BF16, True)],
    ids=["one pass", "split", "ring"],
)
def test_rows_see_ranges_of_kept_keys_in_triton(
    segments: int, dtype: torch.dtype, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(monkeypatch, segments)
    check_in_triton(ranged_case(dtype, short=short))


@triton_test
@pytest.mark.parametrize(("dtype", "keys_in"), MIXED[:2], ids=name_of)
def test_keys_have_a_dtype_of_their_own_in_triton(dtype: torch.dtype, keys_in: torch.dtype) -> None:
    check_in_triton(kv_case([(4, 37, 33), (9, 140, 120)], 4, 1, 16, dtype, block=4, padding=3, keys_in=keys_in))
    store = store_case([[7, 8, 9, 3, 2], [5]], [11, 9], 2, 3, dtype, keys_in=keys_in)
    kept = stored(store, [11, 9])
    assert torch.equal(run(store, DEVICE)["kv"], kept)


@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("shape", RANGED, ids=str)
def test_rows_see_ranges_of_a_sequence_in_triton(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    case = seeing(blocked_case(*shape, dtype), [length for length in shape[0] for _ in range(length)])
    expected, _ = softmax_rows(kept(case))
    assert_within(run(case, DEVICE)["y"], expected, triton_bound(kept(case), expected))


@triton_test
@pytest.mark.parametrize(("segments", "shape"), [(1, (8, 2, 128)), (2, (2, 1, 192)), (1, (1, 1, 128))], ids=str)
def test_wide_heads_in_triton(shape: tuple[int, int, int], segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, segments)
    check_in_triton(kv_case([(17, 90, 20), (3, 70, 67)], *shape, BF16, block=32))


@triton_test
@pytest.mark.parametrize("segments", [1, 3])
def test_kv_attention_in_triton_may_overwrite_its_queries(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, segments)
    check_in_triton(kv_case([(3, 60, 57), (10, 100, 90)], 4, 2, 8, BF16, block=4, padding=2), {"y": "q"})


@triton_test
@pytest.mark.parametrize("segments", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_chunks_of_prompts_beside_blocks_in_triton(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows and long ones each have tiles of their own, once: rows that were overwritten would be read as queries."""
    from mosaic.kernels.cuda.kv_attention import cut_of, long_rows_of

    as_on_hopper(monkeypatch)
    cut_into(monkeypatch, segments)
    windows = [(4, 9 + 3 * number, 5 + 3 * number) for number in range(10)]
    windows[3:3], windows[6:6], windows[9:9] = [(26, 60, 34)], [(8, 30, 22)], [(9, 12, 3)]
    case = kv_case(windows, 4, 1, 8, BF16, block=4, padding=2)
    own = cut_of(case.operands["q"], len(windows), 4, 1, 8).tile
    assert own.rows == 32 and (long_rows_of(case.operands["q"], 8, own, 2) == 64 or not INTERPRETED)
    check_in_triton(case, {"y": "q"})
    for start, end in ((0, 24), (24, len(case.operands["q"]))):
        part = {name: case.operands[name][start:end] for name in ("q", "positions")}
        outputs = {"y": torch.empty(end - start, 32, dtype=BF16)}
        check_in_triton(Case("kv_attention", case.operands | part, outputs, case.attrs), row_start=start)


@pytest.mark.grid(together=1)
@triton_test
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("block", [0, 4])
def test_a_slice_of_a_window_in_triton(block: int, segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, segments)
    case = kv_case([(20, 50, 30), (3, 7, 0), (10, 10, 0)], 2, 1, 8, BF16, block=block)
    for start, end in ((0, 9), (9, 22), (22, 33)):
        part = {name: case.operands[name][start:end] for name in ("q", "positions")}
        outputs = {"y": torch.empty(end - start, 16, dtype=BF16)}
        check_in_triton(Case("kv_attention", case.operands | part, outputs, case.attrs), row_start=start)


@triton_test
def test_segments_are_the_same_bits_in_one_program_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, 5, keys=16, aligned=16)
    check_bits([(5, 40, 35), (9, 60, 50), (7, 33, 30)], 2, 1, 4)


def check_bits(windows: Sequence[tuple[int, int, int]], heads: int, kv_heads: int, size: int) -> None:
    """With room for all parts, for some, and for none; and a request alone as in a batch."""
    case = kv_case(windows, heads, kv_heads, size, BF16, block=4)
    parts = [window * kv_segments(window, keys) for window, keys, _ in windows]
    assert case.attrs["parts"] > 1 and sum(kv_segments(window, keys) > 1 for window, keys, _ in windows) > 2
    roomy = run(case, DEVICE)["y"]
    for room in (1, parts[0], sum(parts[:2])):
        tight = Case(case.kernel, case.operands, case.outputs, case.attrs | {"parts": room})
        assert torch.equal(run(tight, DEVICE)["y"], roomy), room
    bounds, alike = case.operands["cu_seqlens"].tolist(), 0
    for number, (window, keys, _) in enumerate(windows):
        rows = slice(bounds[number], bounds[number + 1])
        mine = {name: case.operands[name][rows] for name in ("q", "positions")}
        mine |= {
            "seen": case.operands["seen"][number : number + 1], "cu_seqlens": starts([window]),
            "cu_extents": case.operands["cu_extents"][number : number + 2],
        }  # fmt: skip
        outputs = {"y": torch.empty(window, case.operands["q"].shape[1], dtype=BF16)}
        alone = Case(case.kernel, case.operands | mine, outputs, case.attrs | {"parts": kv_parts([window], [keys])})
        if kernel_tile(alone) == kernel_tile(case):
            alike += 1
            assert torch.equal(run(alone, DEVICE)["y"], roomy[rows]), number
    assert alike


def kernel_tile(case: Case) -> object:
    """The tile that a launch takes, which goes by the mean length of the windows."""
    from mosaic.kernels.cuda.kv_attention import tile_of

    q, sequences = case.operands["q"], case.operands["seen"].shape[0]
    size = case.attrs["head_size"]
    group = q.shape[1] // (size * case.attrs["kv_heads"])
    return tile_of(q, size, -(-q.shape[0] // sequences) * group)


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from mosaic.kernels.cuda.shared import launching

    if INTERPRETED:
        monkeypatch.setattr(launching, "capability", lambda operand: 90)


@pytest.mark.soak
@triton_test
def test_kv_attention_on_a_tile_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles of keys, then partially visible ones, in several extents."""
    as_on_hopper(monkeypatch)
    cut_into(monkeypatch, 2, keys=100, aligned=64)
    check_in_triton(kv_case([(33, 333, 290), (31, 35, 0)], 8, 2, 16, BF16, block=4))


@pytest.mark.grid(together=1)
@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("shape", BLOCKED, ids=str)
def test_attention_in_blocks_in_triton(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    case = blocked_case(*shape, dtype)
    expected, _ = softmax_rows(kept(case))
    assert_within(run(case, DEVICE)["y"], expected, triton_bound(kept(case), expected))


@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 3), (2, 600)])
def test_kv_store_in_triton(heads: int, size: int, dtype: torch.dtype) -> None:
    windows, lengths = [[7, 8, 900, 3, 2], [], [5, 6], [1]], [11, 4, 9, 0]
    case = store_case(windows, lengths, heads, size, dtype)
    expected = stored(case, lengths)
    assert torch.equal(run(case, DEVICE)["kv"], expected)


@triton_test
@pytest.mark.parametrize("pieces", [[(1, 8, 0, 0), (9, 2, 4, 0)], [(1, 8, 0, 0), (1, 8, 2, 4)]], ids=["tail", "middle"])
def test_dropped_rows_keep_nothing_in_triton(pieces: Pieces) -> None:
    """A position beyond the last extent has no row, although an earlier extent dropped rows that reach as far."""
    case = store_case([[5, 6, 7, 3]], [6], 2, 3, F32)
    operands = case.operands | tables([pieces]) | {"kv": randn(11, 36, seed=3)}
    case = Case("kv_store", operands, attrs=case.attrs)
    expected = load("kv_store").reference(**case.operands, **case.attrs)
    assert torch.equal(run(case, DEVICE)["kv"], expected)


@triton_test
def test_a_slice_of_what_is_stored_in_triton() -> None:
    windows, lengths = STORED["scattered"]
    case = store_case(windows, lengths, 2, 3, F32)
    for start, end in ((0, 3), (3, 13)):
        part = {name: case.operands[name][start:end] for name in ("k", "v", "positions")}
        mine = Case("kv_store", case.operands | part, attrs=case.attrs)
        assert torch.equal(run(mine, DEVICE, row_start=start)["kv"], stored(mine, lengths, start))


@triton_test
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_results_of_segments_fill_the_scratch_that_is_planned(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less, sequences that there is no room for leave it as it was."""
    cut_into(monkeypatch, 3)
    case = kv_case([(3, 60, 57), (5, 90, 85)], 2, 1, 8, BF16)
    given = {name: moved(t, DEVICE) for name, t in (case.operands | case.outputs).items()}
    planned = scratch_for(case, DEVICE)
    assert planned is not None and planned.numel() == 4 * (3 + 5) * 3 * 2 * (8 + 2)
    scratch = planned[: int(share * planned.numel())]
    load("kv_attention", "cuda").module.launch(**given, **case.attrs, scratch=scratch)
    untouched = scratch.view(torch.float32).isnan().float().mean().item() if share else 1.0
    assert {0.0: 1.0, 1.0: 0.0}.get(share, 0.06) == pytest.approx(untouched, abs=0.01)


def test_parts_have_room_for_the_segments_of_any_step() -> None:
    """For any number of owned keys that a window sees, and any number of its rows that attend."""
    rng = random.Random(5)
    for _ in range(3000):
        windows = [rng.choice([1, 4, 31, 32, 33, 64, 200, 300]) for _ in range(rng.choice([1, 1, 2, 5, 20]))]
        owned = [rng.choice([1, 1024, 1025, 4096, 8192, 8193, 1 << 17, rng.randrange(1, 1 << 18)]) for _ in windows]
        parts = kv_parts(windows, owned)
        if sum(windows) > 512:
            assert parts == 1
            continue
        rows = [rng.randrange(1, window + 1) for window in windows]
        cut = [(count, kv_segments(count, rng.randrange(1, keys + 1))) for count, keys in zip(rows, owned, strict=True)]
        assert sum(count * segments for count, segments in cut if segments > 1) <= parts
        assert parts <= max(512 * sum(keys > 1024 for keys in owned), 1)


def test_segments_go_by_the_request_alone_and_fill_a_gpu() -> None:
    assert [kv_segments(32, keys) for keys in (1, 1024, 1025, 1 << 15, 1 << 17)] == [1, 1, 2, 16, 16]
    assert [kv_segments(window, 1 << 17) for window in (4, 64, 128, 256, 257, 4096)] == [16, 8, 4, 2, 1, 1]


# --- contracts --------------------------------------------------------------------------------------------------------

TOKENS, ROWS, KEYS, SEQS, SPAN, EXTENTS = (
    symbol(name) for name in ("tokens", "kv_rows", "keys", "seqs", "span", "extents")
)
K16 = Spec((TOKENS, 16), "bfloat16")
KV = Spec((ROWS, 96), "bfloat16")
BOUNDS = Spec((SEQS + 1,), "int32")
WHERE = {"extents": Spec((EXTENTS, 4), "int64"), "cu_extents": BOUNDS, "cu_seqlens": BOUNDS}
ATTENDED = {
    "q": Spec((TOKENS, 64), "bfloat16"), "kv": KV, **WHERE, "seen": Spec((SEQS,), "int32"),
    "positions": Spec((TOKENS,), "int32"),
}  # fmt: skip
STORES = {"k": K16, "v": K16, "kv": KV, **WHERE, "positions": Spec((TOKENS,), "int32")}
ATTRS = {"layer": 2, "kv_heads": 2, "head_size": 8, "scale": 1.0, "span": SPAN, "keys": KEYS}


def test_contracts_count_this_layers_work() -> None:
    store, attend = contract("kv_store"), contract("kv_attention")
    assert store.work(**STORES, layer=2, head_size=8).outputs == () and store.updates == ("kv",)
    assert store.work(**STORES, layer=2, head_size=8).bytes == TOKENS * (4 + 2 * 2 * 16 * 2)
    q = ATTENDED["q"]
    assert attend.work(**ATTENDED, **ATTRS).outputs == (q,)
    assert attend.work(**ATTENDED, **ATTRS).flops == 4 * SPAN * TOKENS * 64
    assert attend.rate == "attention" and attend.work(**ATTENDED, **ATTRS).rate_rows == 8 * TOKENS
    moved = attend.work(**ATTENDED, **ATTRS).bytes
    rows = KEYS * 2 * 16 * 2
    assert moved - rows - TOKENS * (2 * 128 + 4) - 8 * (SEQS + 1) - 4 * SEQS - 32 * EXTENTS == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, "'kv' has keys and values of 3 layers, not layer 3"),
        ({"kv_heads": 5}, r"operand '.*' is .*, expected bfloat16\[.*\*5\*8\]"),
        ({"kv": Spec((ROWS, 80), "bfloat16")}, r"operand 'kv' is .*, expected bfloat16\[kv_rows, L\*2\*2\*8\]"),
        (
            {"kv": Spec((ROWS, 96), "int32")},
            r"operand 'kv' is int32\[kv_rows, 96\]: keys and values are kept as floats",
        ),
        ({"q": Spec((TOKENS, 16 * SEQS), "bfloat16")}, "q must have all heads"),
        ({"extents": Spec((EXTENTS, 3), "int64")}, "operand 'extents' is .*, expected int64\\[extents, 4\\]"),
        ({"extents": Spec((EXTENTS, 4), "int32")}, r"operand 'extents' is .*, expected int64\[extents, 4\]"),
        ({"cu_extents": Spec((SEQS,), "int32")}, r"operand 'seen' is .*, expected int32\[seqs - 1\]"),
        ({"seen": Spec((SEQS + 1,), "int32")}, "operand 'seen' is .*, expected int32\\[seqs\\]"),
        ({"positions": Spec((KEYS,), "int32")}, "operand 'positions' is .*, expected int32\\[tokens\\]"),
        ({"block": -1}, "block must be"),
    ],
)
def test_contracts_refuse(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        contract("kv_attention").work(**{**ATTENDED, **ATTRS, **change})


def test_store_refuses() -> None:
    for change, message in (
        ({"v": Spec((TOKENS, 8), "bfloat16")}, r"operand 'v' is .*, expected bfloat16\[tokens, 16\]"),
        ({"positions": Spec((TOKENS,), "int64")}, r"operand 'positions' is .*, expected int32\[tokens\]"),
        (
            {"kv": Spec((ROWS, 96), "int32")},
            r"operand 'kv' is int32\[kv_rows, 96\]: keys and values are kept as floats",
        ),
        ({"cu_extents": Spec((SEQS,), "int32")}, r"operand 'cu_seqlens' is .*, expected int32\[seqs\]"),
        ({"head_size": 5}, r"operand 'k' is .*, expected bfloat16\[tokens, K\*5\]"),
    ):
        with pytest.raises(GraphError, match=message):
            contract("kv_store").work(**{**STORES, "head_size": 8, **change}, layer=0)


# --- a toy model, planned, checked, run ------------------------------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, SIZE, LAYERS = 24, 4, 2, 8, 2
WIDTH = KV_HEADS * SIZE


def toy(block: int = 0, *, chunked: bool = False, dtype: str = "float64") -> Callable[[Graph], None]:
    """Two layers of attention over kept keys; `chunked` stores and attends by chunks of tokens."""

    def build(g: Graph) -> None:
        tokens, rows, keys, seqs, span, extents = (
            g.dim(n) for n in ("tokens", "kv_rows", "keys", "seqs", "span", "extents")
        )
        kv = g.state("kv", (rows, LAYERS * 2 * WIDTH), dtype)
        h = g.input("x", (tokens, HIDDEN), dtype)
        cu_seqlens, cu_extents = (g.input(name, (seqs + 1,), "int32") for name in ("cu_seqlens", "cu_extents"))
        where = g.input("extents", (extents, 4), "int64"), cu_extents
        seen = g.input("seen", (seqs,), "int32")
        positions = g.input("positions", (tokens,), "int32")
        out = g.output("out", (tokens, HIDDEN), dtype)
        for layer in range(LAYERS):
            weights = {
                name: g.weight(f"{layer}.{name}", shape, dtype, tensor=f"{layer}.{name}")
                for name, shape in (
                    ("q", (HEADS * SIZE, HIDDEN)), ("k", (WIDTH, HIDDEN)), ("v", (WIDTH, HIDDEN)), ("o", (HIDDEN, HEADS * SIZE)),
                )
            }  # fmt: skip
            attrs = {"layer": layer, "kv_heads": KV_HEADS, "head_size": SIZE, "scale": SIZE**-0.5, "span": span}
            attrs |= {"keys": keys}
            last = {"out": out} if layer == LAYERS - 1 else {}

            def store(h: Any, weights: Any = weights, layer: int = layer) -> None:
                k, v = g.add_op("linear", h, weights["k"]), g.add_op("linear", h, weights["v"])
                g.add_op("kv_store", k, v, kv, *where, cu_seqlens, positions, layer=layer, head_size=SIZE)

            def attend(h: Any, into: Any, weights: Any = weights, attrs: Any = attrs) -> Any:
                q = g.add_op("linear", h, weights["q"])
                y = g.add_op("kv_attention", q, kv, *where, seen, cu_seqlens, positions, block=block, **attrs)
                return g.add_op("linear", y, weights["o"], **into)

            if chunked:
                following = last["out"] if last else g.buffer(f"h{layer}", (tokens, HIDDEN), dtype)
                with g.chunk("proj", over=tokens, tile=1, name=f"store{layer}"):
                    store(h)
                with g.chunk("proj", over=tokens, tile=1, name=f"attend{layer}"):
                    attend(h, {"out": following})
                h = following
            else:
                store(h)
                h = attend(h, last)

    return build


def toy_plan(windows: Sequence[tuple[int, int, int]], *, kv_rows: int, config: Any = None, **options: Any) -> Plan:
    keys, tokens = sum(w[1] for w in windows), sum(w[0] for w in windows)
    dims = {"tokens": tokens, "kv_rows": kv_rows, "keys": keys + 2, "seqs": len(windows), "span": 10, "extents": 9}
    return plan_graph(toy(**options), dims=dims, device="cpu", config=config)


class Dense:
    """The toy in float64 and without state: keys of every sequence, layer by layer, in plain lists."""

    def __init__(self, weights: dict[str, Tensor], block: int) -> None:
        self.weights, self.block = {name: w.double() for name, w in weights.items()}, block
        self.keys: list[dict[int, list[Tensor]]] = [
            {} for _ in range(LAYERS)
        ]  # layer -> sequence -> [k | v] by position

    def step(self, x: Tensor, windows: Sequence[tuple[int, int, int]]) -> Tensor:
        h = x.double()
        for layer in range(LAYERS):
            q, k, v, o = (self.weights[f"{layer}.{name}"] for name in "qkvo")
            done, row = [], 0
            for sequence, (count, keys, first) in enumerate(windows):
                mine = h[row : row + count]
                row += count
                kept = self.keys[layer].setdefault(sequence, [])
                kept[first : first + count] = list(torch.cat([mine @ k.T, mine @ v.T], dim=1))
                for offset, token in enumerate(mine):
                    seen = min(keys, ((first + offset) // self.block + 1) * self.block) if self.block else keys
                    k_SKH, v_SKH = torch.stack(kept)[:seen].view(-1, 2, KV_HEADS, SIZE).unbind(1)
                    queries = (q @ token).view(KV_HEADS, HEADS // KV_HEADS, SIZE)
                    weights = torch.softmax(torch.einsum("kgh,skh->kgs", queries, k_SKH) * SIZE**-0.5, dim=2)
                    done.append(o @ torch.einsum("kgs,skh->kgh", weights, v_SKH).flatten())
            h = torch.stack(done)
        return h


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace() as opened:
        for pool in ("workspace", "weights", "state/kv"):
            opened.resize(pool, 1 << 22)
        yield opened


def run_step(
    plan: Plan, workspace: Workspace, weights: dict[str, Tensor], x: Tensor, windows: Sequence[tuple[int, int, int]],
    owned: Sequence[Pieces],
) -> Tensor:  # fmt: skip
    """One step: sequence b has rows in the extents `owned[b]`."""
    assert check_plan(plan.document) == []
    executor = Executor(plan, workspace, debug="poison")
    for name, weight in weights.items():
        executor.buffer(name).copy_(weight)
    inputs = executor.inputs
    inputs["x"].copy_(x)
    where = tables(owned)
    inputs["extents"].fill_(1 << 40)[: len(where["extents"])].copy_(where["extents"])
    inputs["cu_extents"].copy_(where["cu_extents"])
    inputs["seen"].copy_(torch.tensor([w[1] for w in windows]))
    inputs["cu_seqlens"].copy_(starts([w[0] for w in windows]))
    inputs["positions"].copy_(torch.cat([torch.arange(first, first + n) for n, _, first in windows]))
    executor.run()
    return executor.outputs["out"].clone()


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_toy_model_decodes_through_its_state(workspace: Workspace, block: int, chunk: int | None) -> None:
    """Prefill, then windows that are written again and again, as denoising does, in state that grows."""
    weights = {
        f"{layer}.{name}": randn(*shape, dtype=F64, seed=10 * layer + i, scale=0.3)
        for layer in range(LAYERS)
        for i, (name, shape) in enumerate(
            (
                ("q", (HEADS * SIZE, HIDDEN)),
                ("k", (WIDTH, HIDDEN)),
                ("v", (WIDTH, HIDDEN)),
                ("o", (HIDDEN, HEADS * SIZE)),
            )
        )
    }
    owned, rows = scattered([24, 40], seed=5)
    assert rows <= 80 and max(map(len, owned)) > 1
    dense = Dense(weights, block)
    steps = [
        ([(11, 11, 0), (5, 5, 0)], 80),
        ([(4, 15, 11), (4, 9, 5)], 80),
        ([(4, 15, 11), (4, 9, 5)], 99),  # the same positions again, in a state of more rows
        ([(2, 15, 5), (8, 17, 9)], 99),  # a window amid what is kept
    ]
    options = {"block": block, "chunked": chunk is not None, "config": {"proj": chunk} if chunk else None}
    for number, (windows, kv_rows) in enumerate(steps):
        plan = toy_plan(windows, kv_rows=kv_rows, **options)
        x = randn(sum(w[0] for w in windows), HIDDEN, dtype=F64, seed=100 + number)
        found = run_step(plan, workspace, weights, x, windows, owned)
        torch.testing.assert_close(found, dense.step(x, windows), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plans_of_the_toy_are_proved_and_their_claims_checked(device: str) -> None:
    """Attention over kept keys is the plain one for such heads, a state its own pool; the checker counts for itself."""
    dims = {"tokens": 300, "kv_rows": 5000, "keys": 4000, "seqs": 3, "span": 1500, "extents": 7}
    plan = plan_graph(toy(4, dtype="bfloat16"), dims=dims, device=device)
    document = plan.document
    plain = {"kv_attention": "triton"} if device == "h200" else {}
    assert check_plan(document) == [] and document["implementations"] == plain
    state = next(b for b in document["buffers"] if b["name"] == "kv")
    assert (state["pool"], state["start"], state["end"]) == ("state/kv", 0, len(document["ops"]))
    ops = {
        kernel: [op for op in document["ops"] if op["kernel"] == kernel][1] for kernel in ("kv_store", "kv_attention")
    }
    attend, store = ops["kv_attention"], ops["kv_store"]
    assert attend["flops"] == 4 * 1500 * 300 * HEADS * SIZE
    where = 7 * 4 * 8 + 2 * 4 * 4 + 3 * 4  # extents, where those and the windows of a sequence begin, keys that it sees
    assert attend["bytes"] == 4000 * 2 * WIDTH * 2 + 300 * (2 * HEADS * SIZE * 2 + 4) + where
    assert store["bytes"] == 300 * (4 + 4 * WIDTH * 2)
    wrong: list[tuple[Any, str, Any, str]] = [
        (attend["attrs"], "layer", LAYERS, "operator"),
        (attend["attrs"], "layer", -1, "operator"),
        (attend["attrs"], "block", -4, "operator"),
        (attend["attrs"], "kv_heads", 3, "operator"),
        (store["attrs"], "layer", LAYERS, "operator"),
        (store["attrs"], "head_size", 3, "operator"),
        (attend, "bytes", attend["bytes"] + 1, "bytes"),
        (attend, "flops", attend["flops"] + 1, "flops"),
        (store, "bytes", store["bytes"] - 1, "bytes"),
    ]
    for where, key, value, code in wrong:
        memo: dict[int, Any] = {}
        broken = copy.deepcopy(document, memo)
        memo[id(where)][key] = value
        assert code in {violation.code for violation in check_plan(broken)}, (key, value)


def test_the_time_of_kept_attention_is_not_cudnns() -> None:
    """A profile's cuDNN rates are not for it."""
    card = load_device("h200")
    slow = replace(card, attention_rates={**card.attention_rates, "triton": {1: 1e9}})
    dims = {"tokens": 32, "kv_rows": 100_000, "keys": 100_000, "seqs": 1, "span": 100_000, "extents": 1}
    plan = plan_graph(toy(dtype="bfloat16"), dims=dims, device=slow)
    assert plan.predicted_step_ms > 1e3 * LAYERS * 4 * 100_000 * 32 * HEADS * SIZE / 1e9


def blocked(g: Graph, block: int) -> None:
    tokens, seqs = g.dim("tokens"), g.dim("seqs")
    q, k = (g.input(name, (tokens, width), "bfloat16") for name, width in (("q", HEADS * 8), ("k", 16)))
    bounds, y = g.input("cu_seqlens", (seqs + 1,), "int32"), g.output("y", (tokens, HEADS * 8), "bfloat16")
    attrs = {"head_size": 8, "scale": 1.0, "span": g.dim("span"), "block": block}
    g.add_op("attention", q, k, k, bounds, out=y, **attrs)


def test_plans_choose_no_cudnn_for_blocks() -> None:
    dims = {"tokens": 4096, "seqs": 1, "span": 4096}
    for block, name in ((0, "cudnn"), (4, "triton")):
        plan = plan_graph(lambda g, block=block: blocked(g, block), dims=dims, device="h200")
        assert plan.document["implementations"] == {"attention": name} and check_plan(plan.document) == []
    broken = {**copy.deepcopy(plan.document), "implementations": {"attention": "cudnn"}}
    assert "implementation" in {violation.code for violation in check_plan(broken)}
