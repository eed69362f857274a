"""y[C] = canvas[rows], and `open_id` where a position is open: where the canvas has -1.

A canvas is a state of tokens, one a position, that steps read their windows from and write their decisions to. A row
outside the canvas is open.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require

OPEN: Final = -1
"""What a canvas has where nothing is decided."""


def infer(canvas: Spec, rows: Spec, *, open_id: int) -> tuple[Spec]:
    require_canvas(canvas, rows)
    return (rows,)


def require_canvas(canvas: Spec, rows: Spec) -> None:
    """Refuse what is no canvas, or does not say which of its rows."""
    for name, spec in (("canvas", canvas), ("rows", rows)):
        require(len(spec.shape) == 1 and spec.dtype == "int64", f"{name} must be a vector of int64, not {spec}")


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    return 3 * specs["rows"].bytes


OPERATOR = Operator(
    name="read_canvas",
    reads=("canvas", "rows"),
    writes=("y",),
    whole=frozenset({"canvas"}),
    infer=infer,
    bytes_moved=bytes_moved,
    rate_rows=lambda canvas, rows, **_: rows.shape[0],
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.read_canvas"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.read_canvas"),
    ),
    roles={"y": "hidden"},
)
