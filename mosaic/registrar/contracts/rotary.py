"""Rotary position embedding (rotate-half) of x[T, N*H] in place, in float32.

Angles are positions * inv_freq; the first 2*len(inv_freq) dims of each head turn.
"""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, divides, require


def infer(x: Spec, positions: Spec, inv_freq: Spec, *, head_size: int) -> tuple[()]:
    require(divides(head_size, x.shape[-1]), f"x must have heads of {head_size}, it has {x.shape[-1]} columns")
    require(positions.shape == (x.shape[0],), f"positions must be [{x.shape[0]}]")
    require(2 * inv_freq.shape[0] <= head_size, f"inv_freq rotates {2 * inv_freq.shape[0]} dims of {head_size}")
    return ()


def flops(x: Spec, positions: Spec, inv_freq: Spec, *, head_size: int) -> Dim:
    return 6 * x.elements


CONTRACT = Contract(name="rotary", reads=("x", "positions", "inv_freq"), updates=("x",), infer=infer, flops=flops)
