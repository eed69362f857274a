"""LLaDA2.0 and 2.1 (inclusionAI): 256 experts chosen by groups, a shared one, fused q, k, v, half of each head rotated.

Attention is causal by blocks of 32 positions, logits are not shifted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, FeedForward, Layer, TensorNames
from mosaic.models.config_json import Fixed, count, flag, number, positive
from mosaic.models.huggingface import HUGGINGFACE, attention, preset, transformer

FAMILY: Final = "llada2"
LABEL: Final = "LLaDA2"
EDITING: Final = "llada21_moe"
"""The model type that Mosaic gives LLaDA2.1, which edits tokens; its released config.json has that of LLaDA2.0."""
MODEL_TYPES: Final = ("llada2_moe", EDITING)
_VERSION: Final = re.compile(r"llada[-_]?2[._]?(\d)(?!\d)", re.IGNORECASE)
_NAMES_OF_A_PATH: Final = 3  # a checkpoint's directory, or a revision of a cached one: name/snapshots/hash

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llada2-mini": preset(
        "LLaDA2MoeModelLM", "llada2_moe", hidden=2048, layers=20, heads=16, kv_heads=4, vocabulary=157184, theta=600000.0,
        head_dim=128, intermediate_size=5120, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
        num_shared_experts=1, first_k_dense_replace=1, n_group=8, topk_group=4, score_function="sigmoid", norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_router_enable_expert_bias=True, partial_rotary_factor=0.5, use_qk_norm=True,
        use_qkv_bias=False, pad_token_id=156892,
    )
}  # fmt: skip


def _names(query_rows: int, kv_rows: int) -> TensorNames:
    """Names of the family; q, k and v are one tensor, all rows of q first."""
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
        router_bias=layer + "mlp.gate.expert_bias",
        dense=layer + "mlp.{part}_proj.weight",
        shared=layer + "mlp.shared_experts.{part}_proj.weight",
    )


_GATE: Final = "the model's own router scores by sigmoid, adds its bias, and divides by the sum, whatever this says"
KEYS: Final = HUGGINGFACE.extended(
    "intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size num_experts num_experts_per_tok "
    "num_shared_experts first_k_dense_replace n_group topk_group routed_scaling_factor partial_rotary_factor rotary_dim "
    "use_qk_norm use_qkv_bias block_size",
    fixed={
        "score_function": Fixed(allowed=("sigmoid",), why=_GATE),
        "norm_topk_prob": Fixed(allowed=(True,), why=_GATE, unless=("num_experts_per_tok", 1)),
        "moe_router_enable_expert_bias": Fixed(allowed=(True,), why=_GATE),
        "router_dtype": Fixed(allowed=("fp32", "float32"), why="the router computes in float32"),
        "use_bias": Fixed(allowed=(False,), why="the output projection has no bias"),
        "use_rmsnorm": Fixed(allowed=(True,), why="norms are RMSNorm"),
        "norm_head": Fixed(allowed=(False,), why="the head's rows are used as they are"),
        "num_nextn_predict_layers": Fixed(allowed=(0,), why="there are no layers that predict further tokens"),
        "use_linear_attention": Fixed(allowed=(False,), why="attention is softmax attention in every layer"),
        "linear_attention_layers": Fixed(allowed=([],), why="attention is softmax attention in every layer"),
    },
    harmless="mtp_loss_scaling_factor norm_softmax",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read the config.json of a LLaDA2; the mask id defaults to 156895 and the block to 32.

    >>> architecture(PRESETS["llada2-mini"]).rotary.dim
    64
    """
    found = attention(
        config, theta=600000.0, positions=32768, turning=0.5, head_norms=flag(config, "use_qk_norm", default=True),
        qkv_bias=flag(config, "use_qkv_bias", default=False),
    )  # fmt: skip
    if positive(config, "rotary_dim", default=found.rotary.dim) != found.rotary.dim:
        raise UnsupportedModel(
            f"config.json: 'rotary_dim' is {config['rotary_dim']}, but 'partial_rotary_factor' of {found.head_size} dims are "
            f"{found.rotary.dim}; keep one of them."
        )
    chosen, groups = positive(config, "num_experts_per_tok"), count(config, "n_group")
    feed_forward = FeedForward(
        size=positive(config, "moe_intermediate_size"),
        shared=_shared(config),
        experts=positive(config, "num_experts"),
        experts_per_token=chosen,
        # the model's own router does not normalise the weight of a single expert
        normalize=chosen > 1,
        scoring="sigmoid",
        groups=groups if groups > 1 else 0,
        top_groups=count(config, "topk_group") if groups > 1 else 0,
        scale=number(config, "routed_scaling_factor", 1.0, above=0, most=1e6),
    )
    return transformer(
        config, Layer(attention=found, feed_forward=feed_forward), eps=1e-6, positions=32768, mask=156895, eos=156892,
        pad=156892, dense=FeedForward(size=positive(config, "intermediate_size")),
        dense_layers=count(config, "first_k_dense_replace"), block=positive(config, "block_size", default=32),
        published="llada2.1" if str(config.get("model_type")).lower() == EDITING else "llada2",
        names=_names(found.width, found.kv_width),
    )  # fmt: skip


def edits(config: Mapping[str, Any], path: Path | None) -> bool:
    """Tell whether a model is LLaDA2.1, whose config.json is that of LLaDA2.0.

    By its model type, by the editing threshold in the modelling file beside it, or by the version in the name of the
    config or the directory.
    """
    if str(config.get("model_type")).lower() == EDITING:
        return True
    files = sorted(path.glob("modeling_llada2*.py")) if path is not None else []
    if files:
        return any("editing_threshold" in file.read_text(encoding="utf-8", errors="replace") for file in files)
    places = path.resolve().parts[: -_NAMES_OF_A_PATH - 1 : -1] if path is not None else ()
    versions = (_VERSION.search(name) for name in (str(config.get("_name_or_path", "")), *places))
    return next((match[1] == "1" for match in versions if match), False)


def _shared(config: Mapping[str, Any]) -> int:
    """The columns of all shared experts together; a config key that states them must agree with the product."""
    size = positive(config, "moe_intermediate_size") * count(config, "num_shared_experts")
    said = config.get("moe_shared_expert_intermediate_size")
    if size and said is not None and said not in (size, positive(config, "moe_intermediate_size")):
        raise UnsupportedModel(
            f"config.json: 'moe_shared_expert_intermediate_size' is {said!r}, but the shared experts of the model have "
            f"{size} columns together; make the two agree."
        )
    return size
