"""CudaStreams over a fake of `torch.cuda` that writes down what it is asked: order, draining, capture and its failures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.streams import CudaStreams


class Fake:
    """The parts of `torch.cuda` that streams need; `log` is what happened, `fails` what raises when it is asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.names: dict[Any, str] = {}
        self.allocated = 0
        self.capturing: set[str] = set()
        self.current = self.Stream(name="caller")

    def note(self, text: str) -> None:
        self.log.append(text)
        if text in self.fails:
            raise self.fails.pop(text)

    def Stream(self, device: Any = None, name: str | None = None) -> Any:
        fake = self

        class Stream:
            def synchronize(self) -> None:
                fake.note(f"synchronize {fake.names[self]}")

        stream = Stream()
        self.names[stream] = name or ("main", "fetch", "store")[len(self.names) - 1]
        return stream

    def Event(self) -> Any:
        fake = self

        class Event:
            at = ""

            def record(self, stream: Any) -> None:
                self.at = fake.names[stream]

            def wait(self, stream: Any) -> None:
                fake.note(f"{fake.names[stream]} waits for {self.at}")

        return Event()

    def CUDAGraph(self) -> Any:
        fake = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                fake.note(f"begin {pool} {capture_error_mode}")

            def capture_end(self) -> None:
                fake.note("end")

        return Graph()

    def set_stream(self, stream: Any) -> None:
        self.current = stream
        self.log.append(f"on {self.names[stream]}")

    def stream(self, stream: Any) -> Any:
        self.asked = self.names[stream]
        return nullcontext()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    for name in ("Stream", "Event", "CUDAGraph", "set_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": made.allocated})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.asked in made.capturing)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda index, pool: made.note(f"release {index} {pool}"), raising=False
    )
    return made


def launches(fake: Fake, streams: CudaStreams) -> tuple[Callable[..., object], Callable[..., object]]:
    """A launch on main and one on the stream fetch."""
    return (
        streams.launcher(lambda: fake.note("main launch"), "main"),
        streams.launcher(lambda: fake.note("side launch"), "fetch"),
    )


def test_a_step_comes_after_the_caller_and_the_caller_after_it(fake: Fake) -> None:
    streams = CudaStreams()
    main, side = launches(fake, streams)
    with streams.step():
        main()
        side()
        main()
    assert streams.device == torch.device("cuda", 3)
    assert fake.log == [
        "main waits for caller", "on main", "main launch", "on fetch", "side launch", "on main", "main launch",
        "caller waits for main", "on caller",
    ]  # fmt: skip


def test_records_and_waits_name_their_streams(fake: Fake) -> None:
    streams = CudaStreams(0)
    launches(fake, streams)
    event = streams.event()
    streams.record(event, "fetch")
    streams.wait(event, "main")
    assert fake.log == ["main waits for fetch"]


@pytest.mark.parametrize("where", ["main launch", "side launch"])
def test_what_raises_in_a_step_leaves_nothing_running(fake: Fake, where: str) -> None:
    streams = CudaStreams()
    main, side = launches(fake, streams)
    fake.fails[where] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), streams.step():
        main()
        side()
    assert fake.log[-3:] == ["synchronize main", "synchronize fetch", "on caller"]
    fake.log.clear()
    with streams.step():
        pass
    assert fake.log == ["main waits for caller", "on main", "caller waits for main", "on caller"]


def test_a_drain_that_was_interrupted_is_made_up_for(fake: Fake) -> None:
    streams = CudaStreams()
    main, _ = launches(fake, streams)
    fake.fails = {"main launch": ValueError(), "synchronize main": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt), streams.step():
        main()
    assert fake.log[-2:] == ["synchronize main", "on caller"]
    fake.log.clear()
    with streams.step():
        main()
    assert fake.log[:3] == ["synchronize main", "synchronize fetch", "main waits for caller"]


def test_a_lost_device_cannot_be_drained_and_the_first_error_stays(fake: Fake) -> None:
    streams = CudaStreams()
    main, _ = launches(fake, streams)
    first = RuntimeError("CUDA error: unspecified launch failure")
    fake.fails = {"main launch": first, "synchronize main": RuntimeError("CUDA error: unspecified launch failure")}
    with pytest.raises(RuntimeError) as caught, streams.step():
        main()
    assert caught.value is first and fake.names[fake.current] != "main"


def test_capture_begins_and_ends_on_main(fake: Fake) -> None:
    streams = CudaStreams()
    main, _ = launches(fake, streams)
    with streams.step():
        streams.capture(main)
    assert fake.log[2:-2] == ["begin pool thread_local", "main launch", "end"]


def test_what_asks_the_allocator_is_not_captured(fake: Fake) -> None:
    streams = CudaStreams()

    def step() -> None:
        fake.allocated += 2

    with pytest.raises(RuntimeMemoryError, match="2 times"):
        streams.capture(step)
    assert fake.log == ["begin pool thread_local", "end"]


def test_a_capture_that_fails_is_joined_and_ended(fake: Fake) -> None:
    streams = CudaStreams()
    main, side = launches(fake, streams)
    fake.fails["main launch"] = KeyboardInterrupt()

    def step() -> None:
        side()
        fake.capturing.add("fetch")  # "store" takes no part
        streams.launcher(main, "store")()

    with pytest.raises(KeyboardInterrupt):
        streams.capture(step)
    assert fake.log[-2:] == ["main waits for fetch", "end"]


def test_a_capture_that_cuda_dropped_gives_the_allocator_back(fake: Fake) -> None:
    streams = CudaStreams()
    main, _ = launches(fake, streams)
    fake.fails = {"main launch": RuntimeError("operation not permitted"), "end": RuntimeError("invalidated")}
    with pytest.raises(RuntimeError, match="not permitted"):
        streams.capture(main)
    assert fake.log[-2:] == ["end", "release 3 pool"]
