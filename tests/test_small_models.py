"""The checkpoints that ship: their files, what they know, and the first command of the README."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mosaic
from mosaic.bench.quality import stories
from mosaic.bench.quality.run import QualitySettings, check_vocabulary, run
from mosaic.decoding import GenerationConfig, resolve
from mosaic.models import load
from mosaic.models.shipped import SHIPPED, shipped

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
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


def test_long_answers_are_decoded_in_blocks_unless_asked_otherwise() -> None:
    architecture = load("small").architecture
    assert [
        resolve(GenerationConfig(gen_length=length, block_length=given), architecture).block_length
        for length, given in ((128, None), (40, None), (128, 128))
    ] == [32, 40, 128]
    assert resolve(GenerationConfig(), load("llada-8b").architecture).block_length == 128  # as published


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("small-llada", ("retrieval", "subtraction", "sorting")),
        ("small-sdar", ("retrieval", "pair", "addition", "subtraction", "multiplication", "sorting")),
    ],
)
def test_they_know_what_they_were_trained_for(name: str, tasks: tuple[str, ...]) -> None:
    """Facts at every tenth of a document and problems that have one answer each: no miss."""
    asked = QualitySettings(tasks=tasks, lengths=(256,), per_task=4, seed=11)
    with mosaic.compile(name) as model:
        result = run(model, asked)
    assert [item for item in result["items"] if not item["exact"]] == []


def test_facts_are_found_far_back() -> None:
    with mosaic.compile("small-sdar") as model:
        result = run(model, QualitySettings(tasks=("retrieval",), lengths=(2048,), seed=12))
    assert [item for item in result["items"] if not item["exact"]] == []


def test_the_first_command_of_the_readme_tells_a_story() -> None:
    """Every sentence fits the prompt, in the README and from the command; which words it takes is the processor's rounding."""
    shown = README.split("```console\n")[1].split("```")[0]
    command, *text = shown.removeprefix("$ pip install 'mosaic-dllm[torch]'\n$ ").splitlines()
    arguments = shlex.split(command)
    question = " " + arguments[arguments.index("--prompt") + 1]
    assert stories.faults(question, " ".join(text)) == []
    began = time.perf_counter()
    ran = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=True, timeout=240)
    assert stories.faults(question, ran.stdout) == []
    assert "tokens/s; planned peak" in ran.stderr and time.perf_counter() - began < 60
