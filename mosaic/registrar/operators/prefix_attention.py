"""y[T, N*H] and logsumexp[T, N]: `kv_attention`, and the log-sum-exp of the scores that each row and head adds up over.

With it the results over two sets of keys are joined (`joined_attention`): so what a block attends to of its prefix can be kept
(FlashBlock, arXiv 2602.05305). Operands, attributes and which keys a row sees are those of `kv_attention`; `seen[b]` may be any
number of first keys. For row r and query head g, logsumexp[r, g] is log(sum over the keys j that r sees of exp(q_r,g · k_j *
scale)), in float32. A row in no sequence, and one that sees no key, is left as it was in both. q is not overwritten: who joins
needs it.
"""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator
from mosaic.registrar.operators.kv_attention import ATTRS, ON_CUDA, QUERIES, SEEN, rules, with_sums
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
        *ON_CUDA,
    ),
    roles={"q": "attention", "y": "attention", "logsumexp": "statistics"},
)
