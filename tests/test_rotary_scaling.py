"""Rotary scaling against stock transformers classes: frequencies to the last digits, logits to 1e-5 of their scale."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from stock_models import stock_logits, stock_model
from torch import Tensor
from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mosaic
from benchmarks.bench.baselines import Transformer
from mosaic.decoding import generate
from mosaic.decoding.canvas import COMMIT
from mosaic.errors import CheckpointError, UnsupportedModel, UsageError
from mosaic.models import load
from mosaic.models.architecture import Architecture
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.models.rotary import Rotary, read_rotary
from mosaic.planner.check import check_plan
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.frequencies import inverse_frequencies
from mosaic.runtime.steps import StepRequest
from mosaic.runtime.weights import fill_randomly, load_weights

LONG = 48
"""Positions that the tiny models are made for; sequences of the tests are shorter and longer."""
COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97,
    "rms_norm_eps": 1e-6, "max_position_embeddings": LONG, "mask_token_id": 96, "torch_dtype": "float32",
    "rope_theta": 10000.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "mlp_hidden_size": 48,
        "vocab_size": 97, "rope_theta": 10000.0, "max_sequence_length": LONG, "mask_token_id": 96,
        "torch_dtype": "float32",
    },
    "dream": {"model_type": "Dream", "intermediate_size": 48, **COMMON},
    "fast-dllm-v2": {"model_type": "Fast_dLLM_Qwen", "intermediate_size": 48, "bd_size": 8, **COMMON},
    "sdar": {"model_type": "sdar", "intermediate_size": 48, "head_dim": 16, "block_size": 8, **COMMON},
    "llada-moe": {
        "model_type": "lladamoe", "expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, **COMMON,
    },
    "llada2": {
        "model_type": "llada2_moe", "intermediate_size": 48, "head_dim": 16, "block_size": 8, **COMMON,
        "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn, all said": {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 40, "beta_fast": 8.0, "beta_slow": 2.0,
        "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False,
    },
    "yarn, attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.7},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
CASES = [
    *(("dream", name) for name in SCALINGS),
    ("llada", "dynamic"),
    ("llada-moe", "yarn, all said"),
    ("sdar", "yarn"),
    ("fast-dllm-v2", "yarn, attention factor"),
    ("llada2", "dynamic"),
]
MORE_CASES = [
    ("llada", "yarn"), ("llada-moe", "linear"), ("sdar", "dynamic"), ("fast-dllm-v2", "linear"), ("llada2", "yarn"),
    ("llada2", "linear"),
]  # fmt: skip
LENGTHS = (LONG + 61, 19, LONG, LONG + 3)
"""Beyond the model's positions, well within, exactly there, and just beyond: of one packed step."""


def enlarge(model: CompiledModel) -> None:
    """Draw weights under which attention looks far and near."""
    generator = torch.Generator().manual_seed(7)
    for name, view in model.weights().items():
        if not name.startswith("="):
            deviation = 0.25 if "weight" in name and "norm" not in name else 0.2
            view.normal_(1.0 if "norm" in name else 0.0, deviation, generator=generator)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 96, (length,), generator=generator) for length in LENGTHS]


def all_logits(model: CompiledModel, ids: list[Tensor]) -> list[Tensor]:
    """Logits of every row of each sequence, of one packed step."""
    step = model(ids, masked=torch.arange(1), logits_for=torch.arange(sum(map(len, ids))))
    assert step.logits is not None
    return list(step.logits.clone().split([len(one) for one in ids]))


@pytest.mark.some
@pytest.mark.parametrize(
    ("family", "scaling"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_CASES)]
)
def test_scaled_families_equal_stock_classes(family: str, scaling: str, tmp_path: Path) -> None:
    given, ids = SCALINGS[scaling], sequences()
    with mosaic.compile(CONFIGS[family] | {"rope_scaling": given}, debug="poison") as model:
        enlarge(model)
        arch = model.architecture
        found = all_logits(model, ids)
        base = {"rope_theta": 10000.0, **({"partial_rotary_factor": 0.5} if family == "llada2" else {})}
        scaled = stock_model(model, tmp_path, rope_parameters={**base, **given})
        plain = stock_model(model, tmp_path, rope_parameters={**base, "rope_type": "default"})
        for one, logits in zip(ids, found, strict=True):
            expected, other = (stock_logits(module, one, arch.block) for module in (scaled, plain))
            scale = float(expected.abs().max())
            changed = float((expected - other).abs().max()) > 1e-3 * scale
            assert changed == (scaling != "dynamic" or len(one) > LONG)
            # row i of a shifted family is the official row i - 1
            difference = logits[1:] - expected[:-1] if arch.shifted else logits - expected
            assert float(difference.abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("form", ["rope_scaling", "rope_scaling, old", "rope_parameters", "both"])
def test_the_same_scaling_in_either_form_is_the_same_model(form: str) -> None:
    new = {"rope_type": "linear", "factor": 3.0}
    forms: dict[str, dict[str, Any]] = {
        "rope_scaling": {"rope_scaling": new},
        "rope_scaling, old": {"rope_scaling": {"type": "linear", "factor": 3}},
        "rope_parameters": {"rope_parameters": {**new, "rope_theta": 500.0}, "rope_theta": None},
        "both": {"rope_scaling": new, "rope_parameters": {**new, "rope_theta": 500.0}},
    }
    arch = load(CONFIGS["dream"] | {"rope_theta": 500.0} | forms[form]).architecture
    assert arch.rotary == Rotary(theta=500.0, dim=16, kind="linear", factor=3.0) and arch.attention.rotary_scale == 1.0
    own = load(CONFIGS["dream"] | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}).architecture
    assert own.rotary == Rotary(theta=77.0, dim=16)  # rope_parameters come before rope_theta, as in transformers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "'rope_scaling' of type 'longrope' is not supported; known: default, ",
        ),
        ({"rope_type": "mrope", "mrope_section": [1]}, "of type 'mrope' is not supported"),
        ({"rope_type": ["yarn"]}, "is not supported"),
        ({"rope_type": "linear"}, "of type 'linear' has no 'factor'"),
        ({"rope_type": "linear", "factor": 0.5}, "'factor' must be a number of at least 1, got 0.5"),
        ({"rope_type": "linear", "factor": "4"}, "'factor' must be a number of at least 1, got '4'"),
        ({"rope_type": "linear", "factor": float("nan")}, "'factor' must be a number of at least 1"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "of type 'linear' has no 'beta_fast'; remove it"),
        (
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 4.0},
            "'beta_fast' must be above 'beta_slow'",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "'attention_factor' must be a number above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "'truncate' must be true or false"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -1}, "must be a positive integer"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs 'low_freq_factor' and 'high_freq_factor'"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 12}, "48 with dynamic scaling"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "'rope_type' 'yarn' and 'type' 'linear'; keep one"),
        ({"full_attention": {"rope_type": "default"}}, "'rope_scaling' by type of layer is not supported"),
        ("yarn", "'rope_scaling' must be an object"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(CONFIGS["dream"] | {"rope_scaling": given})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("before", [None, "rope_scaling", "rope_parameters"])
def test_a_model_takes_another_scaling_than_its_config_says(family: str, before: str | None) -> None:
    """The same as if the config had said it; base, share of dims that turn and dtype stay."""
    own = CONFIGS[family] | ({} if before is None else {before: SCALINGS["linear"]}) | {"rope_theta": 500.0}
    model = load(own).with_dtype("bfloat16")
    for scaling in ("linear", "dynamic", "yarn"):
        said = CONFIGS[family] | {"rope_theta": 500.0, "rope_scaling": {"rope_type": scaling, "factor": 6.0}}
        assert model.with_rope_scaling(scaling, 6.0).architecture == load(said).with_dtype("bfloat16").architecture


def test_trained_positions_outlast_another_scaling() -> None:
    """The config of a model that was made longer says them in its own scaling only."""
    scaled = load(CONFIGS["dream"] | {"rope_scaling": SCALINGS["yarn"]}).with_rope_scaling("yarn", 8)
    assert scaled.architecture.rotary.original == 24 and scaled.architecture.max_context == 192


def test_two_scalings_that_differ_are_refused() -> None:
    both = {"rope_scaling": SCALINGS["linear"], "rope_parameters": SCALINGS["dynamic"]}
    with pytest.raises(UnsupportedModel, match="'rope_scaling' and 'rope_parameters' differ"):
        load(CONFIGS["dream"] | both)


# --- frequencies ------------------------------------------------------------------------------------------------------


@st.composite
def scalings(draw: st.DrawFn) -> tuple[dict[str, Any], int, float, int]:
    """A scaling that stock code takes, with positions, base and a head's size."""
    kind = draw(st.sampled_from(["linear", "dynamic", "yarn", "llama3"]))
    positions = draw(st.sampled_from([64, 4096, 32768, 131072]))
    given: dict[str, Any] = {"rope_type": kind, "factor": draw(st.floats(1.0, 64.0))}
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": st.sampled_from([64, 4096, 32768]), "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.25, 4.0), "truncate": st.booleans(), "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.5, 2.0), "mscale_all_dim": st.floats(0.5, 2.0),
        }  # fmt: skip
        given |= draw(st.fixed_dictionaries({}, optional=optional))
    if kind == "llama3":
        given |= {"low_freq_factor": draw(st.floats(0.5, 2.0)), "high_freq_factor": draw(st.floats(3.0, 8.0))}
        given["original_max_position_embeddings"] = draw(st.sampled_from([64, 8192]))
    return given, positions, draw(st.sampled_from([500.0, 10000.0, 1e6])), draw(st.sampled_from([4, 64, 128]))


def cancelled(given: dict[str, Any], positions: int, size: int, length: int) -> float:
    """The float32 error of stock code, which raises `factor * length / positions - (factor - 1)`, rounded twice, to a power."""
    if given["rope_type"] != "dynamic" or length <= positions:
        return 0.0
    stretched = given["factor"] * length / positions
    return 2 * 2.0**-24 * stretched / (stretched - (given["factor"] - 1)) * size / (size - 2)


@settings(max_examples=60, deadline=None)
@given(scalings(), st.integers(1, 300_000))
@example(({"rope_type": "dynamic", "factor": 15.57}, 4096, 10000.0, 4), 4215)
def test_frequencies_are_those_of_transformers(case: tuple[dict[str, Any], int, float, int], length: int) -> None:
    given, positions, theta, size = case
    stock = Qwen2Config(hidden_size=2 * size, num_attention_heads=2, max_position_embeddings=positions)
    stock.head_dim, stock.rope_parameters = size, {"rope_theta": theta, **given}
    expected, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](
        stock, "cpu", seq_len=torch.tensor(length) if length > positions else None
    )  # stock modules compute them anew beyond the positions only
    assume(bool(expected.isfinite().all()))
    config = {"rope_theta": theta, "rope_scaling": given}
    rotary, scale = read_rotary(config, size, positions, theta=1.0)
    assert scale == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(
        inverse_frequencies(rotary, length), expected, rtol=5e-7 + cancelled(given, positions, size, length), atol=0
    )
    assert Rotary.parse(rotary.constant) == rotary


@pytest.mark.parametrize(
    "constant",
    [
        "=inv_freq:theta=10000.0,dim=64,kind=cubic", "=inv_freq:theta=10000.0", "=inv_freq:dim=64,theta=10000.0",
        "=inv_freq:theta=1e4,dim=64", "=inv_freq:theta=10000.0,dim=64,kind=default", "=ones",
        "=inv_freq:theta=10000.0,dim=64,truncate=2", "=inv_freq:theta=10000.0,dim=64,dim=64", "=inv_freq:",
    ],
)  # fmt: skip
def test_a_constant_that_this_version_does_not_write_is_refused(constant: str) -> None:
    assert Rotary.parse(constant) is None
    with pytest.raises(CheckpointError, match="is unknown; plan again"):
        fill_randomly({constant: torch.empty(32)})


# --- cached steps -----------------------------------------------------------------------------------------------------


@pytest.mark.grid(together=1)
@pytest.mark.parametrize(("family", "algorithm"), [("sdar", "sdar"), ("llada2", "llada2")])
@pytest.mark.parametrize("scaling", ["yarn", "linear", "dynamic"])
def test_cached_steps_turn_as_whole_ones_do(family: str, algorithm: str, scaling: str) -> None:
    """A block decided in one step over kept keys has the tokens and confidences of a step over everything."""
    prompt = sequences()[0][:80]
    with mosaic.compile(CONFIGS[family] | {"rope_scaling": SCALINGS[scaling]}) as model:
        enlarge(model)
        found = generate(
            model, prompt, algorithm=algorithm, gen_length=8, steps=1, threshold=1e-6, stop_at_eos=False
        )[0]  # fmt: skip
        step = model(torch.cat([prompt, torch.full((8,), 96)]))
        assert torch.equal(found.token_ids, step.token_ids) and found.steps == 2  # the prefill and one more
        torch.testing.assert_close(found.confidence, step.confidence, rtol=1e-4, atol=1e-5)


MAGE = SparseAttention(k=16, page=2, exact_layers=1)
EVERY = replace(MAGE, selects="every")
BLOCKWISE: dict[str, Any] = {"gen_length": 24, "stop_at_eos": False}
STATIC: dict[str, Any] = {**BLOCKWISE, "steps": 3, "remasking": "low_confidence_static"}
CACHED: dict[str, Any] = {**BLOCKWISE, "algorithm": "fast-dllm", "block_length": 8}


@pytest.mark.grid(together=1)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("sdar", STATIC, id="sdar", marks=pytest.mark.soak),
        pytest.param("sdar", {**STATIC, "attention": MAGE}, id="sdar, mage"),
        pytest.param(
            "llada2",
            {**BLOCKWISE, "attention": replace(MAGE, selects="every")},
            id="llada2, oracle",
            marks=pytest.mark.soak,
        ),
        pytest.param("fast-dllm-v2", {**BLOCKWISE, "cache": "dual"}, id="fast-dllm-v2, dual"),
        pytest.param("dream", {**CACHED, "cache": "dual"}, id="dream, dual"),
        pytest.param("llada", {**CACHED, "cache": "prefix"}, id="llada, prefix", marks=pytest.mark.soak),
    ],
)
def test_kept_keys_turn_by_the_frequencies_of_the_final_length(family: str, options: dict[str, Any]) -> None:
    """Requests of several lengths share steps; each is generated as by a model whose base is that of its own final length."""
    prompts = [sequences()[0][:length] for length in (70, 9)]
    with mosaic.compile(CONFIGS[family] | {"rope_scaling": SCALINGS["dynamic"]}, debug="poison") as model:
        enlarge(model)
        arch, most = model.architecture, 0
        with model.session() as session:
            requests = [session.submit(prompt, **options) for prompt in prompts]
            while session.live:
                most = max(most, len(session.advance()))
    assert most == len(prompts)
    for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        length = (
            -(-(len(prompt) + options["gen_length"]) // 8) * 8 if arch.block else len(prompt) + options["gen_length"]
        )
        positions = "max_sequence_length" if family == "llada" else "max_position_embeddings"
        with mosaic.compile(CONFIGS[family] | {"rope_theta": stock_base(arch, length), positions: 4 * LONG}) as fixed:
            enlarge(fixed)
            alone = generate(fixed, prompt, request_ids=[place], **options)[0]
        found = request.generation
        assert found is not None and torch.equal(found.token_ids, alone.token_ids) and found.steps == alone.steps
        torch.testing.assert_close(found.confidence, alone.confidence, rtol=1e-3, atol=1e-5)


def stock_base(arch: Architecture, length: int) -> float:
    """The base of stock dynamic scaling at a length: the second pair turns by base^(-2 / dims)."""
    dims = arch.rotary.dim
    stock = Qwen2Config(hidden_size=2 * dims, num_attention_heads=2, max_position_embeddings=LONG)
    stock.head_dim, stock.rope_parameters = dims, {"rope_theta": 10000.0, **SCALINGS["dynamic"]}
    turned = ROPE_INIT_FUNCTIONS["dynamic"](stock, "cpu", seq_len=torch.tensor(length))[0]
    return float(turned[1].double() ** (-dims / 2))


def test_small_steps_at_once_turn_each_sequence_by_its_own_frequencies() -> None:
    """Rotation and store in one op do what they do apart."""
    nothing, block = torch.empty(0, dtype=torch.int64), torch.full((8,), 96)
    denoise = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
    with mosaic.compile(CONFIGS["sdar"] | {"rope_scaling": SCALINGS["dynamic"]}, debug="poison") as model:
        enlarge(model)
        asked = []
        for length, final in ((72, 96), (16, 24), (64, 72)):
            owned, prompt = model.open_sequence(), sequences()[0][:length]
            owned.reserve(length + 8)
            model.step([
                StepRequest(phase=COMMIT, token_ids=prompt, sequence=owned, key_len=length, final_length=final, rows=nothing,
                            current=nothing)
            ])  # fmt: skip
            asked.append(
                StepRequest(phase=denoise, token_ids=block, start=length, sequence=owned, key_len=length + 8,
                            final_length=final, rows=torch.arange(8), current=block, quota=8)
            )  # fmt: skip
        apart, fused = (model.step(asked, config={"products": way}) for way in ("apart", "fused"))
        assert "rotary_store" in {op["kernel"] for op in fused[0].plan.document["ops"]}
        assert check_plan(fused[0].plan.document) == []
        for one, other in zip(apart, fused, strict=True):
            assert torch.equal(one.token, other.token)
            torch.testing.assert_close(one.score, other.score, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "keys", "final", "refused"),
    [
        ("dynamic", LONG + 1, 0, True), ("dynamic", LONG + 1, LONG, True), ("dynamic", LONG + 1, LONG + 1, False),
        ("dynamic", LONG, 0, False), ("yarn", LONG + 1, 0, False),
    ],
)  # fmt: skip
def test_kept_keys_beyond_the_trained_positions_need_a_final_length(
    scaling: str, keys: int, final: int, refused: bool
) -> None:
    """Where frequencies go by it."""
    nothing = torch.empty(0, dtype=torch.int64)
    with (
        mosaic.compile(CONFIGS["dream"] | {"rope_scaling": SCALINGS[scaling]}) as model,
        model.open_sequence() as owned,
    ):
        owned.reserve(keys)
        request = StepRequest(
            phase=COMMIT, token_ids=sequences()[0][:keys], sequence=owned, key_len=keys, final_length=final, rows=nothing,
            current=nothing,
        )  # fmt: skip
        said = f"over {keys} keys with rope_scaling of type 'dynamic', of a sequence whose final_length is {final}:"
        with pytest.raises(UsageError, match=said) if refused else nullcontext():
            model.step([request])


@pytest.mark.some
@pytest.mark.parametrize("scaling", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_a_prompt_that_is_too_long_says_which_scaling_takes_it(scaling: str) -> None:
    """The stated factor is enough, and one less is not."""
    config = CONFIGS["dream"] | ({} if scaling == "default" else {"rope_scaling": SCALINGS[scaling]})
    prompt = sequences()[0].repeat(4)[:403]
    options: dict[str, Any] = {"gen_length": 8, "algorithm": "fast-dllm", "cache": "dual"}
    with (
        mosaic.compile(config) as model,
        pytest.raises(UsageError, match="take 411 positions, the model has ") as raised,
    ):
        generate(model, prompt, **options)
    said = str(raised.value).removesuffix(".").partition(", or ")[2]
    if scaling == "default":
        given = json.loads(said.removeprefix("set rope_scaling in its config.json to "))
        assert given["rope_type"] == "yarn"
    else:
        given = {**SCALINGS[scaling], "factor": int(said.removeprefix("raise the factor of its rope_scaling to "))}
    with mosaic.compile(CONFIGS["dream"] | {"rope_scaling": given}) as model:
        assert len(generate(model, prompt, **options)[0].token_ids) == 8
    less = CONFIGS["dream"] | {"rope_scaling": {**given, "factor": given["factor"] - 1}}
    assert load(less).architecture.max_context < 411


@pytest.mark.parametrize("scaling", ["dynamic", "yarn"])
def test_guided_and_batched_steps_are_those_of_one_sequence(scaling: str) -> None:
    """With guidance a step has two sequences a request, each with frequencies of its own."""
    prompts = [ids[:length] for ids, length in zip(sequences(), (70, 9), strict=False)]
    options: dict[str, Any] = {
        "algorithm": "llada",
        "gen_length": 8,
        "steps": 2,
        "cfg_scale": 1.5,
        "stop_at_eos": False,
    }
    with mosaic.compile(CONFIGS["llada"] | {"rope_scaling": SCALINGS[scaling]}) as model:
        enlarge(model)
        together = generate(model, prompts, **options)
        for prompt, answer in zip(prompts, together, strict=True):
            assert torch.equal(generate(model, prompt, **options)[0].token_ids, answer.token_ids)


@pytest.mark.parametrize("scaling", ["dynamic", "yarn"])
def test_the_benchmarks_baseline_takes_the_scaling_too(scaling: str, tmp_path: Path) -> None:
    with mosaic.compile(CONFIGS["llada2"] | {"rope_scaling": SCALINGS[scaling]}) as model:
        enlarge(model)
        model.save(tmp_path)
        ids = sequences()[0]
        made = Transformer(load(tmp_path).architecture)
        with mosaic.runtime.checkpoint.Checkpoint(tmp_path) as checkpoint:
            load_weights(made.tensors, checkpoint)
        with torch.no_grad():
            expected = made.logits(ids[None])[0]
        found = all_logits(model, [ids])[0]
        assert check_plan(model.plan(len(ids)).document) == []
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
