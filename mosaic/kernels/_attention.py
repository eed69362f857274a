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
    q_CH: Tensor, key_tiles: Iterable[tuple[int, Tensor, Tensor]], scale: float, tiles: list[Tensor], *, blocked: bool
) -> Tensor:
    """Return softmax(q k^T * scale) v for a tile of query rows, in scratch.

    Parameters
    ----------
    q_CH
        Query rows, in the compute dtype.
    key_tiles
        The place of a tile's first key, its keys and its values [at most `tiles[0].shape[1]`, H], in the compute dtype.
        Every row sees a key of the first tile.
    tiles
        Scores, accumulator and five vectors; where `blocked` how many keys each row sees, a vector for the keys' places
        and one for the mask.
    """
    scores, accumulator, *vectors = tiles[:7]
    rows = q_CH.shape[0]
    accumulator = accumulator[:rows]
    maximum, new_maximum, total, tile_total, correction = (vector[:rows] for vector in vectors)
    for start, k, v in key_tiles:
        count = k.shape[0]
        # contiguous whatever the tile's size, so that BLAS gets plain strides
        s = scores.view(-1)[: rows * count].view(rows, count)
        torch.addmm(s, q_CH, k.t(), beta=0, alpha=scale, out=s)
        if blocked:
            _hide(s, start, *tiles[7:10])
        if start == 0:
            torch.amax(s, dim=1, out=maximum)
            s.sub_(maximum.unsqueeze(1)).exp_()
            torch.sum(s, dim=1, out=total)
            torch.mm(s, v, out=accumulator)
            continue
        torch.amax(s, dim=1, out=new_maximum)
        torch.maximum(new_maximum, maximum, out=new_maximum)
        torch.sub(maximum, new_maximum, out=correction)
        correction.exp_()
        s.sub_(new_maximum.unsqueeze(1)).exp_()
        torch.sum(s, dim=1, out=tile_total)
        total.mul_(correction).add_(tile_total)
        accumulator.mul_(correction.unsqueeze(1)).addmm_(s, v)
        maximum.copy_(new_maximum)
    return accumulator.div_(total.unsqueeze(1))


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


def write_limits(seen: Iterable[int], group: int, out: Tensor) -> None:
    """Write how many keys each row of a tile sees, `group` rows for each entry of `seen`."""
    start = 0
    for limit, alike in groupby(seen):
        end = start + group * len(list(alike))
        out[start:end].fill_(limit)
        start = end


def visible(positions: Tensor, keys: int, block: int) -> Tensor:
    """Return bool [queries, keys], which keys the queries see; for the references."""
    seen = torch.tensor(keys_seen(positions.tolist(), keys, block), dtype=torch.int64)
    return torch.arange(keys) < seen[:, None]
