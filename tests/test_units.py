"""Sizes and token counts as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic.errors import UsageError
from mosaic.units import (
    GIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_lengths,
    parse_tokens,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * GIB), ("24 gib", 24 * GIB), ("6g", 6 * GIB), ("1.5GiB", 3 * GIB // 2), ("512MiB", 1 << 29),
     ("1048576", 1 << 20), ("0.1GiB", GIB // 10)],
)  # fmt: skip
def test_sizes_are_read_1024_based(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "24XB", "-3GiB", "1e9", "GiB", "0", "0GiB", "1.5"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("131072", 131072), ("128k", 131072), ("128K", 131072), ("1m", 1 << 20), ("1.5k", 1536)]
)
def test_contexts_are_read_1024_based(text: str, expected: int) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "12q", "", "k", "1.5", "auto "])
def test_malformed_contexts_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tokens(text)


@given(st.integers(1, 1 << 50))
def test_plain_bytes_survive(value: int) -> None:
    assert parse_bytes(str(value)) == value
    assert format_bytes(value).split()[1] in ("B", "KiB", "MiB", "GiB", "TiB")


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 22))
def test_rounding_up_is_tight(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and value <= rounded < value + multiple


INTEGERS = (int, np.int8, np.int32, np.int64, np.uint64, lambda value: np.array(value))


@given(st.integers(1, 127), st.sampled_from(INTEGERS))
def test_integers_of_any_kind_are_sizes_and_counts(value: int, kind: Any) -> None:
    for read in (parse_bytes, parse_tokens):
        found = read(kind(value))
        assert found == value and type(found) is int
    assert parse_lengths(kind(value)) == (value,) == parse_lengths([kind(value)]) == parse_lengths(np.array([value]))


@pytest.mark.parametrize(
    "value", [True, False, np.True_, None, 1.0, 24e9, float("inf"), np.float32(3), b"24GiB", [], {}, object()]
)
@pytest.mark.parametrize("read", [parse_bytes, parse_tokens])
def test_what_is_no_integer_and_no_text_is_refused(read: Any, value: Any) -> None:
    with pytest.raises(UsageError, match=r"the budget must be"):
        read(value, what="the budget")


@given(st.text(max_size=30) | st.from_regex(r"[0-9.]{1,5000}[kmgtKMGT]?i?b?", fullmatch=True))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for read in (parse_bytes, parse_tokens, parse_lengths):
        try:
            read(text)
        except UsageError as error:
            assert "\n" not in str(error) and len(str(error)) < 200


def test_none_is_an_answer_where_it_is_meant() -> None:
    assert parse_bytes(0, least=0) == parse_bytes("0", least=0) == parse_bytes("0GiB", least=0) == 0
    with pytest.raises(UsageError, match="host_budget must be a number of bytes from 0, got -1"):
        parse_bytes(-1, what="host_budget", least=0)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [("4k,32k", (4096, 32768)), ("100", (100,)), (["1k", 5], (1024, 5)), (range(1, 4), (1, 2, 3)), ((), ())],
)
def test_lengths_are_one_or_many(lengths: Any, expected: tuple[int, ...]) -> None:
    assert parse_lengths(lengths) == expected


@pytest.mark.parametrize("lengths", [None, 1.5, "1k,,2k", [0], [True], [[1]], True])
def test_lengths_that_are_none_are_refused(lengths: Any) -> None:
    with pytest.raises(UsageError):
        parse_lengths(lengths)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0.00 ms"), (0.0004, "0.40 ms"), (0.99999, "999.99 ms"), (0.999999, "1.00 s"), (59.994, "59.99 s"),
     (59.999, "1 min 0 s"), (192.0, "3 min 12 s"), (3599.7, "1 h 0 min"), (7384.0, "2 h 3 min"), (267_480.0, "74.3 h")],
)  # fmt: skip
def test_long_times_are_said_in_minutes_and_hours(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected
