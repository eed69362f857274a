"""The benchmarks of the engine under load, on a CPU with tiny models: what they count is what requests need by their lengths."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import pytest
from test_request_table import CONFIGS

import mosaic
from benchmarks import at_once, cold_start, jobs, overload, prompts, serving, shared_prefixes, traffic
from benchmarks.floor import Floor
from benchmarks.record import table
from benchmarks.served import Meter
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.devices import load_device
from mosaic.models.step import StepSize
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import MIB

CPU = load_device("cpu")
WAY: dict[str, Any] = {"steps": 2, "remasking": "low_confidence_static"}


@pytest.fixture(scope="module")
def sdar() -> Iterator[CompiledModel]:
    """Blocks of 4 tokens."""
    with mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0) as model:
        yield model
        assert model.state_rows == {}


@pytest.mark.parametrize("tabled", [True, False])
def test_a_meter_notes_what_each_step_serves(sdar: CompiledModel, tabled: bool) -> None:
    """Two requests of 9 tokens and blocks [8, 12), [12, 16): a prompt of 8, then two steps a block, of which the second block's
    first computes both blocks."""
    meter = Meter(sdar, tabled=tabled)
    with Session(meter) as session:
        for _ in range(2):
            session.submit([7] * 9, gen_length=7, stop_at_eos=False, **WAY)
        while session.live:
            session.advance()
    found = [(step.requests, step.prompts, step.tokens, step.rows, step.keys, step.pairs) for step in meter.steps]
    prompt, last = (2, 16, 16, 0, 16, 2 * 8 * 6.0), (2, 0, 8, 4, 32, 2 * 4 * 16.0)
    first, second = (2, 0, 8, 6, 24, 2 * 4 * 12.0), (2, 0, 8, 2, 24, 2 * 4 * 12.0)
    assert found == [prompt, first, second, (2, 0, 16, 8, 32, 2 * 8 * 16.0), last]
    assert all(step.size >= step.tokens for step in meter.steps)
    assert all(step.floor_s(Floor(sdar.architecture, CPU)) > 0 for step in meter.steps)


def test_requests_at_once_are_timed_and_counted(sdar: CompiledModel) -> None:
    found = at_once.at_once(sdar, CPU, 3, prompt=9, answer=7, **WAY)
    assert found["steps"] == 5 and found["new_sizes"] == 0 and 0 < found["useful"] <= 1
    assert 0 < found["median_ms"] <= found["p99_ms"] <= found["most_ms"] and found["python_calls"] > 10
    assert found["tokens_per_s"] == pytest.approx(3 * 7 / (5e-3 * found["median_ms"]), rel=0.9)
    result = {"what": "at-once", "points": [{"count": 3, **found}]}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 2


def test_a_start_is_timed_from_the_process_to_the_first_outcome() -> None:
    began = time.time() - 1.0
    found = cold_start.started(CONFIGS["sdar"], "cpu", 9, 8, warms=True, began=began)
    assert 1.0 < found["imported_s"] < found["compiled_s"] < found["warm_s"] < found["whole_s"] < time.time() - began
    assert 0 < found["first_s"] < found["whole_s"] - found["warm_s"] and 0 < found["median_ms"] <= found["most_ms"]
    assert "mosaic/decoding/session.py" in found["files"]
    point = {**cold_start.STARTS[0]._asdict(), **found, "kernel_bytes": 1}
    assert len(next(iter(cold_start.rows_of({"points": [point]})))) == len(cold_start.HEADER)


def test_a_device_is_busy_while_any_kernel_runs() -> None:
    intervals = [(0, 2000), (5000, 6000), (1000, 3000), (1200, 1300), (6005, 7005)]
    assert at_once.busy_ms(intervals) == 5.0 and at_once.busy_ms(intervals, within=5.0) == 5.005


def test_a_step_calls_as_often_for_many_requests_as_for_one(sdar: CompiledModel) -> None:
    """Python's own calls, but those of kernels, which a device has none of."""

    def calls(requests: int) -> int:
        found = list[int]()
        with Session(sdar) as session:
            for _ in range(requests):
                session.submit([7] * 9, gen_length=80, stop_at_eos=False, **WAY)
            session.advance(2)
            for _ in range(9):
                within, called = 0, 0

                def note(frame: FrameType, event: str, _given: object) -> None:
                    nonlocal within, called
                    kernel = "/mosaic/kernels/" in frame.f_code.co_filename
                    within += kernel * ((event == "call") - (event == "return"))
                    called += event == "call" and not within

                sys.setprofile(note)
                session.advance()
                sys.setprofile(None)
                found.append(called)
        return statistics.median_low(found)

    calls(12)  # plans and bindings are made
    one, many = calls(1), calls(12)
    assert abs(many - one) <= 10 and many < 250


@pytest.mark.soak
def test_traffic_is_served_queued_and_as_it_comes(sdar: CompiledModel) -> None:
    """The same requests in each pass, which get the same tokens; at half the rate they take more time."""
    policies = ["exact", "dc+"]
    points = [*traffic.mixed(sdar, 6, seed=1, prompts=(4, 20), answers=(2, 8), policies=policies, warm=6, steps=2)]
    assert [point["run"] for point in points] == [*traffic.RUNS]
    for point in points:
        assert point["same_as_queued"] == 6 and point["refused"] == 0 and point["steps"] >= 5
        assert 0 < point["median_ms"] <= point["p99_ms"] <= point["most_ms"] <= point["latency_most_ms"]
        assert 0 < point["large_steps"] < point["steps"] and point["of_predicted"] > 0
    assert points[1]["of_queued"] == 1 and points[3]["of_queued"] < 1 and points[1]["new_sizes"] == 0
    result = {"what": "mixed", "points": points}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 5


def test_requests_are_drawn_from_all_lengths_and_policies(sdar: CompiledModel) -> None:
    arch = sdar.architecture
    draws = traffic.drawn(arch, 3, prompts=(64, 4096), answers=(32, 512), policies=traffic.policies_of(arch))
    found = [*islice(draws, 200)]
    lengths, answers = [one.prompt.numel() for one in found], [one.config.gen_length for one in found]
    assert 64 <= min(lengths) < 80 and 3000 < max(lengths) <= 4096 and 300 < statistics.median(lengths) < 800
    assert 32 <= min(answers) < 36 and 450 < max(answers) <= 512
    policies = {(str(one.config.attention), str(one.config.eviction), one.config.block_cache) for one in found}
    assert len(policies) == len(traffic.POLICIES) and len({one.config.temperature for one in found}) == 4
    assert not any((one.prompt == arch.mask_token_id).any() for one in found)


def test_requests_come_as_often_as_they_are_to(sdar: CompiledModel) -> None:
    some = [*islice(traffic.drawn(sdar.architecture, 3, prompts=(4, 8), answers=(2, 4), policies=["exact"]), 500)]
    at = [arrival.at_s for arrival in traffic.poisson(some, 5.0, 1)]
    assert at == sorted(at) and at[-1] == pytest.approx(100, rel=0.15)
    assert [arrival.at_s for arrival in traffic.poisson(some, math.inf, 1)] == [0.0] * 500


def test_who_never_fits_is_refused_and_keeps_nobody(sdar: CompiledModel) -> None:
    """A request for which an idle session has no room, between two that there is room for."""
    config = GenerationConfig(gen_length=8, **WAY)
    asked = [Submission(prompt=[7] * length, config=config, request_id=length) for length in (5, 6, 9)]
    with mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0) as model, model.session() as session:
        admits = session.admits
        session.admits = lambda one: one.request_id != 6 and admits(one)  # type: ignore[method-assign]
        found = traffic.Traffic(session, traffic.poisson(asked, math.inf, 1))
        while not found.is_over:
            found.step()
    assert (found.refused, sorted(found.answers), found.finishes) == ([6], [5, 9], ["length", "length"])


@pytest.mark.soak
def test_a_long_prompt_that_comes_to_running_requests_is_timed(sdar: CompiledModel) -> None:
    """It comes in chunks, beside which the others have their steps."""
    found = prompts.delays(sdar, 2, 512, prompt=5, answer=400, max_delay_ms=0.0, **WAY)
    assert found["chunks"] > 1 and found["chunk_tokens"][1] < 512 and found["new_sizes"] == 0
    assert 0 < found["before_ms"] <= found["before_most_ms"] and 0 < found["during_ms"] <= found["during_most_ms"]
    assert found["during_most_ms"] < 1e3 * found["prefill_s"]
    result = {"what": "delay", "points": [found]}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 2


@pytest.mark.soak
def test_prefills_are_timed_whole_and_in_chunks(sdar: CompiledModel) -> None:
    points = [*prompts.prefills(sdar, CPU, [64, 40], 16)]
    assert [point["chunks"] for point in points] == [1, 4, 1, 3]
    assert points[0]["of_whole"] == points[2]["of_whole"] == 1 and all(point["of_floor"] > 1 for point in points)
    result = {"what": "prefill", "points": points}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 5


def test_prefixes_are_measured_shared_and_not(sdar: CompiledModel) -> None:
    """The long prompt comes twice; the requests that share have the rows of the prefix once, and cheaper admission has hits."""
    points = [*shared_prefixes.prefixes(sdar, long=256, prefix=128, count=3, live=2, answer=8, **WAY)]
    assert [(point["what"], point["shares"]) for point in points] == [
        ("first block", False), ("first block", True), ("together", True), ("together", False), ("admission", True),
        ("admission", False),
    ]  # fmt: skip
    assert [point["cached"] for point in points[:4]] == [0, 256, 128, 0]
    assert [point["rows"] for point in points[2:4]] == [3 * (128 + 8) + 128, 3 * (128 + 128 + 8)]
    result = {"what": "prefix", "points": points}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 7


def budgeted(model: CompiledModel, mib: float) -> CompiledModel:
    """The same model with so much memory beyond what a step of one request takes."""
    least = model.planner.needed(StepSize(windows=(8,), rows=4))
    return mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0, budget=least + int(mib * MIB))


@pytest.mark.parametrize("seconds", [0.3, pytest.param(20.0, marks=pytest.mark.soak)])
def test_more_traffic_than_there_is_room_for_stays_within_the_budget(sdar: CompiledModel, seconds: float) -> None:
    """Some wait at all times; all that are admitted end as they should, and no row is left."""
    traffic = {"prompts": (16, 256), "answers": (4, 32), "policies": ["exact", "dc+"]}
    with budgeted(sdar, 0.5) as model:
        found = overload.overloaded(model, seconds, seed=5, **traffic)
    assert found["failures"] == [] and found["rows_left"] == 0 and found["seconds"] >= seconds
    assert {*found["finishes"]} <= {"length", "cancelled"} and found["most_live"] > 1
    assert 0 < found["most_bytes"] <= found["budget_bytes"]
    result = {"what": "memory", "points": [found]}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 2


@pytest.mark.soak
def test_variants_of_the_engine_serve_the_same_requests(sdar: CompiledModel) -> None:
    def compiled(**options: Any) -> CompiledModel:
        return mosaic.compile(CONFIGS["llada"], seed=3, host_budget=0, budget="64MiB", **options)

    traffic = {"seed": 1, "prompts": (16, 256), "answers": (8, 32), "policies": ["exact"]}
    points = [*overload.ablated(compiled, 5, **traffic, cache="dual", block_length=8)]
    assert [point["variant"] for point in points] == [*overload.VARIANTS]
    assert all(point["most_live"] == 5 and point["live_per_gib"] > 0 for point in points)
    result = {"what": "ablation", "points": points}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("\n") == 5


def test_jobs_answer_what_a_session_answers(sdar: CompiledModel) -> None:
    found = [*jobs.jobs(sdar, 3, seed=1, prompts=(4, 9), answers=(4, 9), policies=["exact"])]
    engine, *others = found
    assert [point["run"] for point in found] == ["the engine", "a job", "a job"] and engine["most_live"] == 3
    assert [point["most_live"] for point in others] == [3, jobs.MOST_LIVE]
    for point in others:
        assert point["same"] == 3 and point["steps"] >= 2
        assert point["tokens_per_s"] * point["seconds"] == pytest.approx(engine["tokens_per_s"] * engine["seconds"])
    result = {"what": "job", "points": found}
    assert table(serving.header_of(result), [*serving.rows_of(result)]).count("a job") == 2
