"""lm-eval on tasks of a few lines: against a server, and in process. It is no dependency of the tests (CONTRIBUTING.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_generate_cli import written_checkpoint
from test_rotary_scaling import CONFIGS
from test_server import MODEL, _get, serving

import mosaic
from mosaic.evaluation import log_likelihoods

pytestmark = pytest.mark.soak
pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")

SUMS = [(3, 4), (12, 30), (21, 56), (7, 8), (40, 15), (61, 9), (33, 33), (18, 54)]
COMMON = "dataset_path: json\ntest_split: test\nmetadata:\n  version: 1.0\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Sums to answer, the right answer among two, and a text."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [{"a": a, "b": b, "sum": a + b, "wrong": a + b + 10} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = f"dataset_kwargs:\n  data_files:\n    test: {folder / 'sums.jsonl'}\n"
    question = 'doc_to_text: "<|user|> What is {{a}} + {{b}}?<|assistant|>"\n'
    (folder / "sums.yaml").write_text(
        f'task: sums\noutput_type: generate_until\n{COMMON}{given}{question}doc_to_target: "{{{{sum}}}}"\n'
        'generation_kwargs:\n  until: ["<|user|>"]\n  max_gen_toks: 64\n  do_sample: false\n'
        "filter_list:\n  - name: answer\n    filter:\n      - function: regex\n        regex_pattern: 'Answer: (\\d+)'\n"
        "      - function: take_first\nmetric_list:\n  - metric: exact_match\n"
    )
    (folder / "choice.yaml").write_text(
        f"task: choice\noutput_type: multiple_choice\n{COMMON}{given}"
        'doc_to_text: "<|user|> What is {{a}} + {{b}}?<|assistant|> {{a % 10}}+{{b % 10}}={{a % 10 + b % 10}}. Answer:"\n'
        'doc_to_choice: ["{{wrong}}", "{{sum}}"]\ndoc_to_target: 1\nmetric_list:\n  - metric: acc\n'
    )
    (folder / "text.yaml").write_text(
        f'task: text\noutput_type: loglikelihood_rolling\n{COMMON}{given}doc_to_text: ""\n'
        'doc_to_target: "<|user|> What is {{a}} + {{b}}?<|assistant|>"\nmetric_list:\n  - metric: bits_per_byte\n'
    )
    return folder


def evaluate(tasks: Path, out: Path, module: str, *options: str) -> dict[str, Any]:
    """The results of a run of lm-eval, by task."""
    command = [
        sys.executable,
        "-m",
        module,
        *options,
        "--include_path",
        str(tasks),
        "--output_path",
        str(out),
        "--log_samples",
    ]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(out / "cache"),
        "HF_DATASETS_CACHE": str(out / "cache"),
    }
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=os.environ | offline)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (found,) = out.rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())["results"]
    return results


@pytest.mark.parametrize("tokenizer", ["remote", "own", "none"])
def test_local_completions_answers_a_task(tasks: Path, tmp_path: Path, tokenizer: str) -> None:
    """Token ids by the server's tokenizer or by the checkpoint's, or text."""
    with serving() as base:
        how = {
            "remote": ",tokenizer_backend=remote",
            "own": f",tokenizer={MODEL.path}",
            "none": ",tokenizer_backend=None",
        }[tokenizer]
        arguments = f"model=small-sdar,base_url={base}/v1/completions,num_concurrent=4{how}"
        found = evaluate(
            tasks,
            tmp_path / "out",
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            arguments,
            "--tasks",
            "sums",
        )
        assert _get(f"{base}/health")[0] == 200
    assert found["sums"]["exact_match,answer"] == 1.0


def test_the_model_mosaic_generates_and_scores(tasks: Path, tmp_path: Path) -> None:
    found = evaluate(
        tasks, tmp_path / "out", "mosaic.evaluation", "--model", "mosaic",
        "--model_args", "pretrained=small,dtype=float32,mc_num=64", "--tasks", "sums,choice,text",
    )  # fmt: skip
    assert found["sums"]["exact_match,answer"] == 1.0 and found["choice"]["acc,none"] >= 0.75
    assert 0 < found["text"]["bits_per_byte,none"] < 16, "its questions were never masked in training"


def test_texts_of_dream_begin_with_a_beginning_of_sequence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lm_eval.api.instance import Instance

    from mosaic.evaluation.harness import MosaicLM

    path, config = written_checkpoint(tmp_path), CONFIGS["dream"] | {"vocab_size": 264, "mask_token_id": 258}
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|user|>", "eos_token": "[EOS]"}))
    with mosaic.compile(config | {"eos_token_id": 256}, seed=3) as model:
        model.save(path)
        asked = [([257, 97, 98], [32, 99]), ([257], [100, 101])]
        expected = log_likelihoods(model, asked, samples=8, strata=8)
    given = [Instance("loglikelihood", {}, texts, 0) for texts in (("ab ", "c"), ("", "de"))]
    lm = MosaicLM(str(path), mc_num=8)
    assert lm.loglikelihood(given) == [(pytest.approx(one, rel=1e-4), False) for one in expected]
    assert "is_greedy is False throughout" in caplog.text
    assert lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("de",), 0)]) == pytest.approx(expected[1:])


def test_likelihoods_of_a_family_without_an_estimate_are_refused_by_name(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="none for the family 'sdar'"):
        evaluate(
            tasks,
            tmp_path,
            "mosaic.evaluation",
            "--model",
            "mosaic",
            "--model_args",
            "pretrained=small-sdar",
            "--tasks",
            "choice",
        )
