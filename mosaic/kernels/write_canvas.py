"""write_canvas: tokens into some rows of a canvas.

Taken rows are distinct; rows outside the canvas are skipped. canvas overlaps no other operand. Legend: R rows of the
state, C rows that are written.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher


def bind(*, token: Tensor, rows: Tensor, canvas: Tensor, taken: Tensor, scratch: Tensor | None = None) -> Run:
    """Update canvas."""
    kept, places, given, flags = (operand.numpy() for operand in (canvas, rows, token, taken))

    def run() -> None:
        for i, row in enumerate(places):
            if 0 <= row < len(kept) and flags[i]:
                kept[row] = given[i]

    return run


launch = launcher(bind)


def reference(*, token: Tensor, rows: Tensor, canvas: Tensor, taken: Tensor) -> Tensor:
    """Return canvas after the update, in plain PyTorch."""
    written = (rows >= 0) & (rows < canvas.shape[0]) & (taken != 0)
    after = canvas.clone()
    after[rows[written]] = token[written]
    return after
