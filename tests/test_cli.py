"""The command line: stdout, stderr, exit codes and --json."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mosaic import cli
from mosaic.cli.attention import report_steps
from mosaic.devices import DEVICES
from mosaic.models import PRESETS
from mosaic.models.policies.registry import attention_policy


class Outcome:
    """The output of one run."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def runner(
    name: str, main: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """A function that runs a command line in this process."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def mosaic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return runner("mosaic", cli.main, capsys, monkeypatch)


PLAN = ("plan", "--model", "llada-8b", "--device", "rtx-3090")


def test_plan_prints_the_table(mosaic: Any) -> None:
    ran = mosaic(*PLAN, "--ctx", "128k")
    assert ran.code == 0 and ran.err == ""
    for part in ("131,072 tokens, 65,536 masked", "weights", "14.93 GiB", "fits, headroom", "largest context", "predicted step",
                 "chunks", "layers.0/q", "lower bound: optimal", "estimated"):  # fmt: skip
        assert part in ran.out, part
    assert "\x1b[" not in ran.out


def test_sparse_keys_are_planned_as_a_refresh_and_reuse(mosaic: Any) -> None:
    ask = (
        "plan",
        "--model",
        "llada-8b",
        "--ctx",
        "16k",
        "--device",
        "h200",
        "--budget",
        "40GiB",
        "--cache",
        "sparse:retention=0.1",
    )
    shown, given = mosaic(*ask), mosaic(*ask, "--json").json
    assert shown.code == 0 and "refresh, 16,384 tokens" in shown.out
    assert [line.split()[:2] for line in shown.out.splitlines()[-3:]] == [
        ["refresh", "4"],
        ["reuse", "124"],
        ["all", "128"],
    ]
    refresh, reuse = given["steps"]["refresh"], given["steps"]["reuse"]
    assert refresh["packed_bytes"] == reuse["packed_bytes"] > (16384 - 32) // 10 * 2 * 4096 * 32 * 2
    assert refresh["predicted_step_ms"] > 50 * reuse["predicted_step_ms"]
    windowed = mosaic(*ask[:-1], "sparse:retention=0.1:sample=1/8", "--json").json["steps"]
    assert {name: step["times"] for name, step in windowed.items()} == {"refresh": 1, "windowed": 3, "reuse": 124}
    assert reuse["predicted_step_ms"] < windowed["windowed"]["predicted_step_ms"] < refresh["predicted_step_ms"] / 8
    few = mosaic(*ask, "--budget", "14GiB")
    assert few.code == 3 and "smallest budget for this request" in few.out
    assert few.out.endswith("largest retention in this budget: none\n")


@pytest.mark.soak
def test_what_is_said_to_be_enough_holds_every_step_of_sparse_keys(mosaic: Any) -> None:
    """A delayed Refresh needs more than the full step before it, and neither fits."""
    ask = ("plan", "--model", "llada-8b", "--ctx", "8k", "--device", "h200", "--json", "--cache", "sparse:delay=1")
    short = mosaic(*ask, "--budget", "2GiB").json["misfit"]
    assert mosaic(*ask, "--budget", str(short["smallest_budget_bytes"])).code == 0 == short["largest_retention"]
    tight = mosaic(*ask, "--budget", "16.5GiB")
    retention = tight.json["misfit"]["largest_retention"]
    assert tight.code == 3 and 0 < retention < 0.5
    for more, code in ((0, 0), (0.01, 3)):
        fewer = (*ask[:-1], f"{ask[-1]}:retention={retention + more:.2f}", "--budget", "16.5GiB")
        assert mosaic(*fewer).code == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cache", "dual"), "--cache plans the steps of sparse keys; use --cache sparse, not dual."),
        (("--cache", "sparse:retention=0"), "retention is 0; it must be a share of the keys, in (0, 1]."),
        (("--cache", "sparse", "--ctx", "auto"), "give its positions, such as --ctx 128k."),
        (("--cache", "sparse", "--masked", "4"), "--cache plans a canvas of --ctx; leave"),
        (("--cache", "sparse", "--block-length", "16384"), "a block has 1 to 16,383 of the canvas' 16,384 positions"),
        (
            ("--cache", "sparse", "--gen-length", "48"),
            "--gen-length is 48; an answer has whole blocks of 32 of the canvas'",
        ),
        (("--cache", "sparse", "--gen-length", "16384"), "--gen-length is 16384; an answer has whole blocks"),
        (("--block-length", "8"), "--block-length goes with --cache"),
        (("--gen-length", "8"), "--gen-length goes with --cache"),
        (("--cache", "sparse", "--model", "sdar-8b"), "this model attends by blocks of 4"),
    ],
)
def test_steps_of_sparse_keys_that_cannot_be(mosaic: Any, arguments: tuple[str, ...], message: str) -> None:
    asked = mosaic("plan", "--model", "llada-8b", "--ctx", "16k", *arguments)
    assert asked.code == 2 and asked.out == "" and asked.err.count("\n") <= 2
    assert message in " ".join(asked.err.split())


def test_plan_sets_sparse_steps_of_a_block_beside_the_exact_one(mosaic: Any) -> None:
    """The later steps of a block read fewer keys; what is selected is in the plan."""
    ask = ("plan", "--model", "sdar-8b", "--ctx", "128k", "--device", "h200", "--attention", "mage:k=1024")
    shown = mosaic(*ask)
    assert shown.code == 0 and "sdar-8b, denoise" in shown.out and "selected_1024_2_kv_head" in shown.out
    assert "attention sparse(k=1024), one block of 4 tokens" in shown.out
    found = mosaic(*ask, "--json").json
    exact, first, later = (found["steps"][name] for name in ("exact", "first", "later"))
    assert later["predicted_step_ms"] < 0.7 * exact["predicted_step_ms"] < first["predicted_step_ms"]
    assert exact["selected_bytes"] == 0 < later["selected_bytes"] == first["selected_bytes"]
    assert later["predicted_step_ms"] == found["predicted_step_ms"] and later["total_bytes"] == found["total_bytes"]


def test_plan_shows_a_step_that_selects_again(mosaic: Any) -> None:
    """It attends to all keys, and writes none of the block before."""
    ask = ("plan", "--model", "small-sdar", "--ctx", "8k", "--device", "h200", "--attention", "mage:k=64:every=2")
    assert "sparse, selects again" in mosaic(*ask).out
    steps = {name: step["predicted_step_ms"] for name, step in mosaic(*ask, "--json").json["steps"].items()}
    assert list(steps) == ["exact", "first", "again", "later"]
    assert steps["later"] < steps["exact"] < steps["again"] < steps["first"]


@pytest.mark.soak
def test_plan_sets_steps_that_reuse_beside_the_exact_one(mosaic: Any) -> None:
    """They read no prefix; outputs over it are in the plan, for all layers or for exact ones beside sparse layers."""
    ask = ("plan", "--model", "sdar-8b", "--ctx", "128k", "--device", "h200", "--attention")
    shown = mosaic(*ask, "flashblock:reuse_steps=2")
    assert (
        shown.code == 0
        and "prefix_outputs_all" in shown.out
        and "attention reuse(steps=2), one block of 4" in shown.out
    )
    found = mosaic(*ask, "flashblock:reuse_steps=2", "--json").json["steps"]
    exact, first, later = (found[name] for name in ("exact", "first", "later"))
    assert later["predicted_step_ms"] < 0.7 * exact["predicted_step_ms"]
    assert first["predicted_step_ms"] < 1.2 * exact["predicted_step_ms"]
    assert exact["reused_bytes"] == 0 < later["reused_bytes"] == first["reused_bytes"]
    ms = 2 * first["predicted_step_ms"] + 2 * later["predicted_step_ms"]
    assert f"{ms:,.1f} ms reusing" in shown.out
    both = mosaic(*ask, "mage+flashblock:k=1024", "--json").json
    assert both["steps"]["later"]["selected_bytes"] > 0 and both["steps"]["later"]["reused_bytes"] > 0
    assert {"prefix_outputs_2", "prefix_sums_2"} <= {buffer["name"] for buffer in both["buffers"]}


FACES: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "--device", "h200", "--ctx", "4k"),
    "generate": ("generate", "--prompt", "hello", "--gen-length", "4"),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--attention", "flashblock:reuse_steps=0"), "serves 0 steps; it must be an integer of at least 1"),
        (("--attention", "mage:reuse_change=-0.5"), "change is -0.5; it must be a number of at least 0"),
        (("--attention", "flashblock:k=8"), "'flashblock' selects no keys; leave k out"),
        (("--attention", "flashblok"), "unknown attention 'flashblok'. Did you mean 'flashblock'?"),
        (("--attention", "flashblock", "--model", "small"), "so its keys change in every step and no output over them"),
        (("--attention", "mage:k=0"), "k is 0; it must be an integer of at least 1"),
        (("--attention", "mage:k=-3"), "k is -3; it must be an integer of at least 1"),
        (("--attention", "mage:page=0"), "page is 0; it must be an integer of at least 1"),
        (("--attention", "mage:k=24:page=16"), "k 24 is not whole pages of 16 keys; use k 16"),
        (("--attention", "mage:every=1"), "every=1 leaves no sparse step to a block"),
        (("--attention", "mage:evry=8"), "unknown option of 'mage' 'evry'. Did you mean 'every'?"),
        (("--attention", "mage:8"), "mage:8: expected option=value, got '8'"),
        (("--attention", "flashblock:every=8"), "'flashblock' selects no keys; leave every out"),
        (("--attention", "mages"), "unknown attention 'mages'. Did you mean 'mage'?"),
        (("--attention", "mage:exact_layers=-1"), "exact_layers is -1; it must be an integer of at least 0"),
        (("--attention", "mage:exact_layers=99"), "99 exact layers of the model's"),
        (("--attention", "mage", "--model", "small"), "this model attends in both directions, so its keys change"),
    ],
)
def test_sparse_attention_that_cannot_be_is_refused_alike(
    face: str, more: tuple[str, ...], message: str, mosaic: Any
) -> None:
    refused = mosaic(*FACES[face], "--model", "small-sdar", *more)
    assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1


def test_sparse_attention_is_planned_of_a_whole_block(mosaic: Any) -> None:
    refused = mosaic(*FACES["plan"], "--model", "small-sdar", "--attention", "mage", "--masked", "3")
    assert refused.code == 2 and "leave --seq-lens, --masked and --mask-ratio out" in refused.err


@pytest.mark.soak
def test_a_selection_as_large_as_the_prefix_generates_what_exact_attention_does(mosaic: Any) -> None:
    """Through the command: its options reach the algorithm, and the document says them."""
    ask = ("generate", "--model", "small-sdar", "--prompt", "Anna has 3 apples.", "--gen-length", "24", "--json")
    exact, whole, few = (
        mosaic(*ask, *more).json
        for more in ((), ("--attention", "mage:k=64"), ("--attention", "mage:k=4:page=2:exact_layers=1"))
    )  # fmt: skip
    assert whole["token_ids"] == exact["token_ids"] and exact["config"]["attention"] is None
    said = few["config"]["attention"]
    assert (said["k"], said["page"], said["exact_layers"]) == (4, 2, 1)
    again = mosaic(*ask, "--attention", "mage+flashblock:k=64:reuse_steps=1").json
    assert again["token_ids"] == exact["token_ids"] and again["config"]["attention"]["reuse"]["steps"] == 1


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yarn", "cannot read the rotary scaling 'yarn': write a type and a factor, such as yarn:4"),
        ("yarn:x", "cannot read the rotary scaling 'yarn:x'"),
        ("yarn:0.5", "'factor' must be a number of at least 1, got 0.5"),
        ("longrope:2", "'rope_scaling' of type 'longrope' is not supported; known: default, linear, dynamic, yarn"),
    ],
)
def test_a_rotary_scaling_that_cannot_be_is_refused_alike(face: str, given: str, message: str, mosaic: Any) -> None:
    refused = mosaic(*FACES[face], "--model", "small-sdar", "--rope-scaling", given)
    assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--eviction", "focus:alpha=0.9"), "alpha is 0.9; it must be a number of at least 1"),
        (("--eviction", "fokus"), "unknown eviction 'fokus'. Did you mean 'focus'?"),
        (("--eviction", "focus", "--block-cache", "dd"), "unknown block_cache 'dd'. Did you mean 'dc'?"),
        (("--eviction", "focus", "--model", "small"), "eviction: this model attends in both directions"),
    ],
)
def test_eviction_that_cannot_be_is_refused_alike(face: str, more: tuple[str, ...], message: str, mosaic: Any) -> None:
    refused = mosaic(*FACES[face], "--model", "small-sdar", *more)
    assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--ctx", "1k", "--eviction", "focus", "--masked", "3"), "leave --masked and --mask-ratio out"),
        (
            ("--seq-lens", "1k,1k", "--eviction", "focus", "--attention", "mage"),
            "at the end of --ctx; leave --seq-lens",
        ),
        (("--ctx", "1k", "--eviction", "focus", "--attention", "flashblock"), "output over their prefix to reuse"),
        (("--ctx", "1k", "--eviction", "focus", "--attention", "mage+flashblock"), "output over their prefix to reuse"),
        (("--ctx", "1k", "--block-cache", "dc"), "--block-cache goes with --eviction"),
        (("--eviction", "focus"), r"give one (--ctx 1k) or several (--seq-lens 1k,2k)"),
        (("--eviction", "focus", "--ctx", "auto"), "give one (--ctx 1k) or several"),
        (("--eviction", "focus", "--ctx", "1k", "--seq-lens", "1k"), "give one (--ctx 1k) or several"),
    ],
)
def test_eviction_is_planned_of_whole_blocks(more: tuple[str, ...], message: str, mosaic: Any) -> None:
    refused = mosaic("plan", "--device", "h200", "--model", "small-sdar", *more)
    assert refused.code == 2 and message in refused.err and len(refused.err.strip().splitlines()) == 1


@pytest.mark.soak
def test_plan_sets_the_graphs_of_a_step_that_evicts_beside_the_whole_one(mosaic: Any) -> None:
    """The step fits where the largest of its graphs does; its second one takes less, the fewer tokens it computes."""
    whole_blocks = ("plan", "--device", "h200", "--model", "small-sdar", "--seq-lens", ",".join(["1k"] * 128))
    ask = (*whole_blocks, "--eviction", "focus-public:rank=random:alpha=1.2", "--block-cache", "dc+")
    shown = mosaic(*ask)
    assert (
        shown.code == 0 and "eviction eviction(alpha=1.2, history='block'" in shown.out and "rank='random'" in shown.out
    )
    found = mosaic(*ask, "--json").json
    whole, prefix, *suffixes = found["graphs"].values()
    assert whole["tokens"] == prefix["tokens"] == suffixes[-1]["tokens"] == 128 * 32
    for fewer, more in pairwise(suffixes):
        assert fewer["tokens"] < more["tokens"] and fewer["predicted_ms"] < more["predicted_ms"]
        assert fewer["total_bytes"] <= more["total_bytes"] <= found["total_bytes"]
    assert prefix["predicted_ms"] + suffixes[0]["predicted_ms"] < 0.7 * whole["predicted_ms"]
    steps = {graph["tokens"]: prefix["predicted_ms"] + graph["predicted_ms"] for graph in suffixes}
    pays = max(kept for kept, step in steps.items() if step <= 0.98 * whole["predicted_ms"])
    assert found["eviction_pays_up_to"] == pays > suffixes[0]["tokens"]
    assert f"it pays where a step keeps at most {pays:,} of 4,096 tokens" in shown.out
    assert mosaic(*ask, "--budget", str(found["total_bytes"])).code == 0
    tight = mosaic(*ask, "--budget", str(suffixes[0]["total_bytes"] - 2**22), "--json")
    least, options = tight.json["misfit"]["needed_bytes"], tight.json["misfit"]["options"]
    assert tight.code == 3 and least <= found["total_bytes"] and options
    assert all(option["predicted_ms"] > prefix["predicted_ms"] for option in options)
    assert not {option["what"] for option in options} & {"masked", "ctx", "seq-lens"}


@pytest.mark.soak
def test_plan_cuts_the_later_step_of_a_block_that_attends_sparsely(mosaic: Any) -> None:
    """Eviction and selected keys in one step: steps of the attention alone, and graphs that read what it selects."""
    ask = ("plan", "--device", "h200", "--model", "small-sdar", "--ctx", "8k", "--attention", "mage:k=64")
    both = (*ask, "--eviction", "focus:alpha=1.2")
    shown = mosaic(*both)
    assert shown.code == 0 and "attention sparse(k=64)" in shown.out and "eviction eviction(alpha=1.2)" in shown.out
    found, alone = mosaic(*both, "--json").json, mosaic(*ask, "--json").json
    assert found["eviction_pays_up_to"] == 0 and "it does not pay here: a step takes" in shown.out  # 32 rows, or one
    assert found["steps"] == alone["steps"] and "graphs" not in alone
    whole, prefix, *suffixes = found["graphs"].values()
    assert whole["predicted_ms"] == pytest.approx(alone["steps"]["later"]["predicted_step_ms"], rel=0.02)
    assert whole["tokens"] == prefix["tokens"] == suffixes[-1]["tokens"] == 32
    assert prefix["predicted_ms"] < whole["predicted_ms"] and len(suffixes) == 1  # so few rows take as long as one
    assert found["total_bytes"] == max(graph["total_bytes"] for graph in (prefix, *suffixes))
    assert any(pool["name"].startswith("state/selected") for pool in found["pools"])
    exact = mosaic("plan", "--device", "h200", "--model", "small-sdar", "--ctx", "8k", "--eviction", "focus", "--json")
    assert suffixes[-1]["predicted_ms"] < exact.json["graphs"]["suffix_32"]["predicted_ms"]


def test_generation_with_eviction_by_command(mosaic: Any) -> None:
    """Options reach the algorithm, and the document says them."""
    ask = ("generate", "--model", "small-sdar", "--prompt", "Anna has 3 apples.", "--gen-length", "4", "--json")
    ran = mosaic(*ask, "--eviction", "focus-public:alpha=1.2", "--block-cache", "dc+", "--block-commit", "cached")
    said = ran.json["config"]
    assert (said["eviction"]["alpha"], said["eviction"]["history"]) == (1.2, "block")
    assert (said["block_cache"], said["block_commit"]) == ("dc+", "cached")


def test_the_readme_shows_what_the_command_prints(mosaic: Any) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    command, _, shown = readme.split("```console\n$ mosaic plan")[1].split("```")[0].partition("\n")
    printed = [" ".join(line.split()) for line in mosaic("plan", *command.split()).out.splitlines()]
    assert [" ".join(line.split()) for line in shown.strip().splitlines()] == printed
    stated = readme.split("plan.config  # {")[1].split("}")[0].replace(", …", "")
    config = mosaic("plan", *command.split(), "--json").json["config"]
    assert ast.literal_eval(f"{{{stated}}}").items() <= config.items()


def test_plan_json_is_only_json_and_checks(mosaic: Any, tmp_path: Path) -> None:
    ran = mosaic(*PLAN, "--ctx", "4k", "--masked", "100", "--json")
    dims = {"tokens": 4096, "seqs": 1, "span": 4096, "kv_heads": 32, "masked": 100}
    assert ran.code == 0 and ran.json["dims"] == dims
    file = tmp_path / "plan.json"
    assert mosaic(*PLAN, "--ctx", "4k", "--masked", "100", "--out", str(file)).code == 0
    assert json.loads(file.read_text()) == ran.json
    checked = mosaic("check", str(file), "--json")
    assert checked.code == 0 and checked.json["valid"] is True and checked.json["violations"] == []
    out = mosaic("check", str(file)).out
    assert "valid." in out and "not provable from the file alone" in out
    for entry in checked.json["unproved"]:
        assert f" {entry['claim']} ({entry['needs']}) " in " ".join(out.split()) + " "
    assert mosaic("show", str(file), "--json").json == ran.json


def test_explain_shows_formula_and_search(mosaic: Any) -> None:
    out = mosaic(*PLAN, "--ctx", "128k", "--explain").out
    assert "512*heads_rows*tokens + 16388*tokens + 8192*proj_rows" in out and "57344*ffn_rows + 8196*tokens" in out
    assert "the fastest configuration" in out


@pytest.fixture
def little(tmp_path: Path) -> tuple[str, ...]:
    """Plan a small model for a card that holds little besides; for what is the same of a large one."""
    card = tmp_path / "little.toml"
    card.write_text('base = "rtx-3090"\ncontext_bytes = "1MiB"\nlibrary_bytes = 0\n')
    return ("plan", "--model", "small-llada", "--device", str(card))


def test_auto_is_the_largest_context_that_fits(mosaic: Any, little: tuple[str, ...]) -> None:
    plan = mosaic(*little, "--budget", "64MiB", "--ctx", "auto", "--json").json
    longest = plan["dims"]["tokens"]
    assert plan["fits"] and longest == plan["max_ctx_tokens"]
    assert mosaic(*little, "--budget", "64MiB", "--ctx", str(longest + 1)).code == 3


def test_a_plan_that_does_not_fit_says_what_would(mosaic: Any, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    request = ("plan", "--model", "small-llada", "--ctx", "20m", "--device")
    ran = mosaic(*request, "rtx-3090", "--out", str(target), "--json")
    reason = ran.json["misfit"]
    assert ran.code == 3 and not ran.json["fits"] and not target.exists()
    assert reason["needed_bytes"] > reason["available_bytes"] and reason["floor"].startswith("layers.0/")
    assert reason["largest"][0][0] == "hidden" and reason["device"] == "a100-40g"
    host = reason["suggestion"].split(",")[0].split()
    assert host[0] == "--host-budget" and mosaic(*request, "rtx-3090", *host).code == 0
    budget = str(reason["smallest_budget_bytes"])
    assert mosaic(*request, "a100-40g", "--budget", budget).code == 0


SPARSE = ("--model", "small-sdar", "--ctx", "1m", "--attention")


@pytest.mark.soak
def test_steps_of_sparse_attention_are_planned_side_by_side(mosaic: Any, little: tuple[str, ...]) -> None:
    """They fit where the largest of them does."""
    steps = mosaic(*little, *SPARSE, "mage", "--json").json["steps"]
    least = max(step["total_bytes"] for step in steps.values())
    assert steps["first"]["total_bytes"] == least > steps["later"]["total_bytes"] > steps["exact"]["total_bytes"]
    assert mosaic(*little, *SPARSE, "mage", "--budget", str(least)).code == 0
    tight = mosaic(*little, *SPARSE, "mage", "--budget", str(steps["later"]["total_bytes"]), "--json")
    assert tight.code == 3 and tight.json["misfit"]["needed_bytes"] == least


def test_a_block_has_as_many_first_steps_as_select(capsys: pytest.CaptureFixture[str]) -> None:
    took = {"exact": 5.0, "first": 7.0, "again": 6.0, "later": 2.0}
    found = {
        name: {"predicted_step_ms": ms, "total_bytes": 0, "selected_bytes": 0, "reused_bytes": 0}
        for name, ms in took.items()
    }
    cases = {
        "mage": (1, 0),
        "sparsed": (1, 6),
        "oracle": (32, 0),
        "mage:every=5": (1, 6),
        "mage+flashblock:every=8": (1, 3),
    }
    for policy, (first, again) in cases.items():
        report_steps(found, attention_policy(policy), 32)
        took_in_all = first * 7.0 + again * 6.0 + (32 - first - again) * 2.0
        said = f"a block of 32 steps: 160.0 ms exact, {took_in_all:.1f} ms sparse"
        assert said in " ".join(capsys.readouterr().out.split())


def test_a_budget_below_the_weights_says_so(mosaic: Any, little: tuple[str, ...]) -> None:
    ran = mosaic(*little, "--ctx", "1k", "--budget", "10MiB")
    assert ran.code == 3 and "held by the fixed part: weights 12.00 MiB" in ran.out
    assert "does not fit: needs" in ran.out and "smallest budget" in ran.out and "Traceback" not in ran.err
    assert "--budget" in ran.out and "--host-budget" in ran.out
    auto = mosaic(*little, "--ctx", "auto", "--budget", "10MiB")
    assert auto.code == 3 and "held by the fixed part" in auto.out and "--budget" in auto.out
    reason = mosaic(*little, "--ctx", "auto", "--budget", "10MiB", "--json").json["misfit"]
    assert reason["max_ctx_tokens"] == 0 and reason["largest"][0][0] == "weights"


def test_packed_batches(mosaic: Any) -> None:
    plan = mosaic(*PLAN, "--seq-lens", "4k,32k,100", "--json").json
    assert plan["dims"]["tokens"] == 4096 + 32768 + 100 and plan["dims"]["seqs"] == 3


def test_compare_sets_two_plans_side_by_side(mosaic: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, ctx in zip(files, ("4k", "64k"), strict=True):
        mosaic(*PLAN, "--ctx", ctx, "--out", file)
    out = mosaic("plan", "--compare", *files).out
    assert "4,096" in out and "65,536" in out and "workspace" in out
    assert [entry["file"] for entry in mosaic("plan", "--compare", *files, "--json").json] == files
    assert mosaic("plan", "--compare", *files, "--model", "llada-8b").code == 2


def test_every_export_is_written(mosaic: Any, tmp_path: Path) -> None:
    names = {"--out": "p.json", "--html": "p.html", "--png": "p.png", "--trace": "t.json", "--snapshot": "s.pickle"}
    arguments = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    assert mosaic(*PLAN, "--ctx", "16k", *arguments).code == 0
    assert (tmp_path / "p.html").read_text().lstrip().lower().startswith("<!doctype html")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"segments", "device_traces"} <= set(pickle.loads((tmp_path / "s.pickle").read_bytes()))


def test_a_budget_beyond_the_card_is_said(mosaic: Any) -> None:
    assert "is more than rtx-3090 has" in mosaic(*PLAN, "--ctx", "1k", "--budget", "1TiB").err


def test_a_full_disk_is_one_line(mosaic: Any) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mosaic", *PLAN, "--ctx", "1k", "--json"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1 and "No space left" in ran.stderr


def test_default_device_is_said(mosaic: Any) -> None:
    ran = mosaic("plan", "--model", "llada-8b", "--ctx", "1k")
    assert "no --device given: planning for the built-in rtx-4090" in ran.err and "rtx-4090" in ran.out


def test_models_and_devices(mosaic: Any) -> None:
    assert [row["name"] for row in mosaic("models", "--json").json] == list(PRESETS)
    assert "llada-moe" in mosaic("models").out
    rows = {row["name"]: row for row in mosaic("devices", "--json").json}
    assert not rows["h200"]["estimated"] and rows["rtx-3090"]["estimated"]
    h200, profile = rows["h200"], DEVICES["h200"]
    best = {name: max(rates.values()) for name, rates in profile.attention_rates.items()}
    assert h200["host_link_bytes_per_s"] == profile.host_link and h200["attention_flops_by_implementation"] == best
    assert h200["attention_flops"] == best["cudnn"] > best["triton"]
    assert h200["gemm_flops"] == max(rate for rates in profile.gemm_rates.values() for rate in rates.values())
    line = next(line for line in mosaic("devices").out.splitlines() if line.split()[:1] == ["h200"])
    assert f"{profile.host_link / 1e9:.1f} GB/s" in line and f"{best['cudnn'] / 1e12:.0f} TFLOP/s" in line
    assert line.split()[-1] == "measured"
    fits = {
        row["name"]: row["fits"]
        for row in mosaic("devices", "--fits", "--model", "small-llada", "--ctx", "25m", "--json").json
    }
    assert fits["a100-40g"] and not fits["rtx-4090"]
    assert mosaic("devices", "--fits", "--model", "small-llada", "--ctx", "16m", "--budget", "1GiB").code == 3
    assert mosaic("devices", "--fits", "--ctx", "1k").code == 2


@pytest.mark.soak
def test_devices_that_would_do_within_budgets(mosaic: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    request = ("--model", str(tmp_path / "config.json"), "--ctx", "1m")
    budgets = ("--budget", "1200MiB", "--host-budget", "8GiB")
    more = mosaic("devices", "--fits", *request, "--budget", "1TiB", "--json").json
    assert all(row["host_bytes"] == 0 and row["budget_bytes"] == row["memory_bytes"] for row in more)
    tight = mosaic("devices", "--fits", *request, *budgets, "--json").json
    assert all(row["fits"] and row["host_bytes"] > 0 and row["budget_bytes"] == 1200 << 20 for row in tight)
    h200 = next(row for row in tight if row["name"] == "h200")
    plan = mosaic("plan", *request, "--device", "h200", *budgets, "--json").json
    assert (h200["total_bytes"], h200["host_bytes"], h200["config"]) == (
        plan["total_bytes"],
        plan["host_bytes"],
        plan["config"],
    )
    assert mosaic("devices", "--budget", "6GiB").code == 2


def test_contexts_go_by_either_name(mosaic: Any) -> None:
    assert mosaic(*PLAN, "--tokens", "4k", "--json").json == mosaic(*PLAN, "--ctx", "4096", "--json").json


@pytest.mark.some
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mosaic plan --model llada-8", "llada-8b"),
        pytest.param("mosaic plan --device rtx-4", "rtx-4090", marks=pytest.mark.soak),
        pytest.param("mosaic generate --model small-s", "small-sdar", marks=pytest.mark.soak),
        pytest.param("mosaic devices --model dre", "dream-7b", marks=pytest.mark.soak),
        ("mosaic pack --solver cp", "cpsat"),
        ("mosaic generate --device h2", "h200"),
        ("mosaic cal", "calibrate"),
    ],
)
def test_the_shell_completes_names(words: str, expected: str) -> None:
    environment = {
        **os.environ,
        "_MOSAIC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    code = "import sys; sys.argv = ['mosaic']; from mosaic_dllm import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0 and ran.stdout.split() == [expected], ran.stderr


def test_a_device_of_ones_own(mosaic: Any, tmp_path: Path) -> None:
    card = tmp_path / "my-card.toml"
    card.write_text('base = "rtx-3090"\nmemory_bytes = "560MiB"\nestimated = false\n')
    plan = mosaic("plan", "--model", "small-llada", "--ctx", "1k", "--device", str(card), "--json")
    assert plan.code == 3 and plan.json["device"] == "my-card" and plan.json["budget_bytes"] == 560 << 20
    card.write_text('base = "h200"\n[gemm_rates]\n64 = 1e14\n[attention_rates.triton]\n8192 = 1e14\n')
    slow = mosaic("plan", "--model", "llada-8b", "--ctx", "8k", "--device", str(card), "--json").json
    fast = mosaic("plan", "--model", "llada-8b", "--ctx", "8k", "--device", "h200", "--json").json
    assert slow["predicted_step_ms"] > 3 * fast["predicted_step_ms"]
    assert (slow["implementations"], fast["implementations"]) == ({"attention": "triton"}, {"attention": "cudnn"})
    card.write_text("memory_byte = 3\n")
    bad = mosaic("plan", "--model", "llada-8b", "--ctx", "1k", "--device", str(card))
    assert bad.code == 2 and "Did you mean 'memory_bytes'" in bad.err


CSV = "id,lower,upper,size\n0,0,10,4\n1,5,15,4\n2,12,20,8\n"


def test_pack_reads_and_writes_minimalloc_csv(mosaic: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "toy.12.csv", tmp_path / "out.csv"
    source.write_text(CSV)
    ran = mosaic("pack", str(source), "--out", str(target), "--json")
    assert (
        ran.code == 0 and ran.json["peak_bytes"] == ran.json["lower_bound_bytes"] == 12 and ran.json["capacity"] == 12
    )
    assert ran.json.keys() == {"peak_bytes", "lower_bound_bytes", "capacity", "solver", "optimal", "seconds"}
    header, *rows = target.read_text().splitlines()
    assert header.split(",") == ["id", "lower", "upper", "size", "offset"] and len(rows) == 3


def test_pack_says_when_a_capacity_is_out_of_reach(mosaic: Any, tmp_path: Path) -> None:
    source = tmp_path / "toy.csv"
    source.write_text(CSV)
    ran = mosaic("pack", str(source), "--capacity", "11", "--json")
    assert ran.code == 3 and ran.json["capacity"] == 11 and "alive together take 12 B" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan", "--ctx", "1k"), 2, "give a model"),
        (("plan", "--model", "llada-9b", "--ctx", "1k"), 2, "Did you mean 'llada-8b'"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--device", "rtx3090"), 2, "Did you mean 'rtx-3090'"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--device", "none.toml"), 2, "cannot read the device profile"),
        (("plan", "--model", "llada-8b", "--ctx", "twelve"), 2, "cannot read the token count"),
        (("plan", "--model", "llada-8b", "--ctx", "0"), 2, "at least 1"),
        (("plan", "--model", "llada-8b", "--ctx=-5"), 2, "cannot read the token count"),
        (("plan", "--model", "llada-8b"), 2, "give a context"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--seq-lens", "1k"), 2, "give a context"),
        (("plan", "--model", "llada-8b", "--seq-lens", "1k,,2k"), 2, "cannot read the token count"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--masked", "2k"), 2, "between 1 and the 1,024 tokens, got 2,048"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--masked", "1", "--mask-ratio", "0.5"), 2, "not both"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--mask-ratio", "0"), 2, "mask ratio"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--budget", "12 bananas"), 2, "cannot read the size"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--solver", "magic"), 2, "unknown solver 'magic'"),
        (("plan", "--model", "llada-8b", "--ctx", "1k", "--dtype", "float8"), 2, "unknown dtype"),
        ((*PLAN, "--ctx", "1k", "--out", "/nowhere/plan.json"), 2, "does not exist"),
        (("check", "missing.json"), 1, "cannot read the plan"),
        (("show", "missing.json"), 1, "cannot read the plan"),
        (("plan", "--compare", "a.json", "b.json"), 1, "cannot read the plan"),
        (("pack", "missing.csv"), 1, "missing.csv"),
        (("pack", "--timeout", "0", "missing.csv"), 2, "timeout"),
        ((*PLAN, "--ctx", "40000m"), 2, "at most 2,147,483,647 tokens"),
        ((*PLAN, "--ctx", "1k", "--out", "/"), 2, "is a directory"),
        (("devices", "--fits", "--model", "llada-8b", "--ctx", "auto"), 2, "--ctx auto is for"),
        (("devices", "--masked", "3"), 2, "go with --fits"),
        (("pack", "--timeout", "nan", "missing.csv"), 2, "timeout"),
        (("pack", "/tmp"), 1, "cannot read /tmp"),
        (("frobnicate",), 2, "frobnicate"),
        (("plan", "--nonsense"), 2, "nonsense"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_an_exit_code(
    mosaic: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran = mosaic(*arguments)
    assert ran.code == code, ran.err
    assert message in ran.err and "Traceback" not in ran.err and ran.out == ""
    if arguments[0] not in ("frobnicate",) and "--nonsense" not in arguments:
        assert ran.err.startswith("mosaic: ") and ran.err.count("\n") == 1


@pytest.mark.some
@pytest.mark.parametrize("damage", ["truncate", "schema", "field", "type", "binary", "nested", "formula"])
def test_unreadable_plans_are_refused(mosaic: Any, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "plan.json"
    mosaic(*PLAN, "--ctx", "1k", "--out", str(file))
    text = file.read_text()
    document = json.loads(text)
    if damage == "truncate":
        file.write_text(text[: len(text) // 2])
    elif damage == "schema":
        file.write_text(json.dumps(document | {"schema": "mosaic.plan/9"}))
    elif damage == "field":
        del document["buffers"]
        file.write_text(json.dumps(document))
    elif damage == "type":
        document["ops"] = "none"
        file.write_text(json.dumps(document))
    elif damage == "nested":
        file.write_text("[" * 100_000)
    elif damage == "formula":
        file.write_text(json.dumps(document | {"formula": [1], "trace": ["x"]}))
    else:
        file.write_bytes(b"\x80\x81\x82")
    for command in (("check", str(file)), ("show", str(file)), ("plan", "--compare", str(file), str(file))):
        ran = mosaic(*command)
        assert ran.code == 1 and "Traceback" not in ran.err, command
        assert ran.err.count("\n") == 1 and str(file) in ran.err, command


def test_planning_again_proves_what_a_file_cannot(mosaic: Any, tmp_path: Path) -> None:
    """Claims that the file alone repeats: each changed one passes `check`, is listed by it, and differs from a new plan."""
    file = tmp_path / "plan.json"
    mosaic(*PLAN, "--ctx", "1k", "--out", str(file))
    again = ("check", str(file), "--model", "llada-8b")
    assert mosaic(*again).code == 0 and "every field is the same" in mosaic(*again).out
    document = json.loads(file.read_text())
    for key, value in (("max_ctx_tokens", 1 << 30), ("solver", "magic"), ("eps", 0.5)):
        changed = json.loads(file.read_text())
        if key == "eps":
            next(op for op in changed["ops"] if key in op["attrs"])["attrs"][key] = value
        else:
            changed[key] = value
        file.write_text(json.dumps(changed))
        assert mosaic("check", str(file)).code == 0
        assert any(key in entry["claim"] for entry in mosaic("check", str(file), "--json").json["unproved"])
        ran = mosaic(*again)
        assert ran.code == 1 and f"replan: {'ops' if key == 'eps' else key} is" in ran.out
        file.write_text(json.dumps(document))


def test_several_sequences_are_not_planned_again(mosaic: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    mosaic(*PLAN, "--seq-lens", "100,200", "--out", str(file))
    ran = mosaic("check", str(file), "--model", "llada-8b")
    assert ran.code == 2 and "one sequence" in ran.err


def test_a_tampered_plan_fails_the_check(mosaic: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    mosaic(*PLAN, "--ctx", "1k", "--out", str(file))
    document = json.loads(file.read_text())
    victim = next(b for b in document["buffers"] if b["name"] == "layers.3/k")
    victim["offset"] = next(b for b in document["buffers"] if b["name"] == "layers.3/v")["offset"]
    file.write_text(json.dumps(document))
    ran = mosaic("check", str(file))
    assert ran.code == 1 and "overlap" in ran.out and "layers.3/k" in ran.out


def run_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mosaic", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_python_dash_m_and_no_color() -> None:
    ran = run_process(*PLAN, "--ctx", "1k", NO_COLOR="1", FORCE_COLOR="1")
    assert ran.returncode == 0 and "\x1b[3" not in ran.stdout and "fits" in ran.stdout
    assert run_process("--version").stdout.startswith("mosaic 0.")


def test_another_mosaic_is_named(tmp_path: Path) -> None:
    from mosaic_dllm import other_mosaics

    for name, file, text in (
        ("torch_mosaic-1.0", "top_level.txt", "mosaic\n"),
        ("mosaic_ml-2.0", "RECORD", "mosaic_ml/x.py,,\nmosaic/__init__.py,sha256=x,1\n"),
        ("mosaic_dllm-0.1.0", "top_level.txt", "mosaic\n"),
        ("numpy-2.0", "RECORD", "numpy/mosaic.py,,\n"),
    ):
        info = tmp_path / f"{name}.dist-info"
        info.mkdir()
        (info / file).write_text(text)
    assert other_mosaics(tmp_path) == ["mosaic_ml", "torch_mosaic"]


def test_a_mosaic_that_is_not_ours_is_told_apart(tmp_path: Path) -> None:
    """Another distribution has overwritten our package: the command says so and stops."""
    (tmp_path / "mosaic").mkdir()
    (tmp_path / "mosaic" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mosaic_dllm; mosaic_dllm.main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "also installs a top-level 'mosaic'" in ran.stderr and ran.stderr.count("\n") == 1


# -- checkpoints ----------------------------------------------------------------------------------------------------

SMALL = {
    "model_type": "llada", "d_model": 64, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 96, "embedding_size": 256,
    "mask_token_id": 255, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    from mosaic.runtime.compile import compile

    with compile(SMALL) as model:
        model.save(tmp_path / "small")
    return tmp_path / "small"


def test_a_checkpoint_directory_is_planned_like_a_preset(mosaic: Any, checkpoint: Path) -> None:
    plan = mosaic("plan", "--model", str(checkpoint), "--ctx", "300", "--device", "cpu", "--json")
    assert plan.code == 0 and plan.json["model"] == "small" and plan.json["dtype"] == "float32"
    (checkpoint / "model.safetensors").unlink()
    assert mosaic("plan", "--model", str(checkpoint), "--ctx", "300", "--device", "cpu").code == 0


def test_a_key_that_nobody_knows_is_a_remark_on_stderr(mosaic: Any, checkpoint: Path) -> None:
    arguments = ("plan", "--model", str(checkpoint), "--ctx", "300", "--device", "cpu", "--json")
    before = mosaic(*arguments)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"moonshine": 1}))
    ran = mosaic(*arguments)
    assert ran.code == 0 and ran.out == before.out and before.err == ""
    assert ran.err.startswith("mosaic: config.json: 'moonshine' is unknown to Mosaic's family 'LLaDA' and not used;")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("damage", ["truncated", "garbled", "missing tensor", "spare tensor", "misshapen"])
def test_a_checkpoint_that_could_not_be_loaded_is_refused(
    mosaic: Any, checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    file, target = checkpoint / "model.safetensors", tmp_path / "plan.json"
    data = file.read_bytes()
    config = json.loads((checkpoint / "config.json").read_text())
    if damage == "truncated":
        file.write_bytes(data[: len(data) - 100])
    elif damage == "garbled":
        file.write_bytes(data[:8] + b"!" * 100 + data[108:])
    elif damage == "missing tensor":
        (checkpoint / "config.json").write_text(json.dumps(config | {"n_layers": 3}))
    elif damage == "spare tensor":
        (checkpoint / "config.json").write_text(json.dumps(config | {"n_layers": 1}))
    else:
        (checkpoint / "config.json").write_text(json.dumps(config | {"mlp_hidden_size": 128}))
    ran = mosaic("plan", "--model", str(checkpoint), "--ctx", "300", "--device", "cpu", "--out", str(target))
    assert ran.code == 1 and ran.out == "" and ran.err.count("\n") == 1 and not target.exists()
    said = {
        "missing tensor": "blocks.2.q_proj.weight' is missing",
        "spare tensor": "9 tensors that the model does not use: 'model.transformer.blocks.1.",
    }
    assert said.get(damage, "model.safetensors") in ran.err
    assert damage in said or ("expected" in ran.err and "found" in ran.err)
