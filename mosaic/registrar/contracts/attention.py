"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head: full bidirectional, varlen, grouped queries.

Queries may be sliced by a region, keys and values never; y may overwrite q.
`pairs` is the number of query-key pairs, the sum of squared sequence lengths.
"""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(
    q: Spec, k: Spec, v: Spec, cu_seqlens: Spec, *, heads: int, kv_heads: int, head_size: int, scale: float, pairs: Dim
) -> tuple[Spec]:
    require(heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} groups")
    require(q.shape[-1] == heads * head_size, f"q must have {heads} heads of {head_size}")
    require(
        k.shape == v.shape and k.shape[-1] == kv_heads * head_size, f"k and v must have {kv_heads} heads of {head_size}"
    )
    return (q,)


def flops(q: Spec, k: Spec, v: Spec, cu_seqlens: Spec, *, heads: int, head_size: int, pairs: Dim, **_: object) -> Dim:
    return 4 * pairs * heads * head_size


CONTRACT = Contract(
    name="attention",
    reads=("q", "k", "v", "cu_seqlens"),
    writes=("y",),
    whole=frozenset({"k", "v"}),
    inplace=(("y", "q"),),
    infer=infer,
    flops=flops,
    rate="attention",
)
