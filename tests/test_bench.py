"""The baselines are the stock models; the meters, the bisection and the worker processes say what is true."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_runtime_compiled import FAMILIES, LLADA
from torch import Tensor, nn

import mosaic
from mosaic.bench import Settings
from mosaic.bench.baselines import Experts, Transformer
from mosaic.bench.inputs import make_inputs, masked_rows
from mosaic.bench.limits import largest
from mosaic.bench.meters import alive_over_time, profiled
from mosaic.bench.sdpa import choose
from mosaic.errors import UsageError
from mosaic.models import load
from mosaic.planner import Request
from mosaic.runtime.weights import fill_randomly

BOUND = 1e-5


def baseline(family: str, experts: Experts = "loop", dtype: torch.dtype = torch.float32) -> Transformer:
    """A tiny baseline with weights large enough that a wrong rotation, norm or expert shows."""
    model = load(FAMILIES[family][0])
    made = Transformer(model.architecture, dtype=dtype, wide_rotary=model.family == "llada", experts=experts)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in made.tensors.items():
        tensor.normal_(1.0 if "norm" in name or "ln_f" in name else 0.0, 0.12, generator=generator)
    return made


def stock(family: str, made: Transformer) -> nn.Module:
    """The stock transformers class with the same weights."""
    config, reference = FAMILIES[family]
    build: Callable[[Any], nn.Module] = reference
    return build(SimpleNamespace(model=load(config), _weights=made.tensors)).eval()


def sequence(family: str, tokens: int = 53) -> Tensor:
    ids = make_inputs(load(FAMILIES[family][0]).architecture, tokens, 0.4, seed=3).token_ids
    return ids[None]


# --- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "experts"), [("llada", "loop"), ("dream", "loop"), ("moe", "loop"), ("moe", "grouped")]
)
def test_a_baseline_has_the_stock_models_logits(family: str, experts: Experts) -> None:
    made, ids = baseline(family, experts), sequence(family)
    with torch.no_grad():
        expected = stock(family, made)(input_ids=ids, attention_mask=torch.zeros(1, 1, 53, 53), use_cache=False).logits
        found = made.logits(ids)
    assert float((found - expected).abs().max()) <= BOUND * float(expected.abs().max())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_baseline_predicts_the_masked_positions(family: str) -> None:
    made, ids = baseline(family), sequence(family)
    rows = (ids[0] == made.arch.mask_token_id).nonzero()[:, 0]
    with torch.no_grad():
        logits = made.logits(ids)[0].double()
        token, confidence = made(ids)
    source = (rows - 1).clamp(min=0) if family == "dream" else rows  # row i-1 predicts position i
    assert len(rows) == masked_rows(53, 0.4) and torch.equal(token, logits[source].argmax(1))
    torch.testing.assert_close(confidence.double(), logits[source].softmax(1).amax(1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_baselines_tensors_are_the_checkpoints(family: str, tmp_path: Path) -> None:
    """Names and shapes are those of the plan's weights, so that one seed gives both the same values."""
    model = load(FAMILIES[family][0])
    document = mosaic.plan(model, tokens=8, device="cpu").document
    planned = {
        b["tensor"]: tuple(b["shape"]) for b in document["buffers"] if b["tensor"] and not b["tensor"].startswith("=")
    }
    made = Transformer(model.architecture)
    assert {name: tuple(tensor.shape) for name, tensor in made.tensors.items()} == planned
    fill_randomly(made.tensors)
    assert all(torch.isfinite(parameter).all() for parameter in made.parameters())
    assert {tensor.data_ptr() for tensor in made.tensors.values()} == {p.data_ptr() for p in made.parameters()}


def test_rotary_width_matters_in_bfloat16() -> None:
    """LLaDA rotates in float32 whatever its dtype: a baseline that did not would be another model."""
    model = load(LLADA)
    logits = []
    for wide in (True, False):
        made = Transformer(model.architecture, dtype=torch.bfloat16, wide_rotary=wide)
        fill_randomly(made.tensors)
        assert made.angles(5)[0].dtype == (torch.float32 if wide else torch.bfloat16)
        with torch.no_grad():
            logits.append(made.logits(sequence("llada")))
    assert logits[0].dtype == torch.bfloat16 and not torch.equal(*logits)


# --- inputs, settings, bisection ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0])
def test_inputs_mask_what_a_request_masks(ratio: float) -> None:
    arch = load(LLADA).architecture
    for tokens in (1, 7, 1000):
        inputs = make_inputs(arch, tokens, ratio, seed=1)
        masked = int((inputs.token_ids == arch.mask_token_id).sum())
        assert masked == inputs.masked == Request(seq_lens=(tokens,), mask_ratio=ratio).dims()["masked"]
        assert int(inputs.token_ids.min()) >= 0 and int(inputs.token_ids.max()) < arch.vocabulary
        assert torch.equal(inputs.token_ids, make_inputs(arch, tokens, ratio, seed=1).token_ids)


def test_settings_survive_json_and_refuse_nonsense() -> None:
    settings = Settings(
        model="m", device="cpu", contexts=(1, 2), mask_ratios=(0.1,), config={"head": "fused", "ffn": None}
    )
    assert Settings.from_json(settings.to_json()) == settings
    for wrong in (
        {"contexts": ()}, {"contexts": (0,)}, {"mask_ratios": (0.0,)}, {"mask_ratios": (1.5,)}, {"engines": ("eager",) * 2},
        {"engines": ("magic",)}, {"attention": "telepathy"}, {"repeats": 0},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            Settings(**{"model": "m", "device": "cpu", "contexts": (1,), **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 7])
def test_bisection_finds_the_largest_from_any_guess(step: int) -> None:
    for limit in range(0, 60, 3):
        for guess in (0, 1, 10, 50, 200):
            tried: list[int] = []

            def runs(tokens: int, limit: int = limit, tried: list[int] = tried) -> bool:
                tried.append(tokens)
                return tokens <= limit

            assert largest(runs, guess=guess, step=step, most=50) == min(limit, 50) // step * step
            assert len(set(tried)) == len(tried) and all(0 < t <= 50 and t % step == 0 for t in tried)


def test_a_good_guess_saves_tries() -> None:
    tried: list[int] = []

    def runs(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= 19000

    assert largest(runs, guess=18000, step=256, most=1 << 20) == 18944 and len(tried) <= 6


# --- meters -----------------------------------------------------------------------------------------------------------


def test_what_is_alive_is_measured_by_the_allocators_events() -> None:
    def step() -> None:
        for size in (1_000_000, 500_000):
            x = torch.ones(size, dtype=torch.float32)
            y = x * 2
            del x, y

    step()
    alive = alive_over_time(profiled(step, cuda=False), cuda=False)
    assert alive is not None
    peak, average = alive
    assert 8_000_000 <= peak < 8_000_100 and 0 < average < peak  # and the scalar 2


def event(name: str, at: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "ts": at, **more}


def allocation(at: float, size: int) -> dict[str, Any]:
    return event("[memory]", at, args={"Bytes": size, "Device Type": 1, "Device Id": 0})


def test_on_a_card_memory_counts_from_the_work_before_it() -> None:
    """The host allocates at once and the card computes later: times are the card's."""
    trace = {
        "traceEvents": [
            allocation(0.5, 100),
            event("cudaLaunchKernel", 1.0, cat="cuda_runtime", dur=0.1, args={"correlation": 1}),
            allocation(1.5, 300),
            event("cuLaunchKernelEx", 2.0, cat="cuda_driver", dur=0.1, args={"correlation": 2}),
            allocation(2.5, -100),
            allocation(2.6, -300),
            event("first", 10.0, cat="kernel", dur=10.0, args={"correlation": 1}),
            event("second", 20.0, cat="kernel", dur=30.0, args={"correlation": 2}),
            event("[memory]", 0.1, args={"Bytes": 10**9, "Device Type": 0, "Device Id": -1}),
            event("no time", math.nan, ph="M", args={}),
        ]
    }
    assert alive_over_time(trace, cuda=True) == (400, (100 * 10 + 400 * 30) / 40)
    assert alive_over_time({"traceEvents": [allocation(0.5, 100)]}, cuda=True) is None
    assert alive_over_time({"traceEvents": []}, cuda=False) is None


def test_attention_on_a_cpu_is_pytorchs_own_choice() -> None:
    arch = load(LLADA).architecture
    choice = choose("fastest", arch, 64, torch.float32, torch.device("cpu"))
    assert choice["forced"] is None and choice["used"] == choice["default"] == "flash"
    assert choose("math", arch, 64, torch.float32, torch.device("cpu"))["forced"] == "math"
