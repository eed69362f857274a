"""Contracts of the operators that Mosaic ships, one a file, by the operator's one name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final

from mosaic.errors import UnknownName
from mosaic.registrar.contract import Contract

__all__ = ["OPERATORS", "contract"]

OPERATORS: Final = (
    "attention", "confidence", "copy", "embedding", "gather_rows", "grouped_linear", "guide", "head_norm", "kv_attention",
    "kv_store", "linear", "linear_add",
    "moe_combine", "moe_gather", "moe_route", "moe_sort", "perturb_score", "rms_norm", "rotary", "row_nucleus",
    "row_sample", "row_score", "row_stats", "shift_rows", "silu_mul", "transfer", "unembed_sample", "unembed_stats",
)  # fmt: skip


@cache
def contract(name: str) -> Contract:
    """Look an operator's contract up by name.

    >>> contract("rms_norm").reads
    ('x', 'weight')
    """
    if name not in OPERATORS:
        raise UnknownName("operator", name, OPERATORS, "Pass a Contract of your own to add_op for any other.")
    found: Contract = import_module(f"mosaic.registrar.contracts.{name}").CONTRACT
    return found
