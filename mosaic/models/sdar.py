"""SDAR (JetLM): Qwen3-shaped, attention causal by blocks of a few positions, logits not shifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models.architecture import Architecture, FeedForward, Layer
from mosaic.models.config_json import Fixed, positive
from mosaic.models.huggingface import HUGGINGFACE, attention, preset, transformer

FAMILY: Final = "sdar"
LABEL: Final = "SDAR"
MODEL_TYPES: Final = ("sdar",)

_END_OF_TEXT, _END_OF_TURN = 151643, 151645


def _preset(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    """The config.json of a released size; all are untied, unlike the Qwen3 models of 1.7B and 4B."""
    return preset(
        "SDARForCausalLM", "sdar", hidden=hidden, layers=layers, heads=heads, kv_heads=8, vocabulary=151936, theta=1000000,
        head_dim=128, intermediate_size=ffn, block_size=4, mask_token_id=151669, eos_token_id=_END_OF_TEXT,
    )  # fmt: skip


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sdar-8b": _preset(hidden=4096, layers=36, heads=32, ffn=12288),
    "sdar-4b": _preset(hidden=2560, layers=36, heads=32, ffn=9728),
    "sdar-1.7b": _preset(hidden=2048, layers=28, heads=16, ffn=6144),
}


KEYS: Final = HUGGINGFACE.extended(
    "intermediate_size block_size",
    fixed={"num_experts": Fixed(allowed=(0,), why="the feed-forward is dense")},
    harmless="fuse_cross_entropy debug ep_size micro_forward skip_checkpoint",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Read an SDAR config.json.

    >>> architecture(PRESETS["sdar-8b"]).block
    4
    """
    layer = Layer(
        attention=attention(config, theta=1000000.0, positions=32768, head_size=128, head_norms=True),
        feed_forward=FeedForward(size=positive(config, "intermediate_size")),
    )
    return transformer(
        config, layer, eps=1e-6, positions=32768, mask=151669, eos=_END_OF_TEXT, pad=_END_OF_TEXT, turn=(_END_OF_TURN,),
        block=positive(config, "block_size", default=4),
    )  # fmt: skip
