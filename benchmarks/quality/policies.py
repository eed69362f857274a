"""The compared policies and schedules of steps, by their names on the command line.

`exact`, `mage:ratio=1/16`, `flashblock:reuse_steps=4`, `focus:alpha=1.2`, `dc+`, `sparse:retention=0.2`: a preset of attention, of
eviction or of sparse keys, a cache or a block cache, then options of `SparseAttention`, of `PrefixReuse` (`reuse_steps`,
`reuse_change`), of `Eviction`, of `SparseKeys`, or of `GenerationConfig`. `mage:ratio=1/16+focus:alpha=1.2+dc+`: several at once.
`dynamic`, `dynamic:threshold=0.95`, `static:16`: tokens above a threshold, or a number of steps per block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mosaic.errors import UnknownName, UsageError
from mosaic.models.policies.block_cache import BLOCK_CACHES
from mosaic.models.policies.registry import KINDS, NAMES, PLAIN, attention_policy, options_of, token_eviction
from mosaic.models.policies.spelled import spelled
from mosaic.registrar.operators.top_keys import keys_of

__all__ = ["BLOCK", "Policy", "of_canvas", "policy", "schedule"]

BLOCK: Final = 32
"""Tokens of a block of a model that attends in both directions; answers are whole blocks."""
_ATTENTION, _EVICTION = NAMES["attention"], NAMES["eviction"]
_CACHES: Final = (*PLAIN["cache"], *NAMES["cache"])
_NAMES: Final = ("exact", *_ATTENTION, *_EVICTION, *_CACHES, *BLOCK_CACHES)
_OPTIONS: Final = {field: tuple(name for kind in kinds for name in kind.names()) for field, kinds in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy's text, and the fields of a `GenerationConfig` that it sets."""

    name: str
    options: Mapping[str, Any]


def policy(text: str, longest: int) -> Policy:
    """Read a policy.

    Parameters
    ----------
    text
        "exact", or presets and a block cache joined by "+", each followed by `:option=value` for its options.
    longest
        Tokens of the longest context: a `ratio` without a `k` selects that share of it at most.

    Raises
    ------
    UsageError
        If a part or an option is unknown, its value cannot be, or two parts say the same.

    Examples
    --------
    >>> policy("mage:ratio=1/16", 8192).options["attention"].k
    512
    >>> found = policy("focus:keep=4+dc+:block_commit=cached", 8192).options
    >>> str(found["eviction"]), found["block_cache"], found["block_commit"]
    ('eviction(keep=4)', 'dc+', 'cached')
    """
    options: dict[str, Any] = {}
    attention: list[str] = []
    of_attention: dict[str, Any] = {}
    for part in _parts(text):
        name, given = spelled(part)
        own: Sequence[str] = ()
        if name in _ATTENTION:
            attention.append(name)
            own = _OPTIONS["attention"]
            for key in [key for key in given if key in own]:
                _once(text, of_attention, key, given[key])
        elif name in _EVICTION:
            own = _OPTIONS["eviction"]
            chosen = {key: value for key, value in given.items() if key in own}
            _once(text, options, "eviction", replace(token_eviction(name), **chosen))
        elif name in _CACHES:
            own = _OPTIONS["cache"] if name in NAMES["cache"] else ()
            preset = options_of("cache", name)
            chosen = {key: value for key, value in given.items() if key in own}
            _once(text, options, "cache", preset.with_options(chosen) if chosen else preset)
        elif name in BLOCK_CACHES:
            _once(text, options, "block_cache", name)
        elif name != "exact":
            raise UnknownName("policy", name, _NAMES)
        elif any(spelled(other)[0] in _ATTENTION for other in _parts(text)):
            raise UsageError(f"policy {text}: exact attention and another do not go together.")
        elif selecting := [key for key in given if key in _OPTIONS["attention"]]:
            raise UsageError(f"policy {text}: exact attention selects nothing; leave {', '.join(selecting)} out.")
        others = _of_generation(text, {key: value for key, value in given.items() if key not in own}, own)
        for key, value in others.items():
            _once(text, options, key, value)
    if attention:
        options["attention"] = _attention("+".join(attention), of_attention, longest)
    return Policy(name=text, options=options)


def _parts(text: str) -> list[str]:
    """The parts between the pluses; the plus of the name "dc+" is no separator."""
    parts = re.sub(r"(^|\+)dc\+(?=$|[:+])", r"\1dc#", text).split("+")
    return [part.replace("dc#", "dc+") for part in parts]


def _once(text: str, options: dict[str, Any], kind: str, value: Any) -> None:
    if kind in options:
        raise UsageError(f"policy {text}: one {kind}, not two.")
    options[kind] = value


def _attention(name: str, given: dict[str, Any], longest: int) -> Any:
    preset = attention_policy(name)
    ratio, page = given.get("ratio"), given.get("page", getattr(preset, "page", 1))
    if "k" not in given and isinstance(ratio, int | float) and isinstance(page, int) and 0 <= ratio <= 1 and page > 0:
        given["k"] = max(-(-keys_of(ratio, longest) // page), 1) * page
    return preset.with_options(given)  # which refuses values that cannot be


def schedule(text: str) -> Mapping[str, Any]:
    """Read a schedule: the fields of `GenerationConfig` that it sets.

    >>> schedule("static:16")
    {'remasking': 'low_confidence_static', 'steps': 16}
    """
    name, _, value = text.partition(":")
    if name == "static":
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"schedule {text}: give the steps a block, such as static:16.")
        return {"remasking": "low_confidence_static", "steps": int(value)}
    if name == "dynamic":
        return {"remasking": "low_confidence_dynamic", **_of_generation(text, spelled(text)[1], ())}
    raise UnknownName("schedule", name, ("dynamic", "static"))


def of_canvas(scheduled: Mapping[str, Any], answer: int) -> Mapping[str, Any]:
    """Return a schedule's fields for an answer of `answer` tokens on a model that attends in both directions, in blocks of `BLOCK`.

    Tokens above a threshold are Fast-dLLM's algorithm, a number of steps LLaDA's.

    >>> of_canvas(schedule("static:16"), 96)
    {'block_length': 32, 'steps': 48}
    >>> of_canvas(schedule("dynamic:threshold=0.95"), 96)
    {'block_length': 32, 'algorithm': 'fast-dllm', 'threshold': 0.95}
    """
    own = {key: value for key, value in scheduled.items() if key not in ("remasking", "steps")}
    how = {"steps": scheduled["steps"] * (answer // BLOCK)} if "steps" in scheduled else {"algorithm": "fast-dllm"}
    return {"block_length": BLOCK, **how, **own}


def _of_generation(text: str, given: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    known = _generation_fields()
    for key in given:
        if key not in known:
            raise UnknownName(f"option of '{text}'", key, sorted({*known, *others}))
    return dict(given)


def _generation_fields() -> list[str]:
    from mosaic.decoding import GenerationConfig

    taken = (
        "algorithm", "gen_length", "attention", "eviction", "cache", "block_cache", "seed", "steps", "remasking",
    )  # fmt: skip
    return [entry.name for entry in fields(GenerationConfig) if entry.name not in taken]
