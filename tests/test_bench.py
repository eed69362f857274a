"""The baselines are the stock models; the meters, the bisection and the worker processes say what is true."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_helpers import buffer_row
from test_runtime_compiled import FAMILIES, LLADA
from torch import Tensor, nn

import mosaic
from benchmarks import engines
from benchmarks.bench import Settings, run, suite
from benchmarks.bench.__main__ import main
from benchmarks.bench.baselines import Experts, Transformer
from benchmarks.bench.inputs import make_inputs, masked_rows
from benchmarks.bench.torch_engine import TorchEngine
from benchmarks.engines import COMPILED, SpeedSettings, sdpa
from benchmarks.engines.limits import largest
from benchmarks.engines.meters import alive_over_time, profiled
from benchmarks.engines.plans import alive_by_plan, launch_shapes, op_seconds, weight_slots
from benchmarks.engines.sdpa import choose, seen_in
from benchmarks.engines.torch_engine import TunedEngine
from benchmarks.floor import Floor
from mosaic.devices import load_device
from mosaic.errors import UnknownName, UsageError
from mosaic.models import load
from mosaic.planner import Planner, Request
from mosaic.planner.plan_records import PlanRecords
from mosaic.runtime.weights import fill_randomly, save_checkpoint

BOUND = 1e-5


def baseline(family: str, experts: Experts = "loop", dtype: torch.dtype = torch.float32) -> Transformer:
    """A tiny baseline with weights large enough that a wrong rotation, norm or expert shows."""
    model = load(FAMILIES[family][0])
    made = Transformer(model.architecture, dtype=dtype, wide_rotary=model.family == "llada", experts=experts)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in made.tensors.items():
        tensor.normal_(1.0 if "norm" in name or "ln_f" in name else 0.0, 0.12, generator=generator)
    return made


def stock(family: str, made: Transformer) -> nn.Module:
    """The stock transformers class with the same weights."""
    config, reference = FAMILIES[family]
    build: Callable[[Any], nn.Module] = reference
    return build(SimpleNamespace(model=load(config), weights=lambda: made.tensors)).eval()


def sequence(family: str, tokens: int = 53) -> Tensor:
    ids = make_inputs(load(FAMILIES[family][0]).architecture, tokens, 0.4, seed=3).token_ids
    return ids[None]


# --- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "experts"), [("llada", "loop"), ("dream", "loop"), ("moe", "loop"), ("moe", "grouped")]
)
def test_a_baseline_has_the_stock_models_logits(family: str, experts: Experts) -> None:
    made, ids = baseline(family, experts), sequence(family)
    with torch.no_grad():
        expected = stock(family, made)(input_ids=ids, attention_mask=torch.zeros(1, 1, 53, 53), use_cache=False).logits
        found = made.logits(ids)
    assert float((found - expected).abs().max()) <= BOUND * float(expected.abs().max())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_baseline_predicts_the_masked_positions(family: str) -> None:
    made, ids = baseline(family), sequence(family)
    rows = (ids[0] == made.arch.mask_token_id).nonzero()[:, 0]
    with torch.no_grad():
        logits = made.logits(ids)[0].double()
        token, confidence = made(ids)
    source = (rows - 1).clamp(min=0) if family == "dream" else rows  # row i-1 predicts position i
    assert len(rows) == masked_rows(53, 0.4) and torch.equal(token, logits[source].argmax(1))
    torch.testing.assert_close(confidence.double(), logits[source].softmax(1).amax(1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_baselines_tensors_are_the_checkpoints(family: str, tmp_path: Path) -> None:
    """Names and shapes are those of the plan's weights, so that one seed gives both the same values."""
    model = load(FAMILIES[family][0])
    document = mosaic.plan(model, tokens=8, device="cpu").document
    planned = {
        b["tensor"]: tuple(b["shape"]) for b in document["buffers"] if b["tensor"] and not b["tensor"].startswith("=")
    }
    made = Transformer(model.architecture)
    assert {name: tuple(tensor.shape) for name, tensor in made.tensors.items()} == planned
    fill_randomly(made.tensors)
    assert all(torch.isfinite(parameter).all() for parameter in made.parameters())
    assert {tensor.data_ptr() for tensor in made.tensors.values()} == {p.data_ptr() for p in made.parameters()}


def test_rotary_width_matters_in_bfloat16() -> None:
    """LLaDA rotates in float32 whatever its dtype: a baseline that did not would be another model."""
    model = load(LLADA)
    logits = []
    for wide in (True, False):
        made = Transformer(model.architecture, dtype=torch.bfloat16, wide_rotary=wide)
        fill_randomly(made.tensors)
        assert made.angles(5)[0].dtype == (torch.float32 if wide else torch.bfloat16)
        with torch.no_grad():
            logits.append(made.logits(sequence("llada")))
    assert logits[0].dtype == torch.bfloat16 and not torch.equal(*logits)


# --- inputs, settings, bisection ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0])
def test_inputs_mask_what_a_request_masks(ratio: float) -> None:
    arch = load(LLADA).architecture
    for tokens in (1, 7, 1000):
        inputs = make_inputs(arch, tokens, ratio, seed=1)
        masked = int((inputs.token_ids == arch.mask_token_id).sum())
        assert masked == inputs.masked == Request(seq_lens=(tokens,), mask_ratio=ratio).size.dims()["masked"]
        assert int(inputs.token_ids.min()) >= 0 and int(inputs.token_ids.max()) < arch.vocabulary
        assert torch.equal(inputs.token_ids, make_inputs(arch, tokens, ratio, seed=1).token_ids)


def test_settings_survive_json_and_refuse_nonsense() -> None:
    for settings in (
        Settings(model="m", device="cpu", contexts=(1, 2), mask_ratios=(0.1,)),
        SpeedSettings(model="m", device="cpu", contexts=(1, 2), compiled=("dynamic",), caps=(5,)),
    ):
        assert type(settings).from_json(settings.to_json()) == settings
    with pytest.raises(UsageError, match="at least one context"):
        Settings(model="m", device="cpu", contexts=())
    for wrong in (
        {"contexts": ()}, {"contexts": (0,)}, {"mask_ratios": (0.0,)}, {"mask_ratios": (1.5,)}, {"engines": ("eager",) * 2},
        {"engines": ("magic",)}, {"attention": "telepathy"}, {"repeats": 0},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            SpeedSettings(**{"model": "m", "device": "cpu", "contexts": (1,), **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 7])
def test_bisection_finds_the_largest_from_any_guess(step: int) -> None:
    for limit in range(0, 60, 3):
        for guess in (0, 1, 10, 50, 200):
            tried: list[int] = []

            def runs(tokens: int, limit: int = limit, tried: list[int] = tried) -> bool:
                tried.append(tokens)
                return tokens <= limit

            assert largest(runs, guess=guess, step=step, most=50) == min(limit, 50) // step * step
            assert len(set(tried)) == len(tried) and all(0 < t <= 50 and t % step == 0 for t in tried)


def test_a_good_guess_saves_tries() -> None:
    tried: list[int] = []

    def runs(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= 19000

    assert largest(runs, guess=18000, step=256, most=1 << 20) == 18944 and len(tried) <= 6


# --- meters -----------------------------------------------------------------------------------------------------------


def test_what_is_alive_is_measured_by_the_allocators_events() -> None:
    def step() -> None:
        for size in (1_000_000, 500_000):
            x = torch.ones(size, dtype=torch.float32)
            y = x * 2
            del x, y

    step()
    alive = alive_over_time(profiled(step, cuda=False), cuda=False)
    assert alive is not None
    peak, average = alive
    assert 8_000_000 <= peak < 8_000_100 and 0 < average < peak  # and the scalar 2


def event(name: str, at: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "ts": at, **more}


def allocation(at: float, size: int) -> dict[str, Any]:
    return event("[memory]", at, args={"Bytes": size, "Device Type": 1, "Device Id": 0})


def test_on_a_card_memory_counts_from_the_work_before_it() -> None:
    """The host allocates at once and the card computes later: times are the card's."""
    trace = {
        "traceEvents": [
            allocation(0.5, 100),
            event("cudaLaunchKernel", 1.0, cat="cuda_runtime", dur=0.1, args={"correlation": 1}),
            allocation(1.5, 300),
            event("cuLaunchKernelEx", 2.0, cat="cuda_driver", dur=0.1, args={"correlation": 2}),
            allocation(2.5, -100),
            allocation(2.6, -300),
            event("first", 10.0, cat="kernel", dur=10.0, args={"correlation": 1}),
            event("second", 20.0, cat="kernel", dur=30.0, args={"correlation": 2}),
            event("[memory]", 0.1, args={"Bytes": 10**9, "Device Type": 0, "Device Id": -1}),
            event("no time", math.nan, ph="M", args={}),
        ]
    }
    assert alive_over_time(trace, cuda=True) == (400, (100 * 10 + 400 * 30) / 40)
    assert alive_over_time({"traceEvents": [allocation(0.5, 100)]}, cuda=True) is None
    assert alive_over_time({"traceEvents": []}, cuda=False) is None


def test_attention_on_a_cpu_is_pytorchs_own_choice() -> None:
    arch = load(LLADA).architecture
    choice = choose("fastest", arch, 64, torch.float32, torch.device("cpu"))
    assert choice["forced"] is None and choice["used"] == choice["default"] == "flash"
    assert choose("math", arch, 64, torch.float32, torch.device("cpu"))["forced"] == "math"


@pytest.mark.parametrize(
    ("kernels", "backend"),
    [
        (("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "nvjet_tst_128x256"), "cudnn"),
        (("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>",), "flash"),
        (("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)",), "efficient"),
        (("fmha_cutlassF_bf16", "pytorch_flash::flash_fwd_kernel"), "flash, efficient"),
        (("triton_poi_fused_0",), None),
    ],
)
def test_the_attention_that_ran_is_read_from_the_trace(kernels: tuple[str, ...], backend: str | None) -> None:
    events = [{"cat": "kernel", "name": name} for name in kernels] + [{"cat": "cpu_op", "name": "flash_fwd"}]
    assert seen_in({"traceEvents": events}) == backend


# --- plans ------------------------------------------------------------------------------------------------------------


def records_of(tokens: int = 300, **settings: int | str | None) -> PlanRecords:
    """The plan of a tiny LLaDA on a card, in a configuration of our own."""
    planner = Planner(load(LLADA), device="h200", host_budget=1 << 30)
    return planner.plan(Request(seq_lens=(tokens,), masked=100), config=settings).records


def test_launch_shapes_are_those_of_one_full_iteration() -> None:
    records = records_of(proj=128, ffn=256, logits=64)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for op in records.ops:
        shapes.setdefault(op.name, launch_shapes(records, op))
    assert shapes["layers.0/gate"]["x"] == (256, 64) and shapes["layers.0/gate"]["weight"] == (96, 64)
    assert shapes["head/logits"]["x"] == (64, 64)
    whole = records_of()
    assert {launch_shapes(whole, op)["x"][0] for op in whole.ops if op.name.endswith("gate")} == {300}


def test_the_average_counts_live_bytes_by_predicted_time() -> None:
    different: list[dict[str, Any]] = [
        {"size": 100},
        {"size": 40, "start": 1, "gaps": [[2, 3]]},
        {"size": 100, "alias_of": 0},
        {"size": 999},
        {"size": 999, "pool": "host", "tensor": "w"},
        {"size": 7, "pool": "weights", "tensor": "v"},
    ]
    buffers = [
        buffer_row("b", "transient", (1,), "float32", **{"id": number, "end": 3, **fields})
        for number, fields in enumerate(different)
    ]
    profile = load_device("h200")

    def op(kernel: str, seconds: float, stream: str = "main", **operands: int) -> dict[str, Any]:
        moved = round(seconds * profile.bandwidth)
        return {
            "index": 0, "name": kernel, "kernel": kernel, "stream": stream, "region": None, "reads": [], "writes": [],
            "operands": operands, "attrs": {}, "inplace": [], "flops": 0, "bytes": moved, "slices": [],
        }  # fmt: skip

    ops = [op("copy", 50.0, "fetch", x=4, y=3), op("silu_mul", 1.0, gate=0), op("silu_mul", 3.0, gate=0)]
    records = PlanRecords({"buffers": buffers, "regions": [], "implementations": {}, "ops": ops})
    assert weight_slots(records) == {3}
    peak, average = alive_by_plan(records, profile)
    assert peak == 140 and average == pytest.approx((140 * 1 + 100 * 3) / 4)


@pytest.mark.some
@pytest.mark.parametrize("family", list(FAMILIES))
def test_predicted_op_times_add_up_to_about_the_plans_prediction(family: str) -> None:
    for tokens in (4096, 32768):
        plan = mosaic.plan(
            {"llada": "llada-8b", "dream": "dream-7b", "moe": "llada-moe"}[family], tokens=tokens, device="h200"
        )
        total = sum(op_seconds(plan.records, load_device("h200")))
        assert total == pytest.approx(plan.predicted_step_ms / 1e3, rel=0.2)


@pytest.mark.some
@pytest.mark.parametrize(
    ("preset", "device"),
    [("llada-8b", "cpu"), ("dream-7b", "cpu"), ("llada-moe", "cpu"), ("sdar-1.7b", "cpu"), ("llada-8b", "h200")],
)
def test_every_op_of_every_family_has_a_predicted_time(preset: str, device: str) -> None:
    """Private scratch is an operand of the launch, not of what the contract counts."""
    records = mosaic.plan(preset, tokens=700, device=device, budget="1TiB").records
    seconds = op_seconds(records, load_device(device))
    assert any("scratch" in op.operands for op in records.ops)
    assert [s > 0 for s in seconds] == [op.stream == "main" for op in records.ops]


def test_a_plans_peak_is_the_largest_live_set() -> None:
    plan = mosaic.plan("llada-8b", tokens=131072, device="h200", budget=20 << 30)
    peak, average = alive_by_plan(plan.records, load_device("h200"))
    assert peak == plan.lower_bound_bytes and peak / average < 1.3


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_floor_has_the_flops_that_a_plan_has_but_for_rows_that_nobody_needs(family: str) -> None:
    """At one rate, with nothing to read: all but what the last layer computes of unmasked rows beyond keys and values."""
    arch = load(FAMILIES[family][0]).architecture
    plan = mosaic.plan(load(FAMILIES[family][0]), tokens=300, masked=100, device="cpu")
    card = replace(load_device("h200"), bandwidth=1e30, gemm_rates={1: 1e9}, few_rows_rates={}, unembed_rates={})
    kernels = ("linear", "linear_add", "grouped_linear", "unembed_stats", "unembed_sample", "attention", "moe_route")
    flops = sum(op.flops for op in plan.records.ops if op.kernel in kernels)
    width = arch.attention.heads * arch.attention.head_size
    fed = arch.feed_forward
    ffn = fed.experts_per_token * 3 * fed.size + fed.experts + 3 * fed.shared if fed.experts else 3 * fed.size
    of_row = 2 * arch.hidden * (2 * width + ffn) + 4 * 300 * width
    assert 1e9 * Floor(arch, card).whole(300, 100) == pytest.approx(flops - 200 * of_row, rel=1e-6)


# --- workers and the command line ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, baseline("llada").tensors, LLADA)
    return folder


def settings_of(model: Path | str, **more: Any) -> SpeedSettings:
    return SpeedSettings(**asked_of(model, **more))


def asked_of(model: Path | str, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "device": "cpu", "contexts": (24,), "engines": ("mosaic", "eager"), **more}


@pytest.mark.soak
def test_engines_run_in_processes_of_their_own_on_the_same_weights(checkpoint: Path) -> None:
    records: list[dict[str, Any]] = []
    settings = settings_of(checkpoint, mask_ratios=(0.25, 1.0), repeats=2, caps=(2 << 20,))
    result = engines.run(settings, command="a test", progress=records.append)
    assert result["failures"] == [] and result["complete"] and result["card"] == "cpu"
    assert result["environment"]["command"] == "a test" and result["environment"]["versions"]["torch"]
    points = {(p["engine"], p["mask_ratio"]): p for p in result["points"]}
    assert list(points) == [(engine, ratio) for engine in ("mosaic", "eager") for ratio in (0.25, 1.0)]
    ours, eager = points["mosaic", 1.0], points["eager", 1.0]
    assert ours["masked"] == eager["masked"] == 24 and ours["failed"] is None and eager["failed"] is None
    assert len(ours["seconds"]) == 2 and ours["step_s"] > 0 and ours["predicted_s"] > 0
    assert ours["inflation"] == 0 and ours["peak_to_average"] >= 1 and ours["activation_peak_bytes"] > 0
    # the logits of all rows do not depend on how many are masked: LLaDA's baseline is measured once
    assert eager["same_work_as_ratio"] == 0.25 and "same_work_as_ratio" not in points["eager", 0.25]
    assert points["mosaic", 0.25]["agrees_with_eager"] == 1.0
    assert points["mosaic", 0.25]["sample"]["mean_confidence"] == pytest.approx(
        points["eager", 0.25]["sample"]["mean_confidence"], rel=1e-4
    )
    assert points["eager", 0.25]["peak_to_average"] > 1
    limits = {(entry["engine"], entry["mask_ratio"]): entry["max_tokens"] for entry in result["limits"]}
    planner = Planner(str(checkpoint), device="cpu", budget=2 << 20)
    assert limits["mosaic", 1.0] == planner.max_context(Request(seq_lens=(1,), mask_ratio=1.0))
    assert limits["eager", 0.25] is None and ("eager", 1.0) not in limits
    assert json.loads(json.dumps(result)) == result and records
    plain = run(Settings(**asked_of(checkpoint, mask_ratios=(0.25, 1.0), repeats=2)), command="a test")
    assert plain["complete"] and [point["sample"] for point in plain["points"]] == [
        point["sample"] for point in result["points"]
    ]


def test_a_step_that_does_not_fit_is_a_result(checkpoint: Path) -> None:
    settings = Settings(**asked_of(checkpoint, engines=("mosaic",), contexts=(16, 100_000), budget=2 << 20))
    result = run(settings, command="")
    small, large = result["points"]
    assert small["failed"] is None and large["failed"].startswith("does not fit") and large["step_s"] is None
    assert result["complete"]


@pytest.mark.soak
def test_an_engine_that_fails_is_said_and_the_others_run(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"short")
    result = run(Settings(**asked_of(tmp_path / "broken", engines=("eager",))), command="")
    assert not result["complete"] and result["points"] == [] and result["card"] is None
    assert "CheckpointError" in result["failures"][0]["message"] and result["failures"][0]["engine"] == "eager"


def test_time_that_runs_out_ends_the_worker(checkpoint: Path) -> None:
    kept: list[dict[str, Any]] = []
    failure = suite.run_engine("eager", settings_of(checkpoint), kept.append, timeout_s=0.05)
    assert failure is not None and "no time left" in failure and kept == []
    assert suite.run_engine("eager", settings_of(checkpoint), kept.append, timeout_s=0.0) == "not started: no time left"


def test_a_compiled_step_is_traced_with_the_attention_of_the_first_point(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._functorch import config

    monkeypatch.setattr(config, "enable_autograd_cache", True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    asked: list[int] = []

    def chosen(_: object, __: object, tokens: int, *___: object) -> dict[str, Any]:
        asked.append(tokens)
        return {"used": "math"}

    monkeypatch.setattr(sdpa, "choose", chosen)
    engine = TunedEngine(settings_of(checkpoint, contexts=(40, 80)), compiled="dynamic")
    engine.warm()
    assert asked == [40] and not config.enable_autograd_cache


@pytest.mark.parametrize(("way", "options"), COMPILED.items())
def test_a_compiled_baseline_goes_through_torch_compile(
    way: str, options: dict[str, Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for a single size compiles nothing before its first point, and forgets each size when the next one comes."""
    asked: list[dict[str, Any]] = []
    events: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: events.append("reset"))

    def compile_(function: Any, **options: Any) -> Any:
        asked.append(options)
        return lambda ids: (events.append(f"{ids.shape[1]}"), function(ids))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    settings = settings_of(checkpoint)
    engine, eager = (TunedEngine(settings, compiled=compiled) for compiled in (way, None))
    assert asked == [options] == [engine.describe()["torch_compile"]] and not eager.describe()["torch_compile"]
    engine.warm()
    assert events == (["256"] if way == "dynamic" else ["reset"])
    events.clear()
    found = []
    for each in (engine, eager):
        each.start(make_inputs(each.arch, 24, 0.5, seed=0))
        found.append(each.step())
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert events == (["24"] if way == "dynamic" else ["reset", "24"])
    if way == "static":  # which the library's engine is
        plain = TorchEngine(Settings(**asked_of(checkpoint)), options=options)
        plain.warm()
        events.clear()
        plain.start(make_inputs(plain.arch, 24, 0.5, seed=0))
        assert torch.equal(plain.step()[0], found[0][0]) and events == ["reset", "24"]


def test_the_fastest_way_to_compile_counts_at_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way has a process, its name is on what that finds, and the last one alone looks for the largest contexts."""
    seconds = {"static": {16: 0.5, 24: None, 32: 0.3}, "dynamic": {16: 0.6, 24: 0.7, 32: 0.2}}
    asked: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []

    def engine(name: str, settings: SpeedSettings, keep: Callable[[dict[str, Any]], None], **_: Any) -> str | None:
        asked.append((name, settings.compiled, settings.caps))
        keep({"record": "engine", "engine": name, "card": "a card"})
        for tokens in settings.contexts:
            step_s = seconds[settings.compiled[0]][tokens] if name == "compile" else 1.0
            keep({"record": "point", "engine": name, "tokens": tokens, "mask_ratio": 0.5, "step_s": step_s})
        return "no memory" if settings.compiled == ("static",) else None

    monkeypatch.setattr(suite, "run_engine", engine)
    ways = {"engines": ("eager", "compile"), "compiled": ("static", "dynamic"), "contexts": (16, 24, 32), "caps": (9,)}
    result = engines.run(settings_of("llada-8b", **ways), command="")
    assert asked == [("eager", ("dynamic",), (9,)), ("compile", ("static",), ()), ("compile", ("dynamic",), (9,))]
    assert [entry.get("compiled") for entry in result["engines"]] == [None, "static", "dynamic"]
    assert result["failures"] == [{"engine": "compile", "message": "no memory", "compiled": "static"}]
    compiled = {point["tokens"]: point for point in result["points"] if point["engine"] == "compile"}
    assert [(point["compiled"], point["step_s"]) for point in compiled.values()] == [
        ("static", 0.5), ("dynamic", 0.7), ("dynamic", 0.2),
    ]  # fmt: skip
    assert compiled[24]["compiled_s"] == {"static": None, "dynamic": 0.7} and len(result["points"]) == 6
    more = {"engine": "compile", "tokens": 16, "mask_ratio": 0.5, "step_s": 0.4, "compiled": "reduce-overhead"}
    again = engines.fastest_compiled([*result["points"], more])[3]
    assert again == {**more, "compiled_s": {"static": 0.5, "dynamic": 0.6, "reduce-overhead": 0.4}}
    for wrong in ((), ("static", "static")):
        with pytest.raises(UsageError, match="name each way to compile once, of static, reduce-overhead, dynamic"):
            settings_of("llada-8b", compiled=wrong)
    with pytest.raises(UnknownName, match="way to compile"):
        settings_of("llada-8b", compiled=("statik",))


def canned(**more: Any) -> dict[str, Any]:
    """A result as `run` gives it."""
    point = {
        "engine": "eager", "tokens": 1024, "mask_ratio": 0.5, "masked": 512, "step_s": 0.0123, "failed": None,
        "activation_peak_bytes": 3 << 20, "driver_bytes": 5 << 30,
    }  # fmt: skip
    failed = {**point, "tokens": 9, "step_s": None, "failed": "out of memory"}
    return {"points": [point, failed], "complete": True, "failures": [], **more}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["benchmarks.bench", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_command_prints_a_table_and_writes_json(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Settings] = []

    def fake(settings: Settings, **_: Any) -> dict[str, Any]:
        asked.append(settings)
        return canned()

    monkeypatch.setattr("benchmarks.bench.run", fake)
    file = tmp_path / "bench.json"
    options = (
        "--model",
        "llada-8b",
        "--device",
        "h200",
        "--ctx",
        "1k,2k",
        "--mask-ratio",
        "0.1,0.9",
    )
    code, out, _ = command(*options, "--engines", "eager", "--out", str(file), "--budget", "6GiB")
    assert code == 0 and json.loads(file.read_text()) == canned()
    assert asked[0].contexts == (1024, 2048) and asked[0].mask_ratios == (0.1, 0.9) and asked[0].budget == 6 << 30
    assert asked[0].engines == ("eager",)
    for part in ("12.30", "out of memory", "5,120.0"):
        assert part in out, part
    assert "predicted" not in out and "inflation" not in out  # nothing to show there
    code, out, _ = command(*options, "--json")
    assert code == 0 and json.loads(out) == canned()
    monkeypatch.setattr("benchmarks.bench.run", lambda settings, **_: canned(complete=False))
    assert command(*options)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--device", "cpu"), "--model"),
        (("--model", "llada-8b"), "--device"),
        (("--model", "llada-9b", "--device", "cpu"), "Did you mean"),
        (("--model", "llada-8b", "--device", "h2000"), "Did you mean"),
        (("--model", "llada-8b", "--device", "cpu", "--mask-ratio", "half"), "0.5"),
        (("--model", "llada-8b", "--device", "cpu", "--engines", "eagre"), "eager"),
        (("--model", "llada-8b", "--device", "cpu", "--out", "/nowhere/at/all.json"), "does not exist"),
    ],
)
def test_a_wrong_command_is_one_line(
    command: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], word: str
) -> None:
    code, out, err = command(*arguments)
    assert code == 2 and out == "" and word in err and err.count("\n") == 1
