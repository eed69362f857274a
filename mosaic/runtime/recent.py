"""Values that are kept for whoever asks again, as many as there is room for: the one that was asked for longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The values of the `most` keys that were asked for last.

    Examples
    --------
    >>> squares = Recent[int, int](2)
    >>> [squares.find(number, lambda: number**2) for number in (2, 3, 2, 4)]
    [4, 9, 4, 16]
    >>> squares.get(3), squares.values()
    (None, (4, 16))
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, if it is kept."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def find(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key; where none is kept, make it and keep it."""
        if key not in self._values:
            self.keep(key, make())
        self._values.move_to_end(key)
        return self._values[key]

    def keep(self, key: Key, value: Value) -> None:
        """Keep the value of a key that has none."""
        self._values[key] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)

    def values(self) -> tuple[Value, ...]:
        """Return all values that are kept, the one that was asked for last at the end."""
        return tuple(self._values.values())

    def clear(self) -> None:
        """Keep nothing of it."""
        self._values.clear()
