"""key_mass, top_keys and selected_attention: what their records say and refuse, and plans that the checker proves."""

from __future__ import annotations

from typing import Any

import pytest
from operator_tables import scratch_bytes

from mosaic.errors import GraphError
from mosaic.planner import plan_graph
from mosaic.planner.check import check_plan
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.operators.selected_attention import SPLIT_KEYS, splits_of
from mosaic.registrar.operators.top_keys import BINS, LISTED, PLACED, parts_of
from mosaic.registrar.polynomial import symbol

TOKENS, ROWS, SEQS, SPAN, EXTENTS, COLUMNS = (
    symbol(name) for name in ("tokens", "kv_rows", "seqs", "span", "extents", "columns")
)
BOUNDS, LENGTHS = Spec((SEQS + 1,), "int32"), Spec((SEQS,), "int32")
KEPT = {
    "q": Spec((TOKENS, 64), "bfloat16"), "kv": Spec((ROWS, 96), "bfloat16"), "extents": Spec((EXTENTS, 4), "int64"),
    "cu_extents": BOUNDS, "captured": LENGTHS, "cu_seqlens": BOUNDS,
}  # fmt: skip
SUMS = KEPT | {"votes": Spec((TOKENS,), "uint8")}
MASS = SUMS | {"cu_keys": BOUNDS, "logsumexp": Spec((TOKENS, 8), "float32")}
OF_ROWS: dict[str, Any] = {"layer": 2, "kv_heads": 2, "head_size": 8, "scale": 1.0}
HEADS: dict[str, Any] = OF_ROWS | {"sets": 4}
OWNED = {"owner": Spec((SEQS,), "int64"), "captured": LENGTHS, "selected": Spec((9, 3 * 4 * 5), "int32")}
TOP = OWNED | {"mass": Spec((4, COLUMNS), "float32"), "cu_keys": BOUNDS}
PAGES: dict[str, Any] = {"slot": 2, "sets": 4, "k": 8, "page": 2}
ATTENDED = KEPT | OWNED | {"seen": LENGTHS, "positions": Spec((TOKENS,), "int32")}


def test_contracts_count_this_layers_work() -> None:
    names = ("prefix_logsumexp", "key_mass", "top_keys", "selected_attention")
    sums, mass, top, attend = (contract(name) for name in names)
    attrs = OF_ROWS | {"keys": COLUMNS, "span": SPAN}
    assert sums.work(**SUMS, **attrs).outputs == (MASS["logsumexp"],)
    assert sums.work(**SUMS, **attrs).flops == 2 * SPAN * TOKENS * 64
    where = 8 * (SEQS + 1) + 32 * EXTENTS + 4 * SEQS
    moved = where + TOKENS * (128 + 1 + 32) + COLUMNS * 16 * 2
    assert sums.work(**SUMS, **attrs).bytes - moved == 0
    attrs = HEADS | {"columns": COLUMNS, "span": SPAN}
    result = Spec((4, COLUMNS), "float32")
    assert mass.work(**MASS, **attrs).outputs == (result,)
    assert mass.work(**MASS, **attrs).flops == 2 * SPAN * TOKENS * 64
    moved = where + 4 * (SEQS + 1) + TOKENS * (128 + 1 + 32) + 16 * COLUMNS + COLUMNS * 16 * 2
    assert mass.work(**MASS, **attrs).bytes - moved == 0
    tiled, placed = {"block": 4, "rows": 3, "tiles": 2}, {"positions": Spec((TOKENS,), "int32")}
    wide = Spec((2 * 4, COLUMNS), "float32")
    assert mass.work(**MASS, **placed, **attrs, **tiled).outputs == (wide,)
    more = 4 * TOKENS + 16 * COLUMNS + COLUMNS * 16 * 2
    assert mass.work(**MASS, **placed, **attrs, **tiled).bytes - moved - more == 0
    assert top.work(**TOP, **PAGES).outputs == ()
    one_key = {"selected": Spec((9, 16), "int32")}, {"k": 1, "page": 1, "slot": 1}
    assert top.work(**TOP | one_key[0], **PAGES | one_key[1]).outputs == ()
    moved = 16 * COLUMNS + 4 * SEQS + 4 * (SEQS + 1) + 8 * SEQS + 4 * SEQS * 4 * 5
    assert top.work(**TOP, **PAGES).bytes - moved == 0
    attrs = HEADS | PAGES | {"attended": SPAN}
    assert attend.work(**ATTENDED, **attrs).outputs == (ATTENDED["q"],)
    assert attend.work(**ATTENDED, **attrs).flops == 4 * SPAN * TOKENS * 64
    moved = where + 4 * SEQS + 8 * SEQS + TOKENS * (2 * 128 + 4) + SEQS * 8 * 2 * 4 * 8 * 2 + 4 * SEQS * 4 * 5
    assert attend.work(**ATTENDED, **attrs).bytes - moved == 0
    wide_rows = {"selected": Spec((9, 3 * 8 * 5), "int32")}
    more = SEQS * 8 * 2 * 4 * 8 * 2 + 4 * SEQS * 4 * 5
    assert attend.work(**ATTENDED | wide_rows, **attrs, **tiled).bytes - moved - more == 0
    for rule, work in (
        (sums, sums.work(**SUMS, **OF_ROWS, keys=COLUMNS, span=SPAN)),
        (mass, mass.work(**MASS, **HEADS, columns=COLUMNS, span=SPAN)),
        (attend, attend.work(**ATTENDED, **attrs)),
    ):
        assert rule.rate == "attention" and work.rate_rows == 8 * TOKENS


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("key_mass", {"sets": 3}, r"operand 'q' is .*, expected bfloat16\[tokens, M\*3\*8\]"),
    ("key_mass", {"sets": 6}, r"operand 'q' is .*, expected bfloat16\[tokens, M\*6\*8\]"),
    ("key_mass", {"sets": 0}, r"operand 'q' is .*, expected bfloat16\[tokens, M\*0\*8\]"),
    ("key_mass", {"kv_heads": 5}, r"operand '.*' is .*, expected bfloat16\[.*\*5\*8\]"),
    ("key_mass", {"layer": 3}, "not layer 3"),
    ("key_mass", {"kv": Spec((ROWS, 96), "float32")}, r"operand 'kv' is .*, expected bfloat16\[kv_rows, 96\]"),
    ("key_mass", {"captured": BOUNDS}, r"operand 'captured' is .*, expected int32\[seqs\]"),
    ("key_mass", {"cu_keys": LENGTHS}, r"operand 'cu_keys' is .*, expected int32\[seqs \+ 1\]"),
    ("key_mass", {"votes": Spec((TOKENS,), "bool")}, r"operand 'votes' is .*, expected uint8\[tokens\]"),
    ("key_mass", {"extents": Spec((EXTENTS, 4), "int32")}, r"operand 'extents' is .*, expected int64\[extents, 4\]"),
    ("key_mass", {"rows": 3, "block": 4}, "positions go with tiles of rows"),
    ("key_mass", {"rows": 3}, "positions go with tiles of rows"),
    ("key_mass", {"rows": 3, "block": 3}, "positions go with tiles of rows"),
    ("key_mass", {"positions": Spec((TOKENS,), "int32")}, "positions go with tiles of rows"),
    ("key_mass", {"tiles": 2}, "tiles must be 1, of 0 rows of a block of 0, not 2"),
    ("key_mass", {"rows": -1}, "positions go with tiles of rows"),
    ("selected_attention", {"rows": 2, "block": 4}, "tiles must be 2"),
    (
        "selected_attention",
        {"rows": 2, "block": 4, "tiles": 2},
        r"selected must be int32\[rows, slots \* 40\], it has 60 columns",
    ),
    ("key_mass", {"statistic": "median"}, "statistic must be one of mean, max, worst, not 'median'"),
    (
        "key_mass",
        {"logsumexp": Spec((TOKENS, 4), "float32")},
        r"operand 'logsumexp' is .*, expected float32\[tokens, 8\]",
    ),
    ("prefix_logsumexp", {"kv_heads": 5}, r"operand '.*' is .*, expected bfloat16\[.*\*5\*8\]"),
    ("prefix_logsumexp", {"layer": 3}, "not layer 3"),
    ("prefix_logsumexp", {"kv": Spec((ROWS, 96), "float32")}, r"operand 'kv' is .*, expected bfloat16\[kv_rows, 96\]"),
    ("prefix_logsumexp", {"captured": BOUNDS}, r"operand 'captured' is .*, expected int32\[seqs\]"),
    ("prefix_logsumexp", {"votes": Spec((TOKENS,), "bool")}, r"operand 'votes' is .*, expected uint8\[tokens\]"),
    (
        "prefix_logsumexp",
        {"extents": Spec((EXTENTS, 4), "int32")},
        r"operand 'extents' is .*, expected int64\[extents, 4\]",
    ),
    ("top_keys", {"k": 7}, "k must be whole pages of 2 keys, not 7"),
    ("top_keys", {"k": 0}, "k must be"),
    ("top_keys", {"page": 0}, "k must be whole pages of 0 keys"),
    ("top_keys", {"slot": 3}, "selected has 3 slots of 20 numbers, not slot 3"),
    ("top_keys", {"slot": -1}, "not slot -1"),
    ("top_keys", {"k": 10}, r"selected must be int32\[rows, slots \* 24\], it has 60 columns"),
    ("top_keys", {"selected": Spec((9, 60), "int64")}, r"operand 'selected' is .*, expected int32\[9, 60\]"),
    ("top_keys", {"owner": LENGTHS}, r"operand 'owner' is .*, expected int64\[seqs\]"),
    ("top_keys", {"captured": BOUNDS}, r"operand 'cu_keys' is .*, expected int32\[seqs \+ 2\]"),
    ("top_keys", {"cu_keys": Spec((SEQS + 1,), "int64")}, r"operand 'cu_keys' is .*, expected int32\[seqs \+ 1\]"),
    ("top_keys", {"mass": Spec((2, COLUMNS), "float32")}, r"operand 'mass' is .*, expected float32\[4, S\]"),
    ("top_keys", {"ratio": 1.5}, "ratio must be a share"),
    ("top_keys", {"enough": -0.5}, "enough must be a sum of masses"),
    ("selected_attention", {"sets": 3}, r"operand 'q' is .*, expected bfloat16\[tokens, M\*3\*8\]"),
    ("selected_attention", {"slot": 3}, "not slot 3"),
    ("selected_attention", {"block": -1}, "block must be"),
    ("selected_attention", {"seen": BOUNDS}, r"operand 'seen' is .*, expected int32\[seqs\]"),
    ("selected_attention", {"layer": 3}, "not layer 3"),
    (
        "selected_attention",
        {"kv": Spec((ROWS, 96), "float32")},
        r"operand 'kv' is .*, expected bfloat16\[kv_rows, 96\]",
    ),
    (
        "selected_attention",
        {"positions": Spec((TOKENS,), "int64")},
        r"operand 'positions' is .*, expected int32\[tokens\]",
    ),
    ("selected_attention", {"cu_extents": LENGTHS}, r"expected int\d+\[seqs - 1\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_contracts_refuse(name: str, change: dict[str, Any], message: str) -> None:
    whole = {
        "key_mass": MASS | HEADS | {"columns": COLUMNS, "span": SPAN}, "top_keys": TOP | PAGES,
        "selected_attention": ATTENDED | HEADS | PAGES | {"attended": SPAN},
        "prefix_logsumexp": SUMS | OF_ROWS | {"keys": COLUMNS, "span": SPAN},
    }[name]  # fmt: skip
    with pytest.raises(GraphError, match=message):
        contract(name).work(**{**whole, **change})


# --- planned and checked -----------------------------------------------------------------------------------------------


def sparse(g: Graph) -> None:
    """One layer: the log-sum-exps and the mass of a prefix, its selection, and attention to it."""
    tokens, rows, seqs, extents, columns = (g.dim(n) for n in ("tokens", "kv_rows", "seqs", "extents", "captured_keys"))
    kv, selected = g.state("kv", (rows, 2 * 2 * 16), "bfloat16"), g.state("selected", (5, 4 * 3), "int32")
    q = g.input("q", (tokens, 4 * 8), "bfloat16")
    where = g.input("extents", (extents, 4), "int64"), g.input("cu_extents", (seqs + 1,), "int32")
    cu_seqlens, cu_keys = (g.input(name, (seqs + 1,), "int32") for name in ("cu_seqlens", "cu_keys"))
    captured, seen = (g.input(name, (seqs,), "int32") for name in ("captured", "seen"))
    votes, positions = g.input("votes", (tokens,), "uint8"), g.input("positions", (tokens,), "int32")
    owner = g.input("owner", (seqs,), "int64")
    rows_of: dict[str, Any] = {"layer": 1, "kv_heads": 2, "head_size": 8, "scale": 0.3}
    heads = rows_of | {"sets": 4}
    pages: dict[str, Any] = {"slot": 0, "k": 4, "page": 2}
    span = g.dim("span")
    sums = g.add_op("prefix_logsumexp", q, kv, *where, captured, votes, cu_seqlens, **rows_of, span=span, keys=columns)
    mass = g.add_op(
        "key_mass", q, kv, *where, captured, cu_keys, votes, cu_seqlens, sums, **heads, columns=columns, span=span
    )
    g.add_op("top_keys", mass, captured, cu_keys, owner, selected, sets=4, **pages)
    y = g.output("y", (tokens, 4 * 8), "bfloat16")
    reads = (q, kv, *where, selected, owner, captured, seen, cu_seqlens, positions)
    with g.chunk("rows", over=tokens, tile=4):
        g.add_op("selected_attention", *reads, out=y, **heads, **pages, attended=g.dim("attended"))


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plans_are_proved(device: str) -> None:
    dims = {
        "tokens": 10, "kv_rows": 90, "seqs": 2, "extents": 3, "captured_keys": 40, "span": 20, "attended": 9
    }  # fmt: skip
    plan = plan_graph(sparse, dims=dims, device=device, config={"rows": 4})
    assert check_plan(plan.document) == []
    sums, mass, top, attend = plan.document["ops"]
    assert sums["flops"] == mass["flops"] == 2 * 20 * 10 * 32 and attend["flops"] == 4 * 9 * 10 * 32
    assert top["bytes"] == 4 * (4 * 40 + 2 + 3 + 2 * 2) + 4 * 2 * 4 * 3


def test_parts_of_prefixes_fit_into_the_scratch_buffer() -> None:
    for sequences, sets in ((1, 1), (1, 8), (3, 8), (9, 7), (64, 32)):
        specs = {"owner": Spec((sequences,), "int64")}
        available = int(scratch_bytes("cuda", "top_keys", specs, {"sets": sets}))
        parts = parts_of(sequences * sets)
        assert 4 * sequences * sets * (parts * BINS + 1 + PLACED + LISTED) <= available
        assert BINS & (BINS - 1) == 0  # as ranges of a kernel are
        assert parts & (parts - 1) == 0 and (parts == 1 or parts * sequences * sets <= 256)


def test_splits_of_selected_keys_fit_into_the_scratch_buffer() -> None:
    available = int(scratch_bytes("cuda", "selected_attention", {"q": Spec((9, 128), "bfloat16")}, {"head_size": 128}))
    for programs, rows, keys in ((8, 1024, 1056), (1, 8, 65), (32, 1024, 1056), (300, 8192, 1056), (40, 1280, 4096)):
        splits = splits_of(programs, rows, keys, 264)
        assert splits == 1 or (4 * splits * rows * 130 <= available and splits * programs <= 264)
        assert splits == 1 or (splits - 1) * SPLIT_KEYS < keys
