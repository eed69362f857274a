"""Scratch of the CUDA implementations: cuBLAS for GEMMs, Triton and cuDNN for the rest.

The cuBLAS workspace belongs to the process (one per handle and stream), so it
is a device's `library_bytes`, not an op's scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mosaic.registrar.contract import Dim

Shapes = Mapping[str, tuple[Dim, ...]]

CUDNN_WORKSPACE_BYTES: Final = 256
UNEMBED_SPLITS: Final = 8
"""Vocabulary splits of the fused unembedding; each keeps one partial of the five statistics per row."""
PARTIAL_BYTES: Final = 24
SORT_BLOCK: Final = 1024


def attention(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """The workspace cuDNN's static attention graphs ask for (256 B, measured on an H200)."""
    return CUDNN_WORKSPACE_BYTES


def unembed_stats(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """Partial statistics per row and vocabulary split, combined by a second launch."""
    return shapes["x"][0] * UNEMBED_SPLITS * PARTIAL_BYTES


def moe_sort(shapes: Shapes, dtypes: Mapping[str, str], attrs: Mapping[str, Any]) -> Dim:
    """One histogram of experts per block of assignments, for a stable counting sort without atomics."""
    rows, top_k = shapes["experts"]
    return rows * top_k * 4 + (attrs["num_experts"] + 1) * SORT_BLOCK * 4


SCRATCH: Final = {"attention": attention, "unembed_stats": unembed_stats, "moe_sort": moe_sort}
