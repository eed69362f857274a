"""What is told of a request is taken when it is told, however slowly its caller reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast
from weakref import ref

import pytest
from test_server_protocol import MODEL, TOKENIZER, Hasty

from mosaic.decoding import GenerationConfig
from mosaic.serving import EngineOptions
from mosaic.serving.answers import Answers, Piece, TooLong
from mosaic.serving.app import create_app
from mosaic.serving.messages import Ended, Frame, Fresh
from mosaic.serving.metrics import Metrics
from mosaic.serving.protocol import read
from mosaic.serving.supervisor import EngineFailed


class Told(Hasty):
    """An engine that tells what the test says."""

    def __init__(self) -> None:
        self.heard, self.cancelled = list[Callable[[Any], object]](), list[int]()
        self.draws = list[int]()

    def ask(self, _: Any, __: Any, heard: Callable[[Any], object], *, draws: int, **___: Any) -> Callable[[], object]:
        self.heard.append(heard)
        self.draws.append(draws)
        place = len(self.heard) - 1
        return lambda: self.cancelled.append(place)


class Begun(Told):
    """Such an engine, which tells the first word itself."""

    def ask(self, _: Any, __: Any, heard: Callable[[Any], object], **asked: Any) -> Callable[[], object]:
        asyncio.get_running_loop().call_soon(heard, text("one"))
        return super().ask(_, __, heard, **asked)


class Tokens(list[int]):
    """Tokens that the test can count while they are held."""


def text(of: str) -> dict[int, Fresh]:
    return {0: Fresh(TOKENIZER.encode(of))}


def answers_of(engine: Told, timeout_s: float = 60.0, **body: Any) -> Answers:
    question = read(body, "/v1/completions", GenerationConfig(), MODEL.architecture, TOKENIZER, strict=True)
    return Answers(cast(Any, engine), Metrics("m"), TOKENIZER, question, timeout_s, time.perf_counter(), "a", "b")


async def begun(*, timeout_s: float = 60.0, **body: Any) -> tuple[Told, AsyncGenerator[list[Piece], None], list[Piece]]:
    """An engine, pieces of its answers, and the first ones, after it has told "one" of the last prompt."""
    engine = Told()
    pieces = answers_of(engine, timeout_s, **body).pieces()
    first = asyncio.create_task(anext(pieces))
    while len(engine.heard) < (len(body["prompt"]) if isinstance(body["prompt"], list) else 1):
        await asyncio.sleep(0)
    engine.heard[-1](text("one"))
    return engine, pieces, await first


def test_of_canvases_that_nobody_takes_the_last_one_is_held() -> None:
    async def slowly() -> int:
        engine, pieces, _ = await begun(prompt="a", stream=True, diffusion_frames=True)
        held = list[ref[Tokens]]()
        for at in range(100):
            ids = Tokens([at])
            held.append(ref(ids))
            engine.heard[0]({0: Fresh([], frame=Frame(at, 0, 9, ids))})
        del ids
        await asyncio.sleep(0.01)
        found = sum(one() is not None for one in held)
        await pieces.aclose()
        return found

    assert asyncio.run(slowly()) == 1


def test_a_stop_ends_a_request_before_its_caller_has_read_what_came_first() -> None:
    async def slowly() -> list[int]:
        engine, pieces, _ = await begun(prompt="a", stream=True, stop="three")
        engine.heard[0](text(" two three"))
        await asyncio.sleep(0.01)
        found = [*engine.cancelled]
        await pieces.aclose()
        return found

    assert asyncio.run(slowly()) == [0]


def test_an_error_behind_a_prompts_stop_is_none_of_the_others() -> None:
    """The engine has ended before it heard that the first prompt's answer was whole; the second one is asked again."""

    async def both() -> str:
        engine, pieces, (first,) = await begun(prompt=["a", "b"], stream=True, stop="three")
        engine.heard[0](text("two three"))
        engine.heard[0](EngineFailed("it has ended."))
        engine.heard[1](text(" four"))
        engine.heard[1](Ended(number=2, finishes=["length"], steps=[2]))
        texts = ["", first.text]
        async for some in pieces:
            for piece in some:
                texts[piece.answer] += piece.text
        return "|".join(texts)

    assert asyncio.run(both()) == "two |one four"


def test_each_answer_of_each_prompt_has_what_was_told_of_it() -> None:
    """Whichever prompt's answers end first; and no two draw by the same numbers."""
    engine, prompts, count = Told(), 3, 2
    answers = answers_of(engine, prompt=["a"] * prompts, n=count, temperature=1.0, stream=True)
    assert tuple(answers.usage) == (0, 0, 0)

    async def all_of_them() -> list[str]:
        texts = [""] * (prompts * count)
        pieces = answers.pieces()
        first = asyncio.create_task(anext(pieces))
        while len(engine.heard) < prompts:
            await asyncio.sleep(0)
        for place in (2, 0, 1):
            told = {at: Fresh(TOKENIZER.encode(f"p{place} a{at}"), steps=1, cached_tokens=7) for at in range(count)}
            engine.heard[place](told)
            engine.heard[place](
                Ended(number=place, finishes=["length", "eos"], steps=[place, 10], cached_tokens=100 * place)
            )
        for some in (await first, *[some async for some in pieces]):
            for piece in some:
                texts[piece.answer] += piece.text
        return texts

    texts = asyncio.run(all_of_them())
    assert texts == [f"p{place} a{at}" for place in range(prompts) for at in range(count)]
    assert answers.reasons == ["length", "stop"] * prompts
    assert tuple(answers.usage) == (sum(len(TOKENIZER.encode(one)) for one in texts), 300, 33)
    assert all(later - draws >= count for draws, later in zip(engine.draws, engine.draws[1:], strict=False))


def test_an_answers_time_is_over_however_slowly_it_is_read() -> None:
    """No text comes after that, and the engine does not go on."""

    async def slowly() -> list[int]:
        engine, pieces, _ = await begun(prompt="a", stream=True, timeout_s=0.05)
        await asyncio.sleep(0.1)
        found = [*engine.cancelled]
        with pytest.raises(TooLong):
            await anext(pieces)
        return found

    assert asyncio.run(slowly()) == [0]


def test_what_ends_while_the_first_of_it_is_sent_is_sent_behind_it() -> None:
    engine, sent = Begun(), b""
    body = json.dumps({"prompt": "a", "stream": True}).encode()

    async def ask_it() -> None:
        app = create_app(MODEL, "m", EngineOptions(model="small-sdar"), engine=lambda *_: cast(Any, engine))
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return waiting.pop() if waiting else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                engine.heard[0](text(" two"))
                engine.heard[0](Ended(number=1, finishes=["length"], steps=[2]))
            sent += message.get("body", b"")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await asyncio.wait_for(app(scope | {"http_version": "1.1"}, receive, send), 5)

    asyncio.run(ask_it())
    lines = [json.loads(line[6:])["choices"][0] for line in sent.decode().splitlines() if line.startswith("data: {")]
    assert [line["text"] for line in lines] == ["one", " two", ""] and lines[-1]["finish_reason"] == "length"
