"""Prompts: text, token ids or conversations as token ids, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.decoding.algorithms import canvas_length
from mosaic.errors import UsageError
from mosaic.models.step import MAX_TOKENS

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.models.architecture import Architecture

__all__ = ["Prompt", "check_ids", "check_prompt", "is_integer", "is_text", "listed", "token_ids", "tokenizer_of"]

Prompt: TypeAlias = str | Tensor | NDArray[Any] | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids [P], or a conversation: messages of the keys "role" and "content"."""


def tokenizer_of(model: Any) -> Tokenizer:
    """Return the tokenizer of a model's directory.

    Raises
    ------
    UsageError
        If it has none.
    """
    from mosaic.decoding.tokenizer import Tokenizer  # imported late: token ids need none

    path, name = getattr(model, "path", None), getattr(model, "name", "the model")
    if path is None:
        raise UsageError(f"{name} has no checkpoint directory, thus no tokenizer: give token ids instead of text.")
    return Tokenizer(path, mask=model.architecture.mask_token_id)


def is_text(prompt: Any) -> bool:
    """Return whether a prompt is text or a conversation, which need a tokenizer."""
    return isinstance(prompt, str) or (_is_list(prompt) and any(isinstance(one, Mapping) for one in prompt))


def listed(prompts: Any) -> list[Any]:
    """Return one prompt or several as a list: a list of numbers is one, and so is a list of messages."""
    if isinstance(prompts, Tensor | np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if is_text(prompts) or isinstance(prompts, bytes):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UsageError(f"prompts: expected text, token ids or a list of them, got {type(prompts).__name__}.")
    return [prompts] if prompts and all(is_integer(one) for one in prompts) else list(prompts)


def token_ids(prompt: Any, tokenizer: Callable[[], Tokenizer], *, which: str) -> Tensor:
    """Return the token ids of a prompt, [P]; `check_prompt` checks their values.

    Parameters
    ----------
    tokenizer
        Gives the tokenizer for text.
    which
        What errors call the prompt.

    Raises
    ------
    UsageError
        If it is neither text, token ids nor a conversation.
    """
    if isinstance(prompt, Tensor):
        return prompt
    if isinstance(prompt, str):
        return torch.tensor(tokenizer().encode(prompt), dtype=torch.int64)
    if is_text(prompt) and all(isinstance(message, Mapping) for message in prompt):
        for message in prompt:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise UsageError(
                    f"{which}: a message has a text as 'role' and one as 'content', got {dict(message)!r}."
                )
        return torch.tensor(tokenizer().encode_chat(prompt), dtype=torch.int64)
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    if not _is_list(ids) or not all(is_integer(one) for one in ids):
        shape = f" of {prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else ""
        raise UsageError(
            f"{which}: expected text, token ids [P] or a list of messages, got {type(prompt).__name__}{shape}."
        )
    try:
        return torch.tensor([index(one) for one in ids], dtype=torch.int64)
    except (OverflowError, ValueError, RuntimeError):
        raise UsageError(f"{which}: {max(ids, key=abs)} is no token id; is it of another tokenizer?") from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, Python's or NumPy's, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_prompt(
    prompt: Tensor, config: GenerationConfig, arch: Architecture, *, which: str = "the prompt"
) -> NDArray[np.int64]:
    """Return a prompt, integers [P], as the host has it, checked against resolved options and the model; errors call it `which`.

    Raises
    ------
    UsageError
        If it is no prompt, has tokens that the model has not, or is too long.
    """
    ids = check_ids(prompt, arch, which=which)
    length = canvas_length(config, arch, len(ids))
    if not arch.max_context and length > MAX_TOKENS:
        raise UsageError(
            f"{which} of {len(ids):,} tokens and gen_length {config.gen_length:,} take {length:,} positions; at most "
            f"{MAX_TOKENS:,} can be counted: lower gen_length."
        )
    if arch.max_context and length > arch.max_context:
        room = arch.max_context - (length - len(ids))
        shorter = f"shorten the prompt to {room:,} tokens or lower gen_length" if room > 0 else "lower gen_length"
        raise UsageError(
            f"{which} of {len(ids):,} tokens and gen_length {config.gen_length:,} take {length:,} positions, the "
            f"model has {arch.max_context:,}; {shorter}, or {_scaling_for(length, arch)}."
        )
    return ids


def check_ids(prompt: Tensor, arch: Architecture, *, which: str = "the prompt") -> NDArray[np.int64]:
    """Return a prompt as `check_prompt` does, however long it is."""
    # every admission checks a whole prompt: a tensor's operators take ten times as long, `max` and `any` twice as long as `argmax`
    ids = _on_host(prompt)
    if ids is None:
        raise UsageError(f"{which}: expected token ids [P], got {prompt.dtype} of shape {list(prompt.shape)}.")
    if not len(ids):
        raise UsageError(f"{which} is empty; give at least one token.")
    low, high = int(ids[ids.argmin()]), int(ids[ids.argmax()])
    if low < 0 or high >= arch.vocabulary:
        raise UsageError(
            f"{which}: expected ids in [0, {arch.vocabulary}), got {low if low < 0 else high}; is it of another tokenizer?"
        )
    mask = arch.mask_token_id
    if high >= mask and ids[at := (ids == mask).argmax()] == mask:
        raise UsageError(
            f"{which} has the mask token {mask} at position {at}, where it would be overwritten; remove it."
        )
    return ids


def _on_host(prompt: Tensor) -> NDArray[np.int64] | None:
    """The ids of a prompt as the host has them; None if it is none."""
    try:
        ids = (prompt if prompt.is_cpu else prompt.cpu()).numpy()
    except (TypeError, RuntimeError):  # it is sparse, or on no device, or of a dtype that NumPy has not
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return None
    return ids if ids.dtype == np.int64 else ids.astype(np.int64)


def _scaling_for(length: int, arch: Architecture) -> str:
    """Say what rotary scaling reaches a length."""
    factor = -(-length // (arch.rotary.original or arch.max_positions))
    if arch.rotary.kind != "default":
        return f"raise the factor of its rope_scaling to {factor}"
    return f'set rope_scaling in its config.json to {{"rope_type": "yarn", "factor": {factor}}}'
