"""SDAR (JetLM): Qwen3-shaped, attention causal by blocks of a few positions, logits not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.architecture import Architecture, number, positive, token_ids
from mosaic.models.dream import huggingface_names

__all__ = ["FAMILY", "MODEL_TYPES", "PRESETS", "architecture"]

FAMILY: Final = "sdar"
MODEL_TYPES: Final = ("sdar",)

_END_OF_TEXT, _END_OF_TURN = 151643, 151645


def _preset(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    """The config.json of a released size; all are untied, unlike the Qwen3 models of 1.7B and 4B that they come from."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "vocab_size": 151936,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "block_size": 4,
        "mask_token_id": 151669,
        "eos_token_id": _END_OF_TEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sdar-8b": _preset(hidden=4096, layers=36, heads=32, ffn=12288),
    "sdar-4b": _preset(hidden=2560, layers=36, heads=32, ffn=9728),
    "sdar-1.7b": _preset(hidden=2048, layers=28, heads=16, ffn=6144),
}


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read an SDAR config.json.

    >>> architecture(PRESETS["sdar-8b"]).block
    4
    """
    for key in ("attention_bias", "rope_scaling", "use_sliding_window"):
        if config.get(key):
            raise UnsupportedModel(f"config.json: SDAR with '{key}' is not supported; register it as a graph.")
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    return Architecture(
        hidden=hidden,
        layers=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=positive(config, "num_key_value_heads", default=heads),
        head_size=positive(config, "head_dim", default=128),
        ffn=positive(config, "intermediate_size"),
        vocabulary=positive(config, "vocab_size"),
        rope_theta=number(config, "rope_theta", 1000000.0),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        mask_token_id=token_ids(config, "mask_token_id", (151669,))[0],
        eos_token_ids=token_ids(config, "eos_token_id", (_END_OF_TEXT,), _END_OF_TURN),
        pad_token_id=token_ids(config, "pad_token_id", (_END_OF_TEXT,))[0],
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=positive(config, "max_position_embeddings", default=32768),
        block=positive(config, "block_size", default=4),
        head_norms=True,
        names=huggingface_names(),
    )
