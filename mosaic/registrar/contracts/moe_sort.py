"""Sort assignments by expert, stably: order[C*k] of flat assignment ids, offsets[E+1] of each expert's run."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Spec, require


def infer(experts: Spec, *, num_experts: int) -> tuple[Spec, Spec]:
    require(len(experts.shape) == 2, "experts must be [rows, top_k]")
    return Spec((experts.elements,), "int64"), Spec((num_experts + 1,), "int64")


CONTRACT = Contract(name="moe_sort", reads=("experts",), writes=("order", "offsets"), infer=infer)
