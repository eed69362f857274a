"""Steps of a session's generators: requests whose phases one step can serve are a group, and share it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from mosaic.models.phase import shared_phase
from mosaic.runtime.packing import group_of

if TYPE_CHECKING:
    from mosaic.decoding.live import LiveRequest
    from mosaic.models.architecture import Architecture
    from mosaic.runtime.steps import StepRequest

__all__ = ["asked_by", "next_group"]


def next_group(live: Iterable[LiveRequest], arch: Architecture) -> list[LiveRequest]:
    """Return the live requests that share a step with the one that has waited longest; all of them have a `pending` step."""
    groups: dict[Hashable, list[LiveRequest]] = {}
    for request in live:
        if request.pending is not None:
            groups.setdefault(group_of(request.pending, arch), []).append(request)
    return min(groups.values(), key=lambda group: min(request.waiting_since for request in group), default=[])


def asked_by(group: Sequence[LiveRequest]) -> list[StepRequest]:
    """Return what the requests of a group ask for, by the phase of the step that serves them all."""
    asked = [request.pending for request in group if request.pending is not None]
    phase = shared_phase(request.phase for request in asked)
    return [request.within(phase) for request in asked]
