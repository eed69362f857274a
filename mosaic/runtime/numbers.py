"""Input values that Python knows, as numbers and ranges; a tensor is made only if they are copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers one after another. They compare equal by value, so values that a buffer already has need not be written.

    Parameters
    ----------
    parts
        All numbers, or all ranges of integers.
    dtype
        By name.
    width
        Numbers per row; 0: the tensor has one axis.

    Examples
    --------
    >>> numbers = Numbers((range(3), range(7, 9)), "int32")
    >>> len(numbers), numbers.tensor().tolist(), numbers == Numbers((range(3), range(7, 9)), "int32")
    (5, [0, 1, 2, 7, 8], True)
    """

    parts: tuple[float, ...] | tuple[range, ...]
    dtype: str
    width: int = 0

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, range) else 1 for part in self.parts) // (self.width or 1)

    def tensor(self) -> Tensor:
        """Make a tensor [n] of them, or [n, width]."""
        dtype = getattr(torch, self.dtype)
        if self.width:
            return torch.tensor(self.parts, dtype=dtype).view(-1, self.width)
        ranges = [part for part in self.parts if isinstance(part, range)]
        if not ranges:
            return torch.tensor(self.parts, dtype=dtype)
        found = [torch.arange(part.start, part.stop, dtype=dtype) for part in ranges]
        return found[0] if len(found) == 1 else torch.cat(found)
