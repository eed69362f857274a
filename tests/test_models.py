"""The shipped families: sizes, tensor names, parameter counts, configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mosaic.decoding import GenerationConfig, resolve
from mosaic.decoding.config import own_algorithm
from mosaic.errors import CheckpointError, UnknownName, UnsupportedModel
from mosaic.models import PRESETS, load
from mosaic.models.parts import LOGITS
from mosaic.models.phase import Phase
from mosaic.registrar.validate import validate

# Parameters of the released checkpoints, from their published shapes.
PARAMETERS = {
    "llada-8b": 8_015_581_184,
    "dream-7b": 7_615_616_512,
    "llada-moe": 7_356_880_896,
    "sdar-8b": 8_190_735_360,
    "sdar-4b": 4_411_424_256,
    "sdar-1.7b": 2_031_739_904,
    "fast-dllm-v2-7b": 7_615_616_512,
    "fast-dllm-v2-1.5b": 1_543_714_304,
    "llada2-mini": 16_255_643_392,
}


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_those_of_the_checkpoint(name: str) -> None:
    graph = load(name).graph()
    weights = [b for b in graph.buffers if b.kind == "weight" and b.tensor and not b.tensor.startswith("=")]
    assert sum(int(b.spec.elements) for b in weights) == PARAMETERS[name]
    assert len({b.tensor for b in weights}) == len(weights)


@pytest.mark.some
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("choices", [{"head": "logits"}, {"head": "fused", "attention": "heads"}])
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
@pytest.mark.parametrize("logits", [False, True])
def test_every_variant_validates(name: str, choices: dict[str, str], backend: str, logits: bool) -> None:
    from mosaic.registrar.operators import OPERATORS

    graph = load(name).graph(backend=backend, choices=choices, phase=Phase(logits=LOGITS if logits else None))
    validate(graph, kernels=OPERATORS)
    assert ("logits" in {buffer.name for buffer in graph.buffers}) == logits


def test_sdar_has_the_bytes_that_its_index_says() -> None:
    weights = [b for b in load("sdar-8b").graph().buffers if b.kind == "weight"]
    assert sum(int(b.spec.bytes) for b in weights if not b.tensor.startswith("=")) == 16_381_470_720


def test_llada2_takes_its_projections_from_one_tensor() -> None:
    graph = load("llada2-mini").graph()
    fused = "model.layers.7.attention.query_key_value.weight"
    shapes = {b.tensor: b.shape for b in graph.buffers if b.tensor and b.tensor.startswith(fused)}
    assert shapes == {
        f"{fused}[0:2048]": (2048, 2048),
        f"{fused}[2048:2560]": (512, 2048),
        f"{fused}[2560:3072]": (512, 2048),
    }
    biased = next(b for b in graph.buffers if b.tensor == "model.layers.7.mlp.gate.expert_bias")
    assert biased.spec.dtype == "float32"


def test_the_first_layers_of_llada2_are_dense_and_the_others_share_an_expert() -> None:
    config = dict(PRESETS["llada2-mini"][1]) | {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    graph = load(config).graph()
    routed = [op.name.split("/")[0] for op in graph.ops if op.operator.name == "moe_route"]
    assert routed == ["layers.2", "layers.3"]
    assert [op.name for op in graph.ops if op.name.endswith("shared_down")] == [
        f"layers.{i}/shared_down" for i in (2, 3)
    ]
    (inv_freq,) = (b for b in graph.buffers if (b.tensor or "").startswith("="))
    assert inv_freq.tensor == "=inv_freq:theta=600000.0,dim=64" and inv_freq.shape == (32,)


def test_a_router_without_extras_is_registered_as_ever() -> None:
    (route, *_) = (op for op in load("llada-moe").graph().ops if op.operator.name == "moe_route")
    assert dict(route.attrs) == {"top_k": 8, "normalize": False}
    plain = {"n_group": 1, "routed_scaling_factor": 1.0, "num_shared_experts": 0, "use_qkv_bias": True}
    graph = load(dict(PRESETS["llada2-mini"][1]) | plain).graph()
    route = next(op for op in graph.ops if op.operator.name == "moe_route")
    assert dict(route.attrs) == {"top_k": 8, "normalize": True, "scoring": "sigmoid"}
    assert not any("shared" in op.name for op in graph.ops)
    assert any(b.tensor == "model.layers.0.attention.query_key_value.bias[2048:2560]" for b in graph.buffers)


@pytest.mark.parametrize(
    ("name", "block", "shifted", "mask", "eos", "pad"),
    [
        ("llada-8b", 0, False, 126336, (126081, 126348), 126081),
        ("dream-7b", 0, True, 151666, (151643, 151645), 151643),
        ("llada-moe", 0, False, 156895, (156892,), 156892),
        ("sdar-8b", 4, False, 151669, (151643, 151645), 151643),
        ("fast-dllm-v2-7b", 32, True, 151665, (151645,), 151643),
        ("llada2-mini", 32, False, 156895, (156892,), 156892),
    ],
)
def test_special_tokens_and_masks(
    name: str, block: int, shifted: bool, mask: int, eos: tuple[int, ...], pad: int
) -> None:
    arch = load(name).architecture
    assert (arch.block, arch.shifted, arch.mask_token_id) == (block, shifted, mask)
    assert (arch.eos_token_ids, arch.pad_token_id) == (eos, pad)


def test_a_config_says_its_own_special_tokens() -> None:
    config = dict(PRESETS["sdar-8b"][1])
    one = load(config | {"eos_token_id": 7, "pad_token_id": 8, "block_size": 16, "mask_token_id": 9}).architecture
    assert (one.eos_token_ids, one.pad_token_id, one.block, one.mask_token_id) == ((7, 151645), 8, 16, 9)
    assert load(config | {"eos_token_id": [3, 4]}).architecture.eos_token_ids == (3, 4)  # a list is all of them


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sdar-8b", {"attention_bias": True}, "SDAR with 'attention_bias'"),
        ("sdar-8b", {"rope_scaling": {"factor": 4}}, "'rope_scaling' of type 'default' has no 'factor'"),
        ("sdar-8b", {"block_size": 0}, "'block_size' must be a positive integer"),
        ("sdar-8b", {"eos_token_id": "</s>"}, "'eos_token_id' must be a token id below 151936, .*, got '</s>'"),
        ("fast-dllm-v2-7b", {"use_sliding_window": True}, "Fast-dLLM v2 with 'use_sliding_window'"),
        ("llada2-mini", {"norm_head": True}, "LLaDA2 with 'norm_head'"),
        ("llada2-mini", {"score_function": "tanh"}, "'score_function' 'tanh' is not supported, it must be 'sigmoid'"),
        ("llada2-mini", {"n_group": 7}, "256 experts do not divide into 7 groups"),
        ("llada2-mini", {"n_group": 256}, "256 experts do not divide into 256 groups of two or more"),
        ("llada2-mini", {"n_group": 64, "topk_group": 1}, "1 of 64 groups do not hold 8 of 256 experts"),
        ("llada2-mini", {"partial_rotary_factor": 2.0}, "above 0 and at most 1, got 2.0"),
    ],
)
def test_what_a_family_does_not_have_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(dict(PRESETS[name][1]) | changes)


def test_logits_exist_only_in_the_logits_variant() -> None:
    fused = load("llada-8b").graph(choices={"head": "fused"})
    assert not any(126464 in b.shape and b.kind == "transient" for b in fused.buffers)


def test_dream_shifts_row_indices_and_never_logits() -> None:
    graph = load("dream-7b").graph()
    assert [op.operator.name for op in graph.ops].count("shift_rows") == 1
    assert not any(op.operator.name == "shift_rows" for op in load("llada-8b").graph().ops)


def write_config(tmp_path: Path, **changes: Any) -> Path:
    config = dict(PRESETS["dream-7b"][1]) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_directory_is_read_like_a_preset(tmp_path: Path) -> None:
    model = load(
        write_config(tmp_path, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    )
    assert model.family == "dream" and model.architecture.layers == 2 and model.path == tmp_path
    assert load(tmp_path / "config.json").architecture == model.architecture


def test_llada_moe_is_told_by_its_architecture(tmp_path: Path) -> None:
    config = dict(PRESETS["llada-moe"][1]) | {"model_type": "llada"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).family == "llada-moe"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            r"'gpt2'; supported: llada, dream, llada-moe.*README",
        ),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": -4}, "'hidden_size' must be a positive integer"),
        ({"num_hidden_layers": "28"}, "'num_hidden_layers' must be a positive integer"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"rope_theta": "fast"}, "'rope_theta' must be a number above 1"),
        ({"torch_dtype": "float3"}, "'torch_dtype' must be a floating-point dtype"),
    ],
)
def test_unusable_configs_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(write_config(tmp_path, **changes))


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        load(tmp_path)


LLADA2 = dict(PRESETS["llada2-mini"][1]) | {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("directory", "change", "code", "algorithm"),
    [
        ("a", {}, None, "llada2"),
        ("a", {"model_type": "llada21_moe"}, None, "llada2.1"),
        ("a", {"_name_or_path": "inclusionAI/LLaDA2.1-mini"}, None, "llada2.1"),
        ("LLaDA2.1-mini", {}, None, "llada2.1"),
        ("LLaDA2.0-mini", {}, None, "llada2"),
        ("models--inclusionAI--LLaDA2.1-flash/snapshots/0123abc", {}, None, "llada2.1"),
        ("LLaDA2-16B", {}, None, "llada2"),
        ("LLaDA2.1-mini/LLaDA2.0-mini", {}, None, "llada2"),
        ("a", {}, "def generate(self, threshold=0.95, editing_threshold=0.9): ...", "llada2.1"),
        ("LLaDA2.1-mini", {}, "def generate(self, threshold=0.95): ...", "llada2"),
    ],
)
def test_which_llada2_edits(
    tmp_path: Path, directory: str, change: dict[str, Any], code: str | None, algorithm: str
) -> None:
    folder = tmp_path / "checkpoints" / "here" / "b" / directory
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLADA2 | change))
    if code is not None:
        (folder / "modeling_llada2_moe.py").write_text(code)
    model = load(folder)
    assert own_algorithm(model.architecture) == algorithm
    assert resolve(GenerationConfig(gen_length=64), model.architecture).algorithm == algorithm
    assert own_algorithm(load(dict(model.config)).architecture) == algorithm  # as a saved copy says it
    for other in ("llada2", "llada2.1"):  # either may be asked for
        assert resolve(GenerationConfig(algorithm=other), model.architecture).algorithm == other


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'llada-8b'\?"):
        load("llada8b")
