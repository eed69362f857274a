"""What one caller sends, or an error hits, keeps no other waiting and is answered at once; without an engine's process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from test_server_protocol import MODEL, Hasty

from mosaic.serving import EngineOptions, Limits
from mosaic.serving.app import create_app

LIMITS = Limits(timeout_s=1.0)


class Broken(Hasty):
    """An engine that raises what nobody expects, after its first token."""

    async def answer(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        async for told in super().answer():
            yield told
            raise RuntimeError("a secret of ours")


def client_of(engine: Hasty) -> TestClient:
    asks = cast(Any, engine)
    return TestClient(create_app(MODEL, "m", EngineOptions(model="small-sdar"), LIMITS, engine=lambda *_: asks))


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
