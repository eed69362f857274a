"""Mosaic's own captured steps with FlashInfer's kernels in place of `kv_attention`: `flashinfer` of `benchmarks.sparse`.

Keys stay where Mosaic has them, and FlashInfer reads them there. In an extent of n rows those of one layer and head lie side by
side; so pages of one block are views of `kv`, whose next head is n keys further, and a request's first page follows from its first
row. Each block of a step is a sequence of its own for FlashInfer, which sees all keys up to its own: so a block that is being
committed and the one behind it share a step, as Mosaic has it. A step of one block alone takes the kernels without pages, the
faster ones. FlashInfer plans on the host what its blocks do, before a step whose lengths are not those of the one before; that is
part of the step. The last layer keeps Mosaic's kernel: it has queries of the rows to decide alone, which are others in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mosaic.errors import UsageError
from mosaic.kernels import load
from mosaic.models.architecture import Architecture
from mosaic.runtime.launched import Launched
from mosaic.runtime.steps import StepRequest, StepResult, StepRunner

__all__ = ["Block", "FlashInferSteps", "blocks_of", "keys_of", "pages_of", "with_flashinfer"]

WORKSPACE_BYTES: Final = 1 << 28
TOLERANCE: Final = 0.02
"""Of a result in bfloat16, to the largest one."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of queries sees: so many keys of an extent, from its first row on."""

    row: int
    keys: int


def blocks_of(requests: Sequence[StepRequest], block: int) -> tuple[int, list[Block]]:
    """Return the rows of each request's extent, and the blocks of a step in the order of their queries.

    Raises
    ------
    UsageError
        If windows are not whole blocks, or the keys of a request do not lie in one extent, of one length for all.
    """
    found, rows = list[Block](), set[int]()
    for request in requests:
        extents = getattr(request.sequence, "extents", ())
        if len(extents) != 1 or request.token_ids.numel() % block:
            raise UsageError(
                f"FlashInfer's steps are of whole blocks of {block} whose keys lie in one extent, not of "
                f"{request.token_ids.numel()} tokens and {len(extents)} extents."
            )
        (row, count, _, _), end = extents[0], request.start + request.token_ids.numel()
        rows.add(count)
        found += [Block(row, keys) for keys in range(request.start + block, end + 1, block)]
    if len(rows) != 1:
        raise UsageError(f"FlashInfer's steps need extents of one length for all requests, not of {sorted(rows)} rows.")
    return rows.pop(), found


def keys_of(kv: Tensor, layer: int, *, rows: int, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """View one layer's keys and its values as [keys, K, H], for extents of `rows` rows.

    Those of an extent that begins in row r of `kv` begin at `r * kv.shape[1] / H`.
    """
    first = 2 * layer * heads * rows * size
    extent = rows * size
    count = (kv.numel() - first - 2 * heads * extent) // size + rows
    k, v = (
        kv.view(-1).as_strided((count, heads, size), (size, extent, 1), kv.storage_offset() + at)
        for at in (first, first + heads * extent)
    )
    return k, v


def pages_of(k: Tensor, block: int) -> Tensor:
    """View [keys, K, H] as pages of one block each, [pages, K, block, H]."""
    count, heads, size = k.shape
    strides = block * k.stride(0), k.stride(1), k.stride(0), 1
    return k.as_strided((count // block, heads, block, size), strides, k.storage_offset())


class FlashInferSteps:
    """A runner of captured steps that attend with FlashInfer; `with_flashinfer` makes it.

    Parameters
    ----------
    architecture
        Of the model whose steps they are.
    own
        Mosaic's launch.
    """

    def __init__(self, architecture: Architecture, own: Callable[..., None]) -> None:
        self._architecture, self._own = architecture, own
        self._runner: Any = None
        self._planned: dict[int, _Planned] = {}
        self.rows = 0
        """Of each request's extent."""

    def runs(self, runner: StepRunner) -> FlashInferSteps:
        """Take the model whose steps these are."""
        self._runner = runner
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step."""
        self._plan(requests)
        results: list[StepResult] = self._runner.step(requests)
        return results

    def launch(self, requests: Sequence[StepRequest]) -> Launched:
        """Begin one step."""
        self._plan(requests)
        launched: Launched = self._runner.launch(requests)
        return launched

    def _plan(self, requests: Sequence[StepRequest]) -> None:
        rows, blocks = blocks_of(requests, self._architecture.block)
        if rows != (self.rows or rows):
            raise UsageError(
                f"steps were captured over extents of {self.rows} rows, not {rows}; compile the model anew."
            )
        self.rows = rows
        if len(blocks) not in self._planned:
            self._planned[len(blocks)] = _Planned(self._architecture, len(blocks))
        self._planned[len(blocks)].plan(blocks)

    def attend(self, *, q: Tensor, kv: Tensor, layer: int, y: Tensor, row_start: int = 0, **others: Any) -> None:
        """Launch in place of `kv_attention`, but for the last layer."""
        if layer == self._architecture.layers - 1:
            self._own(q=q, kv=kv, layer=layer, y=y, row_start=row_start, **others)
            return
        blocks, over = divmod(q.shape[0], self._architecture.block)
        if over or row_start or blocks not in self._planned:
            raise UsageError(f"no step of {q.shape[0]} rows from row {row_start} on was planned with FlashInfer.")
        self._planned[blocks].run(q, kv, layer, self.rows, y)

    def verify(self) -> None:
        """Hold the last step of each size against plain attention over the keys that are there, for one layer; requests still
        have them.

        Raises
        ------
        UsageError
            If it is more than bfloat16 explains, or if no step was captured.
        """
        captured = [planned for planned in self._planned.values() if planned.captured]
        if not captured:
            raise UsageError("no captured step attends with FlashInfer.")
        torch.cuda.synchronize()
        error = max(planned.error(self.rows) for planned in captured)
        if not error < TOLERANCE:
            raise UsageError(f"FlashInfer's steps are off by {error:.3f} of the largest result.")


class _Planned:
    """FlashInfer's kernels for steps of so many blocks."""

    def __init__(self, architecture: Architecture, count: int) -> None:
        import flashinfer

        self._arch, self._alone = architecture, count == 1
        self._blocks = list[Block]()
        self._kv: Tensor | None = None
        self.captured = 0
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

        def whole(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device="cuda")

        bounds: dict[str, Any] = {"use_cuda_graph": True, "backend": "fa2", "qo_indptr_buf": whole(count + 1)}
        if self._alone:
            self._kernels = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                workspace, "NHD", kv_indptr_buf=whole(count + 1), **bounds
            )
        else:
            pages = count * -(-architecture.max_context // architecture.block)
            self._kernels = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "HND", paged_kv_indptr_buf=whole(count + 1), paged_kv_indices_buf=whole(pages),
                paged_kv_last_page_len_buf=whole(count), **bounds,
            )  # fmt: skip

    def plan(self, blocks: list[Block]) -> None:
        """Have the next step attend so."""
        if blocks == self._blocks:
            return
        self._blocks = blocks
        arch, size = self._arch, self._arch.block
        begins = torch.arange(len(blocks) + 1, dtype=torch.int32) * size
        heads = arch.heads, arch.kv_heads, arch.head_size
        common: dict[str, Any] = {"causal": False, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        firsts = [self._first(block) for block in blocks]
        if any(first % size for first in firsts):
            raise UsageError(f"extents that begin at the keys {firsts} do not begin with a page of {size}.")
        torch.cuda.synchronize()  # FlashInfer's plan is written over the one that a step in flight may still read
        if self._alone:
            bounds = torch.tensor([firsts[0], firsts[0] + blocks[0].keys], dtype=torch.int32)
            self._kernels.plan(begins, bounds, *heads, **common)
        else:
            counts = torch.tensor([0, *(block.keys // size for block in blocks)], dtype=torch.int32)
            pages = [
                torch.arange(first // size, first // size + block.keys // size, dtype=torch.int32)
                for first, block in zip(firsts, blocks, strict=True)
            ]
            last = torch.full((len(blocks),), size, dtype=torch.int32)
            bounds = counts.cumsum(0, dtype=torch.int32)
            self._kernels.plan(begins, bounds, torch.cat(pages).cuda(), last, *heads, size, **common)
        torch.cuda.synchronize()

    def _first(self, block: Block) -> int:
        """Where its keys begin in what `keys_of` views."""
        return block.row * 2 * self._arch.layers * self._arch.kv_heads

    def run(self, q: Tensor, kv: Tensor, layer: int, rows: int, y: Tensor) -> None:
        """Launch the kernels over one layer."""
        heads, size = self._arch.kv_heads, self._arch.head_size
        k, v = keys_of(kv, layer, rows=rows, heads=heads, size=size)
        q, y = (tensor.view(-1, self._arch.heads, size) for tensor in (q, y))
        if self._alone:
            self._kernels.run(q, k, v, out=y)
        else:
            self._kernels.run(q, (pages_of(k, self._arch.block), pages_of(v, self._arch.block)), out=y)
        self._kv = kv
        self.captured += torch.cuda.is_current_stream_capturing()

    def error(self, rows: int) -> float:
        """The largest difference from plain attention in float32, relative to the largest result, for random queries."""
        arch, kv = self._arch, self._kv
        assert kv is not None
        layer, tokens = arch.layers - 2, arch.block * len(self._blocks)
        q = torch.randn(tokens, arch.heads * arch.head_size, dtype=torch.bfloat16, device=kv.device)
        y = torch.empty_like(q)
        self.run(q, kv, layer, rows, y)
        k, v = keys_of(kv, layer, rows=rows, heads=arch.kv_heads, size=arch.head_size)
        found, group = 0.0, arch.heads // arch.kv_heads
        for block, asked, given in zip(self._blocks, q.split(arch.block), y.split(arch.block), strict=True):
            first = self._first(block)
            seen = slice(first, first + block.keys)
            for head in range(arch.kv_heads):
                own = slice(head * group * arch.head_size, (head + 1) * group * arch.head_size)
                mine, there = (
                    part[:, own].reshape(-1, group, arch.head_size).transpose(0, 1).float() for part in (asked, given)
                )
                expected = scaled_dot_product_attention(
                    mine, *(x[seen, head].float().expand(group, -1, -1) for x in (k, v))
                )
                found = max(found, float((there - expected).abs().max() / expected.abs().max()))
        return found


@contextmanager
def with_flashinfer(architecture: Architecture) -> Iterator[FlashInferSteps]:
    """Models that are compiled meanwhile attend to kept keys with FlashInfer; one model at a time, and its prefix of one length."""
    module = load("kv_attention", "cuda")
    own = module.launch
    steps = FlashInferSteps(architecture, own)
    module.launch = steps.attend
    try:
        yield steps
    finally:
        module.launch = own
