"""y[T, N*H]: attention to a block's own keys, joined with what is known of the attention to its prefix.

FlashBlock (arXiv 2602.05305) keeps the output over the prefix with its log-sum-exp within a block. Sequence b has prefix[b] = P
keys before its block, at the positions 0 to P - 1, and seen[b] keys in all, its window's own among them: they are stored first
(`kv_store`). A row at position p attends itself to the keys from P to seen[b]; with `block`, of these to the keys j < (p // block
+ 1) * block. Over the keys below P its output and log-sum-exp are given: where refreshed[b] is not 0, in its rows of `fresh` and
`fresh_sums` (`prefix_attention`); elsewhere, and where the step has none, in the states `kept` and `kept_sums`. With P = 0
there are none. The two are joined as one softmax would have them. A row in no sequence, or that sees no key, is left as it was.

The states have a row for each request; that of sequence b is owner[b], in both. For every layer that keeps (`slot` is this one's
index among them) a row has those of `rows` tokens: kept[owner, slot, p - P, N*H], and kept_sums[owner, slot, p - P, N]. What is
fresh is written there, but for rows below P, whose block is the one before. Without states, whatever has a prefix is fresh.
Nothing is ever sliced. y may overwrite q.
"""

from __future__ import annotations

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, exact, require
from mosaic.registrar.operators.kv_attention import with_sums
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.tiles import QUERY_ROWS, Tile, Tiled, Tiles, compute_dtype


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, seen: Spec, cu_seqlens: Spec, positions: Spec, prefix: Spec,
    kept: Spec | None = None, kept_sums: Spec | None = None, owner: Spec | None = None,
    fresh: Spec | None = None, fresh_sums: Spec | None = None, refreshed: Spec | None = None,
    *, layer: int, slot: int, rows: int, kv_heads: int, head_size: int, scale: float, block: int = 0,
) -> tuple[Spec]:  # fmt: skip
    columns, width = exact(q.shape[-1]), kv_heads * head_size
    require(
        len(q.shape) == 2 and divides(width, columns),
        f"q must have all heads of {head_size} for {kv_heads} KV heads, it has {columns} columns",
    )
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_layer(kv, layer, width)
    require_extents(extents, cu_extents, cu_seqlens)
    counts = Spec((cu_seqlens.shape[0] - 1,), "int32")
    require(seen == counts and prefix == counts, f"seen and prefix must be {counts}, not {seen} and {prefix}")
    require(positions == Spec(q.shape[:1], "int32"), f"positions must be int32[{q.shape[0]}], not {positions}")
    require(scale > 0, f"scale must be positive, not {scale}")
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    require((kept is None) == (kept_sums is None) == (owner is None), "kept, kept_sums and owner go together")
    require(kept is not None or fresh is not None, "kept or fresh must be given: what is known of the prefix")
    if kept is not None and kept_sums is not None and owner is not None:
        require_kept(q, kept, owner, cu_seqlens, rows, slot)
        sums = Spec((kept_sums.shape[0], exact(kept.shape[1]) / head_size), "float32")
        require(kept_sums == sums, f"kept_sums must be {sums}, not {kept_sums}")
    require(
        (fresh is None) == (fresh_sums is None) == (refreshed is None), "fresh, fresh_sums and refreshed go together"
    )
    if fresh is not None:
        of_rows = Spec((q.shape[0], columns / head_size), "float32")
        require(fresh == q, f"fresh must be {q} as q is, not {fresh}")
        require(fresh_sums == of_rows, f"fresh_sums must be {of_rows}, not {fresh_sums}")
        require(refreshed == counts, f"refreshed must be {counts}, not {refreshed}")
    return (q,)


def require_kept(q: Spec, kept: Spec, owner: Spec, cu_seqlens: Spec, rows: int, slot: int) -> None:
    """Refuse a state whose rows have no place for `rows` rows of q in this slot, and what does not say whose they are."""
    sequences = cu_seqlens.shape[0] - 1
    require(owner == Spec((sequences,), "int64"), f"owner must be int64[{sequences}], not {owner}")
    require(rows > 0, f"a block has at least one row, not {rows}")
    width = rows * exact(q.shape[1])
    require(
        len(kept.shape) == 2 and kept.dtype == q.dtype and divides(width, kept.shape[1]),
        f"kept must be {q.dtype}[owners, slots * {width}], not {kept}",
    )
    slots = exact(kept.shape[1]) / width
    require(bool(0 <= slot < slots), f"kept has {slots} slots of {width} columns, not slot {slot}")


def flops(q: Spec, *, rows: int, **_: object) -> Dim:
    return 4 * rows * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count the keys and values of a block for every sequence, just stored, and as many kept rows as there are queries, with a
    log-sum-exp for each KV head."""
    q, sequences = specs["q"], specs["cu_seqlens"].shape[0] - 1
    own = sequences * attrs["rows"] * 2 * attrs["kv_heads"] * attrs["head_size"] * ITEMSIZE[q.dtype]
    kept = q.bytes + 4 * q.shape[0] * attrs["kv_heads"] if "kept" in specs else 0
    return own + kept + sum(spec.bytes for name, spec in specs.items() if name not in ("kv", "kept", "kept_sums"))


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the given outputs and log-sum-exps of a tile of rows, and the tiles of `prefix_attention`."""
    compute = compute_dtype(specs["q"].dtype)
    return (
        Tile((QUERY_ROWS, attrs["head_size"]), compute),
        Tile((QUERY_ROWS,), compute),
        *with_sums(specs, attrs),
    )


OPERATOR = Operator(
    name="joined_attention",
    reads=(
        "q", "kv", "extents", "cu_extents", "seen", "cu_seqlens", "positions", "prefix", "kept?", "kept_sums?", "owner?",
        "fresh?", "fresh_sums?", "refreshed?",
    ),
    writes=("y",),
    updates=("kept", "kept_sums"),
    whole=frozenset(
        {
            "q", "kv", "extents", "cu_extents", "seen", "cu_seqlens", "positions", "prefix", "kept", "kept_sums", "owner",
            "fresh", "fresh_sums", "refreshed",
        }
    ),
    inplace=(("y", "q"),),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=lambda q, *, head_size, **_: q.shape[0] * (exact(q.shape[-1]) / head_size),
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.joined_attention", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.joined_attention"),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.joined_attention:launch_invariant",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"q": "attention", "y": "attention", "kept": "attention", "fresh": "attention", "kept_sums": "statistics"},
)  # fmt: skip
