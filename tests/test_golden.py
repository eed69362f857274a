"""Comparing two records: what is equal, better or worse, and that a worse one fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import golden

FITS: Mapping[str, Any] = {
    "outcome": "fits", "figures": {"peak_bytes": 512, "predicted_step_ms": 2.5, "max_ctx_tokens": 100, "later: total_bytes": 7},
    "config": {"ffn": 64}, "implementations": {},
}  # fmt: skip
RECORD: Mapping[str, Any] = {
    "tokens": {"a": {"tokens": [[1, 2]], "steps": [3], "refused": []}, "b": {"refused": ["UsageError 4"]}},
    "plans": {"p": FITS, "q": {"outcome": "refused", "refused": "UsageError 8"}},
}
CHANGES: Mapping[str, tuple[str, Any, str, int]] = {
    "tokens": ("tokens a tokens", [[1, 5]], "worse: a: other tokens", 1),
    "steps": ("tokens a steps", [4], "worse: a: other steps", 1),
    "another refusal": ("tokens b refused", ["UsageError 5"], "worse: b: other refused", 1),
    "a larger peak": ("plans p figures peak_bytes", 1024, "worse: p: peak_bytes 512 -> 1,024", 1),
    "a smaller peak": ("plans p figures peak_bytes", 256, "better: p: peak_bytes 512 -> 256", 0),
    "a slower step": ("plans p figures predicted_step_ms", 2.6, "worse: p: predicted_step_ms 2.5 -> 2.6", 1),
    "a rounding": ("plans p figures predicted_step_ms", 2.5 + 5e-7, "changed: p: ", 0),
    "a longer context": ("plans p figures max_ctx_tokens", 101, "better: p: max_ctx_tokens 100 -> 101", 0),
    "a shorter context": ("plans p figures max_ctx_tokens", 99, "worse: p: max_ctx_tokens 100 -> 99", 1),
    "a figure that is gone": ("plans p figures", {}, "worse: p: peak_bytes 512 -> None", 1),
    "another configuration": ("plans p config ffn", 32, "changed: p: config {'ffn': 64} -> {'ffn': 32}", 0),
    "what no longer fits": ("plans p outcome", "does not fit", "worse: p: fits -> does not fit", 1),
    "what is refused no more": ("plans q", FITS, "better: q: refused -> fits", 0),
    "a refusal in other numbers": ("plans q refused", "UsageError 9", "changed: q: refused UsageError 8 -> UsageError 9", 0),
}  # fmt: skip


def compared(after: Mapping[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and what is printed."""
    files = [folder / "before.json", folder / "after.json"]
    for file, record in zip(files, (RECORD, after), strict=True):
        file.write_text(json.dumps(record), encoding="utf-8")
    return golden.main(["compare", *map(str, files)]), capsys.readouterr().out


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, value, line, code = CHANGES[name]
    *path, last = place.split()
    after: Any = deepcopy(RECORD)
    changed = after
    for key in path:
        changed = changed[key]
    changed[last] = value
    found, printed = compared(after, tmp_path, capsys)
    assert found == code and f"  {line}" in printed
    assert f"{path[0]}: 1 of 2 equal" in printed


def test_what_both_have_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample against all; records that have nothing in common are not equal."""
    assert compared(RECORD, tmp_path, capsys) == (0, "tokens: 2 of 2 equal\nplans: 2 of 2 equal\n")
    sample = {"plans": {"p": FITS}}
    assert compared(sample, tmp_path, capsys) == (0, "plans: 1 of 1 equal, 1 in one alone\n")
    more = {"plans": {**RECORD["plans"], "r": FITS}}
    assert compared(more, tmp_path, capsys) == (0, "plans: 2 of 2 equal, 1 in one alone\n")
    assert compared({"plans": {}}, tmp_path, capsys)[0] == compared({}, tmp_path, capsys)[0] == 1


def test_cases_have_names_of_their_own() -> None:
    cases = golden.token_cases()
    assert len({case.name for case in cases}) == len(cases) > 600
    assert {case.family for case in cases} == set(golden.CONFIGS)
    plans = [json.dumps(options) for options in golden.all_plans()]
    assert len(set(plans)) == len(plans) > 900


def test_refusals_are_a_type_and_numbers() -> None:
    assert golden.refusal(ValueError("needs 17,045.5 MiB. Has 3.")) == "ValueError 17,045.5 3"
