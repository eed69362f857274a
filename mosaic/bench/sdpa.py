"""Which `scaled_dot_product_attention` backend a PyTorch engine uses: its default, the fastest of a timing, or a given one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mosaic.bench.meters import timed
from mosaic.models.architecture import Architecture

__all__ = ["BACKENDS", "Choice", "choose", "default_backend", "measure_backends", "using"]

BACKENDS: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_FUSED: Final = ("cudnn", "flash", "efficient")
_MOST_TOKENS: Final = 16384
"""Rates hardly change beyond; a longer timing would cost more than it tells."""

Choice = dict[str, object]


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
    return torch.randn(1, tokens, arch.heads, arch.head_size, device=device, dtype=dtype).transpose(1, 2)


def default_backend(arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """Name the backend that PyTorch picks by itself at this shape."""
    q = _operands(arch, min(tokens, _MOST_TOKENS), dtype, device)
    found = SDPBackend(torch._fused_sdp_choice(q, q, q))
    return next((name for name, backend in BACKENDS.items() if backend == found), "math")


def measure_backends(arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Time the fused backends at this shape: FLOP/s by name, of those that take it."""
    tokens = min(tokens, _MOST_TOKENS)
    q = _operands(arch, tokens, dtype, device)
    flops = 4 * tokens * tokens * arch.heads * arch.head_size
    rates = {}
    for name in _FUSED:
        try:
            with using(name):
                F.scaled_dot_product_attention(q, q, q)
                seconds = timed(lambda: F.scaled_dot_product_attention(q, q, q), 5, cuda=device.type == "cuda")
        except RuntimeError:  # "No available kernel": not for this card, dtype or shape
            continue
        rates[name] = flops / sorted(seconds)[len(seconds) // 2]
    return rates


def choose(wanted: str, arch: Architecture, tokens: int, dtype: torch.dtype, device: torch.device) -> Choice:
    """Settle on a backend: `used` (None: PyTorch's own choice), `default`, and the `rates` if any were measured."""
    default = default_backend(arch, tokens, dtype, device)
    if wanted != "fastest" or device.type != "cuda":
        named = wanted if wanted in BACKENDS else None
        return {"used": named or default, "forced": named, "default": default, "rates": {}}
    rates = measure_backends(arch, tokens, dtype, device)
    best = max(rates, key=lambda name: rates[name]) if rates else None
    return {"used": best or default, "forced": best, "default": default, "rates": rates}
