"""joined_attention: attention to a block's own keys, merged with a fresh or kept output over its prefix.

`mosaic.registrar.operators.joined_attention` defines each row's keys and given output (FlashBlock, arXiv 2602.05305).
Of outputs y_1, y_2 with log-sum-exps s_1, s_2 the softmax over both sets of keys gives y_1 + (y_2 - y_1) * sigmoid(s_2
- s_1). Legend: T query rows, R rows, L layers, B sequences, X extents, E and S rows of states, Z slots, M rows of a
block, N query heads, K KV heads, G heads of a group, H size.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from mosaic.kernels.kv_attention import Finish, attend_heads
from mosaic.kernels.shared.attention import keys_seen, parted, visible
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces, windows
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    prefix: Tensor, y: Tensor, layer: int, slot: int, rows: int, kv_heads: int, head_size: int, scale: float, block: int = 0,
    kept: Tensor | None = None, kept_sums: Tensor | None = None, owner: Tensor | None = None, fresh: Tensor | None = None,
    fresh_sums: Tensor | None = None, refreshed: Tensor | None = None, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H], and keep what is fresh; lengths and positions are read on the host."""
    group = q.shape[1] // (kv_heads * head_size)
    given, given_sums, sums, *found = tiles_of("joined_attention", scratch, {"q": q}, head_size=head_size)
    converted, tiles = parted(found, masked=True)
    shape = (-1, kv_heads, group, head_size)
    q_KTGH, y_KTGH = (x.view(shape).transpose(0, 1) for x in (q, y))
    places = None
    if kept is not None and kept_sums is not None:
        places = (
            kept.view(kept.shape[0], -1, rows, *shape[1:])[:, slot],
            kept_sums.view(kept_sums.shape[0], -1, rows, *shape[1:3])[:, slot],
        )
    both = None if fresh is None or fresh_sums is None else (fresh.view(shape), fresh_sums.view(shape[:3]))

    def run() -> None:
        owned, counts, prefixes = pieces(extents, cu_extents), seen.tolist(), prefix.tolist()
        owners, new = ([0] * len(counts) if numbers is None else numbers.tolist() for numbers in (owner, refreshed))
        for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
            before = prefixes[sequence]
            own = [
                (max(piece.start - before, 0), part[:, :, max(before - piece.start, 0) :])
                for piece in owned[sequence]
                if piece.end > before
                for part in (kept_tokens(kv, piece, layer, kv_heads, head_size),)
            ]
            at = positions[start:end].tolist()
            limits = keys_seen(at, counts[sequence], block)
            for first, last in _runs(at, limits, before):
                mine, place = slice(start + first, start + last), slice(at[first] - before, at[last - 1] - before + 1)
                earlier: tuple[Tensor, Tensor] | None = None
                there: tuple[Tensor, Tensor] | None = None
                if places is not None and at[first] >= before:
                    there = places[0][owners[sequence], place], places[1][owners[sequence], place]
                if before and new[sequence]:
                    assert both is not None
                    earlier = both[0][mine], both[1][mine]
                    if there is not None:
                        there[0].copy_(earlier[0])
                        there[1].copy_(earlier[1])
                elif before:
                    earlier = there
                some = [limit - before for limit in limits[first:last]]
                if some[0] > 0:
                    finish = _joining(y_KTGH[:, mine], earlier, sums, given, given_sums)
                    attend_heads(q_KTGH[:, mine], own, scale, some, converted, tiles, finish, sums)
                elif earlier is not None:
                    y_KTGH[:, mine].copy_(earlier[0].transpose(0, 1))

    return run


launch = launcher(bind)


def _runs(positions: Sequence[int], limits: Sequence[int], before: int) -> Iterator[tuple[int, int]]:
    """Rows at neighbouring positions, of which all see own keys or none does, and all lie before the block or none does."""

    def kind(row: int) -> tuple[int, bool, bool]:
        return positions[row] - row, positions[row] >= before, limits[row] > before

    for _, run in groupby(range(len(positions)), key=kind):
        rows = list(run)
        yield rows[0], rows[-1] + 1


def _joining(
    y_KTGH: Tensor, earlier: tuple[Tensor, Tensor] | None, sums: Tensor, given: Tensor, given_sums: Tensor
) -> Finish:
    """Write each tile's result, merged with given outputs [T, K, G, H] and log-sum-exps [T, K, G]."""

    def join(tile: tuple[slice, slice, slice], found: Tensor) -> None:
        if earlier is not None:
            shape = found.shape
            outputs, log_sums = (x.transpose(0, 1)[tile] for x in earlier)
            output = beginning(given, shape).copy_(outputs)
            weight = torch.sub(
                beginning(sums, shape[:3]),
                beginning(given_sums, shape[:3]).copy_(log_sums),
                out=beginning(sums, shape[:3]),
            ).sigmoid_()
            found.sub_(output).mul_(weight.unsqueeze(3)).add_(output)
        y_KTGH[tile].copy_(found)

    return join


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    prefix: Tensor, layer: int, slot: int, rows: int, kv_heads: int, head_size: int, scale: float, block: int = 0,
    kept: Tensor | None = None, kept_sums: Tensor | None = None, owner: Tensor | None = None, fresh: Tensor | None = None,
    fresh_sums: Tensor | None = None, refreshed: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return y and both states in plain PyTorch, a row at a time; rows that see no key are NaN."""
    y, heads = torch.full_like(q, float("nan")), q.shape[1] // head_size
    states = {}
    if kept is not None and kept_sums is not None and owner is not None:
        states = {"kept": kept.clone(), "kept_sums": kept_sums.clone().to(q.dtype)}
        outputs = states["kept"].view(kept.shape[0], -1, rows, heads, head_size)
        log_sums = states["kept_sums"].view(kept_sums.shape[0], -1, rows, heads)
    owned = pieces(extents, cu_extents)
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        before, mine = int(prefix[sequence]), 0 if owner is None else int(owner[sequence])
        both = torch.cat([kept_tokens(kv, piece, layer, kv_heads, head_size) for piece in owned[sequence]], 2)
        both = both.repeat_interleave(heads // kv_heads, 1)[:, :, : int(seen[sequence])]
        for row in range(start, end):
            sees = visible(positions[row : row + 1], both.shape[2], block)[0]
            sees[:before] = False
            k_NSH, v_NSH = both[:, :, sees]
            scores = (k_NSH @ q[row].view(heads, head_size, 1))[..., 0] * scale
            place = int(positions[row]) - before
            if before and refreshed is not None and refreshed[sequence]:
                assert fresh is not None and fresh_sums is not None
                earlier, sums = fresh[row].view(heads, head_size), fresh_sums[row].to(q.dtype)
                if states and place >= 0:
                    outputs[mine, slot, place], log_sums[mine, slot, place] = earlier, sums
            elif before:
                earlier, sums = outputs[mine, slot, place], log_sums[mine, slot, place]
            if before:
                scores, v_NSH = torch.cat([scores, sums[:, None]], 1), torch.cat([v_NSH, earlier[:, None]], 1)
            if scores.shape[1]:
                y[row] = (torch.softmax(scores, 1)[:, None] @ v_NSH).flatten()
    return {"y": y, **states}
