"""Options under the names that users of other engines send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnknownName, UsageError

__all__ = ["NAMES", "XARGS", "length_name", "own_names"]

NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "max_completion_tokens": ("max_tokens", "OpenAI"),
    "max_new_tokens": ("max_tokens", "transformers, SGLang"),
    "block_size": ("block_length", "SGLang"),
    "max_post_edit_steps": ("max_post_steps", "SGLang"),
    "dllm_block_length": ("block_length", "LMDeploy"),
    "dllm_denoising_steps": ("steps", "LMDeploy"),
    "dllm_unmasking_strategy": ("remasking", "LMDeploy"),
    "dllm_confidence_threshold": ("threshold", "LMDeploy"),
    "denoising_steps": ("steps", "SDAR"),
    "dynamic_threshold": ("threshold", "SDAR"),
    "remasking_strategy": ("remasking", "SDAR"),
    "num_denoising_steps": ("steps", "dlmserve"),
}
"""By a name of elsewhere: the name here, and whose it is."""
XARGS: Final[Mapping[str, str]] = {"diffusion_max_steps": "steps", "diffusion_canvas_length": "block_length"}
"""What vLLM's `vllm_xargs` may hold, by their names here."""


def own_names(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with its options under their names here.

    Raises
    ------
    UsageError
        If an option is given by two names with two values, or `vllm_xargs` holds what has no meaning.

    Examples
    --------
    >>> own_names({"prompt": "a", "max_new_tokens": 8, "vllm_xargs": {"diffusion_max_steps": 4}})
    {'prompt': 'a', 'max_tokens': 8, 'steps': 4}
    """
    found = {name: value for name, value in body.items() if name not in NAMES and name != "vllm_xargs"}
    others = [(name, NAMES[name][0], body[name]) for name in body if name in NAMES]
    more = body.get("vllm_xargs") or {}
    if not isinstance(more, Mapping):
        raise UsageError(f"vllm_xargs: expected an object, got {more!r}.")
    for name, value in more.items():
        if name not in XARGS:
            raise UnknownName("key of vllm_xargs", name, XARGS)
        others.append((name, XARGS[name], value))
    for name, own, value in others:
        if found.get(own) is None:
            found[own] = value
        elif value is not None and found[own] != value:
            raise UsageError(
                f"{name}={value!r} and {own}={found[own]!r} are the same option with two values; give one."
            )
    return found


def length_name(body: Mapping[str, Any]) -> str:
    """Return the name under which a body has `gen_length`, for errors about it.

    Examples
    --------
    >>> length_name({"prompt": "a", "max_completion_tokens": 8})
    'max_completion_tokens'
    """
    names = (name for name in body if name == "gen_length" or NAMES.get(name, (name,))[0] == "max_tokens")
    return next(names, "max_tokens")
