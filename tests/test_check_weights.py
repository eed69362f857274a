"""A plan whose weights are not where they were loaded, or whose buffers lie on them, is refused for that reason."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from plan_examples import EXAMPLES, Document, Row
from plan_mutations import settle_totals
from plan_random import random_plan

from mosaic.errors import CheckFailed
from mosaic.planner.check import WeightMap, check_plan, check_safety, require_safe, require_valid, weight_map


def reasons(document: Document, weights: WeightMap) -> set[str]:
    return {violation.code for violation in check_plan(document, weights=weights)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_agrees_with_its_own_map(name: str) -> None:
    document = EXAMPLES[name]()
    weights = weight_map(document)
    named = {row["tensor"] or row["name"] for row in document["buffers"] if row["kind"] == "weight"}
    assert named <= weights.keys()
    assert check_plan(document, weights=weights) == []
    require_valid(document, weights=weights)


def test_the_map_has_streamed_weights_too() -> None:
    document = EXAMPLES["streamed"]()
    constants = [row for row in document["buffers"] if row["kind"] == "host" and row["tensor"] is not None]
    assert constants
    weights = weight_map(document)
    for row in constants:
        assert weights[row["tensor"]] == ("host", row["offset"], row["size"])


def test_every_wrong_entry_is_a_violation() -> None:
    """Another pool, offset or size, or no entry: for every weight of every example."""
    seen = 0
    for build in EXAMPLES.values():
        document = build()
        weights = weight_map(document)
        for name, (pool, offset, size) in weights.items():
            for wrong in (("elsewhere", offset, size), (pool, offset + 512, size), (pool, offset, size + 512), None):
                changed = {other: place for other, place in weights.items() if other != name}
                changed |= {} if wrong is None else {name: wrong}
                found = check_plan(document, weights=changed)
                assert {violation.code for violation in found} == {"weight-address"}
                assert any(f"'{name}'" in violation.message for violation in found)
                seen += 1
    assert seen > 40


def test_two_weights_that_change_places_are_both_named() -> None:
    document = EXAMPLES["pools"]()
    rows = [row for row in document["buffers"] if row["kind"] == "weight"][:2]
    loaded = weight_map(document)
    rows[0]["offset"], rows[1]["offset"] = rows[1]["offset"], rows[0]["offset"]
    found = [violation for violation in check_plan(document, weights=loaded) if violation.code == "weight-address"]
    assert {b for violation in found for b in violation.buffers} == {row["id"] for row in rows}
    with pytest.raises(CheckFailed, match="weight-address"):
        require_valid(document, weights=loaded)


def test_nothing_else_lies_on_a_weight_that_the_plan_does_not_read() -> None:
    """A step that reads fewer weights than are loaded may not put hidden states over the others."""
    document = EXAMPLES["offloaded"]()
    hidden = next(row for row in document["buffers"] if row["kind"] == "host" and row["tensor"] is None)
    first, last = hidden["offset"], hidden["offset"] + hidden["size"]
    loaded = weight_map(document)
    assert reasons(document, {**loaded, "unread": ("host", last, 512)}) == set()
    assert reasons(document, {**loaded, "unread": ("workspace", 1 << 40, 512)}) == set()
    for offset in (first, last - 512):
        assert reasons(document, {**loaded, "unread": ("host", offset, 512)}) == {"weight-address"}
    hidden["offset"] += 512  # behind a small constant at the start
    settle_totals(document)
    assert reasons(document, {**loaded, "unread": ("host", 0, 512)}) == set()


def test_a_weight_without_a_tensor_goes_by_its_buffers_name() -> None:
    document = EXAMPLES["pools"]()
    row = next(row for row in document["buffers"] if row["kind"] == "weight")
    row["tensor"] = None
    assert weight_map(document)[row["name"]] == (row["pool"], row["offset"], row["size"])
    assert reasons(document, weight_map(document)) == set()


def test_random_maps_are_refused_wherever_they_differ() -> None:
    """Shuffled addresses of all weights: exactly those that moved are named."""
    document = EXAMPLES["step"]()
    weights = weight_map(document)
    names = list(weights)
    for seed in range(20):
        places = list(weights.values())
        random.Random(seed).shuffle(places)
        shuffled = dict(zip(names, places, strict=True))
        moved = {name for name in names if shuffled[name] != weights[name]}
        found = check_plan(document, weights=shuffled)
        ids = {b for violation in found for b in violation.buffers}
        rows = [document["buffers"][b] for b in ids]
        assert {row["tensor"] or row["name"] for row in rows} == moved


def is_loaded(row: Row) -> bool:
    holds = row["kind"] == "weight" or (row["kind"] == "host" and row["tensor"] is not None)
    return holds and row["alias_of"] is None


def name_of(row: Row) -> str:
    return str(row["name"] if row["tensor"] is None else row["tensor"])


def wrong_places(document: Document, weights: WeightMap) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The rules, applied to one buffer and one weight at a time."""
    for b, row in enumerate(document["buffers"]):
        said, name = f"buffer {b} '{row['name']}'", name_of(row)
        pool, start, size = row["pool"], row["offset"], row["size"]
        if is_loaded(row) and name not in weights:
            yield f"{said} is the weight '{name}', which was not loaded", (b,)
        elif is_loaded(row) and weights[name] != (pool, start, size):
            at, first, loaded = weights[name]
            claim = f"{said} reads the weight '{name}' as {size} bytes at {start} of pool '{pool}'"
            yield f"{claim}; it was loaded as {loaded} bytes at {first} of pool '{at}'", (b,)
        elif not is_loaded(row) and row["alias_of"] is None and pool != "external":
            for other, (at, first, loaded) in weights.items():
                if at == pool and not {*range(start, start + size)}.isdisjoint(range(first, first + loaded)):
                    span = f"[{first}, {first + loaded})"
                    yield f"{said} at [{start}, {start + size}) lies on the weight '{other}', loaded at {span}", (b,)


def test_random_maps_are_judged_one_weight_at_a_time() -> None:
    """Word for word; the map itself is what is loaded of the plan."""
    refused = 0
    for seed in range(150):
        rng = random.Random(seed)
        document = rng.choice([*EXAMPLES.values()])() if rng.random() < 0.5 else random_plan(rng)
        weights = weight_map(document)
        loaded = [row for row in document["buffers"] if is_loaded(row)]
        assert weights == {name_of(row): (row["pool"], row["offset"], row["size"]) for row in loaded}
        for name, place in list(weights.items()):
            if rng.random() < 0.4:
                pool, offset, size = place
                weights[name] = rng.choice(
                    (place, ("state", offset, size), (pool, offset + 512, size), (pool, offset, size - 1))
                )
            elif rng.random() < 0.2:
                del weights[name]
        for k in range(rng.randint(0, 3)):
            row = rng.choice(document["buffers"])
            near = row["offset"] + rng.choice((-512, -511, 0, row["size"] - 1, row["size"]))
            weights[f"unread {k}"] = (row["pool"], max(0, near), rng.choice((0, 1, 511, 512)))
        verdict = [v for v in check_safety(document, weights=weights) if v.code == "weight-address"]
        assert sorted((v.message, v.buffers) for v in verdict) == sorted(wrong_places(document, weights)), seed
        assert not any(v.ops for v in verdict)
        refused += bool(verdict)
        whole = [v for v in check_plan(document, weights=weights) if v.code == "weight-address"]
        assert whole == verdict
        if verdict:
            with pytest.raises(CheckFailed):
                require_safe(document, weights=weights)
    assert 50 < refused < 140
