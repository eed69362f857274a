"""Write into extrema[E, W] the least and the largest key of pages, element by element: what Quest summarises a page by.

Quest (Tang et al. 2024, arXiv 2406.10774, section 3). A page is `page` neighbouring keys of a sequence, from a multiple of `page`
on. Sequence b has cu_pages[b + 1] - cu_pages[b] = P whole pages; page p of it has the row page_table[cu_pages[b] + p] of
`extrema`. Written are the pages from first_page[b] to P - 1, whose keys are all in `kv`. Rows of `extrema` are laid out as
[slots, 2, K, H]: of every sparse layer (`slot` is this one's index among them) the least, then the largest key of each head.
Rows of other pages, and other slots, are left as they were.

Nothing is ever sliced. `tokens`, the keys that the pages have that are written, about, is for the cost model, and for how many
programs a GPU starts. Where a key lies, `mosaic.registrar.operators.kv_store` says.
"""

from __future__ import annotations

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.tiles import Tile, Tiled, Tiles


def infer(
    kv: Spec, extents: Spec, cu_extents: Spec, page_table: Spec, cu_pages: Spec, first_page: Spec, extrema: Spec,
    *, layer: int, slot: int, page: int, kv_heads: int, head_size: int, tokens: Dim,
) -> tuple[()]:  # fmt: skip
    require(page > 0, f"a page has at least one key, not {page}")
    require_layer(kv, layer, kv_heads * head_size)
    require_extents(extents, cu_extents, cu_pages)
    require_pages(extrema, page_table, cu_pages, slot, kv_heads * head_size)
    sequences = cu_pages.shape[0] - 1
    require(first_page == Spec((sequences,), "int32"), f"first_page must be int32[{sequences}], not {first_page}")
    require(extrema.dtype == kv.dtype, f"extrema must be {kv.dtype} as kv is, not {extrema.dtype}")
    return ()


def require_pages(extrema: Spec, page_table: Spec, cu_pages: Spec, slot: int, width: Dim) -> None:
    """Refuse rows of `extrema` that have no place for this slot, and what does not say which pages have them."""
    require(
        len(page_table.shape) == 1 and page_table.dtype == "int64", f"page_table must be int64[pages], not {page_table}"
    )
    require(
        len(cu_pages.shape) == 1 and cu_pages.dtype == "int32",
        f"cu_pages must be int32[sequences + 1], not {cu_pages}",
    )
    require_layer(extrema, slot, width, "extrema")


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count the keys once, and as much for what is written: two keys a page, which has at least so many."""
    keys = attrs["tokens"] * 2 * attrs["kv_heads"] * attrs["head_size"] * ITEMSIZE[specs["kv"].dtype]
    return keys + sum(spec.bytes for name, spec in specs.items() if name not in ("kv", "extrema"))


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the extrema of a part of a page, of all heads."""
    return (Tile((attrs["kv_heads"], attrs["head_size"]), specs["kv"].dtype),)


OPERATOR = Operator(
    name="page_extrema",
    reads=("kv", "extents", "cu_extents", "page_table", "cu_pages", "first_page", "extrema"),
    updates=("extrema",),
    whole=frozenset({"kv", "extents", "cu_extents", "page_table", "cu_pages", "first_page", "extrema"}),
    infer=infer,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.page_extrema", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.page_extrema"),
    ),
    roles={"extrema": "statistics"},
)
