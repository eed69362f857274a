"""Guards of memory that a step must not write: weights, on the device and in host memory, and the gaps around them.

For debugging: the gaps are poisoned before a step, and a checksum of every weight and gap is taken before and after it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mosaic.errors import WeightsChanged
from mosaic.planner.plan_records import PlanRecords
from mosaic.runtime.poison import POISON
from mosaic.runtime.views import Views
from mosaic.runtime.workspace import Workspace


class WeightGuard:
    """The weights and gaps of one plan.

    Parameters
    ----------
    views
        Of the plan. Adopted tensors are guarded where they are, and have no gaps.
    """

    def __init__(self, records: PlanRecords, views: Views, workspace: Workspace) -> None:
        self._weights: dict[str, Tensor] = {}
        self._gaps: dict[str, Tensor] = {}
        self._before: dict[str, int] = {}
        placed: dict[str, list[tuple[int, int, str]]] = {}
        for record in records.buffers:
            name, whole = record.tensor or record.name, None
            if record.kind == "weight" or (record.kind == "host" and record.tensor is not None):
                whole = self._weights[name] = _bytes(views.whole(record.id))
            if whole is not None and not views.is_adopted(record.id):
                start = record.offset
                size = record.value_bytes
                placed.setdefault(record.pool, []).append((start, start + size, name))
        for pool, ranges in placed.items():
            last = workspace.range(pool).committed_bytes if pool == "weights" else _end_of(records, pool)
            for (_, end, name), (start, *_) in pairwise([*sorted(ranges), (last, last, "")]):
                if end < start:
                    self._gaps[f"the {start - end:,} bytes after '{name}'"] = views.at(
                        pool, end, (start - end,), "uint8"
                    )
        # the device's first: reading one waits for the step, which may still be copying to the host
        watched = sorted({**self._weights, **self._gaps}.items(), key=lambda item: item[1].device.type == "cpu")
        self._watched = {name: _words(view) for name, view in watched}

    def begin(self) -> None:
        """Poison the gaps and record the checksums."""
        for gap in self._gaps.values():
            gap.fill_(POISON)
        self._before = self._sums()

    def end(self) -> None:
        """Compare weights and gaps with the checksums of `begin`.

        Raises
        ------
        WeightsChanged
            Naming the weights and gaps that the step wrote to.
        """
        after = self._sums()
        changed = [name for name, value in self._before.items() if after[name] != value]
        if changed:
            which = ", ".join(name if name in self._gaps else f"'{name}'" for name in changed[:5])
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise WeightsChanged(
                f"the step wrote to weights, which it may only read: {which}{more}. The plan has another buffer there "
                "(`check` it), or a kernel writes beyond its outputs; load the weights again.",
                changed,
            )

    def _sums(self) -> dict[str, int]:
        """The sum of each weight's words, modulo 2^64: one changed word changes it."""
        return {name: sum(int(part.sum()) for part in parts) for name, parts in self._watched.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _end_of(records: PlanRecords, pool: str) -> int:
    """The end of the weights in a pool that has other buffers behind them."""
    weights = [b for b in records.buffers if b.pool == pool and b.tensor is not None]
    return max(int(b.offset + b.size) for b in weights)


def _words(view: Tensor) -> list[Any]:
    """View bytes as words, and the bytes after the last word: NumPy arrays on a CPU, whose sum allocates nothing; on a
    device tensors, whose reduction takes a few bytes from PyTorch's allocator."""
    whole = view.numel() // 8 * 8 if view.storage_offset() % 8 == 0 else 0
    words = [view[:whole].view(torch.int64)] if whole else []
    parts = [*words, view[whole:]] if whole < view.numel() else words
    return [part.numpy() for part in parts] if view.device.type == "cpu" else parts
