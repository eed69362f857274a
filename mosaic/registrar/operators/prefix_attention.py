"""y[T, N*H] as in `kv_attention`, and logsumexp[T, N]: the log-sum-exp of each row and head's scores.

With it, results over two sets of keys are merged (`joined_attention`), so a block's attention to its prefix can be kept
(FlashBlock, arXiv 2602.05305). Operands, attributes and visible keys are those of `kv_attention`; `seen[b]` may be any
number of first keys. For row r and query head g, logsumexp[r, g] is log(sum over the keys j that r sees of exp(q_r,g ·
k_j * scale)), in float32. A row in no sequence, or without a visible key, is unchanged in both. q is not overwritten:
`joined_attention` reads it.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.operators.kv_attention import ATTRS, ON_CUDA, QUERIES, SEEN, rules, with_sums

OPERATOR = Operator(
    name="prefix_attention",
    operands=f"{QUERIES} -> y:a[T, G*kv_heads*head_size] logsumexp:f32[T, G*kv_heads]",
    attrs=ATTRS,
    rules=rules,
    flops="4*span*q",
    moved=SEEN,
    rate="attention",
    rate_rows="T*G*kv_heads",
    implementations=(kernels_of("prefix_attention", tiles=with_sums, row_origin="q")[0], *ON_CUDA),
    roles={"q": "attention", "y": "attention", "logsumexp": "statistics"},
)
