"""Bodies are compiled when they are needed, one by one, and whoever asks is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mosaic.models import load
from mosaic.models.phase import FULL_STEP
from mosaic.planner import Planner, Request
from mosaic.planner.cache import template_of
from mosaic.planner.rungs import groups
from mosaic.planner.search import search

REQUEST = Request(seq_lens=(300,))


def test_progress_is_told_before_each_body_and_only_where_the_cache_has_none(
    empty_cache: Path, new_process: Callable[[], None]
) -> None:
    told: list[tuple[int, str]] = []

    def progress(done: int, name: str) -> None:
        assert len(list(empty_cache.glob("body-*.json"))) == done  # called before the body is there
        told.append((done, name))

    planner = Planner("small", device="cpu", host_budget="1GiB", progress=progress)
    made = planner.plan(REQUEST)
    choices = [choice.options for choice in planner.space().template.choices]
    assert [done for done, _ in told] == list(range(len(told)))
    assert len({name for _, name in told}) == len(told) == len(list(empty_cache.glob("body-*.json")))
    assert f"full_step ({', '.join(options[0] for options in choices)})" in {name for _, name in told}
    again: list[tuple[int, str]] = []
    assert Planner("small", device="cpu", host_budget="1GiB", progress=lambda *what: again.append(what)).plan(
        REQUEST
    ) == made  # fmt: skip
    new_process()
    Planner("small", device="cpu", host_budget="1GiB", progress=lambda *what: again.append(what)).plan(REQUEST)
    assert again == []


def test_planners_of_one_process_share_what_they_compile(empty_cache: Path) -> None:
    model = load("small")
    options = tuple(choice.options[0] for choice in template_of(model, backend="cpu").choices)
    told: list[str] = []
    first = template_of(model, backend="cpu", phase=FULL_STEP, watcher=told.append).bodies[options]
    assert template_of(model, backend="cpu", phase=FULL_STEP, watcher=told.append).bodies[options] is first
    assert len(told) == 1


def test_where_nothing_fits_the_search_asks_for_the_two_ends_of_its_ladders(empty_cache: Path) -> None:
    told: list[str] = []
    planner = Planner("small", device="cpu", progress=lambda _, name: told.append(name))
    point = planner.at(REQUEST)
    held = list(groups(point))
    ends = {base for base, _ in held} | {ladder[-1] for _, ladders in held for ladder in ladders}
    found = search(point, budget_bytes=1, host_budget_bytes=1 << 30)
    assert not found.fits and set(told) == {f"full_step ({', '.join(choices)})" for choices in ends}
    assert len(ends) < len(point.choice_combinations) / 2


def test_caching_waits_for_no_disk_and_what_a_crash_leaves_is_compiled_again(
    empty_cache: Path, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("a template can be made again"))
    made = Planner("small", device="cpu").plan(REQUEST)
    files = sorted(empty_cache.iterdir())
    whole = [file.read_bytes() for file in files]
    for number, (file, content) in enumerate(zip(files, whole, strict=True)):
        half = len(content) // 2
        file.write_bytes((b"", content[:half], content[:half] + bytes(len(content) - half))[number % 3])
    new_process()
    assert Planner("small", device="cpu").plan(REQUEST) == made
    assert len(files) > 3 and [file.read_bytes() for file in files] == whole
