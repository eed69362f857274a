"""`compile` end to end on a CPU: statistics equal those of stock transformers classes, memory equals the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import allocated_bytes
from torch import Tensor, nn

import mosaic
from mosaic.errors import CheckpointError, DoesNotFit, RuntimeMemoryError, UsageError
from mosaic.planner import Request
from mosaic.runtime.compiled import CompiledModel, StepOutput

LLADA = {
    "model_type": "llada", "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96,
    "embedding_size": 257, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "mask_token_id": 256, "torch_dtype": "float32",
}  # fmt: skip
DREAM = {
    "model_type": "Dream", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 301, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "mask_token_id": 300, "torch_dtype": "float32",
}  # fmt: skip
MOE = {
    "model_type": "lladamoe", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "expert_intermediate_size": 40, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 211, "rope_theta": 50000.0, "rms_norm_eps": 1e-5, "mask_token_id": 210,
    "torch_dtype": "float32",
}  # fmt: skip


def weights_of(model: CompiledModel) -> dict[str, Tensor]:
    """The model's weights as a checkpoint names them."""
    from mosaic.models.safetensors import members

    return {
        name: (view if len(members(tensor)) == 1 else view[i])
        for tensor, view in model.weights().items()
        if not tensor.startswith("=")
        for i, name in enumerate(members(tensor))
    }


def llada_reference(model: CompiledModel) -> nn.Module:
    from stock_models import LLADA_NAMES, renamed
    from transformers import LlamaConfig, LlamaForCausalLM

    ffn = model.model.architecture.feed_forward.size
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=ffn,
        vocab_size=257, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="eager", max_position_embeddings=4096,
    )  # fmt: skip
    reference = LlamaForCausalLM(config)
    reference.load_state_dict(renamed(weights_of(model), LLADA_NAMES))
    return reference


def dream_reference(model: CompiledModel) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ffn = model.model.architecture.feed_forward.size
    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=ffn,
        vocab_size=301, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    reference = Qwen2ForCausalLM(config)
    reference.load_state_dict(weights_of(model))
    return reference


def moe_reference(model: CompiledModel) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    ffn = model.model.architecture.feed_forward.size
    config = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=ffn,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=1, head_dim=16, vocab_size=211,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        attn_implementation="eager", mlp_only_layers=[], tie_word_embeddings=False, experts_implementation="eager",
    )  # fmt: skip
    reference = Qwen3MoeForCausalLM(config)
    given = weights_of(model)
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: torch.stack([given.pop(f"{stem}{e}.{kind}_proj.weight") for e in range(8)])
            for kind in ("gate", "up", "down")
        }
        given[f"{stem}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        given[f"{stem}down_proj"] = parts["down"]
    reference.load_state_dict(given)
    return reference


FAMILIES: dict[str, tuple[dict[str, Any], Callable[[CompiledModel], nn.Module]]] = {
    "llada": (LLADA, llada_reference),
    "dream": (DREAM, dream_reference),
    "moe": (MOE, moe_reference),
}


def reference_logits(module: nn.Module, sequences: list[Tensor], shifted: bool) -> Tensor:
    """Logits of every row of the packed batch, each sequence fully visible to itself, in float64."""
    rows = []
    module.eval().double()
    for ids in sequences:
        mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
        with torch.no_grad():
            logits = module(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
        rows.append(torch.cat([logits[:1], logits[:-1]]) if shifted else logits)
    return torch.cat(rows)


def assert_step(step: StepOutput, logits: Tensor, tolerance: float = 2e-5) -> None:
    """Compare with float64 logits [T, V] of weights of deviation 0.02; the tolerance is about 100 roundings of 1."""
    mine = logits[step.rows]
    top = mine.topk(2).values
    assert torch.equal(step.token_ids, mine.argmax(1)) or float((top[:, 0] - top[:, 1]).min()) < tolerance
    pairs = {
        "maximum": top[:, 0],
        "second": top[:, 1],
        "logsumexp": mine.logsumexp(1),
        "confidence": mine.softmax(1).amax(1),
        "entropy": torch.distributions.Categorical(logits=mine).entropy(),
    }
    for name, expected in pairs.items():
        torch.testing.assert_close(getattr(step, name).double(), expected, rtol=tolerance, atol=tolerance)


def sequences_of(lengths: tuple[int, ...], config: Mapping[str, Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask_id = int(config["mask_token_id"])
    parts = [torch.randint(0, mask_id, (length,), generator=generator) for length in lengths]
    for part in parts:
        part[torch.rand(len(part), generator=generator) < 0.4] = mask_id
        part[-1] = mask_id
    return parts


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("lengths", [(1,), (37,), (19, 1, 300)], ids=str)
def test_a_step_equals_the_reference_model(family: str, lengths: tuple[int, ...]) -> None:
    config, reference = FAMILIES[family]
    sequences = sequences_of(lengths, config)
    with mosaic.compile(config, debug="poison") as model:
        # norms that differ from 1 make a norm left out visible
        step = model(sequences)
        logits = reference_logits(reference(model), sequences, shifted=family == "dream")
        assert step.rows.tolist() == (torch.cat(sequences) == config["mask_token_id"]).nonzero().view(-1).tolist()
        assert_step(step, logits)


@pytest.mark.some
def test_a_chunked_step_in_a_small_budget_equals_the_reference_model(family: str) -> None:
    config, reference = FAMILIES[family]
    wide = {"llada": "mlp_hidden_size", "dream": "intermediate_size", "moe": "expert_intermediate_size"}[family]
    config = {**config, wide: 1501}  # so that the feed-forward holds the peak, and has to be chunked
    sequences, masked = sequences_of((411, 301), config), torch.arange(0, 712, 2)
    with mosaic.compile(config) as model:
        floor = model.planner.needed(Request(seq_lens=(411, 301), masked=len(masked)))
        unchunked = model.plan((411, 301), masked=len(masked))
    with mosaic.compile(config, budget=floor + 4096, debug="poison") as model:
        step = model(sequences, masked=masked)
        document = step.plan.document
        assert any(region["extent"] % region["rows"] for region in document["regions"]), "wants a short last chunk"
        assert document["peak_bytes"] < unchunked.peak_bytes / 2
        assert_step(step, reference_logits(reference(model), sequences, shifted=family == "dream"))
        assert sum(model.memory().committed.values()) <= floor + 4096


def test_logits_of_chosen_rows_are_the_reference_models(family: str) -> None:
    config, reference = FAMILIES[family]
    sequences = sequences_of((23, 40), config)
    chosen = torch.tensor([0, 5, 23, 62])
    with mosaic.compile(config, debug="poison") as model:
        step = model(sequences, logits_for=chosen)
        expected = reference_logits(reference(model), sequences, shifted=family == "dream")
        assert step.logits is not None
        torch.testing.assert_close(step.logits.double(), expected[chosen], rtol=2e-5, atol=2e-5)
        assert_step(step, expected)


@pytest.mark.some
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_come_close_to_float32(family: str, dtype: str) -> None:
    config, _ = FAMILIES[family]
    sequences = sequences_of((30, 12), config)
    with mosaic.compile(config, dtype=dtype, debug="poison") as model:
        step = model(sequences)
        weights = {name: tensor.double() for name, tensor in weights_of(model).items()}
        with mosaic.compile(config, dtype="float64") as wide:
            for name, tensor in weights_of(wide).items():
                tensor.copy_(weights[name])
            expected = wide(sequences)
            # activations are of the order of 1 and logits below it: a few dozen roundings of the dtype
            tolerance = 1e-5 if dtype == "float64" else 50 * torch.finfo(getattr(torch, dtype)).eps
            torch.testing.assert_close(step.logsumexp, expected.logsumexp, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(step.maximum, expected.maximum, rtol=tolerance, atol=tolerance)


def test_masks_and_batches_are_read_in_every_form() -> None:
    ids = torch.stack(sequences_of((16, 16), LLADA))
    mask = ids == LLADA["mask_token_id"]
    rows = mask.view(-1).nonzero().view(-1)
    with mosaic.compile(LLADA) as model:
        expected = model(ids).clone()
        forms: list[tuple[Any, Any]] = [
            (ids, mask), (ids, rows), (list(ids), list(mask)), (list(ids), mask.view(-1)), (ids.to(torch.int32), None),
        ]  # fmt: skip
        for given, masked in forms:
            step = model(given, masked)
            assert torch.equal(step.rows, expected.rows) and torch.equal(step.maximum, expected.maximum)


def test_a_row_does_not_depend_on_what_else_is_asked() -> None:
    ids = sequences_of((64,), LLADA)[0]
    with mosaic.compile(LLADA, debug="poison") as model:
        everything = model(ids, masked=torch.arange(64)).clone()
        for rows in (torch.tensor([63]), torch.arange(0, 64, 7), torch.tensor([5, 3])):
            step = model(ids, masked=rows)
            torch.testing.assert_close(step.maximum, everything.maximum[rows], rtol=1e-6, atol=1e-6)


def test_a_call_of_a_shape_that_came_before_has_its_own_ids_rows_and_logits() -> None:
    before = [([1, 256, 3, 256], [0, 2]), ([256, 2, 3, 256], None)]
    calls = [([7, 8, 256, 256], [1, 3]), ([5, 256, 256, 4], None)]
    with mosaic.compile(LLADA) as model, mosaic.compile(LLADA) as fresh:
        for ids, rows in before:
            model(ids, logits_for=rows)
        for ids, rows in calls:
            step, alone = model(ids, logits_for=rows), fresh(ids, logits_for=rows)
            assert torch.equal(step.rows, alone.rows) and torch.equal(step.maximum, alone.maximum)
            assert (step.logits is None) == (rows is None)
            assert step.logits is None or torch.equal(step.logits, alone.logits)


def test_no_masked_row_gives_empty_statistics() -> None:
    with mosaic.compile(LLADA) as model:
        step = model(torch.tensor([1, 2, 3]))
        assert step.rows.numel() == step.token_ids.numel() == 0


@pytest.mark.parametrize(
    ("ids", "masked", "message"),
    [
        (torch.zeros(2, 2, 2, dtype=torch.int64), None, "shape"),
        (torch.zeros(0, dtype=torch.int64), None, "empty"),
        ([], None, "at least one"),
        (torch.zeros(3), None, "integers"),
        ([True, False], None, "expected integers, got torch.bool"),
        ([1, 2, True], None, "found True at place 2"),
        ([[1, 2], (False, 3)], None, "found False at place 0"),
        ([1, 2], [0, True], "masked: numbers and booleans are mixed, found True at place 1"),
        (torch.tensor([1, 257]), None, r"ids in \[0, 257\), got 257"),
        (torch.tensor([1, -1]), None, "got -1"),
        (torch.tensor([1, 2]), torch.tensor([2]), r"rows in \[0, 2\)"),
        (torch.tensor([1, 2]), torch.tensor([True]), "boolean mask of lengths"),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 1]), "list each row once"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(ids: Any, masked: Any, message: str) -> None:
    with mosaic.compile(LLADA) as model, pytest.raises(UsageError, match=message):
        model(ids, masked)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_committed_and_resident_bytes_follow_the_plan() -> None:
    """They are the most that a plan needed, and after `trim` those of the last."""
    highest, changes = 0, []
    with mosaic.compile(LLADA) as model:
        for tokens in (500, 2000, 60, 2000, 500, 60):
            model(torch.full((tokens,), 256))
            report = model.memory()
            assert report.planned["workspace"] == model.plan(tokens, masked=tokens).components["workspace"]
            highest = max(highest, report.planned["workspace"])
            assert {**report.planned, "workspace": highest} == report.committed == report.resident
            changes.append(model.workspace.changes())
        assert changes[0] < changes[1] == changes[-1]  # sizes that were there before map nothing
        model.trim()
        report = model.memory()
        assert report.planned == report.committed == report.resident and report.planned["workspace"] < highest
        assert "resident" in str(report)


def test_the_step_itself_allocates_nothing(family: str) -> None:
    config, _ = FAMILIES[family]
    with mosaic.compile(config) as model:
        inputs = {"token_ids": torch.full((200,), int(config["mask_token_id"])), "rows": torch.arange(200)}
        model(inputs["token_ids"])
        (executor,) = model.executors
        inputs |= {"positions": torch.arange(200, dtype=torch.int32), "cu_seqlens": torch.tensor([0, 200])}

        def step() -> None:
            for name, value in inputs.items():
                executor.inputs[name].copy_(value)
            executor.run()

        assert allocated_bytes(step) == 0


def test_a_step_that_does_not_fit_is_refused_before_it_runs() -> None:
    with mosaic.compile(LLADA, budget="4MiB") as model:
        model(torch.full((100,), 256))
        with pytest.raises(DoesNotFit, match=r"needs .* the budget is 4.00 MiB; the largest context") as refusal:
            model(torch.full((100_000,), 256))
        assert refusal.value.needed_bytes > refusal.value.available_bytes == 4 << 20
        model(torch.full((100,), 256))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DoesNotFit):
        mosaic.compile(LLADA, budget=100_000)


def test_plans_are_reused_while_rows_get_fewer() -> None:
    with mosaic.compile(LLADA) as model:
        ids = torch.full((256,), 256)
        for masked in range(256, 224, -1):
            model(ids, masked=torch.arange(masked))
        assert len(model.executors) <= 4


def test_an_exact_plan_is_made_where_rounded_rows_do_not_fit() -> None:
    """In a budget of exactly 257 rows' needs, 257 rows run although they would be rounded up to 288."""
    config = {**LLADA, "embedding_size": 2001}  # the head holds the peak, whose logits are asked for
    ids, rows = torch.full((300,), 256), torch.arange(257)
    with mosaic.compile(config) as model:
        expected = model(ids, masked=rows, logits_for=rows).clone()
        requests = (Request(seq_lens=(300,), masked=count, logit_rows=count) for count in (257, 288))
        exact, rounded = (model.planner.needed(request) for request in requests)
    assert exact < rounded
    with mosaic.compile(config, budget=exact) as model:
        for _ in range(2):
            torch.testing.assert_close(model(ids, masked=rows, logits_for=rows).maximum, expected.maximum)


def test_a_closed_model_says_so() -> None:
    model = mosaic.compile(LLADA)
    model.close()
    model.close()
    with pytest.raises(RuntimeMemoryError, match="closed"):
        model(torch.tensor([1]))
    assert model.workspace.ledger.committed_bytes == 0


# --- sources ----------------------------------------------------------------------------------------------------------


def test_random_weights_depend_on_the_seed_and_the_name_alone() -> None:
    with mosaic.compile(LLADA) as a, mosaic.compile(LLADA, seed=1) as b, mosaic.compile({**LLADA, "n_layers": 1}) as c:
        name = "model.transformer.blocks.0.q_proj.weight"
        assert not torch.equal(weights_of(a)[name], weights_of(b)[name])
        assert torch.equal(weights_of(a)[name], weights_of(c)[name])
        norm = weights_of(a)["model.transformer.ln_f.weight"]
        assert 0.9 < float(norm.mean()) < 1.1


def test_save_and_compile_again_give_the_same_step(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config, _ = FAMILIES[family]
    ids = sequences_of((50,), config)[0]
    with mosaic.compile(config) as model:
        before = model(ids).clone()
        model.save(tmp_path / "saved")
        stored = load_file(tmp_path / "saved" / "model.safetensors")
        weights = weights_of(model)
        assert set(stored) == set(weights) and all(torch.equal(stored[name], weights[name]) for name in stored)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "float32"
    with mosaic.compile(tmp_path / "saved") as model:
        after = model(ids)
        assert torch.equal(before.maximum, after.maximum) and torch.equal(before.token_ids, after.token_ids)


class Module(nn.Module):
    """Parameters under given names, with a config, as a Hugging Face module has them."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = dict(config)
        self._weights = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._weights)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._weights.values())


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_modules_parameters_are_adopted_without_a_copy(prefix: str) -> None:
    ids = sequences_of((50,), LLADA)[0]
    with mosaic.compile(LLADA) as model:
        before = model(ids).clone()
        module = Module(LLADA, {prefix + n.removeprefix("model."): t for n, t in weights_of(model).items()})
    with mosaic.compile(module) as adopted:
        step = adopted(ids)
        assert torch.equal(before.maximum, step.maximum)
        own = {tensor.data_ptr() for tensor in module.parameters()}
        assert {tensor.data_ptr() for tensor in weights_of(adopted).values()} == own
        assert "weights" not in adopted.workspace.committed_bytes()
        assert adopted.memory().committed["weights"] == adopted.memory().planned["weights"]


def test_a_module_of_the_wrong_dtype_is_refused() -> None:
    with mosaic.compile(LLADA) as model:
        module = Module(LLADA, weights_of(model))
    with pytest.raises(CheckpointError, match=r"expected bfloat16 .* found float32"):
        mosaic.compile(module, dtype="bfloat16")
    with pytest.raises(UsageError, match="no config"):
        mosaic.compile(nn.Linear(1, 1))


def test_a_cuda_device_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="device='cpu'"):
        mosaic.compile(LLADA, device="h200")


def test_a_card_older_than_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(UsageError, match=r"Tesla T4 has compute capability 7\.5, the kernels need 8\.0"):
        mosaic.compile("llada-8b", device="h200")
