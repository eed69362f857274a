"""page_extrema: elementwise minimum and maximum of the keys of pages, into the rows of a state.

`mosaic.registrar.operators.page_extrema` defines which pages are written where (Quest, section 3). Legend: R rows of
keys, L layers, B sequences, X extents, M pages, E rows of pages, Z sparse layers, K KV heads, H size.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, kv: Tensor, extents: Tensor, cu_extents: Tensor, page_table: Tensor, cu_pages: Tensor, first_page: Tensor,
    extrema: Tensor, layer: int, slot: int, page: int, kv_heads: int, head_size: int, tokens: int = 0,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the extrema of pages into their rows of extrema [E, Z*2*K*H]; pages and extents are read on the host."""
    (part,) = tiles_of("page_extrema", scratch, {"kv": kv}, kv_heads=kv_heads, head_size=head_size)
    rows = extrema.view(extrema.shape[0], -1, 2, kv_heads, head_size)[:, slot]

    def run() -> None:
        owned, rows_of, firsts = pieces(extents, cu_extents), page_table.tolist(), first_page.tolist()
        for sequence, (low, high) in enumerate(pairwise(cu_pages.tolist())):
            for number in range(firsts[sequence], high - low):
                start, end = number * page, (number + 1) * page
                least, largest = rows[rows_of[low + number]]
                for piece in owned[sequence]:
                    first, last = max(start, piece.start), min(end, piece.end)
                    if first >= last:
                        continue
                    kept = kept_tokens(kv, piece, layer, kv_heads, head_size)[0]
                    keys = kept[:, first - piece.start : last - piece.start]
                    if first == start:
                        torch.amin(keys, 1, out=least)
                        torch.amax(keys, 1, out=largest)
                    else:
                        torch.minimum(least, torch.amin(keys, 1, out=part), out=least)
                        torch.maximum(largest, torch.amax(keys, 1, out=part), out=largest)

    return run


launch = launcher(bind)


def reference(
    *, kv: Tensor, extents: Tensor, cu_extents: Tensor, page_table: Tensor, cu_pages: Tensor, first_page: Tensor, extrema: Tensor,
    layer: int, slot: int, page: int, kv_heads: int, head_size: int, tokens: int = 0,
) -> Tensor:  # fmt: skip
    """Return the state afterwards, in plain PyTorch."""
    after, owned = extrema.clone(), pieces(extents, cu_extents)
    rows = after.view(after.shape[0], -1, 2, kv_heads, head_size)[:, slot]
    for sequence, (low, high) in enumerate(pairwise(cu_pages.tolist())):
        kept = [kept_tokens(kv, piece, layer, kv_heads, head_size)[0] for piece in owned[sequence]]
        for number in range(int(first_page[sequence]), high - low):
            keys = torch.cat(kept, dim=1)[:, number * page : (number + 1) * page]
            rows[page_table[low + number]] = torch.stack([keys.amin(1), keys.amax(1)])
    return after
