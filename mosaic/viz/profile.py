"""Live bytes of a plan per op, by category.

Pure data, read from a plan document alone. All pictures, traces and reports of this package use these functions. A
document of another schema than `mosaic.plan/1` raises `PlanFormatError`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from mosaic.errors import PlanFormatError
from mosaic.registrar.operator import Role
from mosaic.registrar.operators import find

Document = Mapping[str, Any]
"""A plan as parsed JSON: `json.loads` of a file of schema `mosaic.plan/1`."""

SCHEMA: Final = "mosaic.plan/1"

CATEGORIES: Final[tuple[str, ...]] = (
    "weights",
    "state",
    "inputs",
    "hidden",
    "attention",
    "ffn",
    "logits and head",
    "statistics",
    "scratch",
    "other",
)
"""Every category, in the order in which charts stack them."""

_KINDS: Final = {"weight": "weights", "state": "state", "input": "inputs", "scratch": "scratch"}

_OF_WEIGHTS: Final = frozenset({"weight", "table", "bias"})
"""Operands that hold weights for every operator: a streamed weight's slot in the workspace."""

# An operand's role is more specific than a buffer's name. If operators give a buffer different roles, the first of this
# list wins, so that the residual stays `hidden` although norms and projections read it.
_ROLES: Final[tuple[Role, ...]] = ("statistics", "hidden", "logits and head", "attention", "ffn")

_WORDS: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("logits and head", frozenset({"head", "logits", "unembed", "final", "rows"})),
    ("ffn", frozenset({"ffn", "mlp", "moe", "experts", "expert", "gate", "up", "down"})),
    ("attention", frozenset({"attn", "attention", "qkv", "q", "k", "v"})),
    ("hidden", frozenset({"hidden", "residual", "norm", "embed", "embedding"})),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBuffer:
    """A buffer that is alive at some op, such as the peak."""

    id: int
    name: str
    category: str
    kind: str
    size_bytes: int
    offset: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProfile:
    """Live bytes per op of a plan: by category, in stacking order, and their sum.

    `peak_bytes` is the largest sum (of the workspace, the plan's lower bound), `peak_index` the first op that reaches it.
    """

    num_ops: int
    categories: tuple[str, ...]
    live_bytes: Mapping[str, tuple[int, ...]]
    total_bytes: tuple[int, ...]
    peak_bytes: int
    peak_index: int

    @property
    def peak_to_average(self) -> float:
        """The ratio of peak to average: 1.0 is a flat profile."""
        total = sum(self.total_bytes)
        return self.peak_bytes * self.num_ops / total if total else 1.0


def sizes_text(doc: Document) -> str:
    """Return a step's size as text: its tokens; without that dim, every dim that counts tokens, else all dims.

    >>> sizes_text({"dims": {"tokens": 131072, "seqs": 1}})
    '131,072 tokens'
    >>> sizes_text({"dims": {"kv_tokens": 8192, "q_tokens": 256, "canvas": 256}})
    '8,192 kv_tokens, 256 q_tokens'
    """
    dims: Mapping[str, int] = doc["dims"]
    shown = ["tokens"] if "tokens" in dims else [name for name in dims if "tokens" in name] or list(dims)
    return ", ".join(f"{dims[name]:,} {name}" for name in shown)


def check_schema(doc: Document) -> None:
    """Raise `PlanFormatError` for a document of another schema than `mosaic.plan/1`."""
    found = doc.get("schema")
    if found != SCHEMA:
        raise PlanFormatError(
            f"expected a plan of schema '{SCHEMA}', got '{found}': write it again with this version of Mosaic."
        )


def optimality(doc: Document) -> str:
    """Compare the placed size with the lower bound, in words.

    >>> optimality({"peak_bytes": 1024, "lower_bound_bytes": 1024})
    'equal to the lower bound'
    >>> optimality({"peak_bytes": 1536, "lower_bound_bytes": 1024})
    '50.00 % above the lower bound'
    """
    bound, peak = doc["lower_bound_bytes"], doc["peak_bytes"]
    if peak == bound:
        return "equal to the lower bound"
    return f"{100 * (peak - bound) / max(bound, 1):.2f} % above the lower bound"


def placed_roots(doc: Document, pools: Iterable[str] = ("workspace",)) -> list[Mapping[str, Any]]:
    """Return the buffers that own storage in some pools; aliases live inside them. "state" is every state's pool."""
    wanted = frozenset(pools)
    return [b for b in doc["buffers"] if b["alias_of"] is None and not wanted.isdisjoint(pool_names(b["pool"]))]


def pool_names(pool: str) -> tuple[str, ...]:
    """Return the names by which a pool may be selected: its own, and its family's.

    >>> pool_names("state/kv"), pool_names("weights")
    (('state/kv', 'state'), ('weights',))
    """
    family, slash, _ = pool.partition("/")
    return (pool, family) if slash else (pool,)


def held_intervals(buffer: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the half-open parts of a lifetime in which a value is held: the lifetime without its gaps.

    >>> list(held_intervals({"start": 2, "end": 9, "gaps": [[4, 6]]}))
    [(2, 4), (6, 9)]
    """
    at = buffer["start"]
    for gap_start, gap_end in sorted(map(tuple, buffer["gaps"])):
        if at < gap_start:
            yield at, gap_start
        at = gap_end
    if at < buffer["end"]:
        yield at, buffer["end"]


def root_categories(doc: Document, roots: Collection[int] | None = None) -> dict[int, str]:
    """Return a category of `CATEGORIES` for every root buffer, or for those of some ids.

    The buffer's kind decides first, then the roles of the operands that it is (its own and its aliases'), then the
    words of its name and of the ops that write it.
    """
    root_of = {buffer["id"]: _root(doc["buffers"], buffer) for buffer in doc["buffers"]}
    roles: dict[int, set[tuple[str, str]]] = defaultdict(set)
    words: dict[int, list[str]] = defaultdict(list)
    for buffer in doc["buffers"]:
        words[root_of[buffer["id"]]].append(buffer["name"])
    for op in doc["ops"]:
        for operand, buffer_id in op["operands"].items():
            roles[root_of[buffer_id]].add((op["kernel"], operand))
        for buffer_id in op["writes"]:
            words[root_of[buffer_id]].append(op["name"])
    return {
        buffer["id"]: _KINDS.get(buffer["kind"]) or _by_role(roles[buffer["id"]]) or _by_words(words[buffer["id"]])
        for buffer in doc["buffers"]
        if buffer["alias_of"] is None and (roots is None or buffer["id"] in roots)
    }


def _root(buffers: Sequence[Mapping[str, Any]], buffer: Mapping[str, Any]) -> int:
    while buffer["alias_of"] is not None:
        buffer = buffers[buffer["alias_of"]]
    return int(buffer["id"])


def _by_role(uses: set[tuple[str, str]]) -> str | None:
    if any(operand in _OF_WEIGHTS for _, operand in uses):
        return "weights"
    records = {kernel: find(kernel, {}) for kernel, _ in uses}
    found = {record.roles.get(operand) for kernel, operand in uses if (record := records[kernel]) is not None}
    return next((role for role in _ROLES if role in found), None)


def _by_words(names: Iterable[str]) -> str:
    for name in names:
        found = frozenset(re.split(r"[\W_]+", name.lower()))
        for category, words in _WORDS:
            if found & words:
                return category
    return "other"


def live_profile(doc: Document, pools: Iterable[str] = ("workspace",)) -> LiveProfile:
    """Sum the live bytes at every op, by category. Linear in ops and buffers.

    `pools` are counted, "state" for all states; `("workspace", "state", "weights")` is everything placed on the device.
    """
    check_schema(doc)
    num_ops = len(doc["ops"])
    category_of = root_categories(doc)
    steps: dict[str, list[int]] = {}
    for buffer in placed_roots(doc, pools):
        changes = steps.setdefault(category_of[buffer["id"]], [0] * (num_ops + 1))
        for start, end in held_intervals(buffer):
            changes[start] += buffer["size"]
            changes[end] -= buffer["size"]
    categories = tuple(category for category in CATEGORIES if category in steps)
    live = {category: tuple(accumulate(steps[category][:num_ops])) for category in categories}
    total = tuple(map(sum, zip(*live.values(), strict=True))) if live else (0,) * num_ops
    peak = max(total, default=0)
    return LiveProfile(
        num_ops=num_ops,
        categories=categories,
        live_bytes=live,
        total_bytes=total,
        peak_bytes=peak,
        peak_index=total.index(peak) if total else 0,
    )


def peak_index(doc: Document) -> int:
    """Return the first op at which the live bytes of the workspace are the largest; 0 without ops."""
    return live_profile(doc).peak_index


def largest_live(doc: Document, n: int = 5, *, at: int | None = None) -> list[LiveBuffer]:
    """Return the `n` largest buffers of the workspace alive at an op, by default at the peak; largest first, ties by id."""
    index = peak_index(doc) if at is None else at
    alive = [b for b in placed_roots(doc) if any(start <= index < end for start, end in held_intervals(b))]
    alive.sort(key=lambda buffer: (-buffer["size"], buffer["id"]))
    category_of = root_categories(doc, {buffer["id"] for buffer in alive[:n]})
    return [
        LiveBuffer(
            id=buffer["id"],
            name=buffer["name"],
            category=category_of[buffer["id"]],
            kind=buffer["kind"],
            size_bytes=buffer["size"],
            offset=buffer["offset"],
            start=buffer["start"],
            end=buffer["end"],
        )
        for buffer in alive[:n]
    ]
