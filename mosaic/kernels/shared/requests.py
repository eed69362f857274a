"""What a request of a table wants of its next step: shared by kernels on the CPU and by the host, which plans steps by it.

Arrays are int64, a value for each request. Legend: S requests, C columns.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mosaic.registrar.operators.pack_requests import TOGETHER
from mosaic.registrar.request_table import (
    ALL_ONES,
    CANVAS_LONG,
    FROM_BLOCK,
    MARKED_STEPS,
    OPEN_ONES,
    PACKED,
    RUNNING,
    WHOLE,
    Column,
)

__all__ = [
    "Wanted", "alone", "asked_of", "bits", "block_hash", "closes", "floats", "held", "keys_of", "marked", "mixed", "packed_spans",
    "packed_until", "quotas", "turns", "uniforms", "wanted", "widens",
]  # fmt: skip

Ints: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Wanted(NamedTuple):
    """Windows [begin, end) that requests ask for, the keys that they see, rows to decide, and who asks for tokens of its prompt.

    `running` says who asks at all: of others the rest says nothing. `group` is the one whose steps it asks for, `marked` whether it
    has to be a marked step.
    """

    running: NDArray[np.bool_]
    fills: NDArray[np.bool_]
    begin: Ints
    end: Ints
    seen: Ints
    rows: Ints
    group: Ints
    marked: NDArray[np.bool_]

    @property
    def length(self) -> Ints:
        """Tokens of the windows, [S]."""
        return self.end - self.begin

    def of_step(self, groups: int, *, marked: bool, tokens: int) -> NDArray[np.bool_]:
        """Return who asks for a step of these groups, marked or not, with room for so many tokens, [S]."""
        asks: NDArray[np.bool_] = self.running & asked_of(self, groups) & (self.fills | (self.length <= tokens))
        return asks if marked else asks & ~self.marked


def mixed(words: Words) -> Words:
    """Return the finaliser of splitmix64 (Steele, Lea, Flood 2014) of each word, of which random keys are made."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def uniforms(keys_M: Ints) -> NDArray[np.float32]:
    """Return u in (0, 1) of each random key, float32 [M], as `mosaic.kernels.shared.sampling.uniforms` does."""
    words = [np.full(len(keys_M), word, dtype=np.uint64) for word in (0, 2, 0, 0)]
    low, high = keys_M.view(np.uint64) & _WORD, keys_M.view(np.uint64) >> _HALF
    for _ in range(7):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [second >> _HALF ^ words[1] ^ low, second & _WORD, first >> _HALF ^ words[3] ^ high, first & _WORD]
        low, high = low + np.uint64(0x9E3779B9) & _WORD, high + np.uint64(0xBB67AE85) & _WORD
    found = (words[0].astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    np.minimum(found, np.float32(1.0 - 2.0**-24), out=found)
    return found


def bits(value: float) -> int:
    """Return a number as a table has it: the bits of a float32."""
    return int(np.float32(value).view(np.int32))


def floats(column: Any) -> np.float32:
    """Return the number that `bits` was given."""
    return np.int32(column).view(np.float32)


def keys_of(column: NDArray[np.int64], canvas_rows_M: Ints) -> Ints:
    """Return the random keys of some rows of a request's canvas in its next step, [M]."""
    step = mixed((column[Column.NOISE : Column.NOISE + 1] ^ column[Column.STEP]).view(np.uint64))
    return mixed((canvas_rows_M - column[Column.CANVAS]).view(np.uint64) ^ step).view(np.int64)


def asked_of(asked: Wanted, groups: int) -> NDArray[np.bool_]:
    """Return who asks for a step of these groups, by bits, [S]: prompts for one of group 0 alone."""
    found: NDArray[np.bool_] = (groups >> asked.group & 1 != 0) & ~(asked.fills & (groups != 1))
    return found


def block_hash(tokens_P: Ints, start: int) -> int:
    """Return a hash of the tokens of a block that begins at position `start`: the sum of each one's, modulo 2^64."""
    places = mixed(np.arange(start, start + len(tokens_P), dtype=np.uint64))
    return int(mixed(tokens_P.view(np.uint64) ^ places).sum().view(np.int64))


def turns(table_SC: Ints) -> Ints:
    """Return the turn of each request by which it comes before others, [S]: the earlier the sooner."""
    return table_SC[:, Column.SERVED] - table_SC[:, Column.PRIORITY]


def held(table_SC: Ints, asked: Wanted) -> NDArray[np.bool_]:
    """Return who has decided nothing so far, and came with somebody whose prompt is not written, or after, [S]."""
    first = turns(table_SC)[asked.running & asked.fills].min(initial=1 << 62)
    found: NDArray[np.bool_] = (
        asked.running & ~asked.fills & (table_SC[:, Column.STEP] == 0) & (turns(table_SC) >= first - TOGETHER)
    )
    return found


def quotas(table_SC: Ints) -> Ints:
    """Return how many tokens the next step of each request's block commits at least, [S]."""
    return table_SC[:, Column.QUOTA] + (table_SC[:, Column.NUMBER] < table_SC[:, Column.MORE])


def closes(table_SC: Ints) -> NDArray[np.bool_]:
    """Return whether the next step of each request's block writes what precedes it, and decides its first position alone, [S]."""
    found: NDArray[np.bool_] = (table_SC[:, Column.SHIFTED] != 0) & (table_SC[:, Column.BEFORE] > 0)
    return found


def alone(table_SC: Ints) -> NDArray[np.bool_]:
    """Return whether the next step of each request decides the first position of its block alone, [S]."""
    column = table_SC.T
    first = (column[Column.NUMBER] == 0) & (column[Column.SPAN] == CANVAS_LONG) & (column[Column.WINDOW] != WHOLE)
    found: NDArray[np.bool_] = closes(table_SC) | (first & (column[Column.SHIFTED] != 0))
    return found


def marked(table_SC: Ints) -> NDArray[np.bool_]:
    """Return whether the next step of each request's block has its bit in MARKS, [S]; of packed keys, and computes the span."""
    anyway: NDArray[np.bool_] = (table_SC[:, Column.WINDOW] != PACKED) | (table_SC[:, Column.WIDE] != 0)
    return anyway & _has_bit(table_SC, table_SC[:, Column.NUMBER])


def packed_spans(table_SC: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the packed span [low, high) of each request's block, and the keys that a head keeps beside it, [S] each."""
    column = table_SC.T
    prompt, width = column[Column.PROMPT], np.maximum(column[Column.RENEWED], 1)
    low = prompt + (column[Column.START] - prompt) // width * width
    high = np.minimum(low + width, column[Column.LENGTH])
    return low, high, np.where(high - low == width, column[Column.KEPT], column[Column.KEPT_LAST])


def packed_until(table_SC: Ints) -> Ints:
    """Return WRITTEN of each request after its next step: a Refresh packs keys for the span, [S]."""
    column = table_SC.T
    packs = (
        (column[Column.WINDOW] == PACKED) & (column[Column.WIDE] != 0) & ~_has_bit(table_SC, column[Column.NUMBER] + 1)
    )
    return np.where(packs, packed_spans(table_SC)[1], column[Column.WRITTEN])


def widens(table_SC: Ints) -> NDArray[np.bool_]:
    """Return whether the next step of each request computes its canvas, where keys are packed, [S]."""
    found: NDArray[np.bool_] = table_SC[:, Column.START] >= table_SC[:, Column.WRITTEN]
    return found & _has_bit(table_SC, table_SC[:, Column.NUMBER])


def _has_bit(table_SC: Ints, number: Ints) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = table_SC[:, Column.MARKS] >> np.minimum(number, MARKED_STEPS) & 1 != 0
    return found


def wanted(table_SC: Ints) -> Wanted:
    """Return what the requests of a table ask for."""
    column = table_SC.T
    fills, closing = column[Column.WRITTEN] < column[Column.PREFIX], closes(table_SC)
    start, opened = column[Column.START], column[Column.OPEN]
    within = start % np.maximum(column[Column.SPAN], 1)  # rows of nobody have none
    span_end = np.minimum(start - within + column[Column.SPAN], column[Column.LENGTH])
    to_end = (column[Column.WIDE] != 0) | (column[Column.WINDOW] == FROM_BLOCK)
    begin, end, seen = (
        start - column[Column.WIDE] * within - column[Column.BEFORE],
        start + column[Column.BLOCK],
        span_end.copy(),
    )
    end[to_end] = span_end[to_end]
    end[closing] = seen[closing] = start[closing]
    if np.logical_or.reduce(packed := column[Column.WINDOW] == PACKED):
        narrow, (low, high, kept) = packed & (column[Column.WIDE] == 0), packed_spans(table_SC)
        begin -= narrow & (column[Column.SHIFTED] != 0) & (column[Column.NUMBER] == 0)
        seen[packed] = (narrow * (kept + high - low))[packed]
    begin[fills], end[fills], seen[fills] = column[Column.WRITTEN, fills], column[Column.PREFIX, fills], 0
    rows, whole = np.minimum(quotas(table_SC), opened), column[Column.DECIDES] == OPEN_ONES
    rows[whole] = opened[whole]
    edits = column[Column.DECIDES] == ALL_ONES
    rows[edits] = (start + column[Column.BLOCK] - np.maximum(start, column[Column.PROMPT]))[edits]
    rows[alone(table_SC)] = 1
    rows[fills] = 0
    return Wanted(
        running=column[Column.STATE] == RUNNING, fills=fills, begin=begin, end=end, seen=seen, rows=rows,
        group=column[Column.GROUP] * ~fills, marked=~fills & marked(table_SC),
    )  # fmt: skip
