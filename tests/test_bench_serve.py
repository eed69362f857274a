"""`mosaic bench serve` against servers that behave otherwise than Mosaic's, and what it makes of traces and figures."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mosaic.bench import TRAFFIC, Asked, Load, asked, goal_of, measure, results
from mosaic.bench.client import Outcome
from mosaic.bench.processes import size
from mosaic.cli import app
from mosaic.errors import MosaicError, UsageError
from tests.scripted_server import answer, piece, scripted, usage

DONE = b"data: [DONE]\n\n"
LOAD = Load(base_url="http://a", model="a", lengths=TRAFFIC["short"])


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def counted(steps: float, positions: float, committed: float, seconds: float, memory: float) -> str:
    return (
        "# HELP vllm:diffusion_num_denoising_steps_total Steps.\nnonsense {\nvllm:broken nan-ish\n"
        f'vllm:diffusion_num_denoising_steps_total{{engine="0"}} {steps / 2}\n'
        f'vllm:diffusion_num_denoising_steps_total{{engine="1"}} {steps / 2}\n'
        f"vllm:diffusion_num_canvas_positions_total {positions}\nvllm:diffusion_num_committed_tokens_total {committed}\n"
        f'mosaic:step_seconds_total{{model_name="a"}} {seconds}\n'
        f'mosaic:memory_bytes{{kind="planned",model_name="a",pool="weights"}} 5.0\n'
        f'mosaic:memory_bytes{{kind="committed",model_name="a",pool="weights"}} {memory}\n'
        f'mosaic:memory_bytes{{kind="committed",model_name="a",pool="state/kv"}} 1.0\n'
    )


def test_servers_that_misbehave_fail_their_requests_and_no_others(tmp_path: Path) -> None:
    good = answer(
        b": ping\n\n",
        piece(" a"),
        0.05,
        piece(" b c")[:9],
        0.01,
        piece(" b c")[9:],
        piece("", "stop"),
        usage(7, 5),
        DONE,
    )
    answers: dict[str, list[bytes | float]] = {
        "good": good, "closes": [], "closes inside": answer(piece(" a")), "no answer": [30.0], "busy": answer(
            b'{"error": {"message": "full"}}', status="429 Too Many Requests", kind="application/json"
        ),
        "no http": [b"\x00\xff garbage\r\n\r\n"], "no json": answer(b"data: {nope\n\n"), "no object": answer(b"data: 5\n\n"),
        "odd choices": answer(b'data: {"choices": 5}\n\n'),
        "odd usage": answer(b'data: {"choices": [], "usage": {"a": 1}}\n\n'),
        "bytes": answer(b"data: \xff\xfe\n\n"), "deep": answer(b"data: " + b"[" * 100_000 + b"\n\n"),
        "endless": answer(b"x" * (3 << 20)), "empty": answer(),
        "an error": answer(piece(" a"), b'data: {"error": {"message": "lost"}}\n\n'),
        "whole": answer(
            b'{"choices": [{"text": "one two", "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
            kind="application/json",
        ),
    }  # fmt: skip
    trace = written(tmp_path / "t.jsonl", *({"at_s": 0, "prompt": name, "output_length": 4} for name in answers))
    with scripted(answers, ["x"]) as (url, _):
        found = measure(replace(LOAD, base_url=url, trace=trace, timeout_s=1.5))
    errors = dict(zip(answers, found["errors"], strict=True))
    said = {
        "good": "", "whole": "", "closes": "disconnected", "closes inside": "broke off", "no answer": "within 1.5 s",
        "busy": "status 429: ",
        "no http": "", "no json": "no piece of an answer: {nope", "no object": "no piece of an answer: 5", "an error": "lost",
        "endless": "1,048,576", "empty": "no piece", "deep": "no piece of an answer: [[[",
    }  # fmt: skip
    for name, error in errors.items():
        assert bool(error) == (name not in ("good", "whole")), (name, error)
        assert said.get(name, "no piece of an answer") in error, (name, error)
    assert found["completed"] == 2 and found["failed"] == len(answers) - 2 and found["notes"] == []
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (10, 7)
    assert (
        len(found["itls"][0]) == 2 and found["itls"][0][0] >= 0.05 and found["latencies"][0] >= found["ttfts"][0] + 0.05
    )
    assert found["duration"] < 10 and "memory" not in found and "forwards_per_token" not in found


def test_servers_without_options_usage_or_metrics_are_measured_and_said_to_be(tmp_path: Path) -> None:
    """And the figures of a server's counters follow from the first and the last reading; two processes share the load."""
    plain = answer(piece(" a"), piece(" b"), piece("", "stop"), DONE)
    trace = written(
        tmp_path / "t.jsonl",
        *({"at_s": 0.01 * number, "prompt": "no options", "output_length": 4} for number in range(8)),
    )
    readings = [
        counted(0, 0, 0, 0, 9),
        counted(10, 320, 64, 1, 9),
        counted(10, 320, 64, 1, 12),
        counted(26, 832, 192, 3, 8),
    ]
    with scripted({"no options": plain}, readings) as (url, bodies):
        load = replace(
            LOAD,
            base_url=url,
            trace=trace,
            processes=2,
            concurrency=2,
            warmups=1,
            body={"top_k": 3},
            goals={"ttft": 1e4},
        )
        found = measure(load)
    assert found["completed"] == 8 and found["request_goodput"] == found["request_throughput"]
    assert found["total_output_tokens"] == 16 and found["total_input_tokens"] == 16, "pieces with text, and words"
    assert [("stream_options" in note or "usage" in note) for note in found["notes"]] == [True, True]
    assert len(bodies) == 9 + 3 and sum("stream_options" in body for body in bodies) == 3, "each sender is refused once"
    assert all(body["top_k"] == 3 and body["max_tokens"] == 4 for body in bodies)
    assert found["max_concurrent_requests"] <= 2 and found["start_times"][7] >= 0.07
    # 16 steps of 32 positions, 128 tokens in 2 seconds of steps: 4 blocks, whose last step each is the one that commits.
    assert found["forwards_per_token"] == 16 / 128 and found["in_step_throughput"] == 64
    assert (found["diffusion_denoising_steps"], found["diffusion_steps_per_canvas"]) == (12, 3)
    assert found["diffusion_committed_per_step"] == pytest.approx(128 / 12)
    assert found["block_throughput"] == pytest.approx(4 / found["duration"])
    assert found["memory"]["committed"]["weights"][0] == 12 and found["peak_memory_bytes"] == 13


def test_requests_of_a_trace_have_fields_of_their_own(tmp_path: Path) -> None:
    """Beside those of all, which they come before."""
    rng, plain = random.Random(2), answer(piece(" a", "stop"), usage(1, 1), DONE)
    own = [*({"steps": rng.randint(1, 9)} for _ in range(6)), None]
    lines = [
        {"at_s": number, "prompt": f"p{number}", "output_length": 4, "extra_body": one}
        for number, one in enumerate(own)
    ]
    trace = written(tmp_path / "t.jsonl", *lines, {"at_s": 9, "prompt": "plain", "output_length": 4})
    with scripted(dict.fromkeys(("plain", *(f"p{number}" for number in range(7))), plain), ["x"]) as (url, bodies):
        found = measure(replace(LOAD, base_url=url, trace=trace, rate=1e3, body={"steps": 10, "top_k": 3}))
    assert found["completed"] == 8
    expected = {f"p{number}": (one or {"steps": 10})["steps"] for number, one in enumerate(own)} | {"plain": 10}
    assert {body["prompt"]: body["steps"] for body in bodies} == expected and all(body["top_k"] == 3 for body in bodies)


def test_a_server_that_is_not_there_is_said_in_a_line() -> None:
    ran = CliRunner().invoke(
        app, ["bench", "serve", "--model", "a", "--base-url", "http://127.0.0.1:9/v1", "--num-prompts", "1"]
    )
    assert isinstance(ran.exception, MosaicError) and "no server at http://127.0.0.1:9:" in str(ran.exception)


def test_figures_are_those_of_a_plain_statement() -> None:
    rng = random.Random(3)
    outcomes = []
    for number in range(200):
        gaps = [rng.random() / 9 for _ in range(rng.randrange(6))]
        first, tokens = rng.random(), rng.choice([0, 1, 30])
        outcomes.append(
            Outcome(
                number, due_s=number / 50, began_s=number / 50 + rng.random() / 99, ttft_s=first, latency_s=first + sum(gaps),
                gaps_s=gaps, prompt_tokens=9, tokens=tokens, counted=True, error="" if rng.random() < 0.9 else "lost",
            )
        )  # fmt: skip
    found = results(replace(LOAD, goals={"ttft": 500.0, "tpot": 9.0}), outcomes, 8.0)
    done = [one for one in outcomes if not one.error]
    tpots = [1e3 * sum(one.gaps_s) / (one.tokens - 1) for one in done if one.tokens > 1]
    assert found["p95_tpot_ms"] == pytest.approx(np.percentile(tpots, 95)) and found["median_tpot_ms"] == pytest.approx(
        np.median(tpots)
    )
    assert found["std_e2el_ms"] == pytest.approx(np.std([1e3 * one.latency_s for one in done]))
    good = [
        one for one in done if one.ttft_s <= 0.5 and (one.tokens < 2 or 1e3 * sum(one.gaps_s) / (one.tokens - 1) <= 9)
    ]
    assert 0 < len(good) < len(done) and found["request_goodput"] == len(good) / 8
    assert (
        found["output_throughput"] == sum(one.tokens for one in done) / 8
        and found["completed"] + found["failed"] == 200
    )
    moments = [one.began_s for one in done]
    live = max(sum(one.began_s <= at < one.began_s + one.latency_s for one in done) for at in moments)
    assert found["max_concurrent_requests"] == live
    seconds = [0.0] * 12
    for one in done:
        for at in np.cumsum([one.ttft_s, *one.gaps_s]):
            seconds[int(one.began_s + at - min(moments))] += one.tokens / (len(one.gaps_s) + 1)
    assert found["max_output_tokens_per_s"] == pytest.approx(max(seconds))
    assert found["errors"] == [one.error for one in outcomes] and found["mean_client_queue_time_ms"] > 0


def test_a_load_is_the_same_for_a_seed_and_comes_at_its_rate() -> None:
    load = Load(base_url="http://a", model="a", lengths=TRAFFIC["burst"], requests=4000, rate=8.0, prefix=5)
    found = [*asked(load)]
    assert found[:50] == [*asked(replace(load, requests=50))] != [*asked(replace(load, requests=50, seed=1))]
    assert [*asked(load, 1, 3)] == found[1::3] and size(load) == 4000
    assert found[-1].at_s == pytest.approx(4000 / 8, rel=0.1)
    words = [len(str(one.prompt).split()) for one in found]
    assert min(words) >= 105 and max(words) <= 605 and len({tuple(str(one.prompt).split()[:5]) for one in found}) == 1
    assert min(one.tokens for one in found) >= 128 and max(one.tokens for one in found) <= 512


MOONCAKE = [
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 7]},
    {"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [1, 2]},
    {"timestamp": 9000, "input_length": 700, "output_length": 0, "hash_ids": [1, 2]},
]
BURST = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "",
    "45.5,GPT-4,9,2,11,API log",
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
]
AZURE_LATER = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2024-05-10 00:00:00.009930+00:00,374,44",
    "2024-05-10 01:00:01.009930+01:00,396,109",
]
OWN: list[Any] = [
    {"at_s": 7, "prompt": "Hello", "output_length": 3},
    {"at_s": 7.5, "prompt": [5, 6], "output_length": 4},
]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (MOONCAKE, [(0, 700, 6), (2, 600, 5)]), (BURST, [(0, 472, 18), (40.5, 9, 2)]),
        (AZURE, [(0, 374, 44), (4.314579, 396, 109)]), (AZURE_LATER, [(0, 374, 44), (1, 396, 109)]),
        (OWN, [(0, 1, 3), (0.5, 2, 4)]),
    ],
)  # fmt: skip
def test_recorded_traces_are_read(tmp_path: Path, lines: list[Any], expected: list[tuple[float, int, int]]) -> None:
    load = replace(LOAD, trace=written(tmp_path / "trace", *lines))
    found = [*asked(load)]
    lengths = [len(one.prompt.split() if isinstance(one.prompt, str) else one.prompt) for one in found]
    assert [(pytest.approx(at), *rest) for at, *rest in expected] == [
        (one.at_s, length, one.tokens) for one, length in zip(found, lengths, strict=True)
    ]
    assert size(load) == 2 and size(replace(load, requests=1)) == 1 and [*asked(load, 1, 2)] == found[1:]
    slower = [*asked(replace(load, rate=0.25))]
    assert slower[-1].at_s == pytest.approx(8) and [one.prompt for one in slower] == [one.prompt for one in found]
    if lines is MOONCAKE:  # one hash in common
        begun, other = (str(one.prompt).split() for one in found)
        assert begun[:512] == other[:512] and begun[512:600] != other[512:600]
    if lines is OWN:
        assert [one.prompt for one in found] == ["Hello", [5, 6]] and isinstance(found[0], Asked)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"at_s": 1, "prompt": "a", "output_length": 4}', "{"], "behind 1 requests"), (['{"at_s": 1}'], "input_length"),
        (['{"at_s": NaN, "prompt": "a", "output_length": 4}'], "at_s is nan"), (["a,b", "1,2"], "Timestamp"),
        (['{"at_s": 1, "prompt": {}, "output_length": 4}'], "neither text"), ([""], "no request"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "x,1,2"], "x"),
        (['{"at_s": 1, "prompt": "a", "output_length": 4, "extra_body": [9]}'], r"extra_body is no JSON object: \[9\]"),
    ],
)  # fmt: skip
def test_traces_that_are_none_are_refused(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        size(replace(LOAD, trace=written(tmp_path / "trace", *lines)))
    with pytest.raises(UsageError, match="No such file"):
        size(replace(LOAD, trace=tmp_path / "none"))


@pytest.mark.parametrize("goals", ["ttft", "ttft:x", "speed:3"])
def test_goals_that_cannot_be_are_refused(goals: str) -> None:
    with pytest.raises(UsageError, match=r"goodput|measure"):
        goal_of(goals)


def test_the_command_draws_and_tells(tmp_path: Path) -> None:
    """All that a reader sees: figures by group, failures by number, a picture as asked for, an exit code."""
    plain = answer(piece(" a"), piece(" b", "stop"), usage(3, 33), DONE)
    trace = written(
        tmp_path / "t.jsonl", *({"at_s": 0, "prompt": one, "output_length": 4} for one in ("ok", "ok", "busy"))
    )
    command = ["bench", "serve", "--model", "a", "--trace", str(trace), "--save", str(tmp_path / "r.json"), "--plot"]
    with scripted(
        {"ok": plain, "busy": answer(b"full", status="429 Too Many Requests")},
        [counted(0, 0, 0, 0, 9), counted(1, 2, 1, 1, 9)],
    ) as (url, _):
        ran = CliRunner().invoke(app, [*command, str(tmp_path / "r.svg"), "--base-url", f"{url}/v1"])
    assert ran.exit_code == 0, ran.output
    for said in ("2 of 3 requests", "1 failed: status 429: full", "66 out", "(e2el)", "memory of the server, peak"):
        assert said in ran.output
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["model_id"] == "a" and saved["request_rate"] == "inf" and saved["output_lens"] == [33, 33, 0]
    assert ET.parse(tmp_path / "r.svg").getroot().tag.endswith("svg")
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "r.pdf")])
    assert isinstance(refused.exception, UsageError) and ".svg" in str(refused.exception)
