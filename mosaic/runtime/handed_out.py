"""Outputs that callers hold: views of planned memory, emptied before that memory is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor


class HandedOut:
    """The views handed out last. On a device, one access to freed memory ends the whole process.

    Examples
    --------
    >>> import torch
    >>> views, output = HandedOut(), torch.zeros(3)
    >>> views.hold([output]); views.empty(); output.numel()
    0
    """

    def __init__(self) -> None:
        self._views: list[weakref.ref[Tensor]] = []

    def hold(self, views: Iterable[Tensor]) -> None:
        """Remember these views, in place of earlier ones."""
        self._views = [weakref.ref(view) for view in views]

    def empty(self) -> None:
        """Empty all views that a caller still holds."""
        for reference in self._views:
            tensor = reference()
            if tensor is not None:
                tensor.set_()  # type: ignore[call-overload]
        self._views = []
