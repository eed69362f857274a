"""Sizes and token counts as people write them: `24GiB`, `128k`, and back.

1024-based throughout; the unit is always printed.
"""

from __future__ import annotations

import re
from typing import Final

from mosaic.errors import UsageError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "format_tokens", "parse_bytes", "parse_tokens", "round_up"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_BYTE_UNITS: Final = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)", re.IGNORECASE)


def round_up(value: int, multiple: int) -> int:
    """Round a non-negative integer up to a multiple.

    >>> round_up(513, 512)
    1024
    """
    return -(-value // multiple) * multiple


def _scaled(digits: str, unit: int) -> int | None:
    """Multiply a decimal string by a unit without going through a float; None if not whole."""
    whole, _, fraction = digits.partition(".")
    numerator = int(whole + fraction) * unit
    value, rest = divmod(numerator, 10 ** len(fraction))
    return value if rest == 0 or unit > 1 else None


def parse_bytes(text: str) -> int:
    """Read a size: `24GiB`, `512 MiB`, `6g`, `1048576`. Units are 1024-based.

    >>> parse_bytes("24GiB")
    25769803776
    """
    match = _SIZE.fullmatch(text.strip())
    value = _scaled(match[1], _BYTE_UNITS[match[2].lower()]) if match else None
    if value is None:
        raise UsageError(f"cannot read the size '{text}': write for example 24GiB, 512MiB or a number of bytes.")
    if value == 0:
        raise UsageError(f"the size '{text}' is zero: give a positive size such as 24GiB.")
    return value


def parse_tokens(text: str) -> int:
    """Read a token count: `131072`, or `128k` = 131,072, or `1m` = 1,048,576; a fraction of a unit if it is whole tokens.

    >>> parse_tokens("128k")
    131072
    """
    match = _TOKENS.fullmatch(text.strip())
    value = _scaled(match[1], _BYTE_UNITS[match[2].lower()]) if match else None
    if value is None:
        raise UsageError(f"cannot read the token count '{text}': write for example 131072 or 128k (= 131,072).")
    if value == 0:
        raise UsageError(f"a token count must be at least 1, got '{text}'.")
    return value


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
