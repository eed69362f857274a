"""Write into extrema[E, W] the elementwise minimum and maximum of the keys of pages, Quest's summary of a page.

Quest (Tang et al. 2024, arXiv 2406.10774, section 3). A page is `page` neighbouring keys of a sequence, from a multiple of `page`
on. Sequence b has cu_pages[b + 1] - cu_pages[b] = P whole pages; page p of it has the row page_table[cu_pages[b] + p] of
`extrema`. Written are the pages from first_page[b] to P - 1, whose keys are all in `kv`. Rows of `extrema` are laid out as
[slots, 2, K, H]: of every sparse layer (`slot` is this one's index among them) the least, then the largest key of each head.
Rows of other pages, and other slots, are left as they were.

Nothing is ever sliced. `tokens`, about the number of keys in the written pages, is for the cost model and the number of
programs on a GPU. `mosaic.registrar.operators.kv_store` describes the layout of keys.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require
from mosaic.registrar.operators.kv_store import KV, require_layer
from mosaic.registrar.tiles import Tile, Tiles


def rules(*, L: Dim, J: Dim, layer: int, slot: int, page: int, **_: object) -> None:
    require(page > 0, f"a page has at least one key, not {page}")
    require_layer("kv", L, layer)
    require_layer("extrema", J, slot)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the extrema of a part of a page, of all heads."""
    return (Tile((attrs["kv_heads"], attrs["head_size"]), specs["kv"].dtype),)


OPERATOR = Operator(
    name="page_extrema",
    operands=f"""
        {KV} page_table@:i64[N] cu_pages@:i32[B+1] first_page@:i32[B] extrema!@:a[E, J*2*kv_heads*head_size]
    """,
    attrs="layer slot page kv_heads head_size tokens",
    rules=rules,
    moved={"kv": "2*tokens*kv_heads*head_size", "extrema": "0"},
    implementations=kernels_of("page_extrema", tiles=tiles),
    roles={"extrema": "statistics"},
)
