"""Stock transformers classes with the weights of a compiled model: what families compute, by code that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from mosaic.models.architecture import Architecture
from mosaic.runtime.compiled import CompiledModel

LLADA_NAMES = {
    "model.transformer.wte.": "model.embed_tokens.", "model.transformer.ln_f.": "model.norm.",
    "model.transformer.ff_out.": "lm_head.", "model.transformer.blocks.": "model.layers.",
    "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj",
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", ".ff_out": ".mlp.down_proj",
}  # fmt: skip
_LLADA2 = {
    "word_embeddings": "embed_tokens", "attention.dense": "self_attn.o_proj",
    "attention.query_layernorm": "self_attn.q_norm", "attention.key_layernorm": "self_attn.k_norm",
    "gate.expert_bias": "gate.e_score_correction_bias",
}  # fmt: skip


def stock_model(model: CompiledModel, folder: Path, **changes: Any) -> nn.Module:
    """The stock class of a model's family, with its weights by way of a saved checkpoint, in float32.

    Parameters
    ----------
    changes
        Entries of the stock config, such as `rope_parameters`.
    """
    arch, family = model.architecture, model.model.family
    model.save(folder)
    given = load_file(folder / "model.safetensors")
    kind, build = _FAMILIES[family]
    if family == "llada" and arch.attention.qkv_bias:
        kind = "Qwen2"  # Llama with biases on q, k and v
    config = {
        "hidden_size": arch.hidden, "num_hidden_layers": arch.layers, "num_attention_heads": arch.attention.heads,
        "num_key_value_heads": arch.attention.kv_heads, "head_dim": arch.attention.head_size,
        "intermediate_size": arch.feed_forward.size,
        "vocab_size": arch.vocabulary, "rms_norm_eps": arch.norm_eps, "tie_word_embeddings": False,
        "max_position_embeddings": arch.max_positions, "attn_implementation": "eager",
    }  # fmt: skip
    extra, state = build(arch, given)
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**config | extra | changes)
    )
    made.load_state_dict(_tied(state))
    return made.eval()


def stock_logits(module: Any, ids: Tensor, block: int) -> Tensor:
    """Logits [T, V] of every row, attention causal by blocks of `block` positions, or to all with 0.

    Each time with rotary frequencies made anew: stock ones remember the longest sequence that they have seen.
    """
    module.model.rotary_emb = type(module.model.rotary_emb)(module.config)
    number = torch.arange(len(ids)) // (block or len(ids))
    mask = torch.zeros(len(ids), len(ids)).masked_fill(number[:, None] < number[None, :], float("-inf"))[None, None]
    with torch.no_grad():
        logits: Tensor = module(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
    return logits


_Built = tuple[dict[str, Any], dict[str, Tensor]]


def renamed(given: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under the names that stock classes give them."""
    found = {}
    for name, tensor in given.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _dense_layers(arch: Architecture) -> int:
    return sum(not layer.feed_forward.experts for layer in arch.stack)


def _stack_experts(arch: Architecture, state: dict[str, Tensor]) -> None:
    """Experts as one tensor for gate and up, and one for down, as stock classes have them."""
    for layer in range(_dense_layers(arch), arch.layers):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state.pop(f"{stem}{e}.{part}_proj.weight") for e in range(arch.feed_forward.experts)])
            for part in ("gate", "up", "down")
        )
        state |= {f"{stem}gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}down_proj": down}


def _llada(arch: Architecture, given: Mapping[str, Tensor]) -> _Built:
    return {}, renamed(given, LLADA_NAMES)


def _tied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the embedding as the head too, where it is tied."""
    return {"lm_head.weight": state["model.embed_tokens.weight"], **state}


def _qwen(arch: Architecture, given: Mapping[str, Tensor]) -> _Built:
    return {}, dict(given)


def _llada_moe(arch: Architecture, given: Mapping[str, Tensor]) -> _Built:
    state = dict(given)
    _stack_experts(arch, state)
    ffn = arch.feed_forward
    return {
        "moe_intermediate_size": ffn.size, "num_experts": ffn.experts, "num_experts_per_tok": ffn.experts_per_token,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "experts_implementation": "eager",
    }, state  # fmt: skip


def _llada2(arch: Architecture, given: Mapping[str, Tensor]) -> _Built:
    state = renamed(given, _LLADA2)
    widths = [arch.attention.width, *[arch.attention.kv_width] * 2]
    for layer in range(arch.layers):
        stem = f"model.layers.{layer}."
        for end in ("weight", "bias") if arch.attention.qkv_bias else ("weight",):
            fused = state.pop(f"{stem}attention.query_key_value.{end}")
            for kind, part in zip("qkv", fused.split(widths), strict=True):
                state[f"{stem}self_attn.{kind}_proj.{end}"] = part
    _stack_experts(arch, state)
    ffn = arch.feed_forward
    return {
        "intermediate_size": arch.stack[0].feed_forward.size, "moe_intermediate_size": ffn.size,
        "n_routed_experts": ffn.experts, "num_experts_per_tok": ffn.experts_per_token, "n_shared_experts": ffn.shared // ffn.size,
        "first_k_dense_replace": _dense_layers(arch), "n_group": ffn.groups or 1, "topk_group": ffn.top_groups or 1,
        "routed_scaling_factor": ffn.scale, "norm_topk_prob": ffn.experts_per_token > 1,
        "use_qk_norm": arch.attention.head_norms, "attention_bias": arch.attention.qkv_bias,
        "experts_implementation": "eager",
    }, state  # fmt: skip


_FAMILIES: Mapping[str, tuple[str, Callable[[Architecture, Mapping[str, Tensor]], _Built]]] = {
    "llada": ("Llama", _llada),
    "dream": ("Qwen2", _qwen),
    "fast-dllm-v2": ("Qwen2", _qwen),
    "sdar": ("Qwen3", _qwen),
    "llada-moe": ("Qwen3Moe", _llada_moe),
    "llada2": ("Glm4Moe", _llada2),
}
