"""key_mass: the attention of each sequence's voting rows to each key of its prefix, per set of heads.

The formula is that of the operator's record (`mosaic.registrar.operators.key_mass`; MAGE, equation 3). Each tile of
rows passes over the prefix. A row without a vote has an infinite log-sum-exp, so its terms are 0. Float32 inside
(float64 for float64). Legend: T rows, R rows of the state, L layers, S keys of all prefixes, B sequences, X extents, N
query heads, K KV heads, H size, A rows times heads of a tile.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.shared.attention import tile_shape
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces, windows
from mosaic.kernels.shared.scratch import beginning, tiles_of

NOTHING: Final = {"mean": 0.0, "max": 0.0, "worst": math.inf}
"""The value of a row without a vote, which changes no statistic."""
EXTREMES: Final = {"max": (torch.amax, torch.maximum), "worst": (torch.amin, torch.minimum)}
"""The largest or the least of all rows, and of two."""
Keys = Sequence[tuple[int, Tensor]]
"""Keys [S, H] that lie side by side, and the position of the first."""


def bind(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, captured: Tensor, cu_keys: Tensor, votes: Tensor,
    cu_seqlens: Tensor, logsumexp: Tensor, mass: Tensor, positions: Tensor | None = None, layer: int, kv_heads: int,
    head_size: int, scale: float, sets: int, columns: int = 0, span: int = 0, statistic: str = "mean", block: int = 0,
    rows: int = 0, tiles: int = 1, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the mass of the keys of each prefix into mass [sets * tiles, S]; lengths, extents, votes and positions are read on the
    host."""
    members = q.shape[1] // (sets * head_size)
    query, scores, vector, column, wide_column, *wide = tiles_of("key_mass", scratch, {"q": q}, head_size=head_size)
    q_STMH = q.view(q.shape[0], sets, members, head_size).transpose(0, 1)
    sums_STM = logsumexp.view(q.shape[0], sets, members).transpose(0, 1)

    def run() -> None:
        owned, counts, first = pieces(extents, cu_extents), captured.tolist(), cu_keys.tolist()
        for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
            keys, voting = counts[sequence], votes[start:end].tolist()
            if not keys or not any(voting):
                continue
            part_rows, width = tile_shape(keys, in_place=False)
            most = min(members, part_rows)
            tokens = part_rows // most
            by_tile = voters_of(
                voting, None if positions is None else positions[start:end].tolist(), block, rows, tiles
            )
            for number, (own, voters) in enumerate(product(range(sets), by_tile)):
                head = own // (sets // kv_heads)
                kept = [
                    (piece.start, kept_tokens(kv, piece, layer, kv_heads, head_size)[0, head])
                    for piece in owned[sequence]
                ]
                mine = mass[number, first[sequence] : first[sequence] + keys]
                mine.fill_(NOTHING[statistic])
                for member in range(0, members, most):
                    for at in range(0, end - start, tokens):
                        tile = slice(start + at, min(start + at + tokens, end)), slice(member, member + most)
                        part, said = q_STMH[own][tile], voters[at : at + tokens]
                        if any(said):
                            packed = beginning(query, part.shape).copy_(part).flatten(0, 1)
                            logsum = beginning(vector, part.shape[:2]).copy_(sums_STM[own][tile]).flatten()
                            _silence(logsum, said, part.shape[1], NOTHING[statistic])
                            if statistic == "mean":
                                logsum.add_(column[:1].fill_(math.log(sum(voters) * members)))
                            part_of = tiles_of_keys(kept, keys, width, wide)
                            _add(packed, part_of, scale, scores, logsum, statistic, mine, column, wide_column)

    return run


launch = launcher(bind)


def voters_of(
    votes: Sequence[int], positions: Sequence[int] | None, block: int, rows: int, tiles: int
) -> list[Sequence[int]]:
    """The rows of a sequence that vote for each tile: the tile's voters, or all voters if it has none."""
    if positions is None:
        return [votes]
    of = [
        [vote and int(at % block // rows == tile) for vote, at in zip(votes, positions, strict=True)]
        for tile in range(tiles)
    ]
    return [mine if any(mine) else votes for mine in of]


def tiles_of_keys(kept: Keys, count: int, width: int, wide: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The first `count` keys in parts of at most `width`, in the compute dtype: views where they lie, or a converted tile."""
    for first, keys in kept:
        for start in range(0, min(keys.shape[0], count - first), width):
            part = keys[start : min(start + width, count - first)]
            yield first + start, beginning(wide[0], part.shape).copy_(part) if wide else part


def scores_of(q_AH: Tensor, keys: Tensor, scale: float, scores: Tensor) -> Tensor:
    """The scores of a tile of rows and one of keys, in a tile."""
    s = beginning(scores, (q_AH.shape[0], keys.shape[0]))
    return torch.addmm(s, q_AH, keys.T, beta=0, alpha=scale, out=s)


def _silence(logsum: Tensor, votes: Sequence[int], members: int, nothing: float) -> None:
    """Let the rows that do not vote give `nothing`, 0 or infinity; each has `members` heads side by side."""
    for row, vote in enumerate(votes):
        if not vote:
            logsum[row * members : (row + 1) * members].fill_(-math.inf if nothing else math.inf)


def _add(
    q_AH: Tensor, key_tiles: Iterator[tuple[int, Tensor]], scale: float, scores: Tensor, logsum: Tensor, statistic: str,
    mass: Tensor, column: Tensor, wide_column: Tensor,
) -> None:  # fmt: skip
    """Add up exp(score - logsum) of the rows into the mass of each key, or keep the largest or the least."""
    for start, keys in key_tiles:
        s, count = scores_of(q_AH, keys, scale, scores), keys.shape[0]
        s.sub_(logsum.unsqueeze(1)).exp_()
        mine = mass[start : start + count]
        found, rounded = column[:count], wide_column[:count]
        if statistic == "mean":
            torch.sum(s, dim=0, out=found)
            mine.add_(rounded.copy_(found))
        else:
            of_rows, of_both = EXTREMES[statistic]
            of_rows(s, dim=0, out=found)
            of_both(mine, rounded.copy_(found), out=mine)


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, captured: Tensor, cu_keys: Tensor, votes: Tensor,
    cu_seqlens: Tensor, logsumexp: Tensor, positions: Tensor | None = None, layer: int, kv_heads: int, head_size: int, scale: float,
    sets: int, columns: int = 0, span: int = 0, statistic: str = "mean", block: int = 0, rows: int = 0, tiles: int = 1,
) -> Tensor:  # fmt: skip
    """Return the mass in plain PyTorch, with whole score matrices; `columns` is needed; unwritten elements are NaN."""
    mass = torch.full((sets, tiles, columns), float("nan"), dtype=q.dtype)
    members = q.shape[1] // head_size // sets
    owned = pieces(extents, cu_extents)
    for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
        keys, voting = int(captured[sequence]), votes[start:end] != 0
        if not keys or not voting.any():
            continue
        kept = [kept_tokens(kv, piece, layer, kv_heads, head_size)[0] for piece in owned[sequence]]
        k_SPH = torch.cat(kept, dim=1)[:, :keys].repeat_interleave(sets // kv_heads, dim=0)
        for tile in range(tiles):
            voters = voting if positions is None else voting & (positions[start:end] % block // rows == tile)
            voters = voters if voters.any() else voting
            q_SAH = q[start:end][voters].view(-1, sets, members, head_size).permute(1, 0, 2, 3).flatten(1, 2)
            sums_SA = logsumexp[start:end][voters].view(-1, sets, members).transpose(0, 1).flatten(1)
            p_SAP = torch.exp(q_SAH @ k_SPH.transpose(1, 2) * scale - sums_SA[:, :, None])
            found = p_SAP.mean(1) if statistic == "mean" else EXTREMES[statistic][0](p_SAP, 1)
            mass[:, tile, int(cu_keys[sequence]) : int(cu_keys[sequence]) + keys] = found
    return mass.flatten(0, 1)
