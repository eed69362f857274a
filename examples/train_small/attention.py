"""Who sees whom: everyone (LLaDA), or a noisy block itself and the clean blocks before it (SDAR's training).

For block diffusion a row is doubled, [noisy | clean]. Token i of the noisy half sees the noisy tokens of its own block and
the clean tokens of earlier blocks; token i of the clean half sees clean tokens up to the end of its block. So all blocks
of a row are trained in one pass, each under the clean past that decoding will show it (BD3-LM, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from model import Attend
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

__all__ = ["TILE", "BlockDiffusion", "bidirectional", "doubled_mask", "masked"]

TILE = 128
"""Rows and columns of a tile of flex_attention's block mask."""


def bidirectional(num_rows: int) -> Attend:
    """Every token of a row sees every other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2).flatten(2).flatten(0, 1)

    return attend


def masked(num_rows: int, visible: Tensor) -> Attend:
    """By a mask bool [L, L] or [B, 1, L, L] (True: seen); for small sizes and for decoding."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]  # heads repeated: with a mask, no fast backend takes grouped ones
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return y.transpose(1, 2).flatten(2).flatten(0, 1)

    return attend


def doubled_mask(length: int, block: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [2L, 2L] of one doubled row."""
    position = torch.arange(2 * length, device=device)
    noisy, number = position < length, position % length // block
    own = noisy[:, None] & noisy & (number[:, None] == number)
    before = ~noisy & (number < number[:, None])
    clean = ~noisy[:, None] & ~noisy & (number[:, None] == number)
    return own | before | clean


class BlockDiffusion:
    """The doubled rows' attention by flex_attention, all rows in one sequence, so that it compiles once.

    Parameters
    ----------
    num_tokens
        Tokens of a batch, not doubled; every row length must divide it.
    block
        Tokens of a diffusion block; divides `TILE`.
    """

    def __init__(self, num_tokens: int, block: int, device: torch.device, *, compiled: bool) -> None:
        self.block, self.device = block, device
        self.num_tokens = num_tokens
        self._attend: Callable[..., Any] = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
        # One function over buffers that change in place: another row length is no other function.
        self._number = torch.zeros(2 * num_tokens, dtype=torch.int32, device=device)
        self._noisy = torch.zeros(2 * num_tokens, dtype=torch.bool, device=device)
        self._row = torch.zeros(2 * num_tokens, dtype=torch.int32, device=device)
        number, noisy, row = self._number, self._noisy, self._row

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = noisy[query] & noisy[key] & (number[query] == number[key])
            past = ~noisy[key] & (number[key] < number[query] + (~noisy[query]).to(torch.int32))
            return (row[query] == row[key]) & (own | past)

        self._visible = visible
        self.prepared: dict[int, tuple[Tensor, Tensor, Tensor, BlockMask]] = {}

    def rows_of(self, length: int) -> Attend:
        """Attention for rows of `length` tokens; valid until the next call."""
        if length not in self.prepared:
            self.prepared[length] = self._prepare(length)
        number, noisy, row, mask = self.prepared[length]
        self._number.copy_(number)
        self._noisy.copy_(noisy)
        self._row.copy_(row)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            y = self._attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            return y.squeeze(0).transpose(0, 1).flatten(1)

        return attend

    def _prepare(self, length: int) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
        position = torch.arange(2 * self.num_tokens, device=self.device)
        within = position % (2 * length)
        row = (position // (2 * length)).to(torch.int32)
        return (
            (within % length // self.block).to(torch.int32), within < length, row, self._tiles(length),
        )  # fmt: skip

    def _tiles(self, length: int) -> BlockMask:
        """Which tiles are seen in part and which in full, from the pattern itself: the mask is never built."""
        half, count = length // TILE, 2 * self.num_tokens // TILE
        tile = torch.arange(count)
        within, base = tile % (2 * half), tile // (2 * half) * (2 * half)
        column = within % half
        noisy = within < half
        full = torch.zeros(count, count, dtype=torch.bool)
        other = torch.arange(count)
        clean_from = base + half
        full |= (other >= clean_from[:, None]) & (other < (clean_from + column)[:, None])
        partial = torch.zeros(count, count, dtype=torch.bool)
        partial[tile, clean_from + column] = True
        partial[tile[noisy], tile[noisy]] = True
        return BlockMask.from_kv_blocks(
            *_ordered(partial, self.device), *_ordered(full, self.device), BLOCK_SIZE=TILE, mask_mod=self._visible,
            seq_lengths=(2 * self.num_tokens, 2 * self.num_tokens),
        )  # fmt: skip


def _ordered(tiles: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of tiles per row, and their columns first, as flex_attention wants them: int32 [1, 1, rows(, columns)]."""
    number = tiles.sum(1, dtype=torch.int32)
    columns = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return number[None, None].to(device).contiguous(), columns[None, None].to(device).contiguous()
