"""Values of an input that Python knows, as numbers and ranges of them: a tensor is made of them where it is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers one after another. Equal ones are equal values, so that what a buffer has already need not be written.

    Parameters
    ----------
    parts
        All numbers, or all ranges of integers.
    dtype
        By its name.
    width
        Numbers of one value; 0: the tensor has one dim.

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
