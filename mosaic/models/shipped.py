"""The small trained models in the wheel, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mosaic.errors import CheckpointError

SHIPPED: Final[Mapping[str, str]] = {"small": "small-llada", "small-llada": "small-llada", "small-sdar": "small-sdar"}
"""Name -> directory in `mosaic/checkpoints`; `small` is the bidirectional one."""
CHECKPOINTS: Final = Path(__file__).parent.parent / "checkpoints"


def shipped(name: str) -> Path | None:
    """Return the directory of a shipped model, or None for any other name.

    Raises
    ------
    CheckpointError
        If its files are missing from this installation.

    Examples
    --------
    >>> shipped("llada-8b") is None
    True
    """
    if name not in SHIPPED:
        return None
    path = CHECKPOINTS / SHIPPED[name]
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"the model '{name}' is not in this installation ({path} is missing): pip install --force-reinstall mosaic-dllm."
        )
    return path
