"""Rotary position embedding (rotate-half) of x[T, N*H] in place, in float32.

Angles are positions * inv_freq; the first R dims of each head are rotated, R/2 the length of inv_freq. With
sequences[T] int32, inv_freq[S, R/2] has a row per sequence, and token t uses row sequences[t]. Cosines and sines are
multiplied by `factor`.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiles, compute_dtype


def rules(*, S: tuple[Dim, ...], R: Dim, head_size: int, factor: float, sequences: Spec | None, **_: object) -> None:
    require(head_size >= 2 * R, f"inv_freq rotates {2 * R} dims of {head_size}")
    require(
        len(S) == (sequences is not None),
        f"inv_freq has {len(S)} axes of sequences; give sequences with one, else none",
    )
    require(factor > 0, f"factor must be positive, got {factor}")


ROWS: Final = 128
"""Rows of a tile, whatever the width, which may be symbolic: 1 MiB of float32 at 2,048 columns."""


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: positions, angles, their cosines or sines, the rotated dims, and if needed a wide copy."""
    heads, half = specs["x"].shape[1] // attrs["head_size"], specs["inv_freq"].shape[-1]
    compute = compute_dtype(specs["x"].dtype)
    angles = Tile((ROWS, half), "float32")
    halves = () if compute == specs["x"].dtype else (Tile((ROWS, heads, 2 * half), compute),)
    table = () if compute == "float32" else (Tile((ROWS, half), compute), Tile((ROWS, half), compute))
    return Tile((ROWS, 1), "float32"), angles, angles, Tile((ROWS, heads, half), compute), *table, *halves


OPERATOR = Operator(
    name="rotary",
    operands="x!:a[T, N*head_size] positions:i32[T] inv_freq:f32[*S, R] sequences?:i32[T]",
    attrs="head_size factor=1.0",
    rules=rules,
    flops="6*x",
    implementations=kernels_of("rotary", tiles=tiles),
    roles={"x": "attention"},
)
