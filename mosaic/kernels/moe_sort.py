"""moe_sort: the assignments of rows to experts, grouped by expert.

Legend: C rows, k experts a row, E experts.

PyTorch's sort and bincount allocate, also with out=. Instead each assignment becomes the key expert * C*k + id, all keys
differ, and NumPy sorts the plan's own memory in place; the id is the key's remainder.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import tiles_of


def launch(*, experts: Tensor, order: Tensor, offsets: Tensor, num_experts: int, scratch: Tensor | None = None) -> None:
    """Write the sorted assignment ids and the experts' offsets."""
    count = experts.numel()
    constants, ids = tiles_of("moe_sort", scratch, {"experts": experts})
    one, stride = constants[:1].fill_(1), constants[1:].fill_(max(count, 1))
    flat = ids.view(experts.shape).copy_(experts).view(-1)
    offsets.zero_()
    offsets[1:].scatter_add_(0, flat, one.expand(count))
    offsets.cumsum_(0)
    torch.arange(count, out=order)
    order.addcmul_(flat, stride)
    order.numpy().sort()
    order.remainder_(stride)


def reference(*, experts: Tensor, num_experts: int) -> dict[str, Tensor]:
    """Return order and offsets in plain PyTorch."""
    flat = experts.reshape(-1)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return {"order": torch.sort(flat, stable=True).indices, "offsets": offsets}
