"""y[R, O] = x[R, I] @ weight[e].T for the rows of each expert e; offsets[E+1] bounds the runs."""

from __future__ import annotations

import sympy

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(x: Spec, weight: Spec, offsets: Spec) -> tuple[Spec]:
    require(len(weight.shape) == 3 and weight.shape[2] == x.shape[-1], f"weight must be [experts, out, {x.shape[-1]}]")
    require(offsets.shape == (weight.shape[0] + 1,), f"offsets must be [{weight.shape[0] + 1}]")
    return (Spec((x.shape[0], weight.shape[1]), x.dtype),)


def flops(x: Spec, weight: Spec, offsets: Spec) -> Dim:
    return 2 * x.elements * weight.shape[1]


def rows_per_expert(x: Spec, weight: Spec, offsets: Spec) -> Dim:
    """The rate is that of a GEMM with the average expert's rows."""
    return x.shape[0] / sympy.Integer(weight.shape[0])


def columns(x: Spec, weight: Spec, offsets: Spec) -> Dim:
    return weight.shape[1]


CONTRACT = Contract(
    name="grouped_linear",
    reads=("x", "weight", "offsets"),
    writes=("y",),
    infer=infer,
    flops=flops,
    rate="gemm",
    rate_rows=rows_per_expert,
    rate_columns=columns,
)
