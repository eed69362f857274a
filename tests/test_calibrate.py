"""Calibration on a card that is made up: kernels that advance a clock by known rates, and some that are wrong.

What comes out must be the rates that went in. On a CUDA card (marker `gpu`) the command itself runs.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mosaic import cli
from mosaic.calibration import cuda_card
from mosaic.calibration.measure import (
    FULL,
    QUICK,
    Bench,
    Call,
    FixedPart,
    Sizes,
    WrongResult,
    attention_rates,
    calibrate,
    gemm_rates,
    link_rates,
)
from mosaic.devices import DEVICES, Device, load_device, to_toml
from mosaic.errors import MissingExtra, RuntimeMemoryError
from mosaic.kernels import load
from mosaic.planner.planner import plan
from mosaic.units import MIB

LAUNCH_S, BANDWIDTH, UP, DOWN = 1e-14, 4e11, 5e10, 6e10
ATTENTION = {"cudnn": 6e14, "triton": 3e14}
SIZES = Sizes(
    rows=(2, 8), columns=(16, 64), inner=32, few_rows=(2, 3), feed=24, vocabulary=96, unembed_rows=(2, 4), attention=(8, 64),
    heads=2, head_size=8, least_keys=16, copy_bytes=1 << 12, link_bytes=1 << 12,
)  # fmt: skip


def gemm_rate(rows: int, columns: int) -> float:
    return 1e12 * rows + 1e10 * columns


class Card:
    """A clock, and kernels on the CPU that move it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.launches: list[tuple[str, str | None, dict[str, Any]]] = []
        self.attention: dict[str, Callable[..., None]] = dict.fromkeys(ATTENTION, self._attend)
        self.free = 1 << 40
        self.host: set[int] = set()

    # -- its clock ------------------------------------------------------------------------------------------------

    def captured(self, calls: Sequence[Call]) -> float:
        began = self.now
        for call in calls:
            call()
        return (self.now - began) / len(calls)

    def eager(self, calls: Sequence[Call]) -> float:
        return 3 * self.captured(calls)

    # -- its kernels ----------------------------------------------------------------------------------------------

    def load(self, operator: str, implementation: str | None) -> Any:
        run = getattr(self, f"_{operator}")

        def launch(scratch: Tensor | None = None, **given: Any) -> None:
            self.launches.append((operator, implementation, given))
            work: float = run(implementation, **given)
            self.now += LAUNCH_S + work

        return SimpleNamespace(bind=lambda **given: partial(launch, **given))

    def _rms_norm(self, _: str | None, **given: Any) -> float:
        return 0.0

    def _silu_mul(self, _: str | None, gate: Tensor, up: Tensor) -> float:
        return 3 * 2 * gate.numel() / BANDWIDTH

    def _copy(self, _: str | None, x: Tensor, y: Tensor) -> float:
        y.copy_(x)
        if x.data_ptr() in self.host:
            return x.numel() / UP
        return y.numel() / DOWN if y.data_ptr() in self.host else 2 * x.numel() / BANDWIDTH

    def _linear(self, _: str | None, x: Tensor, weight: Tensor, y: Tensor) -> float:
        return 2 * x.numel() * len(weight) / gemm_rate(len(x), len(weight))

    def _norm_gate_up(
        self, _: str | None, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, y: Tensor, eps: float
    ) -> float:
        assert gate.shape == up.shape == (y.shape[1], x.shape[1]) and len(norm) == x.shape[1] and eps > 0
        return 4 * x.numel() * len(gate) / (3e11 * len(x))

    def _unembed_stats(self, _: str | None, x: Tensor, weight: Tensor, **outputs: Tensor) -> float:
        assert outputs.keys() == {"token", "maximum", "second", "logsumexp", "entropy"}
        return 2 * x.numel() * len(weight) / (1e12 * len(x))

    def _unembed_sample(self, _: str | None, x: Tensor, weight: Tensor, **others: Tensor) -> float:
        drawn = {"keys", "temperature", "sample", "sample_logit"}
        assert others.keys() == {"token", "maximum", "second", "logsumexp", "entropy"} | drawn
        assert bool((others["temperature"] > 0).all()) and len(others["temperature"]) == len(x)
        return 2 * x.numel() * len(weight) / (5e11 * len(x))

    def _attention(self, implementation: str | None, **given: Any) -> float:
        assert implementation is not None
        self.attention[implementation](**given)
        return 4 * given["q"].numel() * len(given["k"]) / ATTENTION[implementation]

    @staticmethod
    def _attend(y: Tensor, **given: Any) -> None:
        wide = {name: value.float() if name in ("q", "k", "v") else value for name, value in given.items()}
        y.copy_(load("attention").reference(**wide))

    # -- what it is -----------------------------------------------------------------------------------------------

    def pinned(self, num_bytes: int) -> Tensor:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.host.add(tensor.data_ptr())
        return tensor

    def bench(self, **changed: Any) -> Bench:
        made = Bench(
            title="NVIDIA Made-Up 1", device="cpu", backend="cuda", memory_bytes=24 << 30, cache_bytes=0,
            versions={"torch": "2", "triton": "3"}, timer=self, load=self.load, pinned=self.pinned,
            free_bytes=lambda: self.free, capability=89,
        )  # fmt: skip
        return replace(made, **changed)


def fixed(device: Device) -> FixedPart:
    return FixedPart(used_bytes=900 * MIB + 1, pages_bytes=200 * MIB, library_bytes=64 * MIB)


def calibrated(card: Card, **changed: Any) -> Any:
    given: dict[str, Any] = {"name": "mine", "date": "2026-01-02", "fixed_part": fixed, "sizes": SIZES}
    return calibrate(card.bench(), **given | changed)


def quietly(card: Card, sizes: Sizes = SIZES, **changed: Any) -> tuple[dict[str, dict[int, float]], list[str]]:
    notes: list[str] = []
    return attention_rates(card.bench(**changed), sizes, LAUNCH_S, notes=notes, progress=lambda what: None), notes


# -- what is measured -----------------------------------------------------------------------------------------------


def test_the_profile_holds_the_rates_of_the_card() -> None:
    made = calibrated(Card())
    device = made.device
    assert (device.name, device.estimated, device.backend, device.memory_bytes) == ("mine", False, "cuda", 24 << 30)
    assert device.capability == 89
    assert device.launch_s == pytest.approx(LAUNCH_S) and made.eager_launch_s == pytest.approx(3 * LAUNCH_S)
    assert device.bandwidth == pytest.approx(BANDWIDTH)
    assert (made.link_to_device, made.link_to_host) == (pytest.approx(UP), pytest.approx(DOWN))
    assert device.host_link == pytest.approx(UP), "the slower way"
    for columns in SIZES.columns:
        assert device.gemm_rates[columns] == pytest.approx({rows: gemm_rate(rows, columns) for rows in SIZES.rows})
    assert device.few_rows_rates == pytest.approx({rows: 3e11 * rows for rows in SIZES.few_rows})
    assert device.unembed_rates == pytest.approx({rows: 1e12 * rows for rows in SIZES.unembed_rows})
    assert device.sampled_unembed_rates == pytest.approx({rows: 5e11 * rows for rows in SIZES.unembed_rows})
    for implementation, rate in ATTENTION.items():
        assert device.attention_rates[implementation] == pytest.approx(dict.fromkeys(SIZES.attention, rate))
    assert made.notes == ()


def test_the_source_names_card_versions_and_date() -> None:
    source = calibrated(Card()).device.source
    assert source == "mosaic calibrate on NVIDIA Made-Up 1, torch 2, triton 3, 2026-01-02"


def test_the_fixed_part_is_what_is_neither_pages_nor_libraries() -> None:
    seen: list[Device] = []

    def measure(device: Device) -> FixedPart:
        seen.append(device)
        return fixed(device)

    device = calibrated(Card(), fixed_part=measure).device
    # 900 - 200 - 64 MiB and a byte, in pages of 2 MiB, and a margin of 32 MiB
    assert (device.context_bytes, device.library_bytes) == ((638 + 32) * MIB, 64 * MIB)
    assert seen[0].attention_rates == device.attention_rates, "the helper plans with what was measured"


def test_what_the_fixed_part_could_not_load_is_noted() -> None:
    made = calibrated(Card(), fixed_part=lambda device: replace(fixed(device), note="no step was run"))
    assert made.notes == ("no step was run",)


def test_weights_take_turns_beyond_the_cache() -> None:
    card = Card()
    gemm_rates(card.bench(cache_bytes=10_000), SIZES, LAUNCH_S, notes=[], progress=lambda what: None)
    for columns in SIZES.columns:
        weights = {g["weight"].data_ptr() for _, _, g in card.launches if len(g["weight"]) == columns}
        assert len(weights) * columns * SIZES.inner * 2 >= 2 * 10_000


def test_attention_sees_enough_keys_and_every_size_is_launched_as_it_is_named() -> None:
    card = Card()
    quietly(card)
    shapes = {(g["q"].shape[0] * SIZES.heads, len(g["k"])) for _, name, g in card.launches if name == "cudnn"}
    assert shapes == {(8, 16), (64, 32)}
    assert all(g["cu_seqlens"].tolist() == [0, len(g["k"])] for _, _, g in card.launches)


@pytest.mark.parametrize("fault", ["zeros", "nan", "one head", "one row", "unscaled"])
def test_a_wrong_backend_is_not_recorded(fault: str) -> None:
    card = Card()

    def wrong(y: Tensor, **given: Any) -> None:
        given = given | ({"scale": 1.0} if fault == "unscaled" else {})
        Card._attend(y, **given)
        if fault in ("zeros", "nan"):
            y.fill_(0.0 if fault == "zeros" else float("nan"))
        elif fault == "one head":
            y[:, SIZES.head_size :] = 0
        elif fault == "one row":
            y[-1] = 0

    card.attention["cudnn"] = wrong
    rates, notes = quietly(card)
    assert list(rates) == ["triton"]
    assert len(notes) == 1 and "cudnn is left out" in notes[0] and "off by" in notes[0]
    assert sum(name == "cudnn" for _, name, _ in card.launches) == 1, "it is not timed"


def test_a_backend_that_is_wrong_at_one_size_alone_is_not_recorded() -> None:
    card = Card()

    def wrong(y: Tensor, **given: Any) -> None:
        Card._attend(y, **given)
        if len(y) > 4:
            y.neg_()

    card.attention["cudnn"] = wrong
    rates, _ = quietly(card)
    assert list(rates) == ["triton"]


def test_without_any_attention_there_is_no_profile() -> None:
    card = Card()
    card.attention = dict.fromkeys(ATTENTION, lambda y, **given: y.zero_())
    with pytest.raises(WrongResult, match=r"no attention can be used on NVIDIA Made-Up 1: .*cudnn.*triton"):
        calibrated(card)


def test_a_library_that_is_not_installed_is_noted() -> None:
    card = Card()

    def fetch(operator: str, implementation: str | None) -> Any:
        if implementation == "cudnn":
            raise MissingExtra("nvidia-cudnn-frontend", "cuda", "attention by cuDNN")
        return card.load(operator, implementation)

    rates, notes = quietly(card, load=fetch)
    assert list(rates) == ["triton"] and "pip install" in notes[0]


def test_what_the_card_cannot_hold_is_left_out() -> None:
    card = Card()
    card.free = 6000  # 64 columns take 4 KiB, and 8 rows of them more than is left
    notes: list[str] = []
    rates = gemm_rates(card.bench(), SIZES, LAUNCH_S, notes=notes, progress=lambda what: None)
    assert {columns: list(by_rows) for columns, by_rows in rates.items()} == {16: [2, 8], 64: [2]}
    assert notes == ["GEMMs of 64 columns: no room for 1 of the sizes"]
    card.free = 100
    with pytest.raises(RuntimeMemoryError, match="100 B free, too little for any GEMM"):
        gemm_rates(card.bench(), SIZES, LAUNCH_S, notes=[], progress=lambda what: None)


def test_a_full_card_is_a_typed_error() -> None:
    card = Card()

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    card.attention["cudnn"] = full
    with pytest.raises(RuntimeMemoryError, match=r"ran out of memory with 1\.00 TiB free of 24\.00 GiB"):
        calibrated(card)


def test_a_launch_that_is_all_overhead_still_has_a_rate() -> None:
    assert link_rates(Card().bench(), SIZES, launch_s=1.0)[0] > 0


def test_the_sizes_cover_what_a_plan_asks_for() -> None:
    for sizes in (FULL, QUICK):
        assert sizes.rows[0] <= 32 and sizes.rows[-1] == 16384 and {256, 4096, 126464} <= set(sizes.columns)
        assert all(size % sizes.heads == 0 for size in sizes.attention)
    assert FULL.columns == (256, 1024, 4096, 12288, 126464) and (FULL.attention[0], FULL.attention[-1]) == (
        1 << 13,
        1 << 20,
    )


# -- the clock of a CUDA card ---------------------------------------------------------------------------------------


class FakeCuda:
    """The timer's view of `torch.cuda`, on a clock that calls advance; a captured call advances it on replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.recorded = 0.0, None
        self.log: list[str] = []
        for name in ("Stream", "Event", "CUDAGraph", "stream", "default_stream", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def work(self, seconds: float) -> None:
        if self.recorded is None:
            self.now += seconds
            self.log.append("run")
        else:
            self.recorded.append(seconds)

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: self.log.append("drained"))

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(synchronize=lambda: None, at=-1.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event

    def CUDAGraph(self) -> Any:
        captured: list[float] = []

        def begin() -> None:
            self.log.append("capture")
            self.recorded = captured

        def end() -> None:
            self.recorded = None

        def replay() -> None:
            self.log.append("replay")
            self.now += sum(captured)

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def default_stream(self) -> None: ...

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...


def test_captured_calls_are_prepared_then_captured_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    timer = cuda_card.CudaTimer(target_s=0.01)
    slow, fast = (lambda: cuda.work(3e-3)), (lambda: cuda.work(1e-3))
    assert timer.captured([slow, fast, fast, slow]) == pytest.approx(2e-3)
    # each call once, then the graph: to warm up, to estimate, three times to settle, three times to measure
    assert cuda.log == ["run", "run", "drained", "capture", *["replay"] * 8]


def test_short_calls_are_repeated_and_a_slow_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    seconds = iter([1e-3] * 70 + [7.0] + [1e-3] * 100)
    assert cuda_card.CudaTimer(target_s=0.02).eager([lambda: cuda.work(next(seconds))]) == pytest.approx(1e-3)
    assert cuda.log.count("run") == 1 + 1 + 1 + 3 * 20 + 20
    seconds = iter([1e-9] * 30_000)
    cuda_card.CudaTimer(target_s=0.02).eager([lambda: cuda.work(next(seconds))])
    assert next(seconds) == 1e-9, "bounded, however short"


def test_a_failed_capture_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def fail() -> None:
        if cuda.recorded is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        cuda_card.CudaTimer(target_s=0.01).captured([fail])
    assert cuda.recorded is None


def test_the_bench_is_the_first_card(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA H200", L2_cache_size=1 << 20, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 4 << 30))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(cuda_card, "warm_up", lambda: None)
    bench = cuda_card.cuda_bench(target_s=0.1)
    assert (bench.title, bench.memory_bytes, bench.cache_bytes, bench.capability) == (
        "NVIDIA H200",
        4 << 30,
        1 << 20,
        90,
    )
    assert bench.free_bytes() == 3 << 30 and bench.holds(2 << 30) and not bench.holds(3 << 30)
    assert bench.versions["torch"] == torch.__version__ and "mosaic" in bench.versions
    assert bench.load("copy", None).module is load("copy", "cuda").module


# -- the process that measures the fixed part -----------------------------------------------------------------------


def test_the_fixed_part_is_what_the_counter_loses_while_the_helper_waits() -> None:
    helper = (
        "import sys, json; from mosaic.devices import load_device\n"
        "name = load_device(sys.argv[1]).name\n"
        "print(json.dumps({'pages_bytes': 5, 'library_bytes': 7, 'note': name}), flush=True)\n"
        "sys.stdin.read()"
    )
    counter = iter([1000, 400])
    found = cuda_card.measure_fixed_part(DEVICES["h200"], free_bytes=lambda: next(counter), helper=helper)
    assert found == FixedPart(used_bytes=600, pages_bytes=5, library_bytes=7, note="h200")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('the driver is gone')", "failed: the driver is gone"),
        ("import os; os._exit(3)", "failed: it was stopped, or took too long"),
        ("import time; time.sleep(60)", "failed: it was stopped, or took too long"),
    ],
)
def test_a_helper_that_fails_is_a_typed_error(code: str, message: str) -> None:
    with pytest.raises(RuntimeMemoryError, match=message):
        cuda_card.measure_fixed_part(DEVICES["h200"], free_bytes=lambda: 1, helper=code, timeout_s=1.0)


def test_the_helper_loads_every_kernel_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_card, "QUICK", SIZES)
    card = Card()
    cuda_card.load_kernels(card.bench())
    assert {operator for operator, _, _ in card.launches} == {
        "rms_norm", "linear", "norm_gate_up", "unembed_stats", "unembed_sample", "attention",
    }  # fmt: skip
    assert {name for operator, name, _ in card.launches if operator == "attention"} == set(ATTENTION)


@pytest.mark.parametrize(
    "config",
    [
        cuda_card.DENSE | {"d_model": 64, "mlp_hidden_size": 96},
        cuda_card.EXPERTS | {"hidden_size": 64, "expert_intermediate_size": 64},
    ],
)
def test_the_helpers_models_run_and_their_pages_are_known(config: dict[str, Any]) -> None:
    with ExitStack() as models:
        assert cuda_card.run_model(models, config, DEVICES["cpu"], ((9,), (3, 5))) > 4096 * 64 * 2 * 2


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mosaic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    here = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))  # of the process that it starts, where nothing is installed

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mosaic", "calibrate", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def with_card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(cuda_card, "cuda_bench", lambda *, target_s: card.bench())
    monkeypatch.setattr(cuda_card, "measure_fixed_part", fixed)
    for name in ("FULL", "QUICK"):
        monkeypatch.setattr(f"mosaic.calibration.measure.{name}", SIZES)
    return card


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")
def test_without_a_card_it_is_one_line(mosaic: Any, tmp_path: Path) -> None:
    code, out, err = mosaic()
    assert code == 1 and out == "" and err.count("\n") == 1 and "a CUDA card" in err
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_profile_that_plans_take(mosaic: Any, with_card: Card, tmp_path: Path) -> None:
    code, out, err = mosaic()
    assert code == 0
    for part in ("GEMM", "64 columns", "cudnn", "300.0", "context and modules", "made-up-1.toml"):
        assert part in out, part
    assert "measuring attention, triton" in err
    device = load_device(str(tmp_path / "made-up-1.toml"))
    assert (
        device.name == "made-up-1"
        and not device.estimated
        and device.gemm_rates[64][8] == pytest.approx(gemm_rate(8, 64))
    )
    made = plan("llada-8b", tokens=4096, device=str(tmp_path / "made-up-1.toml"))
    assert made.document["device"] == "made-up-1" and made.document["estimated"] is False


def test_json_alone_and_names_of_ones_own(mosaic: Any, with_card: Card, tmp_path: Path) -> None:
    with_card.attention["cudnn"] = lambda y, **given: y.zero_()
    code, out, _ = mosaic("--device-name", "box", "--out", str(tmp_path / "b.toml"), "--quick", "--json")
    found = json.loads(out)
    assert code == 0 and found["file"] == str(tmp_path / "b.toml") and found["device"]["name"] == "box"
    assert found["device"]["attention_rates"].keys() == {"triton"} and "left out" in found["measured"]["notes"][0]
    assert found["measured"]["eager_launch_s"] == pytest.approx(3 * LAUNCH_S)
    written = tomllib.loads((tmp_path / "b.toml").read_text())
    assert written["name"] == "box" and written["gemm_rates"] == found["device"]["gemm_rates"]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(mosaic: Any, with_card: Card) -> None:
    code, _, err = mosaic("--out", "nowhere/card.toml")
    assert code == 2 and "does not exist" in err and not with_card.launches


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False")
def test_on_this_card(mosaic: Any, tmp_path: Path) -> None:
    code, out, err = mosaic("--quick", "--json", "--out", "card.toml")
    assert code == 0, err
    device = load_device(str(tmp_path / "card.toml"))
    measured = json.loads(out)["measured"]
    assert device.memory_bytes == torch.cuda.mem_get_info()[1]
    assert 1e11 < device.bandwidth < 2e13 and 1e9 < device.host_link < 1e12
    assert 2e-7 < device.launch_s < measured["eager_launch_s"] < 1e-3
    assert "triton" in device.attention_rates and max(device.gemm_rates[4096].values()) > 1e13
    assert 100 * MIB < device.context_bytes < 4096 * MIB
    assert device == replace(device, **{k: v for k, v in asdict(device).items() if isinstance(v, Mapping)})
    assert to_toml(device) == (tmp_path / "card.toml").read_text()
