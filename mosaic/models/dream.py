"""Dream-7B and Dream-Coder (DreamLM): Qwen2-shaped, biases on q, k, v, and row i-1 predicts position i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models.architecture import Architecture
from mosaic.models.huggingface import HUGGINGFACE, huggingface_names, sizes, special_tokens
from mosaic.models.values import positive

__all__ = ["FAMILY", "KEYS", "LABEL", "MODEL_TYPES", "PRESETS", "architecture"]

FAMILY: Final = "dream"
LABEL: Final = "Dream"
MODEL_TYPES: Final = ("dream",)


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


KEYS: Final = HUGGINGFACE.extended(
    "intermediate_size",
    # the model has biases on q, k and v whatever this says
    harmless="attention_bias",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Dream or Dream-Coder config.json.

    >>> architecture(PRESETS["dream-7b"]).kv_heads
    4
    """
    return Architecture(
        **sizes(config, theta=1000000.0, eps=1e-6, positions=32768),
        **special_tokens(config, mask=151666, eos=151643, pad=151643, turn=(151645,)),
        ffn=positive(config, "intermediate_size"),
        qkv_bias=True,
        shifted=True,
        names=huggingface_names(),
    )
