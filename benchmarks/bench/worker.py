"""One engine in a process of its own: `python -m benchmarks.bench.worker ENGINE`, settings as JSON on stdin.

Every record is a line of JSON on stdout, written as soon as it is measured; whatever else prints goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.bench.inputs import Inputs, make_inputs, masked_rows
from benchmarks.bench.meters import card, synchronise, timed
from benchmarks.bench.settings import Settings
from mosaic.errors import DoesNotFit
from mosaic.models.architecture import Architecture

__all__ = ["Emit", "Engine", "serve", "work"]

Emit = Callable[[Mapping[str, Any]], None]
_SHOWN = 32
"""Predicted tokens that a point keeps, so that engines can be held against each other."""


class Engine(Protocol):
    """What a worker drives."""

    arch: Architecture
    cuda: bool

    @property
    def ratio_matters(self) -> bool:
        """Whether a step's work depends on the share of masked tokens."""

    def describe(self) -> dict[str, Any]:
        """Return what is true of every point."""

    def warm(self) -> None:
        """Load what the first step loads."""

    def start(self, inputs: Inputs) -> None:
        """Take the inputs of the next steps."""

    def step(self) -> tuple[Tensor, Tensor]:
        """Run one step; return token and confidence of the masked positions."""

    def settle(self) -> None:
        """Restart the meters."""

    def facts(self, step_s: float) -> dict[str, Any]:
        """Return what the meters say."""

    def close(self) -> None:
        """Give everything back."""


def open_engine(name: str, settings: Settings) -> Engine:
    """Make an engine; each imports only what it needs."""
    if name == "mosaic":
        from benchmarks.bench.mosaic_engine import MosaicEngine

        return MosaicEngine(settings)
    from benchmarks.bench.torch_engine import TorchEngine

    return TorchEngine(settings, options={"dynamic": False} if name == "compile" else None)


def work(engine: Engine, settings: Settings, emit: Emit) -> None:
    """Measure all points of one engine."""
    engine.warm()
    synchronise(engine.cuda)
    emit({"record": "engine", "card": card(engine.cuda), **engine.describe()})
    for tokens in settings.contexts:
        first: dict[str, Any] | None = None
        for ratio in settings.mask_ratios:
            if first is None or engine.ratio_matters:
                found = measure(engine, make_inputs(engine.arch, tokens, ratio, settings.seed), settings)
            else:
                found = {
                    **first, "masked": masked_rows(tokens, ratio), "same_work_as_ratio": settings.mask_ratios[0], "sample": None,
                }  # fmt: skip
            first = first or found
            emit({"record": "point", "tokens": tokens, "mask_ratio": ratio, **found})


def measure(engine: Engine, inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """Measure one point: uncounted steps first, then the counted ones; or say why there are none."""
    try:
        engine.start(inputs)
        warm_s = timed(engine.step, 1, cuda=engine.cuda)[0]
        engine.settle()
        timed(engine.step, 1, cuda=engine.cuda)
        seconds = timed(engine.step, settings.repeats, cuda=engine.cuda)
        middle = statistics.median(seconds)
        return {
            "masked": inputs.masked, "step_s": middle, "seconds": seconds, "warm_s": warm_s, "sample": sample(engine),
            "failed": None, **engine.facts(middle),
        }  # fmt: skip
    except torch.OutOfMemoryError:
        why = "out of memory"
    except DoesNotFit as error:
        why = f"does not fit: {error}"
    gc.collect()  # the error held the step's tensors
    engine.settle()
    return {"masked": inputs.masked, "step_s": None, "failed": why}


def sample(engine: Engine) -> dict[str, Any]:
    """Return the first predictions of a step, and its mean confidence; nothing of it stays on the card."""
    token, confidence = engine.step()
    return {"tokens": token[:_SHOWN].cpu().tolist(), "mean_confidence": float(confidence.cpu().double().mean())}


def serve(run: Callable[[str, str, Emit], None]) -> None:
    """Have the engine that the command line names measured by the settings on stdin, and leave the real stdout to the records."""
    text, name = sys.stdin.read(), sys.argv[1]
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(record: Mapping[str, Any]) -> None:
        records.write(json.dumps({"engine": name, **record}) + "\n")
        records.flush()

    run(name, text, emit)
    files = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    emit({"record": "process", "files": files})


def main(name: str, text: str, emit: Emit) -> None:
    """Measure an engine."""
    settings = Settings.from_json(text)
    engine = open_engine(name, settings)
    work(engine, settings, emit)
    engine.close()


if __name__ == "__main__":
    serve(main)
