"""attention on CUDA: softmax(q k^T * scale) v per sequence of a packed batch, bidirectional or in blocks, grouped-query.

Row r of q is row `row_start + r` of the packed batch and sees the keys of its own sequence; with `block`, those of its own
block of `block` rows and of the blocks before; with `sees`, those in [sees[r, 0], sees[r, 1]); a row in no sequence is left
as it was.

Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) in float32 over tiles of query rows times tiles of keys, as in
FlashAttention (Dao et al. 2022). A tile of query rows may span sequences: each row then masks the keys of the others, so
nothing is read on the host and a batch of many short sequences needs no more tiles than one long one. Legend: T query rows, S
keys, B sequences, N query heads, K KV heads, H head size.
"""

import math
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, Tile, power_of_two, since, tile_for, tl, triton

# By architecture and item size: query rows, keys, unused, warps, stages. On an H200 (16,384 tokens, 32 heads of 128,
# bfloat16) 128x64 with 8 warps reaches 404 TFLOP/s and 64x64 with 4 warps 365; the former spills on cards before Hopper,
# and asks for more shared memory than consumer cards after it have (sm_120). Heads wider than 128 take the narrow tile.
SMALL: Final = {2: Tile(64, 64, 0, 4, 3), 4: Tile(32, 32, 0, 8, 1)}
HOPPER: Final = {2: Tile(128, 64, 0, 8, 3), 4: Tile(32, 32, 0, 8, 1)}
TILES: Final = {80: SMALL, 90: HOPPER, 120: SMALL}
NARROW: Final = {2: Tile(64, 32, 0, 8, 2), 4: Tile(16, 16, 0, 4, 1)}
WIDEST: Final = 128


@triton.jit(do_not_specialize=["rows", "row_start", "sequences"])
def attention_kernel(
    q,
    k,
    v,
    cu_seqlens,
    sees,
    y,
    q_stride,
    k_stride,
    v_stride,
    y_stride,
    rows,
    row_start,
    sequences,
    scale_log2,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SEEN: tl.constexpr,
    SEES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_H)
    # the keys [first, last) of its sequence that every row sees, and [low, high) of all the tile's rows together
    first = tl.zeros([BLOCK_Q], tl.int64)
    last = tl.zeros([BLOCK_Q], tl.int64)
    start = tl.load(cu_seqlens).to(tl.int64)
    for sequence in range(sequences):
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
        mine = (row < rows) & (row_start + row >= start) & (row_start + row < end)
        first = tl.where(mine, start, first)
        last = tl.where(mine, end, last)
        start = end
    if SEEN:  # rows of a block see no later one
        last = tl.minimum(last, first + ((row_start + row - first) // SEEN + 1) * SEEN)
    if SEES:
        last = tl.minimum(last, first + tl.load(sees + row * 2 + 1, mask=row < rows, other=0))
        first += tl.load(sees + row * 2, mask=row < rows, other=0)
    here = last > first
    high = tl.max(last, 0)
    low = tl.min(tl.where(here, first, high), 0)
    first_key = (first - low).to(tl.int32)
    last_key = (last - low).to(tl.int32)
    keys = (high - low).to(tl.int32)

    mask = here[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + row[:, None] * q_stride + head * SIZE + column[None, :], mask=mask, other=0.0)
    key = tl.arange(0, BLOCK_K)
    shared = (head // GROUP) * SIZE
    k_place = k + (low + key)[None, :] * k_stride + shared + column[:, None]
    v_place = v + (low + key)[:, None] * v_stride + shared + column[None, :]
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    for step in range(0, keys, BLOCK_K):
        index = step + key
        k_mask = (index < keys)[None, :] & (column < SIZE)[:, None]
        v_mask = (index < keys)[:, None] & (column < SIZE)[None, :]
        k_tile = tl.load(k_place, mask=k_mask, other=0.0)
        scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
        visible = (index[None, :] >= first_key[:, None]) & (index[None, :] < last_key[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # a row that has seen no key of its own yet: any finite base will do, as all its exponentials are 0
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(maximum - base)
        total = total * correction + tl.sum(weights, 1)
        v_tile = tl.load(v_place, mask=v_mask, other=0.0)
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(weights.to(v.dtype.element_ty), v_tile, accumulator, input_precision="ieee")
        maximum = new_maximum
        k_place += BLOCK_K * k_stride
        v_place += BLOCK_K * v_stride
    result = accumulator / tl.where(here, total, 1.0)[:, None]
    # y may be q: this program alone reads these rows of this head, and has read them
    tl.store(y + row[:, None] * y_stride + head * SIZE + column[None, :], result.to(y.dtype.element_ty), mask=mask)


def launch(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, y: Tensor, sees: Tensor | None = None, head_size: int,
    scale: float, span: int = 0, block: int = 0, row_start: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; y may be q itself."""
    rows = q.shape[0]
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    tile = tile_for(since(TILES, q) if head_size <= WIDEST else NARROW, q)
    attention_kernel[(triton.cdiv(rows, tile.rows), heads)](
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens if sees is None else sees,
        y,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        y.stride(0),
        rows,
        row_start,
        cu_seqlens.shape[0] - 1,
        scale / math.log(2),
        GROUP=heads // kv_heads,
        SIZE=head_size,
        SEEN=block,
        SEES=sees is not None,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
