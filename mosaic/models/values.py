"""Values of a config.json, read by key and checked by kind; a wrong value is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.errors import UnsupportedModel

MOST: Final = (1 << 31) - 1
"""The largest supported size; products of smaller sizes are exact integers."""
FLOATS: Final = ("bfloat16", "float16", "float32", "float64")


def refuse(key: str, expected: str, found: object) -> UnsupportedModel:
    """Return an error that names the key, the expected value and the actual one.

    >>> str(refuse("rms_norm_eps", "a number above 0", -1))
    "config.json: 'rms_norm_eps' must be a number above 0, got -1."
    """
    return UnsupportedModel(f"config.json: '{key}' must be {expected}, got {found!r}.")


def positive(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """Return a size that may have several names, which must agree.

    >>> positive({"d_model": 64}, "d_model"), positive({}, "n_layers", default=2)
    (64, 2)
    """
    found = {key: config[key] for key in keys if config.get(key) is not None}
    for key, value in found.items():
        if type(value) is not int or not 0 < value <= MOST:
            raise refuse(key, "a positive integer", value)
    if len(set(found.values())) > 1:
        said = " and ".join(f"'{key}' is {value}" for key, value in found.items())
        raise UnsupportedModel(f"config.json: {said}, but they mean the same; keep one of them.")
    if found:
        return int(next(iter(found.values())))
    if default is None:
        raise UnsupportedModel(f"config.json has no '{keys[0]}'; Mosaic needs it to plan this family.")
    return default


def count(config: Mapping[str, Any], key: str) -> int:
    """Return a count; null or missing: 0."""
    value = config.get(key)
    if value is None or (type(value) is int and value == 0):
        return 0
    return positive(config, key)


def share(whole: int, parts: int, key: str, parts_key: str) -> int:
    """Return an even share of a size.

    Raises
    ------
    UnsupportedModel
        If it is no integer.
    """
    if whole % parts:
        raise UnsupportedModel(f"config.json: '{key}' is {whole}, which {parts} '{parts_key}' do not divide.")
    return whole // parts


def number(config: Mapping[str, Any], key: str, default: float, *, above: float, most: float) -> float:
    """Return a number in (above, most]; missing or null: the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= most:
        raise refuse(key, f"a number above {above:g} and at most {most:g}", value)
    return float(value)


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Return a boolean; missing or null: the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(key, "true or false", value)
    return value


def token_id(config: Mapping[str, Any], key: str, default: int, vocabulary: int) -> int:
    """Return one token's id, checked against the vocabulary; missing or null: the default."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < vocabulary:
        raise refuse(key, f"a token id below {vocabulary}, the size of the vocabulary", value)
    return value


def token_ids(
    config: Mapping[str, Any], key: str, default: tuple[int, ...], vocabulary: int, *also: int
) -> tuple[int, ...]:
    """Return token ids of a config key, one or a list; to a single id, the family's ids `also` are added.

    >>> token_ids({"eos_token_id": 5}, "eos_token_id", (1,), 9, 7), token_ids({"eos_token_id": [2, 3]}, "eos_token_id", (1,), 9)
    ((5, 7), (2, 3))
    """
    value = config.get(key)
    if value is None:
        return tuple(dict.fromkeys((*default, *also)))
    given = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocabulary for token in given):
        raise refuse(key, f"a token id below {vocabulary}, the size of the vocabulary, or a list of them", value)
    return tuple(dict.fromkeys(given if isinstance(value, list) else (*given, *also)))


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype of a checkpoint, by either of its two keys; the default is bfloat16.

    >>> dtype_of({"torch_dtype": "float16"}), dtype_of({"dtype": "torch.float32"})
    ('float16', 'float32')
    """
    found = {key: _float_dtype(key, config[key]) for key in ("torch_dtype", "dtype") if config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise UnsupportedModel(
            f"config.json: 'torch_dtype' is {found['torch_dtype']} and 'dtype' is {found['dtype']}; keep one of them."
        )
    return next(iter(found.values()), "bfloat16")


def _float_dtype(key: str, value: object) -> str:
    """The name of a floating-point dtype that Mosaic computes in."""
    name = str(value).removeprefix("torch.")
    if name not in FLOATS:
        raise refuse(key, f"a floating-point dtype of {', '.join(FLOATS)}", value)
    return name
