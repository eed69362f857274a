"""Every key of a config.json is read, refused by name, known to be harmless, or warned of; no value of any is swallowed."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic.errors import ConfigWarning, UnsupportedModel
from mosaic.models import FAMILIES, PRESETS, load
from mosaic.registrar.validate import validate

TINY: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "vocab_size": 64,
        "mask_token_id": 63,
    },
    "dream": {
        "model_type": "Dream", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": 64, "mask_token_id": 63,
    },
    "llada-moe": {
        "model_type": "lladamoe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64, "mask_token_id": 63,
    },
    "sdar": {
        "model_type": "sdar", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "vocab_size": 64, "mask_token_id": 63,
    },
    "fast-dllm-v2": {
        "model_type": "Fast_dLLM_Qwen", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": 64, "mask_token_id": 63,
    },
    "llada2": {
        "model_type": "llada2_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "num_shared_experts": 1, "vocab_size": 64, "mask_token_id": 63,
    },
}  # fmt: skip
VALUES = [True, False, 0, 1, 2, 0.5, "gelu", [], {}, [2], ["sliding_attention"], {"quant_method": "awq"}]
IDENTITY = {"model_type", "architectures"}


def of_tables(kind: str) -> list[Any]:
    return [pytest.param(f, k, id=f"{f}-{k}") for f, m in FAMILIES.items() for k in sorted(getattr(m.KEYS, kind))]


@pytest.mark.parametrize(("family", "key"), of_tables("fixed"))
def test_a_fixed_key_is_refused_by_name_at_any_other_value(family: str, key: str) -> None:
    rule, plain = FAMILIES[family].KEYS.fixed[key], load(TINY[family]).architecture
    right = [*rule.allowed, *([[value, value] for value in rule.allowed] if rule.each else []), None]
    for value in right:
        assert load(TINY[family] | {key: value}).architecture == plain
    wrong = [v for v in VALUES if not any(type(v) is type(r) and v == r for r in right) and not (rule.each and v == [])]
    assert len(wrong) >= len(VALUES) // 2
    for value in wrong:
        with pytest.raises(
            UnsupportedModel, match=f"'{key}'.* is not supported.*: {rule.why[:20]}".replace("(", r"\(")
        ):
            load(TINY[family] | {key: value})
        if rule.unless is not None:
            other, harmless = rule.unless
            aside = load(TINY[family] | {other: harmless}).architecture
            assert load(TINY[family] | {key: value, other: harmless}).architecture == aside


@pytest.mark.parametrize("family", FAMILIES)
def test_harmless_keys_change_nothing(family: str) -> None:
    keys, plain = FAMILIES[family].KEYS.harmless - IDENTITY, load(TINY[family]).architecture
    assert keys
    for value in (True, 7, "x", [], {"a": 1}):
        assert load(TINY[family] | dict.fromkeys(keys, value)).architecture == plain


@pytest.mark.parametrize(("family", "key"), of_tables("used"))
def test_a_used_key_is_read(family: str, key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{key}'"):
        load(TINY[family] | {key: ["nonsense"]})


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_apart_and_presets_are_in_them(family: str) -> None:
    keys = FAMILIES[family].KEYS
    assert not keys.used & keys.harmless and not (keys.used | keys.harmless) & keys.fixed.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in FAMILIES[family].PRESETS:
            load(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_warned_of_by_name_once(family: str) -> None:
    config = TINY[family] | {"moonshine": 1, "frobnicate": None}
    with pytest.warns(ConfigWarning, match="'frobnicate', 'moonshine' are unknown .* not used") as caught:
        assert load(config).architecture == load(TINY[family]).architecture
    assert len(caught) == 1


# What a checkpoint may say and Mosaic did not look at, by hand.
YARN = {"rope_type": "longrope", "factor": 4.0}
ISSUE: list[tuple[str, dict[str, Any]]] = [
    *((family, change) for family in FAMILIES for change in (
        {"rope_scaling": YARN}, {"rope_parameters": YARN}, {"use_sliding_window": True}, {"sliding_window": 4096},
        {"quantization_config": {"quant_method": "fp8"}}, {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention"]}, {"clip_qkv": 8.0}, {"mlp_bias": True},
    )),
    *(("llada", change) for change in (
        {"alibi": True}, {"rope": False}, {"attention_layer_norm": True}, {"input_emb_norm": True},
        {"layer_norm_type": "default"}, {"layer_norm_type": "gemma_rms"}, {"activation_type": "gelu"},
        {"activation_type": "swiglu"}, {"block_type": "sequential"}, {"scale_logits": True}, {"include_bias": True},
        {"multi_query_attention": True, "n_kv_heads": 2}, {"multi_query_attention": False, "n_kv_heads": 1},
        {"layer_norm_with_affine": False}, {"bias_for_layer_norm": True}, {"block_group_size": 4},
        {"embedding_size": 32}, {"attention_bias": True}, {"partial_rotary_factor": 0.5},
    )),
    *(("llada-moe", change) for change in (
        {"norm_topk_prob": True}, {"attention_bias": True}, {"partial_rotary_factor": 0.5}, {"moe_layer_freq": [0, 1]},
        {"num_shared_experts": 1}, {"moe_router_enable_expert_bias": True}, {"moe_router_score_function": "sigmoid"},
        {"routed_scaling_factor": 2.5}, {"router_num_group": 4}, {"router_topk_group": 2},
    )),
    *(("llada2", change) for change in (
        {"score_function": "softmax"}, {"norm_topk_prob": False}, {"moe_router_enable_expert_bias": False},
        {"use_bias": True}, {"norm_head": True}, {"partial_rotary_factor": 0.2}, {"partial_rotary_factor": 2.0},
        {"rotary_dim": 12}, {"num_nextn_predict_layers": 1}, {"moe_shared_expert_intermediate_size": 99},
    )),
    ("sdar", {"attention_bias": True}), ("sdar", {"partial_rotary_factor": 0.5}), ("sdar", {"num_experts": 8}),
    ("dream", {"partial_rotary_factor": 0.5}), ("fast-dllm-v2", {"bd_size": 32, "block_size": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change"), [pytest.param(f, c, id=f"{f}-{c}") for f, c in ISSUE])
def test_what_changes_the_mathematics_is_refused_by_name(family: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(TINY[family] | change)
    named = "dims of a head are rotated" if change == {"partial_rotary_factor": 0.2} else f"'{next(iter(change))}'"
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_computed_as_a_key_says() -> None:
    llada = load(TINY["llada"] | {"include_qkv_bias": True, "multi_query_attention": True})
    assert (llada.architecture.attention.qkv_bias, llada.architecture.attention.kv_heads) == (True, 1)
    biases = {b.tensor for b in llada.graph().buffers if b.tensor and b.tensor.endswith("bias")}
    assert biases == {f"model.transformer.blocks.0.{name}_proj.bias" for name in "qkv"}
    ratio = {key: value for key, value in TINY["llada"].items() if key != "mlp_hidden_size"}
    assert load(ratio | {"mlp_ratio": 3}).architecture.feed_forward.size == 96
    assert load(TINY["llada"] | {"embedding_size": 128}).architecture.vocabulary == 128  # rows beyond the vocabulary
    for family in FAMILIES:
        assert load(TINY[family] | {"tie_word_embeddings": True}).architecture.tied
    assert not load(TINY["llada"] | {"tie_word_embeddings": True, "weight_tying": False}).architecture.tied


@pytest.mark.parametrize(("chosen", "normalized"), [(1, False), (2, True)])
def test_llada2_leaves_the_weight_of_a_single_expert_as_it_is(chosen: int, normalized: bool) -> None:
    graph = load(TINY["llada2"] | {"num_experts_per_tok": chosen}).graph()
    route = next(op for op in graph.ops if op.operator.name == "moe_route")
    assert (route.attrs["normalize"], route.attrs["scoring"]) == (normalized, "sigmoid")
    if chosen == 1:  # then it makes no difference
        load(TINY["llada2"] | {"num_experts_per_tok": 1, "norm_topk_prob": False})


BAD: list[tuple[str, Any]] = [
    *(("rope_theta", v) for v in (-1, 0, math.nan, math.inf, "1e6", True, 10**400, [1])),
    *(("rms_norm_eps", v) for v in (-1e-5, 0, math.nan, "1e-5", 2.0, True)),
    *(("mask_token_id", v) for v in (64, -1, 1.0, "mask", [5], True)),
    *(("eos_token_id", v) for v in (64, -1, "</s>", [1, 64], 1.5)),
    *(("pad_token_id", v) for v in (64, -1)),
    *(("vocab_size", v) for v in (0, -4, 1.5, "64", True, 1 << 60)),
    *(("torch_dtype", v) for v in ("int8", "float8_e4m3fn", "auto", 16, "float3")),
    ("dtype", "uint8"),
]


@pytest.mark.parametrize(("key", "value"), BAD)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_cannot_be_is_refused_by_name(family: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{key}' must be .*, got "):
        load(TINY[family] | {key: value})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llada", {"n_heads": 5}, "'d_model' is 32, which 5 'n_heads' do not divide"),
        ("dream", {"num_attention_heads": 5}, "'hidden_size' is 32, which 5 'num_attention_heads' do not divide"),
        ("dream", {"num_key_value_heads": 3}, "2 heads do not divide into 3 key-value heads"),
        ("dream", {"num_key_value_heads": 4}, "2 heads do not divide into 4 key-value heads"),
        ("dream", {"head_dim": 15}, "15 of the 15 dims of a head are rotated; they come in pairs"),
        ("llada", {"n_layers": 0}, "'n_layers' must be a positive integer, got 0"),
        ("llada", {"n_layers": 10**9}, "1000000000 layers are no model's"),
        ("sdar", {"hidden_size": 1 << 30, "intermediate_size": 1 << 30}, "layers with .* parameters are no model's"),
        ("llada2", {"first_k_dense_replace": 3}, "3 dense layers of 2"),
        ("llada2", {"num_experts_per_tok": 9}, "9 experts per token of 8"),
        ("llada-moe", {"num_experts_per_tok": 5}, "5 experts per token of 4"),
        ("llada-moe", {"moe_intermediate_size": 8}, "but they mean the same"),
        ("dream", {"torch_dtype": "float16", "dtype": "float32"}, "'torch_dtype' is float16 and 'dtype' is float32"),
        ("dream", {"mask_token_id": None}, "'mask_token_id' is 151666, outside the vocabulary of 64 tokens"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(TINY[family] | change)


def test_the_dtype_goes_by_either_name() -> None:
    for key in ("torch_dtype", "dtype"):
        assert load(TINY["dream"] | {key: "torch.float16"}).architecture.dtype == "float16"
    assert load(TINY["dream"] | {"torch_dtype": "float32", "dtype": "float32"}).architecture.dtype == "float32"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["linear", "dynamic", "yarn", "llama3", "silu", "full_attention", "bfloat16"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast"])
        | st.text(max_size=3), inner, max_size=3,
    ),
    max_leaves=4,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A config with up to three keys of its family's table, or of none, set to anything, or taken away."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    keys = FAMILIES[family].KEYS
    names = st.sampled_from(sorted(keys.used | keys.fixed.keys() | keys.harmless)) | st.text(max_size=6)
    changes = draw(st.dictionaries(names, JSON, min_size=1, max_size=3))
    gone = draw(st.sets(st.sampled_from(sorted(TINY[family])), max_size=1))
    return {key: value for key, value in (TINY[family] | changes).items() if key not in gone}


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged())
def test_a_damaged_config_is_refused_in_one_line_or_is_a_model(config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            model = load(config)
        except UnsupportedModel as error:
            assert str(error) and "\n" not in str(error)
            return
    if model.architecture.layers <= 3 and model.architecture.feed_forward.experts <= 64:
        graph = model.graph(backend="cpu")
        validate(graph)
        assert graph.ops


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_all_that_its_family_asks_for(name: str) -> None:
    assert load(dict(PRESETS[name][1])).architecture == load(name).architecture
