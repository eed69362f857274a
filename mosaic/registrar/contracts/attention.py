"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head: bidirectional, varlen, grouped queries.

A query sees every key of its sequence, or with `block` those of its own block of so many rows and of the blocks before.
Queries may be sliced by a region of tokens, keys and values never; y may overwrite q. `span` is the number of keys that
a query sees on average, rounded up: without blocks the sum of squared sequence lengths over the tokens.
"""

from __future__ import annotations

import sympy

from mosaic.registrar.contract import Contract, Dim, Spec, divides, require


def infer(
    q: Spec, k: Spec, v: Spec, cu_seqlens: Spec, *, head_size: int, scale: float, span: Dim, block: int = 0
) -> tuple[Spec]:
    require(k.shape == v.shape, f"k and v must have one shape, not {k} and {v}")
    for name, width in (("q", q.shape[-1]), ("k", k.shape[-1])):
        require(divides(head_size, width), f"{name} must have heads of {head_size}, it has {width} columns")
    heads, groups = heads_of(q, head_size), heads_of(k, head_size)
    require(divides(groups, heads), f"{heads} query heads do not divide into {groups} groups")
    require(block >= 0, f"block must be a number of rows, or 0 for none, not {block}")
    return (q,)


def heads_of(x: Spec, head_size: int) -> Dim:
    return sympy.sympify(x.shape[-1]) / head_size


def flops(q: Spec, k: Spec, v: Spec, cu_seqlens: Spec, *, span: Dim, **_: object) -> Dim:
    return 4 * span * q.elements


def query_rows_and_heads(q: Spec, k: Spec, v: Spec, cu_seqlens: Spec, *, head_size: int, **_: object) -> Dim:
    """The rate is that of a launch with so many query rows times heads: what fills a GPU."""
    return q.shape[0] * heads_of(q, head_size)


CONTRACT = Contract(
    name="attention",
    reads=("q", "k", "v", "cu_seqlens"),
    writes=("y",),
    whole=frozenset({"k", "v"}),
    inplace=(("y", "q"),),
    infer=infer,
    flops=flops,
    rate="attention",
    rate_rows=query_rows_and_heads,
)
