"""One check for the operands of a launch: shapes by a legend, dtypes, unit stride of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.errors import GraphError

__all__ = ["INDEX", "check_attention", "check_shape", "check_shapes", "heads_of", "heads_of_sets"]

INDEX = (torch.int64,)


def check_shape(kernel: str, name: str, operand: Tensor, expected: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raise `GraphError` unless `operand` has this shape, this dtype (None: any) and contiguous rows."""
    if operand.shape != expected or (dtype is not None and operand.dtype != dtype):
        want = f"{list(expected)} {dtype if dtype is not None else ''}".strip()
        raise GraphError(f"{kernel}: operand '{name}' is {list(operand.shape)} {operand.dtype}, expected {want}.")
    if operand.dim() > 0 and operand.shape[-1] > 1 and operand.stride(-1) != 1:
        raise GraphError(f"{kernel}: operand '{name}' has stride {operand.stride(-1)} inside a row, expected 1.")


def check_shapes(kernel: str, **operands: tuple[Tensor | None, tuple[int, ...], torch.dtype | None]) -> None:
    """Check several operands, each given as (tensor, shape, dtype); a None tensor is an absent optional operand."""
    for name, (operand, expected, dtype) in operands.items():
        # the common case first, in one line: small steps are short enough to notice
        if operand is None or (
            operand.shape == expected and operand.dtype is (dtype or operand.dtype) and operand.stride()[-1:] == (1,)
        ):
            continue
        check_shape(kernel, name, operand, expected, dtype)


def heads_of(kernel: str, name: str, operand: Tensor, head_size: int) -> int:
    """Count the heads of `head_size` columns in a row; raise `GraphError` where they do not fill it."""
    heads, rest = divmod(operand.shape[-1], head_size)
    if rest or not heads:
        raise GraphError(
            f"{kernel}: operand '{name}' has {operand.shape[-1]} columns, expected a multiple of the head size {head_size}."
        )
    return heads


def heads_of_sets(kernel: str, q: Tensor, head_size: int, kv_heads: int, sets: int) -> int:
    """Count the query heads of each of `sets`; raise `GraphError` where those of one set do not share a key-value head."""
    heads = heads_of(kernel, "q", q, head_size)
    if heads % kv_heads or heads % sets or sets % kv_heads:
        raise GraphError(
            f"{kernel}: {heads} query heads do not divide into {sets} sets, and these into {kv_heads} groups of keys and values."
        )
    return heads // sets


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, y: Tensor, head_size: int, sees: Tensor | None = None
) -> tuple[int, int]:
    """Check the operands of an attention kernel; return its query heads and its key-value heads."""
    heads, kv_heads = heads_of("attention", "q", q, head_size), heads_of("attention", "k", k, head_size)
    if heads % kv_heads:
        raise GraphError(f"attention: {heads} query heads do not divide into {kv_heads} groups of keys and values.")
    queries, keys = (q.shape[0], heads * head_size), (k.shape[0], kv_heads * head_size)
    check_shapes(
        "attention",
        q=(q, queries, None),
        k=(k, keys, q.dtype),
        v=(v, keys, q.dtype),
        y=(y, queries, q.dtype),
        cu_seqlens=(cu_seqlens, (cu_seqlens.shape[0],), torch.int32),
        **({} if sees is None else {"sees": (sees, (q.shape[0], 2), torch.int32)}),
    )
    return heads, kv_heads
