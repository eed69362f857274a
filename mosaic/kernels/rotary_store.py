"""rotary_store: heads of q and k normed and rotated, q in place, k and v into the rows that their sequences own.

Row r of q is row `row_start + r` of the packed window. Legend: T tokens, N query heads, H head size, W width of keys.
"""

from torch import Tensor

from mosaic.kernels import head_norm, kv_store, rotary
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor,
    positions: Tensor, inv_freq: Tensor, layer: int, head_size: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, sequences: Tensor | None = None, eps: float = 0.0, factor: float = 1.0,
    row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
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
    *, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor,
    positions: Tensor, inv_freq: Tensor, layer: int, head_size: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, sequences: Tensor | None = None, eps: float = 0.0, factor: float = 1.0,
    row_start: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
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
