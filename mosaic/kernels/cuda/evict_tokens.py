"""evict_tokens on CUDA: the rows of a step that continue beyond the cut layer, in two launches.

In the first launch one program per sequence chooses: the block's rows are at most the last P of the window, so they are
one tile, compared pair by pair. In the second it adds up the counts of earlier sequences and writes its rows; one more
program writes the padding. Scratch: whether each row is kept, and each sequence's number of kept rows. Nothing is read
on the host. Legend: B sequences, K KV heads, P positions of a block, T rows, E rows of the state.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.evict_tokens import NEARLY
from mosaic.registrar.operators.evict_tokens import HISTORIES

# Untuned defaults: rows of a tile that are written, sequences that are added up at once.
ROWS: Final = 64
SEQUENCES: Final = 256
WARPS: Final = 4
_NEARLY: Final = tl.constexpr(NEARLY)
_EMA: Final = tl.constexpr(HISTORIES.index("ema"))
_BLOCK: Final = tl.constexpr(HISTORIES.index("block"))


@triton.jit
def budget_of(state, count, alpha, weight, HISTORY: tl.constexpr):
    """Count the step before in a row of the state; return how many rows the history asks for."""
    summed = tl.load(state)
    counted = tl.load(state + 1)
    there = count.to(tl.float32)
    moved = summed + there
    if HISTORY == _EMA:
        moved = tl.where(counted > 0, (1 - weight) * summed + weight * there, there)
    counts = count > 0 if HISTORY == _BLOCK else count >= 0
    summed = tl.where(count == -1, 0.0, tl.where(counts, tl.where(counted > 0, moved, there), summed))
    counted = tl.where(count == -1, 0.0, tl.where(counts, counted + 1, counted))
    tl.store(state, summed, mask=count >= -1)  # what is counted already may be nobody's: another program has the row
    tl.store(state + 1, counted, mask=count >= -1)
    average = summed if HISTORY == _EMA else summed / tl.maximum(counted, 1.0)
    return tl.ceil(alpha * tl.maximum(average, 1.0) * _NEARLY).to(tl.int32)


@triton.jit
def change_of(before, after, place, mask, HEADS: tl.constexpr, POSITIONS: tl.constexpr):
    """The sum over heads of after - before, at some offsets of a sequence's block."""
    change = tl.zeros_like(place).to(tl.float32)
    for head in range(HEADS):
        at = head * POSITIONS + place
        change += tl.load(after + at, mask=mask, other=0.0) - tl.load(before + at, mask=mask, other=0.0)
    return change


@triton.jit
def choose_kernel(
    before,
    after,
    listed,
    first,
    progress,
    status,
    positions,
    cu_seqlens,
    decoded,
    owner,
    state,
    ranks,
    seen,
    flags,
    counts,
    state_stride,
    alpha,
    weight,
    HISTORY: tl.constexpr,
    KEEP: tl.constexpr,
    BOTTOM: tl.constexpr,
    RANKED: tl.constexpr,
    BY_MEAN: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    low = tl.load(cu_seqlens + sequence)
    high = tl.load(cu_seqlens + sequence + 1)
    begin = tl.load(first + sequence)
    own = state + tl.load(owner + sequence) * state_stride
    budget = budget_of(own, tl.load(decoded + sequence), alpha, weight, HISTORY)
    index = tl.arange(0, BLOCK)
    row = high - BLOCK + index
    there = row >= low
    kind = tl.load(status + row, mask=there, other=0).to(tl.int32)
    place = tl.load(positions + row, mask=there, other=0)
    masked = kind > 0
    base = sequence * HEADS * POSITIONS
    delta = change_of(before + base, after + base, place - begin, masked, HEADS, POSITIONS)
    if BY_MEAN:
        many = tl.maximum(tl.sum(masked.to(tl.int32), 0), 1)
        delta_from = delta - tl.sum(tl.where(masked, delta, 0.0), 0) / many
        squares = tl.sum(tl.where(masked, delta_from * delta_from, 0.0), 0)
    else:
        name = tl.load(listed + sequence * POSITIONS + index, mask=index < POSITIONS, other=-1)
        many = tl.maximum(tl.sum((name >= 0).to(tl.int32), 0), 1)
        of_block = change_of(before + base, after + base, name, name >= 0, HEADS, POSITIONS)
        delta_from = delta
        squares = tl.sum(of_block * of_block, 0)
    candidate = masked & (delta_from >= 0) & (delta_from * delta_from * many >= squares)
    target = KEEP if KEEP > 0 else tl.maximum(budget, tl.sum(candidate.to(tl.int32), 0))
    if RANKED:
        own_rank = tl.load(ranks + sequence * POSITIONS + place - begin, mask=masked, other=0.0)
        rank = tl.where(delta == delta, own_rank, delta)  # what is not a number stays so
    else:
        rank = -delta if BOTTOM else delta
    larger = (rank[None, :] > rank[:, None]) | ((rank[None, :] == rank[:, None]) & (index[None, :] < index[:, None]))
    ahead = tl.sum((larger & masked[None, :]).to(tl.int32), 1)
    best = masked & (ahead < target)
    follows = best[None, :] & (place[None, :] == place[:, None] + 1)
    chosen = best | (masked & (tl.sum(follows.to(tl.int32), 1) > 0))
    earlier = index < tl.max(tl.where(chosen, index, -1), 0)
    kept = chosen | (there & (kind == 0)) | (earlier & (masked if MASKED else kind == 2))
    tl.store(flags + row, kept.to(tl.int32), mask=there)
    # rows before the tile are of positions before the block, and kept
    tl.store(counts + sequence, tl.maximum(high - BLOCK - low, 0) + tl.sum(kept.to(tl.int32), 0))
    beyond = tl.max(tl.where(kept, place + 1, 0), 0)
    before_tile = tl.load(positions + high - BLOCK - 1, mask=high - BLOCK > low, other=-1) + 1
    tl.store(seen + sequence, tl.maximum(begin + tl.load(progress + sequence), tl.maximum(beyond, before_tile)))


@triton.jit(do_not_specialize=["sequences", "tokens"])
def write_kernel(
    cu_seqlens,
    rows,
    bounds,
    total,
    flags,
    counts,
    sequences,
    tokens,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    sequence = tl.program_id(0)
    before = sequence * 0
    for start in range(0, sequence, SEQUENCES):
        other = start + tl.arange(0, SEQUENCES)
        before += tl.sum(tl.load(counts + other, mask=other < sequence, other=0), 0)
    tl.store(bounds + sequence, before)
    if sequence == sequences:
        tl.store(total, before.to(tl.int64))
        for start in range(before, tokens, ROWS):
            at = start + tl.arange(0, ROWS)
            tl.store(rows + at, tl.zeros([ROWS], tl.int64), mask=at < tokens)
    else:
        high = tl.load(cu_seqlens + sequence + 1)
        for start in range(tl.load(cu_seqlens + sequence), high, ROWS):
            row = start + tl.arange(0, ROWS)
            kept = tl.load(flags + row, mask=(row >= high - BLOCK) & (row < high), other=1)
            kept = tl.where(row < high, kept, 0)
            tl.store(rows + before + tl.cumsum(kept, 0) - kept, row.to(tl.int64), mask=kept > 0)
            before += tl.sum(kept, 0)


def launch(
    *, before: Tensor, after: Tensor, listed: Tensor, first: Tensor, progress: Tensor, status: Tensor,
    positions: Tensor, cu_seqlens: Tensor, decoded: Tensor, owner: Tensor, state: Tensor, rows: Tensor, bounds: Tensor,
    total: Tensor, seen: Tensor, alpha: float, history: str, threshold: str, placeholders: str, weight: float = 0.0,
    keep: int = 0, rank: str = "importance", ranks: Tensor | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write rows, bounds, total and seen, and count the step before in the state."""
    sequences, heads, block = after.shape
    tokens = status.shape[0]
    numbers = floats_of("evict_tokens", scratch, tokens + sequences).view(torch.int32)
    flags, counts = numbers[:tokens], numbers[tokens:]
    tile = power_of_two(block, 1 << 16)
    choose_kernel[(sequences,)](
        before,
        after,
        listed,
        first,
        progress,
        status,
        positions,
        cu_seqlens,
        decoded,
        owner,
        state,
        after if ranks is None else ranks,
        seen,
        flags,
        counts,
        state.stride(0),
        alpha,
        weight,
        HISTORY=HISTORIES.index(history),
        KEEP=keep,
        BOTTOM=rank == "bottom",
        RANKED=ranks is not None,
        BY_MEAN=threshold == "mean",
        MASKED=placeholders == "masked",
        HEADS=heads,
        POSITIONS=block,
        BLOCK=tile,
        num_warps=WARPS,
    )
    write_kernel[(sequences + 1,)](
        cu_seqlens,
        rows,
        bounds,
        total,
        flags,
        counts,
        sequences,
        tokens,
        BLOCK=tile,
        ROWS=ROWS,
        SEQUENCES=power_of_two(sequences, SEQUENCES),
        num_warps=WARPS,
    )
