"""The benchmark scripts on a CPU with a tiny model: their cases, their records, and the documents made from them."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from test_runtime_compiled import LLADA

import mosaic
from benchmarks import (
    ablation,
    across,
    batch_mates,
    block,
    cases,
    eviction,
    figures,
    fit,
    flashinfer_steps,
    kv_attention,
    paired,
    record,
    report,
    requests,
    same_results,
    small_models,
    sparse,
    sparse_keys,
    speed,
    step_kernels,
    step_parts,
    traces,
    unembed,
)
from benchmarks.bench.baselines import Transformer
from benchmarks.floor import Best, Floor, keys_read
from benchmarks.quality.answers import Answers
from mosaic.calibration.measure import Bench
from mosaic.devices import load_device
from mosaic.errors import UsageError
from mosaic.kernels import load as load_kernel
from mosaic.models import load
from mosaic.models.parts import KV
from mosaic.models.policies.flashblock import PrefixReuse
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.models.policies.registry import attention_policy
from mosaic.planner import Planner, Request
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.steps import StepRequest
from mosaic.runtime.weights import fill_randomly, save_checkpoint

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "vocab_size": 64, "mask_token_id": 63, "eos_token_id": 62, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    network = Transformer(load(LLADA).architecture)
    fill_randomly(network.tensors)
    save_checkpoint(folder, network.tensors, LLADA)
    return str(folder)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts write instead of benchmarks/results."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["llada-8b", pytest.param("dream-7b", marks=pytest.mark.soak), "llada-moe"])
@pytest.mark.parametrize(("layers", "budget"), [(8, 3 << 30), pytest.param(None, 8 << 30, marks=pytest.mark.soak)])
def test_a_cut_model_does_the_same_work_per_layer(preset: str, layers: int | None, budget: int) -> None:
    """The plan of a long context under a small budget has the same workspace with three layers, to the byte."""
    model, budgets = cases.cut(load(preset), layers), {"budget": budget, "host_budget": 96 << 30}
    request = Request(seq_lens=(65536,))
    full = Planner(model, device="h200", **budgets).plan(request, limit=False)
    assert full.fits and full.config["stream"] != "none"
    part = Planner(cases.cut(model, 3), device="h200", **budgets).plan(request, config=full.config, limit=False)
    assert full.peak_bytes == part.peak_bytes and part.config == full.config
    assert cases.cut(model, None) is model and cases.cut(model, 99) is model


def test_cases_are_read_as_written() -> None:
    assert fit.parse_case("512k:12GiB") == {"tokens": 524288, "budget_bytes": 12 << 30, "layers": None}
    for wrong in ("512k", "1k:1GiB:2:3", "k:1GiB"):
        with pytest.raises(UsageError):
            fit.parse_case(wrong)


def test_a_clock_starts_nothing_after_its_time() -> None:
    said: list[str] = []
    assert list(cases.Clock.start(1.0).while_left([1, 2], said.append)) == [1, 2] and said == []
    assert list(cases.Clock.start(0.0).while_left([1, 2], said.append)) == [] and "2 of 2" in said[0]


def test_a_case_that_fails_says_why() -> None:
    case = {"model": "no such model", "device": "cpu"}
    found = cases.in_own_process("benchmarks.fit", case, 60.0)
    assert found["model"] == "no such model" and "UnknownName" in found["failed"]
    assert "ended" in cases.in_own_process("benchmarks.fit", case, 0.01)["failed"]


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_fit_runs_a_plan_with_fewer_layers_in_the_full_plans_bytes(checkpoint: str, out: Path) -> None:
    common = {"model": checkpoint, "device": "cpu", "host_budget": 1 << 30, "mask_ratio": 0.5, "seed": 0}
    case = {**common, "tokens": 200, "budget_bytes": 4 << 20}
    whole, part = fit.execute({**case, "layers": None}), fit.execute({**case, "layers": 1})
    assert whole["failed"] is None and whole["finite"] and whole["within"] and whole["ballast_bytes"] == 0
    assert part["executed_layers"] == 1 and part["ballast_bytes"] > 0
    taken = sum(size for name, size in part["committed_bytes"].items() if name != "host")
    assert taken == part["planned_bytes"] == whole["planned_bytes"]
    refused = fit.execute({**case, "budget_bytes": 1 << 16, "layers": None})
    assert "does not fit" in refused["failed"] and refused["max_tokens"] == 0
    rows = fit.run_rows([{**run, "name": "tiny"} for run in (whole, part, refused)])
    assert {len(row) for row in rows} == {len(fit.RUN_HEADER)}


@pytest.mark.soak
def test_fit_writes_the_planners_table(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit.main(["small-llada", "--table", "--budgets", "8GiB,24GiB", "--device", "h200"])
    limits = {entry["budget_bytes"]: entry for entry in read(out, "fit-h200")["limits"]}
    planner = Planner("small-llada", device="h200", budget=24 << 30, host_budget=96 << 30)
    assert limits[24 << 30]["max_tokens"] == planner.max_context(Request(seq_lens=(1,)))
    assert limits[24 << 30]["total_bytes"] <= 24 << 30 and 1 <= limits[8 << 30]["peak_to_average"] < 1.5
    assert f"| 24.00 GiB | {limits[24 << 30]['max_tokens']:,} |" in capsys.readouterr().out


def test_requests_run_within_the_budget_or_are_refused(
    checkpoint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.main([checkpoint, "--device", "cpu", "--requests", "2:6", "--longest", "64", "--host-budget", "1GiB"])
    rows = read(out, "requests-cpu")["requests"]
    assert [row["number"] for row in rows] == [2, 3, 4, 5] and {row["outcome"] for row in rows} == {"ran", "refused"}
    assert all(row["as_planned"] for row in rows)
    assert all(row["pages_as_planned"] and row["finite"] for row in rows if row["outcome"] == "ran")
    device = load_device("cpu")
    again = requests.draw(5, [checkpoint], device, 1 << 30, 64, 0)
    assert again == {key: rows[3][key] for key in again}, "a request follows from its number"
    assert "| asked | 4 |" in capsys.readouterr().out


def test_ablation_adds_one_part_after_another(out: Path) -> None:
    ablation.main(["small-llada", "--ctx", "none", "--budgets", "24GiB"])
    found = [entry["max_tokens"] for entry in read(out, "ablation-small-llada-h200")["limits"]]
    assert (
        len(found) == 2 + len(ablation.LEVELS) and found == sorted(found) and found[0] < found[1] < found[2] < found[3]
    )


def test_ablation_times_one_move_each(checkpoint: str) -> None:
    variants = ablation.variants(checkpoint, 64, "cpu", 0.5)
    assert list(variants)[:2] == ["no moves", "fastest"]
    case = {
        "model": checkpoint, "device": "cpu", "host_budget": 1 << 30, "tokens": 64, "mask_ratio": 0.5, "seed": 0,
        "layers": None, "repeats": 1,
    }  # fmt: skip
    runs = []
    for name in ("fastest", "all together"):
        runs.append(ablation.run_variant({**case, "variant": name, "config": variants[name]}))
        assert runs[-1]["failed"] is None and runs[-1]["step_s"] > 0
    rows = ablation.run_rows([*runs, {**runs[0], "failed": "no"}])
    assert rows[0][3] == "+0.0%" and {len(row) for row in rows} == {len(ablation.RUN_HEADER)}


@pytest.mark.soak
def test_results_of_every_variant_are_held_against_float32(checkpoint: str, out: Path) -> None:
    same_results.main(
        [checkpoint, "--device", "cpu", "--ctx", "50", "--host-budget", "1GiB",
         "--only", "fastest,poisoned,weights streamed,hidden states offloaded,attention split"]
    )  # fmt: skip
    eager, *variants = read(out, f"same-{Path(checkpoint).name}-cpu")["rows"]
    assert eager["logits_error"] < 1e-6 and eager["argmax_agreement"] == 1  # float32 here is the reference's dtype
    assert len(variants) == 5 and all(row["repeatable"] for row in variants)
    assert all(row["logits_error"] < 1e-5 and row["confidence_error"] < 1e-5 for row in variants)
    assert all(row["same_bits"] for row in variants if row["name"] != "attention split")


def test_errors_are_relative_to_the_reference() -> None:
    reference = {
        "logits": torch.tensor([[3.0, 4.0]]),
        "token": torch.tensor([1, 0]),
        "confidence": torch.tensor([0.5, 0.25]),
    }
    found = {
        "logits": torch.tensor([[3.0, 4.5]]),
        "token": torch.tensor([1, 1]),
        "confidence": torch.tensor([0.5, 0.2]),
    }
    errors = same_results.errors(found, reference)
    assert errors["argmax_agreement"] == 0.5 and errors["logits_error"] == pytest.approx(0.1)
    assert errors["logits_worst"] == pytest.approx(0.125) and errors["confidence_worst"] == pytest.approx(0.2)
    assert same_results.over_eager(errors, errors)["logits_error_over_eager"] == 1.0


def test_unembedding_is_measured_in_every_variant(checkpoint: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.meters.sustained", lambda call, **_: (call(), 1e-3)[1])
    unembed.main([checkpoint, "--device", "cpu", "--rows", "5,200", "--kinds", "statistics", "sampling"])
    found = read(out, f"unembed-{Path(checkpoint).name}-cpu")["rows"]
    assert [entry["rows"] for entry in found] == [5, 200]
    kinds = ["statistics", "sampling"]
    for kind in kinds:
        assert list(found[1][kind]["chunked_s"]) == ["128", "200"] and found[1][kind]["fused_s"] == 1e-3
    assert {len(row) for row in unembed.rows_of(found, kinds)} == {len(unembed.header_of(kinds))}


# --- documents --------------------------------------------------------------------------------------------------------


def point(engine: str, tokens: int, step_s: float | None, **more: Any) -> dict[str, Any]:
    return {
        "engine": engine, "tokens": tokens, "mask_ratio": 0.5, "masked": tokens // 2, "step_s": step_s,
        "failed": None if step_s else "out of memory", "attention": {"used": "cudnn"}, "driver_bytes": 16 << 30, **more,
    }  # fmt: skip


ENVIRONMENT = {
    "machine": "m", "python": "3.12", "versions": {"torch": "2.11.0"}, "commit": "abc1234", "command": "python -m benchmarks.x",
    "method": "median of 3", "sources": {},
}  # fmt: skip
SPEED = {
    "model": "llada-8b", "card": "NVIDIA H200", "environment": ENVIRONMENT, "settings": {"device": "h200"},
    "points": [
        point("mosaic", 1024, 0.020, floor_s=0.019, predicted_s=0.021, fixed_bytes=3 << 20, allocations_in_step=0),
        point("eager", 1024, 0.034), point("compile", 1024, 0.025, compiled="static"), point("eager", 65536, None),
    ],
    "limits": [{"engine": "eager", "cap_bytes": 24 << 30, "mask_ratio": 0.5, "max_tokens": 18944}],
}  # fmt: skip
FIT = {
    "card": None, "environment": ENVIRONMENT, "runs": [],
    "limits": [{"model": "llada-8b", "budget_bytes": 24 << 30, "max_tokens": 1_443_278}],
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with results, and documents that have the markers."""
    for module in (record, report):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    for folder in ("docs", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "results" / "speed-llada-8b-h200.json").write_text(record.sealed(SPEED))
    (tmp_path / "results" / "fit-h200.json").write_text(record.sealed(FIT))
    markers = "\n".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->" for name in (*report.SECTIONS, "bench"))
    (tmp_path / "docs" / "performance.md").write_text(markers)
    (tmp_path / "README.md").write_text(markers)
    return tmp_path


def test_one_command_rewrites_tables(project: Path) -> None:
    pytest.importorskip("matplotlib")
    report.main()
    over = 0.020 / speed.floor_of(SPEED, SPEED["points"][0])  # type: ignore[index]
    text, readme = (project / "docs" / "performance.md").read_text(), (project / "README.md").read_text()
    assert (
        f"| 1,024 | 0.5 | 20.0 | 34.0 | 25.0 | static | {over:.3f} | 0.952 | 1.250 | 1.700 | cudnn / cudnn / cudnn |"
        in text
    )
    assert "out of memory" in text and "| llada-8b | eager PyTorch | 24.00 GiB | 18,944 |" in text
    assert "| 24.00 GiB | 1,443,278 |" in text and "| 1,443,278 |\n\n| PyTorch, measured |" in text
    assert (
        "NVIDIA H200, torch 2.11.0, `python -m benchmarks.x`. Median of 3. Commit abc1234; none of 0 measured files"
        in text
    )
    assert "| 1,024 | 20.0 | 34.0 | 25.0 | 16.00 | 16.00 | 16.00 |" in readme
    report.main()
    assert (project / "docs" / "performance.md").read_text() == text, "the same results, the same document"


def test_a_document_without_the_markers_is_named(project: Path) -> None:
    (project / "docs" / "performance.md").write_text("nothing")
    with pytest.raises(SystemExit, match=r"performance\.md needs the markers <!-- speed:begin -->"):
        report.main()


def test_times_of_two_runs_are_never_set_beside_each_other() -> None:
    """Two runs may be of two cards, or of two states of one: the plots and the README take one run, tables one each."""
    later = {**SPEED, "points": [point("mosaic", 1024, 0.018)]}
    assert figures.points_of([SPEED, later]) is SPEED["points"]  # type: ignore[list-item]
    tables = report.speed_section([SPEED, later])  # type: ignore[list-item]
    assert tables.count("| tokens |") == 2 and "18.0" in tables.split("| tokens |")[2]


def test_the_small_models_sections_show_shares(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    share = {"exact": 0.95, "whole": 0.95, "count": 20}
    scores = {
        "by_task": {"retrieval": share, "story": share}, "by_length": {"retrieval": {"256": share, "8192": share}},
        "by_length_and_depth": {"retrieval": {"256": {"0.0": share}}},
    }  # fmt: skip
    training = {
        "environment": ENVIRONMENT, "card": "NVIDIA H200", "family": "sdar", "model": {"parameters": 5_000_000}, "steps": 9,
        "tokens": 600_000_000, "wall_s": 521.0, "evaluations": [{"step": 9, "seconds": 510.0, **scores}],
        "curve": [{"seconds": 1.0, "loss": {"128": 4.0}}, {"seconds": 2.0, "loss": {"128": 1.0, "256": 2.0}}],
    }  # fmt: skip
    quality = {"model": "small-sdar", "card": "cpu", "environment": ENVIRONMENT, "note": "Half of it.", **scores}
    text = small_models.training_section([training])
    assert "**small-sdar**: 5,000,000 parameters, 9 steps, 600 million tokens, 521 s in all" in text
    assert "| 9 | 510 | 95% |  |  |  |  |  | 95% | 95% | 95% |" in text
    text = small_models.quality_section([quality])
    assert "| story | 95.0% | 20 |" in text and "| exact by context | 256 | 8,192 |" in text and "Half of it." in text
    written = small_models.write_plots([training], [quality], [], [], tmp_path)
    assert [file.name for file in written] == ["training-small.png", "quality-small-sdar.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)


def test_policies_and_sets_of_keys_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    group = {"count": 9, "exact": 0.9, "tokens_right": 0.99, "forwards": 20.0, "tokens_per_forward": 5.5}
    change = {
        "exact": {"difference": -0.1, "low": -0.2, "high": -0.05, "gained": 0, "lost": 1, "p": 0.03},
        "tokens_right": {"difference": 0.0, "low": 0.0, "high": 0.0},
        "forwards": {"ratio": 1.1, "low": 1.05, "high": 1.2},
    }
    later = {"rows": 9, "rows_agree": 0.5, "committed": 4, "committed_agree": 0.75, "own": 2}
    figures = {"seconds": 2.0, "tokens_per_s": 1234.5, "groups": {"all": group, "chain": group, "chain, 2048": group}}
    sparse = {**group, "exact": 0.8, "against": change}
    policies = {
        "model": "small-sdar", "card": "cpu", "dtype": None, "environment": ENVIRONMENT, "answers": 9,
        "settings": {"lengths": [2048, 4096], "split": "choose"},
        "schedules": {
            "dynamic": {
                "exact": figures,
                "mage": {
                    **figures, "groups": {"all": sparse, "chain": sparse, "chain, 2048": sparse},
                    "replay": {"all": {"count": 3, "later": later}},
                },
            }
        },
    }  # fmt: skip
    text = small_models.policies_section([policies])
    assert (
        "**small-sdar, dynamic**: contexts of 2,048, 4,096 tokens, 9 answers under each policy, items to choose" in text
    )
    assert "| exact | 90.0% |  |  | 99.0% | 20.0 |  | 5.50 | 1,234 |" in text
    assert "| mage | 80.0% | -10.0% (-20.0% to -5.0%) | 0.03 | 99.0% | 20.0 | 1.100 (1.050 to 1.200) | 5.50 |" in text
    assert "| exact by task | chain |" in text and "| mage | 80.0%* |" in text and "| exact | 90.0% |\n" in text
    assert "| mage | 3 | 50.00% | 75.00% | 0.500 |" in text
    items = [("chain", 2048), ("chain", 2048), ("frequent", 0)]
    counts: dict[str, Any] = {
        "tokens": [9] * 3,
        "decoded": [8] * 3,
        "again": [2] * 3,
        "right": [1.0] * 3,
        "seconds": 1.0,
    }
    exact = Answers(exact=[True] * 3, forwards=[4] * 3, processed=[24] * 3, **counts)
    focus = Answers(exact=[True, False, True], forwards=[8] * 3, processed=[16] * 3, forced=[0, 2, 1], **counts)
    paired_with_exact = {name: answers.figures(items, exact) for name, answers in (("exact", exact), ("focus", focus))}
    run = {
        **policies, "answers": 3, "settings": {"lengths": [2048], "split": "judge"},
        "schedules": {"dynamic": paired_with_exact, "static:2": {"focus": focus.figures(items, focus)}},
    }  # fmt: skip
    text = small_models.policies_section(
        [run, {**run, "schedules": {"dynamic": {"exact": paired_with_exact["exact"]}}}]
    )
    assert text.count("| policy | exact | against exact | p |") == 2 and text.count("3 answers under each policy") == 3
    assert "| exact, forwards | dynamic | static:2 |" in text and "| focus | 66.7%, 8.0 | 66.7%, 8.0 |" in text
    assert "| exact | 100.0%, 4.0 |  |" in text
    assert (
        "| exact | 100.0% |  |  | 100.0% | 4.0 |  | 2.25 | 3.00 | 0.25 |  |  | 27 |\n| focus | 66.7% | -33.3% (" in text
    )
    assert (
        "| 8.0 | 2.000 (2.000 to 2.000) | 1.12 | 2.00 | 0.25 | 1.00 | 1, 1 | 27 |" in text
        and "| focus | 50.0% | 100.0% |" in text
    )
    sets = {"oracle": 0.5, "recall": 0.25}
    estimation = {
        "model": "small-sdar", "card": "cpu", "environment": ENVIRONMENT, "unions": {"0.25": [1.0, 2.0]}, "first": {"0.25": sets},
        "later": {"0.25": sets}, "recall": {"0.25": {"0.500": 0.25}}, "by_task": {},
        "by_head": {"0.25": {"0": {"0": {"union": 1.0, **sets}, "1": {"union": 2.0, "oracle": 0.7}}}},
        "settings": {"items": 2, "tasks": ["chain"], "lengths": [2048]},
    }  # fmt: skip
    text = small_models.estimation_section([estimation])
    assert "| union of the tokens' sets over k | 1.50 |" in text and "| later steps: oracle | 50.0% |" in text
    assert "| 0 | 1.50 | 60.0% |  | 25.0% |" in text
    signal = {"decoded": [0, 1, 0, 1, 3], "masked": [4, 4, 0, 4, 4], "auc": 0.75, "reached": 0.5}
    way = {"steps": 12, "decoded": 1000, "computed": 2500, "again": 90, "computed_per_decoded": 2.5}
    decodability = {
        **estimation, "signals": {"delta": signal, "layer 1": {**signal, "auc": None, "reached": None}}, "ways": {"dc+": way},
        "decoded_per_step": {"1": 3, "4": 2}, "settings": {**estimation["settings"], "preset": "eviction(importance='masked')"},
    }  # fmt: skip
    text = small_models.decodability_section([decodability])
    assert (
        "**small-sdar**: 2 answers of each of chain, contexts of 2,048 tokens, by eviction(importance='masked')" in text
    )
    assert "| delta | 0.0% | 25.0% |  | 25.0% | 75.0% | 0.750 | 50.0% |" in text and "| 75.0% |  |  |" in text
    assert "| dc+ | 12 | 1,000 | 2,500 | 90 | 2.50 |" in text
    written = small_models.write_plots([], [], [estimation], [decodability], tmp_path)
    assert [file.name for file in written] == [
        "estimation-small-sdar.png",
        "decodability-small-sdar-chain-importance-masked.png",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)


@pytest.mark.soak
def test_steps_of_a_block_are_timed_exact_and_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "GENERATED", 16)
    described = block.with_block("sdar-8b", 8, 3)
    assert (described.architecture.block, described.architecture.layers) == (8, 3)
    tiny = load({**described.config, **SMALL})
    with mosaic.compile(tiny, device="cpu", seed=1) as model:
        attention = SparseAttention(k=4, exact_layers=1)
        steps = {"40": block.steps_of(model, 40, attention, None)}
        generation = block.generation_of(model, 16)
        prefill = {"40": block.prefill_of(model, 40, None)}
        again = {"40": block.again_of(model, 40)}
        assert again["40"]["steps"] == 16
        assert model.state_rows == {}
    assert steps["40"].keys() == {"exact", "first", "later"} and generation.keys() == {"table"}
    assert all(0 < times["least_ms"] <= times["step_ms"] <= times["most_ms"] for times in steps["40"].values())
    steps["40"]["exact"] = {"step_ms": [5.0, 9.0, 6.0], "card_ms": []}  # as older records are
    result = {
        "steps": steps,
        "generation": generation,
        "prefill": prefill,
        "again": again,
        "model": "sdar-8b",
        "block": 8,
        "layers": 3,
        "k": 4,
    }
    again["40"] = {"second_ms": 63.0, "steps": 4.0}
    assert (
        block.excess_of(
            result | {"prefill": {"40": {"step_ms": 6.0}}, "steps": {"40": {"exact": {"step_ms": 6.0}}}}, 40
        )
        == 2.1
    )
    rows = [*block.rows_of(result)]
    assert rows[0][1:3] == ["6.000", ""]
    assert [row[0] for row in rows] == [
        "40 keys, exact", "40 keys, first", "40 keys, later", "prefill of 40 tokens",
        "a second generation after 40 tokens", "generation, table",
    ]  # fmt: skip
    assert all(len(row) == len(block.HEADER) and float(row[1]) > 0 for row in rows)


def test_blocks_of_sparse_attention_are_timed_beside_exact_ones() -> None:
    tiny = load({**block.with_block("sdar-8b", sparse.BLOCK, 3).config, **SMALL})
    asked = {"prefix": 64, "requests": 2, "steps": 2}
    points = []
    with mosaic.compile(tiny, device="cpu", seed=1) as model:
        for attention, staggered in product((sparse.EXACT, SparseAttention(k=16, exact_layers=1)), (False, True)):
            times = sparse.measured(model, attention, **asked, staggered=staggered)
            assert len(times) == sparse.BLOCKS * 2
            name = attention if attention == sparse.EXACT else "mage"
            points.append({**asked, "staggered": staggered, "attention": name, "step_ms": times})
        assert model.state_rows == {}
    assert len(sparse.plain_step_ms(tiny, prefix=64, steps=2, blocks=3, cuda=False)) == 3 * 2
    points[0] = {**points[0], "step_ms": [1.0, 2.0, 5.0, 5.0, 2.0, 2.0]}
    points.append({**points[0], "attention": sparse.OWN_LAYOUT, "step_ms": None, "blocks_ms": [3.0, 8.0, 5.0]})
    long = [{**point, "prefix": 131_072} for point in points]  # keys enough for what reads fewer to show in the floor
    rows = [*sparse.rows_of({"model": "sdar-8b", "layers": 4, "k": 16, "points": long})]
    assert all(len(row) == len(sparse.HEADER) for row in rows) and rows[0][-1] == rows[1][-1] == "1.00"
    assert rows[0][5] == "4.0" and rows[-1][4:6] == ["flashinfer, own layout", "5.0"] and rows[-1][-1] == "0.80"
    assert rows[0][7] == rows[-1][7] != rows[2][7]
    # a layer's keys and values of a prefix; half of them are ranked once, in the two layers that are sparse
    arch = tiny.architecture
    layer = 2 * 4 * arch.attention.kv_heads * arch.attention.head_size * 64 * 2
    weights = 2 * 4 * (arch.parameters - arch.vocabulary * arch.hidden)
    reads = replace(load_device("h200"), bandwidth=1e9, gemm_rates={1: 1e30})
    exact, mage = (
        1e9 * sparse.floor_s(tiny, attention, reads, **asked)
        for attention in (sparse.EXACT, SparseAttention(k=16, exact_layers=1))
    )
    assert exact == pytest.approx(weights + 2 * 3 * layer)
    assert mage == pytest.approx(weights + 2 * layer + 2 * (layer + layer / 2 + layer * 16 / 64))
    # with nothing to read, FLOPs: the last layer's queries and what follows them are of the rows that are masked, all and half
    computes = replace(load_device("h200"), bandwidth=1e30, gemm_rates={1: 1e12}, few_rows_rates={}, unembed_rates={})
    width, kv, hidden = (
        arch.attention.heads * arch.attention.head_size,
        2 * arch.attention.kv_heads * arch.attention.head_size,
        arch.hidden,
    )
    of_token, stored = 2 * hidden * (2 * width + 3 * arch.feed_forward.size) + 4 * 64 * width, 2 * hidden * kv
    flops = 2 * (2 * 64 * (of_token + stored) + 64 * stored) + (64 + 32) * (of_token + 2 * hidden * arch.vocabulary)
    assert 1e12 * sparse.floor_s(tiny, sparse.EXACT, computes, **asked) == pytest.approx(flops)
    # what is kept of a prefix is read of no key; one step of two refreshes
    once, beside = (
        1e9 * sparse.floor_s(tiny, attention, reads, **asked)
        for attention in (PrefixReuse(), SparseAttention(k=16, exact_layers=1, reuse=PrefixReuse()))
    )
    assert once == pytest.approx(weights + 3 * layer) and beside == pytest.approx(mage - layer)


@pytest.mark.parametrize(("name", "steps"), [("fast-dllm-v2-7b", 32), ("llada2-mini", 4)])
def test_blocks_of_every_family_take_the_steps_that_are_asked_for(name: str, steps: int) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
    described = block.with_block(name, sparse.BLOCK, 3)
    more = {"pad_token_id": 0, **experts} if described.architecture.feed_forward.experts else {}
    tiny = load({**described.config, **SMALL, **more})
    asked, decided = {"prefix": 64, "requests": 1, "steps": steps}, []
    with mosaic.compile(tiny, device="cpu", seed=1) as model:
        found = sparse.measured(
            model, SparseAttention(k=16, exact_layers=1), **asked, staggered=False, on_step=decided.append
        )
    assert len(found) == sparse.BLOCKS * steps
    tokens = [len(step.positions) for step in decided][-len(found) :]
    assert sum(tokens) == sparse.BLOCKS * sparse.BLOCK and max(tokens) == sparse.BLOCK // steps
    arch = tiny.architecture
    reads = replace(load_device("h200"), bandwidth=1e9, gemm_rates={1: 1e30})
    floor = sparse.floor_s(tiny, sparse.EXACT, reads, **asked) * 1e9 / steps / 4
    # an expert that no token chooses is not read; in the last layer the rows that are masked choose
    rows = [sparse.BLOCK - step * sparse.BLOCK // steps for step in range(steps)]
    unchosen = 0.75**sparse.BLOCK + sum(0.75**masked for masked in rows) / steps
    unread = arch.feed_forward.experts * (
        3 * arch.hidden * arch.feed_forward.size * unchosen - 2 * arch.hidden
    )  # and the routers, which are
    assert floor == pytest.approx(
        arch.parameters
        - arch.vocabulary * arch.hidden
        - unread
        + 3 * 2 * arch.attention.kv_heads * arch.attention.head_size * 64
    )


def test_flashinfer_reads_keys_where_they_are_stored() -> None:
    draw, layers, heads, size, page, rows = random.Random(5), 3, 2, 8, 4, 24
    kv, width, firsts = torch.zeros(4 * rows, layers * 2 * heads * size), heads * size, (rows, 3 * rows)
    lengths = [page * draw.randrange(1, rows // page + 1) for _ in firsts]
    stored = []
    for layer in range(layers):
        keys, values = torch.randn(2, sum(lengths), width)
        load_kernel("kv_store").launch(
            k=keys, v=values, kv=kv, extents=torch.tensor([[first, rows, 0, 0] for first in firsts]),
            cu_extents=torch.tensor([0, 1, 2], dtype=torch.int32),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            positions=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]), layer=layer, head_size=size,
        )  # fmt: skip
        stored.append((keys, values))
    for layer, first in product(range(layers), range(2)):
        begin = firsts[first] * kv.shape[1] // size
        views = flashinfer_steps.keys_of(kv, layer, rows=rows, heads=heads, size=size)
        for view, all_of_layer in zip(views, stored[layer], strict=True):
            expected = all_of_layer.split(lengths)[first].view(-1, heads, size)
            assert view[begin : begin + lengths[first]].equal(expected)
            pages = flashinfer_steps.pages_of(view, page)[begin // page :][: lengths[first] // page]
            assert pages.transpose(1, 2).reshape(-1, heads, size).equal(expected)


def test_flashinfer_has_a_sequence_of_each_block() -> None:
    class Rows:
        """A sequence's rows in one extent, or in two."""

        def __init__(self, *extents: tuple[int, int, int, int]) -> None:
            self.extents = extents

    def of(start: int, tokens: int, *extents: tuple[int, int, int, int]) -> Any:
        return SimpleNamespace(start=start, token_ids=torch.zeros(tokens), sequence=Rows(*extents))

    both = [of(64, 8, (0, 96, 0, 0)), of(16, 4, (96, 96, 0, 0))]
    found = [flashinfer_steps.Block(0, 68), flashinfer_steps.Block(0, 72), flashinfer_steps.Block(96, 20)]
    assert flashinfer_steps.blocks_of(both, 4) == (96, found)
    wrong = [of(0, 6, (0, 96, 0, 0))], [of(0, 4, (0, 4, 0, 0), (9, 4, 4, 0))], [*both, of(0, 4, (192, 64, 0, 0))]
    for asked, said in zip(
        wrong, ("6 tokens and 1 extents", "4 tokens and 2 extents", r"\[64, 96\] rows"), strict=True
    ):
        with pytest.raises(UsageError, match=said):
            flashinfer_steps.blocks_of(asked, 4)


def test_kernels_of_a_step_are_told_apart_by_what_they_do() -> None:
    launches = [
        ("nvjet_sm90_tst_64x32_64x16_4x1_v_bz_TNT", 3000.0), ("void cublasLt::splitKreduce_kernel<32>", 500.0),
        ("grouped_linear_kernel", 500.0), ("selected_attention_kernel", 1000.0), ("kv_attention_tiles_kernel", 1000.0),
        ("importance_kernel", 100.0), ("key_mass_kernel", 300.0), ("silu_mul_kernel", 800.0), ("Memcpy HtoD", 200.0),
        ("score_keys_kernel", 60.0), ("choose_kernel", 20.0), ("pack_keys_kernel", 20.0),
    ]  # fmt: skip
    found = step_kernels.kernel_ms(launches, 2)
    assert found == pytest.approx({"products": 2.0, "attention": 1.0, "metric and selection": 0.25, "others": 0.5})


KEYS_GIVEN: Final = ["tiny", "--device", "cpu", "--prompt", "64", "--answer", "96", "--budget", "64MiB"]


def test_sparse_keys_are_timed_by_kind_of_step_beside_dense_and_dual(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation is timed whole, or until each kind was timed twice; Reuse is below a full step by its floor."""
    monkeypatch.setattr(sparse_keys, "load", lambda name: load(LLADA))
    options = ('{"retention": 0.1}', '{"retention": 0.5, "delay": 1, "interval": 2}')
    given = [*KEYS_GIVEN, "--options", *options]
    sparse_keys.main(given)
    (file,) = out.rglob("keys-*.json")
    found = json.loads(file.read_text())
    often = {point["way"]: {name: step["timed"] for name, step in point["steps"].items()} for point in found["points"]}
    assert often == {
        "sparse(retention=0.1)": {"refresh": 3, "reuse": 93},
        "sparse(interval=2, delay=1)": {"full": 2, "refresh": 2, "reuse": 92},
        "dense": {"full": 96},
        "dual": {"full": 3, "later": 93},
    }
    for point in found["points"]:
        assert point["whole"] and point["options"] == (None if point["way"] in ("dense", "dual") else point["options"])
        for step in point["steps"].values():
            assert step["timed"] == step["times"] and max(step["committed_bytes"]) >= step["planned_bytes"] > 0
            assert (step["packed_bytes"] > 0) == (point["options"] is not None)
    few, dense, dual = (found["points"][number]["steps"] for number in (0, 2, 3))
    assert 1 < len(few["refresh"]["committed_bytes"]) == len(few["reuse"]["committed_bytes"]) == 3
    floors = {name: floor for name, _, floor in sparse_keys.timings(found)}
    assert len(floors) == 8 and len(dense) + len(dual) == 3
    prefix = "64, sparse(retention=0.1)"
    assert 0 < floors[f"{prefix}, reuse"] < floors["64, dual, later"] < floors[f"{prefix}, refresh"]
    assert {len(row) for row in sparse_keys.rows_of(found)} == {len(sparse_keys.HEADER)}
    file.unlink()
    sparse_keys.main([*given[:-1], "--seconds", "0", "--beside", "dual"])
    (file,) = out.rglob("keys-*.json")
    for point in (few := json.loads(file.read_text()))["points"]:
        assert not point["whole"] and point["generation_s"] == point["steps_s"] > 0
        assert all(step["timed"] < step["times"] for name, step in point["steps"].items() if name in ("reuse", "later"))
    assert all("from its steps" in row[11] for row in sparse_keys.rows_of(few) if row[3] in ("full", "refresh"))
    with pytest.raises(UsageError, match="one model a process"):
        sparse_keys.main(["tiny", "tiny"])
    with pytest.raises(UsageError, match="options of SparseKeys as JSON"):
        sparse_keys.main(["tiny", "--device", "cpu", "--options", "retention"])


@pytest.mark.soak
def test_published_loops_are_timed_beside_sparse_keys(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_keys, "load", lambda name: load(LLADA))
    beside = ["dual", "fast-dllm", "sparse-dllm-packed"]
    given = [*KEYS_GIVEN, "--beside", ",".join(beside)]
    for seconds, whole in (("200", True), ("0", False)):
        sparse_keys.main([*given, "--seconds", seconds])
        (file,) = out.rglob("keys-*.json")
        found = json.loads(file.read_text())
        assert [point["way"] for point in found["points"][1:]] == beside
        dual, fast, sparse = (point["steps"] for point in found["points"][1:])
        assert fast.keys() == dual.keys() and {name: step["times"] for name, step in sparse.items()} == {
            "full": 3, "refresh": 3, "reuse": 90
        }  # fmt: skip
        for steps in (fast, sparse):
            assert all((step["timed"] == step["times"]) == whole for step in steps.values())
        assert all(point["whole"] == whole and point["generation_s"] > 0 for point in found["points"])
        rows = [*sparse_keys.rows_of(found)]
        assert {len(row) for row in rows} == {len(sparse_keys.HEADER)} and rows[-1][6] == rows[-1][9] == ""
        assert len([*sparse_keys.timings(found)]) == len(rows)
    with pytest.raises(UsageError, match="like LLaDA"):
        monkeypatch.setattr(sparse_keys, "load", lambda name: load("small-sdar"))
        sparse_keys.main(given)


def shorten(monkeypatch: pytest.MonkeyPatch, timed: int = 6) -> None:
    """Let few steps be timed, which is enough where tokens are counted."""
    for name, steps in {"LEAST": 3, "WARM": 3, "SPREAD": 0, "TIMED": timed}.items():
        monkeypatch.setattr(eviction, name, steps)


def test_parts_of_a_step_are_each_run_once_and_write_where_the_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of two graphs that evicts tokens and selects keys: every operator is of one kind. Whatever the workspace holds
    when parts are run, no keys of another owner change, nor weights, and those of the step stay numbers."""
    shorten(monkeypatch, timed=1)
    tiny, trace = load({**block.with_block("sdar-8b", 16, 4).config, **SMALL}), traces.paper_trace("sdar", 16)
    noted, listed = list[Counter[str]](), list[Counter[str]]()

    def checked(model: CompiledModel, requests: Sequence[StepRequest]) -> dict[str, list[step_parts.Launch]]:
        found = step_parts.launches_of(model, requests)
        for kind, launches in found.items():
            assert {step_kernels.kind_of(launch.operator) for launch in launches} == {kind}
        noted.append(Counter(launch.operator for launches in found.values() for launch in launches))
        graphs = model.executors[-2:]
        listed.append(Counter(graph.document["ops"][call.op]["kernel"] for graph in graphs for call in graph.calls))
        keys = graphs[1].buffer("kv")
        start, count = other.runs()[0]
        views = [keys[start : start + count], *model.weights().values()]
        before = [view.clone() for view in views]
        within = model.workspace.range("workspace").committed_bytes
        model.workspace.view("workspace", 0, (within,), "uint8").fill_(0xFF)  # NaN, and -1
        for launches in reversed(found.values()):
            assert step_parts.alone_ms(launches, on_card=False) > 0
        assert keys.isfinite().all() and all(map(torch.equal, views, before))
        return found

    monkeypatch.setattr(eviction, "launches_of", checked)
    with mosaic.compile(tiny, device="cpu", seed=1) as model, model.open_rows(KV) as other:
        other.reserve(64)
        traces.flat_importance(model)
        found = eviction.measured(
            model, "focus, dc+", trace, requests=8, prompts=(32, 64), answer=0, attention="mage:k=8"
        )
    assert noted == listed and len(listed) == eviction.PARTED and any(count["top_keys"] for count in listed)
    assert {*found["parts_ms"]} == {*step_kernels.KINDS} and (eviction.of_parts(found) or 0) > 0


def test_no_step_takes_less_than_its_parts() -> None:
    """By the columns of one row: what says so was not measured in the same state, in a record or on a card."""
    point = {"requests": 4, "way": "dc+", "step_ms": 50.0, "tokens_per_s": 8.0}
    held = {**point, "parts_ms": {"products": 50.0, "attention": 1.0, "others": 9.0}}  # within the spread of both
    wrong = {**point, "parts_ms": {"products": 50.0, "attention": 19.0, "others": 9.0}}
    assert eviction.less_than_parts({"points": [held, point, wrong]}) == ["4 requests, dc+: 0.72"]
    assert not [found for result in record.load_results("eviction") for found in eviction.less_than_parts(result)]


@pytest.mark.parametrize(("sizes", "steps"), [([0] * 9, 9), ([1, 1, 1, 0, 0, 1, *[0] * 99], 15), ([1] * 99, 20)])
def test_steps_come_first_until_no_new_size_is_met(sizes: list[int], steps: int) -> None:
    """The number of timed requests, at most as many as there is room for."""
    ran, found = [], iter(sizes)
    assert eviction.warmed(lambda: ran.append(1), lambda: next(found), least=4, most=20, quiet=9) == len(ran) == steps


@pytest.mark.soak
def test_sessions_go_by_traces_and_are_timed_beside_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps decide and keep what the trace states, on average; the table's figures are those of the points."""
    tiny, trace = load({**block.with_block("sdar-8b", 16, 3).config, **SMALL}), traces.paper_trace("sdar", 16)
    masked, kept, decided = trace.mean
    shorten(monkeypatch)
    points: dict[str, dict[str, Any]] = {}
    with mosaic.compile(tiny, device="cpu", seed=1) as model:
        traces.flat_importance(model)
        for way in [way for way in eviction.WAYS if way not in ("focus", "dc+, cached")]:
            found = eviction.measured(model, way, trace, requests=4, prompts=(16, 40), answer=48)
            assert not found["kernels_ms"]  # a CPU has none
            assert {*found["parts_ms"]} == {*step_kernels.KINDS} and (eviction.of_parts(found) or 0) > 0
            points[way] = {"block": 16, "requests": 4, "way": way, **found}
        assert model.state_rows == {}
    whole, frozen, focus, all_kept, cached = (
        points[way] for way in (eviction.WHOLE, eviction.FROZEN, "focus, dc+", eviction.ALL_KEPT, "focus, dc+, cached")
    )
    for point in points.values():
        assert point["steps"] == eviction.TIMED + int(2 * trace.steps / 4)
        assert point["decided"] == pytest.approx(4 * decided, rel=0.15)
        assert 0 < point["least_ms"] <= point["step_ms"] <= point["most_ms"]
    assert whole["rows"] == 4 * masked and whole["kept"] == whole["tokens"] > 4 * 16
    assert cached["kept"] == pytest.approx(4 * kept, rel=0.15) and cached["kept"] < cached["tokens"] < whole["tokens"]
    # as it is by default, a finished block is computed once more, whole
    assert focus["kept"] == pytest.approx(4 * (kept + 16 / trace.steps), rel=0.15) and focus["kept"] > cached["kept"]
    assert all_kept["kept"] == all_kept["tokens"] == frozen["tokens"] and all_kept["rows"] == pytest.approx(
        4 * masked, rel=0.1
    )
    for point, ms in zip((whole, frozen, all_kept, cached), (4.0, 2.0, 2.5, 2.0), strict=True):
        point |= {"step_ms": ms, "tokens_per_s": 8000 / ms, "parts_ms": {}}
    # as older records have it; all steps count, whatever they take
    focus |= {"step_ms": [1.0] * 4 + [4.0], "decided": [8] * 4 + [0]}
    focus |= {
        "kernels_ms": {"products": 0.5, "attention": 0.25},
        "parts_ms": {"products": 0.5, "attention": 0.25, "others": 4.0},
    }
    run = {"model": "sdar-8b", "layers": 3, "commit": "exact", "points": [*points.values()]}
    rows = {row[2]: row for row in eviction.rows_of(run)}
    assert all(len(row) == len(eviction.header_of(run)) for row in rows.values()) and "focus, dc+, cached" in rows
    assert rows["focus, dc+"][3:5] == ["4,000", "1.00"]
    floors = [1e3 * eviction.floor_of(run, point) for point in (focus, whole)]
    shown = [
        f"{floors[0]:.2f}",
        f"{1 / floors[0]:.2f}",
        "2.00",
        f"{floors[1] / floors[0]:.2f}",
        "0.50 ms, 50.0%",
        "0.5, 0.2",
    ]
    assert rows["focus, dc+"][6:12] == shown
    assert rows["focus, dc+"][12:] == ["0.50, 0.25, 4.00", "1.33"] and rows["whole"][12:] == ["", ""]
    del run["commit"], points["focus, dc+, cached"]  # as records were before it was said, when all were cached
    run["points"] = [*points.values()]
    assert {row[2] for row in eviction.rows_of(run)} == {
        "whole",
        "dc+, cached",
        "focus, dc+, cached",
        "all kept, cached",
    }
    result = {
        "model": "sdar-8b",
        "layers": 3,
        "commit": "exact",
        "trace": "paper",
        "prompts": [16, 40],
        "answer": 48,
        "card": "cpu",
        "environment": ENVIRONMENT,
    }
    text = report.eviction_section([{**result, "points": [*points.values()]}])
    assert (
        "**sdar-8b, trace 'paper', prompts of 16 to 40 tokens, answers of up to 48**" in text
        and "| 16 | 4 | dc+ | 4,000 | 2.00 |" in text
        and "| 0.5, 0.2 | 0.50, 0.25, 4.00 | 1.33 |\n" in text
        and f"| {eviction.PARTS[1]} |\n" in text
    )
    for point in points.values():  # as in older records
        point.pop("parts_ms", None)
    assert eviction.header_of(run) == eviction.HEADER and len(next(eviction.rows_of(run))) == len(eviction.HEADER)
    # a file of a trace, and one that a model's own answers make
    (tmp_path / "trace.json").write_text(json.dumps(asdict(trace)))
    assert traces.load_trace(tmp_path / "trace.json") == trace
    assert traces.load_trace(record.RESULTS / "trace-small-sdar.json").blocks[0][0].masked == 32


@pytest.mark.soak
def test_shifted_blocks_go_by_a_trace_though_one_step_more_commits_each(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command, of a family whose rows predict what follows them, which takes other options and does not norm its heads."""
    shorten(monkeypatch, timed=17)
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps({**block.with_block("fast-dllm-v2-7b", 16, 3).config, **SMALL}))
    asked = "--device cpu --block 16 --batch 6 --prompts 32,32 --answer 0 --attention mage:k=8"
    eviction.main(["tiny.json", *asked.split(), "--ways", "focus, dc+;dc+"])
    result = read(out, "eviction-tiny.json-cpu")
    assert result["trace"] == "paper, of sdar"
    evicted, frozen = result["points"]
    masked, kept, decided = traces.paper_trace("sdar", 16).mean
    for point in (evicted, frozen):
        point["found"] = point["decided"]
        assert point["steps_of_all"] > 1.2  # a step of their own, as attention is sparse
        assert 0.95 * 6 * 16 / (16 / decided + 1) < point["found"] < 6 * decided * 1.05
    # beside what the trace keeps, a token is computed once more for each that is decided
    assert evicted["kept"] / evicted["found"] == pytest.approx((kept + decided) / decided, rel=0.05)
    assert evicted["kept"] < 0.7 * evicted["tokens"] and frozen["kept"] == frozen["tokens"]
    assert frozen["rows"] / frozen["found"] == pytest.approx(masked / decided, rel=0.05)
    # of six requests, those that begin a block read all keys, and half of that again; steps of their own read all
    first, second, sparse_layer = evicted["keys"]
    begin = evicted["found"] / 16
    seen = first / (6 + begin)
    often = 3 / evicted["steps"]  # blocks that may begin in the steps beyond those that end
    assert first == second
    assert sparse_layer == pytest.approx(2.5 * begin * seen + (6 - begin) * 8, abs=2.5 * often * seen)


def test_ways_across_graphs_are_read_from_what_a_program_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results before a failing variant are kept; without a compiler there is no program."""
    program = tmp_path / "across"
    program.write_text(
        '#!/bin/sh\necho \'{"way": "read", "sizes": \'$3\', "kernels": \'$1\', "step_us": 1300.4, "gap_us": 9.26, \''
        '\'"launch_us": 5.1, "instantiate_ms": 3.2, "mib": 24}\'\necho \'no such node\' >&2\nexit 1\n'
    )
    program.chmod(0o755)
    points = across.measured(program, 408, 8)
    assert [*across.rows_of({"points": points})] == [["408", "8", "read", "1,300", "9.3", "5.1", "3.2", "24"]]
    monkeypatch.setattr("benchmarks.across.shutil.which", lambda name: str(tmp_path / "nvcc"))
    with pytest.raises(UsageError, match="no nvcc: install the CUDA toolkit"):
        across.compiled(tmp_path, (9, 0))
    (tmp_path / "nvcc").write_text('#!/bin/sh\necho "across.cu: $4" >&2\nexit 2\n')
    (tmp_path / "nvcc").chmod(0o755)
    with pytest.raises(UsageError, match=r"nvcc refused across\.cu: across\.cu: -arch=sm_90"):
        across.compiled(tmp_path, (9, 0))


def test_requests_begin_at_every_step_of_a_trace_and_are_in_no_more_blocks_than_is_said() -> None:
    rng = random.Random(5)
    lengths = [rng.randint(1, 9) for _ in range(7)]
    blocks = tuple(tuple(traces.TraceStep(16 - step, 4, 1) for step in range(length)) for length in lengths)
    trace, total = traces.Trace(name="any", block=16, blocks=blocks), sum(lengths)
    places = [trace.at(number, total) for number in range(total)]
    assert places == [(block, step) for block, length in enumerate(lengths) for step in range(length)]
    assert [trace.at(number, 3 * total) for number in range(3 * total)] == [place for place in places for _ in range(3)]
    replay = traces.Replay(trace, total)
    assert [replay.place(number) for number in range(total)] == [step for _, step in places]
    of_steps = [block for block, _ in places] * 9
    for steps in range(1, 4 * total):
        met = max(
            1 + sum(before != after for before, after in pairwise(of_steps[first : first + steps]))
            for first in range(total)
        )
        assert met <= trace.most_blocks(steps) <= met + 1


@pytest.mark.parametrize("family", traces.PAPER)
@pytest.mark.parametrize("length", [16, 32, 64])
def test_a_trace_of_the_paper_has_its_averages(family: str, length: int) -> None:
    trace = traces.paper_trace(family, length, 64)
    without, evicted = traces.PAPER[family]
    for steps in trace.blocks:
        assert sum(step.committed for step in steps) == steps[0].masked == length
        assert all(later.masked == step.masked - step.committed for step, later in pairwise(steps))
    _, kept, decided = trace.mean
    assert 32 / decided == pytest.approx(without, rel=0.01) and kept / decided == pytest.approx(evicted, rel=0.01)


def test_the_floor_of_a_step_counts_products_keys_and_experts_once() -> None:
    """On a card whose bandwidth bounds all: the bytes of what is read; on one whose products do: their FLOPs at the best rate."""
    arch = load({**block.with_block("sdar-8b", 16, 3).config, **SMALL}).architecture
    rates = {"gemm_rates": {9: {1: 1e9, 8: 1e12}, 99: {1: 1e11}}, "attention_rates": {"triton": {1: 1e11}}}
    card = replace(load_device("h200"), **rates, few_rows_rates={}, unembed_rates={})
    sizes: dict[str, Any] = {"requests": 2, "tokens": 40.0, "kept": 10.0, "rows": 5.0, "keys": [100.0] * 3}
    widths = arch.attention.heads * arch.attention.head_size, arch.attention.kv_heads * arch.attention.head_size
    of_layer = arch.hidden * (2 * widths[0] + 2 * widths[1] + 3 * arch.feed_forward.size)
    weights = 4 * (arch.layers * of_layer + arch.hidden * arch.vocabulary)
    read = Floor(arch, replace(card, bandwidth=1.0)).of(**sizes, cut=1)
    assert read == pytest.approx(weights + arch.layers * 4 * 2 * widths[1] * 100)
    fewer = Floor(arch, replace(card, bandwidth=1.0)).of(**{**sizes, "keys": [100.0, 30.0, 50.0]}, cut=1)
    assert fewer == pytest.approx(read - 4 * 2 * widths[1] * 120)
    fast = Floor(arch, replace(card, bandwidth=1e30))
    head, attended, stored = 2 * 5 * arch.hidden * arch.vocabulary, 4 * 50 * widths[0], 4 * arch.hidden * widths[1]
    # of the last layer's tokens keys and values alone, but for those that are unembedded
    last = 5 * (2 * of_layer + attended - stored)
    assert 1e12 * fast.of(**sizes) == pytest.approx(2 * 40 * (2 * of_layer + attended) + 40 * stored + last + head)
    # layer 0 and the queries, keys and values of layer 1 are of all tokens
    before = 40 * (2 * of_layer + attended + 2 * arch.hidden * widths[0] + stored)
    after = 10 * (2 * of_layer + attended - 2 * arch.hidden * widths[0] - stored) + 10 * stored
    assert 1e12 * fast.of(**sizes, cut=1) == pytest.approx(before + after + last + head)
    # a step that fills the cache ends with the last layer's keys and values; a token sees those of its block and before
    filled = fast.of(tokens=48, rows=0, keys=[48.0] * 3, prefill=True)
    of_token = 2 * of_layer + 4 * (16 + 32 + 48) / 3 * widths[0]
    assert 1e12 * filled == pytest.approx(48 * (2 * of_token + stored))
    # of experts, those that a token chooses: of all, where there are many tokens; the last layer has five in any case
    experts = load("llada2-mini").architecture
    floor, sizes = Floor(experts, replace(card, bandwidth=1.0)), {**sizes, "keys": [100.0] * experts.layers}
    most, one = (floor.of(**{**sizes, "tokens": tokens}) for tokens in (1e6, 1.0))
    layers, of_expert = (
        sum(layer.feed_forward.experts > 0 for layer in experts.stack) - 1,
        2 * 3 * experts.hidden * experts.feed_forward.size,
    )
    assert most - one == pytest.approx(
        layers * of_expert * (experts.feed_forward.experts - experts.feed_forward.experts_per_token)
    )


@pytest.mark.parametrize(
    ("spelled", "later", "selecting"),
    [
        ("mage:k=64", [1000, 1000, 64, 64], [1000, 1000, 1500, 1500]),
        ("exact-ends:k=64:carried=true", [1000, 64, 64, 1000], [1000, 564, 564, 1000]),
        ("quest:k=64", [1000, 1000, 64, 64], [1000, 1000, 126.5, 126.5]),
        ("oracle:ratio=0.01", [1000, 1000, 10, 10], [1000, 1000, 510, 510]),
        ("mage+flashblock:k=64", [0, 0, 64, 64], [1000, 1000, 1500, 1500]),
        ("flashblock", [0] * 4, [1000] * 4),
    ],
)
def test_what_a_step_reads_goes_by_what_it_does(spelled: str, later: list[float], selecting: list[float]) -> None:
    """A sparse step reads what is selected, one that selects ranks all keys or pages, too; exact layers read all."""
    arch = load({**block.with_block("sdar-8b", 16, 4).config, **SMALL}).architecture
    for selects, read in ((False, later), (True, selecting)):
        assert keys_read(attention_policy(spelled), arch, 1000, selects=selects, refreshes=selects) == read


def a_processor(timer: Any) -> Bench:
    """This one, with a clock."""
    return Bench(
        title="a processor", device="cpu", backend="cpu", memory_bytes=1 << 30, cache_bytes=0, versions={}, timer=timer,
        load=lambda operator, implementation: None, pinned=torch.empty, free_bytes=lambda: 0,
    )  # fmt: skip


def test_attention_over_kept_keys_is_timed_against_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once:
        """Runs what it is to time."""

        def captured(self, calls: Sequence[Callable[[], object]]) -> float:
            for call in calls:
                call()
            return 1e-3 * len(calls)

        eager = captured

    bench = a_processor(Once())
    small = [
        replace(
            case,
            keys=96,
            queries=min(case.queries, 40),
            requests=min(case.requests, 2),
            heads=4,
            kv_heads=2,
            size=8,
            blocks=min(case.blocks, 8),
        )
        for case in kv_attention.CASES
    ]
    monkeypatch.setattr(kv_attention.importlib.util, "find_spec", lambda name: None)

    def burst(launches: Sequence[Callable[[], object]]) -> float:
        assert len(launches) == 2
        return 1e-3

    expected = {"mosaic": {"sustained_s": 2e-3, "burst_s": 1e-3}}
    assert all(kv_attention.measured(case, bench, burst, layers=2) == expected for case in small)
    card = replace(load_device("h200"), gemm_rates={1: 6e14}, few_rows_rates={}, unembed_rates={})
    reading, products = (replace(kv_attention.CASES[0], keys=1000, queries=queries) for queries in (1, 4000))
    slow = replace(card, bandwidth=1e9)
    assert kv_attention.floor_s(reading, slow) == pytest.approx(4 * 1000 * 1024 / 1e9)
    assert kv_attention.floor_s(products, card) == pytest.approx(4 * 4000 * 1000 * 4096 / 6e14)
    triangle = replace(products, keys=4000, blocks=32)
    assert kv_attention.floor_s(triangle, card) == pytest.approx(4 * 4000 * (4000 - 1984) * 4096 / 6e14)
    of = Best.of(slow).attention_s(pairs=1, keys=1000, heads=32, kv_heads=8, size=128, item=2)
    times = {"sustained_s": 3 * of, "burst_s": of}
    before, now = ({**asdict(reading), "seconds": 1e-3}, {**asdict(reading), "mosaic": times})
    now[kv_attention.OWN] = {"by": "fa3", **times}
    rows = [*kv_attention.rows_of({"points": [before, now]})]
    assert {len(row) for row in rows} == {len(kv_attention.HEADER)} and rows[0][-6:] == [""] * 6
    assert rows[1][4:6] == rows[1][8:10] and rows[1][10:] == ["fa3", "", "", ""]


def test_other_kernels_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's over either layout, by a stand-in that reads what it is told to: the faster backend counts, a wrong one is left
    out, and nothing that is wrong is timed."""
    fake, order = FakeFlashInfer(), list[str]()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(kv_attention.importlib.util, "find_spec", lambda name: fake)

    class Timer:
        """Takes the second backend that it is shown for the faster one."""

        def captured(self, calls: Sequence[Callable[[], object]]) -> float:
            order.append("timed")
            return 1.0 / len(order)

        eager = captured

    bench = a_processor(Timer())
    case = replace(kv_attention.CASES[0], keys=96, queries=32, requests=3, heads=4, kv_heads=2, size=8)
    for count in (1, 3):
        order.clear()
        found = kv_attention.measured(replace(case, requests=count), bench, lambda launches: 1e-3, layers=2)
        assert "failed" not in found and len(order) == 5
        assert found[kv_attention.OWN]["by"] == found[kv_attention.MOSAICS]["by"] == "fa3"
    assert fake.kinds == {"ragged NHD", "paged HND"}
    fake.wrong = "fa2"
    order.clear()
    found = kv_attention.measured(case, bench, lambda launches: 1e-3, layers=2)
    assert len(order) == 3 and all("off by" in why for why in found["failed"].values())
    assert [*found["failed"]] == ["own layout, fa2", "Mosaic's layout, fa2"]
    monkeypatch.setattr(kv_attention, "error_of", lambda *_: 1.0)
    with pytest.raises(UsageError, match=r"layer 0 is off by 1\.000"):
        kv_attention.measured(case, bench, lambda launches: 1e-3, layers=2)


class FakeFlashInfer:
    """Wrappers that attend in plain PyTorch to the keys that a plan names; results of the backend `wrong` are not right."""

    def __init__(self) -> None:
        self.wrong = ""
        self.kinds = set[str]()
        self.runs = 0

    def BatchPrefillWithRaggedKVCacheWrapper(self, _: Any, layout: str, *, backend: str, **__: Any) -> Any:
        return self._kernels("ragged", layout, backend)

    def BatchPrefillWithPagedKVCacheWrapper(self, _: Any, layout: str, *, backend: str, **__: Any) -> Any:
        return self._kernels("paged", layout, backend)

    def _kernels(self, kind: str, layout: str, backend: str) -> Any:
        self.kinds.add(f"{kind} {layout}")
        planned: dict[str, Any] = {}

        def plan(queries: torch.Tensor, keys: torch.Tensor, *more: Any, **_: Any) -> None:
            planned.update(queries=queries.tolist(), keys=keys.tolist(), more=more)

        def whole(part: torch.Tensor, first: int, end: int) -> torch.Tensor:
            """Keys [S, K, H] of a sequence."""
            if kind == "ragged":
                return part[first:end]
            pages = part[planned["more"][0][first:end].long()]
            return (pages if layout == "NHD" else pages.transpose(1, 2)).flatten(0, 1)

        def run(q: torch.Tensor, *kv: Any, out: torch.Tensor) -> None:
            k, v = kv if kind == "ragged" else kv[0]
            self.runs += 1
            for queries, keys in zip(pairwise(planned["queries"]), pairwise(planned["keys"]), strict=True):
                mine = q[slice(*queries)].transpose(0, 1).float()
                group = q.shape[1] // k.shape[-2 if layout == "NHD" else 1]
                both = (whole(part, *keys).transpose(0, 1).repeat_interleave(group, 0).float() for part in (k, v))
                found = torch.nn.functional.scaled_dot_product_attention(mine, *both)
                out[slice(*queries)] = found.transpose(0, 1).to(out.dtype) + (backend == self.wrong)

        return SimpleNamespace(plan=plan, run=run)


@pytest.mark.parametrize("layout", ["stored", "apart"])
def test_flashinfers_steps_are_checked_in_every_layer_before_they_are_timed(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in lockstep: where all is read as it is stored, what is decided is what Mosaic's own kernel decides."""
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(CompiledModel, "request_table", lambda self: None)  # as on a card
    monkeypatch.delattr(load_kernel("kv_attention").module, "bind")  # as on a card, launches are bound by nobody
    tiny = load({**block.with_block("sdar-8b", sparse.BLOCK, 3).config, **SMALL})
    case: dict[str, Any] = {"prefix": 64, "requests": 2, "steps": 2, "staggered": False}
    decided: dict[str, list[Any]] = {"mosaic": [], "flashinfer": []}
    with mosaic.compile(tiny, device="cpu", seed=1) as model:
        torch.manual_seed(5)
        sparse.measured(model, sparse.EXACT, **case, on_step=decided["mosaic"].append)
    apart = (2, 64 + sparse.GENERATED + sparse.BLOCK) if layout == "apart" else None
    checks: list[int] = []
    with flashinfer_steps.with_flashinfer(tiny.architecture, apart=apart, device="cpu") as steps:
        with mosaic.compile(tiny, device="cpu", seed=1) as model:
            torch.manual_seed(5)
            times = sparse.measured(
                model, sparse.EXACT, **case, on_step=decided["flashinfer"].append, attending=noting(steps, checks, fake)
            )
        assert len(times) == sparse.BLOCKS * 2
        # two layers of each size of a step: of both blocks, and of the two that are committed beside them
        assert checks[1] - checks[0] == 2 * 2 and fake.runs > checks[1]
        assert fake.kinds == {"paged HND" if apart is None else "paged NHD"}
        fake.wrong = "fa2"
        with pytest.raises(UsageError, match=r"off by .* of the largest result in layer 0"):
            steps.verify()
    same = [
        torch.equal(ours.token_ids, theirs.token_ids)
        for ours, theirs in zip(decided["mosaic"], decided["flashinfer"], strict=True)
    ]
    assert all(same) is (apart is None)


def noting(steps: Any, checks: list[int], fake: FakeFlashInfer) -> Any:
    """The steps, with how many kernels had run before and after they were held against plain attention."""
    own = steps.verify

    def verify() -> None:
        checks.append(fake.runs)
        own()
        checks.append(fake.runs)

    steps.verify = verify
    return steps


TIMED: dict[str, Any] = {
    "block": block, "eviction": eviction, "kv-attention": kv_attention, "sparse": sparse, "speed": speed,
}  # fmt: skip


@pytest.mark.parametrize("kind", TIMED)
def test_no_recorded_time_is_below_its_floor(kind: str) -> None:
    """By what a record says of its steps, whatever floor was known when it was taken."""
    found = [timing for result in record.load_results(kind) for timing in TIMED[kind].timings(result)]
    assert len(found) > 10
    below = [
        f"{name}: {1e3 * seconds:.3f} ms, floor {1e3 * floor:.3f}" for name, seconds, floor in found if seconds < floor
    ]
    assert not below


def test_a_pair_of_checkouts_is_compared_by_medians() -> None:
    result = {"before": {"a step": 4.0}, "now": {"a step": 2.0}}
    assert paired.rows_of(result) == [["a step", "4.000", "2.000", "0.500"]]
    assert len(paired.rows_of(result)[0]) == len(paired.HEADER)


def test_what_engines_load_in_their_processes_is_measured(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = str(record.ROOT / "tests" / "dropping.py")

    def engine_of(engine: str, settings: Any, keep: Callable[[dict[str, Any]], None], **_: Any) -> None:
        keep({"record": "engine", "engine": engine, "card": "a card"})
        keep({"record": "point", **point(engine, 1024, 0.02), "masked": 512})
        keep({"record": "process", "engine": engine, "files": [loaded, "/elsewhere/torch.py"]})

    monkeypatch.setattr("benchmarks.bench.suite.run_engine", engine_of)
    speed.main(["small-llada", "--ctx", "1k", "--mask-ratio", "0.5", "--engines", "mosaic"])
    found = read(out, "speed-small-llada-h200")
    assert "tests/dropping.py" in found["environment"]["sources"] and len(found["points"]) == 1
    assert not any("files" in entry for entry in (*found["points"], *found["engines"]))


def test_every_section_reads_what_its_script_writes() -> None:
    """A row has as many cells as its header, so that a table never shifts."""
    rows = speed.rows_of(SPEED)
    assert {len(row) for row in rows} == {len(speed.HEADER)} and [row[0] for row in rows] == ["1,024", "65,536"]
    assert {len(row) for row in report.memory_rows(SPEED["points"])} == {len(report.MEMORY_HEADER)}  # type: ignore[arg-type]
    sections: dict[str, Callable[..., str]] = {name: write for name, (_, write) in report.SECTIONS.items()}
    assert sections["speed"]([]) == "" and sections["memory"]([]) == ""


@pytest.mark.soak
def test_requests_with_batch_mates_are_timed_and_compared(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WARM": 1,
        "STEPS": 2,
        "TOGETHER": 2,
        "REQUESTS": 2,
        "BUDGET": "1GiB",
        "POLICIES": {"exact": {}, "focus": {"eviction": "focus"}},
    }.items():
        monkeypatch.setattr(batch_mates, name, value)
    batch_mates.main(["small-sdar", "small-sdar", "--device", "cpu"])
    result = json.loads((out / "batch-mates-cpu.json").read_text())
    assert result["different"] == {"exact": [0, 0], "focus": [0, 0]} and result["requests"] == 2
    assert all(ms > 0 for times in result["step_ms"].values() for ms in times)
    rows = batch_mates.rows_of(result)
    assert [row[0] for row in rows] == ["exact", "focus"] and all(len(row) == len(batch_mates.HEADER) for row in rows)
