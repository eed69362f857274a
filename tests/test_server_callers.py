"""What one caller sends, or an error hits, keeps no other waiting and is answered at once; without an engine's process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from test_server_protocol import MODEL, Hasty

from mosaic.decoding import GenerationConfig
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.serving import EngineOptions, Limits
from mosaic.serving.app import create_app

LIMITS = Limits(timeout_s=1.0)


class Short(Hasty):
    """An engine whose longest request has few positions."""

    longest = 64


class Broken(Hasty):
    """An engine that raises what nobody expects, after its first token."""

    def telling(self) -> Iterator[Any]:
        for told in super().telling():
            yield told
            raise RuntimeError("a secret of ours")


def client_of(engine: Hasty, **base: Any) -> TestClient:
    asks, options = cast(Any, engine), EngineOptions(model="small-sdar", base=GenerationConfig(**base))
    return TestClient(create_app(MODEL, "m", options, LIMITS, engine=lambda *_: asks))


def error_of(found: Any) -> tuple[int, str, str]:
    error = found.json()["error"]
    assert error["code"] == found.status_code
    return found.status_code, error["type"], error["message"]


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output", "ignore_eos", "detokenize"])
@pytest.mark.parametrize("value", ["no", 2, []])
def test_what_is_neither_true_nor_false_is_refused_by_name(name: str, value: Any) -> None:
    found = client_of(Hasty()).post("/v1/completions", json={"prompt": "a", "stop": "three", name: value})
    status, kind, said = error_of(found)
    assert (status, kind) == (400, "invalid_request_error") and said.startswith(f"{name}: ") and repr(value) in said


def test_an_option_that_is_null_is_left_out_under_each_of_its_names() -> None:
    client = client_of(Hasty())
    for body in ({"max_tokens": None, "max_completion_tokens": 8}, {"max_completion_tokens": 8, "max_tokens": None}):
        assert client.post("/v1/completions", json={"prompt": "a", **body}).status_code == 200


def test_an_error_of_ours_is_answered_at_once() -> None:
    client = client_of(Broken())
    status, kind, said = error_of(client.post("/v1/completions", json={"prompt": "a"}))
    assert (status, kind) == (500, "server_error") and "secret" not in said
    streamed = client.post("/v1/completions", json={"prompt": "a", "stream": True})
    pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert pieces[0]["choices"][0]["text"] == "o" and pieces[-1]["error"]["code"] == 500
    assert streamed.text.endswith("data: [DONE]\n\n") and "secret" not in streamed.text


def test_a_long_stop_string_takes_no_longer_than_a_short_one() -> None:
    began = time.monotonic()
    found = client_of(Hasty()).post("/v1/completions", json={"prompt": "a", "stop": "one" + " two" * 200_000})
    assert found.json()["choices"][0]["text"] == "one two three four" and time.monotonic() - began < 1


def test_more_tokens_than_a_request_may_have_are_not_decoded() -> None:
    client = client_of(Short())
    assert client.post("/detokenize", json={"tokens": [102] * 64}).status_code == 200
    status, kind, said = error_of(client.post("/detokenize", json={"tokens": [102] * 65}))
    assert (status, kind) == (400, "invalid_request_error") and "65 tokens" in said and "64" in said


def test_texts_of_single_tokens_are_made_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, loops = Tokenizer.decode, list[Any]()

    def noted(self: Tokenizer, token_ids: Any, **options: Any) -> str:
        try:
            loops.append(asyncio.get_running_loop())
        except RuntimeError:
            loops.append(None)
        return decode(self, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    found = client_of(Hasty()).post("/tokenize", json={"prompt": "one two", "return_token_strs": True}).json()
    assert "".join(found["token_strs"]) == "one two" and {*loops} == {None}


def test_only_requests_with_the_servers_own_policies_are_measured_by_its_longest() -> None:
    """With others a longer one may fit, which the engine knows, up to what the model has positions for."""
    client = client_of(Short(), attention="mage")
    for more, status in (
        ({}, 400),
        ({"attention": "mage"}, 400),
        ({"attention": "quest"}, 200),
        ({"eviction": "focus"}, 200),
        ({"attention": "quest", "max_tokens": MODEL.architecture.max_context}, 400),
    ):
        found = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 64} | more)
        assert found.status_code == status, found.text


def test_token_ids_of_many_prompts_are_no_long_text() -> None:
    client, longest = client_of(Short()), 4 * Short.longest * Tokenizer(str(MODEL.path), mask=None).longest_token
    body = {"prompt": [[102] * 40] * 200, "max_tokens": 8}
    assert longest < 40 * 200 and client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([5, 6.0], "6.0 at place 1"), ([[5], 6], "6 at place 1"), (["a", 5, None], "None at place 2"), ([5, True], "True at"),
        ([5, 10**9], "1000000000"), ([[5], [5, -1]], "-1"), ([MODEL.architecture.mask_token_id], "mask token"), ([[]], "empty"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_none_is_refused_before_it_waits_for_its_turn(prompt: Any, says: str) -> None:
    engine = Hasty()
    engine.ask = lambda *_, **__: pytest.fail("the engine was asked")  # type: ignore[method-assign]
    status, kind, said = error_of(client_of(engine).post("/v1/completions", json={"prompt": prompt}))
    assert (status, kind) == (400, "invalid_request_error") and said.startswith("prompt") and says in said
