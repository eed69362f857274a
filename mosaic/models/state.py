"""The states of a model's steps: memory by name that outlives a step, in rows that owners hold.

A part of a phase names the states that it has; from then on the graph, plans, admission and the engine know them by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.errors import GraphError
from mosaic.registrar.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.registrar.graph import Buffer, Graph

__all__ = ["State", "rows_by_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state: two of one name are the same memory, so they have the same rows.

    Parameters
    ----------
    name
        In graphs and reports; its number of rows is the dim `NAME_rows`, its pool is `state/NAME`.
    width
        Columns of a row; 0: a row is one element. A subclass may have its `columns` depend on the model.
    dtype
        Of its elements; the model's, if not given.
    extents
        Its layout: whether neighbouring rows that an owner is given at once are an extent, which operators lay out as one,
        and which goes back as one. Otherwise each row is laid out, and goes back, by itself.
    least_rows
        Rows that steps are planned for at least, so that few plans serve while rows get more: few, where a row is large.

    Raises
    ------
    GraphError
        If there is no such dtype.

    Examples
    --------
    >>> State(name="summary", width=64, dtype="float32").rows_dim
    'summary_rows'
    """

    name: str
    width: int = 0
    dtype: str = ""
    extents: bool = False
    least_rows: int = 64

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in ITEMSIZE:
            raise GraphError(f"state '{self.name}': unknown dtype '{self.dtype}', one of {', '.join(ITEMSIZE)}")

    @property
    def rows_dim(self) -> str:
        """The dim that its rows are."""
        return f"{self.name}_rows"

    def columns(self, arch: Architecture) -> int:
        """Return the columns of a row in a model; 0 where it is one element."""
        return self.width

    def dtype_in(self, arch: Architecture) -> str:
        """Return the dtype of its elements in a model."""
        return self.dtype or arch.dtype

    def register(self, g: Graph, arch: Architecture) -> Buffer:
        """Declare the state in a graph; again, and it is the same buffer."""
        rows, columns = g.dim(self.rows_dim), self.columns(arch)
        return g.state(self.name, (rows, columns) if columns else (rows,), self.dtype_in(arch))


def rows_by_name(rows: Mapping[State, int]) -> dict[str, int]:
    """Return the states that have rows, in the order of their names.

    >>> rows_by_name({State(name="summary", width=1): 3, State(name="kv", width=2): 0})
    {'summary': 3}
    """
    return {state.name: rows[state] for state in sorted(rows, key=lambda state: state.name) if rows[state]}
