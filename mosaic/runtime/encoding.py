"""Weights that a scheme stores in parts: encoded from a checkpoint's tensors, one at a time, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mosaic.models.safetensors import is_stack, members
from mosaic.registrar.schemes.scheme import PART, Scheme, part_of


def plain_weights(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that are stored unencoded, as the checkpoint has them."""
    return {tensor: view for tensor, view in views.items() if not part_of(tensor)[1]}


def encode_weights(
    views: Mapping[str, Tensor], scheme: Scheme, dtype: torch.dtype, write: Callable[[str, Tensor], object]
) -> None:
    """Encode every matrix that a scheme stores in parts.

    Parameters
    ----------
    views
        All weights of a plan, by their `tensor`; the parts are written.
    dtype
        The dtype that matrices are encoded from.
    write
        Writes a checkpoint's tensor, by its name, into a CPU tensor of the same shape.
    """
    for source, shape in scheme.sources((tensor, tuple(view.shape)) for tensor, view in views.items()):
        if source in views or scheme.encode is None:
            continue
        stacked = is_stack(source)
        parts = {part.name: views[f"{source}{PART}{part.name}"] for part in scheme.parts}
        for number, member in enumerate(members(source)):
            whole = torch.empty(shape[1:] if stacked else shape, dtype=dtype)
            write(member, whole)
            for name, found in scheme.encode(whole).items():
                (parts[name][number] if stacked else parts[name]).copy_(found)
