"""Tokens per second of generation: Mosaic beside the published loops in plain PyTorch, and where the difference comes from.

    python -m benchmarks.decoding llada-8b sdar-8b --device h200 --minutes 4
    python -m benchmarks.decoding tiny-llada tiny-sdar --device cpu --threads 1

writes `decoding-<model>-<device>[-tag].json` per model. Each engine has a process of its own and runs every setting in it: to
warm up, then counted; a figure is the median of whole generations. Weights and prompts are the same. In float32 the greedy tokens
have to be the same too: where they are not, the command fails after it has written its results.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.cases import GRACE_S, Clock, in_own_process, options, tag_of, token_counts
from benchmarks.record import environment, table, write
from mosaic.models import Model, load

__all__ = ["HEADER", "TINY", "main", "rows_of", "run_case", "settings_of"]

_TINY_TOKENS: Final = {"mask_token_id": 1023, "eos_token_id": 0, "torch_dtype": "float32"}
TINY: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny-llada": {
        "model_type": "llada", "d_model": 256, "n_layers": 6, "n_heads": 8, "mlp_hidden_size": 768, "embedding_size": 1024,
        "max_sequence_length": 8192, **_TINY_TOKENS,
    },
    "tiny-sdar": {
        "model_type": "sdar", "block_size": 32, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 768, "vocab_size": 1024, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, **_TINY_TOKENS,
    },
}  # fmt: skip
"""Models of the size that ships, with random weights."""
ENGINES: Final = ("mosaic", "mosaic, no graphs", "plain")
_SPREAD: Final = 3.0
"""Tiny weights are drawn wide, so that no two tokens are nearly as likely."""
_REPEATS: Final = 3


def settings_of(model: Model, gen_length: int, *, card: bool) -> dict[str, dict[str, Any]]:
    """The timed generations by name: fields of `GenerationConfig`."""
    if model.architecture.block:
        return {
            "sdar, greedy": {"gen_length": gen_length},
            "sdar, T=1": {"gen_length": gen_length, "temperature": 1.0},
        }
    block: dict[str, Any] = {"gen_length": gen_length, "block_length": min(32, gen_length)}
    found = {
        "llada, greedy": {**block, "steps": gen_length},
        "llada, T=1": {**block, "steps": gen_length, "temperature": 1.0},
        "fast-dllm, dual": {**block, "algorithm": "fast-dllm", "cache": "dual"},
    }
    return found if card else {**found, "fast-dllm, prefix": {**found["fast-dllm, dual"], "cache": "prefix"}}


def run_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Run every setting of one engine; tokens and figures of each."""
    import torch

    from benchmarks.bench.meters import card, driver_bytes
    from mosaic.devices import load_device

    if case["threads"]:
        torch.set_num_threads(case["threads"])
    cuda = load_device(case["device"]).backend == "cuda"
    engine = _Mosaic(case, cuda) if case["engine"].startswith("mosaic") else _Plain(case, cuda)
    points = []
    started = time.monotonic()
    for tokens in case["prompts"]:
        for name, asked in case["settings"].items():
            if time.monotonic() - started > case["limit_s"]:
                break
            points.append({"prompt": tokens, "setting": name, **engine.point(tokens, asked, case["repeats"])})
    found = {"engine": case["engine"], "card": card(cuda), "points": points, "driver_bytes": driver_bytes(cuda)}
    engine.close()
    return {**found, "weights_bytes": engine.weights_bytes, "dtype": engine.arch.dtype}


def _prompt(tokens: int, arch: Any, seed: int) -> Any:
    from benchmarks.bench.inputs import make_inputs

    ids = make_inputs(arch, tokens + 1, 0.0, seed).token_ids
    ids[ids == arch.mask_token_id] = (arch.mask_token_id + 1) % arch.vocabulary
    return ids[:tokens]


def _resolved(arch: Any, asked: Mapping[str, Any]) -> Any:
    from mosaic.decoding import GenerationConfig
    from mosaic.decoding.config import resolve

    return resolve(GenerationConfig(stop_at_eos=False, **asked), arch)


def _silence_mask(head: Any, arch: Any) -> None:
    """Random weights may find the mask most likely, which the published loops take for a position that is still open."""
    head[arch.mask_token_id].zero_()


class _Mosaic:
    """`CompiledModel.generate`, with a record of its steps."""

    def __init__(self, case: Mapping[str, Any], cuda: bool) -> None:
        import mosaic

        self.cuda, self.seed = cuda, case["seed"]
        self.compiled = mosaic.compile(
            case["model"],
            device=case["device"],
            dtype=case["dtype"],
            capture=case["engine"] == "mosaic",
            seed=case["seed"],
        )
        self.arch = self.compiled.architecture
        if self.compiled.model.path is None:
            name = self.arch.names.embedding if self.arch.tied else self.arch.names.head
            _silence_mask(self.compiled.weights()[name], self.arch)
        self.weights_bytes = self.compiled.memory().planned["weights"]

    def point(self, tokens: int, asked: Mapping[str, Any], repeats: int) -> dict[str, Any]:
        """Warm up, then time whole generations."""
        from benchmarks.bench.meters import timed
        from mosaic.decoding import GenerationConfig, Step

        config = GenerationConfig(stop_at_eos=False, seed=self.seed, **asked)
        prompt, steps = _prompt(tokens, self.arch, self.seed), list[Step]()

        def generate() -> Any:
            steps.clear()
            return self.compiled.generate(prompt, config, on_step=steps.append)[0].token_ids

        (first_s,) = timed(generate, 1, cuda=self.cuda)
        answer = generate()
        seconds = timed(generate, repeats, cuda=self.cuda)
        dims = [step.plan.document["dims"] for step in steps]
        decided = [n for n, step in zip(dims, steps, strict=True) if len(step.positions)]
        executors = self.compiled.executors
        return {
            "seconds": statistics.median(seconds), "all_seconds": seconds, "first_s": first_s, "passes": len(steps),
            "tokens": sum(n["tokens"] for n in dims), "rows": sum(n["masked"] for n in decided),
            "outside_s": seconds[-1] - sum(step.seconds for step in steps), "token_ids": answer.tolist(),
            "peak_bytes": max(step.peak_bytes for step in steps), "driver_bytes": _driver(self.cuda),
            "executors": len(executors), "captured": sum(executor.captured for executor in executors),
        }  # fmt: skip

    def close(self) -> None:
        """Give the memory back."""
        self.compiled.close()


class _Plain:
    """The published loop over the official model's arithmetic."""

    def __init__(self, case: Mapping[str, Any], cuda: bool) -> None:
        from benchmarks.bench.baselines import Transformer
        from benchmarks.bench.torch_engine import fill

        model = load(case["model"])
        model = model.with_dtype(case["dtype"]) if case["dtype"] else model
        self.cuda, self.seed, self.arch = cuda, case["seed"], model.architecture
        self.network = Transformer(self.arch, device="cuda" if cuda else "cpu", wide_rotary=model.family == "llada")
        fill(self.network.tensors, model, case["seed"])
        if model.path is None:
            _silence_mask(self.network.head.weight, self.arch)
        self.weights_bytes = sum(t.numel() * t.element_size() for t in self.network.tensors.values())

    def point(self, tokens: int, asked: Mapping[str, Any], repeats: int) -> dict[str, Any]:
        """Warm up while layers and head are timed apart, then time whole generations."""
        from benchmarks.bench.meters import timed
        from benchmarks.loops import PlainModel, generate_plainly

        prompt, config = _prompt(tokens, self.arch, self.seed), _resolved(self.arch, asked)

        def generate(split: bool = False) -> PlainModel:
            model = PlainModel(self.network, split=split)
            found.append(generate_plainly(model, prompt, config).tolist())
            return model

        found: list[list[int]] = []
        generate_plainly(PlainModel(self.network), prompt, _resolved(self.arch, _shortest(asked)))
        apart = generate(split=True).tally
        seconds = timed(generate, repeats, cuda=self.cuda)
        return {
            "seconds": statistics.median(seconds), "all_seconds": seconds, "passes": apart.passes, "tokens": apart.tokens,
            "rows": apart.rows, "layers_s": apart.layers_s, "head_s": apart.head_s, "token_ids": found[-1],
            "peak_bytes": self._peak(prompt, asked), "driver_bytes": _driver(self.cuda),
        }  # fmt: skip

    def _peak(self, prompt: Any, asked: Mapping[str, Any]) -> int | None:
        """Weights and the most that a short generation holds beside them, by PyTorch's own events; CPU only."""
        from benchmarks.engines.meters import alive_over_time, profiled
        from benchmarks.loops import PlainModel, generate_plainly

        if self.cuda:
            return None
        config = _resolved(self.arch, _shortest(asked))
        trace = profiled(lambda: generate_plainly(PlainModel(self.network), prompt, config), cuda=False)
        alive = alive_over_time(trace, cuda=False)
        return None if alive is None else self.weights_bytes + alive[0]

    def close(self) -> None:
        """Nothing to give back: the process ends."""


def _shortest(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The same generation in as few steps as can be: one a block."""
    if asked.get("algorithm") == "fast-dllm":
        return {**asked, "threshold": 1e-9}
    return {**asked, "steps": asked["gen_length"] // asked["block_length"] if "block_length" in asked else 1}


def _driver(cuda: bool) -> int | None:
    from benchmarks.bench.meters import driver_bytes

    return driver_bytes(cuda)


# --- side by side ---------------------------------------------------------------------------------------------------------


def beside(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a prompt and setting: every engine's figures, the ratio, and the share of equal tokens."""
    at: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for run in runs:
        for point in run.get("points", ()):
            at.setdefault((point["prompt"], point["setting"]), {})[run["engine"]] = dict(point)
    found = []
    for (prompt, setting), engines in at.items():
        ours, plain = engines.get("mosaic"), engines.get("plain")
        entry: dict[str, Any] = {"prompt": prompt, "setting": setting}
        answers = {name: point.pop("token_ids") for name, point in engines.items()}
        for name, point in engines.items():
            point["tokens_per_s"] = len(answers[name]) / point["seconds"]
            point["step_s"] = point["seconds"] / point["passes"]
        if ours is not None and plain is not None:
            pairs = list(zip(answers["mosaic"], answers["plain"], strict=True))
            entry["ratio"] = plain["seconds"] / ours["seconds"]
            entry["equal"] = sum(a == b for a, b in pairs) / len(pairs)
            entry["from"] = {
                "step": plain["step_s"] / ours["step_s"],
                "passes": plain["passes"] / ours["passes"],
                "rows": plain["rows"] / max(ours["rows"], 1),
                "head": plain["head_s"] / max(plain["head_s"] + plain["layers_s"], 1e-12),
            }
            bare = engines.get("mosaic, no graphs")
            if bare is not None:
                entry["from"]["graphs"] = bare["seconds"] / ours["seconds"]
        found.append({**entry, "engines": engines})
    return found


HEADER: Final = (
    "generation", "prompt", "Mosaic tokens/s", "plain tokens/s", "ratio", "ms a step", "plain", "passes", "plain",
    "step", "fewer passes", "graphs", "rows unembedded", "plain", "head's share, plain", "equal tokens", "peak GiB", "plain",
)  # fmt: skip


def rows_of(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One line per generation. ratio = step x fewer passes, both plain over Mosaic; `graphs` is a part of step."""
    rows = list[tuple[str, ...]]()
    for point in points:
        ours, plain = point["engines"].get("mosaic"), point["engines"].get("plain")
        if ours is None or plain is None:
            continue
        source = point["from"]
        rows.append(
            (
                point["setting"], f"{point['prompt']:,}", f"{ours['tokens_per_s']:,.1f}", f"{plain['tokens_per_s']:,.1f}",
                f"{point['ratio']:.2f}", f"{ours['step_s'] * 1e3:,.2f}", f"{plain['step_s'] * 1e3:,.2f}",
                str(ours["passes"]), str(plain["passes"]), f"{source['step']:.2f}", f"{source['passes']:.2f}",
                f"{source['graphs']:.2f}" if "graphs" in source else "", f"{ours['rows']:,}", f"{plain['rows']:,}",
                f"{source['head']:.0%}", f"{point['equal']:.1%}", _memory(ours), _memory(plain),
            )
        )  # fmt: skip
    return rows


def _memory(point: Mapping[str, Any]) -> str:
    size = point["driver_bytes"] or point["peak_bytes"]
    return "" if size is None else f"{size / 2**30:.3f}"


def differing(result: Mapping[str, Any]) -> list[str]:
    """Greedy generations in float32 whose tokens are not those of the plain loop."""
    if result["dtype"] != "float32":
        return []
    greedy = (point for point in result["points"] if "T=" not in point["setting"])
    return [f"{point['setting']}, prompt {point['prompt']}" for point in greedy if point.get("equal", 1.0) < 1.0]


def _checkpoint(name: str, folder: str, seed: int) -> str:
    """A tiny model with weights, in a directory; any other name as it is."""
    if name not in TINY:
        return name
    from benchmarks.bench.baselines import Transformer
    from mosaic.runtime.weights import fill_randomly, save_checkpoint

    network = Transformer(load(TINY[name]).architecture)
    arch = network.arch
    fill_randomly(network.tensors, seed=seed)
    for key, tensor in network.tensors.items():
        if tensor.dim() == 2:
            tensor.mul_(_SPREAD / 0.02 * (1.0 if key == arch.names.embedding else tensor.shape[1] ** -0.5))
    _silence_mask(network.head.weight, arch)
    target = Path(folder) / name
    save_checkpoint(target, network.tensors, TINY[name])
    return str(target)


def measure(source: str, name: str, arguments: Any, clock: Clock) -> dict[str, Any]:
    """Run all engines on one model, each in a process."""
    from mosaic.devices import load_device

    cuda = load_device(arguments.device).backend == "cuda"
    model = load(source)
    case = {
        "model": source, "device": arguments.device, "dtype": arguments.dtype, "threads": arguments.threads,
        "seed": arguments.seed, "repeats": arguments.repeats, "prompts": list(arguments.prompt),
        "settings": settings_of(model, arguments.gen_length, card=cuda),
    }  # fmt: skip
    described = environment(f"median of {arguments.repeats} whole generations, after two that are not counted")
    engines = [engine for engine in ENGINES if cuda or "graphs" not in engine]
    runs: list[dict[str, Any]] = []
    for engine in clock.while_left(sorted(engines, key=lambda name: "graphs" in name), print):
        limit = max(clock.left_s, 1.0)
        runs.append(
            in_own_process("benchmarks.decoding", {**case, "engine": engine, "limit_s": limit}, limit + GRACE_S)
        )
        print(f"{name}: {engine} {runs[-1].get('failed', 'done')}", file=sys.stderr, flush=True)
    ran = [run for run in runs if "failed" not in run]
    facts = {run["engine"]: {key: run[key] for key in ("weights_bytes", "driver_bytes", "dtype")} for run in ran}
    return {
        "environment": described, "model": name, "card": ran[0]["card"] if ran else None,
        "dtype": ran[0]["dtype"] if ran else None, "threads": arguments.threads, "gen_length": arguments.gen_length,
        "engines": facts, "points": beside(ran), "failures": [run for run in runs if "failed" in run],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one model after the other, writing each as it is done."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--case"]:
        print(json.dumps(run_case(json.loads(given[1]))))
        return
    parser = options(__doc__)
    parser.add_argument("--prompt", default="128,1k", type=token_counts, help="tokens of the prompts")
    parser.add_argument("--gen-length", default=128, type=int)
    parser.add_argument("--dtype", default=None, help="of weights and activations; the checkpoint's if not given")
    parser.add_argument("--threads", default=0, type=int, help="of PyTorch on a CPU; its own choice if not given")
    parser.add_argument("--repeats", default=_REPEATS, type=int)
    arguments = parser.parse_args(given)
    clock, wrong = Clock.start(arguments.minutes), list[str]()
    with TemporaryDirectory() as folder:
        for number, model in enumerate(clock.while_left(arguments.models, print)):
            share = replace(clock, minutes=clock.minutes * (number + 1) / len(arguments.models))
            name = Path(model).name
            result = measure(_checkpoint(model, folder, arguments.seed), name, arguments, share)
            write(f"decoding-{name}-{Path(arguments.device).stem}{tag_of(arguments)}", result)
            print(f"\n{name} on {result['card']}, {result['dtype']}")
            print(table(HEADER, rows_of(result["points"])))
            for failure in result["failures"]:
                print(f"{failure['engine']} failed: {failure['failed']}")
            wrong += [f"{name}: {what}" for what in differing(result)]
    if wrong:
        raise SystemExit(f"other tokens than the plain loop's in float32: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
