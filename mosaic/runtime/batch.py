"""Token ids and rows as callers give them, packed as a step takes them: sequences one after another."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mosaic.errors import UsageError

__all__ = ["Rows", "TokenIds", "fill_rows", "pack", "rows_of"]

TokenIds: TypeAlias = Tensor | Sequence[Tensor] | Sequence[int] | Sequence[Sequence[int]]
"""Besides tensors and lists of them: whatever `torch.as_tensor` reads, of one sequence or of each."""
Rows: TypeAlias = TokenIds | None


def _sequences(what: str, values: TokenIds) -> list[Tensor]:
    """Split a tensor or a list into one 1-D tensor per sequence."""
    values = _as_tensors(what, values)
    if isinstance(values, Tensor) and values.dim() == 1:
        return [values]
    if isinstance(values, Tensor) and values.dim() == 2:
        return list(values)
    if isinstance(values, Tensor):
        raise UsageError(f"{what}: expected [S], [B, S] or a list of [S], got a tensor of shape {list(values.shape)}.")
    parts = values
    if not parts or not all(part.dim() == 1 for part in parts):
        raise UsageError(f"{what}: expected [S], [B, S] or a list of [S]; each sequence a 1-D tensor, at least one.")
    return parts


def _as_tensors(what: str, values: Any) -> Tensor | list[Tensor]:
    """Read lists and arrays of numbers; a list of numbers is one sequence, any other list has a sequence an entry."""
    if isinstance(values, Tensor):
        return values
    several = isinstance(values, Sequence) and not (values and all(isinstance(v, Integral) for v in values))
    for part in values if several else (values,):
        _not_mixed(what, part)
    try:
        return [torch.as_tensor(part) for part in values] if several else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        found = "None" if values is None else f"a {type(values).__name__}"
        raise UsageError(
            f"{what}: expected [S], [B, S] or a list of [S], as tensors or lists of numbers; got {found} instead."
        ) from None


def _not_mixed(what: str, values: Any) -> None:
    """Refuse booleans among numbers, which PyTorch would read as 0 and 1."""
    if not isinstance(values, list | tuple):
        return
    booleans = [place for place, value in enumerate(values) if isinstance(value, bool)]
    if 0 < len(booleans) < len(values):
        place = booleans[0]
        raise UsageError(
            f"{what}: numbers and booleans are mixed, found {values[place]} at place {place}; give either."
        )


def pack(token_ids: TokenIds, vocabulary: int) -> tuple[Tensor, tuple[int, ...]]:
    """Lay the sequences one after another: ids [T] and lengths."""
    parts = _sequences("token_ids", token_ids)
    lengths = tuple(part.numel() for part in parts)
    if not lengths or min(lengths) == 0:
        raise UsageError(f"token_ids: a sequence is empty (lengths {list(lengths)}); give at least one token each.")
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packed.is_floating_point() or packed.dtype == torch.bool:
        raise UsageError(f"token_ids: expected integers, got {packed.dtype}.")
    low, high = int(packed.min()), int(packed.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(f"token_ids: expected ids in [0, {vocabulary}), got {low if low < 0 else high}.")
    return packed, lengths


def rows_of(what: str, rows: TokenIds, lengths: tuple[int, ...]) -> Tensor:
    """Turn a mask or row numbers into int64 rows of the packed batch."""
    rows, tokens = _as_tensors(what, rows), sum(lengths)
    if isinstance(rows, Tensor) and rows.dim() == 1 and rows.dtype != torch.bool:
        found = rows.to(torch.int64)
        if found.numel() > tokens:
            raise UsageError(f"{what}: {found.numel()} rows of a batch of {tokens} tokens; list each row once.")
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < tokens:
            raise UsageError(f"{what}: rows in [0, {tokens}) expected, got {int(found.min())} to {int(found.max())}.")
        return found.clone()
    masks = _sequences(what, rows)
    given = tuple(part.numel() for part in masks)
    packed = len(masks) == 1 and given == (tokens,)
    if any(part.dtype != torch.bool for part in masks) or not (given == lengths or packed):
        raise UsageError(
            f"{what}: expected a boolean mask of lengths {list(lengths)}, or row numbers; got lengths {list(given)}."
        )
    return torch.cat(masks).nonzero().view(-1)


def fill_rows(out: Tensor, rows: Tensor) -> None:
    """Write the rows; what the bucket has too many repeats the last, a row that exists."""
    count = rows.shape[0]
    if count == out.shape[0]:
        out.copy_(rows)
        return
    out[:count].copy_(rows)
    if count:
        out[count:].copy_(rows[-1:].expand_as(out[count:]))
    else:
        out.zero_()
