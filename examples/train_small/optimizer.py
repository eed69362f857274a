"""Muon: momentum, then the nearest orthogonal matrix, for the weights between hidden states.

U = NewtonSchulz(g + mu * m), m the momentum of g; W -= rate * (0.2 * sqrt(max(rows, columns)) * U + decay * W). The factor
gives updates the root mean square of AdamW's, so that both share one rate. Source: Jordan et al. 2024, "Muon"; the factor,
Liu et al. 2025, "Muon is scalable for LLM training", eq. 4. Matrices of one shape are done together: few launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon", "orthogonal"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(x_BRC: Tensor, steps: int = 5) -> Tensor:
    """Singular values of every matrix pushed to about 1 by a quintic iteration; [B, R, C], computed in bfloat16 on a GPU."""
    a, b, c = _COEFFICIENTS
    tall = x_BRC.shape[1] > x_BRC.shape[2]
    x = x_BRC.bfloat16() if x_BRC.is_cuda else x_BRC
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    return (x.mT if tall else x).to(x_BRC.dtype)


class Muon(torch.optim.Optimizer):
    """For matrices that map hidden states to hidden states; embeddings, heads and vectors want AdamW."""

    def __init__(
        self, params: Iterable[Any], lr: float = 2e-3, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix with a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [parameter.grad for parameter in parameters]
                kept = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                torch._foreach_lerp_(kept, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, kept, group["momentum"])
                updates = orthogonal(torch.stack(list(ahead)))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * max(shape) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-group["lr"] * scale)
