"""importance[B, K, P]: how much attention the voting rows of each sequence give to the positions of its block, per KV head.

FOCUS (Liang et al., "DLLMs Know How to Tame Their Compute Bound", equations 2 and 15). The block of sequence b begins at position
first[b] and has P positions. Its keys here are those at first[b] + listed[b, j], offsets that ascend and are followed by -1. Its
rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1 vote. For a voting row r and a query head g of key-value head
h, s_j = q_r,g · k_j * scale, m_j is the largest of the s_i with |i - j| <= pool // 2, and p = softmax over j of m. importance[b,
h, listed[b, j]] is the sum of p_j over the voting rows and the query heads of h, and importance[b, h] is 0 at every other offset.
So the published importance of a token is the sum over h, and a layer's importances add up to voting rows times query heads: those
of two layers differ by 0 on average.

Nothing is ever sliced. Where a key lies, `mosaic.registrar.operators.kv_store` says.
"""

from __future__ import annotations

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.key_mass import require_sets
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.tiles import QUERY_ROWS, Tile, Tiled, Tiles, compute_dtype

READS = ("q", "kv", "extents", "cu_extents", "cu_seqlens", "votes", "first", "listed")


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, cu_seqlens: Spec, votes: Spec, first: Spec, listed: Spec,
    *, layer: int, kv_heads: int, head_size: int, scale: float, pool: int = 3,
) -> tuple[Spec]:  # fmt: skip
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_sets(q, kv_heads, head_size, kv_heads)
    require_layer(kv, layer, kv_heads * head_size)
    require_extents(extents, cu_extents, cu_seqlens)
    require(votes == Spec(q.shape[:1], "uint8"), f"votes must be uint8[{q.shape[0]}], not {votes}")
    require_blocks(cu_seqlens, first, listed)
    require(pool > 0 and pool % 2 == 1, f"pool must be odd, not {pool}")
    return (Spec((cu_seqlens.shape[0] - 1, kv_heads, listed.shape[1]), "float32"),)


def require_blocks(cu_seqlens: Spec, first: Spec, listed: Spec) -> None:
    """Refuse what does not say where each sequence's block begins, and which of its positions are listed."""
    sequences = cu_seqlens.shape[0] - 1
    require(first == Spec((sequences,), "int32"), f"first must be int32[{sequences}], not {first}")
    require(
        len(listed.shape) == 2 and listed.shape[0] == sequences and listed.dtype == "int32",
        f"listed must be int32[{sequences}, positions of a block], not {listed}",
    )


def flops(q: Spec, *, listed: Spec, **_: object) -> Dim:
    """Count the scores."""
    return 2 * listed.shape[1] * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count every key of a block once, and no values."""
    width = attrs["kv_heads"] * attrs["head_size"]
    keys = specs["listed"].elements * width * ITEMSIZE[specs["kv"].dtype]
    return keys + sum(spec.bytes for name, spec in specs.items() if name != "kv")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries, keys, scores and pooled scores, a vector of rows, and two of keys."""
    size, positions = attrs["head_size"], specs["listed"].shape[1]
    compute = compute_dtype(specs["q"].dtype)
    scores, vector = Tile((QUERY_ROWS, positions), compute), Tile((positions,), compute)
    return (
        Tile((QUERY_ROWS, size), compute), Tile((positions, size), compute), scores, scores, Tile((QUERY_ROWS,), compute),
        vector, vector,
    )  # fmt: skip


OPERATOR = Operator(
    name="token_importance",
    reads=READS,
    writes=("importance",),
    whole=frozenset(READS),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=lambda q, *, head_size, **_: q.shape[0] * (exact(q.shape[-1]) / head_size),
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.token_importance", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.token_importance"),
    ),
    roles={"q": "attention", "votes": "statistics", "importance": "statistics"},
)
