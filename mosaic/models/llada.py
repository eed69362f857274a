"""LLaDA-8B and its kin (GSAI-ML): a Llama-shaped bidirectional transformer, logits not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, Attention, FeedForward, Layer, TensorNames
from mosaic.models.config_json import COMMON, Fixed, count, flag, number, positive, share, token_id, token_ids
from mosaic.models.rotary import read_rotary

FAMILY: Final = "llada"
LABEL: Final = "LLaDA"
MODEL_TYPES: Final = ("llada",)

_BLOCK: Final = "model.transformer.blocks.{layer}."

# The layer's down projection and the head are both called ff_out in the checkpoint.
NAMES: Final = TensorNames(
    embedding="model.transformer.wte.weight",
    final_norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
    attention_norm=_BLOCK + "attn_norm.weight",
    ffn_norm=_BLOCK + "ff_norm.weight",
    query=_BLOCK + "q_proj.weight",
    key=_BLOCK + "k_proj.weight",
    value=_BLOCK + "v_proj.weight",
    output=_BLOCK + "attn_out.weight",
    gate=_BLOCK + "ff_proj.weight",
    up=_BLOCK + "up_proj.weight",
    down=_BLOCK + "ff_out.weight",
)

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llada-8b": {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126464,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_sequence_length": 4096,
        "mask_token_id": 126336,
        "weight_tying": False,
        "torch_dtype": "bfloat16",
    }
}


_RMS: Final = "norms are RMSNorm with a weight and no bias"
KEYS: Final = COMMON.extended(
    "d_model n_layers n_heads n_kv_heads multi_query_attention mlp_hidden_size mlp_ratio vocab_size embedding_size rope_theta "
    "rope_scaling rope_parameters original_max_position_embeddings rms_norm_eps max_sequence_length block_length "
    "include_qkv_bias weight_tying tie_word_embeddings mask_token_id eos_token_id pad_token_id",
    fixed={
        "alibi": Fixed(allowed=(False,), why="positions are rotary"),
        "rope": Fixed(allowed=(True,), why="positions are rotary"),
        "activation_type": Fixed(allowed=("silu",), why="the feed-forward is silu(gate) * up"),
        "block_type": Fixed(allowed=("llama",), why="q, k, v, gate and up are tensors of their own"),
        "block_group_size": Fixed(allowed=(1,), why="tensors are named by block, not by group"),
        "layer_norm_type": Fixed(allowed=("rms",), why=_RMS),
        "layer_norm_with_affine": Fixed(allowed=(True,), why=_RMS),
        "bias_for_layer_norm": Fixed(allowed=(False,), why=_RMS),
        "norm_after": Fixed(allowed=(False,), why="norms come before attention and feed-forward"),
        "attention_layer_norm": Fixed(allowed=(False,), why="queries and keys are not normed"),
        "input_emb_norm": Fixed(allowed=(False,), why="embeddings are not scaled"),
        "embedding_layer_norm": Fixed(allowed=(False,), why="embeddings are not normed"),
        "include_bias": Fixed(allowed=(False,), why="only q, k and v may have a bias, by 'include_qkv_bias'"),
        "scale_logits": Fixed(allowed=(False,), why="logits are not scaled"),
    },
    # angles, cosines and sines are always float32 here; norms of q and k, and ALiBi, are off
    harmless="rope_full_precision flash_attention attention_layer_norm_with_affine alibi_bias_max layer_norm_eps precision "
    "init_device init_fn init_std init_cutoff_factor",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a LLaDA config.json.

    >>> architecture(PRESETS["llada-8b"]).attention.head_size
    128
    """
    hidden, heads = positive(config, "d_model"), positive(config, "n_heads")
    head_size = share(hidden, heads, "d_model", "n_heads")
    positions = positive(config, "max_sequence_length", default=4096)
    rotary, scale = read_rotary(config, head_size, positions, theta=10000.0)
    rows = positive(config, "embedding_size", default=positive(config, "vocab_size", default=0))
    vocabulary = positive(config, "vocab_size", default=rows)
    if vocabulary > rows or not rows:
        raise UnsupportedModel(f"config.json: 'embedding_size' is {rows} for a 'vocab_size' of {vocabulary}.")
    layer = Layer(
        attention=Attention(
            heads=heads, kv_heads=_kv_heads(config, heads), head_size=head_size, rotary=rotary, rotary_scale=scale,
            qkv_bias=flag(config, "include_qkv_bias", default=False),
        ),
        feed_forward=FeedForward(
            size=positive(config, "mlp_hidden_size", default=hidden * positive(config, "mlp_ratio", default=4))
        ),
    )  # fmt: skip
    return Architecture(
        hidden=hidden,
        stack=layer.times(positive(config, "n_layers")),
        vocabulary=rows,
        norm_eps=number(config, "rms_norm_eps", 1e-5, above=0, most=1),
        mask_token_id=token_id(config, "mask_token_id", 126336, rows),
        eos_token_ids=token_ids(config, "eos_token_id", (126081,), rows, 126348),
        pad_token_id=token_id(config, "pad_token_id", 126081, rows),
        tied=_tied(config),
        max_positions=positions,
        decode_block=count(config, "block_length"),
        names=NAMES,
    )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """The number of key-value heads: 1 with `multi_query_attention`, which must agree with `n_kv_heads`."""
    given = {"n_kv_heads": config.get("n_kv_heads")}
    if config.get("multi_query_attention") is not None:
        given["multi_query_attention"] = 1 if flag(config, "multi_query_attention", default=False) else heads
    return positive(given, "n_kv_heads", "multi_query_attention", default=heads)


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding: LLaDA's own key, else Hugging Face's."""
    return flag(config, "weight_tying", default=flag(config, "tie_word_embeddings", default=False))
