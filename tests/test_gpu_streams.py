"""Streams and graph capture on a card: the CPU's results, nothing from PyTorch's allocator, and a way back from failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from test_streams import GRAPHS, expected, inputs_of, planned, random_graph
from torch import Tensor

from mosaic.registrar.graph import Graph
from mosaic.runtime.cuda_driver import CudaDriver
from mosaic.runtime.cuda_pool import CudaPool
from mosaic.runtime.executor import Executor
from mosaic.runtime.host_pool import HostPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.streams import CudaStreams
from mosaic.runtime.weights import weight_views
from mosaic.runtime.workspace import Workspace

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if importlib.util.find_spec("cuda") is None:
    pytest.skip("no cuda-python", allow_module_level=True)

Build = Callable[[Graph], None]
TOKENS = 203


@pytest.fixture(scope="module")
def streams() -> CudaStreams:
    return CudaStreams(0)


@pytest.fixture
def card() -> Iterator[Workspace]:
    driver = CudaDriver(0)
    with Workspace(pool=CudaPool(driver, DeviceLedger()), host=HostPool(driver)) as opened:
        yield opened


class Pair:
    """A graph bound on a card, and what the CPU says that it gives."""

    def __init__(self, build: Build, card: Workspace, streams: CudaStreams, rows: int, **more: Any) -> None:
        self.on_cpu = planned(build, tokens=TOKENS, rows=rows)
        document = planned(build, tokens=TOKENS, rows=rows, device="h200")
        for pool in document["pools"]:
            card.resize(pool["name"], pool["capacity"])
        self.host = Workspace()
        for name in ("workspace", "weights", "host"):
            self.host.resize(name, 1 << 21)
        self.results(0)  # fills the weights
        weights = weight_views(self.on_cpu, self.host)
        for name, view in weight_views(document, card).items():
            view.copy_(weights[name])
        torch.cuda.synchronize()
        self.executor = Executor(document, card, streams=streams, **more)

    def results(self, seed: int) -> Mapping[str, Tensor]:
        return expected(self.on_cpu, self.host, inputs_of(self.on_cpu, seed))

    def run(self, seed: int) -> None:
        for name, value in inputs_of(self.on_cpu, seed).items():
            self.executor.inputs[name].copy_(value)
        self.executor.run()

    def check(self, seed: int) -> None:
        self.run(seed)
        for name, value in self.results(seed).items():
            scale = float(value.abs().max())  # products of float32 in another order
            torch.testing.assert_close(self.executor.outputs[name].cpu(), value, rtol=0.0, atol=2e-5 * scale)


def allocations() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["reserved_bytes.all.allocated"]


@pytest.mark.parametrize("mode", ["eager", "capture", "poison"])
@pytest.mark.parametrize("rows", [16, 101])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_gives_what_the_cpu_gives_and_allocates_nothing(
    card: Workspace, streams: CudaStreams, name: str, rows: int, mode: str
) -> None:
    debug: Any = "poison" if mode == "poison" else None
    pair = Pair(GRAPHS[name], card, streams, rows, capture=mode == "capture", debug=debug)
    pair.check(0)
    pair.check(1)
    before = allocations()
    for seed in (2, 3):
        pair.run(seed)
    # the checksums of weights that poison takes are reductions, whose temporaries come from what PyTorch has reserved
    assert allocations()[mode == "poison" :] == before[mode == "poison" :]
    pair.check(4)
    assert pair.executor.captured == (mode == "capture") and pair.executor.not_captured is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(card: Workspace, streams: CudaStreams, seed: int) -> None:
    pair = Pair(random_graph(seed), card, streams, rows=(8, 40, 100)[seed % 3], capture=seed % 2 == 0)
    for step in range(4):
        pair.check(step)


def test_a_step_follows_the_callers_stream(card: Workspace, streams: CudaStreams) -> None:
    pair = Pair(GRAPHS["windows"], card, streams, 16)
    pair.check(0)
    mine = torch.cuda.Stream()
    for seed in (1, 2):
        want = pair.results(seed)["y"]
        x = inputs_of(pair.on_cpu, seed)["x"].cuda()
        torch.cuda.synchronize()
        with torch.cuda.stream(mine):
            torch.cuda._sleep(20_000_000)  # the input is written late, on the caller's stream
            pair.executor.inputs["x"].copy_(x)
            pair.executor.run()
            got = pair.executor.outputs["y"].clone()
            assert torch.cuda.current_stream() == mine
        mine.synchronize()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


class Meddling(CudaStreams):
    """Does something at the n-th launch from now on."""

    def __init__(self) -> None:
        super().__init__(0)
        self.left, self.act = 0, lambda: None

    def arm(self, launches: int, act: Callable[[], Any]) -> None:
        self.left, self.act = launches, act

    def launcher(self, function: Callable[..., object], stream: str) -> Callable[..., object]:
        def meddled(**arguments: Any) -> None:
            self.left -= 1
            if self.left == 0:
                self.act()
            function(**arguments)

        return super().launcher(meddled, stream)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("launches", [1, 2, 7])
def test_after_ctrl_c_the_next_step_is_right(card: Workspace, launches: int, capture: bool) -> None:
    meddling = Meddling()
    pair = Pair(GRAPHS["windows"], card, meddling, 16, capture=capture)
    pair.check(0)
    meddling.arm(launches, interrupt)  # with capture: while the graph is being captured
    with pytest.raises(KeyboardInterrupt):
        pair.run(1)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert all(stream.query() for stream in meddling.streams.values())
    for seed in range(2, 5):
        pair.check(seed)
    assert pair.executor.captured == capture
    assert torch.empty(1 << 20, device="cuda").fill_(1).sum().item() == 1 << 20


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (torch.cuda.synchronize, "captur"),
        (lambda: torch.empty(1 << 20, device="cuda"), "PyTorch's allocator"),
    ],
)
def test_what_cannot_be_captured_runs_on_launch_by_launch(
    card: Workspace, act: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    meddling = Meddling()
    pair = Pair(GRAPHS["windows"], card, meddling, 16, capture=True)
    pair.check(0)
    meddling.arm(5, act)
    for seed in (1, 2, 3):
        pair.check(seed)
    assert not pair.executor.captured and reason in str(pair.executor.not_captured)
    assert len(caplog.records) == 1
    other = Executor(pair.executor.document, card, streams=meddling, capture=True)  # nothing of it lingers
    for _ in range(3):
        other.run()
    assert other.captured


def test_a_graph_survives_that_its_pages_went_and_came_back(card: Workspace, streams: CudaStreams) -> None:
    pair = Pair(GRAPHS["windows"], card, streams, 16, capture=True)
    for seed in range(3):
        pair.check(seed)
    sizes = {pool["name"]: pool["capacity"] for pool in pair.executor.document["pools"]}
    for name, between in (("workspace", 0), ("workspace", sizes["workspace"] + (64 << 20)), ("host", 64 << 20)):
        card.resize(name, between)
        card.resize(name, sizes[name])
        for seed in range(3, 5):
            pair.check(seed)
        assert pair.executor.captured
