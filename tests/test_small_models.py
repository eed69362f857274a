"""The checkpoints that ship: their files, what they know, and the first command of the README."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import mosaic
from benchmarks.quality import stories
from benchmarks.quality.evaluation import evaluation_set
from benchmarks.quality.exact import ExactSettings, check_vocabulary, measure_exact
from benchmarks.quality.vocabulary import vocabulary
from mosaic import cli
from mosaic.decoding import GenerationConfig, resolve
from mosaic.errors import UnsupportedModel
from mosaic.models import SHIPPED, load, shipped

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMES = ("small-llada", "small-sdar")
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def directory(name: str) -> Path:
    found = shipped(name)
    assert found is not None
    return found


def test_the_checkpoints_are_whole_and_small() -> None:
    assert set(SHIPPED.values()) == set(NAMES)
    folders = {name: directory(name) for name in NAMES}
    assert {name: {file.name for file in folder.iterdir()} for name, folder in folders.items()} == dict.fromkeys(
        NAMES, FILES
    )
    assert sum(file.stat().st_size for folder in folders.values() for file in folder.iterdir()) < 24 << 20
    for folder in folders.values():
        check_vocabulary(folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = {
        path
        for pattern in project["tool"]["setuptools"]["package-data"]["mosaic"]
        for path in (ROOT / "mosaic").glob(pattern)
    }
    assert {file for folder in folders.values() for file in folder.iterdir()} <= packed, "what is not in the wheel"


def test_long_answers_are_decoded_in_blocks_unless_asked_otherwise() -> None:
    architecture = load("small").architecture
    assert [
        resolve(GenerationConfig(gen_length=length, block_length=given), architecture).block_length
        for length, given in ((128, None), (100, None), (40, None), (97, None), (128, 128))
    ] == [32, 25, 20, 1, 128]
    asked = [resolve(GenerationConfig(gen_length=100, steps=steps), architecture) for steps in (50, 7)]
    assert [(found.block_length, found.steps) for found in asked] == [(20, 50), (100, 7)]
    assert resolve(GenerationConfig(), load("llada-8b").architecture).block_length == 128  # as published


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        pytest.param("small-llada", ("retrieval", "subtraction", "sorting"), marks=pytest.mark.soak),
        ("small-sdar", ("retrieval", "pair", "addition", "subtraction", "multiplication", "sorting")),
    ],
)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_they_know_what_they_were_trained_for(name: str, tasks: tuple[str, ...], count: int) -> None:
    """Facts at every tenth of a document and problems that have one answer each: no miss."""
    asked = ExactSettings(tasks=tasks, lengths=(256,), per_task=count, seed=11)
    with mosaic.compile(name) as model:
        result = measure_exact(model, asked)
    assert [item for item in result["items"] if not item["exact"]] == []


@pytest.mark.soak
@pytest.mark.parametrize("length", [1024, 2048])
def test_facts_are_found_far_back(length: int) -> None:
    with mosaic.compile("small-sdar") as model:
        result = measure_exact(model, ExactSettings(tasks=("retrieval",), lengths=(length,), seed=12))
    assert [item for item in result["items"] if not item["exact"]] == []


@pytest.mark.soak
@pytest.mark.parametrize(("by", "task"), [("prompt", "subtraction"), ("stdin", "sorting")])
def test_the_command_reaches_the_same_answers(by: str, task: str) -> None:
    """Through tokenizer.json, the chat template and a pipe: problems of the quality bench, told as a user would."""
    for item in evaluation_set(seed=21, tasks=(task,), per_task=1):
        question = item.prompt.removeprefix("<|user|> ").removesuffix("<|assistant|>")
        command = [sys.executable, "-m", "mosaic", "generate", "--model", "small-sdar"]
        ran = subprocess.run(
            command + (["--prompt", question] if by == "prompt" else []), input=question + "\n", capture_output=True,
            text=True, check=True, timeout=240,
        )  # fmt: skip
        assert ran.stdout == item.answer.strip() + "\n"


def test_a_mask_token_outside_the_vocabulary_is_one_clear_line(tmp_path: Path) -> None:
    for file in directory("small-sdar").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "mask_token_id": 9999}), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"'mask_token_id' must be a token id below 640, .* got 9999"):
        mosaic.compile(tmp_path)


def test_rows_that_fill_the_embedding_up_have_a_text() -> None:
    assert vocabulary().decode([vocabulary().word(" Anna"), 639]) == " Anna\ufffd"


def test_the_first_command_of_the_readme_tells_a_story(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sentence fits the prompt, in the README and from the command; which words it takes is the processor's rounding."""
    shown = README.split("```console\n")[1].split("```")[0]
    command, *text = shown.partition("\n$ ")[2].splitlines()
    arguments = shlex.split(command)
    question = " " + arguments[arguments.index("--prompt") + 1]
    assert stories.faults(question, " ".join(text)) == []
    began = time.perf_counter()
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    ran = capsys.readouterr()
    assert not ended.value.code and stories.faults(question, ran.out) == []
    assert "tokens/s; planned peak" in ran.err and time.perf_counter() - began < 60
