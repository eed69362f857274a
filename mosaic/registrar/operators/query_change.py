"""change[B]: by how much the queries of each sequence differ from the kept ones, relative to the kept ones; new ones are kept.

What is kept of a block's attention to its prefix is as good as its queries are still those it was computed with (FlashBlock, LoSA:
arXiv 2602.05305, 2604.12056). Sequence b has prefix[b] = P keys before its block, and its rows of q are cu_seqlens[b] to
cu_seqlens[b + 1]. Where refreshed[b] is not 0, those at positions p >= P are written to kept[owner[b], p - P, N*H], and
change[b] is 0. Elsewhere, and where the step has no `refreshed`, change[b] is sqrt(sum of (q - kept)^2 / sum of kept^2), both over
all its rows and columns: the Frobenius norm of the difference over that of the kept. It is 0 where P is 0, where there are no
rows, and where the two are alike. Nothing is ever sliced.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.operators.joined_attention import require_kept
from mosaic.registrar.tiles import Tile, Tiled, Tiles, compute_dtype


def infer(
    q: Spec, kept: Spec, owner: Spec, prefix: Spec, cu_seqlens: Spec, positions: Spec, refreshed: Spec | None = None,
    *, rows: int,
) -> tuple[Spec]:  # fmt: skip
    require(len(q.shape) == 2, f"q must be a matrix, not {q}")
    require(
        len(cu_seqlens.shape) == 1 and cu_seqlens.dtype == "int32",
        f"cu_seqlens must be int32[sequences + 1], not {cu_seqlens}",
    )
    require_kept(q, kept, owner, cu_seqlens, rows, 0)
    counts = Spec((cu_seqlens.shape[0] - 1,), "int32")
    require(prefix == counts, f"prefix must be {counts}, not {prefix}")
    require(refreshed in (None, counts), f"refreshed must be {counts}, not {refreshed}")
    require(positions == Spec(q.shape[:1], "int32"), f"positions must be int32[{q.shape[0]}], not {positions}")
    return (Spec(counts.shape, "float32"),)


def flops(q: Spec, **_: object) -> Dim:
    return 5 * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count as many kept rows as there are queries."""
    return specs["q"].bytes + sum(spec.bytes for name, spec in specs.items() if name != "kept")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List two rows and two sums."""
    compute, columns = compute_dtype(specs["q"].dtype), specs["q"].shape[1]
    return (Tile((columns,), compute), Tile((columns,), compute), Tile((3,), compute))


def row_sums(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the two sums of every row, in float32."""
    return 8 * specs["q"].shape[0]


OPERATOR = Operator(
    name="query_change",
    reads=("q", "kept", "owner", "prefix", "cu_seqlens", "positions", "refreshed?"),
    writes=("change",),
    updates=("kept",),
    whole=frozenset({"q", "kept", "owner", "prefix", "cu_seqlens", "positions", "refreshed"}),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.query_change", scratch=Tiled(tiles)),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.query_change", scratch=row_sums
        ),
    ),
    roles={"q": "attention", "kept": "attention", "change": "statistics"},
)
