"""Families causal by blocks, in float32 against stock transformers classes fed an additive mask; as in test_parity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from test_runtime_compiled import sequences_of
from torch import Tensor, nn

import mosaic
from benchmarks.bench.baselines import Transformer
from mosaic.models import load
from mosaic.models.parts import LOGITS
from mosaic.models.phase import Phase
from mosaic.models.safetensors import members, tensor_rows
from mosaic.runtime.compiled import CompiledModel

SDAR = {
    "model_type": "sdar", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 80, "vocab_size": 211, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "block_size": 4, "mask_token_id": 210, "torch_dtype": "float32",
}  # fmt: skip
FAST = {
    "model_type": "Fast_dLLM_Qwen", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 301, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "bd_size": 32, "tie_word_embeddings": True, "mask_token_id": 300, "torch_dtype": "float32",
}  # fmt: skip
LLADA2 = {
    "model_type": "llada2_moe", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 72, "moe_intermediate_size": 40, "num_experts": 16,
    "num_experts_per_tok": 3, "num_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "score_function": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": True, "vocab_size": 211,
    "rope_theta": 600000.0, "rms_norm_eps": 1e-6, "mask_token_id": 210, "torch_dtype": "float32",
}  # fmt: skip


def checkpoint_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights as its checkpoint has them: stacks apart, rows of fused tensors together."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for tensor, view in weights.items():
        if tensor.startswith("="):
            continue
        names = members(tensor)
        for part, member in zip([view] if names == [tensor] else view, names, strict=True):
            name, rows = tensor_rows(member)
            parts.setdefault(name, []).append((rows[0] if rows else 0, part))
    return {
        name: torch.cat([part for _, part in sorted(some, key=lambda entry: entry[0])]) if len(some) > 1 else some[0][1]
        for name, some in parts.items()
    }


def sdar_reference(weights: Mapping[str, Tensor]) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=80, vocab_size=211, rms_norm_eps=1e-6, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
    )  # fmt: skip
    reference = Qwen3ForCausalLM(config)
    reference.load_state_dict(checkpoint_of(weights))
    return reference


def fast_reference(weights: Mapping[str, Tensor]) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        vocab_size=301, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager", tie_word_embeddings=True,
    )  # fmt: skip
    reference = Qwen2ForCausalLM(config)
    given = checkpoint_of(weights)
    reference.load_state_dict({**given, "lm_head.weight": given["model.embed_tokens.weight"]})
    return reference


def llada2_reference(weights: Mapping[str, Tensor]) -> nn.Module:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=72, moe_intermediate_size=40, n_routed_experts=16, num_experts_per_tok=3, n_shared_experts=2,
        first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        use_qk_norm=True, vocab_size=211, rms_norm_eps=1e-6, attention_bias=False, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 600000.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    renames = {
        "word_embeddings": "embed_tokens", "attention.dense": "self_attn.o_proj",
        "attention.query_layernorm": "self_attn.q_norm", "attention.key_layernorm": "self_attn.k_norm",
        "gate.expert_bias": "gate.e_score_correction_bias",
    }  # fmt: skip
    given: dict[str, Tensor] = {}
    for name, tensor in checkpoint_of(weights).items():
        for old, new in renames.items():
            name = name.replace(old, new)
        given[name] = tensor
    for layer in range(3):
        stem = f"model.layers.{layer}."
        fused = given.pop(f"{stem}attention.query_key_value.weight")  # 4 heads of q, then 2 of k, then 2 of v
        for kind, part in zip("qkv", fused.split([64, 32, 32]), strict=True):
            given[f"{stem}self_attn.{kind}_proj.weight"] = part
        if layer == 0:
            continue
        experts = {
            kind: torch.stack([given.pop(f"{stem}mlp.experts.{e}.{kind}_proj.weight") for e in range(16)])
            for kind in ("gate", "up", "down")
        }
        given[f"{stem}mlp.experts.gate_up_proj"] = torch.cat([experts["gate"], experts["up"]], dim=1)
        given[f"{stem}mlp.experts.down_proj"] = experts["down"]
    reference = Glm4MoeForCausalLM(config)
    reference.load_state_dict(given)
    return reference


FAMILIES: dict[str, tuple[dict[str, Any], Callable[[Mapping[str, Tensor]], nn.Module]]] = {
    "sdar": (SDAR, sdar_reference),
    "fast-dllm-v2": (FAST, fast_reference),
    "llada2": (LLADA2, llada2_reference),
}


def block_mask(tokens: int, block: int) -> Tensor:
    """Additive [1, 1, T, T]: a query sees the keys of its block and of those before."""
    number = torch.arange(tokens) // block
    return torch.zeros(tokens, tokens).masked_fill(number[:, None] < number[None, :], float("-inf"))[None, None]


def logits_of(module: nn.Module, ids: Tensor, block: int, *, shifted: bool) -> Tensor:
    """The reference's own float32 logits of every row of a sequence."""
    with torch.no_grad():
        mask = block_mask(len(ids), block)
        logits = module.eval()(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
    return torch.cat([logits[:1], logits[:-1]]) if shifted else logits


def logits_by(family: str) -> Callable[[CompiledModel], Callable[[Tensor], Tensor]]:
    """The reference of a model; blocks must make a difference."""
    _, reference = FAMILIES[family]

    def of_model(model: CompiledModel) -> Callable[[Tensor], Tensor]:
        module, arch = reference(model.weights()), model.architecture

        def logits(ids: Tensor) -> Tensor:
            found = logits_of(module, ids, arch.block, shifted=arch.shifted)
            unblocked = logits_of(module, ids, 1 << 20, shifted=arch.shifted)
            assert len(ids) <= arch.block or not torch.allclose(found, unblocked)
            return found

        return logits

    return of_model


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Case]:
    config, _ = FAMILIES[request.param]
    sequences = sequences_of(parity.LENGTHS, config)
    made = parity.Case(config, sequences, logits_by(request.param), tmp_path_factory.mktemp(request.param))
    yield made
    made.model.close()


class TestGrid(parity.GridTests):
    """Every configuration and phase."""


def test_a_saved_checkpoint_has_the_published_names_and_loads_again(case: parity.Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    case.model.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    expected = checkpoint_of(case.model.weights())
    assert stored.keys() == expected.keys() and not any("[" in name or "{" in name for name in stored)
    if case.model.model.family == "llada2":
        assert stored["model.layers.1.attention.query_key_value.weight"].shape == (128, 64)
    with mosaic.compile(tmp_path) as again:
        case.run(again, parity.Point(Phase(logits=LOGITS), (0, 1, 2)))


def test_a_sequence_within_one_block_is_bidirectional() -> None:
    """The last token changes the first row's logits; in the next block it does not."""
    model = mosaic.compile(SDAR | {"block_size": 8})
    parity.enlarge(model)
    rows = torch.arange(1)
    ids = torch.arange(16)
    first = model(ids, masked=rows, logits_for=rows).logits
    assert first is not None
    first = first.clone()
    ids[15] = 99
    assert torch.equal(first, model(ids, masked=rows, logits_for=rows).logits)
    ids[7] = 99
    assert not torch.equal(first, model(ids, masked=rows, logits_for=rows).logits)
    model.close()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_baseline_of_mosaic_bench_is_the_stock_model(family: str) -> None:
    """Its logits, and its tensors' names and shapes, so that one seed gives both the same weights."""
    config, reference = FAMILIES[family]
    model = load(config)
    made = Transformer(model.architecture, wide_rotary=False)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in made.tensors.items():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.12, generator=generator)
    (ids,) = sequences_of((150,), config)
    expected = logits_of(reference(made.tensors), ids, model.architecture.block, shifted=False)
    with torch.no_grad():
        found = made.logits(ids[None])[0]
    assert float((found - expected).abs().max()) <= parity.BOUND * float(expected.abs().max())
    document = mosaic.plan(model, tokens=8, device="cpu").document
    planned = {b["tensor"]: b["shape"] for b in document["buffers"] if b["tensor"] and not b["tensor"].startswith("=")}
    assert {name: list(tensor.shape) for name, tensor in made.tensors.items()} == planned
