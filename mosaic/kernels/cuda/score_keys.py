"""score_keys on CUDA: the products of the mean query of a block with every key of its sequence, per set of query heads.

A program owns some keys and a set of heads. For each sequence that has some of the keys it takes the mean of the block's queries
again, which other programs have brought into the cache, and reads them once for each of its heads. Bounds are read on the device
alone. Legend: T rows, B sequences, H size.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, first_sequence

# Untuned defaults.
KEYS: Final = 64
"""Keys of a program."""
QUERIES: Final = 16
"""Queries that are added up at a time."""
WARPS: Final = 4


@triton.jit(do_not_specialize=["sequences"])
def score_keys_kernel(
    q,
    k,
    spans,
    cu_seqlens,
    scores,
    q_stride,
    k_stride,
    scores_stride,
    sequences,
    SEQUENCES: tl.constexpr,
    MEMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    own = tl.program_id(1)
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_H)
    query = tl.arange(0, BLOCK_Q)
    within = column < SIZE
    sequence = first_sequence(tl.program_id(0) * BLOCK_K, cu_seqlens, sequences, SEQUENCES)
    start = tl.load(cu_seqlens + sequence)
    until = tl.minimum((tl.program_id(0) + 1) * BLOCK_K, tl.load(cu_seqlens + sequences))
    while start < until:
        end = tl.load(cu_seqlens + sequence + 1)
        first = start + tl.load(spans + 5 * sequence)
        last = start + tl.load(spans + 5 * sequence + 1)
        mine = (key >= start) & (key < end)
        found = tl.full([BLOCK_K], float("-inf") if LARGEST else 0.0, tl.float32)
        for head in range(own * MEMBERS, own * MEMBERS + MEMBERS):
            mean = tl.zeros([BLOCK_H], tl.float32)
            for some in range(first, last, BLOCK_Q):
                mask = (some + query < last)[:, None] & within[None, :]
                place = (some + query).to(tl.int64)[:, None] * q_stride + head * SIZE + column[None, :]
                mean += tl.sum(tl.load(q + place, mask=mask, other=0.0).to(tl.float32), 0)
            mean = mean / tl.maximum(last - first, 1).to(tl.float32)
            mask = mine[:, None] & within[None, :]
            place = key.to(tl.int64)[:, None] * k_stride + head // GROUP * SIZE + column[None, :]
            keys = tl.load(k + place, mask=mask, other=0.0).to(tl.float32)
            products = tl.sum(keys * mean[None, :], 1)
            found = tl.maximum(found, products) if LARGEST else found + products
        found = found if LARGEST else found / MEMBERS
        tl.store(scores + own.to(tl.int64) * scores_stride + key, found, mask=mine)
        sequence += 1
        start = end


def launch(
    *, q: Tensor, k: Tensor, spans: Tensor, cu_seqlens: Tensor, scores: Tensor, head_size: int, each: int, over: str = "max",
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the scores [each*K, T]."""
    group = q.shape[1] // k.shape[1]
    sequences = spans.shape[0]
    score_keys_kernel[(triton.cdiv(k.shape[0], KEYS), scores.shape[0])](
        q,
        k,
        spans,
        cu_seqlens,
        scores,
        q.stride(0),
        k.stride(0),
        scores.stride(0),
        sequences,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        MEMBERS=group // each,
        GROUP=group,
        SIZE=head_size,
        LARGEST=over == "max",
        BLOCK_H=power_of_two(head_size, 1 << 16),
        BLOCK_Q=QUERIES,
        BLOCK_K=KEYS,
        num_warps=WARPS,
    )
