"""Shared by the kernels of attention on the CPU: the online softmax of a tile of query rows, and visibility of keys.

The online softmax is that of Milakov and Gimelshein 2018 (arXiv 1805.02867): nothing of the size queries x keys exists.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import beginning
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, WHOLE_KEYS


def online_softmax(
    q_ACH: Tensor,
    key_tiles: Iterable[tuple[int, Tensor, Tensor]],
    scale: float,
    tiles: list[Tensor],
    seen: Sequence[int],
    sums: Tensor | None = None,
    since: Sequence[int] = (),
) -> Tensor:
    """Return softmax(q k^T * scale) v for a tile of query rows of some heads, [A, C, H] in scratch.

    Small tiles of several heads go together: one product of many is far quicker than as many calls. Where one tile has
    all keys, its softmax is PyTorch's, in one pass.

    Parameters
    ----------
    q_ACH
        C query rows of each of A heads, in the compute dtype; A*C at most `QUERY_ROWS`.
    key_tiles
        The place of a tile's first key, its keys and its values [A, S, H], in the compute dtype; A*C*S at most `SCORES`.
        Every row sees a key of the first tile.
    tiles
        Scores, accumulator and five vectors; for attention by blocks one for how many keys each row sees, one for the
        keys' places, and the mask.
    seen
        How many keys the rows of a head see, each entry for as many neighbours; further keys are in no tile.
    sums
        [A*C], written: the log-sum-exp of each row's scores; None: not asked for.
    since
        The first key that the rows of a head see, likewise: rows may see none of a tile; empty: they see all before.
    """
    (heads, rows, size), (scores, accumulator, *vectors) = q_ACH.shape, tiles[:7]
    count, least, most = heads * rows, min(seen), max(seen)
    flat = accumulator[:count]
    result = flat.view(heads, rows, size)
    if least < most:
        _write_limits(seen, rows // len(seen), heads, tiles[7])
    for number, (start, k, v) in enumerate(key_tiles):
        keys = k.shape[1]
        s = beginning(scores, (count, keys))
        products = s.view(heads, rows, keys)
        torch.baddbmm(products, q_ACH, k.transpose(1, 2), beta=0, alpha=scale, out=products)
        if (hidden := max(least - start, 0)) < keys:
            _hide(s[:, hidden:], start + hidden, *tiles[7:10])
        if since:
            _write_limits(since, rows // len(since), heads, tiles[7])
            _hide(s, start, *tiles[7:10], before=True)
            _write_limits(seen, rows // len(seen), heads, tiles[7])
        if number == 0 and start + keys == most and sums is None:
            torch.softmax(s, 1, out=s)
            return torch.bmm(products, v, out=result)
        if number == 0:
            maximum, new_maximum, total, tile_total, correction = (vector[:count] for vector in vectors)
            torch.amax(s, dim=1, out=maximum)
            maximum.clamp_(min=torch.finfo(s.dtype).min)  # of a row that sees none of these
            s.sub_(maximum.unsqueeze(1)).exp_()
            torch.sum(s, dim=1, out=total)
            torch.bmm(products, v, out=result)
            continue
        torch.amax(s, dim=1, out=new_maximum)
        torch.maximum(new_maximum, maximum, out=new_maximum)
        torch.sub(maximum, new_maximum, out=correction)
        correction.exp_()
        s.sub_(new_maximum.unsqueeze(1)).exp_()
        torch.sum(s, dim=1, out=tile_total)
        total.mul_(correction).add_(tile_total)
        flat.mul_(correction.unsqueeze(1))
        result.baddbmm_(products, v)
        maximum.copy_(new_maximum)
    flat.div_(total.unsqueeze(1))
    if sums is not None:
        torch.add(total.log_(), maximum, out=sums)
    return result


def _hide(s: Tensor, start: int, limits: Tensor, places: Tensor, mask: Tensor, *, before: bool = False) -> None:
    """Put -inf at keys from a row's limit on, or before it."""
    rows, count = s.shape
    place, hidden = places[:count], beginning(mask, (rows, count))
    torch.arange(start, start + count, out=place)
    compare = torch.lt if before else torch.ge
    compare(place.unsqueeze(0), limits[:rows].unsqueeze(1), out=hidden)
    s.masked_fill_(hidden, float("-inf"))


def parted(tiles: list[Tensor], *, masked: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Part a kernel's tiles into those of its converted operands and those of `online_softmax`."""
    own = 10 if masked else 7
    return tiles[:-own], tiles[-own:]


def tile_shape(keys: int, *, in_place: bool) -> tuple[int, int]:
    """Return rows and keys of a tile of scores; keys that are read where they lie are taken all at once, if not too many."""
    columns = keys if in_place and keys <= WHOLE_KEYS else min(keys, KEY_ROWS)
    return min(QUERY_ROWS, SCORES // columns), columns


def evenly(count: int, most: int) -> int:
    """Return the size of parts of `count`, none larger than `most` and all of about the same size.

    >>> [evenly(8, most) for most in (1, 7, 9)]
    [1, 4, 8]
    """
    return -(-count // -(-count // max(most, 1)))


def keys_seen(positions: Sequence[int], keys: int, block: int) -> list[int]:
    """Count the keys, of `keys`, that a query at each position sees: all, or those of its block and the ones before.

    >>> keys_seen([0, 3, 4, 9], 10, 4)
    [4, 4, 8, 10]
    """
    if not block:
        return [keys] * len(positions)
    return [min(keys, (position // block + 1) * block) for position in positions]


def _write_limits(seen: Iterable[int], group: int, heads: int, out: Tensor) -> None:
    """Write how many keys each row of a tile sees: `group` rows for each entry of `seen`, the same for every head."""
    start = 0
    for limit, alike in groupby(seen):
        end = start + group * len(list(alike))
        out[start:end].fill_(limit)
        start = end
    for head in range(1, heads):
        out[head * start : (head + 1) * start].copy_(out[:start])


def visible(positions: Tensor, keys: int, block: int, sees: Tensor | None = None) -> Tensor:
    """Return bool [queries, keys], which keys the queries see; for the references."""
    if sees is not None:
        return (torch.arange(keys) >= sees[:, :1]) & (torch.arange(keys) < sees[:, 1:])
    seen = torch.tensor(keys_seen(positions.tolist(), keys, block), dtype=torch.int64)
    return torch.arange(keys) < seen[:, None]
