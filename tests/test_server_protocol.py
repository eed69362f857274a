"""What goes back beside text: probabilities, canvases, plans and tokens; and options under the names of other engines."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch
from starlette.testclient import TestClient

import mosaic
from mosaic.decoding import GenerationConfig, Submission
from mosaic.decoding.algorithms import decides_by_probability
from mosaic.decoding.config import resolve
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import DoesNotFit, UsageError
from mosaic.jobs.names import NAMES, XARGS, own_names
from mosaic.models import load
from mosaic.serving import EngineOptions
from mosaic.serving.app import create_app
from mosaic.serving.gate import hosts_of
from mosaic.serving.messages import Ended, Frame, Fresh
from mosaic.serving.protocol import MARK
from mosaic.serving.supervisor import AnswerLost
from tests.test_server import COMPILE, MODEL, QUESTION, TOKENIZER, _client, _get, ids_of, serving, until

DOCS = Path(__file__).parents[1] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving(policies=["mage", "focus"]) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    with mosaic.compile(MODEL, seed=0, **COMPILE) as model:
        yield lambda prompt, **options: model.generate(torch.tensor(prompt), GenerationConfig(**options))[0]


def ask(base: str, path: str, **body: Any) -> Any:
    """The answer to a body; the events of a stream."""
    code, _, found = _get(f"{base}/{path}", json.dumps(body).encode())
    assert code == 200, found
    if not body.get("stream"):
        return json.loads(found)
    lines = [line.removeprefix("data: ") for line in found.decode().splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refusal(base: str, **body: Any) -> str:
    code, _, found = _get(f"{base}/v1/completions", json.dumps({"prompt": "a", **body}).encode())
    assert code == 400
    return str(json.loads(found)["error"]["message"])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_that_tokens_were_committed_by(base: str, alone: Any, temperature: float) -> None:
    prompt = ids_of(QUESTION)
    asked: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": temperature,
        "seed": 3,
        "ignore_eos": True,
    }
    expected = alone(prompt, gen_length=24, temperature=temperature, seed=3, stop_at_eos=False)
    logs = expected.confidence.double().log().tolist()
    whole = ask(base, "v1/completions", **asked, logprobs=0)["choices"][0]
    assert whole["logprobs"]["token_logprobs"] == pytest.approx(logs, abs=1e-6) and min(logs) < max(logs)
    assert whole["logprobs"]["tokens"] == [
        TOKENIZER.decode([one], skip_special_tokens=False) for one in expected.token_ids.tolist()
    ]
    offsets = whole["logprobs"]["text_offset"]
    shown = [
        (at, text) for at, text in zip(offsets, whole["logprobs"]["tokens"], strict=True) if not text.startswith("[")
    ]
    assert len(shown) > 5 and all(whole["text"][at : at + len(text)] == text for at, text in shown)
    pieces = ask(base, "v1/completions", **asked, logprobs=0, stream=True)
    found = [one["choices"][0]["logprobs"] for one in pieces]
    assert [value for one in found if one for value in one["token_logprobs"]] == whole["logprobs"]["token_logprobs"]
    assert "".join(one["choices"][0]["text"] for one in pieces) == whole["text"]


def test_scores_that_are_no_probabilities_are_known_to_be_none() -> None:
    dream = load("dream-7b").architecture
    ways: list[dict[str, Any]] = [
        {},
        {"alg": "entropy"},
        {"alg": "maskgit_plus", "alg_temp": 0.5},
        {"alg": "maskgit_plus"},
    ]
    found = [decides_by_probability(resolve(GenerationConfig(gen_length=8, **way), dream), dream) for way in ways]
    assert found == [True, False, False, True]


def test_a_chats_logprobs_are_read_by_openais_client(base: str) -> None:
    found = _client(base).chat.completions.create(
        model="small-sdar", messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], max_tokens=16,
        temperature=0, logprobs=True, top_logprobs=1, extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 16
    assert "".join(one.token for one in logprobs.content) == found.choices[0].message.content
    for one in logprobs.content:
        assert (
            one.logprob <= 0
            and one.top_logprobs[0].logprob == one.logprob
            and bytes(one.bytes or []) == one.token.encode()
        )
    with pytest.raises(openai.BadRequestError, match="text alone"):
        image: Any = [{"type": "image_url", "image_url": {"url": "a"}}]
        _client(base).chat.completions.create(model="small-sdar", messages=[{"role": "user", "content": image}])


def test_what_a_stop_cuts_has_no_logprobs_behind_it(base: str) -> None:
    asked: dict[str, Any] = {
        "prompt": ids_of("Tell a story."),
        "max_tokens": 64,
        "ignore_eos": True,
        "logprobs": 0,
        "skip_special_tokens": False,
    }
    whole = ask(base, "v1/completions", **asked)["choices"][0]
    stop = whole["text"][10:13]
    for stream in (False, True):
        found = ask(base, "v1/completions", **asked, stop=stop, stream=stream)
        choices = [one["choices"][0] for one in found] if stream else found["choices"]
        text = "".join(one["text"] for one in choices)
        tokens = [token for one in choices if one["logprobs"] for token in one["logprobs"]["tokens"]]
        assert text == whole["text"][: whole["text"].index(stop)] and choices[-1]["finish_reason"] == "stop"
        assert tokens == whole["logprobs"]["tokens"][: len(tokens)] and len(tokens) < 64
        assert stop in "".join(tokens) and stop not in "".join(tokens[:-1])
        if not stream:
            assert 0 < found["usage"]["forwards"] <= 64


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"logprobs": 2}, "1 at most"), ({"prompt": ["a"] * 1025}, "at most 1,024 prompts"),
        ({"response_format": {"type": "json_object"}}, "no decoding algorithm"), ({"tools": [{}]}, "no tools"),
        ({"logprobs": 1, "temperature": 0.5}, "temperature 0"), ({"logprobs": "a"}, "number"),
        ({"diffusion_frames": True}, "stream"), ({"stream_mode": "all"}, "denoise"), ({"max_nfe": 3}, "give 'steps'"),
        ({"stream": "yes"}, "true or false"), ({"vllm_xargs": {"diffusion_pinned": 1}}, "diffusion_pinned"),
        ({"block_size": 4, "block_length": 8}, "same option"), ({"attention": "mage+flashblock"}, "'flashblock'"),
        ({"eviction": "focus-public:keep=4"}, "focus-public"), ({"cache": "dual"}, "allows focus, mage"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_by_name(base: str, body: dict[str, Any], says: str) -> None:
    assert says in refusal(base, **body)


class Hasty:
    """An engine that has told all before anybody reads."""

    state, failure, longest, restarts, waiting, step_s, pid, started = "ready", "", 0, 0, 0, 0.0, None, True

    async def ready(self) -> None:
        """It is."""

    def ask(self, _: Any, __: Any, heard: Callable[[Any], object], **___: Any) -> Callable[[], object]:
        """Tell all that is to be told, in the next turn of the loop."""
        asyncio.get_running_loop().call_soon(self.tell, heard)
        return lambda: None

    def tell(self, heard: Callable[[Any], object]) -> None:
        try:
            for told in self.telling():
                heard(told)
        except Exception as error:
            heard(error)

    def telling(self) -> Iterator[Any]:
        ids = TOKENIZER.encode("one two three four")
        for at, token in enumerate(ids):
            yield {0: Fresh([token], frame=Frame(at + 1, 0, 9, []), steps=at + 1)}
        yield Ended(number=1, finishes=["length"], steps=[len(ids)])

    async def close(self) -> None:
        """Nothing."""


class Lost(Hasty):
    """Such an engine, without canvases, that ends `losses` times when it has told its first token."""

    def __init__(self, losses: int) -> None:
        self.losses = losses

    def telling(self) -> Iterator[Any]:
        for told in super().telling():
            yield told if isinstance(told, Ended) else {0: told[0]._replace(frame=None)}
            if self.losses > 0:
                self.losses -= 1
                raise AnswerLost("the engine has failed.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("losses", [0, 1, 2])
def test_who_was_sent_nothing_is_asked_again_once_and_counts_once(losses: int, stream: bool) -> None:
    """The first token may begin a stop string, so a stream holds it back, too."""
    lost, text, ended = cast(Any, Lost(losses)), "one two three four", losses < 2
    client = TestClient(create_app(MODEL, "m", EngineOptions(model="small-sdar"), engine=lambda *_: lost))
    found = client.post("/v1/completions", json={"prompt": "a", "stop": f"{text} five", "stream": stream})
    lines = [line for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    counted = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert counted["vllm:time_to_first_token_seconds_count"] == 1
    assert counted.get("vllm:e2e_request_latency_seconds_count", 0) == ended
    assert counted["vllm:generation_tokens_total"] == len(TOKENIZER.encode(text)) * ended
    if ended:
        pieces = [line.removeprefix("data: ") for line in found.text.splitlines() if "{" in line]
        assert "".join(json.loads(one)["choices"][0]["text"] for one in pieces) == text
    else:
        assert (found.status_code, found.json()["error"]["type"]) == (503, "engine_error")


@pytest.mark.parametrize(
    ("host", "address", "keys", "own"),
    [
        ("127.0.0.1", "127.0.0.1", (), "localhost"), ("::1", "::1", (), "[::1]"), ("Box", "127.0.1.1", (), "box"),
        ("0.0.0.0", "0.0.0.0", (), None), ("::", "::", (), None), ("localhost", "127.0.0.1", ("k",), None),
    ],
)  # fmt: skip
def test_without_keys_a_loopback_address_is_asked_under_its_own_names_alone(
    host: str, address: str, keys: tuple[str, ...], own: str | None
) -> None:
    """A page can have its own name resolve to 127.0.0.1, or ask under ours; `own` is None where any name will do."""
    hasty: Any = Hasty()
    app = create_app(
        MODEL, "m", EngineOptions(model="small-sdar"), engine=lambda *_: hasty, hosts=hosts_of(host, address), keys=keys
    )
    client, good = TestClient(app), {"localhost", "LocalHost", "127.0.0.1", "[::1]", own or "localhost"}
    bad = {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "box.", "::1", "[::2]", "127.0.0.2", ""}
    for name, port in product([*good, *bad], ("", ":8000")):
        found = client.get("/health", headers={"Host": name + port})
        if own is None or name in good:
            assert found.status_code == 200
            continue
        error = found.json()["error"]
        assert (found.status_code, error["code"], error["type"]) == (403, 403, "permission_error")
        assert repr(name + port) in error["message"] and "localhost, 127.0.0.1, [::1]" in error["message"]
        asked = client.post("/v1/completions", json={"prompt": "a"}, headers={"Host": name + port})
        assert asked.status_code == 403 and asked.headers["x-request-id"]
    for name, port in product([*good, *bad, "null"], ("", ":3000")):
        origin = name if name == "null" else f"http://{name}{port}"
        found = client.post(
            "/v1/completions", content='{"prompt": "a"}',
            headers={"Host": "localhost", "Origin": origin, "Content-Type": "text/plain", "Authorization": "Bearer k"},
        )  # fmt: skip
        assert found.status_code == (200 if own is None or name in good else 403), origin
        if found.status_code == 403:
            error = found.json()["error"]
            assert error["type"] == "permission_error" and f"Origin is {origin!r}" in error["message"]


class Silent(Hasty):
    """An engine that has nothing to tell yet."""

    asked = left = 0

    def ask(self, *_: Any, **__: Any) -> Callable[[], object]:
        self.asked += 1
        return self.leave

    def leave(self) -> None:
        self.left += 1


def test_options_that_were_read_before_are_not_taken_for_others_that_look_alike(base: str) -> None:
    assert ask(base, "v1/completions", prompt="a", max_tokens=4, n=1, temperature=1)["usage"]["completion_tokens"] <= 4
    assert "n: " in refusal(base, max_tokens=4, n=True, temperature=1)
    assert "temperature" in refusal(base, max_tokens=4, n=1, temperature=True)
    assert "max_tokens" in refusal(base, max_tokens=4.0, n=1, temperature=1)


@pytest.mark.parametrize("key", ["attention", "stop", "prompt"])
def test_no_depth_of_a_body_is_the_servers_failure(key: str) -> None:
    engine = cast(Any, Silent())
    client = TestClient(create_app(MODEL, "m", EngineOptions(model="small-sdar"), engine=lambda *_: engine))
    for depth in (*range(1, 900, 100), *range(900, 1000, 3), 100_000):
        text = f'{{"{key}": {"[" * depth}{"]" * depth}, "messages": []}}'
        for path in ("completions", "chat/completions"):
            found = client.post(f"/v1/{path}", content=text)
            assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error"), depth


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_there_is_anything_to_send_is_cancelled(stream: bool) -> None:
    silent, sent = Silent(), list[Any]()
    body = json.dumps({"prompt": "a", "stream": stream}).encode()

    async def ask_and_leave() -> None:
        app = create_app(MODEL, "m", EngineOptions(model="small-sdar"), engine=lambda *_: cast(Any, silent))
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            while not silent.asked:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await asyncio.wait_for(app(scope | {"http_version": "1.1"}, receive, send), 5)

    asyncio.run(ask_and_leave())
    assert (silent.asked, silent.left, sent[0]["status"]) == (1, 1, 499)


def test_an_answer_ends_once_behind_all_of_its_text_and_what_is_known_together_is_sent_together() -> None:
    async def ask_it() -> list[Any]:
        hasty: Any = Hasty()
        app = create_app(MODEL, "m", EngineOptions(model="small-sdar"), engine=lambda *_: hasty)
        body = json.dumps({"prompt": "a", "stream": True, "diffusion_frames": True}).encode()
        waiting, sent = [{"type": "http.request", "body": body, "more_body": False}], list[bytes]()

        async def receive() -> Any:
            return waiting.pop() if waiting else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
        }
        await app(scope, receive, send)
        (told,) = filter(None, sent)
        assert told.endswith(b"data: [DONE]\n\n")
        lines = told.decode().splitlines()
        return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]

    found = asyncio.run(ask_it())
    assert [one["finish_reason"] for one in found if one["finish_reason"]] == ["length"] == [found[-1]["finish_reason"]]
    assert "".join(one["text"] for one in found) == TOKENIZER.decode(TOKENIZER.encode("one two three four"))


def test_a_conversation_may_have_nothing_as_a_content(base: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "b"},
    ]
    same = [one | {"content": one["content"] or ""} for one in messages]
    found = [ask(base, "v1/chat/completions", messages=each, max_tokens=8)["choices"] for each in (messages, same)]
    assert found[0] == found[1]
    code, _, said = _get(
        f"{base}/v1/chat/completions", json.dumps({"messages": [messages[1] | {"tool_calls": [{}]}]}).encode()
    )
    assert code == 400 and b"tool_calls" in said


def test_canvases_fill_in_behind_text_that_is_the_same_without(base: str) -> None:
    asked: dict[str, Any] = {"prompt": ids_of(QUESTION), "max_tokens": 40, "ignore_eos": True, "stream": True}
    plain, framed = (ask(base, "v1/completions", **asked, **more) for more in ({}, {"diffusion_frames": True, "n": 1}))
    texts = ["".join(one["choices"][0]["text"] for one in found) for found in (plain, framed)]
    assert texts[0] == texts[1] and not any("diffusion_frame" in one for one in plain)
    shown, steps, seen = "", 0, 0
    for one in framed:
        shown += one["choices"][0]["text"]
        if (frame := one.get("diffusion_frame")) is None:
            continue
        assert one["choices"][0]["text"] == "" and frame["step"] > steps and 0 <= frame["masked"] <= 40
        steps, seen = frame["step"], seen + (MARK in frame["text"])
        decided = frame["text"].partition(MARK)[0]
        assert texts[0][len(shown) :].startswith(decided.rstrip("\ufffd")), "what is decided stays as it is"
    assert steps > 3 and seen > 1
    chat = ask(base, "v1/chat/completions", messages=[{"role": "user", "content": QUESTION}], max_tokens=16, stream=True,
               stream_mode="denoise")  # fmt: skip
    frames = [one for one in chat if "diffusion_frame" in one]
    assert frames and all(one["choices"][0]["delta"] == {} for one in frames)


def test_other_engines_names_mean_the_same(base: str) -> None:
    asked: dict[str, Any] = {"prompt": ids_of(QUESTION), "temperature": 0}
    own = ask(
        base, "v1/completions", **asked, max_tokens=16, steps=2, remasking="low_confidence_static", ignore_eos=True
    )
    theirs = ask(
        base, "v1/completions", **asked, max_new_tokens=16, dllm_denoising_steps=2, remasking_strategy="low_confidence_static",
        ignore_eos=True,
    )  # fmt: skip
    vllms = ask(
        base, "v1/completions", **asked, max_completion_tokens=16, vllm_xargs={"diffusion_max_steps": 2},
        remasking="low_confidence_static", ignore_eos=True,
    )  # fmt: skip
    assert own["choices"] == theirs["choices"] == vllms["choices"]
    assert own["usage"]["forwards"] == theirs["usage"]["forwards"] < ask(
        base, "v1/completions", **asked, max_tokens=16, steps=8, remasking="low_confidence_static", ignore_eos=True
    )["usage"]["forwards"]  # fmt: skip


def test_names_are_those_of_the_docs() -> None:
    said = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert said == {**{name: own for name, (own, _) in NAMES.items()}, **XARGS}
    with pytest.raises(UsageError, match="two values"):
        own_names({"max_tokens": 4, "max_new_tokens": 5})
    assert own_names({"max_tokens": 4, "max_new_tokens": 4}) == {"max_tokens": 4}


def test_a_plan_says_whether_when_and_what(base: str) -> None:
    now = ask(base, "plan", prompt=ids_of(QUESTION), max_tokens=64)
    assert (now["fits"], now["wait_steps"], now["wait_seconds"]) == ("now", 0, 0)
    longer = ask(base, "plan", messages=[{"role": "user", "content": QUESTION}], max_tokens=1024)
    assert longer["prompt_tokens"] == now["prompt_tokens"] and longer["bytes"]["kv"] > now["bytes"]["kv"] > 0
    assert _get(f"{base}/plan", b'{"prompt": "a", "steps": -1}')[0] == 400


def test_a_forecast_is_what_submitting_does() -> None:
    """Of random lengths, beside whatever is live, in a budget that holds a few."""
    rng, seen = random.Random(0), set[str]()
    with mosaic.compile(MODEL, seed=0, budget="64MiB", **COMPILE) as model, model.session() as session:
        for _ in range(16):
            one = Submission(
                prompt=torch.full((rng.randrange(1, 200),), 5),
                config=GenerationConfig(gen_length=rng.choice([900, 2000, 4000, 8000])),
            )
            told = session.forecast(one)
            seen.add(told.fits)
            try:
                session.submit_all([one])
                assert (told.fits, told.steps, told.why) == ("now", 0, "")
            except DoesNotFit as refused:
                assert (told.fits, told.steps) == ("never" if refused.never else "later", refused.steps)
            assert told.positions >= one.config.gen_length and told.state_bytes["kv"] % told.positions == 0
            session.advance(rng.randrange(3))
            if rng.random() < 0.2 and session.live:
                session.cancel(session.live[0])
    assert seen == {"now", "later", "never"}


def test_metrics_count_tokens_prefixes_and_refusals(base: str) -> None:
    def now() -> dict[str, float]:
        lines = _get(f"{base}/metrics")[2].decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def one(name: str, more: str = "") -> str:
        return f'vllm:{name}{{model_name="small-sdar"{more}}}'

    before, prompt = now(), ids_of(QUESTION * 8)
    used = [ask(base, "v1/completions", prompt=prompt, max_tokens=32, ignore_eos=True)["usage"] for _ in range(2)]
    refusal(base, max_tokens=-1)
    refusal(base, prompt=[5] * 9000)
    assert _get(f"{base}/v1/nothing")[0] == 404 and _get(f"{base}/v1/completions", b'{"model": "b"}')[0] == 404
    after = now()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    cached = used[1]["prompt_tokens_details"]["cached_tokens"]
    assert grown[one("prefix_cache_queries_total")] == grown[one("prompt_tokens_total")] == 2 * len(prompt)
    assert grown[one("prefix_cache_hits_total")] == cached > 0
    assert grown[one("request_generation_tokens_sum")] == grown[one("generation_tokens_total")] == 64
    assert grown[one("diffusion_num_denoising_steps_total")] == sum(one["forwards"] for one in used)
    reasons = {
        reason: grown[one("admission_rejections_total", f',reason="{reason}"')]
        for reason in ("does_not_fit", "not_found")
    }
    assert reasons == {"does_not_fit": 1, "not_found": 1}
    assert 0 <= after[one("kv_cache_usage_perc")] <= 1
    plan = {name: size for name, size in after.items() if name.startswith("mosaic:plan_bytes")}
    assert (
        plan
        and sum(plan.values()) > after['mosaic:memory_bytes{kind="planned",model_name="small-sdar",pool="weights"}'] > 0
    )


def test_tokens_become_text_again(base: str) -> None:
    rng = random.Random(0)
    for _ in range(5):
        text = "".join(rng.choices("abc éß漢\n.,", k=rng.randrange(1, 40)))
        found = ask(base, "tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert ask(base, "detokenize", tokens=found["tokens"])["prompt"] == text
    info = json.loads(_get(f"{base}/tokenizer_info")[2])
    assert info["eos_token"] and "messages" in info["chat_template"]
    assert _get(f"{base}/detokenize", b'{"tokens": [-1]}')[0] == _get(f"{base}/detokenize", b"[]")[0] == 400


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        {}, {"block_length": 8, "steps": 8}, {"remasking": "random", "seed": 5}, {"algorithm": "fast-dllm", "threshold": 0.8},
        {"algorithm": "fast-dllm", "cache": "dual", "block_length": 8}, {"cache": "sparse:retention=0.5", "block_length": 8},
        {"cfg_scale": 0.5}, {"temperature": 0.9, "seed": 4},
    ],
)  # fmt: skip
def test_every_way_to_decide_tells_its_probabilities(options: dict[str, Any]) -> None:
    """Of the model that changes all of its keys, by tables and by generators."""
    small = load("small")
    prompt = Tokenizer(small.path).encode_chat([{"role": "user", "content": QUESTION}])
    with mosaic.compile(small, seed=0, **COMPILE) as model:
        expected = model.generate(torch.tensor(prompt), GenerationConfig(gen_length=32, stop_at_eos=False, **options))[
            0
        ]
    with serving(model="small") as base:
        found = ask(
            base, "v1/completions", prompt=prompt, max_tokens=32, ignore_eos=True, logprobs=0, stream=True, diffusion_frames=True,
            **options,
        )  # fmt: skip
    values = [
        value
        for one in found
        if one["choices"][0]["logprobs"]
        for value in one["choices"][0]["logprobs"]["token_logprobs"]
    ]
    assert values == pytest.approx([math.log(value) for value in expected.confidence.tolist()], abs=1e-5)
    assert len([one for one in found if "diffusion_frame" in one]) > 1


@pytest.mark.soak
def test_a_server_answers_within_ten_seconds_of_its_start(tmp_path: Path) -> None:
    """From the command, with no kernel kept, on a machine that does nothing else; twice, the second time over IPv6."""
    for turn, host in enumerate(("127.0.0.1", "::1" if Path("/proc/net/if_inet6").exists() else "localhost")):
        environment = {**os.environ, "MOSAIC_KERNELS": str(tmp_path / str(turn))}
        command = [sys.executable, "-m", "mosaic", "serve", "small", "--port", "0", "--host", host]
        began, log = time.monotonic(), tmp_path / f"log{turn}"
        with log.open("w") as written:
            process = subprocess.Popen(command, stderr=written, env=environment)
        try:
            until(lambda log=log: "serving small on" in log.read_text(), 60)  # type: ignore[misc]
            found = re.search(r"http://\S+", log.read_text())
            assert found is not None
            assert ask(found[0], "v1/completions", prompt="Tom had", max_tokens=16)["choices"][0]["finish_reason"]
            took = time.monotonic() - began
        finally:
            process.terminate()
            assert process.wait(60) == 0
        assert took < 10
