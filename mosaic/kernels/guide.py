"""guide: classifier-free guidance of hidden rows.

x and uncond do not overlap. The head is linear, so this guides the logits. Source: LLaDA's sampler. Legend: C rows, D hidden.
"""

from torch import Tensor

from mosaic.kernels.shared.scratch import tiles_of


def launch(*, x: Tensor, uncond: Tensor, guidance: Tensor, scratch: Tensor | None = None) -> None:
    """Overwrite x [C, D] with the guided rows."""
    rows = x.shape[0]
    one, scale, *wide = tiles_of("guide", scratch, {"x": x})
    scale.squeeze(1).copy_(guidance).add_(one.fill_(1))
    if not wide:
        x.sub_(uncond).mul_(scale).add_(uncond)
        return
    step = wide[0].shape[0]
    for start in range(0, rows, step):
        part = x[start : start + step]
        given, other = (tile[: part.shape[0]] for tile in wide)
        other.copy_(uncond[start : start + step])
        part.copy_(given.copy_(part).sub_(other).mul_(scale[start : start + step]).add_(other))


def reference(*, x: Tensor, uncond: Tensor, guidance: Tensor) -> Tensor:
    """Return the guided rows in plain PyTorch."""
    return uncond + (guidance[:, None] + 1) * (x - uncond)
