"""Bodies are compiled when they are needed, one by one, and planners of one process share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mosaic.models import Model, load
from mosaic.models.phase import FULL_STEP
from mosaic.planner import Planner, Request
from mosaic.planner.search import groups, search
from mosaic.planner.template import template_of

REQUEST = Request(seq_lens=(300,))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]) -> list[tuple[str, ...]]:
    """The choices of each graph that is registered from now on; of the first one none."""
    found, graph = list[tuple[str, ...]](), Model.graph

    def noted(self: Model, **asked: Any) -> Any:
        found.append(tuple((asked["choices"] or {}).values()))
        return graph(self, **asked)

    new_process()
    monkeypatch.setattr(Model, "graph", noted)
    return found


def test_planners_share_what_they_compile(registered: list[tuple[str, ...]]) -> None:
    planner = Planner("small", device="cpu", host_budget="1GiB")
    made = planner.plan(REQUEST)
    assert registered[0] == () and len(set(registered)) == len(registered) > 3
    first = tuple(choice.options[0] for choice in planner.space().template.choices)
    assert first not in registered, "the first graph is registered once"
    registered.clear()
    assert Planner("small", device="cpu", host_budget="1GiB").plan(REQUEST) == made and not registered
    model = load("small")
    bodies = [template_of(model, backend="cpu", phase=FULL_STEP).bodies[first] for _ in range(2)]
    assert bodies[0] is bodies[1] and not registered


def test_where_nothing_fits_the_search_asks_for_the_two_ends_of_its_ladders(registered: list[tuple[str, ...]]) -> None:
    planner = Planner("small", device="cpu")
    point = planner.at(REQUEST)
    held = list(groups(point))
    ends = {base for base, _ in held} | {ladder[-1] for _, ladders in held for ladder in ladders}
    found = search(point, budget_bytes=1, host_budget_bytes=1 << 30)
    first = tuple(choice.options[0] for choice in point.space.template.choices)
    assert not found.fits and {first, *registered[1:]} == ends
    assert len(ends) < len(point.choice_combinations) / 2
