"""Requests of one phase laid one after another: the inputs of the step that serves them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.phase import Phase
from mosaic.models.rotary import Rotary
from mosaic.models.step import StepSize
from mosaic.runtime.frequencies import check_cached, sequence_frequencies
from mosaic.runtime.state_rows import OwnedRows
from mosaic.runtime.steps import StepRequest

__all__ = ["PackedStep", "pack_step"]

_Inputs: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """One step over several requests: its size, and its inputs by name.

    Inputs are on the host; those of rows may be shorter than the plan's, which are rounded up.
    """

    size: StepSize
    inputs: _Inputs


def pack_step(
    requests: Sequence[StepRequest],
    *,
    shifted: bool,
    rotary: Rotary | None = None,
    states: Mapping[str, int] | None = None,
) -> PackedStep:
    """Lay the requests one after another; of a guided phase, all of them, then all of them without their prompts.

    Parameters
    ----------
    shifted
        Row i - 1 of the model predicts position i; the first row of a window then predicts itself.
    rotary
        The model's, where frequencies may depend on each sequence's length.
    states
        Rows of each state that open sequences hold, by name.

    Raises
    ------
    UsageError
        If they differ in what a step has once, or in what its phase needs of each.
    """
    phase = _one_phase(requests)
    lengths = tuple(request.token_ids.numel() for request in requests)
    counts = tuple(request.rows.numel() for request in requests)
    if min(lengths, default=0) < 1:
        raise UsageError(f"a window has at least one token, got windows of {list(lengths)}.")
    inputs = _windows(phase, requests, lengths)
    if phase.cached:
        inputs |= _keys(requests)
    if rotary is not None:
        inputs |= _frequencies(rotary, phase, requests, lengths)
    if phase.head != "none":
        inputs |= _rows(phase, requests, lengths, counts, shifted)
    kept = [(r.key_len, r.sequence.length) for r in requests if phase.cached and r.sequence is not None]
    size = StepSize(
        phase=phase, windows=lengths, keys=tuple(seen for seen, _ in kept), owned=tuple(owned for _, owned in kept),
        rows=sum(counts), states=states or {},
    )  # fmt: skip
    return PackedStep(size=size, inputs=inputs)


def _one_phase(requests: Sequence[StepRequest]) -> Phase:
    if not requests:
        raise UsageError("a step needs at least one request.")
    first = requests[0]
    for request in requests[1:]:
        for name in ("phase", "temperature", "top_p", "top_k", "score_temperature", "guidance"):
            if getattr(request, name) != getattr(first, name):
                raise UsageError(
                    f"requests of one step share their {name}, got {getattr(first, name)} and {getattr(request, name)}; "
                    "run them in steps of their own."
                )
    return first.phase


def _offsets(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def _windows(phase: Phase, requests: Sequence[StepRequest], lengths: tuple[int, ...]) -> _Inputs:
    tokens = [request.token_ids for request in requests]
    positions = [torch.arange(r.start, r.start + n, dtype=torch.int32) for r, n in zip(requests, lengths, strict=True)]
    if phase.guided:
        others = [request.unconditional for request in requests]
        for own, other in zip(tokens, others, strict=True):
            if other is None or other.shape != own.shape:
                raise UsageError("a guided request needs its window without the prompt as well, of the same length.")
        tokens, positions = [*tokens, *(other for other in others if other is not None)], positions * 2
    return {
        "token_ids": torch.cat(tokens),
        "positions": torch.cat(positions),
        "cu_seqlens": _offsets([part.numel() for part in tokens]),
    }


def _frequencies(rotary: Rotary, phase: Phase, requests: Sequence[StepRequest], lengths: tuple[int, ...]) -> _Inputs:
    if phase.cached:
        check_cached(rotary, [request.key_len for request in requests])
        return {}
    ends = [request.start + length for request, length in zip(requests, lengths, strict=True)]
    copies = 2 if phase.guided else 1
    return sequence_frequencies(rotary, list(lengths) * copies, ends * copies)


def _keys(requests: Sequence[StepRequest]) -> _Inputs:
    slots, key_slots = [], []
    for request in requests:
        end = request.start + request.token_ids.numel()
        sequence = request.sequence
        if not isinstance(sequence, OwnedRows):
            raise UsageError("a cached request needs a sequence that this model has opened.")
        if request.key_len < end:
            raise UsageError(
                f"a window that ends at position {end} sees that many keys at least, got {request.key_len}."
            )
        slots.append(sequence.slots(request.start, end))
        key_slots.append(sequence.slots(0, request.key_len))
    return {
        "slots": torch.cat(slots),
        "key_slots": torch.cat(key_slots),
        "cu_keys": _offsets([part.numel() for part in key_slots]),
    }


def _rows(
    phase: Phase, requests: Sequence[StepRequest], lengths: tuple[int, ...], counts: tuple[int, ...], shifted: bool
) -> _Inputs:
    starts = [0, *accumulate(lengths)]
    sources = [(request.rows - 1).clamp(min=0) if shifted else request.rows for request in requests]
    for source, length in zip(sources, lengths, strict=True):
        if len(source) and not 0 <= int(source.min()) <= int(source.max()) < length:
            raise UsageError(f"rows of a window of {length} tokens are in [0, {length}), got {source.tolist()}.")
    rows = torch.cat([source + start for source, start in zip(sources, starts, strict=False)])
    if not len(rows):
        raise UsageError("a step with a head decides at least one row; leave the request out, or commit it.")
    first = requests[0]
    found = {"rows": rows}
    if phase.rule:
        copies = 2 if phase.guided else 1  # the second set of sequences decides nothing
        idle = [0] * (len(requests) * (copies - 1))
        found |= {
            "current": torch.cat([request.current for request in requests]),
            "cu_rows": _offsets([*counts, *idle]),
            "quota": torch.tensor([*(request.quota for request in requests), *idle], dtype=torch.int32),
            "threshold": torch.tensor([*(request.threshold for request in requests), *idle], dtype=torch.float32),
        }
    if phase.rule == "edit":
        found["edit_threshold"] = torch.tensor([request.edit_threshold for request in requests], dtype=torch.float32)
    if phase.noisy:
        if any(request.keys is None or request.keys.shape != request.rows.shape for request in requests):
            raise UsageError("a phase that draws at random needs a key for every row.")
        found["keys"] = torch.cat([request.keys for request in requests if request.keys is not None])
    if phase.guided:
        found["unconditional_rows"] = rows + starts[-1]
    scalars = {
        "temperature": (phase.head in ("sample", "nucleus"), first.temperature, torch.float32),
        "top_p": (phase.head == "nucleus", first.top_p, torch.float32),
        "top_k": (phase.head == "nucleus", first.top_k, torch.int32),
        "score_temperature": (phase.perturb, first.score_temperature, torch.float32),
        "guidance": (phase.guided, first.guidance, torch.float32),
    }
    return found | {name: torch.tensor([value], dtype=kind) for name, (used, value, kind) in scalars.items() if used}
