"""What a verdict lists as unproved is what a file can change without being refused, and nothing that it cannot."""

from __future__ import annotations

import copy

import pytest
from plan_examples import EXAMPLES, Document

from mosaic.planner import Planner, Request
from mosaic.planner.check import check_plan, unproved_claims


@pytest.fixture(scope="module")
def document() -> Document:
    return dict(Planner("llada-8b", device="rtx-3090").plan(Request(seq_lens=(1000,)), limit=False).document)


def claims(document: Document) -> str:
    return "; ".join(map(str, unproved_claims(document)))


def changed(document: Document, path: tuple[str | int, ...], value: object) -> Document:
    found = copy.deepcopy(document)
    at = found
    for key in path[:-1]:
        at = at[key]  # type: ignore[index]
    at[path[-1]] = value  # type: ignore[index]
    return found


def op_with(document: Document, attribute: str) -> int:
    return next(i for i, row in enumerate(document["ops"]) if attribute in row["attrs"])


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("model",), "another", "model"),
        (("mosaic_version",), "9", "mosaic_version"),
        (("device",), "abacus", "device"),
        (("estimated",), True, "estimated"),
        (("device_memory_bytes",), 1 << 50, "device_memory_bytes"),
        (("max_ctx_tokens",), 1 << 30, "max_ctx_tokens"),
        (("solver",), "magic", "solver"),
        (("config", "head"), "logits", "head"),
        (("ops", "eps"), 0.25, "eps"),
        (("ops", "scale"), 3.0, "scale"),
    ],
)
def test_what_a_file_may_change_is_listed(document: Document, path: tuple[str, ...], value: object, named: str) -> None:
    if path[0] == "ops":
        path = ("ops", op_with(document, path[1]), "attrs", path[1])  # type: ignore[assignment]
    mutant = changed(document, path, value)
    mutant["trace"] = []
    assert mutant != document
    assert check_plan(mutant) == []
    assert named in claims(mutant)


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("dtype",), "float16", "dtype"),
        (("optimal",), False, "optimal"),
        (("config", "invented"), 128, "config"),
        (("max_ctx_tokens",), 999, "context"),
        (("dims", "masked"), 1, "dims"),
        (("implementations",), {}, "implementation"),
    ],
)
def test_what_is_proved_cannot_be_changed(document: Document, path: tuple[str, ...], value: object, code: str) -> None:
    mutant = changed(document, path, value)
    mutant["trace"] = []
    assert code in {violation.code for violation in check_plan(mutant)}


def test_unknown_kernels_are_their_authors_word(document: Document) -> None:
    assert "kernels that Mosaic does not ship" not in claims(document)
    mutant = changed(document, ("ops", 3, "kernel"), "my_kernel")
    assert check_plan(mutant) == []
    assert "my_kernel (1 ops)" in claims(mutant)


def test_the_list_depends_on_what_a_plan_has() -> None:
    bare = EXAMPLES["chain"]()
    said = claims(bare)
    assert "mix (" in said and "dtype" in said and "scratch" in said
    assert "attributes" not in said and "options" not in said
    assert "dims tokens, seqs" in said  # of a phase whose dims nothing shows
    assert f"but that {bare['dims']['tokens']} tokens fit" in said
    bare["fits"] = False
    assert "tokens fit" not in claims(bare)
    step = claims(EXAMPLES["step"]())
    assert "dims" not in step and "dtype" not in step and "options of head" in step
    looped = EXAMPLES["chunked"]()
    assert "ffn" not in claims(looped).split("dims ")[1].split(" (")[0]
    looped["config"]["idle"] = None
    assert "that idle could have been on" in claims(looped)
