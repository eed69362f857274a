"""y = x[rows]: hidden states [C, D] of the rows that will be unembedded, and their positions [C]."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require


def infer(x: Spec, rows: Spec) -> tuple[Spec]:
    require(len(rows.shape) == 1 and rows.dtype in ("int64", "int32"), "rows must be a vector of int64 or int32")
    return (Spec((rows.shape[0], *x.shape[1:]), x.dtype),)


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    return specs["rows"].bytes + 2 * specs["y"].bytes


OPERATOR = Operator(
    name="gather_rows",
    reads=("x", "rows"),
    writes=("y",),
    whole=frozenset({"x"}),
    infer=infer,
    bytes_moved=bytes_moved,
    rate_rows=lambda x, rows: rows.shape[0],
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.gather_rows"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.gather_rows"),
    ),
)
