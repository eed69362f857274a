"""On a CUDA card, with `batch_invariant`: what a request gets is, to the bit, what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_gpu_generation import DEVICE

import mosaic
from mosaic import decoding
from mosaic.kernels import load
from mosaic.kernels.binding import kernel_of
from mosaic.registrar.operators import operator
from mosaic.runtime.compiled import CompiledModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False"),
]

BF16 = torch.bfloat16
SHAPES = {  # outputs, inputs
    "sdar q": (4096, 4096), "sdar k": (1024, 4096), "sdar up": (12288, 4096), "sdar down": (4096, 12288),
    "mini q": (2048, 2048), "mini k": (512, 2048), "mini up": (5120, 2048), "mini router": (256, 2048),
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "sdar", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8192, "max_position_embeddings": 4096, "mask_token_id": 8191,
    "eos_token_id": 7, "block_size": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip
REQUESTS, BATCHES = 8, 2
SPARSE = "mage:k=128:exact_layers=1"
POLICIES: dict[str, dict[str, Any]] = {
    "exact": {}, "mage": {"attention": SPARSE}, "flashblock": {"attention": "flashblock"}, "focus": {"eviction": "focus"},
    "caches": {"block_cache": "dc+"}, "mage and focus": {"attention": SPARSE, "eviction": "focus"},
}  # fmt: skip


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").mul_(0.05).to(BF16)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_slices_are_slices_of_the_product(shape: str) -> None:
    outer, inner = SHAPES[shape]
    x, weight, residual = normal(2048, inner), normal(outer, inner, seed=1), normal(2048, outer, seed=2)
    ways = {name: kernel_of(operator(name).implementation("cuda", "invariant")) for name in ("linear", "linear_add")}
    whole, added = torch.empty_like(residual), residual.clone()
    ways["linear"](x=x, weight=weight, y=whole)
    ways["linear_add"](x=x, weight=weight, y=added)
    for rows in (1, 7, 32, 64, 65, 128, 200, 256, 300, 513, 1000):
        first = 2048 - rows - 3
        few, less = torch.empty_like(residual[:rows]), residual[first : first + rows].clone()
        ways["linear"](x=x[first : first + rows].clone(), weight=weight, y=few)
        ways["linear_add"](x=x[first : first + rows], weight=weight, y=less)
        assert torch.equal(few, whole[first : first + rows]) and torch.equal(less, added[first : first + rows])


def test_products_of_experts_have_the_bits_of_the_others() -> None:
    """So a row's result is the same whichever operator a model takes for it, and however many rows an expert has."""
    x, weight = normal(600, 2048), normal(512, 2048, seed=1)
    whole = torch.empty(600, 512, dtype=BF16, device="cuda")
    load("linear", "cuda", "invariant").launch(x=x, weight=weight, y=whole)
    for rows in (1, 9, 27, 96, 268, 600):
        y = torch.empty(rows, 512, dtype=BF16, device="cuda")
        offsets = torch.tensor([0, rows], device="cuda")
        load("grouped_linear", "cuda").launch(x=x[:rows], weight=weight[None], offsets=offsets, y=y)
        assert torch.equal(y, whole[:rows])


@pytest.mark.parametrize("vocabulary", [151_936, 157_184])
def test_statistics_of_a_row_are_the_same_among_many(vocabulary: int) -> None:
    logits = normal(600, vocabulary) * 40
    names = ("maximum", "second", "logsumexp", "entropy")

    def statistics(rows: slice) -> dict[str, torch.Tensor]:
        part = logits[rows]
        found = {name: torch.empty(len(part), device="cuda") for name in names}
        found["token"] = torch.empty(len(part), dtype=torch.int64, device="cuda")
        load("row_stats", "cuda").launch(logits=part, **found)
        return found

    whole = statistics(slice(None))
    for rows in (slice(5, 6), slice(40, 72), slice(1, 300)):
        for name, found in statistics(rows).items():
            assert torch.equal(found, whole[name][rows]), name


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIG, device=DEVICE, budget="16GiB", batch_invariant=True, seed=3) as opened:
        yield opened


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_the_request_alone(policy: str, model: CompiledModel) -> None:
    """Ragged batches of random prompts, weights in bfloat16; confidences to the bit as well."""
    rng, generator = random.Random(policy), torch.Generator().manual_seed(len(policy))
    config = decoding.GenerationConfig(gen_length=64, steps=16, stop_at_eos=False, **POLICIES[policy])
    for batch in range(BATCHES):
        prompts = [torch.randint(8, 8000, (rng.randint(1, 700),), generator=generator) for _ in range(REQUESTS)]
        numbers = list(range(batch * REQUESTS, (batch + 1) * REQUESTS))
        together = decoding.generate(model, prompts, config, request_ids=numbers)
        for number, prompt, found in zip(numbers, prompts, together, strict=True):
            (alone,) = decoding.generate(model, [prompt], config, request_ids=[number])
            assert alone.token_ids.tolist() == found.token_ids.tolist()
            assert torch.equal(alone.confidence, found.confidence)
    assert {executor.document.get("batch_invariant") for executor in model.executors} == {True}


def test_requests_of_several_policies_share_steps_and_get_what_they_get_alone(model: CompiledModel) -> None:
    """Exact ones, ones that select, ones that evict, and both stand in one step; the others take turns."""
    generator, most = torch.Generator().manual_seed(9), 0
    policies = [
        *POLICIES.values(),
        {"eviction": "focus:requests=64"},
        {"attention": SPARSE, "eviction": "focus:requests=64"},
    ] * 2
    prompts = [torch.randint(8, 8000, (40 * number + 3,), generator=generator) for number in range(len(policies))]
    options: dict[str, Any] = {"gen_length": 64, "steps": 16, "stop_at_eos": False}
    with model.session() as session:
        requests = [
            session.submit(prompt, request_id=number, **options, **policy)
            for number, (prompt, policy) in enumerate(zip(prompts, policies, strict=True))
        ]
        while session.live:
            steps = [step for step in session.advance() if step.phase == "denoise"]
            most = max(most, len({str(policies[step.request]) for step in steps}))
    assert most > 3
    for number, (prompt, policy, request) in enumerate(zip(prompts, policies, requests, strict=True)):
        (alone,) = model.generate([prompt], request_ids=[number], **options, **policy)
        assert request.generation is not None
        assert alone.token_ids.tolist() == request.generation.token_ids.tolist(), policy
