"""prefix_attention, joined_attention and query_change: random batches against float64 on the CPU, written apart."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
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
    randn,
    rounding,
    strided,
    unit,
)
from test_kv import WINDOWS, kv_bound, kv_case, rows_of, softmax_rows
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load

GROUPS = [(1, 2), (4, 2), (7, 1), (8, 1), (3, 3)]  # query heads of a key-value head, and how many of these


def prefix_case(name: str, dtype: torch.dtype) -> Case:
    """A case of `kv_attention`, with a place for log-sum-exps."""
    windows, heads, kv_heads, size, block = WINDOWS[name]
    return summed(kv_case(windows, heads, kv_heads, size, dtype, block=block, padding=3))


def summed(case: Case) -> Case:
    """The case of `kv_attention` as one of `prefix_attention`."""
    rows, columns = case.operands["q"].shape
    sums = strided(torch.empty(rows, columns // case.attrs["head_size"]))
    return Case("prefix_attention", case.operands, {**case.outputs, "logsumexp": sums}, case.attrs)


def stated_sums(case: Case) -> Tensor:
    """In float64, one query row and head at a time; NaN for rows that see no key."""
    given, attrs = case.operands, case.attrs
    size, kv_heads, block = attrs["head_size"], attrs["kv_heads"], attrs["block"]
    q, heads = given["q"].double(), given["q"].shape[1] // size
    found = torch.full((q.shape[0], heads), float("nan"), dtype=F64)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for b, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        seen = int(given["seen"][b])
        kept = [
            x[0].double()
            for x in rows_of(given["kv"], entries[bounds[b] : bounds[b + 1]], attrs["layer"], kv_heads, size, seen)
        ]
        for row in range(first, last) if seen else ():
            count = min(seen, (int(given["positions"][row]) // block + 1) * block) if block else seen
            keys = torch.stack(kept[:count])
            for head in range(heads):
                scores = keys[:, head * kv_heads // heads] @ q[row, head * size : (head + 1) * size]
                found[row, head] = torch.logsumexp(scores * attrs["scale"], 0)
    return found


def score_error(case: Case) -> float:
    """A bound of how far scores may be off."""
    size, dtype = case.attrs["head_size"], case.operands["q"].dtype
    q, kv = (case.operands[n].double().nan_to_num(0.0).unflatten(1, (-1, size)) for n in ("q", "kv"))
    return gamma(size + 8, dtype) * float(q.norm(dim=2).max() * kv.norm(dim=2).max()) * float(case.attrs["scale"])


def assert_summed(case: Case, found: dict[str, Tensor], slack: float = 1.0) -> None:
    """y is that of `kv_attention`; its rows that see a key have their log-sum-exps."""
    expected, sees = softmax_rows(case)
    sums = stated_sums(case)
    assert_within(
        found["y"][sees], expected[sees], (slack * kv_bound(case, expected) + weights_error(case, slack))[sees]
    )
    bound = 2.1 * score_error(case) + gamma(2 * int(case.operands["seen"].max()) + 200, case.operands["q"].dtype)
    assert_within(found["logsumexp"][sees], sums[sees], slack * (bound + rounding(sums, F32))[sees])
    assert found["y"][~sees].isnan().all() and found["logsumexp"][~sees].isnan().all()


def weights_error(case: Case, slack: float) -> Tensor:
    """Triton multiplies weights that are rounded to the operands' dtype: with a slack, a bound of what that may change."""
    return 2 * (slack - 1) * unit(case.operands["q"].dtype) * softmax_rows(case, absolute=True)[0]


@pytest.mark.some
@pytest.mark.parametrize(("name", "dtype"), [*zip(WINDOWS, cycle(DTYPES), strict=False)], ids=str)
def test_prefix_attention(name: str, dtype: torch.dtype) -> None:
    case = prefix_case(name, dtype)
    case.launch()
    assert_summed(case, case.outputs)
    sums = stated_sums(case)
    torch.testing.assert_close(case.reference()["logsumexp"], sums, equal_nan=True)


# --- joined with the keys of a block -----------------------------------------------------------------------------------


def joined_case(seed: int, dtype: torch.dtype, *, fresh: bool, held: bool = True, longest: int = 12) -> Case:
    """Blocks behind prefixes of some blocks or none: whole ones, parts of them, and with `fresh` those beside the block before.

    What is known of the prefix is random, where it has a place; other places are NaN.
    """
    rng = random.Random(seed)
    group, kv_heads = GROUPS[seed % len(GROUPS)]
    size, block, heads = rng.choice([4, 5, 16]), rng.choice([2, 4, 7]), group * kv_heads
    windows, prefixes, refreshed = [], [], []
    for number in range(rng.randint(2, 4)):
        prefix = rng.choice([0, rng.randint(1, longest)]) * block if number else block
        new = bool(fresh and (rng.random() < 0.6 or not number or not held))
        whole = prefix + block if rng.random() < 0.8 else prefix + rng.randint(1, block)
        first = rng.randint(prefix, whole - 1) if rng.random() < 0.5 else prefix
        if new and prefix and rng.random() < 0.6:
            first = prefix - block
        windows.append((rng.randint(1, whole - first) if first >= prefix else whole - first, whole, first))
        prefixes.append(prefix)
        refreshed.append(prefix * new)
    if rng.random() < 0.3:
        windows, prefixes, refreshed = [*windows, (0, 3, 0)], [*prefixes, 0], [*refreshed, 0]
    given = kv_case(windows, heads, kv_heads, size, dtype, block=block if seed % 4 else 0, padding=2)
    rows, slots, owners = given.operands["q"].shape[0], 3, len(windows) + 2
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    slot, owner = rng.randrange(slots), rng.sample(range(owners), len(windows))
    kept = torch.full((owners, slots, block, heads, size), float("nan"), dtype=dtype)
    sums = torch.full((owners + 1, slots, block, heads), float("nan"))
    new_rows, new_sums = (
        torch.full((rows, heads * size), float("nan"), dtype=dtype),
        torch.full((rows, heads), float("nan")),
    )
    for b, (start, end) in enumerate(pairwise(given.operands["cu_seqlens"].tolist())):
        if refreshed[b]:
            new_rows[start:end], new_sums[start:end] = (
                drawn(end - start, heads * size).to(dtype),
                3 * drawn(end - start, heads),
            )
        elif prefixes[b]:
            kept[owner[b], slot], sums[owner[b], slot] = drawn(block, heads, size).to(dtype), 3 * drawn(block, heads)
    operands = given.operands | {
        "prefix": torch.tensor(prefixes, dtype=torch.int32), "kept": kept.flatten(1), "kept_sums": sums.flatten(1),
        "owner": torch.tensor(owner),
    }  # fmt: skip
    if not held:
        operands = {name: tensor for name, tensor in operands.items() if name not in ("kept", "kept_sums", "owner")}
    if fresh:
        operands |= {"fresh": new_rows, "fresh_sums": strided(new_sums)}
        operands["refreshed"] = torch.tensor(refreshed, dtype=torch.int32)
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
    return Case("joined_attention", operands, given.outputs, attrs | {"slot": slot, "rows": block})


def stated_join(case: Case) -> dict[str, Tensor]:
    """In float64, a row at a time: what is given counts as one key more, whose score is its log-sum-exp.

    Also the same of absolute values, "magnitude".
    """
    given, attrs = case.operands, case.attrs
    size, kv_heads, block, rows = attrs["head_size"], attrs["kv_heads"], attrs["block"], attrs["rows"]
    heads = given["q"].shape[1] // size
    y, magnitude = (torch.full(given["q"].shape, float("nan"), dtype=F64) for _ in range(2))
    states = {name: given[name].clone() for name in ("kept", "kept_sums") if name in given}
    if states:
        outputs = states["kept"].view(len(states["kept"]), -1, rows, heads, size)
        log_sums = states["kept_sums"].view(len(states["kept_sums"]), -1, rows, heads)
    entries, bounds = given["extents"].tolist(), given["cu_extents"].tolist()
    for b, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        before, seen = int(given["prefix"][b]), int(given["seen"][b])
        mine = int(given["owner"][b]) if states else 0
        places = rows_of(given["kv"], entries[bounds[b] : bounds[b + 1]], attrs["layer"], kv_heads, size, seen)
        both = torch.stack(places).double().repeat_interleave(heads // kv_heads, 2)  # [keys, 2, heads, size]
        new = "refreshed" in given and bool(given["refreshed"][b])
        for row in range(first, last):
            position = int(given["positions"][row])
            end = min(seen, (position // block + 1) * block) if block else seen
            k, v = both[before : max(end, before)].unbind(1)
            scores = (k * given["q"][row].double().view(heads, size)).sum(2) * attrs["scale"]
            at = mine, attrs["slot"], position - before
            if before:
                known = (given["fresh"][row], given["fresh_sums"][row]) if new else (outputs[at], log_sums[at])
                v = torch.cat([v, known[0].double().view(1, heads, size)])
                scores = torch.cat([scores, known[1].double()[None]])
            if len(scores):
                weights = torch.softmax(scores, 0)[..., None]
                y[row], magnitude[row] = ((weights * x).sum(0).flatten() for x in (v, v.abs()))
            if states and before and new and position >= before:
                outputs[at], log_sums[at] = given["fresh"][row].view(heads, size), given["fresh_sums"][row]
    return {"y": y, "magnitude": magnitude, **states}


def assert_joined(case: Case, found: dict[str, Tensor], slack: float = 1.0) -> dict[str, Tensor]:
    """Each row within the error of its scores and sums, where one sees a key; the states to the bit. Return what is stated."""
    expected, dtype = stated_join(case), case.operands["q"].dtype
    written = ~expected["y"].isnan()
    bound = (2.1 * score_error(case) + gamma(200, dtype)) * expected["magnitude"] + 2 * rounding(expected["y"], dtype)
    bound = slack * bound + 2 * (slack - 1) * unit(dtype) * expected["magnitude"]  # as `weights_error`
    assert_within(found["y"][written], expected["y"][written], bound[written])
    for name in expected.keys() & {"kept", "kept_sums"}:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True)
    assert found["y"][~written].isnan().all()
    return expected


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("fresh", "held"), [(True, True), (False, True), (True, False)])
def test_joined_attention(fresh: bool, held: bool, dtype: torch.dtype) -> None:
    for seed in range(8):
        case = joined_case(seed + 8 * DTYPES.index(dtype), dtype, fresh=fresh, held=held)
        stated = replace(case, operands={name: tensor.clone() for name, tensor in case.operands.items()})
        reference = case.reference()
        case.launch()
        found = {
            name: tensor
            for name, tensor in {**case.operands, **case.outputs}.items()
            if name in ("y", "kept", "kept_sums")
        }
        expected = assert_joined(stated, found)
        for name in ("y", "kept") if held else ("y",):
            torch.testing.assert_close(reference[name], expected[name].double(), equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_joined_attention_may_overwrite_its_queries(dtype: torch.dtype) -> None:
    for seed in (1, 2, 6):
        case = joined_case(seed, dtype, fresh=True)
        over = {name: tensor.clone() for name, tensor in case.operands.items()}
        case.launch()
        y = case.outputs["y"]
        load("joined_attention").launch(**over, **case.attrs, y=over["q"], scratch=case.scratch())
        assert torch.equal(over["q"], torch.where(y.isnan(), case.operands["q"], y))


def halves(dtype: torch.dtype) -> tuple[Case, Case, Case]:
    """Attention to all keys; to the keys before the block; and what joins the rest with that."""
    windows, prefixes = [(8, 44, 36), (4, 24, 20), (4, 4, 0), (8, 300, 292)], [40, 20, 0, 296]
    whole = kv_case(windows, 6, 2, 8, dtype, block=4)
    counts = torch.tensor(prefixes, dtype=torch.int32)
    part = summed(
        replace(whole, operands=whole.operands | {"seen": counts}, outputs={"y": torch.empty_like(whole.outputs["y"])})
    )
    states = {
        "kept": torch.full((6, 2 * 4 * 48), float("nan"), dtype=dtype),
        "kept_sums": torch.full((6, 2 * 4 * 6), float("nan")),
    }
    fresh = {"fresh": part.outputs["y"], "fresh_sums": part.outputs["logsumexp"], "refreshed": counts}
    operands = whole.operands | {"prefix": counts, **states, "owner": torch.tensor([3, 0, 5, 1]), **fresh}
    attrs = {name: whole.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
    joined = Case(
        "joined_attention", operands, {"y": torch.empty_like(whole.outputs["y"])}, attrs | {"slot": 1, "rows": 4}
    )
    return whole, part, joined


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_prefix_and_block_joined_are_attention_to_both(dtype: torch.dtype) -> None:
    """And again from what was kept, to the bit."""
    whole, part, joined = halves(dtype)
    expected, _ = softmax_rows(whole)
    part.launch()
    joined.launch()
    y, (magnitude, _) = joined.outputs["y"], softmax_rows(whole, absolute=True)
    # log-sum-exps are kept in float32, at any dtype
    kept = 2 * unit(F32) * float(part.outputs["logsumexp"].nan_to_num().abs().max()) * magnitude
    assert_within(y, expected, 2 * (kv_bound(whole, expected) + rounding(expected, dtype) + kept))
    later = {name: tensor for name, tensor in joined.operands.items() if not name.startswith(("fresh", "refreshed"))}
    again = replace(joined, operands=later, outputs={"y": torch.zeros_like(y)})
    for row in (*range(4), *range(16, 20)):  # the block before, which a later step has no rows of
        again.operands["positions"][row] += 4
    again.launch()
    mine = torch.tensor([*range(4, 16), *range(20, 24)])
    assert torch.equal(again.outputs["y"][mine], y[mine])


# --- by how much queries have changed ----------------------------------------------------------------------------------


def change_case(seed: int, dtype: torch.dtype, *, fresh: bool) -> Case:
    """The queries of a case above beside kept ones that some are alike, near or far from."""
    given = joined_case(seed, dtype, fresh=fresh)
    rng, rows = random.Random(seed), given.attrs["rows"]
    names = [
        name for name in ("q", "owner", "prefix", "cu_seqlens", "positions", "refreshed") if name in given.operands
    ]
    operands: dict[str, Tensor] = {name: given.operands[name] for name in names}
    q = operands["q"]
    kept = torch.full((given.operands["kept"].shape[0], rows, q.shape[1]), float("nan"), dtype=dtype)
    for b, (first, last) in enumerate(pairwise(operands["cu_seqlens"].tolist())):
        if not fresh or not operands["refreshed"][b]:
            noise = rng.choice([0.0, 0.1, 4.0])
            for row in range(first, last) if operands["prefix"][b] else ():
                near = q[row] + noise * randn(q.shape[1], dtype=dtype, seed=row)
                kept[operands["owner"][b], operands["positions"][row] - operands["prefix"][b]] = near
    operands["kept"] = kept.flatten(1)
    return Case(
        "query_change", operands, {"change": torch.full((len(operands["owner"]),), float("nan"))}, {"rows": rows}
    )


def stated_change(case: Case) -> dict[str, Tensor]:
    """In float64, an element at a time."""
    given, kept = case.operands, case.operands["kept"].clone()
    change, rows = torch.zeros(len(given["owner"]), dtype=F64), kept.view(len(kept), case.attrs["rows"], -1)
    for b, (first, last) in enumerate(pairwise(given["cu_seqlens"].tolist())):
        before, apart, size = int(given["prefix"][b]), 0.0, 0.0
        for row in range(first, last) if before else ():
            place = int(given["positions"][row]) - before
            if "refreshed" in given and given["refreshed"][b]:
                if place >= 0:
                    rows[given["owner"][b], place] = given["q"][row]
                continue
            was, now = rows[given["owner"][b], place].double(), given["q"][row].double()
            apart, size = apart + float(((was - now) ** 2).sum()), size + float((was**2).sum())
        change[b] = (apart / size) ** 0.5 if apart else 0.0
    return {"change": change, "kept": kept}


def assert_change(case: Case, found: dict[str, Tensor]) -> None:
    expected = stated_change(case)
    torch.testing.assert_close(found["change"].double(), expected["change"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["kept"], expected["kept"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("fresh", [True, False])
def test_change_of_queries(fresh: bool, dtype: torch.dtype) -> None:
    changes = []
    for seed in range(16):
        case = change_case(seed, dtype, fresh=fresh)
        stated = replace(case, operands={name: tensor.clone() for name, tensor in case.operands.items()})
        torch.testing.assert_close(case.reference()["change"], stated_change(stated)["change"])
        case.launch()
        assert_change(stated, {"change": case.outputs["change"], "kept": case.operands["kept"]})
        changes += case.outputs["change"].tolist()
    assert min(changes) == 0.0 and max(changes) > 0.5 and any(0 < change < 0.3 for change in changes)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    check_allocates_nothing(prefix_case("blocks of 4", dtype))
    check_allocates_nothing(joined_case(2, dtype, fresh=True, held=False))
    for fresh in (True, False):
        check_allocates_nothing(joined_case(2, dtype, fresh=fresh))
        check_allocates_nothing(change_case(2, dtype, fresh=fresh))


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        ("joined", {"slot": 3}, "kept has 3 slots, not slot 3"),
        ("joined", {"rows": 1000}, r"operand 'kept' is .*, expected float32\[4, J\*1000\*"),
        ("joined", {"kept_sums": torch.zeros(2, 2)}, "operand 'kept_sums'"),
        ("joined", {"prefix": torch.zeros(9, dtype=torch.int32)}, "operand 'prefix'"),
        ("joined", {"fresh_sums": torch.zeros(1, 1)}, "operand 'fresh_sums'"),
        ("change", {"owner": torch.zeros(9, dtype=torch.int32)}, "operand 'owner'"),
        ("change", {"prefix": torch.zeros(9, dtype=torch.int32)}, "operand 'prefix'"),
        ("prefix", {"logsumexp": torch.zeros(1, 1)}, "operand 'logsumexp'"),
    ],
)
def test_launches_refuse_wrong_operands(kernel: str, changes: dict[str, Any], message: str) -> None:
    made = {"prefix": prefix_case("whole", F32)}
    case = made.get(kernel) or (joined_case if kernel == "joined" else change_case)(2, F32, fresh=True)
    with pytest.raises(GraphError, match=message):
        load(case.kernel).launch(
            **{**case.operands, **case.outputs, **case.attrs, "scratch": case.scratch(), **changes}
        )
