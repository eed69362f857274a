"""LLaDA-MoE-7B-A1B (inclusionAI): every layer a mixture of 64 experts, per-head norms of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models.architecture import Architecture
from mosaic.models.huggingface import HUGGINGFACE, huggingface_names, sizes, special_tokens
from mosaic.models.keys import Fixed
from mosaic.models.values import flag, positive

__all__ = ["FAMILY", "KEYS", "LABEL", "MODEL_TYPES", "PRESETS", "architecture"]

FAMILY: Final = "llada-moe"
LABEL: Final = "LLaDA-MoE"
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


_ROUTER: Final = "a token's experts are the best of all by softmax, weighed by it as it is"
_EXPERTS: Final = "every layer's feed-forward is its routed experts alone"
KEYS: Final = HUGGINGFACE.extended(
    "expert_intermediate_size moe_intermediate_size num_experts num_experts_per_tok qk_layernorm qkv_bias",
    fixed={
        "moe_layer_freq": Fixed(allowed=(1,), each=True, why=_EXPERTS),
        "decoder_sparse_step": Fixed(allowed=(1,), why=_EXPERTS),
        "mlp_only_layers": Fixed(allowed=([],), each=True, why=_EXPERTS),
        "num_shared_experts": Fixed(allowed=(0,), why=_EXPERTS),
        "shared_expert_intermediate_size": Fixed(allowed=(0,), why=_EXPERTS),
        "moe_router_score_function": Fixed(allowed=("softmax",), why=_ROUTER),
        "moe_router_enable_expert_bias": Fixed(allowed=(False,), why=_ROUTER),
        "norm_topk_prob": Fixed(allowed=(False,), why=_ROUTER),
        "routed_scaling_factor": Fixed(allowed=(1,), why=_ROUTER),
        "router_num_group": Fixed(allowed=(0, 1, -2), why=_ROUTER),
        "router_topk_group": Fixed(allowed=(0, 1, -2), why=_ROUTER),
    },
    # of dense layers, which there are none of
    harmless="dense_intermediate_size intermediate_size",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a LLaDA-MoE config.json; the mask id is 156895 where the config does not say.

    >>> architecture(PRESETS["llada-moe"]).experts
    64
    """
    return Architecture(
        **sizes(config, theta=50000.0, eps=1e-5, positions=8192),
        **special_tokens(config, mask=156895, eos=156892, pad=156892),
        ffn=positive(config, "expert_intermediate_size", "moe_intermediate_size"),
        experts=positive(config, "num_experts"),
        experts_per_token=positive(config, "num_experts_per_tok"),
        # the reference never renormalises the chosen experts' weights
        normalize_experts=False,
        head_norms=flag(config, "qk_layernorm", default=True),
        qkv_bias=flag(config, "qkv_bias", default=False),
        names=huggingface_names("mlp.experts.{experts}."),
    )
