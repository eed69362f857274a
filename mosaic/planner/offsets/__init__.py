"""Offset assignment: give each buffer an address, so that buffers that live together never overlap.

`Problem` states it, `solve` answers with a `Solution` and what is proven about it, `validate` checks an answer,
`Order` replays one for other sizes. Importing this needs NumPy only.
"""

from .blocks import Blocks, blocks_of
from .minimalloc_csv import names_end, read_csv, write_csv
from .portfolio import SOLVERS, solve
from .problem import Problem, Solution, lower_bound
from .replay import Order
from .validity import Guard, validate

__all__ = [
    "SOLVERS",
    "Blocks",
    "Guard",
    "Order",
    "Problem",
    "Solution",
    "blocks_of",
    "lower_bound",
    "names_end",
    "read_csv",
    "solve",
    "validate",
    "write_csv",
]
