"""LLaDA2.0 (inclusionAI): 256 experts chosen by groups beside a shared one, fused q, k, v, half of each head rotated.

Attention is causal by blocks of 32 positions, logits are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, TensorNames, number, positive, token_ids

__all__ = ["FAMILY", "MODEL_TYPES", "PRESETS", "architecture"]

FAMILY: Final = "llada2"
MODEL_TYPES: Final = ("llada2_moe",)

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llada2-mini": {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "vocab_size": 157184,
        "rope_theta": 600000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "pad_token_id": 156892,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
}


def _names(query_rows: int, kv_rows: int, *, router_bias: bool) -> TensorNames:
    """Names of its own; q, k and v are one tensor, all rows of q first."""
    layer = "model.layers.{layer}."
    fused, key, value = f"{layer}attention.query_key_value.weight", query_rows + kv_rows, query_rows + 2 * kv_rows
    return TensorNames(
        embedding="model.word_embeddings.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        attention_norm=layer + "input_layernorm.weight",
        ffn_norm=layer + "post_attention_layernorm.weight",
        query=f"{fused}[0:{query_rows}]",
        key=f"{fused}[{query_rows}:{key}]",
        value=f"{fused}[{key}:{value}]",
        output=layer + "attention.dense.weight",
        gate=layer + "mlp.experts.{experts}.gate_proj.weight",
        up=layer + "mlp.experts.{experts}.up_proj.weight",
        down=layer + "mlp.experts.{experts}.down_proj.weight",
        query_norm=layer + "attention.query_layernorm.weight",
        key_norm=layer + "attention.key_layernorm.weight",
        router=layer + "mlp.gate.weight",
        router_bias=layer + "mlp.gate.expert_bias" if router_bias else "",
        dense=layer + "mlp.{part}_proj.weight",
        shared=layer + "mlp.shared_experts.{part}_proj.weight",
    )


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a LLaDA2.0 config.json; the mask id is 156895 and the block 32 where the config does not say.

    >>> architecture(PRESETS["llada2-mini"]).rotary_size
    64
    """
    for key in ("use_bias", "norm_head", "rope_scaling", "use_sliding_window"):
        if config.get(key):
            raise UnsupportedModel(f"config.json: LLaDA2.0 with '{key}' is not supported; register it as a graph.")
    scoring = config.get("score_function") or "sigmoid"
    if scoring not in ("sigmoid", "softmax"):
        raise UnsupportedModel(f"config.json: 'score_function' must be sigmoid or softmax, got {scoring!r}.")
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    head_size = positive(config, "head_dim", default=hidden // heads)
    ffn = positive(config, "moe_intermediate_size")
    groups = _count(config, "n_group")
    return Architecture(
        hidden=hidden,
        layers=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        rotary_size=int(head_size * number(config, "partial_rotary_factor", 0.5)),
        ffn=ffn,
        dense_layers=_count(config, "first_k_dense_replace"),
        dense_ffn=positive(config, "intermediate_size"),
        shared_ffn=ffn * _count(config, "num_shared_experts"),
        vocabulary=positive(config, "vocab_size"),
        rope_theta=number(config, "rope_theta", 600000.0),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        mask_token_id=token_ids(config, "mask_token_id", (156895,))[0],
        eos_token_ids=token_ids(config, "eos_token_id", (156892,)),
        pad_token_id=token_ids(config, "pad_token_id", (156892,))[0],
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=positive(config, "max_position_embeddings", default=32768),
        block=positive(config, "block_size", default=32),
        experts=positive(config, "num_experts"),
        experts_per_token=positive(config, "num_experts_per_tok"),
        normalize_experts=bool(config.get("norm_topk_prob", True)),
        router_scoring=scoring,
        router_groups=groups if groups > 1 else 0,
        router_top_groups=_count(config, "topk_group") if groups > 1 else 0,
        router_scale=number(config, "routed_scaling_factor", 1.0),
        head_norms=bool(config.get("use_qk_norm", True)),
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        names=_names(
            heads * head_size,
            kv_heads * head_size,
            router_bias=bool(config.get("moe_router_enable_expert_bias", True)),
        ),
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    """A config key that may be 0, null or missing."""
    return positive(config, key) if config.get(key) else 0
