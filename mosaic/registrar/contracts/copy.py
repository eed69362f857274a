"""y = x: a second residual, and every transfer between device and pinned host memory (one of the two a host buffer)."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Spec


def infer(x: Spec) -> tuple[Spec]:
    return (x,)


CONTRACT = Contract(name="copy", reads=("x",), writes=("y",), infer=infer)
