"""Requests of one phase laid one after another: the inputs of the step that serves them all.

What there is to fill, the phase's parts declare (`mosaic.models.inputs`); nothing here knows an input by name.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.architecture import Architecture
from mosaic.models.inputs import Frequencies, Input, Window
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.frequencies import inverse_frequencies
from mosaic.runtime.numbers import Numbers
from mosaic.runtime.steps import SETTINGS, StepRequest

__all__ = ["PackedStep", "group_of", "pack_step"]


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """One step over several requests: its size, and its inputs by name.

    Tensors are on the host, or where the requests have them. Inputs of rows and keys may be shorter than the plan's, which
    are rounded up.
    """

    size: StepSize
    inputs: Mapping[str, Tensor | Numbers]

    @cached_property
    def key(self) -> Hashable:
        """The key of its size: a step that is launched again and again asks for it each time."""
        return self.size.key

    @cached_property
    def graphs(self) -> tuple[PackedStep, ...]:
        """The graphs that the step may run, each with all of its inputs."""
        return tuple(PackedStep(size=size, inputs=self.inputs) for size in self.size.graphs)

    def taken(self, names: Collection[str]) -> Mapping[str, Tensor | Numbers]:
        """Return what one graph takes of the inputs; the same mapping whenever it is asked for."""
        if self._taken.keys() != set(names):
            self._taken.update({name: self.inputs[name] for name in names})
        return self._taken

    @cached_property
    def _taken(self) -> dict[str, Tensor | Numbers]:
        return {}


def group_of(request: StepRequest, arch: Architecture) -> Hashable:
    """Give what requests of one step have in common: their phase, and the values that a step has once."""
    return tuple(_shared(request, request.phase.inputs(arch)).values())


def pack_step(
    requests: Sequence[StepRequest], arch: Architecture, *, states: Mapping[State, int] | None = None
) -> PackedStep:
    """Lay the requests one after another; of a guided phase, all of them, then all of them without their prompts.

    Parameters
    ----------
    arch
        The model's.
    states
        Rows of each state, of all owners together.

    Raises
    ------
    UsageError
        If they differ in what a step has once, or in what its phase needs of each.
    """
    if not requests:
        raise UsageError("a step needs at least one request.")
    phase = requests[0].phase
    declared = phase.inputs(arch)
    _require_shared(requests, declared)
    for request in requests:
        if min(_lengths(request)) < 1:
            raise UsageError(f"a window has at least one token, got windows of {list(_lengths(request))}.")
        for part in phase.parts:
            part.check(request, arch)
    rows = sum(request.rows.numel() for request in requests)
    if phase.commit is not None and not rows:
        raise UsageError("a step with a head decides at least one row; leave the request out, or commit it.")
    windows = _windows(phase, requests)
    inputs = {entry.name: _packed(entry, requests, windows) for entry in declared}
    return PackedStep(size=_size(phase, requests, max(rows, 1), states or {}), inputs=inputs)


def _require_shared(requests: Sequence[StepRequest], declared: Sequence[Input]) -> None:
    if len(requests) == 1:
        return
    first = _shared(requests[0], declared)
    for request in requests[1:]:
        for name, value in _shared(request, declared).items():
            if value != first[name]:
                raise UsageError(
                    f"requests of one step share their {name}, got {first[name]} and {value}; run them in steps of their "
                    "own."
                )


def _shared(request: StepRequest, declared: Sequence[Input]) -> dict[str, Any]:
    """What a step has once, by name."""
    own = {entry.name: entry.of(request) for entry in declared if entry.per == "step"}
    return {name: getattr(request, name) for name in ("phase", *SETTINGS)} | own


def _lengths(request: StepRequest) -> tuple[int, ...]:
    return request.lengths or (request.token_ids.numel(),)


def _size(phase: Phase, requests: Sequence[StepRequest], rows: int, states: Mapping[State, int]) -> StepSize:
    kept = [seen for request in requests if (seen := phase.cache.seen(request)) is not None]
    returned = sum(len(r.logit_rows) for r in requests if r.logit_rows is not None)
    return StepSize(
        phase=phase, windows=tuple(length for request in requests for length in _lengths(request)),
        keys=tuple(seen.keys for seen in kept), owned=tuple(seen.owned for seen in kept),
        extents=sum(seen.extents for seen in kept), rows=rows, logit_rows=returned, states=states,
    )  # fmt: skip


def _windows(phase: Phase, requests: Sequence[StepRequest]) -> list[Window]:
    """The windows in the order in which they are packed: all requests', then all copies."""
    found: list[Window] = []
    of_requests = [phase.windows(request) for request in requests]
    for copy in range(phase.copies):
        for request, tokens in zip(requests, of_requests, strict=True):
            whole = tokens[copy]
            for part in whole.split(request.lengths) if request.lengths else (whole,):
                found.append(Window(request=request, token_ids=part, number=len(found), start=request.start, copy=copy))
    return found


def _packed(entry: Input, requests: Sequence[StepRequest], windows: Sequence[Window]) -> Tensor | Numbers:
    """The values of one input, in its dtype where they are made here."""
    if entry.per == "step":
        return Numbers((entry.of(requests[0]),), entry.dtype)
    if entry.per == "bound":
        return Numbers((0, *accumulate(entry.at(window) for window in windows)), entry.dtype)
    if entry.per == "sequence":
        values = [entry.at(window) for window in windows]
        return torch.stack(list(map(_vector, values))) if entry.width else Numbers(tuple(values), entry.dtype)
    if entry.per == "extent":
        numbers = chain.from_iterable(chain.from_iterable(entry.at(window) for window in windows))
        return Numbers(tuple(numbers), entry.dtype, entry.width)
    if entry.per in ("row", "logit_row"):
        return _joined([_rows(entry, request, first) for request, first in _firsts(requests, entry.copy)])
    found = [entry.at(window) for window in windows]
    if all(isinstance(part, range | tuple) for part in found):
        ranges = [(part,) if isinstance(part, range) else part for part in found]
        return Numbers(tuple(chain.from_iterable(ranges)), entry.dtype)
    parts = zip(found, windows, strict=True)
    return _joined([_values(part, window.length, entry.dtype) for part, window in parts])


def _firsts(requests: Sequence[StepRequest], copy: int) -> list[tuple[StepRequest, int]]:
    """Each request, and the number of its first token in the step, or of that of its copy."""
    bounds = [0, *accumulate(request.token_ids.numel() for request in requests)]
    return [
        (request, start + copy * bounds[-1]) for request, (start, _) in zip(requests, pairwise(bounds), strict=True)
    ]


def _rows(entry: Input, request: StepRequest, first: int) -> Tensor:
    values: Tensor = entry.of(request)
    if not entry.index:
        return values
    tokens = request.token_ids.numel()
    if values.numel():
        low, high = (int(value) for value in torch.aminmax(values))
        if not 0 <= low <= high < tokens:
            raise UsageError(f"rows of a window of {tokens} tokens are in [0, {tokens}), got {values.tolist()}.")
    return values + first if first else values


def _values(found: Any, count: int, dtype: str) -> Tensor:
    """A tensor as it is, ranges of numbers, or one number `count` times."""
    if isinstance(found, Tensor):
        return found
    if isinstance(found, range | tuple):
        return Numbers((found,) if isinstance(found, range) else found, dtype).tensor()
    return torch.full((count,), found, dtype=getattr(torch, dtype))


def _vector(found: Any) -> Tensor:
    if isinstance(found, Frequencies):
        return _frequencies(found.rotary, found.length)
    return torch.as_tensor(found)


_frequencies = lru_cache(maxsize=256)(inverse_frequencies)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
