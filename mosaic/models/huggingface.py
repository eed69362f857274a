"""What the families whose configs and tensors are named in Hugging Face's manner share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.models.architecture import TensorNames
from mosaic.models.keys import COMMON
from mosaic.models.rotary import read_rotary
from mosaic.models.values import flag, number, positive, share, token_id, token_ids

__all__ = ["HUGGINGFACE", "huggingface_names", "sizes", "special_tokens"]

HUGGINGFACE: Final = COMMON.extended(
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps "
    "max_position_embeddings rope_theta rope_scaling rope_parameters original_max_position_embeddings tie_word_embeddings "
    "mask_token_id eos_token_id pad_token_id"
)
"""The keys that `sizes` and `special_tokens` read, and the keys that all families share."""


def huggingface_names(feed_forward: str = "mlp.") -> TensorNames:
    """Return the names in the manner of Qwen2; `feed_forward` is where gate, up and down projections live in a layer."""
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


def sizes(
    config: Mapping[str, Any],
    *,
    theta: float,
    eps: float,
    positions: int,
    head_size: int | None = None,
    turning: float = 1.0,
) -> dict[str, Any]:
    """Read an architecture's sizes, all but those of the feed-forward.

    Parameters
    ----------
    config
        The config.json.
    theta, eps, positions, turning
        The family's rotary base, epsilon, positions and share of a head's dims that turn, where the config does not say.
    head_size
        The family's; the hidden size's share where there is none.
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if config.get("head_dim") is None and head_size is None:
        head_size = share(hidden, heads, "hidden_size", "num_attention_heads")
    head_size = positive(config, "head_dim", default=head_size)
    longest = positive(config, "max_position_embeddings", default=positions)
    rotary, scale = read_rotary(config, head_size, longest, theta=theta, share=turning)
    return {
        "hidden": hidden,
        "layers": positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": positive(config, "num_key_value_heads", default=heads),
        "head_size": head_size,
        "vocabulary": positive(config, "vocab_size"),
        "rotary": rotary,
        "rotary_scale": scale,
        "norm_eps": number(config, "rms_norm_eps", eps, above=0, most=1),
        "tied": flag(config, "tie_word_embeddings", default=False),
        "max_positions": longest,
    }


def special_tokens(
    config: Mapping[str, Any], *, mask: int, eos: int, pad: int, turn: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Read the ids of the mask, of what ends an answer, and of padding; the family's own where the config does not say.

    `turn` are the family's ends of a turn, which end an answer beside one end of the text that the config names.
    """
    vocabulary = positive(config, "vocab_size")
    return {
        "mask_token_id": token_id(config, "mask_token_id", mask, vocabulary),
        "eos_token_ids": token_ids(config, "eos_token_id", (eos,), vocabulary, *turn),
        "pad_token_id": token_id(config, "pad_token_id", pad, vocabulary),
    }
