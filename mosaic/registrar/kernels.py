"""The implementations of the operators that Mosaic ships: modules of `mosaic.kernels` that have the operator's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mosaic.registrar.operator import Attrs, Implementation, Scratch, Specs
from mosaic.registrar.tiles import Tiled, Tiles


def kernels_of(
    name: str,
    *,
    tiles: Callable[[Specs, Attrs], Tiles] | None = None,
    scratch: Scratch | None = None,
    row_origin: str | None = None,
    cuda: str = "triton",
    invariant: bool | str = True,
) -> tuple[Implementation, ...]:
    """Return an operator's implementation on a CPU and those on CUDA.

    Parameters
    ----------
    tiles, scratch
        Scratch: the tiles of the CPU's kernel, the bytes of CUDA's.
    cuda
        What plans call the one on CUDA.
    invariant
        Whether the one on CUDA is invariant, or the launcher of another that is, as `MODULE:LAUNCHER`.
    """
    cpu = Implementation(
        name="cpu", backend="cpu", kernel=f"mosaic.kernels.{name}", scratch=None if tiles is None else Tiled(tiles),
        row_origin=row_origin,
    )  # fmt: skip
    card = Implementation(
        name=cuda, backend="cuda", kernel=f"mosaic.kernels.cuda.{name}", scratch=scratch, row_origin=row_origin,
        invariant=invariant is True,
    )  # fmt: skip
    if isinstance(invariant, bool):
        return cpu, card
    kernel = f"mosaic.kernels.cuda.{invariant}"
    return cpu, card, replace(card, name="invariant", kernel=kernel, invariant=True, on_request=True)
