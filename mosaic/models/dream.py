"""Dream-7B and Dream-Coder (DreamLM): Qwen2-shaped, biases on q, k, v, and row i-1 predicts position i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models.architecture import Architecture, TensorNames, positive, token_ids

__all__ = ["FAMILY", "MODEL_TYPES", "PRESETS", "architecture", "huggingface_names"]

FAMILY: Final = "dream"
MODEL_TYPES: Final = ("dream",)


def huggingface_names(feed_forward: str = "mlp.") -> TensorNames:
    """Names in the manner of Qwen2; `feed_forward` is where gate, up and down projections live in a layer."""
    layer = "model.layers.{layer}."
    return TensorNames(
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        attention_norm=layer + "input_layernorm.weight",
        ffn_norm=layer + "post_attention_layernorm.weight",
        query=layer + "self_attn.q_proj.weight",
        key=layer + "self_attn.k_proj.weight",
        value=layer + "self_attn.v_proj.weight",
        output=layer + "self_attn.o_proj.weight",
        gate=layer + feed_forward + "gate_proj.weight",
        up=layer + feed_forward + "up_proj.weight",
        down=layer + feed_forward + "down_proj.weight",
        query_norm=layer + "self_attn.q_norm.weight",
        key_norm=layer + "self_attn.k_norm.weight",
        router=layer + "mlp.gate.weight",
    )


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dream-7b": {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "mask_token_id": 151666,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
}


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Dream or Dream-Coder config.json.

    >>> architecture(PRESETS["dream-7b"]).kv_heads
    4
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    return Architecture(
        hidden=hidden,
        layers=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=positive(config, "num_key_value_heads", default=heads),
        head_size=positive(config, "head_dim", default=hidden // heads),
        ffn=positive(config, "intermediate_size"),
        vocabulary=positive(config, "vocab_size"),
        rope_theta=float(config.get("rope_theta", 1000000.0)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        mask_token_id=token_ids(config, "mask_token_id", (151666,))[0],
        eos_token_ids=token_ids(config, "eos_token_id", (151643,), 151645),
        pad_token_id=token_ids(config, "pad_token_id", (151643,))[0],
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=positive(config, "max_position_embeddings", default=32768),
        qkv_bias=True,
        shifted=True,
        names=huggingface_names(),
    )
