"""Views of the scratch that a plan sets aside for a launch."""

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError


def floats_of(kernel: str, scratch: Tensor | None, count: int) -> Tensor:
    """View the beginning of the scratch buffer as float32 [count].

    Raises
    ------
    RuntimeMemoryError
        If the buffer has fewer bytes.
    """
    needed, available = 4 * count, 0 if scratch is None else scratch.numel()
    if scratch is None or available < needed:
        raise RuntimeMemoryError(
            f"{kernel}: scratch of {available:,} bytes, {needed:,} needed: give the plan's scratch buffer, sized by "
            f"the operator's scratch on cuda."
        )
    return scratch[:needed].view(torch.float32)
