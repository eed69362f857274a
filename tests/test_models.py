"""The shipped families: sizes, tensor names, parameter counts, configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mosaic.errors import CheckpointError, UnknownName, UnsupportedModel
from mosaic.models import PRESETS, load
from mosaic.registrar.validate import validate

# Parameters of the released checkpoints, from their published shapes.
PARAMETERS = {"llada-8b": 8_015_581_184, "dream-7b": 7_615_616_512, "llada-moe": 7_356_880_896}


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_those_of_the_checkpoint(name: str) -> None:
    graph = load(name).graph()
    weights = [b for b in graph.buffers if b.kind == "weight" and b.tensor and not b.tensor.startswith("=")]
    assert sum(int(b.spec.elements) for b in weights) == PARAMETERS[name]
    assert len({b.tensor for b in weights}) == len(weights)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("choices", [{"head": "logits"}, {"head": "fused"}])
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
@pytest.mark.parametrize("logits", [False, True])
def test_every_variant_validates(name: str, choices: dict[str, str], backend: str, logits: bool) -> None:
    from mosaic.kernels import KERNELS

    graph = load(name).graph(backend=backend, choices=choices, logits=logits)
    validate(graph, kernels=KERNELS)
    assert ("logits" in graph._names) == logits


def test_logits_exist_only_in_the_logits_variant() -> None:
    fused = load("llada-8b").graph(choices={"head": "fused"})
    assert not any(126464 in b.shape and b.kind == "transient" for b in fused.buffers)


def test_dream_shifts_row_indices_and_never_logits() -> None:
    graph = load("dream-7b").graph()
    assert [op.contract.name for op in graph.ops].count("shift_rows") == 1
    assert not any(op.contract.name == "shift_rows" for op in load("llada-8b").graph().ops)


def write_config(tmp_path: Path, **changes: Any) -> Path:
    config = dict(PRESETS["dream-7b"][1]) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_directory_is_read_like_a_preset(tmp_path: Path) -> None:
    model = load(
        write_config(tmp_path, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    )
    assert model.family == "dream" and model.architecture.layers == 2 and model.path == tmp_path
    assert load(tmp_path / "config.json").architecture == model.architecture


def test_llada_moe_is_told_by_its_architecture(tmp_path: Path) -> None:
    config = dict(PRESETS["llada-moe"][1]) | {"model_type": "llada"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).family == "llada-moe"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            r"'gpt2'; supported: llada, dream, llada-moe.*README",
        ),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": -4}, "'hidden_size' must be a positive integer"),
        ({"num_hidden_layers": "28"}, "'num_hidden_layers' must be a positive integer"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"rope_theta": "fast"}, "cannot be read"),
        ({"torch_dtype": "float3"}, "unknown dtype"),
    ],
)
def test_unusable_configs_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(write_config(tmp_path, **changes))


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        load(tmp_path)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'llada-8b'\?"):
        load("llada8b")
