"""rotary_store: heads of q and k normed and rotated, q in place, k and v into the rows that their sequences own.

Contract: rotary_store(updates q[T, N*H] sliced, k[T, W] sliced, v[T, W] sliced, updates kv[R, L*2*W] whole, extents[X, 4] int64
whole, cu_extents[B+1] int32 whole, cu_seqlens[B+1] int32 whole, positions[T] int32 sliced, inv_freq[R/2] or [S, R/2] float32,
q_norm[H] and k_norm[H] or none, sequences[T] int32? sliced; layer, head_size, eps, factor): `head_norm`, `rotary` and `kv_store`
one after the other; k and v are only read. Row r of q is row `row_start + r` of the packed window. Legend: T tokens, N query
heads, H head size, W width of keys.
"""

from __future__ import annotations

from torch import Tensor

from mosaic.kernels import head_norm, kv_store, rotary
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import tiles_of

__all__ = ["bind", "launch", "reference"]


def bind(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    extents: Tensor,
    cu_extents: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    layer: int,
    head_size: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sequences: Tensor | None = None,
    eps: float = 0.0,
    factor: float = 1.0,
    row_start: int = 0,
    scratch: Tensor | None = None,
) -> Run:
    """Update q and kv."""
    operands = {"q": q, "k": k, "inv_freq": inv_freq} | ({} if q_norm is None else {"q_norm": q_norm})
    keys, rotation, norms = tiles_of("rotary_store", scratch, operands, head_size=head_size)
    parts: list[Run] = []
    for x, norm in ((q, q_norm), (keys, k_norm)):
        if norm is not None:
            parts.append(head_norm.bind(x=x, weight=norm, eps=eps, scratch=norms))
        parts.append(
            rotary.bind(
                x=x,
                positions=positions,
                inv_freq=inv_freq,
                head_size=head_size,
                sequences=sequences,
                factor=factor,
                scratch=rotation,
            )
        )
    store = kv_store.bind(
        k=keys, v=v, kv=kv, extents=extents, cu_extents=cu_extents, cu_seqlens=cu_seqlens, positions=positions, layer=layer,
        head_size=head_size, row_start=row_start,
    )  # fmt: skip

    def run() -> None:
        keys.copy_(k)
        for part in parts:
            part()
        store()

    return run


launch = launcher(bind)


def reference(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    extents: Tensor,
    cu_extents: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    layer: int,
    head_size: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sequences: Tensor | None = None,
    eps: float = 0.0,
    factor: float = 1.0,
    row_start: int = 0,
) -> dict[str, Tensor]:
    """Return q and kv after the update, by name, in plain PyTorch."""
    turned = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        normed = x if norm is None else head_norm.reference(x=x, weight=norm, eps=eps)
        turned.append(
            rotary.reference(
                x=normed,
                positions=positions,
                inv_freq=inv_freq,
                head_size=head_size,
                sequences=sequences,
                factor=factor,
            )
        )
    after = kv_store.reference(
        k=turned[1], v=v, kv=kv, extents=extents, cu_extents=cu_extents, cu_seqlens=cu_seqlens, positions=positions, layer=layer,
        head_size=head_size, row_start=row_start,
    )  # fmt: skip
    return {"q": turned[0], "kv": after}
