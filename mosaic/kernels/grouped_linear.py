"""grouped_linear: each expert's rows times that expert's weight.

y overlaps no operand. Legend: A assignments (rows x top-k), E experts, I inputs, O outputs.
"""

from itertools import pairwise

from torch import Tensor

from mosaic.kernels.shared.product import product


def launch(*, x: Tensor, weight: Tensor, offsets: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write every expert's product into y [A, O]; the offsets are read on the host."""
    bounds: list[int] = offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            product(x[start:end], weight[expert], y[start:end], scratch, kernel="grouped_linear")()


def reference(*, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the rows times their experts' weights in plain PyTorch."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    bounds = offsets.tolist()
    for expert in range(weight.shape[0]):
        y[bounds[expert] : bounds[expert + 1]] = x[bounds[expert] : bounds[expert + 1]] @ weight[expert].T
    return y
