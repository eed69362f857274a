"""What the GPU benchmarks share: models with fewer layers, options, and one process per case."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final, TypeVar

from benchmarks import sources
from mosaic.devices import Device, load_device
from mosaic.models import Model, load
from mosaic.units import parse_bytes, parse_tokens

__all__ = [
    "GRACE_S",
    "HOST_BUDGET",
    "Clock",
    "cut",
    "device_of",
    "in_own_process",
    "options",
    "parse_ratio",
    "reaching",
    "sizes",
    "tag_of",
    "token_counts",
    "with_block",
]

T = TypeVar("T")
HOST_BUDGET: Final = "96GiB"
GRACE_S: Final = 45.0
"""Seconds that a case may run beyond the limit on starting new ones."""
_LAYER_KEYS: Final = ("n_layers", "num_hidden_layers")


def cut(model: Model, layers: int | None) -> Model:
    """The model with fewer layers and random weights: what a step of it does, the whole model's step does per layer.

    >>> from mosaic.models import load
    >>> cut(load("llada-8b"), 3).architecture.layers
    3
    """
    if layers is None or layers >= model.architecture.layers:
        return model
    config = {key: layers if key in _LAYER_KEYS else value for key, value in model.config.items()}
    return replace(
        model,
        name=f"{model.name}, {layers} layers",
        config=config,
        path=None,
        architecture=replace(model.architecture, stack=model.architecture.stack[:layers]),
    )


def with_block(name: str, block: int, layers: int | None) -> Model:
    """A preset whose blocks have another length, perhaps with fewer layers; its weights are random."""
    model = cut(load(name), layers)
    own = next((key for key in ("block_size", "bd_size") if key in model.config), "block_size")
    return load({**model.config, own: block})


def options(description: str | None, *, models: str = "+") -> argparse.ArgumentParser:
    """The options that every GPU benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("models", nargs=models, help="presets or checkpoint directories")
    parser.add_argument("--device", default="h200", help="profile of this machine's card")
    parser.add_argument("--host-budget", default=HOST_BUDGET, type=parse_bytes, help="pinned host memory for Mosaic")
    parser.add_argument("--minutes", default=9.0, type=float, help="start nothing new after so long")
    parser.add_argument("--tag", default="", help="added to the result's name, to keep several parts side by side")
    parser.add_argument("--seed", default=0, type=int)
    return parser


def token_counts(text: str) -> tuple[int, ...]:
    """`1k,32k` as numbers."""
    return tuple(parse_tokens(part) for part in text.split(","))


def sizes(text: str) -> tuple[int, ...]:
    """`4GiB,24GiB` as bytes."""
    return tuple(parse_bytes(part) for part in text.split(","))


def parse_ratio(text: str) -> tuple[float, ...]:
    """`0.1,0.5` as shares."""
    return tuple(float(part) for part in text.split(","))


def reaching(model: Model, positions: int) -> Model:
    """The model, with a rotary scaling where it was trained on fewer positions: times are the same."""
    factor = -(-positions // model.architecture.max_context)
    return model if factor == 1 else model.with_rope_scaling("yarn", factor)


def device_of(result: Mapping[str, Any]) -> Device:
    """The profile of the card that a result is of; older ones do not name it, and are all of an H200."""
    return load_device(result.get("device", "h200"))


def tag_of(arguments: argparse.Namespace) -> str:
    """The end of a result's name."""
    return f"-{arguments.tag}" if arguments.tag else ""


@dataclass(frozen=True, slots=True)
class Clock:
    """A limit on when new work may start."""

    minutes: float
    began: float

    @classmethod
    def start(cls, minutes: float) -> Clock:
        """Begin now."""
        return cls(minutes, time.monotonic())

    @property
    def left_s(self) -> float:
        """Seconds until nothing new may start."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def while_left(self, cases: Sequence[T], report: Callable[[str], None]) -> Iterator[T]:
        """Give the cases that there is time to start, and say which were left out."""
        for number, case in enumerate(cases):
            if self.left_s <= 0:
                report(f"no time left for {len(cases) - number} of {len(cases)} cases")
                return
            yield case


def in_own_process(module: str, case: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run `main` of a module with `--case JSON` and read the last line it prints, as JSON; why it failed, under `failed`.

    What the process loaded is measured, too.
    """
    command = [sys.executable, "-m", "benchmarks.cases", module, "--case", json.dumps(dict(case))]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(timeout_s, 1.0))
    except subprocess.TimeoutExpired:
        return {**case, "failed": f"ended after {timeout_s:.0f} s"}
    if ran.returncode:
        words = [line for line in ran.stderr.splitlines() if line.strip()]
        return {**case, "failed": words[-1] if words else f"exit code {ran.returncode}"}
    *_, answer, files = ran.stdout.splitlines()
    sources.also(json.loads(files))
    found: dict[str, Any] = json.loads(answer)
    return found


if __name__ == "__main__":
    import_module(sys.argv[1]).main(sys.argv[2:])
    print(json.dumps(sources.loaded()))
