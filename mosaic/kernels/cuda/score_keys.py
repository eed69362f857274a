"""score_keys on CUDA: the products of the mean query of a block with every key of its sequence, per set of query heads.

A program owns some keys of a sequence and a set of heads. It takes the mean of the block's queries again, which other programs have
brought into the cache, and reads its keys once for each of its heads. Bounds are read on the device alone. Legend: T rows, B
sequences, H size.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults.
KEYS: Final = 64
"""Keys of a program."""
QUERIES: Final = 16
"""Queries that are added up at a time."""
WARPS: Final = 4


@triton.jit
def score_keys_kernel(
    q,
    k,
    spans,
    cu_seqlens,
    scores,
    q_stride,
    k_stride,
    scores_stride,
    MEMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    own = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    first = start + tl.load(spans + 5 * sequence)
    last = start + tl.load(spans + 5 * sequence + 1)
    key = start + tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_H)
    query = tl.arange(0, BLOCK_Q)
    within = column < SIZE
    if start + tl.program_id(0) * BLOCK_K < end:
        found = tl.full([BLOCK_K], float("-inf") if LARGEST else 0.0, tl.float32)
        for head in range(own * MEMBERS, own * MEMBERS + MEMBERS):
            mean = tl.zeros([BLOCK_H], tl.float32)
            for some in range(first, last, BLOCK_Q):
                mask = (some + query < last)[:, None] & within[None, :]
                place = (some + query).to(tl.int64)[:, None] * q_stride + head * SIZE + column[None, :]
                mean += tl.sum(tl.load(q + place, mask=mask, other=0.0).to(tl.float32), 0)
            mean = mean / (last - first).to(tl.float32)
            mask = (key < end)[:, None] & within[None, :]
            place = key.to(tl.int64)[:, None] * k_stride + head // GROUP * SIZE + column[None, :]
            keys = tl.load(k + place, mask=mask, other=0.0).to(tl.float32)
            products = tl.sum(keys * mean[None, :], 1)
            found = tl.maximum(found, products) if LARGEST else found + products
        found = found if LARGEST else found / MEMBERS
        tl.store(scores + own.to(tl.int64) * scores_stride + key, found, mask=key < end)


def launch(
    *, q: Tensor, k: Tensor, spans: Tensor, cu_seqlens: Tensor, scores: Tensor, head_size: int, each: int, over: str = "max",
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the scores [each*K, T]."""
    group = q.shape[1] // k.shape[1]
    score_keys_kernel[(triton.cdiv(k.shape[0], KEYS), scores.shape[0], spans.shape[0])](
        q,
        k,
        spans,
        cu_seqlens,
        scores,
        q.stride(0),
        k.stride(0),
        scores.stride(0),
        MEMBERS=group // each,
        GROUP=group,
        SIZE=head_size,
        LARGEST=over == "max",
        BLOCK_H=power_of_two(head_size, 1 << 16),
        BLOCK_Q=QUERIES,
        BLOCK_K=KEYS,
        num_warps=WARPS,
    )
