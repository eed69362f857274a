"""Outputs that callers hold: views of planned memory, to be emptied before that memory goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor


class HandedOut:
    """The views handed out last. On a device, a single access to memory that is gone ends the whole process.

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
        """Remember these, in place of those before."""
        self._views = [weakref.ref(view) for view in views]

    def empty(self) -> None:
        """Empty all views that a caller still holds."""
        for reference in self._views:
            tensor = reference()
            if tensor is not None:
                tensor.set_()  # type: ignore[call-overload]
        self._views = []
