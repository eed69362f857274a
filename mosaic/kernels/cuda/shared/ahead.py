"""Kernels before they are launched: which launches ask for which, and compiling them in processes beside this one.

Launchers of a thread that is `recording` launch nothing. What Triton chooses code by is taken down: the kernel, types, constants,
whether a number is 1 or a multiple of 16 and an address aligned to 16, and options. A compiling process gives Triton arguments like
these, and a card in name only, so kernels are found or compiled by Triton's own key.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, get_ident
from time import perf_counter
from typing import Any, Final

import torch

from mosaic.errors import CompilationFailed
from mosaic.kernels.card import Card, launches_for
from mosaic.kernels.cuda.shared.kept import KernelFolder
from mosaic.kernels.cuda.shared.launching import triton
from mosaic.units import format_bytes

__all__ = ["Argument", "Compilers", "Kernels", "recording"]

MOST_PROCESSES: Final = 16
"""Compiling processes at most; each takes half a gigabyte."""
COMPILER: Final = "mosaic.kernels.cuda.shared.compiler"
ROOT: Final = Path(__file__).parents[4]
_RECORDING: Final = Lock()


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor as Triton specialises it: its dtype, and its address modulo 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """An address that is as aligned."""
        return self.address


class _Pickler(pickle.Pickler):
    """Writes tensors as `Argument`s."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return Argument, (obj.dtype, obj.data_ptr() % 16)
        return NotImplemented


def _number(value: int, specialised: bool = True) -> int:
    """A number for all for which Triton's code is the same.

    >>> [_number(value) for value in (0, 1, 5, 48, 1 << 31)], _number(48, specialised=False)
    ([16, 1, 2, 16, 1099511627792], 2)
    """
    if specialised and value == 1:
        return 1
    return (16 if specialised and value % 16 == 0 else 2) + (1 << 40 if abs(value) >= 1 << 31 else 0)


def _asked(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> bytes:
    """What Triton chooses a kernel's code by, as a compiling process reads it; equal where the code is."""
    own = {name: options.pop(name) for name in [*options] if name in kernel.signature.parameters}
    given = kernel.signature.bind(*args, **own).arguments
    for parameter in kernel.params:
        value = given.get(parameter.name)
        if hasattr(value, "block_shape"):  # a descriptor's code depends on its blocks alone
            given[parameter.name] = value = copy(value)
            value.shape = value.strides = value.block_shape
        elif parameter.is_constexpr:
            continue
        elif isinstance(value, float):
            given[parameter.name] = 0.5
        elif type(value) is int:
            given[parameter.name] = _number(value, not parameter.do_not_specialize)
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.fast = True  # equal objects are written alike, whether they are one or two
    pickler.dump((kernel.__module__, kernel.__name__, given, options))
    return written.getvalue()


@contextmanager
def recording(card: Card) -> Iterator[dict[bytes, str]]:
    """Take down what launches of this thread ask for, as for a card, instead of launching it.

    Yields
    ------
    dict
        The names of the kernels, by all that their code depends on.
    """
    found, thread, function = dict[bytes, str](), get_ident(), triton.runtime.JITFunction
    with _RECORDING, launches_for(card):
        run = function.run

        def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if get_ident() != thread:
                return run(kernel, *args, grid=grid, warmup=warmup, **options)
            found.setdefault(_asked(kernel, args, options), kernel.__name__)
            return None

        function.run = record
        try:
            yield found
        finally:
            function.run = run


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What became of the kernels that were asked for: how many were found and compiled, by how many processes, in how long; the
    bytes of the folder; and the names of those that could not be compiled, with the reasons."""

    found: int
    compiled: int
    processes: int
    seconds: float
    folder_bytes: int
    failed: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        made = f"{self.compiled} compiled by {self.processes} processes, " if self.compiled else ""
        return f"kernels: {made}{self.found} found, in {self.seconds:.1f} s; {format_bytes(self.folder_bytes)} on disk"


class Compilers:
    """Processes that find kernels in a folder, or compile them into it; the first starts at once, others when they are needed.

    Parameters
    ----------
    card
        For which.
    """

    def __init__(self, card: Card, folder: KernelFolder) -> None:
        self._card, self._folder, self._began = card, folder, perf_counter()
        self._processes = [_Process(card, folder)]

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.close()

    def run(self, asked: Mapping[bytes, str], progress: Callable[[str], object]) -> Kernels:
        """Find or compile what `recording` has taken down; `progress` is called with a line for each kernel that is compiled.

        Raises
        ------
        CompilationFailed
            If processes cannot be started.
        """
        missing = [one for one in asked if not self._processes[0].has(one)]
        count = min(len(missing), len(os.sched_getaffinity(0)), MOST_PROCESSES)
        self._processes += [_Process(self._card, self._folder) for _ in range(1, count)]
        idle, failed = SimpleQueue[_Process](), list[tuple[str, str]]()
        for process in self._processes:
            idle.put(process)

        def make(one: bytes) -> tuple[str, float, str]:
            process, began = idle.get(), perf_counter()
            try:
                why = process.make(one)
            except CompilationFailed as error:  # it has ended
                why, process = str(error), _Process(self._card, self._folder)
                self._processes.append(process)
            finally:
                idle.put(process)
            return asked[one], perf_counter() - began, why

        with ThreadPoolExecutor(max(count, 1)) as threads:
            made = [threads.submit(make, one) for one in missing]
            try:
                for number, future in enumerate(as_completed(made), start=1):
                    name, seconds, why = future.result()
                    failed += [(name, why)] if why else []
                    progress(f"kernel {number} of {len(missing)}: {name}, {why or f'{seconds:.1f} s'}")
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.__exit__()
                raise
        return Kernels(
            found=len(asked) - len(missing), compiled=len(missing) - len(failed), processes=count,
            seconds=perf_counter() - self._began, folder_bytes=self._folder.num_bytes(), failed=failed,
        )  # fmt: skip


class _Process:
    """A process that compiles, one kernel at a time."""

    def __init__(self, card: Card, folder: KernelFolder) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-P", "-m", COMPILER, str(folder.path), str(folder.most_bytes), str(card.capability)]
        given = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([given] if given else [])])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )

    def has(self, one: bytes) -> bool:
        """Return whether a kernel is in the folder, as it was written."""
        return bool(self._ask(one, compiling=False)["found"])

    def make(self, one: bytes) -> str:
        """Compile a kernel; return why it cannot be compiled, or nothing."""
        return str(self._ask(one, compiling=True)["why"])

    def _ask(self, one: bytes, *, compiling: bool) -> Mapping[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            pickle.dump((one, compiling), self._process.stdin)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise CompilationFailed(f"a process that compiles kernels ended with status {status}: {said[-1]}")
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):
                assert stream is not None
                stream.close()
