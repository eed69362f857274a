"""PyTorch's threads within one operation, set during a step on the CPU.

Threads wait for each other after every operation. If other work keeps the cores busy, such a wait takes longer than an
operation of a small model: on two busy cores 96 steps of the small model took 58 s with two threads and 11 s with one.
So the number of threads follows the model's size, and PyTorch's own setting is restored after each step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Final

import torch

from mosaic.errors import UsageError

WEIGHTS_PER_THREAD: Final = 1 << 26
"""Weights per thread: one thread up to 67 million weights, on most machines all threads from 1 billion on."""


class StepThreads:
    """The number of threads that the operations of a step may use.

    Parameters
    ----------
    weights
        Parameters of the model.
    asked
        Threads, whatever PyTorch is set to; if not given, by the model's size, at most PyTorch's own number.

    Raises
    ------
    UsageError
        If `asked` is no integer between 1 and the number of cores.

    Examples
    --------
    >>> with StepThreads(5_000_000).in_force():
    ...     torch.get_num_threads()
    1
    """

    def __init__(self, weights: int, asked: int | None = None) -> None:
        cores = max(os.cpu_count() or 1, torch.get_num_threads())
        if asked is not None and (
            isinstance(asked, bool) or not isinstance(asked, Integral) or not 1 <= int(asked) <= cores
        ):
            raise UsageError(f"threads must be between 1 and the {cores} cores of this machine, got {asked!r}.")
        self._asked = None if asked is None else int(asked)
        self._by_size = max(1, -(-weights // WEIGHTS_PER_THREAD))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Set PyTorch's number of threads, and restore it afterwards."""
        before = torch.get_num_threads()
        wanted = min(before, self._by_size) if self._asked is None else self._asked
        if wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)
