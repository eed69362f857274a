"""Every scalar of a plan, changed or left out at random: refused, listed as unproved, or another plan that holds."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from test_plan_mutations import CONFIGURATIONS, small_plan

from mosaic.errors import PlanFormatError
from mosaic.planner.check import check_plan, unproved_claims

Path = tuple[str | int, ...]

LISTED = {  # what may be changed, and the claim that says so
    r"model|mosaic_version|phase": "model, mosaic_version, phase",
    r"(ops|buffers|barriers|regions)\.\*\.name|formula\.\*\.at|buffers\.\*\.tensor": "names, tensors",
    r"device|capability|estimated|device_memory_bytes|page_bytes|components\.(context|library)": "device's profile",
    r"predicted_step_ms|trace\.\*\.predicted_ms": "cost model",
    r"max_ctx_tokens": "max_ctx_tokens",
    r"solver|trace\.\*\..*": "the search's moves and configurations",
    r"budget_bytes|host_budget_bytes": "budget_bytes, host_budget_bytes",
    r"config\..*|dims\..*": "no setting and no size is missing",
    r"config\.(attention|head|hidden|stream)": "the options of",
    r"ops\.\*\.attrs\..*": "attributes",
    r"dtype": "dtype",
    r"buffers\.\*\.(size|shape\.\*)": "sizes of scratch buffers",
    r"ops\.\*\.(flops|bytes)": "touch and cost",
}
HOLDS = r"buffers\.\*\.offset|edges\.\*\.(from|to)"
"""Another address may be as good, and another op to wait for or to wait."""


@cache
def plan(number: int) -> dict[str, Any]:
    return small_plan(number)


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from leaves(inner, (*path, at))
    else:
        yield path


def label(path: Path) -> str:
    return ".".join("*" if isinstance(key, int) else key for key in path)


def other(value: Any, rng: random.Random) -> Any:
    """A value that is not this one, of the same type or not."""
    found: list[Any] = [None, "", "zzz", 7, -1, 10**29, 0.5]
    if isinstance(value, str):
        found += [f"{value}x"] * 4
    elif isinstance(value, int | float):
        found += [value + 1, value * 2 + 512, -value - 1]
    return rng.choice([changed for changed in found if changed != value])


def broken(document: dict[str, Any], path: Path, rng: random.Random) -> dict[str, Any]:
    mutant = copy.deepcopy(document)
    at: Any = mutant
    for key in path[:-1]:
        at = at[key]
    if isinstance(path[-1], str) and rng.random() < 0.3:
        del at[path[-1]]
    else:
        at[path[-1]] = other(at[path[-1]], rng)
    return mutant


def assert_noticed(document: dict[str, Any], path: Path, rng: random.Random) -> None:
    mutant, name = broken(document, path, rng), label(path)
    try:
        if check_plan(mutant):
            return
    except PlanFormatError:
        return
    said = "; ".join(map(str, unproved_claims(mutant)))
    listed = [claim for pattern, claim in LISTED.items() if re.fullmatch(pattern, name)]
    if not re.fullmatch(HOLDS, name):
        assert any(claim in said for claim in listed), f"{path} is neither refused nor listed"


@pytest.mark.some
@pytest.mark.parametrize("number", [0, 3, 4])
def test_any_scalar_that_is_changed_is_noticed(number: int) -> None:
    """A few of every kind of field."""
    rng, document = random.Random(number), plan(number)
    kinds: dict[str, list[Path]] = {}
    for path in leaves(document):
        kinds.setdefault(label(path), []).append(path)
    for paths in kinds.values():
        assert_noticed(document, rng.choice(paths), rng)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_every_scalar_that_is_changed_is_noticed(number: int) -> None:
    rng, document = random.Random(number), plan(number)
    for path in leaves(document):
        assert_noticed(document, path, rng)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"host_budget_bytes": 10**29}, "limit"),
        ({"budget_bytes": 1 << 63}, "limit"),
        ({"mesh": {"size": 1, "axes": {}}}, "mesh"),
    ],
)
def test_numbers_and_axes_that_no_plan_has(change: dict[str, Any], code: str) -> None:
    assert {violation.code for violation in check_plan({**plan(0), **change})} == {code}


@pytest.mark.parametrize(("old", "new"), [("weights", "heights"), ("fetch", ""), ("store", "weights2")])
def test_streams_have_the_names_that_are_declared(old: str, new: str) -> None:
    """All ops of a stream were renamed together: their order still held."""
    documents = [copy.deepcopy(plan(number)) for number in (3, 4, 5)]
    renamed = [document for document in documents if any(op["stream"] == old for op in document["ops"])]
    assert renamed
    for document in renamed:
        for op in document["ops"]:
            op["stream"] = new if op["stream"] == old else op["stream"]
        assert "streams" in {violation.code for violation in check_plan(document)}


def test_kernels_that_are_not_shipped_are_declared() -> None:
    document = copy.deepcopy(plan(0))
    document["ops"][5]["kernel"] += "x"
    assert "kernels" in {violation.code for violation in check_plan(document)}
    document["declared"]["kernels"] = [document["ops"][5]["kernel"]]
    assert "kernels" not in {violation.code for violation in check_plan(document)}


@pytest.mark.parametrize(
    "declared", [None, {"kernels": []}, {"kernels": [], "streams": [3]}, {"kernels": "x", "streams": []}]
)
def test_what_is_declared_is_lists_of_names(declared: Any) -> None:
    (found,) = check_plan({**plan(0), "declared": declared})
    assert found.message.startswith("declared: expected lists of names")


def test_pools_are_on_the_device_of_the_plan() -> None:
    document = copy.deepcopy(plan(0))
    document["pools"][0]["device"] = "cuda:7"
    assert "pool" in {violation.code for violation in check_plan(document)}
