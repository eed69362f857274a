"""What callers, signals and errors do to a server: each gets an answer of its own, and the others theirs."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from failing_algorithm import FATAL, failing
from fastapi import FastAPI
from test_request_table import CONFIGS

from mosaic.decoding import GenerationConfig, Session
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import DoesNotFit, MosaicError, UsageError
from mosaic.models import load
from mosaic.runtime.compiled import CompiledModel
from mosaic.serving import EngineOptions, Limits
from mosaic.serving.app import create_app
from mosaic.serving.connections import Server
from mosaic.serving.engine import run_engine
from mosaic.serving.messages import Failed, Ready
from tests.test_server import running, until

MODEL = load("small-sdar")
SCHEMATHESIS = shutil.which("schemathesis", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
LIMITS = Limits(timeout_s=3.0, slow_s=0.5, max_connections=6)
LONG: dict[str, Any] = {"prompt": "Tell a story.", "max_tokens": 4096, "ignore_eos": True, "skip_special_tokens": False}
NAME = "small" + "-" * 4000 + "sdar"
"""Each piece of a stream has it: a few fill the buffers of a socket, however slow the machine is."""
SHORT: dict[str, Any] = {"prompt": "Tell a story.", "max_tokens": 8, "temperature": 0}


@contextmanager
def serving(limits: Limits = LIMITS, **engine: Any) -> Iterator[str]:
    """A server whose sockets take few bytes, in a thread of its own; its engine is a process."""
    options = EngineOptions(model="small-sdar", compile={"dtype": "float32", "host_budget": 0, "threads": 1}, **engine)
    server = Server(create_app(MODEL, NAME, options, limits), limits)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        with running(server, [listening]):
            base = f"http://127.0.0.1:{listening.getsockname()[1]}"
            until(lambda: server.started and get(f"{base}/health")[0] == 200, 120)
            yield base


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving() as found:
        yield found


def get(url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
    sent = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, sent, headers), timeout=60) as found:
            return found.status, _lower(found.headers), found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, _lower(error.headers), error.read().decode()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def asked(base: str, body: Any) -> tuple[int, dict[str, str], str]:
    return get(f"{base}/v1/completions", body)


def error_of(answer: tuple[int, dict[str, str], str]) -> tuple[int, str, str]:
    status, _, text = answer
    error = json.loads(text)["error"]
    assert error["code"] == status and "\n" not in error["message"]
    return status, error["type"], error["message"]


def connected(base: str) -> socket.socket:
    host, port = base.removeprefix("http://").split(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    found.settimeout(10)
    found.connect((host, int(port)))
    return found


def request(body: Any, *, length: int | None = None) -> bytes:
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {length or len(sent)}\r\n\r\n"
    return head.encode() + sent


def rest(opened: socket.socket) -> str:
    """What comes until the server closes the connection."""
    found = b""
    try:
        while part := opened.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found.decode()


def idle(base: str) -> bool:
    lines = get(f"{base}/metrics")[2].splitlines()
    counted = [line for line in lines if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))]
    return len(counted) == 2 and all(line.endswith(" 0.0") for line in counted)


def have_begun(base: str) -> int:
    """How many requests have had their first tokens, those of other tests too."""
    name = "vllm:time_to_first_token_seconds_count"
    return int(sum(float(line.split()[-1]) for line in get(f"{base}/metrics")[2].splitlines() if line.startswith(name)))


def test_others_are_answered_while_a_long_prompt_is_tokenised(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, began, may_end = Tokenizer.encode, threading.Event(), threading.Event()

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if "long" in text:
            began.set()
            assert may_end.wait(30), "nobody else was answered"
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = {"prompt": "long " * 1000, "max_tokens": 8, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asked, base, body)
        assert began.wait(30) and get(f"{base}/health")[0] == 200
        assert asked(base, {**body, "prompt": "3+4="})[0] == 200 and not answer.done()
        may_end.set()
        assert answer.result(60)[0] in (200, 400)


def test_who_does_not_read_is_cut_off_and_holds_nobody_up(base: str) -> None:
    expected = json.loads(asked(base, SHORT)[2])["choices"]
    with connected(base) as deaf:
        deaf.sendall(request({**LONG, "stream": True, "logprobs": 1}))  # some kilobytes a block
        assert deaf.recv(12) == b"HTTP/1.1 200"
        assert json.loads(asked(base, SHORT)[2])["choices"] == expected
        until(lambda: idle(base), 10)
        found = rest(deaf)
    assert found and "[DONE]" not in found and "error" not in found


def test_an_answer_on_a_kept_connection_does_not_wait_until_its_head_is_acknowledged(base: str) -> None:
    """A caller acknowledges it up to 40 ms later, except on a new connection."""
    took = []
    with closing(http.client.HTTPConnection(base.removeprefix("http://"))) as kept:
        for _ in range(8):
            began = time.monotonic()
            kept.request("GET", "/health")
            assert kept.getresponse().read()
            took.append(time.monotonic() - began)
    assert min(took[4:]) < 0.03


@pytest.mark.parametrize(
    ("sent", "trickle", "answered"),
    [
        (b"", b"", ""),
        (b"POST /v1/completions HTTP/1.1\r\n", b"a", ""),
        (request(SHORT, length=1000), b" ", "408"),
    ],
    ids=["nothing", "head", "body"],
)
def test_who_sends_too_slowly_is_cut_off(base: str, sent: bytes, trickle: bytes, answered: str) -> None:
    with connected(base) as slow:
        slow.sendall(sent)
        began, found = time.monotonic(), b""
        slow.settimeout(0.1)
        while time.monotonic() - began < 8 * LIMITS.slow_s:
            try:
                if trickle:
                    slow.send(trickle)
                if not (part := slow.recv(4096)):
                    break
                found += part
            except TimeoutError:
                continue
            except ConnectionError:
                break
        took = time.monotonic() - began
    assert LIMITS.slow_s <= took < 4 * LIMITS.slow_s
    head, _, body = found.decode().partition("\r\n\r\n")
    assert head[9:12] == answered
    if answered:
        assert error_of((408, {}, body))[1] == "timeout_error" and "connection: close" in head.lower()
    assert asked(base, SHORT)[0] == 200


def test_a_request_ends_when_its_time_is_over(base: str) -> None:
    """While the engine's process hangs."""
    engine, before, began = json.loads(get(f"{base}/health")[2])["engine_pid"], have_begun(base), time.monotonic()
    with ThreadPoolExecutor() as pool:
        answers = pool.map(asked, [base, base], [LONG, {**LONG, "stream": True}])
        until(lambda: have_begun(base) == before + 2, 10)
        os.kill(engine, signal.SIGSTOP)
        try:
            whole, (status, headers, text) = answers
            took = time.monotonic() - began
        finally:
            os.kill(engine, signal.SIGCONT)
    assert LIMITS.timeout_s <= took < 2 * LIMITS.timeout_s
    assert error_of(whole)[:2] == (504, "timeout_error") and "3 s" in whole[2]
    *begun, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert status == 200 and begun[0]["choices"][0]["text"] and last["error"]["code"] == 504
    assert headers["x-accel-buffering"] == "no", "nginx would hold a stream back"
    assert text.endswith("data: [DONE]\n\n")
    until(lambda: idle(base), 10)


def test_connections_beyond_the_limit_are_told_so_and_health_is_answered(base: str) -> None:
    until(lambda: asked(base, SHORT)[0] == 200, 10)  # those of other tests are closed
    idle_ones = [connected(base) for _ in range(LIMITS.max_connections)]
    try:
        answer = asked(base, SHORT)
        assert error_of(answer)[:2] == (503, "overloaded_error") and "6 connections" in answer[2]
        assert answer[1]["retry-after"] == "1" and answer[1]["connection"] == "close"
        assert get(f"{base}/health")[0] == get(f"{base}/metrics")[0] == 200
    finally:
        for one in idle_ones:
            one.close()
    until(lambda: asked(base, SHORT)[0] == 200, 10)


def test_the_mask_tokens_text_is_text_and_its_id_is_refused(base: str) -> None:
    ids, mask = Tokenizer(MODEL.path), MODEL.architecture.mask_token_id
    text = ids.decode([mask], skip_special_tokens=False)
    assert asked(base, {**SHORT, "prompt": f"What does {text} mean?"})[0] == 200
    status, _, found = get(f"{base}/tokenize", {"prompt": f"{text} a {text}{text}"})
    tokens = json.loads(found)["tokens"]
    assert (
        mask not in tokens
        and json.loads(get(f"{base}/detokenize", {"tokens": tokens})[2])["prompt"] == f"{text} a {text}{text}"
    )
    status, kind, said = error_of(asked(base, {**SHORT, "prompt": [5, mask, 5]}))
    assert (status, kind) == (400, "invalid_request_error") and f"mask token {mask} at position 1" in said


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ('"ключ": 1', 200),
        ('"a\\r\\nX-Evil: 1": 1', 200),
        ('"\\ud800": 1', 200),
        (", ".join(f'"{"k" * 50}{number}": 1' for number in range(2000)), 200),
        ('"model": "\\ud800"', 404),
        ('"stop": ["\\ud800"]', 200),
        ('"algorithm": "\\ud800"', 400),
        ('"seed": 1' + "0" * 40, 200),
        ('"seed": -5', 200),
        ('"temperature": NaN', 400),
        ('"temperature": 1e308', 200),
        ('"messages": ' + "[" * 900 + "]" * 900, 200),
        ('"stop_token_ids": [1' + "0" * 40 + "]", 200),
    ],
    ids=[
        "words",
        "lines",
        "surrogates",
        "many",
        "model",
        "stop",
        "name",
        "seed",
        "below",
        "nan",
        "hot",
        "deep",
        "token",
    ],
)
def test_absurd_fields_are_answered_or_refused_by_name(base: str, more: str, status: int) -> None:
    body = json.dumps(SHORT)[:-1] + f", {more}}}"
    code, headers, found = get(f"{base}/v1/completions", body)
    assert code == status, found
    assert "x-evil" not in headers and len(headers.get("x-mosaic-ignored", "")) < 2000
    if status != 200:
        error_of((code, headers, found))


def test_keys_that_begin_or_end_with_spaces_are_named_in_a_header(base: str) -> None:
    code, headers, _ = get(f"{base}/v1/completions", {**SHORT, "": 1, " ": 1, " a": 1, "b c": 1, "d ": 1})
    assert (code, headers["x-mosaic-ignored"]) == (200, "'', ' ', ' a', b c, 'd '")


def test_the_document_says_what_a_body_may_have(base: str) -> None:
    document = json.loads(get(f"{base}/openapi.json")[2])
    post = document["paths"]["/v1/completions"]["post"]
    fields = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"} <= post["responses"].keys()
    for name, bad, good in (
        ("threshold", 0, 1),
        ("threshold", 1.1, 0.5),
        ("max_tokens", 0, 1),
        ("temperature", -0.1, 0),
        ("n", 129, 1),
    ):
        schema = fields[name]["anyOf"][0]
        assert not _within(schema, bad) and _within(schema, good)
        assert asked(base, {**SHORT, name: bad})[0] == 400 and asked(base, {**SHORT, name: good})[0] == 200
    assert "max_completion_tokens" in fields and "logit_bias" not in fields and "messages" not in fields
    assert get(f"{base}/docs")[0] == 404, "its scripts come from elsewhere"
    status, headers, _ = get(f"{base}/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


def _within(schema: dict[str, Any], value: float) -> bool:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return schema.get("exclusiveMinimum", -math.inf) < value <= high and value >= low


def test_each_request_has_a_line_and_an_id_and_nothing_of_its_text(base: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mosaic")
    secret = {**SHORT, "prompt": "sesame sesame", "stop": ["sesame"]}
    sent = [
        ("one.1", secret),
        ("two-2", {**secret, "stream": True}),
        ("three:3", {**secret, "n": 0}),
        ("bad id", secret),
    ]
    found = [get(f"{base}/v1/completions", body, **{"X-Request-Id": name}) for name, body in sent]
    found += [get(f"{base}/sesame%0aopen"), get(f"{base}/health")]
    ids = [headers["x-request-id"] for _, headers, _ in found]
    assert ids[:3] == ["one.1", "two-2", "three:3"] and ids[3].startswith("req-") and len({*ids}) == 6
    with connected(base) as leaving:
        leaving.sendall(request({**LONG, "stream": True}))
        assert leaving.recv(12) == b"HTTP/1.1 200"

    def lines() -> list[dict[str, Any]]:
        return [record.fields for record in caplog.records if hasattr(record, "fields")]

    until(lambda: lines() and lines()[-1].get("ended") == "left", 10)
    told = {line["id"]: line for line in lines()}
    assert {*ids[:5]} <= told.keys() and ids[5] not in told, "of health only what is wrong"
    usage = json.loads(found[0][2])["usage"]
    for name in ids[:2]:
        line = told[name]
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert [line[key] for key in ("prompt_tokens", "tokens", "forwards")] == [
            usage[key] for key in ("prompt_tokens", "completion_tokens", "forwards")
        ]
        assert 0 < line["first_token_s"] <= line["seconds"] < 5 and line["ended"] in ("stop", "length")
    assert (told["three:3"]["status"], told["three:3"]["ended"]) == (400, "invalid_request_error")
    assert told[ids[4]]["path"] == "/sesame%0Aopen"
    assert "sesame sesame" not in caplog.text and "\nopen" not in caplog.text


@pytest.mark.soak
@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
def test_random_bodies_of_the_document_never_fail_the_server(tmp_path: Path) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
    with serving(replace(LIMITS, timeout_s=20, slow_s=20, max_connections=100)) as base:
        command = [str(SCHEMATHESIS), "run", f"{base}/openapi.json", "--checks", checks, "--max-examples", "100"]
        ran = subprocess.run(
            [*command, "--no-color"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
        )
        assert ran.returncode == 0, ran.stdout[-5000:]
        assert json.loads(get(f"{base}/health")[2])["restarts"] == 0


@pytest.mark.soak
def test_an_exception_in_a_step_is_told_to_those_it_hit_and_service_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with serving(replace(LIMITS, timeout_s=60), base=failing(MODEL.architecture)) as base:
        fatal, before = {**LONG, "prompt": [5, FATAL, 5]}, json.loads(asked(base, SHORT)[2])["choices"]
        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(asked, base, {**LONG, "max_tokens": 2048, "stream": True}) for _ in range(3)]
            until(lambda: not idle(base), 10)
            time.sleep(0.5)
            found = get(f"{base}/v1/completions", fatal, **{"X-Request-Id": "fatal"})
            assert error_of(found)[:2] == (503, "engine_error")
            assert any("exit code 1" in line and "fatal" in line for line in caplog.messages)
            for text in (stream.result()[2] for stream in streams):
                *_, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                assert last["error"]["type"] == "engine_error" and text.endswith("data: [DONE]\n\n")
        until(lambda: get(f"{base}/health")[0] == 200, 60)
        assert 1 <= json.loads(get(f"{base}/health")[2])["restarts"] <= 2
        assert json.loads(asked(base, SHORT)[2])["choices"] == before and idle(base)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "drain_s"), [(signal.SIGTERM, 30), (signal.SIGTERM, 2), (signal.SIGINT, 30)])
def test_a_signal_lets_running_requests_end_unless_somebody_hurries(number: int, drain_s: int) -> None:
    """Through the command: ten streams run, the signal comes twice, new callers are refused. Who hurries waits for no caller."""
    hurries = number == signal.SIGINT
    all_end = drain_s > 10 and not hurries
    command = [sys.executable, "-c", "from mosaic.cli import main; main()", "serve", "small-sdar", "--port", "0"]
    command += ["--threads", "1", "--drain-timeout", str(drain_s), "--log-format", "json"]
    key, environment = {"Authorization": "Bearer two"}, {**os.environ, "MOSAIC_API_KEY": "one two"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        said = ""
        while "serving" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        base = re.findall(r"http://[^\s\"]+", said)[0]
        engine = json.loads(get(f"{base}/health")[2])["engine_pid"]
        tokens = 400 if all_end else 4096
        assert asked(base, SHORT)[0] == 401
        found: list[str] = []

        def ask() -> None:
            body = {**LONG, "max_tokens": tokens, "stream": True}
            found.append(get(f"{base}/v1/completions", body, **key)[2])

        threads = [threading.Thread(target=ask) for _ in range(10)]
        for thread in threads:
            thread.start()
        until(lambda: re.search(r"time_to_first_token_seconds_count{.*} 10", get(f"{base}/metrics")[2]) is not None, 30)
        slow = socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2])))
        with closing(slow):
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer two\r\nContent-Length: 9\r\n\r\n"
            slow.sendall(head.encode() * hurries)
            server.send_signal(number)
            until(lambda: _refused(base), 10)
            server.send_signal(number)
            for thread in threads:
                thread.join(60)
            began = time.monotonic()
            assert server.wait(30) == 0 and (not hurries or time.monotonic() - began < 5)
        lines = [json.loads(line) for line in server.stderr]
    assert sum(line.get("path") == "/v1/completions" and line["status"] == 200 for line in lines) >= 10
    assert not any("exception" in line for line in lines)
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    assert len(found) == 10 and all(text.endswith("data: [DONE]\n\n") for text in found)
    ends = [json.loads(text.splitlines()[-4][6:]) for text in found]
    if all_end:
        assert {end["choices"][0]["finish_reason"] for end in ends} == {"length"}
    else:
        assert {end["error"]["code"] for end in ends} == {503}


@pytest.mark.parametrize(
    ("asked", "answer"), [(b"", b""), (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 404")]
)
def test_who_connects_while_the_server_begins_to_end_is_answered_and_does_not_hold_it(
    asked: bytes, answer: bytes
) -> None:
    """The signal comes between the connection and the server's note of it; some ask nothing."""
    app = FastAPI()
    app.state.engine = SimpleNamespace(end=lambda: None)
    server = Server(app, Limits(drain_s=30))

    async def serve(late: socket.socket) -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        late.connect(server.servers[0].sockets[0].getsockname())
        late.sendall(asked)
        server.should_exit = True
        time.sleep(0.15)  # the server is due to look whether it ends
        await asyncio.wait_for(serving, 5)
        assert late.recv(len(answer) or 1) == answer

    with socket.socket() as late:
        asyncio.run(serve(late))


def _refused(base: str) -> bool:
    try:
        return asked(base, SHORT)[0] == 503  # 401 while it listens
    except urllib.error.URLError:
        return True


@pytest.mark.soak
def test_a_signal_ends_a_server_that_still_loads() -> None:
    command = f"ulimit -n 200; exec {sys.executable} -c 'from mosaic.cli import main; main()' serve small-sdar --port 0"
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert "136 connections at most" in server.stderr.readline()
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, said = server.communicate(timeout=60)
    assert (server.returncode, said) == (0, "") and time.monotonic() - began < 4


@pytest.mark.parametrize("on_card", [True, False])
@pytest.mark.parametrize("warm", [True, False, None])
@pytest.mark.parametrize(
    "refused", [None, UsageError("no ladder"), DoesNotFit("no room", needed_bytes=2, available_bytes=1)]
)
def test_a_server_is_warm_on_a_card_and_starts_where_that_cannot_be_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_card: bool, warm: bool | None, refused: MosaicError | None
) -> None:
    asked = list[dict[str, int]]()

    def warmed(session: Session, config: GenerationConfig, **sizes: int) -> None:
        asked.append(sizes)
        if refused is not None:
            raise refused

    monkeypatch.setattr(Session, "warm", warmed)
    monkeypatch.setattr(CompiledModel, "asynchronous", on_card)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["sdar"], "max_position_embeddings": 96}))
    ours, theirs = Pipe()
    ours.send([None])  # it ends when it is ready
    run_engine(EngineOptions(model=str(tmp_path), load_format="dummy", max_num_seqs=5000, warm=warm), theirs)
    assert asked == [{"requests": 1024, "tokens": 96}] * (on_card if warm is None else warm)
    (said,) = ours.recv()
    assert said == Failed(str(refused)) if warm and refused else isinstance(said, Ready)
