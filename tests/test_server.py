"""`mosaic serve` from outside: OpenAI's own client, hand-made bytes, callers who leave, and an engine that is killed."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from typer.testing import CliRunner

import mosaic
from mosaic.cli import app
from mosaic.decoding import GenerationConfig
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import UnknownName, UsageError
from mosaic.jobs.sampling import SamplingParams, completion
from mosaic.models import load
from mosaic.serving import EngineOptions, Limits
from mosaic.serving.app import create_app
from mosaic.serving.connections import Server
from mosaic.serving.metrics import Metrics
from mosaic.serving.text import AnswerText

MODEL = load("small-sdar")
COMPILE = {"dtype": "float32", "host_budget": 0, "threads": 1}
TOKENIZER = Tokenizer(MODEL.path)
QUESTION = "Ada gave the red ball to Tom. Who has it?"


def ids_of(question: str) -> list[int]:
    """A question in the model's template: behind it there is an answer."""
    return TOKENIZER.encode_chat([{"role": "user", "content": question}])


@contextmanager
def running(server: Server, *args: Any) -> Iterator[None]:
    """A server in a thread of its own, which ends with the block."""
    thread = threading.Thread(target=server.run, args=args)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def serving(
    *, model: str = "small-sdar", limits: Limits | None = None, max_num_seqs: int = 64, budget: str | None = None,
    **options: Any,
) -> Iterator[str]:  # fmt: skip
    """A server on a free port, in a thread of its own; its engine is a process."""
    engine = EngineOptions(model=model, compile=COMPILE | {"budget": budget}, max_num_seqs=max_num_seqs)
    limits = replace(limits or Limits(), drain_s=5)
    server = Server(create_app(load(model), model, engine, limits, **options), limits)
    with running(server):
        until(lambda: server.started, 120)
        base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        until(lambda: _get(f"{base}/health")[0] == 200, 120)
        yield base


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """Answers that a model gives in this process, by token ids."""
    with mosaic.compile(MODEL, seed=0, **COMPILE) as model:
        yield lambda prompt, **options: model.generate(prompt, GenerationConfig(**options))[0]


def until(holds: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.02)


def _get(url: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as found:
            return found.status, dict(found.headers), found.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def _metric(base: str, name: str) -> float:
    lines = _get(f"{base}/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def _client(base: str, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, **more)


def test_openais_client_gets_what_the_model_answers(base: str, alone: Any) -> None:
    client, prompt = _client(base), ids_of(QUESTION)
    assert [model.id for model in client.models.list()] == ["small-sdar"] == [client.models.retrieve("small-sdar").id]
    with pytest.raises(openai.NotFoundError, match="the model 'gpt/4' is not here; this server has 'small-sdar'"):
        client.models.retrieve("gpt/4")
    expected = alone(torch.tensor(prompt), gen_length=24)
    whole = client.completions.create(model="small-sdar", prompt=prompt, max_tokens=24, temperature=0)
    assert whole.choices[0].text == TOKENIZER.decode(expected.token_ids.tolist())
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.choices[0].finish_reason == ("stop" if expected.finish == "eos" else "length")
    assert whole.choices[0].text.strip()
    texts = [QUESTION, "Tell a story."]
    both = client.completions.create(model="small-sdar", prompt=texts, max_tokens=8, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    for choice, text in zip(both.choices, texts, strict=True):
        assert choice.text == TOKENIZER.decode(alone(text, gen_length=8).token_ids.tolist())


def test_chats_stream_what_they_answer_whole(base: str) -> None:
    client = _client(base)
    asked: dict[str, Any] = {
        "model": "small-sdar", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0.7, "seed": 5,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    chunks = [*client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and len(chunks) >= 3
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_client_gets_all_answers_of_many_at_once(base: str, alone: Any) -> None:
    prompts = [ids_of(QUESTION[place:]) for place in range(8)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
            asked = (
                client.completions.create(model="small-sdar", prompt=one, max_tokens=12, temperature=0)
                for one in prompts
            )
            return [found.choices[0].text for found in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [
        TOKENIZER.decode(alone(torch.tensor(one), gen_length=12).token_ids.tolist()) for one in prompts
    ]


def test_a_prompt_that_came_before_is_cached(base: str) -> None:
    asked: dict[str, Any] = {"model": "small-sdar", "prompt": ids_of(QUESTION * 9), "max_tokens": 8, "temperature": 0}
    found = [_client(base).completions.create(**asked).usage for _ in range(2)]
    cached = [one.prompt_tokens_details.cached_tokens for one in found if one and one.prompt_tokens_details]
    assert cached[0] == 0 < cached[1] < len(asked["prompt"])


def test_several_answers_differ_and_a_seed_repeats_them(base: str) -> None:
    asked: dict[str, Any] = {
        "model": "small-sdar",
        "prompt": ids_of(QUESTION),
        "max_tokens": 16,
        "temperature": 1.5,
        "n": 4,
    }
    client = _client(base)
    first, again = ([one.text for one in client.completions.create(**asked, seed=9).choices] for _ in range(2))
    assert first == again and len({*first}) > 1
    drawn = {tuple(one.text for one in client.completions.create(**asked).choices) for _ in range(3)}
    assert len(drawn) > 1, "without a seed, each request draws anew"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", b"{", 400, "no JSON"),
        ("completions", b'{"prompt": "\xff"}', 400, "no JSON"),
        ("completions", b"[" * 100_000, 400, "no JSON"),
        ("completions", b"[]", 400, "JSON object"),
        ("completions", b'{"model": "other", "prompt": "a"}', 404, "small-sdar"),
        ("completions", b"{}", 400, "prompt: missing"),
        ("completions", b'{"prompt": []}', 400, "prompt: expected"),
        ("completions", b'{"prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
        ("completions", b'{"prompt": "a", "max_tokens": 1e99}', 400, "max_tokens"),
        ("completions", b'{"prompt": "a", "n": 100000}', 400, "n="),
        ("completions", b'{"prompt": "a", "echo": true, "logprobs": 1}', 400, "echo"),
        ("completions", b'{"prompt": "a", "logprobs": 2}', 400, "logprobs"),
        ("completions", b'{"prompt": "a", "temperature": "hot"}', 400, "temperature"),
        ("completions", b'{"prompt": "a", "cache": "dual"}', 400, "cache"),
        ("completions", b'{"prompt": [999999999]}', 400, "token"),
        ("completions", b'{"prompt": "a", "max_tokens": 8193}', 400, "8,448"),
        ("completions", b'{"prompt": "a", "stop": 5}', 400, "stop"),
        ("completions", b'{"prompt": "' + b"a " * 1_000_000 + b'"}', 400, "2,000,000 characters"),
        ("nothing", b"{}", 404, "/v1/nothing"),
        ("models", b"{}", 405, "POST"),
        ("chat/completions", b'{"messages": "a"}', 400, "messages"),
        ("chat/completions", b'{"messages": [{"role": "user"}]}', 400, "content"),
    ],
)
def test_bad_requests_get_one_clear_line(base: str, path: str, body: bytes, status: int, says: str) -> None:
    if "8,448" in says:
        body = json.dumps({"prompt": "a" * 400, "max_tokens": 8192}).encode()
    code, _, found = _get(f"{base}/v1/{path}", body)
    error = json.loads(found)["error"]
    assert (code, error["code"]) == (status, status) and says in error["message"] and "\n" not in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_what_has_no_meaning_is_named_or_refused(base: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 4, "ranking": 1, "user": "me", "service_tier": "auto"}).encode()
    code, headers, _ = _get(f"{base}/v1/completions", body)
    assert (code, headers["x-mosaic-ignored"]) == (200, "ranking")


def test_who_leaves_is_cancelled_and_others_get_their_answers(base: str, alone: Any) -> None:
    rng, texts = random.Random(1), dict[int, str]()
    prompts = [ids_of(QUESTION[place % 5 :]) for place in range(12)]
    address = base.removeprefix("http://").split(":")

    def ask(place: int) -> None:
        asked = {"prompt": prompts[place], "max_tokens": 64, "ignore_eos": True, "stream": place % 2 == 0}
        if place % 3 == 0:
            body = json.dumps(asked).encode()
            with socket.create_connection((address[0], int(address[1]))) as leaving:
                leaving.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                time.sleep(rng.random() / 5)
            return
        found = _client(base).completions.create(model="small-sdar", temperature=0, **_sdk(asked))
        texts[place] = "".join(one.choices[0].text for one in found) if asked["stream"] else found.choices[0].text

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for place, text in texts.items():
        expected = alone(torch.tensor(prompts[place]), gen_length=64, stop_at_eos=False).token_ids.tolist()
        assert text == TOKENIZER.decode(expected)
    assert len(texts) == 8
    until(lambda: _metric(base, "vllm:num_requests_running") == _metric(base, "vllm:num_requests_waiting") == 0, 30)
    assert _metric(base, "vllm:generation_tokens_total") >= 8 * 64


def _sdk(asked: dict[str, Any]) -> dict[str, Any]:
    known = {name: asked[name] for name in ("prompt", "max_tokens", "stream")}
    return {**known, "extra_body": {"ignore_eos": asked["ignore_eos"]}}


@pytest.mark.soak
def test_who_finds_the_queue_full_is_told_when_the_next_one_is_admitted() -> None:
    """In steps of the forecast, of the length that they have: the one that runs has thousands before it."""
    asks = {"prompt": ids_of(QUESTION), "max_tokens": 4096, "ignore_eos": True, "threshold": 1.0, "model": "small-sdar"}
    body = json.dumps(asks).encode()
    with serving(limits=Limits(max_waiting=1), budget="64MiB") as base, ExitStack() as leaving:
        for counted in ("running", "waiting"):
            connection = http.client.HTTPConnection(base.removeprefix("http://"))
            leaving.callback(connection.close)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            until(partial(lambda name: _metric(base, f"vllm:num_requests_{name}") == 1, counted), 30)
        time.sleep(1.2)  # the engine looks once a second
        later = json.loads(_get(f"{base}/plan", body)[2])
        status, headers, _ = _get(f"{base}/v1/completions", body)
        assert status == 429 and later["fits"] == "later" and later["wait_steps"] > 2000
        assert 0.5 < int(headers["retry-after"]) / later["wait_seconds"] < 2 and later["wait_seconds"] > 3


@pytest.mark.soak
def test_who_comes_during_a_long_step_counts_as_waiting() -> None:
    """The engine knows of the one that waits a step late, and steps over a whole canvas take a while here."""
    long = json.dumps({"prompt": "Tom had", "max_tokens": 1024, "steps": 1024, "ignore_eos": True}).encode()
    with serving(model="small", max_num_seqs=1, limits=Limits(max_waiting=1)) as base, ExitStack() as leaving:
        for running in (0, 1):
            until(partial(lambda count: _metric(base, "vllm:num_requests_running") == count, running), 30)
            connection = http.client.HTTPConnection(base.removeprefix("http://"))
            leaving.callback(connection.close)
            connection.request("POST", "/v1/completions", long, {"Content-Type": "application/json"})
        time.sleep(0.1)  # the server has it, the engine is in a step
        while not _metric(base, "vllm:num_requests_waiting"):
            assert _get(f"{base}/v1/completions", long)[0] == 429


def test_a_killed_engine_ends_what_had_begun_and_answers_the_rest() -> None:
    """One live request has sent text, one waits behind it; the waiting one is asked again, others come after. So is one that has
    text and has sent none."""
    with serving(
        max_num_seqs=1, limits=Limits(max_waiting=1, max_body_bytes=4096), keys=["k1", "k2"], strict=True
    ) as base:
        assert _get(f"{base}/v1/models")[0] == 401 and _get(f"{base}/v1/models", Authorization="Bearer k2")[0] == 200
        assert _get(f"{base}/v1/completions", b" " * 5000, Authorization="Bearer k1")[0] == 413
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="k1", max_retries=0, timeout=60)
        with pytest.raises(openai.BadRequestError, match="best_off"):
            client.completions.create(model="small-sdar", prompt="a", extra_body={"best_off": 1})
        long = client.completions.create(
            model="small-sdar", prompt=ids_of(QUESTION), max_tokens=4096, stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )  # fmt: skip
        assert next(iter(long)).choices[0].text
        waiting: list[str] = []

        def wait(tokens: int = 8) -> None:
            waiting.append(
                client.completions.create(
                    model="small-sdar",
                    prompt=ids_of(QUESTION),
                    max_tokens=tokens,
                    extra_body={"ignore_eos": tokens > 8},
                )
                .choices[0]
                .text
            )

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: _metric(base, "vllm:num_requests_waiting") == 1, 30)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="small-sdar", prompt="a", max_tokens=4)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        os.kill(int(json.loads(_get(f"{base}/health")[2])["engine_pid"]), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="failed while it worked"):
            for _ in long:
                pass
        thread.join(120)
        assert len(waiting) == 1 and json.loads(_get(f"{base}/health")[2])["restarts"] == 1
        assert (
            client.completions.create(model="small-sdar", prompt=ids_of(QUESTION), max_tokens=8).choices[0].text
            == waiting[0]
        )
        begun = _metric(base, "vllm:time_to_first_token_seconds_count")
        thread = threading.Thread(target=wait, args=(1024,))
        thread.start()
        until(lambda: _metric(base, "vllm:time_to_first_token_seconds_count") > begun, 30)
        os.kill(int(json.loads(_get(f"{base}/health")[2])["engine_pid"]), signal.SIGKILL)
        thread.join(120)
        wait(1024)
        assert len(waiting) == 3 and waiting[1] == waiting[2]
        assert json.loads(_get(f"{base}/health")[2])["restarts"] == 2


@pytest.mark.parametrize("seed", range(40))
def test_text_in_pieces_is_the_text_of_the_whole_answer(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = _Bytes()
    ids = [rng.choice(b"ab\xc3\xa9 ") for _ in range(rng.randrange(30))]
    stops = ["".join(rng.choices("abé ", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
    params = SamplingParams(
        stop=stops, stop_token_ids=rng.choice([[], [32]]), include_stop_str_in_output=rng.random() < 0.5
    )
    generation = mosaic.Generation(
        prompt_ids=torch.zeros(1), token_ids=torch.tensor(ids, dtype=torch.int64), confidence=torch.zeros(len(ids)),
        finish="length", steps=1,
    )  # fmt: skip
    expected = completion(0, generation, params, tokenizer)  # type: ignore[arg-type]
    text, shown = AnswerText(tokenizer, params), ""
    while ids:
        count = rng.randrange(1, 5)
        shown += text.push(ids[:count])
        ids = ids[count:]
        assert expected.text.startswith(shown), "what is shown is never taken back"
    assert (shown + text.flush(), text.stopped, text.tokens) == (
        expected.text,
        expected.stop_reason,
        len(expected.token_ids),
    )


class _Bytes:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


@pytest.mark.soak
def test_a_thousand_sockets_get_their_answers_and_leave_nothing(base: str, alone: Any) -> None:
    prompts = [ids_of(f"{QUESTION} {place}?") for place in range(16)]
    asked = [{"prompt": one, "max_tokens": 32, "ignore_eos": True, "temperature": 0} for one in prompts]
    texts = [
        TOKENIZER.decode(alone(torch.tensor(one), gen_length=32, stop_at_eos=False).token_ids.tolist())
        for one in prompts
    ]
    processes = [os.getpid(), json.loads(_get(f"{base}/health")[2])["engine_pid"]]

    def load(count: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("server_load.py")), base.rpartition(":")[2], str(count)]
        ran = subprocess.run([*command, json.dumps(asked)], capture_output=True, text=True, check=False, timeout=300)
        assert ran.returncode == 0, ran.stderr[-2000:]
        found = json.loads(ran.stdout)
        got = {number: text for number, text in enumerate(found["texts"]) if text is not None}
        assert len(got) == count - -(-count // 3) and found["seconds"] < 120
        assert all(text == texts[number % 16] for number, text in got.items())
        until(lambda: _metric(base, "vllm:num_requests_running") == _metric(base, "vllm:num_requests_waiting") == 0, 30)

    load(64)
    before = [_held(process) for process in processes]
    load(1000)
    halfway = [_held(process)[2] for process in processes]
    load(1000)
    for process, (files, threads, _), middle in zip(processes, before, halfway, strict=True):
        now = _held(process)
        assert now[0] <= files + 2 and now[1] <= threads + 8 and now[2] <= 1.05 * middle


def _held(process: int) -> tuple[int, int, int]:
    """Open files, threads, and kilobytes of resident memory."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return len(os.listdir(f"/proc/{process}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])


def test_counters_are_shown_before_they_count() -> None:
    """vLLM's bench reports no diffusion if it finds none before its load."""
    shown = Metrics("a").text().decode()
    for name in ("denoising_steps", "canvas_positions", "committed_tokens"):
        assert f'vllm:diffusion_num_{name}_total{{model_name="a"}} 0.0\n' in shown


def test_a_bench_counts_what_a_server_did(base: str, tmp_path: Path) -> None:
    """From a process of its own, through the command."""
    saved = tmp_path / "found.json"
    command = [sys.executable, "-c", "from mosaic.cli import main; main()", "bench", "serve", "--model", "small-sdar"]
    command += ["--base-url", base, "--num-prompts", "7", "--input-len", "12", "--output-len", "40", "--ignore-eos"]
    sent = ["--max-concurrency", "3", "--prefix-len", "80"]
    until(lambda: _metric(base, "vllm:num_requests_running") == 0, 30)
    before = 32 * _metric(base, "vllm:diffusion_num_denoising_steps_total")
    ran = subprocess.run(
        [*command, *sent, "--goodput", "ttft:0.001", "--save", str(saved), "--json"], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found, shown = json.loads(saved.read_text()), json.loads(ran.stdout)
    assert (shown["completed"], shown["failed"], shown["total_output_tokens"]) == (7, 0, 7 * 40)
    assert found["output_lens"] == [40] * 7 and min(found["input_lens"]) > 92
    assert shown["request_goodput"] == 0 and shown["max_concurrent_requests"] == 3 and shown["cached_tokens"] > 0
    assert 0 < shown["median_ttft_ms"] <= shown["median_e2el_ms"] <= shown["p99_e2el_ms"] <= 1e3 * shown["duration"]
    assert shown["output_throughput"] == pytest.approx(7 * 40 / shown["duration"])
    assert shown["diffusion_committed_tokens"] == 7 * 40 and 1 <= 1 / shown["forwards_per_token"] <= 32
    assert (
        shown["diffusion_canvas_positions"] == 32 * _metric(base, "vllm:diffusion_num_denoising_steps_total") - before
    )
    assert (
        0 < shown["in_step_seconds"] <= shown["duration"] and shown["in_step_throughput"] >= shown["output_throughput"]
    )
    assert shown["peak_memory_bytes"] >= sum(series[0] for series in found["memory"]["committed"].values()) > 1e7
    refused = subprocess.run(
        [*command, *sent, "--extra-body", '{"temperature": -1}', "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert refused.returncode == 1 and json.loads(refused.stdout)["failed"] == 7
    assert "7 failed: status 400" in refused.stderr and "temperature" in refused.stderr


def test_a_port_in_use_is_refused_before_the_model_is_loaded(base: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from mosaic.cli import main; main()",
        "serve",
        "small-sdar",
        "--port",
        base.rpartition(":")[2],
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (
        ran.returncode == 2
        and "Address already in use; give another --port" in ran.stderr
        and "serving" not in ran.stderr
    )


def test_a_config_alone_is_served_with_random_weights_and_words_are_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: usage has as many tokens as words were sent, in a prompt or a chat, and answers have all of theirs."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    sizes |= {"vocab_size": 64, "intermediate_size": 48, "mask_token_id": 63, "eos_token_id": 5, "block_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": "sdar", "torch_dtype": "float32"}))
    run = "import atexit, gc; from mosaic import cli; atexit.register(lambda: print(gc.get_freeze_count())); cli.main()"
    command = [sys.executable, "-c", run, "serve", str(tmp_path), "--port", "0", "--host-budget", "0"]
    log, rng = tmp_path / "log", random.Random(31)
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, "--load-format", "dummy", "--policy", "none"], stdout=subprocess.PIPE, stderr=written, text=True
        )
    try:
        until(lambda: "serving" in log.read_text() or process.poll() is not None, 60)
        base = log.read_text().partition("serving")[2].split()[2]
        assert _get(f"{base}/v1/models", Host="evil.example")[0] == 403
        for field, preset in (("attention", "mage"), ("block_cache", "dc"), ("cache", "dual"), ("eviction", "focus")):
            code, _, said = _get(f"{base}/v1/completions", json.dumps({"prompt": "a", field: preset}).encode())
            assert code == 400 and f"does not allow '{preset}', it allows none".encode() in said
        for _ in range(8):
            words = "".join(
                rng.choice(["no", "Übung", "\u2013", "mask"]) + rng.choice([" ", "\n ", "\t"])
                for _ in range(rng.randint(1, 40))
            )
            for path, more in (
                ("completions", {"prompt": words}),
                ("chat/completions", {"messages": [{"role": "user", "content": words}]}),
            ):
                body = {"max_tokens": 9, "ignore_eos": True, **more}
                status, _, answer = _get(f"{base}/v1/{path}", json.dumps(body).encode())
                usage, (choice,) = json.loads(answer)["usage"], json.loads(answer)["choices"]
                assert (
                    status == 200 and usage["prompt_tokens"] == len(words.split()) and usage["completion_tokens"] == 9
                )
                assert len((choice.get("text") or choice["message"]["content"]).split()) == 9
        found = json.loads(
            _get(f"{base}/tokenize", json.dumps({"prompt": " ".join(map(str, range(1000)))}).encode())[2]
        )
        assert {*found["tokens"]} == {*range(64)} - {63, 5}, "never the mask, nor what ends an answer"
    finally:
        process.terminate()
        frozen, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and int(frozen) > 1e4, "what is imported is not looked through for garbage"
    for asked, says in (
        (["sdar-8b"], "--load-format dummy"),
        (["small", "--load-format", "best"], "auto"),
        (["small", "--policy", "no"], "none"),
    ):
        refused = CliRunner().invoke(app, ["serve", *asked, "--port", "0"])
        assert isinstance(refused.exception, UsageError | UnknownName) and says in str(refused.exception)
    logging.getLogger("mosaic.serving").warning("later")  # the standard error of those commands is closed
    said = capsys.readouterr().err
    assert "WARNING later" in said and "Logging error" not in said
    logging.basicConfig(handlers=[], force=True)  # as before those commands
