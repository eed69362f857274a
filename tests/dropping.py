"""A policy that drops rows inside a layer, as a newcomer would write it: a part, two operators, and their kernels.

A row weighs what its queries add up to: in the layer that is cut, less the same in the first layer. Rows that weigh at least
as much as their sequence's limit are kept, and the first of each window is. They come in reverse order, so that nothing can
rely on an order. Nothing here is known to any file of the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from reference_runner import KV, Network
from torch import Tensor

from mosaic import Implementation, Operator
from mosaic.models.architecture import Architecture
from mosaic.models.inputs import Input
from mosaic.models.parts import KEPT, Commit, Cut, KeptRows
from mosaic.models.phase import Phase

__all__ = ["ALL", "CUT", "UNCUT", "Dropping", "DroppingNetwork", "limits", "selections"]


selections: list[int] = []
"""Tokens of each launch of `select`; replays of a captured one are none."""


def weigh(*, q: Tensor, weight: Tensor, scratch: Tensor | None = None) -> None:
    torch.sum(q, 1, out=weight)


def select(
    *, before: Tensor, after: Tensor, limit: Tensor, cu_seqlens: Tensor, rows: Tensor, bounds: Tensor, total: Tensor,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Kept rows first, sequence by sequence, each sequence's from its last to its first; then anything."""
    selections.append(rows.shape[0])
    found, ends = list[int](), [0]
    for (start, end), least in zip(pairwise(cu_seqlens.tolist()), limit.tolist(), strict=True):
        weights = (after[start:end] - before[start:end]).tolist()
        found += [row for row in range(end - 1, start - 1, -1) if row == start or weights[row - start] >= least]
        ends.append(len(found))
    rows.copy_(torch.tensor(found + [0] * (rows.shape[0] - len(found))))
    bounds.copy_(torch.tensor(ends))
    total.fill_(len(found))


def weigh_on_card(*, q: Tensor, weight: Tensor, scratch: Tensor | None = None) -> None:
    kernels = importlib.import_module("dropping_triton")
    kernels.weigh_rows[(q.shape[0],)](q, weight, q.stride(0), q.shape[1], B=64)


def select_on_card(
    *, before: Tensor, after: Tensor, limit: Tensor, cu_seqlens: Tensor, rows: Tensor, bounds: Tensor, total: Tensor,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """The same, on the device alone."""
    selections.append(rows.shape[0])
    kernels = importlib.import_module("dropping_triton")
    sizes = limit.shape[0], rows.shape[0]
    kernels.select_rows[(1,)](before, after, limit, cu_seqlens, rows, bounds, total, *sizes, B=32)


WEIGH: Final = Operator(
    name="weigh_rows", operands="q:a[T, Q] -> weight:f32[T]",
    implementations=(Implementation(backend="cpu", kernel=weigh), Implementation(backend="cuda", kernel=weigh_on_card)),
)  # fmt: skip
SELECT: Final = Operator(
    name="select_rows", operands="""
        before@:f32[T] after@:f32[T] limit@:f32[B] cu_seqlens@:i32[B+1] -> rows:i64[T] bounds:i32[B+1] total:i64[1]
    """,
    implementations=(Implementation(backend="cpu", kernel=select), Implementation(backend="cuda", kernel=select_on_card)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropping(Cut):
    """Drops rows that weigh less than their sequence's limit, `StepRequest.values["limit"]`; none where there is no limit."""

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        return (
            Input(
                name="limit", dtype="float32", per="sequence",
                value=lambda window: window.request.values.get("limit", ALL),
            ),
        )  # fmt: skip

    def observe(self, step: Any, layer: int, q: Any) -> None:
        if layer in (0, self.layer):
            step.g.add_op(WEIGH, q, out=step.g.buffer("weight", (step.tokens,), "float32"))

    def select(self, step: Any, into: KeptRows) -> None:
        weights = (step.g[f"layers.{layer}/weight"] for layer in (0, self.layer))
        step.g.add_op(SELECT, *weights, step.inputs["limit"], step.cu_seqlens, out=tuple(into))


ALL: Final = float("-inf")
TOP: Final = Commit(score="confidence", rule="top")
UNCUT: Final = Phase(cache=KEPT, commit=TOP)
CUT: Final = Phase(cache=KEPT, commit=TOP, cut=Dropping())


# --- an independent statement -----------------------------------------------------------------------------------------


@dataclass
class DroppingNetwork(Network):
    """The same transformer in plain PyTorch, of which later layers compute the rows that are kept."""

    arch: Architecture
    tensors: dict[str, Tensor]
    layer: int = 1
    limit: float = ALL
    kept: list[int] = field(default_factory=list)  # of the last window
    weights: list[float] = field(default_factory=list)

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor) -> None:
        """Take note of a window's queries [T, N, H] in a layer, and of the keys [P, K H] of its sequence."""
        sums = q.flatten(1).sum(1).tolist()
        self.weights = sums if layer == 0 else [now - before for now, before in zip(sums, self.weights, strict=True)]

    def choose(self, positions: Tensor) -> list[int]:
        """The rows that are kept, of those at these positions."""
        return [row for row, weight in enumerate(self.weights) if row == 0 or weight >= self.limit]

    def sees(self, key_len: int) -> int:
        """The number of keys that the kept rows see."""
        return key_len

    def hidden(self, tokens: Tensor, start: int, kv: KV, key_len: int, positions: Tensor | None = None) -> Tensor:
        """Hidden rows of a window, whose tokens may stand apart; those that were dropped are NaN."""
        arch, names, count = self.arch, self.arch.names, len(tokens)
        positions = torch.arange(start, start + count) if positions is None else positions.long()
        rows = torch.arange(count)
        x = self.tensors[names.embedding][tokens]
        for layer in range(arch.layers):
            own = {name: getattr(names, name).format(layer=layer) for name in ("attention_norm", "ffn_norm", "query", "key",
                   "value", "output", "gate", "up", "down", "query_norm", "key_norm")}  # fmt: skip
            normed = self._norm(x, own["attention_norm"])
            q, k, v = (
                self._project(normed, own[name]).view(len(x), -1, arch.attention.head_size)
                for name in ("query", "key", "value")
            )
            if arch.attention.head_norms:
                q, k = self._norm(q, own["query_norm"]), self._norm(k, own["key_norm"])
            q, k = self._rotate(q, positions[rows]), self._rotate(k, positions[rows])
            for row, place in enumerate(positions[rows].tolist()):
                kv[layer][0][place], kv[layer][1][place] = k[row].flatten(), v[row].flatten()
            if layer in (0, self.layer):
                self.observe(layer, q, kv[layer][0], positions)
            if layer == self.layer:
                self.kept = self.choose(positions)
                rows, key_len = torch.tensor(self.kept), self.sees(key_len)
                x, q = x[rows], q[rows]
            seen = (kv[layer][0][:key_len], kv[layer][1][:key_len])
            x = x + self._attend(q, *seen, positions[rows]) @ self.tensors[own["output"]].T
            normed = self._norm(x, own["ffn_norm"])
            gate, up = (normed @ self.tensors[own[name]].T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.tensors[own["down"]].T
        found = torch.full((count, arch.hidden), torch.nan)
        found[rows] = self._norm(x, names.final_norm)
        return found


def limits(weights: Sequence[float], count: int) -> float:
    """A limit by which `count` rows of a window are kept, and which no row is near; the first row is one of them."""
    ranked = sorted(weights[1:], reverse=True)
    if count > len(ranked):
        return ALL
    return ranked[0] + 1.0 if count == 1 else (ranked[count - 2] + ranked[count - 1]) / 2
