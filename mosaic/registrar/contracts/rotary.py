"""Rotary position embedding (rotate-half) of x[T, N*H] in place, in float32.

Angles are positions * inv_freq; the first R dims of each head turn, R/2 the length of inv_freq. With sequences[T] int32,
inv_freq[S, R/2] has a row a sequence, and token t turns by row sequences[t]. Cosines and sines are multiplied by `factor`.
"""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, divides, require


def infer(
    x: Spec, positions: Spec, inv_freq: Spec, sequences: Spec | None = None, *, head_size: int, factor: float = 1.0
) -> tuple[()]:
    require(divides(head_size, x.shape[-1]), f"x must have heads of {head_size}, it has {x.shape[-1]} columns")
    require(positions.shape == (x.shape[0],), f"positions must be [{x.shape[0]}]")
    half = inv_freq.shape[-1]
    require(2 * half <= head_size, f"inv_freq rotates {2 * half} dims of {head_size}")
    rows = len(inv_freq.shape) - 1
    require(
        rows == (sequences is not None), f"inv_freq has {rows} axes of sequences; give sequences with one, else none"
    )
    if sequences is not None:
        require(sequences == Spec((x.shape[0],), "int32"), f"sequences must be int32[{x.shape[0]}], it is {sequences}")
    require(factor > 0, f"factor must be positive, got {factor}")
    return ()


def flops(x: Spec, positions: Spec, inv_freq: Spec, sequences: Spec | None = None, **_: object) -> Dim:
    return 6 * x.elements


CONTRACT = Contract(
    name="rotary", reads=("x", "positions", "inv_freq", "sequences?"), updates=("x",), infer=infer, flops=flops
)
