"""Mosaic's own captured steps with FlashInfer's kernels in place of `kv_attention`: `flashinfer` of `benchmarks.sparse`.

Keys stay where Mosaic has them, and FlashInfer reads them there. In an extent of n rows those of one layer and head lie side by
side; so pages of one block are views of `kv`, whose next head is n keys further, and a request's first page follows from its first
row. Each block of a step is a sequence of its own for FlashInfer, which sees all keys up to its own: so a block that is being
committed and the one behind it share a step, as Mosaic has it. A step of one block alone takes the kernels without pages, the
faster ones. FlashInfer plans on the host what its blocks do, before a step whose lengths are not those of the one before; that is
part of the step. The last layer keeps Mosaic's kernel: it has queries of the rows to decide alone, which are others in every step.

In its own layout FlashInfer reads other keys, random ones, too, of as many tokens: keys and values apart, those of a token side by
side. What the steps store is not among them, so that storing takes it nothing. The results of every layer are held against plain
attention before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.bench.meters import synchronise
from mosaic.errors import UsageError
from mosaic.kernels.binding import kernel_of
from mosaic.models.architecture import Architecture
from mosaic.registrar.operators import operator
from mosaic.runtime.steps import StepRequest, StepResult, StepRunner

__all__ = ["TOLERANCE", "Block", "FlashInferSteps", "blocks_of", "error_of", "keys_of", "pages_of", "with_flashinfer"]

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


class Stored:
    """Keys where Mosaic has them."""

    layout: Final = "HND"

    def __init__(self, architecture: Architecture) -> None:
        self._arch = architecture

    def first(self, block: Block) -> int:
        """Where a block's keys begin in what `of` views."""
        return block.row * 2 * self._arch.layers * self._arch.attention.kv_heads

    def of(self, kv: Tensor, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and its values, [keys, K, H]."""
        return keys_of(kv, layer, rows=rows, heads=self._arch.attention.kv_heads, size=self._arch.attention.head_size)

    def pages(self, k: Tensor) -> Tensor:
        """The same as pages of one block each."""
        return pages_of(k, self._arch.block)


class Apart:
    """Other keys as FlashInfer prefers them, random ones: [keys, K, H] of each layer, a request's side by side.

    Parameters
    ----------
    requests, keys
        How many there are, and the most keys of one: whole blocks.
    """

    layout: Final = "NHD"

    def __init__(self, architecture: Architecture, requests: int, keys: int, device: str) -> None:
        self._arch, self._keys, self._slots = architecture, keys, dict[int, int]()
        self._requests = requests
        shape = requests * keys, architecture.attention.kv_heads, architecture.attention.head_size
        dtype = getattr(torch, architecture.dtype)
        self._layers = [
            (torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device))
            for _ in range(architecture.layers - 1)
        ]

    def first(self, block: Block) -> int:
        """Where a block's keys begin: those of a request in the order in which requests come."""
        slot = self._slots.setdefault(block.row, len(self._slots))
        if slot >= self._requests or block.keys > self._keys:
            raise UsageError(
                f"there are keys of {self._requests} requests of {self._keys}, not of {slot + 1} or of {block.keys}."
            )
        return slot * self._keys

    def of(self, kv: Tensor, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and its values, [keys, K, H], whatever Mosaic has stored."""
        return self._layers[layer]

    def pages(self, k: Tensor) -> Tensor:
        """The same as pages of one block each."""
        return k.view(-1, self._arch.block, *k.shape[1:])


class FlashInferSteps:
    """A runner of captured steps that attend with FlashInfer; `with_flashinfer` makes it.

    Parameters
    ----------
    architecture
        Of the model whose steps they are.
    own
        Mosaic's launch.
    keys
        Which are read.
    device
        "cuda", or "cpu" where FlashInfer is stood in for.
    """

    def __init__(self, architecture: Architecture, own: Callable[..., None], keys: Stored | Apart, device: str) -> None:
        self._architecture, self._own, self._keys, self._device = architecture, own, keys, device
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

    def request_table(self) -> None:
        """Return no table: FlashInfer plans each step on the host, which knows the requests of generators alone."""

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step."""
        self._plan(requests)
        results: list[StepResult] = self._runner.step(requests)
        return results

    def _plan(self, requests: Sequence[StepRequest]) -> None:
        rows, blocks = blocks_of(requests, self._architecture.block)
        if rows != (self.rows or rows):
            raise UsageError(
                f"steps were captured over extents of {self.rows} rows, not {rows}; compile the model anew."
            )
        self.rows = rows
        if len(blocks) not in self._planned:
            self._planned[len(blocks)] = _Planned(self._architecture, self._keys, len(blocks), self._device)
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
        """Hold the last step of each size against plain attention over the keys that are there, in every layer that attends with
        FlashInfer; requests still have them.

        Raises
        ------
        UsageError
            If it is more than bfloat16 explains, or if no step was captured.
        """
        captured = [planned for planned in self._planned.values() if planned.captured]
        if not captured:
            raise UsageError("no captured step attends with FlashInfer.")
        synchronise(self._device == "cuda")
        for planned, layer in product(captured, range(self._architecture.layers - 1)):
            error = planned.error(layer, self.rows)
            if not error < TOLERANCE:
                raise UsageError(f"FlashInfer's steps are off by {error:.3f} of the largest result in layer {layer}.")


class _Planned:
    """FlashInfer's kernels for steps of so many blocks."""

    def __init__(self, architecture: Architecture, keys: Stored | Apart, count: int, device: str) -> None:
        import flashinfer

        self._arch, self._keys, self._alone, self._device = architecture, keys, count == 1, device
        self._blocks = list[Block]()
        self._kv: Tensor | None = None
        self.captured = 0
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

        def whole(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        bounds: dict[str, Any] = {"use_cuda_graph": True, "backend": "fa2", "qo_indptr_buf": whole(count + 1)}
        if self._alone:
            self._kernels = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                workspace, "NHD", kv_indptr_buf=whole(count + 1), **bounds
            )
        else:
            pages = count * -(-architecture.max_context // architecture.block)
            self._kernels = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, keys.layout, paged_kv_indptr_buf=whole(count + 1), paged_kv_indices_buf=whole(pages),
                paged_kv_last_page_len_buf=whole(count), **bounds,
            )  # fmt: skip

    def plan(self, blocks: list[Block]) -> None:
        """Have the next step attend so."""
        if blocks == self._blocks:
            return
        self._blocks = blocks
        arch, size = self._arch, self._arch.block
        begins = torch.arange(len(blocks) + 1, dtype=torch.int32) * size
        heads, dtype = (
            (arch.attention.heads, arch.attention.kv_heads, arch.attention.head_size),
            getattr(torch, arch.dtype),
        )
        common: dict[str, Any] = {"causal": False, "q_data_type": dtype, "kv_data_type": dtype}
        firsts = [self._keys.first(block) for block in blocks]
        if any(first % size for first in firsts):
            raise UsageError(f"extents that begin at the keys {firsts} do not begin with a page of {size}.")
        synchronise(
            self._device == "cuda"
        )  # FlashInfer's plan is written over the one that a step in flight may still read
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
            self._kernels.plan(begins, bounds, torch.cat(pages).to(self._device), last, *heads, size, **common)
        synchronise(self._device == "cuda")

    def run(self, q: Tensor, kv: Tensor, layer: int, rows: int, y: Tensor) -> None:
        """Launch the kernels over one layer."""
        k, v = self._keys.of(kv, layer, rows)
        q, y = (tensor.view(-1, self._arch.attention.heads, self._arch.attention.head_size) for tensor in (q, y))
        if self._alone:
            self._kernels.run(q, k, v, out=y)
        else:
            self._kernels.run(q, (self._keys.pages(k), self._keys.pages(v)), out=y)
        self._kv = kv
        self.captured += self._device == "cpu" or torch.cuda.is_current_stream_capturing()

    def error(self, layer: int, rows: int) -> float:
        """The largest difference from plain attention in float32, relative to the largest result, for random queries."""
        arch, kv = self._arch, self._kv
        assert kv is not None
        q = torch.randn(
            arch.block * len(self._blocks),
            arch.attention.heads * arch.attention.head_size,
            dtype=kv.dtype,
            device=self._device,
        )
        y = torch.empty_like(q)
        self.run(q, kv, layer, rows, y)
        k, v = self._keys.of(kv, layer, rows)
        found = 0.0
        for block, *both in zip(self._blocks, q.split(arch.block), y.split(arch.block), strict=True):
            asked, given = (part.view(arch.block, arch.attention.heads, arch.attention.head_size) for part in both)
            seen = slice(self._keys.first(block), self._keys.first(block) + block.keys)
            found = max(found, error_of(asked, k[seen], v[seen], given))
        return found


def error_of(q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> float:
    """Return the largest difference of y [T, N, H] from plain attention in float32 of q over all of k and v [S, K, H], relative to
    the largest result."""
    group, worst, largest = q.shape[1] // k.shape[1], 0.0, 0.0
    for head in range(k.shape[1]):
        own = slice(head * group, (head + 1) * group)
        mine, given = (part[:, own].transpose(0, 1).float() for part in (q, y))
        expected = scaled_dot_product_attention(mine, *(x[:, head].float().expand(group, -1, -1) for x in (k, v)))
        worst = max(worst, float((given - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst / max(largest, 1e-30)


@contextmanager
def with_flashinfer(
    architecture: Architecture, *, apart: tuple[int, int] | None = None, device: str = "cuda"
) -> Iterator[FlashInferSteps]:
    """Models that are compiled meanwhile attend to kept keys with FlashInfer; one model at a time, and its prefix of one length.

    Parameters
    ----------
    apart
        Read other keys, in its own layout: of so many requests, and the most of each. None: those that Mosaic has stored.
    """
    major, minor = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    ways = [way for way in operator("kv_attention").on(device) if way.runs_on(10 * major + minor)]
    modules = {kernel_of(way): kernel_of(way).launch for way in ways}
    own = next(iter(modules.values()))
    keys = Stored(architecture) if apart is None else Apart(architecture, *apart, device)
    steps = FlashInferSteps(architecture, own, keys, device)
    for module in modules:
        module.launch = steps.attend
    try:
        yield steps
    finally:
        for module, launch in modules.items():
            module.launch = launch
