"""Shared by the families with Hugging Face's names of config keys and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, Attention, FeedForward, Layer, TensorNames
from mosaic.models.config_json import COMMON, flag, number, positive, share, token_id, token_ids
from mosaic.models.rotary import read_rotary

HUGGINGFACE: Final = COMMON.extended(
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps "
    "max_position_embeddings rope_theta rope_scaling rope_parameters original_max_position_embeddings tie_word_embeddings "
    "mask_token_id eos_token_id pad_token_id"
)
"""The keys that `attention` and `transformer` read, and the keys that all families share."""


_LAYER: Final = "model.layers.{layer}."
NAMES: Final = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm=_LAYER + "input_layernorm.weight",
    ffn_norm=_LAYER + "post_attention_layernorm.weight",
    query=_LAYER + "self_attn.q_proj.weight",
    key=_LAYER + "self_attn.k_proj.weight",
    value=_LAYER + "self_attn.v_proj.weight",
    output=_LAYER + "self_attn.o_proj.weight",
    gate=_LAYER + "mlp.gate_proj.weight",
    up=_LAYER + "mlp.up_proj.weight",
    down=_LAYER + "mlp.down_proj.weight",
    query_norm=_LAYER + "self_attn.q_norm.weight",
    key_norm=_LAYER + "self_attn.k_norm.weight",
    router=_LAYER + "mlp.gate.weight",
)
"""Names as in Qwen2."""


def preset(
    architecture: str, model_type: str, *, hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int, theta: float,
    eps: float = 1e-6, positions: int = 32768, tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the config.json of a released model; `more` are further keys."""
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "rope_theta": theta,
        "rms_norm_eps": eps, "max_position_embeddings": positions, "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
        **more,
    }  # fmt: skip


def attention(
    config: Mapping[str, Any], *, theta: float, positions: int, head_size: int | None = None, turning: float = 1.0,
    qkv_bias: bool = False, head_norms: bool = False,
) -> Attention:  # fmt: skip
    """Read the attention that all layers share.

    `theta`, `positions`, `turning` (the share of a head's dims that are rotated) and `head_size` are the family's
    defaults; without a `head_size` it is the hidden size divided by the heads.
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if config.get("head_dim") is None and head_size is None:
        head_size = share(hidden, heads, "hidden_size", "num_attention_heads")
    head_size = positive(config, "head_dim", default=head_size)
    longest = positive(config, "max_position_embeddings", default=positions)
    rotary, scale = read_rotary(config, head_size, longest, theta=theta, share=turning)
    return Attention(
        heads=heads, kv_heads=positive(config, "num_key_value_heads", default=heads), head_size=head_size, rotary=rotary,
        rotary_scale=scale, qkv_bias=qkv_bias, head_norms=head_norms,
    )  # fmt: skip


def transformer(
    config: Mapping[str, Any], layer: Layer, *, eps: float, positions: int, mask: int, eos: int, pad: int,
    turn: tuple[int, ...] = (), dense: FeedForward | None = None, dense_layers: int = 0, names: TensorNames = NAMES, **more: Any,
) -> Architecture:  # fmt: skip
    """Return the architecture of equal layers, except that the first `dense_layers` have the feed-forward `dense`.

    `eps`, `positions` and the token ids are the family's defaults; `turn` are the ids that end a turn, which end an
    answer beside a single end of the text in the config. `more` are further fields of the `Architecture`.
    """
    layers, vocabulary = positive(config, "num_hidden_layers"), positive(config, "vocab_size")
    if dense_layers > layers:
        raise UnsupportedModel(f"config.json: {dense_layers} dense layers of {layers}.")
    first = () if dense is None else replace(layer, feed_forward=dense).times(dense_layers)
    return Architecture(
        hidden=positive(config, "hidden_size"),
        vocabulary=vocabulary,
        stack=(*first, *layer.times(layers - dense_layers)),
        norm_eps=number(config, "rms_norm_eps", eps, above=0, most=1),
        tied=flag(config, "tie_word_embeddings", default=False),
        max_positions=positive(config, "max_position_embeddings", default=positions),
        mask_token_id=token_id(config, "mask_token_id", mask, vocabulary),
        eos_token_ids=token_ids(config, "eos_token_id", (eos,), vocabulary, *turn),
        pad_token_id=token_id(config, "pad_token_id", pad, vocabulary),
        names=names,
        **more,
    )
