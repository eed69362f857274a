"""score_keys, select_keys, pack_keys, bound_parts and packed_attention: random batches against statements in float64. Written apart
from the kernels."""

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
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract

HEADS = ((1, 1), (2, 2), (4, 2), (6, 1), (6, 3))
"""Query heads and key-value heads."""


def spanned(rng: random.Random, longest: int) -> tuple[list[int], list[list[int]]]:
    """Lengths of sequences, one of them of no rows, and of each its block, its span around that, and how many keys it keeps."""
    lengths, spans = [rng.randint(2, longest) for _ in range(rng.randint(1, 3))], []
    for length in lengths:
        low, high = sorted(rng.sample(range(length + 1), 2))
        low += (low, high) == (0, length)
        first, end = sorted(rng.sample(range(low, high + 1), 2)) if high - low > 1 else (low, high)
        spans.append([first, end, low, high, rng.randint(1, length - (high - low))])
    at = rng.randint(0, len(lengths))
    return [*lengths[:at], 0, *lengths[at:]], [*spans[:at], [0] * 5, *spans[at:]]


def score_case(seed: int, dtype: torch.dtype, each: str = "kv", over: str = "max", longest: int = 40) -> Case:
    rng = random.Random(seed)
    (heads, kv_heads), size = HEADS[seed % len(HEADS)], rng.choice([4, 5, 16])
    lengths, spans = spanned(rng, longest)
    tokens, generator = sum(lengths) + 2, torch.Generator().manual_seed(seed)
    sets = heads // kv_heads if each == "query" else 1
    operands = {
        name: strided(torch.randn(tokens, count * size, generator=generator).to(dtype))
        for name, count in (("q", heads), ("k", kv_heads))
    } | {"spans": torch.tensor(spans, dtype=torch.int32), "cu_seqlens": starts(lengths)}
    attrs = {"head_size": size, "each": sets, "over": over}
    return Case("score_keys", operands, {"scores": strided(torch.empty(sets * kv_heads, tokens))}, attrs)


def sets_of(case: Case) -> int:
    return int(case.attrs["each"] * case.operands["k"].shape[1] // case.attrs["head_size"])


def stated_scores(case: Case) -> tuple[Tensor, Tensor]:
    """Scores, and what was added up for each; NaN in columns of nobody."""
    q, k = (case.operands[name].double() for name in "qk")
    size, group, sets = case.attrs["head_size"], q.shape[1] // k.shape[1], sets_of(case)
    found = torch.full((2, sets, q.shape[0]), float("nan"), dtype=F64)
    members = q.shape[1] // size // sets
    bounds = case.operands["cu_seqlens"].tolist()
    for b, (first, end, *_) in enumerate(case.operands["spans"].tolist()):
        for own in range(sets):
            for row in range(bounds[b], bounds[b + 1]):
                each = []
                for head in range(own * members, own * members + members):
                    queries = q[bounds[b] + first : bounds[b] + end, head * size : (head + 1) * size]
                    key = k[row, head // group * size : (head // group + 1) * size]
                    each.append((queries.mean(0) @ key, queries.abs().mean(0) @ key.abs()))
                values, terms = map(torch.stack, zip(*each, strict=True))
                found[0, own, row] = values.max() if case.attrs["over"] == "max" else values.mean()
                found[1, own, row] = terms.max()
    return found[0], found[1]


def assert_scores(case: Case, scores: Tensor) -> None:
    """Sums of products of means, rounded in the dtype of computation; in float32 those of the heads of a set, and their sums."""
    expected, terms = stated_scores(case)
    known = ~expected.isnan()
    size, (rows, width) = case.attrs["head_size"], case.operands["q"].shape
    wide = F64 if case.operands["q"].dtype == F64 else F32
    error = gamma(size + rows + 12, wide) * terms + (1 + width // size // sets_of(case)) * unit(F32) * terms
    assert_within(scores[known], expected[known], error[known])
    assert scores[~known].isnan().all()


def held_by(rng: random.Random, most: list[int], heads: int) -> tuple[dict[str, Tensor], int]:
    """Operands with which heads have some packed rows of a part, of at most these for each sequence; and the layer's slot."""
    slot, rows = rng.randint(0, 2), rng.sample(range(9), len(most))
    held = torch.full((9, 3 * 2 * heads), -5, dtype=torch.int32)
    for row, count in zip(rows, most, strict=True):
        for head in range(heads):
            bounds = sorted(rng.choices(range(count + 1), k=2))
            at = 2 * (slot * heads + head)
            held[row, at : at + 2] = torch.tensor(bounds)
    return {"held": held, "held_row": torch.tensor(rows)}, slot


def held_in(case: Case, b: int, head: int) -> tuple[int, int]:
    """The packed rows that a head has of a sequence's part."""
    at = 2 * (case.attrs["slot"] * case.attrs["kv_heads"] + head)
    first, last = case.operands["held"][case.operands["held_row"][b], at : at + 2].tolist()
    return first, last


def select_case(seed: int, longest: int = 60) -> Case:
    """Scores of few different values, so that many are equal; some are below 0, or -0.0. In a third, a part has the numbers."""
    rng = random.Random(seed)
    sets = rng.choice([1, 2, 6])
    lengths, spans = spanned(rng, longest)
    tokens, generator = sum(lengths) + 2, torch.Generator().manual_seed(seed)
    scores = torch.randn(sets, tokens, generator=generator)
    if seed % 2:
        scores = (scores * 2).round() / 2
    scores[:, sum(lengths) :] = float("nan")
    operands = {
        "scores": strided(scores), "spans": torch.tensor(spans, dtype=torch.int32), "cu_seqlens": starts(lengths)
    }  # fmt: skip
    attrs = {
        "members": rng.choice([1, sets]),
        "pool": rng.choice([1, 3, 3, 5, 9]),
        "pools": rng.choice(["each", "sum"]),
    }
    chosen = torch.empty(sets // attrs["members"], tokens, dtype=torch.int32)
    if seed % 3 == 2:
        most = [length - high + low for length, (_, _, low, high, _) in zip(lengths, spans, strict=True)]
        attrs["kv_heads"] = len(chosen) if rng.randint(0, 1) else len(chosen) + 1
        held, attrs["slot"] = held_by(rng, most, attrs["kv_heads"])
        operands |= held
    return Case("select_keys", operands, {"chosen": chosen}, attrs)


def stated_rows(case: Case) -> list[list[list[tuple[int, float]]]]:
    """By list and sequence, the rows that are chosen with their totals in float64, then those of the span with 0."""
    scores, bounds = case.operands["scores"].double(), case.operands["cu_seqlens"].tolist()
    members, pool = case.attrs["members"], case.attrs["pool"]
    found: list[list[list[tuple[int, float]]]] = []
    for own in range(len(scores) // members):
        mine = scores[own * members : (own + 1) * members]
        found.append([])
        for b, (_, _, low, high, kept) in enumerate(case.operands["spans"].tolist()):
            rows = [r for r in range(bounds[b], bounds[b + 1]) if not bounds[b] + low <= r < bounds[b] + high]
            if "held" in case.operands:
                kept = -sum(a * b for a, b in zip(held_in(case, b, own), (1, -1), strict=True))
            totals = []
            for at in range(len(rows)):
                near = rows[max(at - pool // 2, 0) : at + pool // 2 + 1]
                if case.attrs["pools"] == "each":
                    totals.append(sum(max(float(of_set[r]) for r in near) for of_set in mine))
                else:
                    totals.append(max(sum(float(of_set[r]) for of_set in mine) for r in near))
            order = sorted(range(len(rows)), key=lambda at: (-totals[at], at))[:kept]
            span = [(bounds[b] + r, 0.0) for r in range(low, high)]
            found[-1].append([(rows[at], totals[at]) for at in sorted(order)] + span)
    return found


def assert_rows(case: Case, chosen: Tensor) -> None:
    """The same rows; where totals are sums of several roundings, rows whose totals are nearly the least one's may differ."""
    bounds, several = case.operands["cu_seqlens"].tolist(), case.attrs["members"] > 1
    untouched = torch.ones_like(chosen, dtype=torch.bool)
    for own, of_list in enumerate(stated_rows(case)):
        for b, expected in enumerate(of_list):
            actual = chosen[own, bounds[b] : bounds[b] + len(expected)].tolist()
            untouched[own, bounds[b] : bounds[b] + len(expected)] = False
            if not several:
                assert actual == [row for row, _ in expected]
                continue
            assert len(set(actual)) == len(actual)
            everything = dict(stated_totals(case, own, b))
            mine = sorted(everything.get(row, 0.0) for row in actual)
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(sorted(total for _, total in expected)), rtol=1e-6, atol=1e-5
            )
    assert (chosen[untouched] < 0).all()  # as it was


def stated_totals(case: Case, own: int, b: int) -> list[tuple[int, float]]:
    """The totals of all candidates of a sequence: what is chosen if all are kept."""
    spans = case.operands["spans"].clone()
    operands = {name: operand for name, operand in case.operands.items() if not name.startswith("held")}
    start, end = case.operands["cu_seqlens"][b : b + 2].tolist()
    spans[b, 4] = end - start - int(spans[b, 3] - spans[b, 2])
    everything = stated_rows(Case("select_keys", operands | {"spans": spans}, {}, case.attrs))[own][b]
    return everything[: int(spans[b, 4])]


def pack_case(seed: int, dtype: torch.dtype, kept_in: torch.dtype | None = None, longest: int = 40) -> Case:
    rng = random.Random(seed)
    kv_heads, size, layers = HEADS[seed % len(HEADS)][1], rng.choice([4, 5, 16]), rng.randint(1, 3)
    lengths, spans = spanned(rng, longest)
    tokens, generator = sum(lengths) + 2, torch.Generator().manual_seed(seed)
    counts = [kept + high - low + rng.randint(0, 2) for _, _, low, high, kept in spans]
    chosen = torch.full((rng.choice([1, kv_heads]), tokens), -1, dtype=torch.int32)
    for b, start in enumerate(starts(lengths)[:-1].tolist()):
        for row in chosen:
            row[start : start + lengths[b]] = torch.tensor(
                [rng.randrange(start, start + lengths[b]) for _ in range(lengths[b])]
            )
    width = kv_heads * size
    kv = torch.randn(sum(counts) + 3, layers * 2 * width, generator=generator).to(kept_in or dtype)
    firsts = [3 + sum(counts[:b]) for b in range(len(counts))]
    extents = torch.tensor([[first, max(count, 1), 0, 0] for first, count in zip(firsts, counts, strict=True)])
    operands = {
        "k": strided(torch.randn(tokens, width, generator=generator).to(dtype)),
        "v": strided(torch.randn(tokens, width, generator=generator).to(dtype)),
        "chosen": chosen, "spans": torch.tensor(spans, dtype=torch.int32), "cu_seqlens": starts(lengths),
        "extents": extents, "kv": kv,
    }  # fmt: skip
    attrs = {"layer": rng.randrange(layers), "kv_heads": kv_heads, "head_size": size}
    if seed % 3 == 1:
        held, attrs["slot"] = held_by(rng, [kept for *_, kept in spans], kv_heads)
        operands |= held
    return Case("pack_keys", operands, attrs=attrs)


def stated_packed(case: Case) -> Tensor:
    """The state afterwards, number by number, as one long vector is laid out."""
    given, size = case.operands, case.attrs["head_size"]
    after, heads = given["kv"].clone(), given["k"].shape[1] // size
    flat, columns = after.view(-1), after.shape[1]
    for b, (_, _, low, high, kept) in enumerate(given["spans"].tolist()):
        start, (row, rows) = int(given["cu_seqlens"][b]), given["extents"][b, :2].tolist()
        for place, x in enumerate((given["k"], given["v"])):
            for head in range(heads):
                first, last = held_in(case, b, head) if "held" in given else (0, kept)
                for number, j in enumerate([*range(first, last), *range(kept, kept + high - low)]):
                    taken = int(given["chosen"][head % len(given["chosen"]), start + number])
                    at = row * columns + ((2 * case.attrs["layer"] + place) * heads + head) * rows * size + j * size
                    flat[at : at + size] = x[taken, head * size : (head + 1) * size].to(after.dtype)
    return after


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


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("each", "over"), [("kv", "max"), ("kv", "mean"), ("query", "max")])
def test_scores_of_keys(dtype: torch.dtype, each: str, over: str) -> None:
    for seed in range(5):
        case = score_case(seed, dtype, each, over)
        case.launch()
        assert_scores(case, case.outputs["scores"])
        if dtype == F64:
            assert_scores(case, case.reference())


def test_scores_of_more_keys_and_a_longer_block_than_a_tile_has() -> None:
    case = score_case(2, F32, longest=40)
    size = case.attrs["head_size"]
    operands = {"q": torch.randn(2500, 4 * size), "k": torch.randn(2500, 2 * size), "cu_seqlens": starts([2500])}
    operands["spans"] = torch.tensor([[3, 2300, 0, 2400, 1]], dtype=torch.int32)
    case = Case("score_keys", operands, {"scores": torch.empty(2, 2500)}, case.attrs)
    case.launch()
    torch.testing.assert_close(case.outputs["scores"], case.reference().float(), rtol=1e-4, atol=1e-5)


def test_selected_rows() -> None:
    for seed in range(60):
        case = select_case(seed)
        case.launch()
        assert_rows(case, case.outputs["chosen"])
        reference, chosen = case.reference(), case.outputs["chosen"]
        if case.attrs["members"] == 1:
            assert torch.equal(reference[reference >= 0], chosen[chosen >= 0])


def test_every_candidate_may_be_kept_and_one_at_least_is() -> None:
    """Of 7 rows with a span of 2 all 5 others, or the first of equal ones."""
    scores, bounds = torch.tensor([[1.0, 2, 9, 9, 2, -1, 2]]), starts([7])
    for kept, pool, expected in ((5, 3, [0, 1, 4, 5, 6, 2, 3]), (1, 1, [1, 2, 3]), (1, 5, [0, 2, 3])):
        operands = {"scores": scores, "cu_seqlens": bounds, "spans": torch.tensor([[2, 4, 2, 4, kept]]).int()}
        case = Case("select_keys", operands, {"chosen": torch.empty(1, 7).int()}, {"members": 1, "pool": pool})
        case.launch()
        assert case.outputs["chosen"][0, : len(expected)].tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_packed_keys(dtype: torch.dtype) -> None:
    for seed in range(12):
        case = pack_case(seed, dtype, BF16 if seed % 3 == 0 else None)
        expected = stated_packed(case)
        assert torch.equal(load("pack_keys").reference(**case.operands, **case.attrs), expected)
        case.launch()
        assert torch.equal(case.operands["kv"], expected)


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


def test_heads_at_a_time_are_packed_where_all_of_them_would_be() -> None:
    case = next(
        case
        for case in (pack_case(seed, F32) for seed in range(4, 99, 5))
        if len(case.operands["chosen"]) == 3 and "held" not in case.operands
    )
    expected, size = stated_packed(case), case.attrs["head_size"]
    for first, end in ((2, 3), (0, 2)):
        part = {name: case.operands[name][:, first * size : end * size] for name in "kv"}
        part["chosen"] = case.operands["chosen"][first:end]
        run = Case(
            "pack_keys", case.operands | {"k": part["k"], "v": part["v"], "chosen": part["chosen"]}, {}, case.attrs
        )
        load("pack_keys").launch(**run.operands, **run.attrs, row_start=first, scratch=run.scratch())
    assert torch.equal(case.operands["kv"], expected)


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    for seed in range(3):
        check_allocates_nothing(score_case(seed, dtype, over="mean"))
        check_allocates_nothing(select_case(seed))
        check_allocates_nothing(pack_case(seed, dtype))
        check_allocates_nothing(bound_case(seed))
        check_allocates_nothing(attention_case(seed, dtype))


@pytest.mark.parametrize(
    ("case", "attrs", "message"),
    [
        (score_case(2, F32), {"each": 3}, "operand 'q'"),
        (score_case(3, F32), {"over": "sum"}, "over must be one of max, mean, not 'sum'"),
        (select_case(0), {"pool": 4}, "pool must be an odd number of keys, not 4"),
        (select_case(0), {"members": 7}, "operand 'scores'"),
        (select_case(0), {"pools": "max"}, "pools must be one of each, sum, not 'max'"),
        (pack_case(0, F32), {"layer": 7}, "not layer 7"),
        (attention_case(0, F32), {"layer": 7}, "not layer 7"),
        (attention_case(0, F32), {"slot": 3}, "not layer 3"),
        (bound_case(0), {"slot": -1}, "not layer -1"),
        (select_case(2), {"slot": 3}, "not layer 3"),
        (pack_case(1, F32), {"slot": 3}, "not layer 3"),
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
