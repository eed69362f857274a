"""Workspace: the ranges of one device that the offsets of plans point into, and typed views of them.

One range per pool of the plan document (`workspace`, `weights`, `state/NAME` for each state, `host`), reserved large
and committed as plans need: growing one state moves nothing of another. `host` is host memory that the device copies
from and reads, pinned for a CUDA card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from mosaic.errors import PlanFormatError, RuntimeMemoryError
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.range_pool import ClosesOnExit, Range, RangePool, close_all
from mosaic.runtime.spans import Spans

DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""PyTorch dtype by its name in plans."""

RESERVE_BYTES: Final = 1 << 40
"""The most address space of a range; a process has 128 TiB."""
HOST: Final = "host"
NO_HOLES: Final[Mapping[str, Spans]] = MappingProxyType({})
NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


def torch_dtype(name: str) -> torch.dtype:
    """Look a dtype up by its name in plans.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    if name not in DTYPES:
        raise PlanFormatError(f"unknown dtype '{name}' in the plan; known: {', '.join(DTYPES)}.")
    return DTYPES[name]


class Workspace(ClosesOnExit):
    """The memory of one device, by pool.

    Parameters
    ----------
    capacities
        Bytes of address space to reserve per pool. If not given, the budget, which is the most that a range can hold,
        up to 1 TiB. Reserving costs no memory.
    pool
        The source of the ranges, with its own ledger and pages; a `PagePool` without a limit if not given.
    host
        The source of the range `host`, with its own ledger: a `HostPool` for a CUDA card. Beside a `PagePool`, another
        one without a limit if not given.
    names
        Ranges that pools have, where they are not of the same name.

    Examples
    --------
    >>> with Workspace() as workspace:
    ...     workspace.resize("workspace", 4096)
    ...     x_TD = workspace.view("workspace", 512, (2, 3), "float32").fill_(1.0)
    ...     float(x_TD.sum())
    6.0
    """

    def __init__(
        self, *, capacities: Mapping[str, int] | None = None, pool: RangePool | None = None, host: RangePool | None = None,
        names: Mapping[str, str] = NO_NAMES,
    ) -> None:  # fmt: skip
        self._names = names
        self.pages: RangePool = pool if pool is not None else PagePool()
        if host is None and isinstance(self.pages, PagePool):
            host = PagePool(DeviceLedger(device=HOST), page_bytes=self.pages.page_bytes)
        self.host = host
        self._capacities = dict(capacities or {})

    @property
    def ledger(self) -> DeviceLedger:
        """The ledger of the device's pages; `host.ledger` is that of the host."""
        return self.pages.ledger

    def renamed(self, **names: str) -> Workspace:
        """Return the same memory, with other ranges for some pools."""
        return Workspace(pool=self.pages, host=self.host, capacities=self._capacities, names=names)

    def _pool(self, name: str) -> RangePool:
        if name != HOST:
            return self.pages
        if self.host is None:
            raise RuntimeMemoryError(
                f"the range {HOST} is asked for on {self.ledger.device}, and no pool of pinned memory was given: make "
                f"the workspace with host=HostPool(driver)."
            )
        return self.host

    def range(self, name: str) -> Range:
        """Give the range of a pool, reserved on first use."""
        name = self._names.get(name, name)
        pool = self._pool(name)
        existing = pool.ranges.get(name)
        if existing is not None:
            return existing
        budget = pool.ledger.budget_bytes
        return pool.reserve(
            name, self._capacities.get(name, RESERVE_BYTES if budget is None else min(budget, RESERVE_BYTES))
        )

    def resize(self, name: str, num_bytes: int, *, holes: Spans = (), populate: bool = True) -> None:
        """Back exactly `[0, num_bytes)` of a pool, rounded up to pages, with memory, except in `holes` (bytes, sorted)."""
        self.range(name).resize(num_bytes, holes=holes, populate=populate)

    def commit_all(
        self, sizes: Mapping[str, int], *, holes: Mapping[str, Spans] = NO_HOLES, populate: bool = True
    ) -> None:
        """Commit at least these bytes of several pools, except `holes`; nothing is given back.

        If a growth is refused, that pool stays as it was, and earlier pools have grown.
        """
        for name, size in sizes.items():
            self.range(name).commit(size, holes=holes.get(name, ()), populate=populate)

    def resize_all(
        self, sizes: Mapping[str, int], *, holes: Mapping[str, Spans] = NO_HOLES, populate: bool = True
    ) -> None:
        """Commit exactly these bytes of several pools, except `holes`. Pools shrink first: others may need their pages.

        If a growth is refused, that pool is not grown, and earlier pools have their new sizes.
        """
        self.trim_all(sizes, holes=holes)
        self.commit_all(sizes, holes=holes, populate=populate)

    def trim_all(self, sizes: Mapping[str, int], *, holes: Mapping[str, Spans] = NO_HOLES) -> None:
        """Give back what several pools have beyond these bytes and inside `holes`; nothing grows."""
        for name, size in sizes.items():
            self.range(name).decommit(size, holes=holes.get(name, ()))

    def view(self, name: str, offset: int, shape: Sequence[int], dtype: str, *, on_device: bool = False) -> Tensor:
        """View committed bytes of a pool as a contiguous tensor; no copy.

        Parameters
        ----------
        name, offset, shape, dtype
            The pool of the view, its offset there in bytes, and its contents.
        on_device
            View pinned host memory as a tensor of the device, for kernels; other pools are on the device anyway.

        Raises
        ------
        RuntimeMemoryError
            If the view is misaligned or reaches beyond the committed bytes.
        """
        kind, part = torch_dtype(dtype), self.range(name)
        size = math.prod(shape) * kind.itemsize
        if offset < 0 or offset + size > part.end_bytes or offset % kind.itemsize:
            raise RuntimeMemoryError(
                f"{name}: a view of {size:,} bytes ({dtype} {list(shape)}) at offset {offset:,} does not lie, aligned, "
                f"within the {part.end_bytes:,} committed bytes: commit the plan's peak first."
            )
        whole = part.device_tensor if on_device else part.tensor
        return whole[offset : offset + size].view(kind).view(tuple(shape))

    def _ranges(self) -> dict[str, Range]:
        return {**self.pages.ranges, **(self.host.ranges if self.host is not None else {})}

    def committed_bytes(self) -> dict[str, int]:
        """Return bytes committed, by pool."""
        return {name: part.committed_bytes for name, part in self._ranges().items()}

    def changes(self) -> int:
        """Return how often open ranges grew or shrank; repeated step sizes do not change it."""
        return sum([part.changes for part in self._ranges().values()])

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes in physical memory as the system counts them, by pool."""
        return {name: part.resident_bytes() for name, part in self._ranges().items()}

    def close(self) -> None:
        """Give all memory back. If one pool fails, the others still give theirs back, then its error is raised.

        Closing twice is fine.
        """
        close_all(*(pool for pool in (self.host, self.pages) if pool is not None))
