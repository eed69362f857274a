"""The operators that Mosaic ships, one per file; the file's name is the operator's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Final

from mosaic.errors import UnknownName
from mosaic.registrar.operator import Operator

__all__ = ["OPERATORS", "find", "operator"]

OPERATORS: Final = tuple(
    sorted(name[:-3] for name in os.listdir(__path__[0]) if name.endswith(".py") and not name.startswith("_"))
)
"""Names of the files of this package."""


@cache
def operator(name: str) -> Operator:
    """Look a shipped operator up by name.

    Raises
    ------
    UnknownName
        If Mosaic ships no operator of this name.

    Examples
    --------
    >>> operator("rms_norm").reads
    ('x', 'weight')
    """
    if name not in OPERATORS:
        raise UnknownName("operator", name, OPERATORS, "Pass an Operator of your own to add_op for any other.")
    found: Operator = import_module(f"{__name__}.{name}").OPERATOR
    return found


def find(name: str, given: Mapping[str, Operator]) -> Operator | None:
    """Return the operator of a name among the given ones and the shipped ones; None if there is none."""
    if name in given:
        return given[name]
    return operator(name) if name in OPERATORS else None
