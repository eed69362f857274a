"""The peak formula against sums over the buffers alive at every op, on small random programs."""

from __future__ import annotations

import random

import pytest

from mosaic.planner.document import formula
from mosaic.planner.peaks import ALIGNMENT
from mosaic.planner.space import Config, Point
from tests.small_programs import Exact, dims, space

CASES = [(seed, tokens) for seed in range(4) for tokens in (40, 150, 300)]


def sampled(seed: int, tokens: int, count: int) -> tuple[Point, Exact, list[Config]]:
    point = space(seed).at(dims(tokens))
    exact = Exact(point)
    return point, exact, random.Random(seed).sample(list(exact.configs()), count)


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_forms_are_the_undominated_live_sets_where_they_first_occur(seed: int, tokens: int) -> None:
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
    """How many roots of every size class are alive at each op."""
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
def test_sizes_of_roots_cover_every_member_and_slot(seed: int, tokens: int) -> None:
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
