"""The floor of a step: its FLOPs at the rates that its own GEMM and attention shapes reach on this card, in this process.

What is counted are the products and the attention of a plan's ops, the head over the masked rows only; norms, rotary
embeddings, statistics, transfers and launches cost nothing here, so no implementation can be below it. Each shape is
timed as the plan launches it and at another number of rows, and the better rate counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mosaic import kernels
from mosaic.bench.meters import sustained
from mosaic.bench.plans import launch_shapes
from mosaic.planner.plan_records import PlanOp, PlanRecords
from mosaic.runtime.workspace import torch_dtype

__all__ = ["Floor"]

_SWEET_ROWS: Final = 2048
"""Rows at which dense products reach their best rate on the cards we have measured."""
_PRODUCTS: Final = {
    "linear": "x",
    "linear_add": "x",
    "unembed_stats": "x",
    "unembed_sample": "x",
    "grouped_linear": "x",
}


class Floor:
    """Measures rates once per shape and sums the floors of plans.

    Parameters
    ----------
    backend
        "cuda" or "cpu": whose attention kernels are timed.
    """

    def __init__(self, backend: str) -> None:
        self.backend, self.cuda = backend, backend == "cuda"
        self._rates: dict[tuple[Any, ...], float] = {}

    def of(self, records: PlanRecords) -> dict[str, Any]:
        """Sum the floor of a plan.

        Returns
        -------
        dict
            `floor_s`, and `floor_parts`: FLOPs, FLOP/s and seconds per kind and shape.
        """
        parts: dict[str, dict[str, Any]] = {}
        for op in records.ops:
            if op.kernel not in _PRODUCTS and op.kernel != "attention":
                continue
            shapes = launch_shapes(records, op)
            what = self._name(op, shapes)
            part = parts.setdefault(what, {"flops": 0, "rate": self._rate(records, op, shapes)})
            part["flops"] += op.flops
        for part in parts.values():
            part["seconds"] = part["flops"] / part["rate"]
        if self.cuda:
            torch.cuda.empty_cache()
        return {"floor_s": sum(part["seconds"] for part in parts.values()), "floor_parts": parts}

    def _name(self, op: PlanOp, shapes: Mapping[str, tuple[int, ...]]) -> str:
        named = ("q", "k") if op.kernel == "attention" else ("x", "weight")
        return f"{op.kernel} " + " x ".join("[" + ", ".join(map(str, shapes[name])) + "]" for name in named)

    def _rate(self, records: PlanRecords, op: PlanOp, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """The best FLOP/s of the candidates for one op."""
        dtype = torch_dtype(records.buffers[op.operands["q" if op.kernel == "attention" else "x"]].dtype)
        if op.kernel == "attention":
            candidates = self._attentions(records, op, shapes)
            return max(self.measured(key, partial(self._attention, op, *key[1:])) for key in candidates)
        weight = shapes["weight"]
        stacked = len(weight) == 3
        rows = -(-shapes["x"][0] // weight[0]) if stacked else shapes["x"][0]
        if op.kernel.startswith("unembed"):
            rows = min(rows, _SWEET_ROWS)  # bare logits of more rows would not fit small cards
        most = records.buffers[op.operands["x"]].shape[0]
        tried = {rows} if stacked else {rows, min(_SWEET_ROWS, max(most, rows))}
        return max(
            self.measured(("product", count, weight, dtype), partial(self._product, count, weight, dtype))
            for count in sorted(tried)
        )

    def measured(self, key: tuple[Any, ...], measure: Callable[[], float]) -> float:
        """Return the rate of a shape, measured when it is first asked for."""
        if key not in self._rates:
            self._rates[key] = measure()
        return self._rates[key]

    def _product(self, rows: int, weight: tuple[int, ...], dtype: torch.dtype) -> float:
        """FLOP/s of a bare [rows, I] @ [O, I].T, or of one for every expert at once."""
        outer, inner = weight[-2:]
        lead = weight[:-2]
        device = "cuda" if self.cuda else "cpu"
        x, w, y = (
            torch.randn(*lead, *shape, device=device, dtype=dtype)
            for shape in ((rows, inner), (outer, inner), (rows, outer))
        )
        multiply = torch.bmm if lead else torch.mm
        seconds = sustained(lambda: multiply(x, w.transpose(-1, -2), out=y), cuda=self.cuda)
        return 2 * rows * outer * inner * (lead[0] if lead else 1) / seconds

    def _attentions(
        self, records: PlanRecords, op: PlanOp, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[Any, ...]]:
        """Queries as the plan slices them, and all of them at once where no scratch depends on how many they are, on CUDA."""
        implementation = records.implementations.get("attention")
        dtypes = tuple(sorted((name, records.buffers[buffer].dtype) for name, buffer in op.operands.items()))
        for rows in sorted({shapes["q"][0], *((shapes["k"][0],) if self.cuda else ())}):
            sized = {**shapes, "q": (rows, *shapes["q"][1:]), "y": (rows, *shapes["y"][1:])}
            yield "attention", implementation, tuple(sorted(sized.items())), dtypes

    def _attention(
        self,
        op: PlanOp,
        implementation: str | None,
        shapes: tuple[tuple[str, tuple[int, ...]], ...],
        dtypes: tuple[tuple[str, str], ...],
    ) -> float:
        """FLOP/s of the plan's own implementation on one sequence."""
        device, sizes, kinds = "cuda" if self.cuda else "cpu", dict(shapes), dict(dtypes)
        operands: dict[str, Tensor] = {}
        for name, shape in sizes.items():
            kind = torch_dtype(kinds[name])
            operands[name] = (
                torch.randn(shape, device=device, dtype=kind)
                if name in "qkvy"
                else torch.empty(shape, device=device, dtype=kind)
            )
        keys = sizes["k"][0]
        operands["cu_seqlens"].fill_(keys)[0] = 0
        launch = kernels.load("attention", self.backend, *([implementation] if implementation else [])).launch
        seconds = sustained(lambda: launch(**operands, **op.attrs), cuda=self.cuda)
        return 4 * keys * sizes["q"][0] * sizes["q"][1] / seconds
