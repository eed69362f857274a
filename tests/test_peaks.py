"""The peak formula against sums over the buffers alive at every op, on small random programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields
from inspect import signature
from itertools import product

import pytest

from mosaic.planner.document import formula
from mosaic.planner.peaks import ALIGNMENT, PeakFormula
from mosaic.planner.space import Config, Point, Space
from mosaic.planner.template import compile_template
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Dim
from mosaic.registrar.polynomial import Polynomial
from tests.small_programs import CARD, Exact, dims, drawn, intervals, live, space

CASES = [(seed, tokens) for seed in range(4) for tokens in (40, 150, 300)] + [(seed, None) for seed in range(24)]
"""Small programs at some tokens, and programs of the fuzzer."""


def sampled(seed: int, tokens: int | None, count: int) -> tuple[Point, Exact, list[Config]]:
    point = drawn(seed) if tokens is None else space(seed).at(dims(tokens))
    exact = Exact(point)
    configs = list(exact.configs())
    return point, exact, random.Random(seed).sample(configs, min(count, len(configs)))


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_forms_are_the_undominated_live_sets_where_they_first_occur(seed: int, tokens: int | None) -> None:
    assert ALIGNMENT == 512
    point, exact, configs = sampled(seed, tokens, 12)
    for config in configs:
        live, values = exact.live(config), point.form_values(config).tolist()
        found = point.space.variant(config).formula
        assert max(values) == max(live) == point.lower_bound(config)
        assert values == [live[at] for at in found.at] and list(found.at) == sorted(set(found.at))
        rows = [tuple(row) for row in found.counts.tolist()]
        for i, row in enumerate(rows):
            others = (other for j, other in enumerate(rows) if j != i)
            assert not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in others)
        counts = members_alive(point, config)
        for t in range(len(live)):
            assert any(all(a <= b for a, b in zip(counts[t], row, strict=True)) for row in rows)
        assert [counts.index(row) for row in rows] == list(found.at)


def members_alive(point: Point, config: Config) -> list[tuple[int, ...]]:
    """The number of live roots of every size class at each op."""
    variant = point.space.variant(config)
    life, found = variant.life, variant.formula
    counts = []
    for t in range(len(variant.body.ops)):
        row = [0] * found.counts.shape[1]
        for b, c in zip(found.roots.tolist(), found.classes.tolist(), strict=True):
            in_gap = any(low <= t < high for low, high in life.gaps[b])
            row[c] += life.starts[b] <= t < life.ends[b] and not in_gap
        counts.append(tuple(row))
    return counts


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_sizes_of_roots_cover_every_member_and_slot(seed: int, tokens: int | None) -> None:
    point, _exact, configs = sampled(seed, tokens, 6)
    for config in configs:
        variant = point.space.variant(config)
        sizes = variant.body.evaluate(point.values(config)).tolist()
        roots = variant.formula.roots.tolist()
        workspace = [b for b, r in enumerate(variant.body.buffers) if r.pool == "workspace" and r.alias_of is None]
        assert roots == workspace
        for root, size in zip(roots, point.root_sizes(config).tolist(), strict=True):
            members = [r for b, r in enumerate(variant.body.buffers) if b == root or r.alias_of == root]
            expected = [
                (sizes[m.alias_offset] if m.alias_of is not None else 0) + -(-sizes[m.bytes] // 512) * 512 * m.rotate
                for m in members
            ]
            assert size == max(expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_printed_forms_are_the_peak_before_rounding(seed: int) -> None:
    """Every sum that is left out is exceeded by one that is printed, and none that is printed could be left out."""
    rng = random.Random(seed)
    point, _exact, configs = sampled(seed, 300, 8)
    names = [knob.name for knob in point.space.template.knobs]
    for config in configs:
        lines = formula(point.space, config)
        body = point.space.variant(config).body
        wins = set[int]()
        for number in range(60):
            tokens = 16 * rng.choice((1, 2, 7, 40, 1000, 100_000))
            masked = rng.choice((1, tokens // 16, tokens))
            other = point.space.at({"tokens": tokens, "masked": masked})
            extents = {"body": tokens, "head": masked, "parts": 4}
            rows = tuple(
                None if r is None else rng.choice((1, max(1, extents[name] // 3), extents[name]))
                for name, r in zip(names, config.rows, strict=True)
            )
            shown = {f"{name}_rows": r for name, r in zip(names, rows, strict=True) if r is not None}
            values = [eval(line["expr"], {"tokens": tokens, "masked": masked, **shown}) for line in lines]
            exact_peak = max(unrounded(other, config, rows))
            assert max(values) == exact_peak, (lines, number)
            wins |= {i for i, value in enumerate(values) if value == exact_peak}
        assert all(line["at"] in {op.name for op in body.ops} for line in lines)
        if len(lines) <= 2:  # of more, two together may cover a third
            assert wins == set(range(len(lines))), lines


SIZES: tuple[Callable[[Polynomial, Polynomial, Polynomial], tuple[Dim, ...]], ...] = (
    lambda n, m, k: (1,), lambda n, m, k: (n,), lambda n, m, k: (m,), lambda n, m, k: (k,), lambda n, m, k: (3, n),
    lambda n, m, k: (n + 1,), lambda n, m, k: (k, 2), lambda n, m, k: (m + 2,),
    lambda n, m, k: (n, n), lambda n, m, k: (n, m, m), lambda n, m, k: (n, k),
)  # fmt: skip
LINEAR = 8


@pytest.mark.parametrize("seed", range(40))
def test_a_sum_is_printed_if_and_only_if_no_other_is_as_large_for_all_dims(seed: int) -> None:
    """For sums that are linear in the dims; compared at 1 and along every direction in which dims may grow."""
    rng, linear = random.Random(seed), seed % 4 != 0

    def build(choices: Mapping[str, str] | None) -> Graph:
        rng = random.Random(seed)
        g = Graph("sums", backend="cpu", choices=choices)
        n, k = g.dim("n"), g.dim("k", value=3 if seed % 3 == 0 else None)
        m = g.dim("m", at_most="n")
        buffers = []
        for i, (_, start, end) in enumerate(intervals(seed, ops=7, room=rng.randrange(3, 7))):
            shape = rng.choice(SIZES[: LINEAR if linear else len(SIZES)])(n, m, k)
            buffers.append((g.buffer(f"b{i}", shape, rng.choice(("int8", "int8", "int16"))), start, end))
        live(g, buffers)
        return g

    free = Space(compile_template(build), CARD)
    config = Config((), ())
    lines = formula(free, config)

    def point(given: Mapping[str, int]) -> Point:
        return free.at({name: value for name, value in given.items() if name != "k" or seed % 3})

    rays = [ray for ray in product((0, 1), repeat=3) if ray[1] <= ray[0]]
    probes = [tuple(1 + size * on for on in ray) for ray in rays for size in (0, 10**6)]
    probes += [(n, rng.randint(1, n), rng.randint(1, 50)) for n in (2, 5, 17, 300)]
    shown, sums = [], []
    for probe in probes:
        values = dict(zip("nmk", probe, strict=True))
        shown.append([eval(line["expr"], values) for line in lines])
        sums.append(unrounded(point(values), config, ()))
        assert max(shown[-1]) == max(sums[-1])
    columns = {*zip(*sums, strict=True)}
    maximal = {c for c in columns if not any(c != d and all(map(int.__le__, c, d)) for d in columns)}
    printed = list(zip(*shown, strict=True))
    assert len(printed) == len(set(printed)) and maximal <= set(printed) <= columns
    if linear:
        assert set(printed) == maximal
    at = [op.name for op in free.template.first.ops]
    first = [list(zip(*sums, strict=True)).index(column) for column in printed]
    assert [line["at"] for line in lines] == [at[t] for t in first] and first == sorted(first)
    for line in lines:
        check_order(line["expr"])


def check_order(text: str) -> None:
    """Terms by falling degree, then by falling coefficient, then by name; a power only where there is one."""
    assert "**1" not in text and "**0" not in text
    keys = []
    for term in text.split(" + "):
        coefficient, *factors = term.replace("**", "^").split("*")
        powers = [(name, int(power or 1)) for name, _, power in (factor.partition("^") for factor in factors)]
        assert powers == sorted(powers)
        keys.append((-sum(power for _, power in powers), -int(coefficient), powers))
    assert keys == sorted(keys)


def unrounded(point: Point, config: Config, rows: tuple[int | None, ...]) -> list[int]:
    """Bytes alive at every op, as declared."""
    given = Config(config.choices, rows)
    variant = point.space.variant(config)
    life = variant.life
    sizes = variant.body.evaluate(point.values(given)).tolist()
    return [
        sum(
            sizes[r.bytes] * r.rotate
            for b, r in enumerate(variant.body.buffers)
            if r.pool == "workspace" and r.alias_of is None and life.starts[b] <= t < life.ends[b]
            and not any(low <= t < high for low, high in life.gaps[b])
        )
        for t in range(len(variant.body.ops))
    ]  # fmt: skip


def test_a_formula_is_frozen_keyword_only_and_slotted() -> None:
    assert all(p.kind is p.KEYWORD_ONLY for p in signature(PeakFormula).parameters.values())
    assert PeakFormula.__slots__ == tuple(field.name for field in fields(PeakFormula))
    point = space(0).at(dims(40))
    with pytest.raises(FrozenInstanceError):
        point.space.variant(next(Exact(point).configs())).formula.plain = True  # type: ignore[misc]
