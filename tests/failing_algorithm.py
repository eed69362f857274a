"""An algorithm that fails in the middle of an answer to a prompt with a given token, as a kernel on a broken card would."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from own_algorithms import as_generator

from mosaic.decoding import GenerationConfig, resolve
from mosaic.decoding.algorithms import algorithm_of
from mosaic.models.architecture import Architecture

__all__ = ["FATAL", "failing"]

FATAL = 7


def failing(arch: Architecture) -> GenerationConfig:
    """The options of the model's own algorithm, which fails at a prompt with the token `FATAL`."""
    config = as_generator(GenerationConfig(), arch)
    return replace(config, algorithm=replace(algorithm_of(config), decode=decode))


def decode(canvas: Any) -> Generator[Any, Any, None]:
    """Decode as ever, or fail after two steps."""
    own = algorithm_of(resolve(GenerationConfig(), canvas.architecture)).decode(canvas)
    fatal, result = FATAL in canvas.tokens[: canvas.prompt_len].tolist(), None
    for step in range(1 << 20):
        if fatal and step == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        try:
            asked = next(own) if step == 0 else own.send(result)
        except StopIteration:
            return
        result = yield asked
