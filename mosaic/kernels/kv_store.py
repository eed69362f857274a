"""kv_store: keys and values of a window of tokens into the rows that their sequences own.

Row r of k is row `row_start + r` of the packed window, a token of the sequence that has it;
`mosaic.registrar.operators.kv_store` describes the layout of keys. A token in no sequence, or at a position without a
row, is not stored. kv overlaps no other operand. Legend: T tokens, R rows, L layers, W width of keys, B sequences, X
extents.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import Piece, kept_tokens, pieces, windows


def bind(
    *, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor,
    layer: int, head_size: int, row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update kv; the tables are read on the host, and neighbours that stay neighbours are copied at once."""
    heads = k.shape[1] // head_size
    tokens = k.shape[0]
    k_KTH, v_KTH = (x.view(tokens, heads, head_size).transpose(0, 1) for x in (k, v))

    def run() -> None:
        owned = pieces(extents, cu_extents)
        for sequence, start, end in windows(cu_seqlens, row_start, tokens):
            for first, last, piece in _placed(positions[start:end].tolist(), owned[sequence]):
                rows = slice(start + first, start + last)
                for kept, x in zip(kept_tokens(kv, piece, layer, heads, head_size), (k_KTH, v_KTH), strict=True):
                    kept.copy_(x[:, rows])

    return run


launch = launcher(bind)


def _placed(positions: list[int], owned: list[Piece]) -> list[tuple[int, int, Piece]]:
    """Runs of tokens whose positions follow each other within a piece: the first, the end, and the part of the piece."""
    found, at = [], 0
    while at < len(positions):
        end, first = at + 1, positions[at]
        while end < len(positions) and positions[end] == positions[end - 1] + 1:
            end += 1
        for piece in owned:
            low, high = max(piece.start, first), min(piece.end, first + end - at)
            if low < high:
                part = piece._replace(start=low, end=high, at=piece.at + low - piece.start)
                found.append((at + low - first, at + high - first, part))
        at = end
    return found


def reference(
    *, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor,
    layer: int, head_size: int, row_start: int = 0,
) -> Tensor:  # fmt: skip
    """Return kv after the update, in plain PyTorch, a token at a time."""
    after, heads = kv.clone(), k.shape[1] // head_size
    owned = pieces(extents, cu_extents)
    for sequence, start, end in windows(cu_seqlens, row_start, k.shape[0]):
        for token in range(start, end):
            position = int(positions[token])
            for piece in owned[sequence]:
                if piece.start <= position < piece.end:
                    kept = kept_tokens(after, piece, layer, heads, head_size)[:, :, position - piece.start]
                    kept.copy_(torch.stack([k[token], v[token]]).view(2, heads, head_size))
    return after
