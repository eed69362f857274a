"""y[T, N*H] and logsumexp[T, N]: `kv_attention`, and the log-sum-exp of the scores that each row and head adds up over.

With it the results over two sets of keys are joined (`joined_attention`): so what a block attends to of its prefix can be kept
(FlashBlock, arXiv 2602.05305). Operands, attributes and which keys a row sees are those of `kv_attention`; `seen[b]` may be any
number of first keys. For row r and query head g, logsumexp[r, g] is log(sum over the keys j that r sees of exp(q_r,g · k_j *
scale)), in float32. A row in no sequence, and one that sees no key, is left as it was in both. q is not overwritten: who joins
needs it.
"""

from __future__ import annotations

from mosaic.registrar.operator import Dim, Implementation, Operator, Spec, exact
from mosaic.registrar.operators import kv_attention
from mosaic.registrar.operators.kv_attention import bytes_moved, flops, query_rows_and_heads, segment_results, with_sums
from mosaic.registrar.tiles import Tiled


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, seen: Spec, cu_seqlens: Spec, positions: Spec,
    *, layer: int, kv_heads: int, head_size: int, scale: float, span: Dim, keys: Dim, block: int = 0, parts: Dim = 1,
) -> tuple[Spec, Spec]:  # fmt: skip
    (y,) = kv_attention.infer(
        q, kv, extents, cu_extents, seen, cu_seqlens, positions, layer=layer, kv_heads=kv_heads, head_size=head_size,
        scale=scale, span=span, keys=keys, block=block, parts=parts,
    )  # fmt: skip
    return y, Spec((q.shape[0], exact(q.shape[1]) / head_size), "float32")


OPERATOR = Operator(
    name="prefix_attention",
    reads=("q", "kv", "extents", "cu_extents", "seen", "cu_seqlens", "positions"),
    writes=("y", "logsumexp"),
    whole=frozenset({"kv", "extents", "cu_extents", "seen", "cu_seqlens"}),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=query_rows_and_heads,
    implementations=(
        Implementation(
            name="cpu",
            backend="cpu",
            kernel="mosaic.kernels.prefix_attention",
            scratch=Tiled(with_sums),
            row_origin="q",
        ),
        Implementation(
            name="triton",
            backend="cuda",
            kernel="mosaic.kernels.cuda.prefix_attention",
            scratch=segment_results,
            row_origin="q",
        ),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.prefix_attention:launch_invariant",
            scratch=segment_results,
            row_origin="q",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"q": "attention", "y": "attention", "logsumexp": "statistics"},
)
