"""Scratch of the CUDA implementations, torch-free: cuBLAS for GEMMs, Triton and cuDNN for the rest.

The kernels carve their scratch by the same constants, so the two cannot disagree. The cuBLAS workspace belongs to the
process (one per handle and stream), so it is a device's `library_bytes`, not an op's scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.registrar.contract import Dim

__all__ = [
    "CUDNN_WORKSPACE_BYTES",
    "INVERSE_BYTES",
    "PARTIAL_BYTES",
    "SCRATCH",
    "SORT_BLOCK",
    "UNEMBED_ROWS",
    "unembed_splits",
]

Shapes = Mapping[str, tuple[Dim, ...]]

CUDNN_WORKSPACE_BYTES: Final = 256
UNEMBED_ROWS: Final = 64
"""Rows in one tile of the fused unembedding."""
UNEMBED_PROGRAMS: Final = 256
"""Programs that the fused unembedding wants at least: about two for each multiprocessor of a large card."""
UNEMBED_SPLITS: Final = 8
"""Fewest vocabulary splits of the fused unembedding; each keeps one partial of the five statistics per row."""
PARTIAL_BYTES: Final = 24
"""One partial: an int64 token and four float32."""
SORT_BLOCK: Final = 128
"""Assignments per block of the counting sort; each block counts every expert in an int32."""
INVERSE_BYTES: Final = 4


def attention(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """The workspace cuDNN's static attention graphs ask for (256 B, measured on an H200); the Triton kernel has none."""
    return CUDNN_WORKSPACE_BYTES


def unembed_stats(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """Partial statistics per row and vocabulary split, combined by a second launch.

    A bound linear in the rows of the partials of `unembed_splits`: where there are more than the fewest splits, the
    programs are no more than `UNEMBED_PROGRAMS`, of `UNEMBED_ROWS` rows each.
    """
    return (shapes["x"][0] * UNEMBED_SPLITS + UNEMBED_ROWS * UNEMBED_PROGRAMS) * PARTIAL_BYTES


def unembed_splits(rows: int) -> int:
    """Count the vocabulary splits for so many rows, a power of two: few rows need many splits to fill the GPU.

    >>> [unembed_splits(rows) for rows in (1, 64, 65, 2048, 100_000)]
    [256, 256, 128, 8, 8]
    """
    tiles = -(-rows // UNEMBED_ROWS)
    wanted = max(UNEMBED_PROGRAMS // max(tiles, 1), 1)
    return max(UNEMBED_SPLITS, 1 << (wanted.bit_length() - 1))


def moe_sort(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """One count of every expert per block of assignments, for a stable counting sort without atomics.

    A bound linear in the rows: 4 * E * ceil(A / B) <= A * ceil(4 * E / B) + 4 * E.
    """
    rows, top_k = shapes["experts"]
    counts_bytes = 4 * attrs["num_experts"]
    return rows * top_k * -(-counts_bytes // SORT_BLOCK) + counts_bytes


def moe_combine(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """The inverse of `order`, so that each row gathers its own outputs."""
    return shapes["order"][0] * INVERSE_BYTES


SCRATCH: Final = {
    "attention": attention,
    "moe_combine": moe_combine,
    "moe_sort": moe_sort,
    "unembed_stats": unembed_stats,
}
