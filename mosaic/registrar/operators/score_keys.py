"""scores[each*K, T]: the products of the mean query of a block with every key of its sequence, per set of query heads.

dLLM-Serve (`Q_b K^T` of equations 5 and 6, before pooling), with the mean over the block's rows as Q_b, as in its code. Sequence b
has the rows cu_seqlens[b] to cu_seqlens[b + 1]; spans[b] = (first, end, span first, span end, kept) counts from its first row, and
its block's rows are `first` to `end`, at least one. With m_h the mean of those rows' queries of head h, scores[s, t] is the
largest of m_h k_t over the query heads h of set s (`over` "max") or their mean ("mean"). There are `each` sets for every key-value
head, among which its query heads are divided evenly and in order: one, or one for each query head.

Columns of rows in no sequence are not written. A region over heads may slice q and scores, nothing else is sliced. `select_keys`
describes the rest of `spans`.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs, require
from mosaic.registrar.tiles import KEY_ROWS, Tile, Tiles, compute_dtype

OVER: Final = ("max", "mean")


def rules(*, over: str, **_: object) -> None:
    require(over in OVER, f"over must be one of {', '.join(OVER)}, not '{over}'")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List two rows of one head, converted rows, and the products of some keys, before and after rounding."""
    size, compute = attrs["head_size"], compute_dtype(specs["q"].dtype)
    row = Tile((size,), compute)
    return row, row, Tile((KEY_ROWS, size), compute), Tile((KEY_ROWS,), compute), Tile((KEY_ROWS,), "float32")


OPERATOR = Operator(
    name="score_keys",
    operands="""
        q:a[T, M*each*K*head_size] k@:a[T, K*head_size] spans@:i32[B, 5] cu_seqlens@:i32[B+1] -> scores:f32[each*K, T]
    """,
    attrs="head_size each over='max'",
    rules=rules,
    flops="2*q",
    moved={"q": "0"},
    implementations=kernels_of("score_keys", tiles=tiles),
    roles={"q": "attention", "k": "attention", "scores": "statistics"},
)
