"""The fuzzer's findings and the number of its cases."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Finding(AssertionError):
    """Something that must never be: what kind of thing, and the details."""

    def __init__(self, kind: str, details: str) -> None:
        super().__init__(f"{kind}: {details}")
        self.kind, self.details = kind, details


class Tally(Counter[str]):
    """Counts of what was looked at."""

    def add(self, *names: str) -> None:
        self.update(names)


def require(holds: Any, kind: str, details: str) -> None:
    """Raise a finding unless something holds."""
    if not holds:
        raise Finding(kind, details)
