"""A least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """The values of the `most` keys looked up last, in that order; `dropped` is called with each evicted value.

    Examples
    --------
    >>> squares = Recent[int, int](2)
    >>> [squares.find(number, lambda: number**2) for number in (2, 3, 2, 4)], dict(squares)
    ([4, 9, 4, 16], {2: 4, 4: 16})
    """

    def __init__(self, most: int, dropped: Callable[[Value], object] = lambda value: None) -> None:
        super().__init__()
        self._most, self._dropped = most, dropped

    def find(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key; if there is none, make it and keep it."""
        try:
            self.move_to_end(key)
        except KeyError:
            self[key] = make()
            self.move_to_end(key)
            if len(self) > self._most:
                self._dropped(self.popitem(last=False)[1])
        return self[key]
