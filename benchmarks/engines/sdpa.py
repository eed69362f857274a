"""Which `scaled_dot_product_attention` backend a PyTorch engine uses: its default, the fastest of a timing, or a given one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engines.meters import sustained
from mosaic.models.architecture import Architecture

__all__ = [
    "BACKENDS",
    "Choice",
    "choose",
    "default_backend",
    "keep_unless_slower",
    "measure_backends",
    "seen_in",
    "using",
]

BACKENDS: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_FUSED: Final = ("cudnn", "flash", "efficient")
_MOST_TOKENS: Final = 16384
"""Rates barely change beyond it, so a longer timing is not worth its time."""

_KERNELS: Final = {"cudnn": ("cudnn", "sdpa"), "flash": ("flash_fwd",), "efficient": ("fmha_cutlass",)}
"""A substring of the names of a backend's kernels."""

Choice = dict[str, Any]
"""`used`, `forced` (None: PyTorch's own choice), `default`, and `rates`: FLOP/s by backend, where they were measured."""


@contextmanager
def using(backend: str | None) -> Iterator[None]:
    """Allow one backend only; None leaves the choice to PyTorch."""
    if backend is None:
        yield
        return
    with sdpa_kernel([BACKENDS[backend]]):
        yield


def _operands(arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One q (also k and v), [1, N, S, H] with heads side by side in memory, as a projection leaves them."""
    return torch.randn(1, tokens, arch.attention.heads, arch.attention.head_size, device=device, dtype=dtype).transpose(
        1, 2
    )


def default_backend(arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """Name the backend that PyTorch picks by itself at this shape."""
    q = _operands(arch, min(tokens, _MOST_TOKENS), dtype, device)
    found = SDPBackend(torch._fused_sdp_choice(q, q, q))
    return next((name for name, backend in BACKENDS.items() if backend == found), "math")


def measure_backends(arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Time the fused backends at this shape: FLOP/s by name, of the backends that support it."""
    tokens = min(tokens, _MOST_TOKENS)
    q = _operands(arch, tokens, dtype, device)
    flops = 4 * tokens * tokens * arch.attention.heads * arch.attention.head_size
    rates = {}
    for name in _FUSED:
        try:
            with using(name):
                seconds = sustained(
                    lambda: F.scaled_dot_product_attention(q, q, q), cuda=device.type == "cuda", least_s=0.02
                )
        except RuntimeError:  # "No available kernel": not for this card, dtype or shape
            continue
        rates[name] = flops / seconds
    return rates


def choose(wanted: str, arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> Choice:
    """Settle on a backend: as wanted, or the fastest of a timing on a card."""
    default = default_backend(arch, tokens, dtype, device)
    if wanted != "fastest" or device.type != "cuda":
        named = wanted if wanted in BACKENDS else None
        return {"used": named or default, "forced": named, "default": default, "rates": {}}
    rates = measure_backends(arch, tokens, dtype, device)
    best = max(rates, key=lambda name: rates[name]) if rates else None
    return {"used": best or default, "forced": best, "default": default, "rates": rates}


def keep_unless_slower(current: Choice, found: Choice, margin: float = 1.1) -> Choice:
    """Stay with the current backend unless the one found is faster by a margin: a switch compiles the step again.

    >>> rates = {"cudnn": 100.0, "flash": 105.0}
    >>> keep_unless_slower({"used": "cudnn"}, {"used": "flash", "forced": "flash", "rates": rates})["used"]
    'cudnn'
    """
    rates, before = found["rates"], current["used"]
    if before not in rates or rates[found["used"]] > margin * rates[before]:
        return found
    return {**found, "used": before, "forced": before}


def seen_in(trace: Mapping[str, Any]) -> str | None:
    """Name the backends whose kernels a step's trace holds; None if there are none.

    >>> seen_in({"traceEvents": [{"cat": "kernel", "name": "fmha_cutlassF_bf16_aligned_64x128_rf_sm80"}]})
    'efficient'
    """
    names = {str(event["name"]) for event in trace["traceEvents"] if event.get("cat") == "kernel"}
    seen = [
        backend for backend, words in _KERNELS.items() if any(all(word in name for word in words) for name in names)
    ]
    return ", ".join(seen) or None
