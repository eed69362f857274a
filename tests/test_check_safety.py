"""The safety part: the same verdict from a document as from the records and numbers that a document is written from."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from plan_examples import EXAMPLES, Document, decoder
from plan_mutations import MUTATIONS
from plan_oracle import Oracle, sorted_reasons
from plan_random import break_somewhere, break_statement, malform, random_alias_group, random_plan

from mosaic.errors import CheckFailed, PlanFormatError
from mosaic.planner.check import Numbers, Records, Violation, check_plan, check_safety, prove_safe, require_safe

LISTS = ("ops", "buffers", "regions", "barriers", "edges")
NUMBERS = {
    "ops": ("flops", "bytes"), "buffers": ("offset", "size", "alias_offset", "shape"),
    "regions": ("extent", "rows", "count"), "barriers": (), "edges": (),
}  # fmt: skip
NOT_OF_MEMORY = frozenset(
    {
        "operator",
        "flops",
        "bytes",
        "formula",
        "trace",
        "config",
        "dims",
        "context",
        "implementation",
        "mesh",
        "device",
        "dtype",
    }
)


def records_of(document: Document) -> Records:
    rows = {
        key: [{name: row[name] for name in row if name not in NUMBERS[key]} for row in document[key]] for key in LISTS
    }
    return Records(**copy.deepcopy(rows))


def numbers_of(document: Document) -> Numbers:
    columns = [[row[name] for row in document[key]] for key in ("buffers", "regions") for name in NUMBERS[key]]
    return Numbers(*columns)


def header_of(document: Document) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in (*LISTS, "formula", "trace")}


def from_parts(document: Document) -> list[Violation]:
    return prove_safe(records_of(document), header_of(document), numbers_of(document))


def examples() -> list[Document]:
    return [*(build() for build in EXAMPLES.values()), decoder(2)]


def test_valid_plans_are_safe_either_way() -> None:
    for document in examples():
        assert check_safety(document) == from_parts(document) == []
        require_safe(document)


def mutants(per_mutation: int) -> Iterator[tuple[str, Document]]:
    """Each mutation of a few examples; examples whose parts cannot be removed are skipped."""
    rng, builds = random.Random(7), list(EXAMPLES.values())
    for name, mutate in MUTATIONS.items():
        made = 0
        for build in rng.sample(builds, len(builds)) if name != "drop_field" else ():
            document = build()
            broken = mutate(document, rng.choice)
            if broken is not None and broken[0] != document and made < per_mutation:
                made += 1
                yield name, broken[0]


def test_mutants_get_one_verdict_either_way() -> None:
    """And it is what the whole check finds, but for statements that memory does not depend on."""
    seen: Counter[str] = Counter()
    for name, mutant in mutants(4):
        verdict, whole = check_safety(mutant), check_plan(mutant)
        assert from_parts(mutant) == verdict, name
        if all(violation.code != "format" for violation in whole):
            assert [violation for violation in whole if violation.code not in NOT_OF_MEMORY] == verdict, name
        seen.update(name for _ in verdict)
    assert len(seen) > 40


def corrupt(document: Document, rng: random.Random) -> None:
    """Change one number of memory: an address, a size, a shape, a loop, a total, a lifetime, an id."""
    key = rng.choice(("buffers", "buffers", "regions", "header", "ops", "barriers", "pools"))
    if key == "header":
        name = rng.choice(
            ("peak_bytes", "lower_bound_bytes", "total_bytes", "host_bytes", "page_bytes", "optimal", "fits")
        )
        document[name] = not document[name] if type(document[name]) is bool else document[name] + rng.choice((-1, 512))
        return
    if not document[key]:
        return
    row = rng.choice(document[key])
    name = rng.choice(
        [name for name, value in row.items() if type(value) in (int, list) and name not in ("id", "index")]
    )
    if type(row[name]) is int:
        row[name] += rng.choice((-1024, -512, -1, 1, 512, 2048))
    elif row[name] and type(row[name][0]) is int:
        at = rng.randrange(len(row[name]))
        row[name][at] += rng.choice((-1, 1))


def test_random_corruptions_get_one_verdict_either_way() -> None:
    refused = 0
    documents = examples()
    for seed in range(300):
        rng = random.Random(seed)
        document = copy.deepcopy(rng.choice(documents))
        for _ in range(rng.choice((1, 1, 2, 4))):
            corrupt(document, rng)
        verdict = check_safety(document)
        assert from_parts(document) == verdict, seed
        refused += bool(verdict)
    assert 200 < refused < 300


def test_what_is_kept_of_records_serves_every_number() -> None:
    """One `Records`, sound and broken numbers in turn: each gets what a fresh look at its document gives."""
    for build in EXAMPLES.values():
        sound = build()
        records = records_of(sound)
        for seed in range(12):
            rng = random.Random(seed)
            document = copy.deepcopy(sound)
            for row in rng.sample(document["buffers"], 2) + document["regions"][:1]:
                name = rng.choice([name for name in NUMBERS["buffers"][:3] if name in row] or ["rows"])
                row[name] += rng.choice((512, 1024, 4096))
            assert prove_safe(records, header_of(document), numbers_of(document)) == check_safety(document)
            assert prove_safe(records, header_of(sound), numbers_of(sound)) == []


def test_records_and_violations_are_values() -> None:
    """The key of a cached proof does not change; violations are distinct and comparable."""
    records = records_of(EXAMPLES["chain"]())
    with pytest.raises(FrozenInstanceError):
        records.ops = []  # type: ignore[misc]
    with pytest.raises(TypeError):
        Records([], [], [], [], [])  # type: ignore[call-arg]
    violation = Violation(code="gap", message="m")
    assert {violation, Violation(code="gap", message="m", buffers=(), ops=())} == {violation}
    assert not hasattr(violation, "__dict__")
    with pytest.raises(FrozenInstanceError):
        violation.code = "none"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Violation("gap", "m")  # type: ignore[call-arg]


def test_broken_records_are_refused_every_time() -> None:
    document = EXAMPLES["chunked"]()
    document["buffers"][1]["end"] -= 1
    records = records_of(document)
    first = prove_safe(records, header_of(document), numbers_of(document))
    assert "lifetime-short" in {violation.code for violation in first}
    assert prove_safe(records, header_of(document), numbers_of(document)) == first
    document = EXAMPLES["chunked"]()
    document["regions"][0]["start"] = document["regions"][0]["end"]
    records = records_of(document)
    first = prove_safe(records, header_of(document), numbers_of(document))
    assert {violation.code for violation in first} == {"region"}
    assert prove_safe(records, header_of(document), numbers_of(document)) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda numbers: numbers._replace(offset=numbers.offset[:-1]),
        lambda numbers: numbers._replace(shape=[*numbers.shape, [1]]),
        lambda numbers: numbers._replace(rows=[*numbers.rows, 1]),
        lambda numbers: numbers._replace(size=[str(size) for size in numbers.size]),
        lambda numbers: numbers._replace(offset=[-512, *numbers.offset[1:]]),
    ],
)
def test_numbers_of_other_records_are_no_plan(change: Callable[[Numbers], Numbers]) -> None:
    document = EXAMPLES["chunked"]()
    found = prove_safe(records_of(document), header_of(document), change(numbers_of(document)))
    assert {violation.code for violation in found} == {"format"}


def test_require_safe_says_what_is_unsafe_and_lets_statements_be() -> None:
    document = EXAMPLES["step"]()
    document["formula"][0]["expr"] = "1"
    document["max_ctx_tokens"] = 1
    require_safe(document)
    document["buffers"][10]["offset"] = document["buffers"][11]["offset"]
    with pytest.raises(CheckFailed, match="overlap"):
        require_safe(document)


MALFORMED = {"format", "id", "duplicate-name"}


def test_random_plans_are_judged_as_the_long_way_round_judges_them() -> None:
    """Word for word, buffers and ops included."""
    seen: Counter[str] = Counter()
    for seed in range(700):
        rng = random.Random(seed)
        document = random_plan(rng)
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            break_somewhere(document, rng)
        verdict = check_safety(document)
        if not MALFORMED.isdisjoint(violation.code for violation in verdict):
            continue
        expected = sorted_reasons(Oracle(document).reasons())
        found = [violation for violation in verdict if violation.code != "alias-stale-read"]  # of which more below
        assert sorted_reasons(found) == expected, seed
        seen.update({reason.code for reason in expected} or {"sound"})
    assert min(seen.values()) > 0 and len(seen) > 25, seen
    assert seen["sound"] > 30


def test_aliases_that_are_moved_are_judged_as_the_long_way_round_judges_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        document = random_alias_group(rng)
        row = rng.choice([row for row in document["buffers"] if row["alias_of"] is not None] or document["buffers"])
        by = 512 * rng.randint(1, 4)
        row.update(rng.choice(({"size": row["size"] + by}, {"alias_offset": row["alias_offset"] + by})))
        if rng.random() < 0.5:
            row["offset"] += by
        found = [violation for violation in check_safety(document) if violation.code != "alias-stale-read"]
        expected = sorted_reasons(Oracle(document).reasons())
        assert sorted_reasons(found) == expected, seed
        seen.update(reason.message.split("'")[2][:5] for reason in expected if reason.code == "alias")
    assert len(seen) >= 2, seen


def test_whatever_stands_in_a_document_gets_a_verdict() -> None:
    """Any value anywhere: a list of violations or a PlanFormatError, and nothing else is raised."""
    refused = 0
    documents = [*(build() for build in EXAMPLES.values()), *(random_plan(random.Random(seed)) for seed in range(40))]
    for seed in range(1500):
        rng = random.Random(seed)
        document = copy.deepcopy(rng.choice(documents))
        malform(document, rng)
        try:
            refused += bool(check_plan(document))
        except PlanFormatError:
            refused += 1
    assert refused > 1000


def test_a_slice_by_a_loop_that_is_not_there_is_refused_in_an_alias_group() -> None:
    document = EXAMPLES["inplace_sliced"]()
    document["ops"][1]["slices"][1][2] = "elsewhere"
    assert {"slice", "alias-stale-read"} == {violation.code for violation in check_safety(document)}


def test_each_slot_is_rounded_by_itself() -> None:
    """Two slots of 256 bytes take 1,024: the second begins on the alignment, too."""
    document = EXAMPLES["chunked"]()
    document["buffers"][2].update(rotate=2, shape=[2, 32], size=512)
    assert [violation.code for violation in check_safety(document) if violation.buffers == (2,)] == ["size"]
    document["buffers"][2]["size"] = 1024
    assert "size" not in {violation.code for violation in check_safety(document)}


STATEMENTS = {"config", "dtype", "dims", "context", "implementation", "mesh", "device", "trace", "formula"}


def test_random_statements_are_judged_as_the_long_way_round_judges_them() -> None:
    """Mutations of configuration, dims, implementations, formula and search, on several plans."""
    seen: Counter[str] = Counter()
    builds = [*EXAMPLES.values(), *(EXAMPLES["step"],) * 20]
    for seed in range(900):
        rng = random.Random(seed)
        document = rng.choice(builds)()
        for _ in range(rng.choice((1, 1, 2, 3))):
            break_statement(document, rng)
        verdict = check_plan(document)
        assert MALFORMED.isdisjoint(violation.code for violation in verdict), (seed, verdict)
        said = [violation for violation in verdict if violation.code in STATEMENTS]
        expected = sorted_reasons(Oracle(document).statements())
        found = [
            violation
            for violation in said
            if not (violation.code == "dims" and "runs over" in violation.message and violation.ops)
        ]
        assert sorted_reasons(found) == expected, seed
        seen.update({reason.code for reason in expected} or {"sound"})
    assert min(seen.values()) > 5 and seen.keys() == STATEMENTS | {"sound"}, seen


def test_random_alias_groups_lose_values_as_a_walk_through_cells_says() -> None:
    """Each value as the cells that slices cut it into, each op of each iteration in turn."""
    seen: Counter[str] = Counter()
    for seed in range(500):
        document = random_alias_group(random.Random(seed))
        verdict = check_safety(document)
        if any(violation.code == "region" for violation in verdict):  # no home, no cells
            continue
        stale = sorted_reasons(violation for violation in verdict if violation.code == "alias-stale-read")
        assert stale == sorted_reasons(Oracle(document).stale()), seed
        if seed % 4 == 0:  # what is found is found again, and what is kept of a sound group says no more than that
            records = records_of(document)
            for _ in range(2):
                assert prove_safe(records, header_of(document), numbers_of(document)) == verdict, seed
        seen.update({reason.message.split("buffer")[-2].split("'")[-1] for reason in stale} or {"sound"})
    assert min(seen["sound"], len(seen)) > 3, seen
