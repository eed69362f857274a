"""mass[sets, S]: how much attention the voting rows of each sequence give to each key of its prefix, per set of heads.

MAGE (arXiv 2602.14209, section 4, equation 3). Sequence b has captured[b] = P keys in its prefix, at the positions 0 to P - 1,
where P is at most cu_keys[b + 1] - cu_keys[b]. Its rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1 vote.
With p = softmax over the prefix alone of q_r,g · k_j * scale, for voting row r and query head g, mass[s, cu_keys[b] + j] is,
over the voting rows and the heads of set s, the mean of p (`statistic` "mean", equation 3), the largest p ("max") or the least
("worst").
logsumexp[T, N] is the logarithm of what the exponentials of a row and head add up to over its prefix (`prefix_logsumexp`); it is
read of voting rows alone. The query heads are divided evenly and in order among `sets`; sets = kv_heads is the published choice,
and with as many sets as query heads each head has its own. Where P is 0, or no row votes, nothing is written, nor beyond P.

With `rows` above 0 the rows of a `block` are cut into `tiles` of `rows`, the last of which may have fewer: one at position p is in
tile t = (p % block) // rows. Each has statistics of its own, of the rows of b in it that vote, or of all that vote where none of it
does: those of tile t and set s are mass[s * tiles + t].

q, logsumexp, votes and positions are never sliced. `columns` is S. `span`, the mean number of keys that a row's softmax is over, is
for the cost model alone. Where a key lies, `mosaic.registrar.operators.kv_store` says.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, exact, require
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, Tile, Tiled, Tiles, compute_dtype

STATISTICS: Final = ("mean", "max", "worst")


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, captured: Spec, cu_keys: Spec, votes: Spec, cu_seqlens: Spec,
    logsumexp: Spec, positions: Spec | None = None,
    *, layer: int, kv_heads: int, head_size: int, scale: float, sets: int, columns: Dim, span: Dim, statistic: str = "mean",
    block: int = 0, rows: int = 0, tiles: int = 1,
) -> tuple[Spec]:  # fmt: skip
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_sets(q, kv_heads, head_size, sets)
    require_layer(kv, layer, kv_heads * head_size)
    require_extents(extents, cu_extents, cu_seqlens)
    require_prefixes(captured, cu_seqlens)
    require(cu_keys == cu_seqlens, f"cu_keys must be {cu_seqlens} as cu_seqlens is, not {cu_keys}")
    require(votes == Spec(q.shape[:1], "uint8"), f"votes must be uint8[{q.shape[0]}], not {votes}")
    of_rows = Spec((q.shape[0], exact(q.shape[1]) / head_size), "float32")
    require(logsumexp == of_rows, f"logsumexp must be {of_rows}, not {logsumexp}")
    require_tiles(q, positions, block, rows, tiles)
    require(statistic in STATISTICS, f"statistic must be one of {', '.join(STATISTICS)}, not '{statistic}'")
    return (Spec((sets * tiles, columns), "float32"),)


def require_tiles(q: Spec, positions: Spec | None, block: int, rows: int, tiles: int) -> None:
    """Refuse tiles of rows that a block is not cut into, and rows of which it is not known where they are."""
    require(rows >= 0, f"rows must be those of a tile, or 0 for no tiles, not {rows}")
    count = -(-block // rows) if rows else 1
    require(tiles == count > 0, f"tiles must be {count}, of {rows} rows of a block of {block}, not {tiles}")
    where = Spec(q.shape[:1], "int32") if rows else None
    require(positions == where, f"positions must be {where}, not {positions}")


def require_sets(q: Spec, kv_heads: int, head_size: int, sets: int) -> None:
    """Refuse queries without all heads, and sets that have no equal number of heads of one key-value head each."""
    columns = q.shape[-1]
    require(
        len(q.shape) == 2 and isinstance(columns, int) and columns % (kv_heads * head_size) == 0,
        f"q must have all heads of {head_size} for {kv_heads} KV heads, it has {columns} columns",
    )
    require(
        sets > 0 and divides(kv_heads, sets) and divides(sets * head_size, columns),
        f"sets must be a multiple of the {kv_heads} KV heads that divides the {exact(columns) / head_size} query heads, not {sets}",
    )


def require_prefixes(captured: Spec, cu_seqlens: Spec) -> None:
    """Refuse what does not say how long each sequence's prefix is."""
    sequences = cu_seqlens.shape[0] - 1
    require(captured == Spec((sequences,), "int32"), f"captured must be int32[{sequences}], not {captured}")


def flops(q: Spec, *, span: Dim, **_: object) -> Dim:
    """Count the scores."""
    return 2 * span * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count every key of a prefix once for each tile, and no values."""
    width = attrs["kv_heads"] * attrs["head_size"] * attrs.get("tiles", 1)
    keys = specs["mass"].shape[1] * width * ITEMSIZE[specs["kv"].dtype]
    return keys + sum(spec.bytes for name, spec in specs.items() if name != "kv")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries, keys if they are converted, scores, a vector of rows, and two of keys."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    converted = (Tile((KEY_ROWS, size), compute),) if compute != dtype else ()
    columns = Tile((KEY_ROWS,), compute), Tile((KEY_ROWS,), "float32")
    return (
        Tile((QUERY_ROWS, size), compute),
        Tile((SCORES,), compute),
        Tile((QUERY_ROWS,), compute),
        *columns,
        *converted,
    )


OPERATOR = Operator(
    name="key_mass",
    reads=("q", "kv", "extents", "cu_extents", "captured", "cu_keys", "votes", "cu_seqlens", "logsumexp", "positions?"),
    writes=("mass",),
    whole=frozenset(
        {"q", "kv", "extents", "cu_extents", "captured", "cu_keys", "votes", "cu_seqlens", "logsumexp", "positions"}
    ),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=lambda q, *, head_size, **_: q.shape[0] * (exact(q.shape[-1]) / head_size),
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.key_mass", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.key_mass"),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.key_mass:launch_invariant",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"q": "attention", "votes": "statistics", "logsumexp": "statistics", "mass": "statistics"},
)
