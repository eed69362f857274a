"""logsumexp[T, N]: over the prefix of each voting row, the logarithm of what the exponentials of its scores add up to.

What MAGE's statistic of keys is normalised by (arXiv 2602.14209, equation 3; `key_mass`). Sequence b has captured[b] = P keys in
its prefix, at the positions 0 to P - 1. Its rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1 vote. For a voting
row r and query head g it is log(sum over j < P of exp(q_r,g · k_j * scale)). Rows that do not vote, and those of a sequence
whose P is 0, hold nothing that may be read.

q and votes are never sliced. For the cost model alone: `span`, the mean number of keys that a row's sum is over, and `keys`,
those of all prefixes together. Where a key lies, `mosaic.registrar.operators.kv_store` says.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.key_mass import require_prefixes, require_sets
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, Tile, Tiled, Tiles, compute_dtype


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, captured: Spec, votes: Spec, cu_seqlens: Spec,
    *, layer: int, kv_heads: int, head_size: int, scale: float, span: Dim, keys: Dim,
) -> tuple[Spec]:  # fmt: skip
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_sets(q, kv_heads, head_size, kv_heads)
    require_layer(kv, layer, kv_heads * head_size)
    require_extents(extents, cu_extents, cu_seqlens)
    require_prefixes(captured, cu_seqlens)
    require(votes == Spec(q.shape[:1], "uint8"), f"votes must be uint8[{q.shape[0]}], not {votes}")
    return (Spec((q.shape[0], exact(q.shape[1]) / head_size), "float32"),)


def flops(q: Spec, *, span: Dim, **_: object) -> Dim:
    return 2 * span * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count every key of a prefix once, and no values."""
    keys = attrs["keys"] * attrs["kv_heads"] * attrs["head_size"] * ITEMSIZE[specs["kv"].dtype]
    return keys + sum(spec.bytes for name, spec in specs.items() if name != "kv")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries, keys if they are converted, scores, and vectors of rows."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    converted = (Tile((KEY_ROWS, size), compute),) if compute != dtype else ()
    rows = (Tile((QUERY_ROWS,), compute),) * 5
    return Tile((QUERY_ROWS, size), compute), Tile((SCORES,), compute), *rows, *converted


SPLITS: Final = 32
"""Splits of a prefix, a power of two: it depends on no other request, so that neither does what is selected."""
SPLIT_KEYS: Final = 256
"""Least keys of a split; of a short prefix the last ones have none."""


def sums(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve a float32 log-sum-exp for every row and head in every split."""
    rows, columns = specs["q"].shape
    return 4 * SPLITS * rows * int(exact(columns) / attrs["head_size"])


OPERATOR = Operator(
    name="prefix_logsumexp",
    reads=("q", "kv", "extents", "cu_extents", "captured", "votes", "cu_seqlens"),
    writes=("logsumexp",),
    whole=frozenset({"q", "kv", "extents", "cu_extents", "captured", "votes", "cu_seqlens"}),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=lambda q, *, head_size, **_: q.shape[0] * (exact(q.shape[-1]) / head_size),
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.prefix_logsumexp", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.prefix_logsumexp", scratch=sums),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.prefix_logsumexp:launch_invariant",
            scratch=sums,
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"q": "attention", "votes": "statistics", "logsumexp": "statistics"},
)
