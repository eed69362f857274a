"""What is named with options in one word: `mage:ratio=1/16:every=8`, a name, then `option=value` for each, joined by colons."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from mosaic.errors import UsageError

__all__ = ["spelled"]


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name, and the options: truth values, integers, numbers or fractions, and else texts.

    Raises
    ------
    UsageError
        If a part is no option with a value, or an option has two.

    Examples
    --------
    >>> spelled("mage:ratio=1/16:k=1024:carried=true:per=query_head")
    ('mage', {'ratio': 0.0625, 'k': 1024, 'carried': True, 'per': 'query_head'})
    """
    name, *pairs = text.split(":")
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{text}: expected option=value, got '{pair}'.")
        if key in found:
            raise UsageError(f"{text}: '{key}' is given twice.")
        found[key] = _value(value)
    return name, found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return text
    return int(number) if number.denominator == 1 and "." not in text else float(number)
