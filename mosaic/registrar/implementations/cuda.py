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
    "KV_PARTIAL_ROWS",
    "PARTIAL_BYTES",
    "SAMPLED_PARTIAL_BYTES",
    "SCRATCH",
    "SORT_BLOCK",
    "UNEMBED_ROWS",
    "kv_splits",
    "unembed_splits",
]

Shapes = Mapping[str, tuple[Dim, ...]]

CUDNN_WORKSPACE_BYTES: Final = 256
UNEMBED_ROWS: Final = 128
"""Most rows in one tile of the fused unembedding."""
UNEMBED_PROGRAMS: Final = 320
"""Most programs that the fused unembedding starts to fill a GPU: two for each multiprocessor of the largest."""
UNEMBED_SPLITS: Final = 8
"""Most vocabulary splits of the fused unembedding once its rows fill the GPU; each keeps one partial per row."""
PARTIAL_BYTES: Final = 20
"""One partial of the statistics: an int32 token and four float32."""
SAMPLED_PARTIAL_BYTES: Final = 32
"""One with a sample as well: an int32 token and two float32 more."""
KV_PARTIAL_ROWS: Final = 160 * 128
"""Most rows in the tiles of all programs together where attention over kept keys is split over them."""
KV_SPLIT_KEYS: Final = 256
"""Least keys that are worth a program of their own."""
SORT_BLOCK: Final = 128
"""Assignments per block of the counting sort; each block counts every expert in an int32."""
INVERSE_BYTES: Final = 4


def attention(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """The workspace cuDNN's static attention graphs ask for (256 B, measured on an H200); the Triton kernel has none."""
    return CUDNN_WORKSPACE_BYTES


def kv_attention(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """Partial results of tiles that are split over keys, whatever the batch: a float32 row, its maximum and its sum."""
    return 4 * KV_PARTIAL_ROWS * (attrs["head_size"] + 2)


def kv_splits(tiles: int, tile_rows: int, keys: int, places: int) -> int:
    """Count the splits over keys for so many tiles of rows (of all heads), on a GPU with places for so many programs.

    Of shapes alone, so that a captured launch serves other lengths. None where the tiles fill the GPU by themselves.

    >>> [kv_splits(tiles, 64, 8192, 264) for tiles in (1, 8, 32, 200, 2048)]
    [32, 32, 8, 1, 1]
    """
    most = min(places // tiles, KV_PARTIAL_ROWS // (tiles * tile_rows), -(-keys // KV_SPLIT_KEYS))
    return max(1, most)


def unembed_stats(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """Partial statistics per row and vocabulary split, combined by a second launch.

    A bound linear in the rows of the partials of `unembed_splits`: where there are more than `UNEMBED_SPLITS`, the
    programs are no more than `UNEMBED_PROGRAMS`, of no more than `UNEMBED_ROWS` rows each.
    """
    return _partials(shapes["x"][0]) * PARTIAL_BYTES


def unembed_sample(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """Partial statistics and samples, as in `unembed_stats`."""
    return _partials(shapes["x"][0]) * SAMPLED_PARTIAL_BYTES


def _partials(rows: Dim) -> Dim:
    return rows * UNEMBED_SPLITS + UNEMBED_ROWS * UNEMBED_PROGRAMS


def unembed_splits(row_tiles: int, places: int) -> int:
    """Count the vocabulary splits for so many tiles of rows on a GPU that has places for so many programs at a time.

    Few tiles need many splits to fill the GPU. With many, of the splits that let the programs of one round share their
    operands in its cache, those are best that leave the fewest places idle in the last round.

    >>> [unembed_splits(tiles, 132) for tiles in (1, 16, 24, 128)]
    [132, 8, 5, 8]
    """
    places = min(places, UNEMBED_PROGRAMS)
    if places > UNEMBED_SPLITS * row_tiles:
        return places // row_tiles
    shared = range(UNEMBED_SPLITS // 2, UNEMBED_SPLITS + 1)
    return max(shared, key=lambda splits: (_filled(row_tiles * splits, places), splits))


def _filled(programs: int, places: int) -> float:
    return programs / (-(-programs // places) * places)


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
    "kv_attention": kv_attention,
    "moe_combine": moe_combine,
    "moe_sort": moe_sort,
    "unembed_sample": unembed_sample,
    "unembed_stats": unembed_stats,
}
