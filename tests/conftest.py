"""Shared by all tests: compiled kernels are cached in a folder of the tests, never in the user's."""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import card
import pytest
from budgets import Spending
from covering import covering
from hypothesis import settings

# Continuous integration repeats the same examples, so that it fails for what changed; runs by hand explore new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# Workers of one machine do not fight for its cores: tiny products wait for threads longer than they compute. Set before
# anything imports torch; processes that tests start take it over.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_CACHE = os.path.join(tempfile.gettempdir(), f"mosaic-tests-{os.getuid()}")
os.environ["TRITON_CACHE_DIR"] = os.path.join(_CACHE, "triton")
os.environ["MOSAIC_KERNELS"] = os.path.join(_CACHE, "kernels")

# Processes that tests start find what is installed compiled, and compile Mosaic once, not every time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Spending())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests of a card share it, except tests that read the whole card's memory."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with card.held(Path(f"{_CACHE}-card"), alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture
def new_process() -> Callable[[], None]:
    """Forget the templates of this process when called."""
    from mosaic.planner.template import forget

    return forget


def _values(point: pytest.Function, together: int) -> set[tuple[str, ...]]:
    """Values of a grid point by parameter, in groups of a given size; all of them, if there are no more."""
    values = [f"{name}={value!r}" for name, value in sorted(point.callspec.params.items())]
    return set(combinations(values, min(together, len(values))))


def _chosen(points: list[pytest.Function], together: int) -> list[pytest.Function]:
    """Choose points, in an order that follows from their names, until all values are among them, so many at a time."""
    order = sorted(points, key=lambda point: hashlib.sha256(point.name.encode()).digest())
    return [
        order[place] for place in covering([_values(point, together) for point in order], lambda: range(len(order)))
    ]


LONGEST = [
    "test_triton_compiles",
    "test_fuzz",
    "test_parity_block",
    "test_parity",
    "test_gpu_generation",
    "test_gpu_kv",
]
"""Files with the longest tests, which run first: what is left for the end is short, and workers end together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of every test marked `grid`, run points that hold all pairs of its parameters' values, and of every one marked `some` each
    third case; the others only soak.

    `grid(together=1)` asks for every value of every parameter instead. Tests that need the card to themselves come last, so that
    the others wait for them once.
    """
    items.sort(key=lambda item: [*LONGEST, item.path.stem].index(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    several: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("soak"):
            several.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for points in several.values():
        if grid := points[0].get_closest_marker("grid"):
            chosen = set(map(id, _chosen(points, grid.kwargs.get("together", 2))))
        elif points[0].get_closest_marker("some"):
            chosen = set(map(id, points[::3]))
        else:
            continue
        for point in points:
            if id(point) not in chosen:
                point.add_marker(pytest.mark.soak)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the cycle collector from walking all that stays again and again, which was a fifth of the time of tests."""
    gc.set_threshold(50_000, 20, 50)
    _let_stay()


@pytest.fixture(scope="module", autouse=True)
def what_stays() -> Iterator[None]:
    """A test file's leftover templates and plans are frozen once: tests that call the collector took 20 s each."""
    yield
    _let_stay()


def _let_stay() -> None:
    gc.collect()
    gc.freeze()
