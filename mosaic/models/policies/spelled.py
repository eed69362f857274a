"""Presets with options in one word: `mage:ratio=1/16:every=8` is a name, then `option=value` pairs, joined by colons.

Names are combined by "+", with options after any of them: `mage:k=4+flashblock:reuse_steps=2` is
`mage+flashblock:k=4:reuse_steps=2`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mosaic.errors import UsageError


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """Return the combined names, and the options as booleans, integers, floats or text.

    Raises
    ------
    UsageError
        If a part is no option with a value, or an option is given twice.

    Examples
    --------
    >>> spelled("mage:ratio=1/16:k=1024:carried=true:per=query_head")
    ('mage', {'ratio': 0.0625, 'k': 1024, 'carried': True, 'per': 'query_head'})
    >>> spelled("mage:k=4+flashblock")
    ('mage+flashblock', {'k': 4})
    """
    names, found = list[str](), dict[str, Any]()
    for part in re.split(r"\+(?=[a-z])", text):
        name, *pairs = part.split(":")
        names.append(name)
        _read(text, pairs, found)
    return "+".join(names), found


def _read(text: str, pairs: Sequence[str], found: dict[str, Any]) -> None:
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{text}: expected option=value, got '{pair}'.")
        if key in found:
            raise UsageError(f"{text}: '{key}' is given twice.")
        found[key] = _value(value)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    over, slash, under = text.partition("/")
    try:
        if re.fullmatch(r"[+-]?\d+", text):
            return int(text)
        number = int(over) / int(under) if slash else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        return text
    return int(number) if number.is_integer() and "." not in text else number
