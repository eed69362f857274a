"""Streams: they carry a step's launches, and events order the launches across streams.

A bound step asks `CudaStreams`, in whose place tests write a log down and run that in other orders. Where there is none (the
CPU) a step runs in program order and no call orders anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, TypeAlias
from warnings import catch_warnings, simplefilter

import torch

from mosaic.errors import DeviceLost, RuntimeMemoryError

MAIN: Final = "main"
Event: TypeAlias = Any
"""Whatever `CudaStreams.event` makes."""


@cache
def shared_streams(index: int) -> CudaStreams:
    """Return the streams that all models on one device share: cuBLAS keeps a workspace (32 MiB on Hopper) for every
    stream that ran a product, until the process ends."""
    return CudaStreams(index)


class CudaStreams:
    """One CUDA stream per name; "main" is where everything runs that no plan puts elsewhere. See `shared_streams`.

    Parameters
    ----------
    device
        The CUDA device; the current one if not given.
    """

    def __init__(self, device: torch.device | int | None = None) -> None:
        index = device.index if isinstance(device, torch.device) else device
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.streams: dict[str, torch.cuda.Stream] = {}
        self._main = self._stream(MAIN)
        self._entered, self._left = self.event(), self.event()
        self._drained, self._loaded = True, False
        self._caller: torch.cuda.Stream | None = None  # the caller's stream of the last step

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self.streams[name]

    def event(self) -> torch.cuda.Event:
        """Make an event and record it once: CUDA creates it then."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._main)
        return event

    def record(self, event: torch.cuda.Event, stream: str) -> None:
        """Record an event: it then stands for all work on a stream so far."""
        event.record(self.streams[stream])

    def wait(self, event: torch.cuda.Event, stream: str) -> None:
        """Make later work on a stream wait for the latest record of an event."""
        event.wait(self.streams[stream])

    def launcher(self, function: Callable[..., object], stream: str) -> Callable[..., object]:
        """Give a function that calls `function` with its launches on a stream, from main and back to it."""
        if stream == MAIN:
            return function
        main, side, make_current = self._main, self._stream(stream), torch.cuda.set_stream

        def launch(**arguments: Any) -> None:
            make_current(side)
            try:
                function(**arguments)
            finally:
                make_current(main)

        return launch

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the body with "main" current: after the caller's stream, and the caller's stream after it.

        If the body raises, Ctrl-C included, all streams are drained: nothing of the step runs on. An interrupted drain
        is repeated by the next step.
        """
        with torch.cuda.device(self.device):
            if not self._drained:
                self.drain()
            caller = torch.cuda.current_stream(self.device.index)
            self._drained = False
            try:
                self._entered.record(caller)
                self._entered.wait(self._main)
                if self._caller is not None and self._caller != caller:  # steps may have been replayed on that stream
                    self._main.wait_stream(self._caller)
                torch.cuda.set_stream(self._main)
                yield
                self._left.record(self._main)
                self._left.wait(caller)
                self._drained, self._caller = True, caller
            except BaseException:
                with suppress(RuntimeError):  # a lost device fails every call; the first error is raised
                    self.drain()
                raise
            finally:
                torch.cuda.set_stream(caller)

    def drain(self) -> None:
        """Wait on the host until all streams are empty."""
        for stream in (*self.streams.values(), *([self._caller] if self._caller is not None else [])):
            stream.synchronize()
        self._drained = True

    def replay(self, captured: torch.cuda.CUDAGraph) -> None:
        """Run a captured step as `step` would.

        If the last step came from the same stream, the graph is launched on that stream: it is behind all steps then,
        and going through "main" would take longer than the launch.
        """
        index = self.device.index
        if (
            not self._drained
            or torch.cuda.current_device() != index
            or torch.cuda.current_stream(index) != self._caller
        ):
            with self.step():
                captured.replay()
            return
        self._drained = False
        try:
            captured.replay()
            self._drained = True
        except BaseException:
            with suppress(RuntimeError):
                self.drain()
            raise

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the launches of a function into a CUDA graph; main must be current, and all kernels loaded.

        `torch.cuda.graph` would also empty PyTorch's caches and wait for the device.

        Raises
        ------
        RuntimeMemoryError
            If the function asked PyTorch's allocator for memory, which the plan would not hold.
        RuntimeError
            PyTorch's error if an operation cannot be captured.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            before = self._allocations()
            step()
            taken = self._allocations() - before
            graph.capture_end()
        except BaseException:
            self._abandon(graph, pool)
            raise
        if taken:
            raise RuntimeMemoryError(
                f"the step asked PyTorch's allocator for memory {taken} times, which a planned step never does: find "
                f"the kernel with torch.cuda.memory._record_memory_history, or run without capture."
            )
        return graph

    def load_for_captures(self) -> None:
        """Capture an empty graph, once: PyTorch's first capture in a process loads kernels (92 MiB on an H200) that
        stay with the context and would be counted as a graph's."""
        if self._loaded:
            return
        with self.step(), catch_warnings():  # PyTorch warns that the graph is empty
            simplefilter("ignore")
            self.capture(lambda: None)
        self._loaded = True

    def _allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("allocation.all.allocated", 0))

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a failed capture, so that PyTorch's allocator and the streams are as before it."""
        with suppress(RuntimeError):
            for name, stream in self.streams.items():
                with torch.cuda.stream(stream):
                    joins = name != MAIN and torch.cuda.is_current_stream_capturing()
                if joins:  # a capture cannot end before its side streams are joined
                    self._left.record(stream)
                    self._left.wait(self._main)
        try:
            with catch_warnings():  # PyTorch warns of an empty graph, if the first launch failed
                simplefilter("ignore")
                graph.capture_end()
        except RuntimeError:
            # CUDA dropped the capture, and PyTorch raised before it told its own allocator
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, pool)


_LOST: Final = (
    "illegal memory access", "unspecified launch failure", "misaligned address", "illegal instruction",
    "invalid program counter", "device-side assert", "hardware stack error", "uncorrectable ecc", "launch timed out",
    "device is lost", "fell off the bus",
)  # fmt: skip


def device_lost(error: BaseException) -> DeviceLost | None:
    """Give a `DeviceLost` if an error says that the device's context is lost; None if it does not.

    PyTorch raises `torch.AcceleratorError` (older ones `RuntimeError`), Triton and cuda-python their own, also for
    errors that a process survives: only CUDA's message tells them apart.

    Examples
    --------
    >>> device_lost(RuntimeError("CUDA error: invalid configuration argument")) is None
    True
    >>> type(device_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))).__name__
    'DeviceLost'
    """
    text = (str(error).splitlines() or [""])[0]  # the other lines are advice that always names device-side assertions
    if not any(cause in text.lower() for cause in _LOST):
        return None
    return DeviceLost(
        f"the device stopped in a step: {text}. Its memory and everything loaded on it are gone for "
        f"this process: restart it. The launch that failed may be an earlier one than the op named here; "
        f"CUDA_LAUNCH_BLOCKING=1 names it, and debug='poison' shows a plan that is wrong."
    )
