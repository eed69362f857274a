"""The commands of `benchmarks.quality`: stdout, stderr, exit codes and what they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import runner

from benchmarks.quality.__main__ import main

EXACT = ("exact", "--tasks", "addition", "--per-task", "1", "--model", "small-sdar")


@pytest.fixture
def quality(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return runner("benchmarks.quality", main, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--attention", "mage:exact_layers=99"), "99 exact layers of the model's"),
        (("--attention", "mage", "--model", "small"), "this model attends in both directions, so its keys change"),
        (("--eviction", "focus", "--model", "small"), "eviction: this model attends in both directions"),
        (("--rope-scaling", "yarn"), "cannot read the rotary scaling 'yarn'"),
        (("--model", "sdar-8b"), "give small, small-sdar or a checkpoint directory"),
        (("--batch", "0"), "at least one at a time, got --batch 0"),
    ],
)
def test_exact_match_that_cannot_be_measured_is_refused(more: tuple[str, ...], message: str, quality: Any) -> None:
    refused = quality(*EXACT, *more)
    assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1


def test_exact_match_is_measured_with_the_sparse_options_that_are_given(quality: Any) -> None:
    ran = quality(*EXACT, "--attention", "sparsed:k=8:page=4", "--json")
    assert ran.code == 0
    said = ran.json["settings"]["options"]["attention"]
    assert (said["k"], said["page"], said["exact_steps"]) == (8, 4, 0.2)


def test_exact_match_is_measured_with_the_eviction_that_is_given(quality: Any) -> None:
    ran = quality(*EXACT, "--eviction", "focus:alpha=1.8", "--json")
    assert ran.code == 0 and ran.json["settings"]["options"]["eviction"]["alpha"] == 1.8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--alphas", "x"), "alphas are numbers such as 1.2,1.5, got 'x'"),
        (("--alphas", "0.5"), "alpha is 0.5; it must be a number of at least 1"),
        (("--model", "llada-8b"), "a preset with random weights"),
        (("--model", "small"), "attends in both directions"),
        (("--plot", "x.pdf"), "--plot writes PNG"),
    ],
)
def test_decodability_that_cannot_be_measured_is_refused(more: tuple[str, ...], message: str, quality: Any) -> None:
    refused = quality("decodability", *more)
    assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1


def test_decodability_is_measured_by_one_command(quality: Any, tmp_path: Path) -> None:
    ask = ("decodability", "--tasks", "addition", "--items", "1", "--alphas", "1.5")
    ran = quality(*ask, "--out", str(tmp_path / "found.json"))
    assert ran.code == 0 and "AUC" in ran.out and "alpha 1.5" in ran.out
    assert json.loads((tmp_path / "found.json").read_text())["schema"] == "mosaic.decodability/1"


def test_policies_are_compared_by_one_command(quality: Any, tmp_path: Path) -> None:
    ask = (
        "policies",
        "--policies",
        "exact,mage:k=8",
        "--tasks",
        "addition",
        "--per-task",
        "1",
        "--lengths",
        "1k",
    )
    ran = quality(*ask, "--out", str(tmp_path / "found.json"))
    assert ran.code == 0 and "1 answers" in ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert any(line[:3] == ["exact", "addition", "100.0%"] for line in lines)
    assert any(line[:3] == ["mage:k=8", "addition", "100.0%"] and "+0.0%" in line for line in lines)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["schema"] == "mosaic.policies/1" and found["model"] == "small-sdar" and found["settings"]["seed"] == 0
    for more, message in (
        (("--policies", "exact,mages"), "unknown policy 'mages'. Did you mean 'mage'?"),
        (("--model", "small"), "this model attends in both directions"),
        (("--model", "sdar-8b"), "sdar-8b is a preset with random weights"),
        (("--schedules", "static"), "give the steps a block, such as static:16"),
    ):
        refused = quality(*ask, *more)
        assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1
