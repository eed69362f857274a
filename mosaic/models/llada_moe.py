"""LLaDA-MoE-7B-A1B (inclusionAI): every layer a mixture of 64 experts, per-head norms of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, positive, token_ids
from mosaic.models.dream import huggingface_names

__all__ = ["FAMILY", "MODEL_TYPES", "PRESETS", "architecture"]

FAMILY: Final = "llada-moe"
MODEL_TYPES: Final = ("lladamoe", "llada_moe")

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llada-moe": {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "lladamoe",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "expert_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 157184,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "qk_layernorm": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
}


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a LLaDA-MoE config.json; the mask id is 156895 where the config does not say.

    >>> architecture(PRESETS["llada-moe"]).experts
    64
    """
    frequency = config.get("moe_layer_freq", 1)
    dense_layers = any(value != 1 for value in frequency) if isinstance(frequency, list) else frequency != 1
    if dense_layers or config.get("num_shared_experts") or config.get("shared_expert_intermediate_size"):
        raise UnsupportedModel("config.json: LLaDA-MoE with dense layers or shared experts is not supported.")
    if config.get("moe_router_enable_expert_bias"):
        raise UnsupportedModel("config.json: LLaDA-MoE with expert biases is not supported.")
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    return Architecture(
        hidden=hidden,
        layers=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=positive(config, "num_key_value_heads", default=heads),
        head_size=positive(config, "head_dim", default=hidden // heads),
        ffn=positive(config, "expert_intermediate_size", "moe_intermediate_size"),
        vocabulary=positive(config, "vocab_size"),
        rope_theta=float(config.get("rope_theta", 50000.0)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        mask_token_id=token_ids(config, "mask_token_id", (156895,))[0],
        eos_token_ids=token_ids(config, "eos_token_id", (156892,)),
        pad_token_id=token_ids(config, "pad_token_id", (156892,))[0],
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=positive(config, "max_position_embeddings", default=8192),
        experts=positive(config, "num_experts"),
        experts_per_token=positive(config, "num_experts_per_tok"),
        # The reference never renormalises the chosen experts' weights, whatever the config says.
        normalize_experts=False,
        head_norms=bool(config.get("qk_layernorm", True)),
        qkv_bias=bool(config.get("qkv_bias", False)),
        names=huggingface_names("mlp.experts.{experts}."),
    )
