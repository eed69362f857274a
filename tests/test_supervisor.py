"""Who hears what of an engine's process, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stub_engine import TOGETHER, run_stub

from mosaic.decoding import GenerationConfig
from mosaic.serving import EngineOptions, Limits
from mosaic.serving.messages import Ended
from mosaic.serving.metrics import Metrics
from mosaic.serving.supervisor import Supervisor


def test_the_first_of_many_callers_acts_before_the_last_one_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers end in one message of the engine; each caller hears its own tokens, then the end, in two rounds. An error of one
    caller is nothing to the others."""
    monkeypatch.setattr("mosaic.serving.supervisor.run_engine", run_stub)

    async def serve() -> list[tuple[str, int]]:
        loop, over, said = asyncio.get_running_loop(), asyncio.Event(), list[tuple[str, int]]()
        errors = list[Any]()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        supervisor = Supervisor(EngineOptions(model="none"), Limits(), lambda _: None, Metrics("none"))
        supervisor.start()
        await supervisor.ready()
        tokens = dict[int, list[int]]()

        def ask(caller: int) -> None:
            said.append(("asks", caller))

            def hears(found: Any) -> None:
                if not isinstance(found, Ended):
                    tokens.setdefault(caller, []).extend(found[0].ids)
                    return
                assert tokens[caller] == [caller, 7]
                said.append(("ends", caller))
                if caller < TOGETHER:
                    loop.call_soon(ask, caller + TOGETHER)
                elif caller == 2 * TOGETHER - 1:
                    over.set()
                if not caller:
                    raise RuntimeError("of the first caller")

            supervisor.ask([caller, 7], GenerationConfig(), hears, answers=1, draws=0)

        for caller in range(TOGETHER):
            ask(caller)
        await asyncio.wait_for(over.wait(), 60)
        assert not supervisor.waiting and [*map(type, errors)] == [RuntimeError]
        await supervisor.close()
        return said

    said = asyncio.run(serve())
    for round_ in (0, TOGETHER):
        callers = [*range(round_, round_ + TOGETHER)]
        assert [caller for what, caller in said if what == "asks" and caller in callers] == callers
        assert [caller for what, caller in said if what == "ends" and caller in callers] == callers
    assert said.index(("asks", TOGETHER)) < said.index(("ends", TOGETHER - 1))
