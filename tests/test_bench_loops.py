"""The published loops in plain PyTorch: what they cost, and that Mosaic generates the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from reference_runner import random_tensors
from test_decoding import CONFIGS, MASK, prompt_of

from benchmarks import decoding as benchmark
from benchmarks import record, report
from benchmarks.bench.baselines import Transformer
from benchmarks.loops import PlainModel, generate_plainly
from mosaic import decoding, models
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.errors import UsageError

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"gen_length": 16, "block_length": 8, "steps": 8}),
    "llada-guided": ("llada", {"gen_length": 16, "block_length": 8, "steps": 8, "cfg_scale": 0.7}),
    "fast-dllm": (
        "llada",
        {"gen_length": 16, "block_length": 8, "algorithm": "fast-dllm", "threshold": 0.4},
    ),
    "fast-dllm-prefix": (
        "llada",
        {"gen_length": 16, "block_length": 8, "algorithm": "fast-dllm", "threshold": 0.4, "cache": "prefix"},
    ),
    "fast-dllm-dual": (
        "llada",
        {"gen_length": 16, "block_length": 8, "algorithm": "fast-dllm", "threshold": 0.4, "cache": "dual"},
    ),
    "sdar": ("sdar", {"gen_length": 24, "threshold": 0.3}),
    "sdar-static": ("sdar", {"gen_length": 24, "steps": 3, "remasking": "low_confidence_static"}),
    "sdar-sequential": ("sdar", {"gen_length": 21, "steps": 4, "remasking": "sequential"}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny products wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network_of(family: str) -> tuple[Transformer, dict[str, torch.Tensor]]:
    """A tiny model that never finds the mask most likely: the published loops take that for a position still open."""
    arch = models.load(CONFIGS[family]).architecture
    tensors = random_tensors(arch, 0)
    tensors[arch.names.head][MASK] = 0
    network = Transformer(arch, wide_rotary=family == "llada")
    for name, tensor in network.tensors.items():
        tensor.copy_(tensors[name])
    return network, tensors


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("prompt_len", [5, 19])
@pytest.mark.parametrize("way", WAYS)
def test_mosaic_generates_the_tokens_of_the_published_loop(way: str, prompt_len: int) -> None:
    family, options = WAYS[way]
    network, tensors = network_of(family)
    prompt = prompt_of(prompt_len)
    runner = CompiledRunner(CONFIGS[family], tensors)
    (answer,) = decoding.generate(runner, [prompt], stop_at_eos=False, **options)
    plain = generate_plainly(PlainModel(network), prompt, resolve(GenerationConfig(**options), network.arch))
    runner.close()
    assert answer.token_ids.tolist() == plain.tolist()
    assert MASK not in plain.tolist() and len(set(plain.tolist())) > 2


def test_a_loop_counts_what_it_does() -> None:
    network, _ = network_of("llada")
    model = PlainModel(network, split=True)
    config = resolve(GenerationConfig(gen_length=8, block_length=8, steps=4), network.arch)
    generate_plainly(model, prompt_of(3), config)
    tally = model.tally
    assert (tally.passes, tally.tokens, tally.rows) == (4, 44, 44) and tally.layers_s > 0 and tally.head_s > 0
    network, _ = network_of("sdar")
    model = PlainModel(network)
    config = resolve(GenerationConfig(gen_length=16, remasking="low_confidence_static"), network.arch)
    generate_plainly(model, prompt_of(8), config)
    # a prefill, eight steps a block, and a pass that stores it
    assert (model.tally.passes, model.tally.tokens, model.tally.rows) == (19, 8 + 18 * 8, 16 * 8)
    assert model.tally.layers_s == 0


def test_shared_keys_need_not_be_repeated() -> None:
    network, _ = network_of("sdar")
    assert network.arch.attention.kv_heads < network.arch.attention.heads
    ids, block = torch.arange(3 * network.arch.block)[None], network.arch.block
    with torch.no_grad():
        repeated, grouped = (
            model.layers(ids[:, -block:], 2 * block, model.layers(ids[:, : 2 * block])[1])[0]
            for model in (PlainModel(network), PlainModel(network, grouped=True))
        )
    torch.testing.assert_close(grouped, repeated)


@pytest.mark.parametrize(
    ("family", "options"), [("dream", {}), ("llada", {"remasking": "random"}), ("sdar", {"top_p": 0.5})]
)
def test_what_has_no_loop_is_refused(family: str, options: dict[str, Any]) -> None:
    network = Transformer(models.load(CONFIGS[family]).architecture)
    with pytest.raises(UsageError, match="no plain loop for"):
        generate_plainly(PlainModel(network), prompt_of(8), resolve(GenerationConfig(**options), network.arch))


# --- the benchmark --------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_the_benchmark_sets_engines_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_this_process(module: str, case: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert module == "benchmarks.decoding" and timeout_s > 0
        return json.loads(json.dumps(benchmark.run_case(json.loads(json.dumps(case)))))  # type: ignore[no-any-return]

    monkeypatch.setattr(benchmark, "in_own_process", in_this_process)
    monkeypatch.setenv("OUT", str(tmp_path))
    small = {"prompt": "32", "gen-length": "32", "repeats": "1", "device": "cpu", "minutes": "5"}
    benchmark.main(["tiny-sdar", *(part for name, value in small.items() for part in (f"--{name}", value))])
    result = json.loads((tmp_path / "decoding-tiny-sdar-cpu.json").read_text())
    greedy, drawn = result["points"]
    assert (greedy["setting"], drawn["setting"]) == ("sdar, greedy", "sdar, T=1") and greedy["equal"] == 1.0
    ours, plain = greedy["engines"]["mosaic"], greedy["engines"]["plain"]
    # a prefill, and one of the block's 32 tokens a step; plain stores the finished block too
    assert ours["passes"] == 33 and plain["passes"] == 34 and plain["rows"] == ours["rows"] == 32 * 32
    assert greedy["ratio"] == pytest.approx(greedy["from"]["step"] * greedy["from"]["passes"])
    assert ours["peak_bytes"] > result["engines"]["mosaic"]["weights_bytes"] < plain["peak_bytes"]
    rows = benchmark.rows_of(result["points"])
    assert len(rows) == 2 and {len(row) for row in rows} == {len(benchmark.HEADER)}
    assert "tiny-sdar on cpu, float32" in capsys.readouterr().out
    assert "**tiny-sdar, float32, 32 tokens**" in report.decoding_section([result])
    assert benchmark.differing(result) == []
    assert benchmark.differing({**result, "points": [{**greedy, "equal": 0.9}, {**drawn, "equal": 0.1}]}) == [
        "sdar, greedy, prompt 32"
    ]


def test_the_section_has_its_place() -> None:
    text = (record.ROOT / "docs" / "records.md").read_text()
    assert text.count("<!-- decoding:begin -->") == text.count("<!-- decoding:end -->") == 1
