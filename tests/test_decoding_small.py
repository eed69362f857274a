"""The small trained models decode token for token as the statements of `test_decoding` do, in float32.

Trained weights bring what random ones do not: many tokens that are all but certain, ties among them, answers that end.
The test command decodes by blocks and by Fast-dLLM; the other algorithms soak.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from reference_runner import Network
from safetensors.torch import load_file
from test_decoding import Case, Draw, assert_same, dream, fast_dllm, llada, llada21, sdar
from torch import Tensor

from benchmarks.quality.evaluation import evaluation_set
from benchmarks.quality.vocabulary import vocabulary
from mosaic import models
from mosaic.models import shipped


@pytest.fixture(scope="module")
def bidirectional() -> Iterator[Case]:
    yield from opened("small-llada")


@pytest.fixture(scope="module")
def blockwise() -> Iterator[Case]:
    yield from opened("small-sdar")


def opened(name: str) -> Iterator[Case]:
    """The checkpoint's weights in float32, compiled, and in plain PyTorch."""
    directory = shipped(name)
    assert directory is not None
    config = {**json.loads((directory / "config.json").read_text(encoding="utf-8")), "torch_dtype": "float32"}
    tensors = {key: tensor.float() for key, tensor in load_file(directory / "model.safetensors").items()}
    runner = CompiledRunner(config, tensors, debug="poison")
    yield Case(runner, Network(models.load(config).architecture, tensors))
    runner.model.close()


ITEMS = evaluation_set(seed=3, tasks=("retrieval", "addition", "sorting", "story"), lengths=(128,), per_task=1)
PROMPTS = {item.task: item.prompt for item in ITEMS}


def prompt_of(task: str) -> Tensor:
    """Prompts of 113, 13, 30 or so tokens: no multiples of a block."""
    return torch.tensor(vocabulary().encode(PROMPTS[task]))


@pytest.mark.soak
@pytest.mark.parametrize("task", PROMPTS)
@pytest.mark.parametrize(
    ("temperature", "remasking"), [(0.0, "low_confidence"), (0.8, "low_confidence"), (0.0, "random")]
)
def test_llada(bidirectional: Case, task: str, temperature: float, remasking: str) -> None:
    prompt, draw = prompt_of(task), Draw(temperature=temperature, seed=3, scaled=False)
    expected = llada(bidirectional.network, prompt, 36, 12, 18, draw, random=remasking == "random")
    options = {"block_length": 12, "steps": 18, "remasking": remasking, "temperature": temperature, "seed": 3}
    assert_same(bidirectional, prompt, expected, gen_length=36, **options)


@pytest.mark.soak
def test_llada_guided(bidirectional: Case) -> None:
    prompt = prompt_of("story")
    expected = llada(bidirectional.network, prompt, 32, 16, 16, Draw(scaled=False), cfg=0.7)
    assert_same(bidirectional, prompt, expected, gen_length=32, block_length=16, steps=16, cfg_scale=0.7)


@pytest.mark.soak
@pytest.mark.parametrize("task", ["retrieval", "story"])
@pytest.mark.parametrize("alg", ["origin", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_dream(bidirectional: Case, task: str, alg: str, temperature: float) -> None:
    prompt, score = prompt_of(task), {"topk_margin": "margin", "entropy": "entropy"}.get(alg, "confidence")
    settings = {"temperature": temperature, "top_p": 0.9 if temperature else 1.0, "seed": 5}
    expected = dream(bidirectional.network, prompt, 30, 12, alg, Draw(**settings, score=score))
    options = {"algorithm": "dream", "steps": 12, "alg": alg, **settings}
    assert_same(bidirectional, prompt, expected, gen_length=30, **options)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("task", ["retrieval", "addition"])
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
@pytest.mark.parametrize("rule", [{"threshold": 0.9}, {"factor": 1.0}])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_fast_dllm(
    bidirectional: Case, task: str, cache: str | None, rule: dict[str, float], temperature: float
) -> None:
    prompt, draw = prompt_of(task), Draw(temperature=temperature, seed=2, scaled=False)
    expected = fast_dllm(bidirectional.network, prompt, 36, 12, cache, draw, **rule)
    options: dict[str, Any] = {"algorithm": "fast-dllm", "block_length": 12, "cache": cache, **rule}
    options |= {"temperature": temperature, "seed": 2}
    assert_same(bidirectional, prompt, expected, gen_length=36, **options)


@pytest.mark.soak
@pytest.mark.parametrize("task", PROMPTS)
@pytest.mark.parametrize("remasking", ["sequential", "low_confidence_static", "low_confidence_dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sdar(blockwise: Case, task: str, remasking: str, temperature: float) -> None:
    prompt, draw = prompt_of(task), Draw(temperature=temperature, seed=4)
    expected = sdar(blockwise.network, prompt, 40, 16, remasking, draw)
    options = {"remasking": remasking, "steps": 16, "temperature": temperature, "seed": 4}
    assert_same(blockwise, prompt, expected, gen_length=40, **options)


@pytest.mark.parametrize("task", [pytest.param("retrieval", marks=pytest.mark.soak), "story"])
def test_sdar_keeps_what_top_p_and_top_k_leave(blockwise: Case, task: str) -> None:
    prompt, settings = prompt_of(task), {"temperature": 1.1, "top_p": 0.8, "top_k": 6, "seed": 8}
    expected = sdar(blockwise.network, prompt, 40, 16, "low_confidence_dynamic", Draw(**settings))
    assert_same(blockwise, prompt, expected, gen_length=40, steps=16, **settings)


@pytest.mark.parametrize(
    "task", ["addition", *(pytest.param(task, marks=pytest.mark.soak) for task in PROMPTS if task != "addition")]
)
def test_llada2(blockwise: Case, task: str) -> None:
    prompt = prompt_of(task)
    expected = sdar(blockwise.network, prompt, 40, 32, "low_confidence_dynamic", Draw(), 0.95)
    assert_same(blockwise, prompt, expected, gen_length=40, algorithm="llada2")


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("task", ["addition", "sorting"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_llada21(blockwise: Case, task: str, temperature: float) -> None:
    prompt, draw = prompt_of(task), Draw(temperature=temperature, seed=9)
    expected, _ = llada21(blockwise.network, prompt, 40, draw, 0.5, 0.3, 4)
    options = {"algorithm": "llada2.1", "threshold": 0.5, "edit_threshold": 0.3, "max_post_steps": 4}
    options |= {"temperature": temperature, "seed": 9}
    assert_same(blockwise, prompt, expected, gen_length=40, **options)
