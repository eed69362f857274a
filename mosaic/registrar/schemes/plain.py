"""Matrices as in checkpoints: one tensor of the model's dtype, 16, 32 or 64 bits per element."""

from __future__ import annotations

from typing import Final

from mosaic.registrar.schemes.scheme import Part, Scheme

PLAIN: Final = Scheme(
    name="plain", parts=(Part(),), linear="linear", linear_add="linear_add", grouped_linear="grouped_linear"
)
