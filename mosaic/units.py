"""Sizes and token counts as text, `24GiB`, `128k`, and back.

1024-based throughout; the unit is always printed. A size or count may be an integer of any kind (Python's, NumPy's) or
text; `bool` is neither.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Final, SupportsIndex, TypeAlias

from mosaic.errors import UsageError

Size: TypeAlias = SupportsIndex | str
"""An integer, or text with a unit: `24GiB` for bytes, `128k` for tokens."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_BYTE_UNITS: Final = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_TOKENS = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmg]?)", re.IGNORECASE)


def round_up(value: int, multiple: int) -> int:
    """Round a non-negative integer up to a multiple.

    >>> round_up(513, 512)
    1024
    """
    return -(-value // multiple) * multiple


def parse_bytes(size: Size, *, what: str = "", least: int = 1) -> int:
    """Read a size: an integer, or `24GiB`, `512 MiB`, `6g`, `1048576`. Units are 1024-based.

    Parameters
    ----------
    what
        The name of the value, for the message.
    least
        The smallest allowed number of bytes.

    Raises
    ------
    UsageError
        If it is neither an integer nor such text, or less than `least`.

    Examples
    --------
    >>> parse_bytes("24GiB"), parse_bytes(4096)
    (25769803776, 4096)
    """
    value = _read(size, _SIZE)
    if isinstance(size, str) and value is None:
        raise UsageError(
            f"{_prefix(what)}cannot read the size '{_short(size)}': write for example 24GiB, 512MiB or a number of bytes."
        )
    if value is None or value < least:
        expected = "a positive number of bytes" if least == 1 else f"a number of bytes from {least:,}"
        raise UsageError(f"{what or 'a size'} must be {expected}, got {size!r}: write for example 24GiB.")
    return value


def parse_tokens(count: Size, *, what: str = "", least: int = 1) -> int:
    """Read a token count: an integer, or `131072`, or `128k` = 131,072, or `1m` = 1,048,576; a fraction of a unit if it
    is a whole number of tokens.

    Parameters
    ----------
    what, least
        As in `parse_bytes`.

    Raises
    ------
    UsageError
        If it is neither an integer nor such text, or less than `least`.

    Examples
    --------
    >>> parse_tokens("128k"), parse_tokens(100)
    (131072, 100)
    """
    value = _read(count, _TOKENS)
    if isinstance(count, str) and value is None:
        raise UsageError(
            f"{_prefix(what)}cannot read the token count '{_short(count)}': write for example 131072 or 128k (= 131,072)."
        )
    if value is None:
        raise UsageError(
            f"{what or 'a token count'} must be an integer, got {count!r}: write for example 131072 or '128k'."
        )
    if value < least:
        unit = "token" if least == 1 else "tokens"
        raise UsageError(f"{what or 'a token count'} must be at least {least:,} {unit}, got {count!r}.")
    return value


def parse_lengths(lengths: Size | Iterable[Size], *, what: str = "a context") -> tuple[int, ...]:
    """Read the lengths of sequences: one, several, or text such as `4k,32k`.

    Examples
    --------
    >>> parse_lengths("4k,100"), parse_lengths(7), parse_lengths([1, "1k"])
    ((4096, 100), (7,), (1, 1024))
    """
    if isinstance(lengths, str):
        return tuple(parse_tokens(part, what=what) for part in lengths.split(","))
    if _integer(lengths) is not None or not isinstance(lengths, Iterable):
        return (parse_tokens(lengths, what=what),)  # type: ignore[arg-type]
    return tuple(parse_tokens(length, what=what) for length in lengths)


def _read(value: object, form: re.Pattern[str]) -> int | None:
    """An integer, or text of a form as whole units; None if it is neither."""
    if not isinstance(value, str):
        return _integer(value)
    match = form.fullmatch(value.strip())
    return _scaled(match[1], _BYTE_UNITS[match[2].lower()]) if match else None


def _integer(value: object) -> int | None:
    # NumPy before 2 accepts its own booleans as indices, and so does PyTorch
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith(("bool", "bool_")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _scaled(digits: str, unit: int) -> int | None:
    """Multiply a decimal string by a unit without going through a float; None if not whole."""
    whole, _, fraction = digits.partition(".")
    numerator = int(whole + fraction) * unit
    value, rest = divmod(numerator, 10 ** len(fraction))
    return value if rest == 0 or unit > 1 else None


def _prefix(what: str) -> str:
    return f"{what}: " if what else ""


def _short(text: str) -> str:
    """Text as a message quotes it: on one line, shortened if long."""
    line = " ".join(text.split())
    return line if len(line) <= 40 else f"{line[:37]}..."


def format_bytes(num_bytes: int) -> str:
    """Print a size with its unit, two decimals from MiB on.

    >>> format_bytes(25769803776)
    '24.00 GiB'
    """
    if num_bytes < 0:
        return "-" + format_bytes(-num_bytes)
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def format_tokens(num_tokens: int) -> str:
    """Print a token count with thousands separators.

    >>> format_tokens(131072)
    '131,072'
    """
    return f"{num_tokens:,}"


def format_seconds(seconds: float) -> str:
    """Print a time in a convenient unit.

    >>> [format_seconds(t) for t in (0.0123, 267.59, 3725.0, 267480.0)]
    ['12.30 ms', '4 min 28 s', '1 h 2 min', '74.3 h']
    """
    if seconds < 0.999995:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if seconds < 36_000:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / 3600:,.1f} h"
