"""y[T, D] = table[ids]: token ids to hidden states."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require


def infer(ids: Spec, table: Spec) -> tuple[Spec]:
    require(len(ids.shape) == 1 and ids.dtype in ("int64", "int32"), "ids must be a vector of int64 or int32")
    require(len(table.shape) == 2, "the table must be [vocabulary, hidden]")
    return (Spec((ids.shape[0], table.shape[1]), table.dtype),)


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count only the gathered rows of the table."""
    return specs["ids"].bytes + 2 * specs["y"].bytes


OPERATOR = Operator(
    name="embedding",
    reads=("ids", "table"),
    writes=("y",),
    infer=infer,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.embedding"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.embedding"),
    ),
    roles={"y": "hidden"},
)
