"""What a bidirectional dLLM transformer is: its sizes and the names of its tensors.

A family's file turns a config.json into an `Architecture`; `transformer.py`
turns an `Architecture` into a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mosaic.errors import UnsupportedModel

__all__ = ["Architecture", "TensorNames", "positive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Checkpoint names; `{layer}` stands for the layer's number, the mixture-of-experts names also stack experts."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    ffn_norm: str
    query: str
    key: str
    value: str
    output: str
    gate: str
    up: str
    down: str
    query_norm: str = ""
    key_norm: str = ""
    router: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of one checkpoint.

    Parameters
    ----------
    hidden, layers, heads, kv_heads, head_size, ffn, vocabulary
        The transformer's sizes; `ffn` is one expert's where `experts` > 0.
    rope_theta, norm_eps
        Rotary base and RMSNorm epsilon.
    experts, experts_per_token, normalize_experts
        Mixture of experts; 0 experts means a dense feed-forward.
    qkv_bias, head_norms, tied
        Biases on q, k, v; per-head RMSNorm of q and k; head tied to the embedding.
    shifted
        Row i-1 predicts position i (Dream); the shift is done on row indices.
    mask_token_id
        The [MASK] token.
    dtype
        The checkpoint's dtype.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    rope_theta: float
    norm_eps: float
    mask_token_id: int
    names: TensorNames
    experts: int = 0
    experts_per_token: int = 0
    normalize_experts: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    tied: bool = False
    shifted: bool = False
    dtype: str = "bfloat16"
    max_positions: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"config.json: {self.heads} heads do not divide into {self.kv_heads} key-value heads."
            )
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise UnsupportedModel(f"config.json: {self.experts_per_token} experts per token of {self.experts}.")


def positive(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of several config keys that is there, as a positive integer."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedModel(f"config.json: '{key}' must be a positive integer, got {value!r}.")
        return value
    if default is None:
        raise UnsupportedModel(f"config.json has no '{keys[0]}'; Mosaic needs it to plan this family.")
    return default
