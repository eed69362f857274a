"""selected_attention: softmax(q k^T * scale) v per sequence, over selected keys of a prefix and all keys after it.

`mosaic.registrar.operators.selected_attention` defines the keys of each query (MAGE, Algorithm 1). Row r of q is row
`row_start + r` of the packed window. A row in no sequence, or without a visible key, is unchanged. Selected keys are
gathered into tiles; online softmax in float32 (float64 for float64). Legend: T query rows, R rows of the state, L
layers, B sequences, X extents, E rows of selections, N query heads, K KV heads, H size.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.kernels.shared.attention import keys_seen, online_softmax, parted, tile_shape, visible
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import Piece, kept_tokens, pieces, windows
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.registrar.operators.top_keys import numbers_of
from mosaic.registrar.tiles import KEY_ROWS

Kept = Sequence[tuple[Piece, Tensor]]
"""Pieces of a sequence, and the keys and values [2, S, H] of one head in each."""
Places = NDArray[np.int64]


def bind(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, selected: Tensor, owner: Tensor, captured: Tensor,
    seen: Tensor, cu_seqlens: Tensor, positions: Tensor, y: Tensor, layer: int, slot: int, sets: int, k: int, page: int,
    kv_heads: int, head_size: int, scale: float, attended: int = 0, block: int = 0, rows: int = 0, tiles: int = 1,
    row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; lengths, extents, positions and selections are read on the host."""
    members = q.shape[1] // (sets * head_size)
    found = tiles_of("selected_attention", scratch, {"q": q}, head_size=head_size, k=k)
    (chosen, place, gathered), (converted, scratches) = found[:3], parted(found[3:], masked=True)
    places, steps, listed = chosen.numpy(), np.arange(page), selected.numpy()
    q_STMH, y_STMH = (x.view(x.shape[0], sets, members, head_size).transpose(0, 1) for x in (q, y))
    numbers = numbers_of(k, page)

    def run() -> None:
        owned, owners, counts, prefixes = pieces(extents, cu_extents), owner.tolist(), seen.tolist(), captured.tolist()
        for sequence, start, end in windows(cu_seqlens, row_start, q.shape[0]):
            prefix = prefixes[sequence]
            if not counts[sequence]:
                continue
            where = positions[start:end].tolist()
            limits, tile_of = (
                keys_seen(where, counts[sequence], block),
                [at % block // rows if rows else 0 for at in where],
            )
            both = [(piece, kept_tokens(kv, piece, layer, kv_heads, head_size)) for piece in owned[sequence]]
            for own, tile in product(range(sets), sorted(set(tile_of))):
                number = ((slot * sets + own) * tiles + tile) * numbers
                mine = places[:0]
                if prefix:
                    mine = _chosen(places, listed[owners[sequence], number : number + numbers], steps, prefix)
                kept = [(piece, tokens[:, own // (sets // kv_heads)]) for piece, tokens in both]
                keys = _Keys(kept, mine, prefix, place, gathered, converted[1:])
                sees = [count if of == tile else 0 for count, of in zip(keys.seen(limits), tile_of, strict=True)]
                for some, first, last in _runs(sees):
                    part = slice(start + first, start + last)
                    _attend(q_STMH[own, part], keys, y_STMH[own, part], scale, some, converted[0], scratches)

    return run


launch = launcher(bind)


def _chosen(places: Places, row: NDArray[np.int32], steps: Places, prefix: int) -> Places:
    """Positions of the selected keys, ascending."""
    count, page = int(row[0]), len(steps)
    grid = places[: count * page].reshape(count, page)
    np.multiply(row[1 : count + 1, None], page, out=grid)
    np.add(grid, steps, out=grid)
    mine = places[: count * page]
    return mine[: np.searchsorted(mine, prefix)]


class _Keys:
    """The keys of one sequence and set: selected ones, then all from `prefix` on; counted in this order."""

    def __init__(
        self, kept: Kept, chosen: Places, prefix: int, place: Tensor, gathered: Tensor, wide: Sequence[Tensor]
    ) -> None:
        self.kept, self.chosen, self.prefix, self.wide = kept, chosen, prefix, wide
        self.place, self.places, self.gathered = place, place.numpy(), gathered

    def seen(self, limits: Sequence[int]) -> list[int]:
        """The number of keys below each position."""
        return [
            len(self.chosen) + limit - self.prefix if limit >= self.prefix else int(np.searchsorted(self.chosen, limit))
            for limit in limits
        ]

    def tiles(self, count: int, width: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The first `count` of them in tiles of at most `width`, keys and values in the compute dtype."""
        few = min(len(self.chosen), count)
        for start in range(0, few, width):
            yield self._converted(start, self._gather(self.chosen[start : min(start + width, few)]))
        end = self.prefix + count - len(self.chosen)
        for piece, both in self.kept:
            for start in range(max(piece.start, self.prefix), min(piece.end, end), width):
                part = both[:, start - piece.start : min(start + width, end) - piece.start]
                yield self._converted(len(self.chosen) + start - self.prefix, part)

    def _gather(self, positions: Places) -> Tensor:
        found = beginning(self.gathered, (2, len(positions), self.gathered.shape[2]))
        for piece, both in self.kept:
            low, high = np.searchsorted(positions, (piece.start, piece.end))
            np.subtract(positions[low:high], piece.start, out=self.places[low:high])
            for tokens, out in zip(both, found, strict=True):
                torch.index_select(tokens, 0, self.place[low:high], out=out[low:high])
        return found

    def _converted(self, start: int, both: Tensor) -> tuple[int, Tensor, Tensor]:
        k, v = (
            (beginning(tile, x.shape).copy_(x) for tile, x in zip(self.wide, both, strict=True)) if self.wide else both
        )
        return start, k[None], v[None]


def _runs(seen: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Neighbouring rows that see a key each: how many they see, the first row, the end."""
    for sees, run in groupby(enumerate(seen), key=lambda row: row[1] > 0):
        if sees:
            rows = list(run)
            yield [count for _, count in rows], rows[0][0], rows[-1][0] + 1


def _attend(
    q_TMH: Tensor, keys: _Keys, y_TMH: Tensor, scale: float, seen: list[int], query: Tensor, tiles: list[Tensor]
) -> None:
    """Attend a tile of rows of (token, head of the set) at a time; y may be q."""
    count, members, _ = q_TMH.shape
    rows, width = tile_shape(min(max(seen), KEY_ROWS), in_place=False)
    most = min(members, rows)
    tokens = rows // most
    for member in range(0, members, most):
        for start in range(0, count, tokens):
            tile = slice(start, start + tokens), slice(member, member + most)
            part, limits = q_TMH[tile], seen[start : start + tokens]
            packed = beginning(query, part.shape).copy_(part).flatten(0, 1)
            done = online_softmax(packed[None], keys.tiles(max(limits), width), scale, tiles, limits)
            y_TMH[tile].copy_(done.view(part.shape))


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, selected: Tensor, owner: Tensor, captured: Tensor, seen: Tensor,
    cu_seqlens: Tensor, positions: Tensor, layer: int, slot: int, sets: int, k: int, page: int, kv_heads: int, head_size: int,
    scale: float, attended: int = 0, block: int = 0, rows: int = 0, tiles: int = 1, row_start: int = 0,
) -> Tensor:  # fmt: skip
    """Return the attention in plain PyTorch, with whole score matrices; rows that see no key are NaN."""
    y = torch.full_like(q, float("nan"))
    q_STMH, y_STMH = (x.view(x.shape[0], sets, -1, head_size).transpose(0, 1) for x in (q, y))
    numbers, owned = numbers_of(k, page), pieces(extents, cu_extents)
    for sequence, start, end in windows(cu_seqlens, row_start, q.shape[0]):
        count, prefix = int(seen[sequence]), int(captured[sequence])
        if not count:
            continue
        kept = [kept_tokens(kv, piece, layer, kv_heads, head_size) for piece in owned[sequence]]
        k_KSH, v_KSH = torch.cat(kept, dim=2)[:, :, :count]
        tile_of = positions[start:end] % block // rows if rows else torch.zeros(end - start)
        for own, tile in product(range(sets), range(tiles)):
            open_ = torch.arange(count) >= prefix
            if prefix:
                number = ((slot * sets + own) * tiles + tile) * numbers
                row = selected[owner[sequence], number : number + numbers].tolist()
                for first in row[1 : row[0] + 1]:
                    open_[first * page : min((first + 1) * page, prefix)] = True
            hidden = ~(visible(positions[start:end], count, block) & open_)
            head = own // (sets // kv_heads)
            scores = (q_STMH[own, start:end] @ k_KSH[head].T * scale).masked_fill(hidden[:, None], float("-inf"))
            mine = tile_of == tile
            y_STMH[own, start:end][mine] = (torch.softmax(scores, dim=2) @ v_KSH[head])[mine]
    return y
