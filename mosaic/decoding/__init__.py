"""Decoding algorithms of diffusion language models: policy only. Every buffer is planned and belongs to the model.

`generate` decodes prompts on a compiled model; `shapes` gives the largest steps that this takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mosaic.decoding.algorithm import Algorithm, Traits
from mosaic.decoding.algorithms import shapes
from mosaic.decoding.canvas import Canvas
from mosaic.decoding.config import ALGORITHMS, GenerationConfig, resolve
from mosaic.decoding.live import Generation, LiveRequest, Submission
from mosaic.decoding.loop import generate as generate_ids
from mosaic.decoding.noise import row_keys
from mosaic.decoding.session import Session
from mosaic.decoding.streaming import DraftStreamer, OnStep, Step, Streamer
from mosaic.decoding.text import TextStreamer
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import UnknownName, UsageError
from mosaic.runtime.steps import StepRunner

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Canvas",
    "DraftStreamer",
    "Generation",
    "GenerationConfig",
    "LiveRequest",
    "Prompt",
    "Session",
    "Step",
    "Streamer",
    "Submission",
    "TextStreamer",
    "Tokenizer",
    "Traits",
    "generate",
    "generate_ids",
    "resolve",
    "row_keys",
    "shapes",
]

Prompt: TypeAlias = str | Tensor | Sequence[Mapping[str, str]]
"""Text, token ids int64 [P], or a conversation: messages of the keys "role" and "content"."""


def generate(
    model: StepRunner,
    prompts: Prompt | Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    streamer: Streamer | Sequence[Streamer] | None = None,
    on_step: OnStep | None = None,
    request_ids: Sequence[int] | None = None,
    **options: Any,
) -> list[Generation]:
    """Generate an answer to every prompt.

    Parameters
    ----------
    model
        A compiled model; for text, one of a checkpoint directory that has a tokenizer.
    prompts
        One prompt or several: text, int64 [P] or [B, P], or conversations.
    config
        How to generate; `options` are its fields by name, and come before it.
    streamer, on_step, request_ids
        As for `generate_ids`.

    Returns
    -------
    list of Generation
        One per prompt; with `text` where the prompt was text or a conversation.

    Raises
    ------
    UsageError
        If an option or a prompt cannot be.
    CheckpointError
        If a prompt is text and there is no tokenizer.
    DoesNotFit
        If the generation would not fit the budget: before any step has run.
    """
    known = [entry.name for entry in fields(GenerationConfig)]
    for name in options:
        if name not in known:
            raise UnknownName("option of generate", name, known)
    chosen = replace(config or GenerationConfig(), **options)
    given = _listed(prompts)
    tokenizer = None if all(isinstance(prompt, Tensor) for prompt in given) else _tokenizer(model)
    ids = [_encoded(prompt, tokenizer) for prompt in given]
    found = generate_ids(model, ids, chosen, streamer=streamer, on_step=on_step, request_ids=request_ids)
    if tokenizer is None:
        return found
    return [
        answer if isinstance(prompt, Tensor) else replace(answer, text=tokenizer.decode(answer.token_ids.tolist()))
        for prompt, answer in zip(given, found, strict=True)
    ]


def _tokenizer(model: StepRunner) -> Tokenizer:
    """The tokenizer of the model's directory."""
    described = getattr(model, "model", None)
    path = getattr(described, "path", None)
    if path is None:
        name = getattr(described, "name", "the model")
        raise UsageError(f"{name} has no checkpoint directory, thus no tokenizer: give token ids instead of text.")
    return Tokenizer(path)


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list; a list of numbers is one prompt, and so is a list of messages."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.dim() == 2 else [prompts]
    if not isinstance(prompts, Sequence):
        raise UsageError(f"prompts: expected text, token ids or a list of them, got {type(prompts).__name__}.")
    if prompts and all(isinstance(message, Mapping) for message in prompts):
        return [list(prompts)]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [torch.tensor(prompts)]
    return [torch.tensor(prompt) if _is_ids(prompt) else prompt for prompt in prompts]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _encoded(prompt: Prompt, tokenizer: Tokenizer | None) -> Tensor:
    if isinstance(prompt, Tensor):
        return prompt
    assert tokenizer is not None
    if isinstance(prompt, str):
        return torch.tensor(tokenizer.encode(prompt), dtype=torch.int64)
    messages = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, Sequence) else []
    if not messages or len(messages) < len(prompt):
        raise UsageError(f"a prompt is text, token ids or a list of messages; got {type(prompt).__name__}.")
    return torch.tensor(tokenizer.encode_chat(messages), dtype=torch.int64)
