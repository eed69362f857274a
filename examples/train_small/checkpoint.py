"""Checkpoints in the Hugging Face layout of the two families: config.json, model.safetensors, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model import DECODE_BLOCK, Sizes, Transformer
from safetensors.torch import load_file, save_file
from tokenizer_files import tokenizer_config, tokenizer_json
from torch import Tensor

from benchmarks.quality.vocabulary import EOS, MASK, PAD

__all__ = ["config_json", "named_tensors", "restore", "save"]


def config_json(sizes: Sizes) -> dict[str, Any]:
    """The family's own keys."""
    special = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": PAD, "torch_dtype": "bfloat16"}
    if sizes.family == "llada":
        return {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "d_model": sizes.hidden,
            "n_layers": sizes.layers,
            "n_heads": sizes.heads,
            "n_kv_heads": sizes.kv_heads,
            "mlp_hidden_size": sizes.ffn,
            "vocab_size": sizes.vocabulary,
            "embedding_size": sizes.vocabulary,
            "rope_theta": sizes.rope_theta,
            "rms_norm_eps": sizes.norm_eps,
            "max_sequence_length": sizes.max_positions,
            "block_length": DECODE_BLOCK,
            "weight_tying": False,
            "include_bias": False,
            "include_qkv_bias": False,
            **special,
        }
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "intermediate_size": sizes.ffn,
        "vocab_size": sizes.vocabulary,
        "rope_theta": sizes.rope_theta,
        "rms_norm_eps": sizes.norm_eps,
        "max_position_embeddings": sizes.max_positions,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "block_size": sizes.block,
        **special,
    }


def named_tensors(model: Transformer) -> dict[str, Tensor]:
    """The weights by the family's names, bfloat16."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in _views(model).items()
    }  # fmt: skip


def _views(model: Transformer) -> dict[str, Tensor]:
    """The weights by the family's names; those that the model has joined are views of them."""
    s, found = model.sizes, dict[str, Tensor]()
    llada = s.family == "llada"
    prefix = "model.transformer." if llada else "model."
    found[prefix + ("wte.weight" if llada else "embed_tokens.weight")] = model.embedding
    found[prefix + ("ln_f.weight" if llada else "norm.weight")] = model.final_norm
    found[prefix + "ff_out.weight" if llada else "lm_head.weight"] = model.head
    query, key = s.heads * s.head_size, s.kv_heads * s.head_size
    for index, layer in enumerate(model.layers):
        at = f"{prefix}blocks.{index}." if llada else f"{prefix}layers.{index}."
        q, k, v = layer.qkv.split([query, key, key])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "attn_norm": layer.attention_norm, "ff_norm": layer.ffn_norm, "q_proj": q, "k_proj": k, "v_proj": v,
            "attn_out": layer.output, "ff_proj": gate, "up_proj": up, "ff_out": layer.down,
        } if llada else {
            "input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.ffn_norm,
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": layer.output,
            "self_attn.q_norm": layer.query_norm, "self_attn.k_norm": layer.key_norm,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down,
        }  # fmt: skip
        found |= {f"{at}{name}.weight": tensor for name, tensor in parts.items()}
    return found


def save(model: Transformer, directory: Path) -> None:
    """Write the four files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(model.sizes), indent=1) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(tokenizer_config(), encoding="utf-8")
    save_file(named_tensors(model), directory / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def restore(model: Transformer, directory: Path) -> None:
    """Read the weights that `save` has written, to go on training from them.

    Raises
    ------
    SystemExit
        If they are those of a model of another family or size.
    """
    views, stored = _views(model), load_file(directory / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in views.items()}
    if {name: tuple(tensor.shape) for name, tensor in stored.items()} != shapes:
        raise SystemExit(f"train: the weights in {directory} are not those of a {model.sizes.family} of these sizes.")
    for name, tensor in views.items():
        tensor.copy_(stored[name])
