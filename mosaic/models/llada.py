"""LLaDA-8B and its kin (GSAI-ML): a Llama-shaped bidirectional transformer, logits not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, TensorNames, positive, token_ids

__all__ = ["FAMILY", "MODEL_TYPES", "PRESETS", "architecture"]

FAMILY: Final = "llada"
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


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a LLaDA config.json.

    >>> architecture(PRESETS["llada-8b"]).head_size
    128
    """
    if config.get("include_bias") or config.get("include_qkv_bias"):
        raise UnsupportedModel("config.json: LLaDA with biases is not supported; register it as a graph of your own.")
    hidden, heads = positive(config, "d_model"), positive(config, "n_heads")
    return Architecture(
        hidden=hidden,
        layers=positive(config, "n_layers"),
        heads=heads,
        kv_heads=positive(config, "n_kv_heads", default=heads),
        head_size=hidden // heads,
        ffn=positive(config, "mlp_hidden_size"),
        vocabulary=positive(config, "embedding_size", "vocab_size"),
        rope_theta=float(config.get("rope_theta", 10000.0)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        mask_token_id=token_ids(config, "mask_token_id", (126336,))[0],
        eos_token_ids=token_ids(config, "eos_token_id", (126081,), 126348),
        pad_token_id=token_ids(config, "pad_token_id", (126081,))[0],
        tied=bool(config.get("weight_tying", False)),
        max_positions=positive(config, "max_sequence_length", default=4096),
        decode_block=positive(config, "block_length") if "block_length" in config else 0,
        names=NAMES,
    )
