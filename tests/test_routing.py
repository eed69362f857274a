"""Which replica is asked, and what becomes of requests whose replica is lost: with handles that stand for Ray's."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import pytest

from mosaic.decoding import GenerationConfig
from mosaic.runtime.prefixes import UNIT
from mosaic.serving import Limits
from mosaic.serving.messages import Ended, Fresh
from mosaic.serving.metrics import Metrics
from mosaic.serving.supervisor import AnswerLost, Busy, EngineFailed

SAID = {"state": "ready", "failure": "", "longest": 64, "restarts": 0, "waiting": 0, "step_s": 0.1, "retry_s": 7}
LOST, END = "lost", "end"


class RayError(Exception):
    """Stands for Ray's."""


class Handle:
    """A replica: it says `said`, and answers by a script: tokens, the end, or its own loss."""

    def __init__(self, *script: Any, **said: Any) -> None:
        self.said, self.script, self.asked, self.cancelled = {**SAID, **said}, script or (5, END), list[list[int]](), 0
        self.tells = self.answer = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, *given: Any) -> Response:
        if given:
            self.asked.append([*given[0]])
        return Response(self, self._answer() if given else self._tell())

    async def _tell(self) -> AsyncIterator[Any]:
        yield dict(self.said), None
        await asyncio.Event().wait()

    async def _answer(self) -> AsyncIterator[Any]:
        for one in self.script:
            await asyncio.sleep(0)
            if one == LOST:
                raise RayError("it is dead")
            yield Ended(number=1, finishes=["length"], steps=[1]) if one == END else {0: Fresh([one])}


class Response:
    """What Ray gives for a stream."""

    def __init__(self, handle: Handle, values: AsyncIterator[Any]) -> None:
        self._handle, self._values = handle, values

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._values

    def cancel(self) -> None:
        self._handle.cancelled += 1


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class, as it is where these modules are Ray's."""
    names = ("ray", "ray.serve", "ray.exceptions", "ray.serve.exceptions")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["ray"].serve, modules["ray.exceptions"].RayError = modules["ray.serve"], RayError
    modules["ray.serve.exceptions"].RayServeException = RayError
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mosaic.serving.replicas", raising=False)
    yield importlib.import_module("mosaic.serving.replicas").Replicas
    sys.modules.pop("mosaic.serving.replicas", None)


def told(replicas: Any, handles: list[Handle], *rounds: list[list[int]], **limits: int) -> list[list[Any]]:
    """What the caller of each prompt hears: tokens, the end, or an error. The prompts of a round are asked together."""

    async def hear(router: Any, prompt: list[int]) -> list[Any]:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        leave = router.ask(prompt, GenerationConfig(), heard.put_nowait, answers=1, draws=0)
        mine = list[Any]()
        while not mine or not isinstance(mine[-1], str | Exception):
            one = await asyncio.wait_for(heard.get(), 5)
            mine.append(END if isinstance(one, Ended) else one if isinstance(one, Exception) else one[0].ids[0])
        leave()
        return mine

    async def ask() -> list[list[Any]]:
        router = replicas(handles, Limits(**limits), lambda _: None, Metrics("m"))
        router.start()
        await router.ready()
        await asyncio.sleep(0.01)
        found = [await asyncio.gather(*(hear(router, prompt) for prompt in together)) for together in rounds]
        await router.close()
        return [one for together in found for one in together]

    return asyncio.run(ask())


LONG, OTHER = ([first] * (2 * UNIT) for first in (3, 4))


@pytest.mark.parametrize(
    ("first", "second", "mine"),
    [
        ({}, {}, [LONG, LONG]), ({"waiting": 1}, {}, []), ({}, {"state": "starting"}, [LONG, OTHER, OTHER, LONG]),
        ({"state": "failed"}, {}, []), ({"waiting": 2}, {"waiting": 2}, [LONG, OTHER, LONG]),
    ],
)  # fmt: skip
def test_who_waits_least_and_has_the_prefix_is_asked(
    replicas: Any, first: dict[str, Any], second: dict[str, Any], mine: list[list[int]]
) -> None:
    """Two prompts at once go to one replica each, where both may be asked; `mine` is what the first one is asked in all."""
    handles = [Handle(**first), Handle(**second)]
    assert told(replicas, handles, [LONG, OTHER], [OTHER], [LONG]) == [[5, END]] * 4
    assert handles[0].asked == mine and len(handles[1].asked) == 4 - len(mine)


@pytest.mark.parametrize(
    ("scripts", "hears", "asked"),
    [
        (((LOST,), (6, END)), [6, END], [1, 1]), (((5, LOST), (6, END)), [5, AnswerLost], [1, 0]),
        (((LOST,), (LOST,)), [EngineFailed], [1, 1]), (((LOST,), (6, LOST)), [6, EngineFailed], [1, 1]),
    ],
)  # fmt: skip
def test_a_lost_replica_loses_what_it_had_told_of(
    replicas: Any, scripts: Any, hears: list[Any], asked: list[int]
) -> None:
    handles = [Handle(*script) for script in scripts]
    (heard,) = told(replicas, handles, [[1, 2]])
    assert [type(one) if isinstance(one, Exception) else one for one in heard] == hears
    assert [len(handle.asked) for handle in handles] == asked
    assert all(handle.cancelled >= len(handle.asked) for handle in handles)


def test_too_many_that_wait_are_refused_with_the_least_time_of_all(replicas: Any) -> None:
    with pytest.raises(Busy) as refused:
        told(replicas, [Handle(waiting=2), Handle(waiting=1, retry_s=3)], [[1]], max_waiting=3)
    assert refused.value.seconds == 3
