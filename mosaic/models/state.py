"""The states of a model's steps: named memory that outlives a step, in rows that owners hold.

A part of a phase lists its states; graph, plans, admission and the engine learn of them from the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.errors import GraphError
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.request_table import Column

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
        Columns of a row; 0: a row is one element. A subclass may compute `columns` from the model.
    dtype
        Of its elements; the model's, if not given.
    extents
        Its layout: whether neighbouring rows that an owner is given at once are an extent, which operators lay out as one,
        and which goes back as one. Otherwise each row is laid out, and goes back, by itself.
    together
        Whether the rows that an owner is given at once lie side by side: then holes that are too small are left.
    least_rows
        The fewest rows that steps are planned for, so that few plans serve while rows grow: few, if a row is large.
    slot
        Which of a table's columns from `Column.OWN` on says which row of it a request has. States that one request may have
        rows of differ in it, unless it always has the same rows of both.

    Raises
    ------
    GraphError
        If the dtype is unknown.

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
    together: bool = False
    slot: int = 0

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in ITEMSIZE:
            raise GraphError(f"state '{self.name}': unknown dtype '{self.dtype}', one of {', '.join(ITEMSIZE)}")

    def __hash__(self) -> int:
        """That of its name: admission and steps look states up all the time."""
        return hash(self.name)

    @property
    def rows_dim(self) -> str:
        """The dim of its rows."""
        return f"{self.name}_rows"

    @property
    def own_column(self) -> int:
        """The column of a table that says which row of it a request has; -1 there: none."""
        return Column.OWN + self.slot

    def columns(self, arch: Architecture) -> int:
        """Return the columns of a row in a model; 0 if it is one element."""
        return self.width

    def dtype_in(self, arch: Architecture) -> str:
        """Return the dtype of its elements in a model."""
        return self.dtype or arch.dtype

    def register(self, g: Graph, arch: Architecture) -> Buffer:
        """Declare the state in a graph; a second call returns the same buffer."""
        rows, columns = g.dim(self.rows_dim), self.columns(arch)
        return g.state(self.name, (rows, columns) if columns else (rows,), self.dtype_in(arch))


def rows_by_name(rows: Mapping[State, int]) -> dict[str, int]:
    """Return the states with rows, ordered by name.

    >>> rows_by_name({State(name="summary", width=1): 3, State(name="kv", width=2): 0})
    {'summary': 3}
    """
    return {state.name: rows[state] for state in sorted(rows, key=lambda state: state.name) if rows[state]}
