"""Dream-7B and Dream-Coder (DreamLM): Qwen2-shaped, biases on q, k, v, and row i-1 predicts position i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models.architecture import Architecture, FeedForward, Layer
from mosaic.models.config_json import positive
from mosaic.models.huggingface import HUGGINGFACE, attention, preset, transformer

FAMILY: Final = "dream"
LABEL: Final = "Dream"
MODEL_TYPES: Final = ("dream",)


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dream-7b": preset(
        "DreamModel", "Dream", hidden=3584, layers=28, heads=28, kv_heads=4, vocabulary=152064, theta=1000000.0,
        positions=131072, intermediate_size=18944, mask_token_id=151666,
    )
}  # fmt: skip


KEYS: Final = HUGGINGFACE.extended(
    "intermediate_size",
    # the model has biases on q, k and v whatever the config says
    harmless="attention_bias",
)


def layer_of(config: Mapping[str, Any]) -> Layer:
    """Read what each layer is."""
    found = attention(config, theta=1000000.0, positions=32768, qkv_bias=True)
    return Layer(attention=found, feed_forward=FeedForward(size=positive(config, "intermediate_size")))


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Dream or Dream-Coder config.json.

    >>> architecture(PRESETS["dream-7b"]).attention.kv_heads
    4
    """
    return transformer(
        config, layer_of(config), eps=1e-6, positions=32768, mask=151666, eos=151643, pad=151643, turn=(151645,), shifted=True
    )  # fmt: skip
