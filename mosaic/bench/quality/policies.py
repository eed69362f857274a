"""What is compared: policies of attention and schedules of steps, as a command line names them.

`exact`, `mage:ratio=1/16`, `quest:k=256:page=8`, `flashblock:reuse_steps=4`: a preset, then options of `SparseAttention`, of
`PrefixReuse` (`reuse_steps`, `reuse_change`) or of `GenerationConfig`.
`dynamic`, `dynamic:threshold=0.95`, `static:16`: tokens above a threshold, or so many steps a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mosaic.errors import UnknownName, UsageError
from mosaic.models.reuse import REUSES
from mosaic.models.sparse import OPTIONS, PRESETS, attention_policy, with_options
from mosaic.models.spelled import spelled

__all__ = ["Policy", "policy", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy as it was written, and what it sets of a `GenerationConfig`."""

    name: str
    options: Mapping[str, Any]


def policy(text: str, longest: int) -> Policy:
    """Read a policy.

    Parameters
    ----------
    text
        A preset's name or "exact", then `:option=value` for each option.
    longest
        Tokens of the longest context: a `ratio` without a `k` selects that share of it at most.

    Raises
    ------
    UsageError
        If an option is unknown or its value cannot be.

    Examples
    --------
    >>> policy("mage:ratio=1/16", 8192).options["attention"].k
    512
    """
    name, given = spelled(text)
    if name.partition("+")[0] not in (*PRESETS, *REUSES, "exact"):
        raise UnknownName("policy", name, ("exact", *PRESETS, *REUSES))
    sparse = {key: value for key, value in given.items() if key in OPTIONS}
    others = _of_generation(text, {key: value for key, value in given.items() if key not in OPTIONS}, OPTIONS)
    if name == "exact":
        if sparse:
            raise UsageError(f"policy {text}: exact attention selects nothing; leave {', '.join(sparse)} out.")
        return Policy(name=text, options=others)
    if "ratio" in sparse and "k" not in sparse:
        page = sparse.get("page", getattr(attention_policy(name), "page", 1))
        sparse["k"] = max(-(-math.ceil(sparse["ratio"] * longest) // page), 1) * page
    return Policy(name=text, options={"attention": with_options(attention_policy(name), sparse), **others})


def schedule(text: str) -> Mapping[str, Any]:
    """Read a schedule: the fields of `GenerationConfig` that it sets.

    >>> schedule("static:16")
    {'remasking': 'low_confidence_static', 'steps': 16, 'ahead': False}
    """
    name, _, value = text.partition(":")
    if name == "static":
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"schedule {text}: give the steps a block, such as static:16.")
        return {"remasking": "low_confidence_static", "steps": int(value), "ahead": False}
    if name == "dynamic":
        return {"remasking": "low_confidence_dynamic", **_of_generation(text, spelled(text)[1], ()), "ahead": False}
    raise UnknownName("schedule", name, ("dynamic", "static"))


def _of_generation(text: str, given: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    known = _generation_fields()
    for key in given:
        if key not in known:
            raise UnknownName(f"option of '{text}'", key, sorted({*known, *others}))
    return dict(given)


def _generation_fields() -> list[str]:
    from mosaic.decoding import GenerationConfig

    taken = ("algorithm", "gen_length", "attention", "seed", "steps", "remasking", "ahead")
    return [entry.name for entry in fields(GenerationConfig) if entry.name not in taken]
