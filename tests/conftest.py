"""Shared by all tests: templates are cached in a folder of this run, never in the user's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
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
os.environ["MOSAIC_CACHE"] = _CACHE


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget the templates of this process when called; those on disk stay."""
    from mosaic.planner import cache

    return lambda: monkeypatch.setattr(cache, "_loaded", {})


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]) -> None:
    """Compile templates anew, and keep none on disk."""
    monkeypatch.setenv("MOSAIC_CACHE", "")
    new_process()


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None], tmp_path: Path) -> Path:
    """Compile templates anew, and keep them in an empty folder."""
    monkeypatch.setenv("MOSAIC_CACHE", str(tmp_path))
    new_process()
    return tmp_path
