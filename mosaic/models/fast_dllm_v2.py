"""Fast-dLLM v2 (Efficient-Large-Model): Dream's shapes and shift, attention causal by blocks of 32 positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models import dream
from mosaic.models.architecture import Architecture
from mosaic.models.config_json import positive
from mosaic.models.huggingface import preset, transformer

FAMILY: Final = "fast-dllm-v2"
LABEL: Final = "Fast-dLLM v2"
MODEL_TYPES: Final = ("fast_dllm_qwen",)

_END_OF_TURN: Final = 151645


def _preset(hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, *, tied: bool) -> dict[str, Any]:
    """The config.json of a released size; of the 7B, vocabulary and rotary base are those of Qwen2.5-7B."""
    return preset(
        "Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", hidden=hidden, layers=28, heads=heads, kv_heads=kv_heads,
        vocabulary=vocabulary, theta=1000000.0, tied=tied, intermediate_size=ffn, bd_size=32, eos_token_id=_END_OF_TURN,
    )  # fmt: skip


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fast-dllm-v2-7b": _preset(3584, heads=28, kv_heads=4, ffn=18944, vocabulary=152064, tied=False),
    "fast-dllm-v2-1.5b": _preset(1536, heads=12, kv_heads=2, ffn=8960, vocabulary=151936, tied=True),
}


KEYS: Final = dream.KEYS.extended("bd_size block_size")


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Fast-dLLM v2 config.json; the mask id defaults to 151665.

    >>> architecture(PRESETS["fast-dllm-v2-7b"]).block
    32
    """
    return transformer(
        config, dream.layer_of(config), eps=1e-6, positions=32768, mask=151665, eos=_END_OF_TURN, pad=151643, shifted=True,
        block=positive(config, "bd_size", "block_size", default=32),
    )  # fmt: skip
