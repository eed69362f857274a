"""Bytes per element of every dtype, by PyTorch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ITEMSIZE: Final[Mapping[str, int]] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "int16": 2,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
