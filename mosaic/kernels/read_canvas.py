"""read_canvas: tokens of some rows of a canvas, and `open_id` for open positions.

Legend: R rows of the state, C rows that are read.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.registrar.operators.read_canvas import OPEN


def bind(*, canvas: Tensor, rows: Tensor, y: Tensor, open_id: int, scratch: Tensor | None = None) -> Run:
    """Write the tokens into y [C]."""
    kept, places, out = canvas.numpy(), rows.numpy(), y.numpy()

    def run() -> None:
        for i, row in enumerate(places):
            token = kept[row] if 0 <= row < len(kept) else OPEN
            out[i] = open_id if token == OPEN else token

    return run


launch = launcher(bind)


def reference(*, canvas: Tensor, rows: Tensor, open_id: int) -> Tensor:
    """Return the tokens in plain PyTorch."""
    inside = (rows >= 0) & (rows < canvas.shape[0])
    found = torch.where(inside, canvas[torch.where(inside, rows, 0)], OPEN)
    return torch.where(found == OPEN, open_id, found)
