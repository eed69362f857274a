"""The benchmark of HTTP's cost: what it asks for, what the engine alone serves of it, and the whole run on a CPU."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from test_request_table import CONFIGS

import mosaic
from benchmarks import over_http
from benchmarks.engine_alone import served
from benchmarks.record import ROOT
from mosaic.bench import asked
from mosaic.decoding import Session
from mosaic.devices import load_device
from mosaic.models import load

SDAR = load(CONFIGS["sdar"])


def options(**more: Any) -> Namespace:
    return Namespace(**{"seed": 0, "block": 32, "prompt": 8, "answer": 12, "device": "cpu", "eviction": "off", **more})


@pytest.mark.parametrize("seed", range(4))
def test_requests_force_tokens_per_forward_from_a_seed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    block, per_forward = rng.choice((8, 32, 64)), rng.uniform(1, 7)
    point = {
        "load": "Poisson",
        "eviction": rng.choice(("off", "on")),
        "per_forward": per_forward,
        "requests": 2000,
        "rate": 5.0,
    }
    point["count"] = 2000
    given = options(seed=seed, block=block)
    one, other, again = (
        over_http.written(tmp_path / f"{number}", point, given, SDAR, counted=counted)
        for number, counted in enumerate((True, False, True))
    )
    assert one.read_text() == again.read_text()
    found, others = ([*asked(over_http.load_of(path, point))] for path in (one, other))
    assert [(a.at_s, a.tokens, a.body) for a in found] == [(a.at_s, a.tokens, a.body) for a in others]
    longer = over_http.written(tmp_path / "l", {**point, "count": 3}, options(answer=999), SDAR, counted=seed % 2 == 0)
    more = [*asked(over_http.load_of(longer, point))]
    assert {(a.tokens, len(str(a.prompt).split())) for a in more} == {(999, 8) if seed % 2 == 0 else (64, 8)}
    assert len(more) == (2000 if seed % 2 == 0 else 3)
    assert len({a.prompt for a in (*found, *others, *more)}) == 2 * 2000 + len(more)
    assert all(len(str(a.prompt).split()) == 8 and a.tokens == 12 for a in found)
    steps = [a.body["steps"] for a in found]
    assert block / statistics.mean(steps) == pytest.approx(per_forward, rel=0.03) and max(steps) - min(steps) <= 1
    assert {a.body.get("eviction") for a in found} == {"focus" if point["eviction"] == "on" else None}
    assert found[-1].at_s == pytest.approx(400, rel=0.1)


def test_the_engine_alone_keeps_as_many_in_flight_and_takes_the_steps_that_are_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tokens behind 8: a step of the prompt, and in each of three blocks of 4 two steps, one or two, or one."""
    given, live, advance = options(block=4), list[int](), Session.advance

    def noted(session: Session, *args: Any) -> Any:
        live.append(len(session.live))
        return advance(session, *args)

    monkeypatch.setattr(Session, "advance", noted)
    with mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0) as model, Session(model) as session:
        for per_forward in (2.0, 3.0, 4.0):
            point = {"load": "closed loop", "eviction": "off", "per_forward": per_forward, "requests": 7, "count": 3}
            trace = over_http.written(tmp_path / "trace", point, given, SDAR)
            live.clear()
            found = served(session, SDAR.architecture, str(trace), point)
            assert (found["tokens"], found["prompt_tokens"], found["failed"]) == (7 * 12, 7 * 8, 0)
            steps = [one.body["steps"] for one in asked(over_http.load_of(trace, point))]
            assert found["forwards_per_token"] * 84 == pytest.approx(7 + 3 * sum(steps))
            assert max(live) == 3 and live.count(3) >= 7
            assert found["tokens_per_s"] == pytest.approx(84 / found["seconds"])
            (first, *_, last_first), (*_, last) = found["ttft_ms"], found["e2el_ms"]
            assert 0 < first <= last_first < last <= 1e3 * found["seconds"] and last_first <= 1e3 * found["first_s"]


def test_the_floor_of_requests_at_once_is_about_that_of_their_products() -> None:
    """By the sizes of SDAR-8B: 36 layers, of which the last computes keys and values of prompts alone; and a block of each."""
    model, prompt, count = load("sdar-8b"), 512, 128
    given = options(device="h200", prompt=prompt + 5, burst=count)
    rate = max(
        max(rates.values()) for rates in (*load_device("h200").gemm_rates.values(), load_device("h200").unembed_rates)
    )
    hidden, kv, ffn, vocabulary = 4096, 8 * 128, 12288, model.architecture.vocabulary
    layer = 2 * hidden * (hidden + kv) + 3 * hidden * ffn
    products = 2 * count * (prompt * (35 * layer + 2 * hidden * kv) + 32 * (36 * layer + hidden * vocabulary))
    assert 1 < over_http.floor_s(model, "h200", given) / (products / rate) < 1.1


def test_tables_have_what_a_record_has() -> None:
    figures = {f"{name}_ms": [1.0, 2.0, 3.0] for name in ("ttft", "tpot", "e2el")} | {
        "forwards_per_token": 0.5,
        "failed": 1,
    }
    closed = {"load": "closed loop", "eviction": "on", "per_forward": 3.5, "count": 64, "requests": 128}
    alone, served = {"tokens_per_s": 4000.0, "new_sizes": 2}, {"tokens_per_s": 3900.0, "requests_per_s": 5.0, **figures}
    points = [
        {**closed, "engine": alone, "server": served}, {**closed, "engine": alone}, {**closed, "engine": {"error": "no"}},
        {**closed, "load": "Poisson", "count": None, "rate": 4.0, "server": served},
        {"load": "at once", "count": 128, "floor_s": 2.0, "engine": {"first_s": 2.2}, "server": {"first_s": 2.5}},
    ]  # fmt: skip
    rows = [*over_http.rows_of({"points": points})]
    assert {len(row) for row in rows} == {len(over_http.HEADER)}
    times = ["1.0, 2.0, 3.0"] * 3
    assert rows[0] == ["64 in flight", "on", "3.5", "128", "4,000", "3,900", "0.975", *times, "2.00", "1", "2"]
    assert rows[1][4:7] == ["4,000", "", ""] and rows[3][:7] == ["4.00 a second", "on", "3.5", "128", "", "3,900", ""]
    (row,) = over_http.at_once_rows({"points": points})
    assert row == ["128", "2.00", "2.20", "1.10", "2.50", "1.25"] and len(row) == len(over_http.AT_ONCE)
    given = options(poisson=0.8, counts=(8, 64), rounds=2)
    more = [{**closed, "server": {"requests_per_s": rate}} for rate in (3.0, 6.0, 5.0)] + [
        {**closed, "eviction": "off"}
    ]
    (point,) = over_http.arrivals(more, given)
    assert point["rate"] == pytest.approx(4.8) and point["requests"] == 128 and point["eviction"] == "on"
    assert over_http.arrivals(more, options(poisson=0.0, counts=(8,), rounds=2)) == []


COMMAND = [
    sys.executable,
    "-m",
    "benchmarks.over_http",
    "small-sdar",
    "--device",
    "cpu",
    "--layers",
    "3",
    "--prompt",
    "64",
]
COMMAND += ["--answer", "64", "--counts", "2", "--per-forward", "3.5", "--rounds", "4", "--tag", "t"]


@pytest.mark.soak
def test_the_engine_and_a_server_are_measured_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    more = ["--eviction", "on", "--poisson", "0.8", "--burst", "5", "--minutes", "5"]
    ran = subprocess.run([*COMMAND, *more], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "over-http-small-sdar-cpu-t.json").read_text())
    assert [point["load"] for point in result["points"]] == ["closed loop", "at once", "Poisson"]
    for point in result["points"]:
        for found in (point[side] for side in ("engine", "server") if side in point):
            requests = point["requests"]
            assert found["failed"] == 0 and found["tokens"] == requests * 64 and found["prompt_tokens"] == requests * 64
        assert ("engine" in point) == (point["load"] != "Poisson") and "server" in point
        if point["load"] == "closed loop":
            told = [point[side]["forwards_per_token"] for side in ("engine", "server")]
            assert told == [pytest.approx((1 + 2 * 32 / 3.5) / 64, rel=0.15)] * 2
    assert {"mosaic/serving/app.py", "mosaic/decoding/session.py"} < {*result["environment"]["sources"]}
    assert over_http.section([result]).count("\n| ") == 2 * 2 + 2 + 1


@pytest.mark.soak
def test_a_run_that_is_ended_ends_what_it_started_and_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([*COMMAND, "--minutes", "5"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "the engine alone: 1 of 1 points\n"
        until = time.monotonic() + 60
        while not (logs := [*tmp_path.glob("*/log")]) or "serving" not in logs[0].read_text():
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    (point,) = json.loads((tmp_path / "out" / "over-http-small-sdar-cpu-t.json").read_text())["points"]
    assert point["engine"]["tokens"] == 8 * 64 and "server" not in point
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed


@pytest.mark.soak
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    started = over_http.server(tmp_path, "m", options(), tmp_path / "log")
    with pytest.raises(SystemExit, match=r"the server has not started:\n(?s:.)*supported"), started:
        pass
