"""Sizes and token counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic.errors import UsageError
from mosaic.units import GIB, format_bytes, parse_bytes, parse_tokens, round_up


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
