"""prefix_attention, joined_attention and query_change: what their records say and refuse."""

from __future__ import annotations

from typing import Any

import pytest

from mosaic.errors import GraphError
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.polynomial import symbol

TOKENS, ROWS, SEQS, SPAN, EXTENTS, KEYS = (
    symbol(name) for name in ("tokens", "kv_rows", "seqs", "span", "extents", "keys")
)
BOUNDS, COUNTS = Spec((SEQS + 1,), "int32"), Spec((SEQS,), "int32")
Q, SUMS = Spec((TOKENS, 64), "bfloat16"), Spec((TOKENS, 8), "float32")
WINDOW: dict[str, Any] = {
    "q": Q, "kv": Spec((ROWS, 96), "bfloat16"), "extents": Spec((EXTENTS, 4), "int64"), "cu_extents": BOUNDS, "seen": COUNTS,
    "cu_seqlens": BOUNDS, "positions": Spec((TOKENS,), "int32"),
}  # fmt: skip
LAYER: dict[str, Any] = {"layer": 2, "kv_heads": 2, "head_size": 8, "scale": 1.0, "block": 4}
PREFIX = WINDOW | LAYER | {"span": SPAN, "keys": KEYS}
STATES = {
    "kept": Spec((9, 3 * 4 * 64), "bfloat16"), "kept_sums": Spec((5, 3 * 4 * 8), "float32"), "owner": Spec((SEQS,), "int64"),
}  # fmt: skip
FRESH = {"fresh": Q, "fresh_sums": SUMS, "refreshed": COUNTS}
JOINED = WINDOW | {"prefix": COUNTS} | STATES | FRESH | LAYER | {"slot": 2, "rows": 4}
CHANGE: dict[str, Any] = {
    "q": Q, "kept": Spec((9, 4 * 64), "bfloat16"), "owner": STATES["owner"], "prefix": COUNTS, "cu_seqlens": BOUNDS,
    "positions": WINDOW["positions"], "refreshed": COUNTS, "rows": 4,
}  # fmt: skip


def test_contracts_count_this_layers_work() -> None:
    rule = contract("prefix_attention")
    assert rule.work(**PREFIX).outputs == (Q, SUMS)
    assert rule.work(**PREFIX).flops == 4 * SPAN * TOKENS * 64
    where = 8 * (SEQS + 1) + 32 * EXTENTS + 4 * SEQS + 4 * TOKENS
    moved = where + TOKENS * (2 * 128 + 32) + KEYS * 2 * 2 * 8 * 2
    assert rule.work(**PREFIX).bytes - moved == 0
    rule = contract("joined_attention")
    assert rule.work(**JOINED).outputs == (Q,) and rule.work(**JOINED).flops == 4 * 4 * TOKENS * 64
    own, kept = SEQS * 4 * 2 * 2 * 8 * 2, TOKENS * (128 + 4 * 2)
    for states, fresh in ((STATES, FRESH), (STATES, {}), ({}, FRESH)):
        given = {**WINDOW, "prefix": COUNTS, **states, **fresh}
        moved = where + 4 * SEQS + own + 2 * TOKENS * 128
        moved += kept + 8 * SEQS if states else 0
        moved += TOKENS * (128 + 32) + 4 * SEQS if fresh else 0
        attrs = {name: JOINED[name] for name in ("layer", "slot", "rows", "kv_heads", "head_size", "scale", "block")}
        assert rule.work(**given, **attrs).bytes - moved == 0
        assert rule.work(**given, **attrs).outputs == (Q,)
    for name, given in (("prefix_attention", PREFIX), ("joined_attention", JOINED)):
        assert contract(name).rate == "attention" and contract(name).work(**given).rate_rows == 8 * TOKENS
    rule, changed = contract("query_change"), Spec((SEQS,), "float32")
    assert rule.work(**CHANGE).outputs == (changed,) and rule.work(**CHANGE).flops == 5 * TOKENS * 64
    moved = 2 * TOKENS * 128 + 8 * SEQS + 3 * 4 * SEQS + 4 * (SEQS + 1) + 4 * TOKENS
    assert rule.work(**CHANGE).bytes - moved == 0


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("prefix_attention", {"kv_heads": 5}, r"operand '.*' is .*, expected bfloat16\[.*\*5\*8\]"),
    ("prefix_attention", {"layer": 3}, "not layer 3"),
    ("prefix_attention", {"seen": BOUNDS}, r"operand 'seen' is .*, expected int32\[seqs\]"),
    ("prefix_attention", {"scale": 0.0}, "scale must be positive"),
    ("joined_attention", {"kv_heads": 5}, r"operand '.*' is .*, expected bfloat16\[.*\*5\*8\]"),
    ("joined_attention", {"kv": Spec((ROWS, 96), "float32")}, r"operand 'kv' is .*, expected bfloat16\[kv_rows, 96\]"),
    ("joined_attention", {"layer": 3}, "not layer 3"),
    (
        "joined_attention",
        {"extents": Spec((EXTENTS, 4), "int32")},
        r"operand 'extents' is .*, expected int64\[extents, 4\]",
    ),
    ("joined_attention", {"seen": BOUNDS}, r"operand 'seen' is .*, expected int32\[seqs\]"),
    ("joined_attention", {"prefix": BOUNDS}, r"operand 'prefix' is .*, expected int32\[seqs\]"),
    (
        "joined_attention",
        {"positions": Spec((TOKENS,), "int64")},
        r"operand 'positions' is .*, expected int32\[tokens\]",
    ),
    ("joined_attention", {"scale": 0.0}, "scale must be positive, not 0.0"),
    ("joined_attention", {"block": -1}, "block must be a number of positions"),
    ("joined_attention", {"slot": 3}, "kept has 3 slots, not slot 3"),
    ("joined_attention", {"slot": -1}, "not slot -1"),
    ("joined_attention", {"rows": 5}, r"operand 'kept' is .*, expected bfloat16\[9, J\*5\*"),
    ("joined_attention", {"rows": 0}, r"operand 'kept' is .*, expected bfloat16\[9, J\*0\*4\*2\*8\]"),
    (
        "joined_attention",
        {"kept": Spec((9, 3 * 4 * 64), "float32")},
        r"operand 'kept' is .*, expected bfloat16\[9, 768\]",
    ),
    ("joined_attention", {"owner": COUNTS}, r"operand 'owner' is .*, expected int64\[seqs\]"),
    (
        "joined_attention",
        {"kept_sums": Spec((5, 95), "float32")},
        r"operand 'kept_sums' is .*, expected float32\[5, 96\]",
    ),
    ("joined_attention", {"kept_sums": None}, "kept, kept_sums and owner go together"),
    ("joined_attention", {"owner": None}, "kept, kept_sums and owner go together"),
    ("joined_attention", {"fresh": None}, "fresh, fresh_sums and refreshed go together"),
    ("joined_attention", {"refreshed": None}, "fresh, fresh_sums and refreshed go together"),
    ("joined_attention", dict.fromkeys([*STATES, *FRESH]), "kept or fresh must be given"),
    (
        "joined_attention",
        {"fresh": Spec((TOKENS, 64), "float32")},
        r"operand 'fresh' is .*, expected bfloat16\[tokens, 64\]",
    ),
    (
        "joined_attention",
        {"fresh_sums": Spec((TOKENS, 2), "float32")},
        r"operand 'fresh_sums' is .*, expected float32\[tokens, 8\]",
    ),
    ("joined_attention", {"refreshed": BOUNDS}, r"operand 'refreshed' is .*, expected int32\[seqs\]"),
    ("query_change", {"q": Spec((TOKENS,), "bfloat16")}, r"operand 'q' is .*, expected bfloat16\[T, Q\]"),
    (
        "query_change",
        {"cu_seqlens": Spec((SEQS + 1,), "int64")},
        r"operand 'cu_seqlens' is .*, expected int32\[seqs \+ 1\]",
    ),
    ("query_change", {"prefix": BOUNDS}, r"operand 'prefix' is .*, expected int32\[seqs\]"),
    ("query_change", {"refreshed": BOUNDS}, r"operand 'refreshed' is .*, expected int32\[seqs\]"),
    ("query_change", {"positions": COUNTS}, r"operand 'positions' is .*, expected int32\[tokens\]"),
    ("query_change", {"rows": 5}, r"operand 'kept' is .*, expected bfloat16\[9, J\*5\*"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_contracts_refuse(name: str, change: dict[str, Any], message: str) -> None:
    whole = {"prefix_attention": PREFIX, "joined_attention": JOINED, "query_change": CHANGE}[name]
    with pytest.raises(GraphError, match=message):
        contract(name).work(**{**whole, **change})
