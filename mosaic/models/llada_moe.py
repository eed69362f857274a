"""LLaDA-MoE-7B-A1B (inclusionAI): every layer a mixture of 64 experts, per-head norms of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mosaic.models.architecture import Architecture, FeedForward, Layer
from mosaic.models.config_json import Fixed, flag, positive
from mosaic.models.huggingface import HUGGINGFACE, attention, preset, transformer
from mosaic.models.huggingface import NAMES as HUGGINGFACE_NAMES

FAMILY: Final = "llada-moe"
LABEL: Final = "LLaDA-MoE"
MODEL_TYPES: Final = ("lladamoe", "llada_moe")

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llada-moe": preset(
        "LLaDAMoEModelLM", "lladamoe", hidden=2048, layers=16, heads=16, kv_heads=16, vocabulary=157184, theta=50000.0,
        eps=1e-5, positions=8192, expert_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, qk_layernorm=True,
    )
}  # fmt: skip
_EXPERT: Final = "model.layers.{layer}.mlp.experts.{experts}."
NAMES: Final = replace(
    HUGGINGFACE_NAMES,
    gate=_EXPERT + "gate_proj.weight",
    up=_EXPERT + "up_proj.weight",
    down=_EXPERT + "down_proj.weight",
)


_ROUTER: Final = "experts are the top ones by softmax, and their weights are the softmax values, not renormalised"
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
    # of dense layers; the model has none
    harmless="dense_intermediate_size intermediate_size",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a LLaDA-MoE config.json; the mask id defaults to 156895.

    >>> architecture(PRESETS["llada-moe"]).feed_forward.experts
    64
    """
    layer = Layer(
        attention=attention(
            config, theta=50000.0, positions=8192, qkv_bias=flag(config, "qkv_bias", default=False),
            head_norms=flag(config, "qk_layernorm", default=True),
        ),
        # the reference never renormalises the chosen experts' weights
        feed_forward=FeedForward(
            size=positive(config, "expert_intermediate_size", "moe_intermediate_size"),
            experts=positive(config, "num_experts"), experts_per_token=positive(config, "num_experts_per_tok"),
        ),
    )  # fmt: skip
    return transformer(config, layer, eps=1e-5, positions=8192, mask=156895, eos=156892, pad=156892, names=NAMES)
