"""canvas[rows] = token where `taken` is not 0; everywhere, if it is left out. `read_canvas` says what a canvas is.

Rows are distinct where they are taken; one outside the canvas is that of nobody, and is left out.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.operators.read_canvas import require_canvas


def infer(token: Spec, rows: Spec, canvas: Spec, taken: Spec | None = None) -> tuple[()]:
    require_canvas(canvas, rows)
    require(token == rows, f"token must be {rows} as rows is, not {token}")
    wanted = Spec(rows.shape, "uint8")
    require(taken is None or taken == wanted, f"taken must be {wanted}, not {taken}")
    return ()


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    return 3 * specs["token"].bytes + (specs["taken"].bytes if "taken" in specs else 0)


OPERATOR = Operator(
    name="write_canvas",
    reads=("token", "rows", "canvas", "taken?"),
    updates=("canvas",),
    whole=frozenset({"canvas"}),
    infer=infer,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.write_canvas"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.write_canvas"),
    ),
    roles={"token": "statistics"},
)
