"""What the kernels of attention share on the CPU: the online softmax of a tile of query rows, and who sees what.

The online softmax is that of Milakov and Gimelshein 2018 (arXiv 1805.02867): nothing of the size queries x keys exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor

__all__ = ["keys_seen", "online_softmax", "visible", "write_limits"]


def online_softmax(
    q_ACH: Tensor, key_tiles: Iterable[tuple[int, Tensor, Tensor]], scale: float, tiles: list[Tensor], *, blocked: bool
) -> Tensor:
    """Return softmax(q k^T * scale) v for a tile of query rows of some heads, [A, C, H] in scratch.

    Small tiles of several heads go together: one product of many is far quicker than as many calls.

    Parameters
    ----------
    q_ACH
        C query rows of each of A heads, in the compute dtype; A*C at most `tiles[0].shape[0]`.
    key_tiles
        The place of a tile's first key, its keys and its values [A, at most `tiles[0].shape[1]`, H], in the compute
        dtype. Every row sees a key of the first tile.
    tiles
        Scores, accumulator and five vectors; where `blocked` how many keys each row sees, a vector for the keys' places
        and one for the mask.
    """
    (heads, rows, size), (scores, accumulator, *vectors) = q_ACH.shape, tiles[:7]
    count = heads * rows
    flat = accumulator[:count]
    result = flat.view(heads, rows, size)
    maximum, new_maximum, total, tile_total, correction = (vector[:count] for vector in vectors)
    for start, k, v in key_tiles:
        keys = k.shape[1]
        # contiguous whatever the tile's size, so that BLAS gets plain strides
        s = scores.view(-1)[: count * keys].view(count, keys)
        products = s.view(heads, rows, keys)
        torch.baddbmm(products, q_ACH, k.transpose(1, 2), beta=0, alpha=scale, out=products)
        if blocked:
            _hide(s, start, *tiles[7:10])
        if start == 0:
            torch.amax(s, dim=1, out=maximum)
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
    return result


def _hide(s: Tensor, start: int, limits: Tensor, places: Tensor, mask: Tensor) -> None:
    """Put -inf where a row does not see a key; `limits` counts the keys that each row sees."""
    rows, count = s.shape
    place, hidden = places[:count], mask[: rows * count].view(rows, count)
    torch.arange(start, start + count, out=place)
    torch.ge(place.unsqueeze(0), limits[:rows].unsqueeze(1), out=hidden)
    s.masked_fill_(hidden, float("-inf"))


def keys_seen(positions: Iterable[int], keys: int, block: int) -> list[int]:
    """Count the keys, of `keys`, that a query at each position sees: all, or those of its block and the ones before.

    >>> keys_seen([0, 3, 4, 9], 10, 4)
    [4, 4, 8, 10]
    """
    return [min(keys, (position // block + 1) * block) if block else keys for position in positions]


def write_limits(seen: Iterable[int], group: int, heads: int, out: Tensor) -> None:
    """Write how many keys each row of a tile sees: `group` rows for each entry of `seen`, the same for every head."""
    start = 0
    for limit, alike in groupby(seen):
        end = start + group * len(list(alike))
        out[start:end].fill_(limit)
        start = end
    for head in range(1, heads):
        out[head * start : (head + 1) * start].copy_(out[:start])


def visible(positions: Tensor, keys: int, block: int) -> Tensor:
    """Return bool [queries, keys], which keys the queries see; for the references."""
    seen = torch.tensor(keys_seen(positions.tolist(), keys, block), dtype=torch.int64)
    return torch.arange(keys) < seen[:, None]
