"""One case of each kind: by its seed it is made, examined, and explained where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from mosaic.runtime.workspace import Workspace

from .examining import examine
from .findings import Finding, Tally, require
from .language import Program, text_of
from .packing import examine_instance
from .programs import random_program
from .requests import examine_request
from .shrinking import shrink

__all__ = ["KINDS", "explain", "run_case"]


def _program(seed: int, tally: Tally) -> None:
    with Workspace() as workspace:
        examine(random_program(seed), seed, workspace, tally)


KINDS: Final[Mapping[str, Callable[[int, Tally], None]]] = {
    "programs": _program,
    "requests": examine_request,
    "packing": examine_instance,
}
"""The fuzzed kinds of cases, and how one case is run."""


def run_case(kind: str, seed: int, tally: Tally) -> None:
    """Run one case.

    Raises
    ------
    Finding
        If something is not as it must be.
    """
    tally.add(kind)
    with _listening():
        KINDS[kind](seed, tally)


@contextmanager
def _listening() -> Iterator[None]:
    """Take a solver's answer that was invalid, and therefore dropped, as a finding: another solver makes up for it."""
    heard = _Dropped()
    logger = logging.getLogger("mosaic.planner")
    logger.addHandler(heard)
    try:
        yield
    finally:
        logger.removeHandler(heard)
    require(not heard.messages, "dropped answer", "\n".join(heard.messages[:3]))


class _Dropped(logging.Handler):
    """Keeps the warnings about answers that were dropped."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("dropped"):
            self.messages.append(record.getMessage())


def explain(kind: str, seed: int, finding: Finding, *, seconds: float = 60.0) -> str:
    """The reproduction of a finding: the command, and the smallest program that shows it."""
    text = f"{finding.kind}\n{finding.details}\npython -m tests.fuzz --kind {kind} --replay {seed}"
    if kind != "programs":
        return text
    small = shrink(random_program(seed), lambda program: _same(program, seed, finding), seconds=seconds)
    return f"{text}\n\n{text_of(small)}\n\n{_found(small, seed)}"


def _found(program: Program, seed: int) -> Finding | None:
    try:
        with Workspace() as workspace, _listening():
            examine(program, seed, workspace, Tally())
    except Finding as finding:
        return finding
    return None


def _same(program: Program, seed: int, finding: Finding) -> bool:
    try:
        found = _found(program, seed)
    except Exception:  # a program that makes no sense any more
        return False
    return found is not None and found.kind == finding.kind
