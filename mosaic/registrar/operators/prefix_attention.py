"""y[T, N*H] as in `kv_attention`, and logsumexp[T, N]: the log-sum-exp of each row and head's scores.

With it, results over two sets of keys are merged (`joined_attention`), so a block's attention to its prefix can be kept
(FlashBlock, arXiv 2602.05305). Operands, attributes and visible keys are those of `kv_attention`; `seen[b]` may be any
number of first keys. For row r and query head g, logsumexp[r, g] is log(sum over the keys j that r sees of exp(q_r,g ·
k_j * scale)), in float32. A row in no sequence, or without a visible key, is unchanged in both. q is not overwritten:
`joined_attention` reads it.
"""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator
from mosaic.registrar.operators.kv_attention import ATTRS, QUERIES, SEEN, rules, segment_results, with_sums
from mosaic.registrar.tiles import Tiled

OPERATOR = Operator(
    name="prefix_attention",
    operands=f"{QUERIES} -> y:a[T, G*kv_heads*head_size] logsumexp:f32[T, G*kv_heads]",
    attrs=ATTRS,
    rules=rules,
    flops="4*span*q",
    moved=SEEN,
    rate="attention",
    rate_rows="T*G*kv_heads",
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
