"""PyTorch's threads within one operation, for the time of a step on the CPU.

Threads wait for each other after every operation. Operations of a small model take less time than such a wait does
where something else keeps the cores busy: on two busy cores 96 steps of the small model took 58 s with two threads and
11 s with one. So a model gets threads by its size, and PyTorch's own setting is put back after each step.
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
"""Weights of a model that keep a thread busy: one thread up to 67 million, on most machines all of them from 1 billion on."""


class StepThreads:
    """How many threads the operations of a step may use.

    Parameters
    ----------
    weights
        Parameters of the model.
    asked
        Threads, whatever PyTorch is set to; if not given, by the model's size and at most as many as PyTorch is set to.

    Raises
    ------
    UsageError
        If `asked` is not a number of threads that this machine has cores for.

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
        """Set PyTorch's number of threads, and put it back as it was."""
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
