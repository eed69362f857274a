"""Meters: synchronised wall time, and the driver's counter of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

__all__ = ["card", "driver_bytes", "synchronise", "timed"]

LONGEST_S: Final = 20.0
"""Seconds that the counted repeats of one point may take together, but for the first."""


def synchronise(cuda: bool) -> None:
    """Wait for the card."""
    if cuda:
        torch.cuda.synchronize()


def timed(step: Callable[[], object], repeats: int, *, cuda: bool) -> list[float]:
    """Return the seconds of each of up to `repeats` calls by the synchronised wall clock; a long step is called less often."""
    seconds: list[float] = []
    for _ in range(repeats):
        synchronise(cuda)
        began = time.perf_counter()
        step()
        synchronise(cuda)
        seconds.append(time.perf_counter() - began)
        if sum(seconds) + seconds[-1] > LONGEST_S:
            break
    return seconds


def driver_bytes(cuda: bool) -> int | None:
    """Return the bytes in use on the card by the driver's own counter: context, modules, libraries and everybody's memory."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def card(cuda: bool) -> str:
    """Return the card's name."""
    return torch.cuda.get_device_name() if cuda else "cpu"
