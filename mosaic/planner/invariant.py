"""Kernels that have implementations of their own in batch-invariant plans: their rows do not depend on the other rows."""

from __future__ import annotations

from mosaic.errors import GraphError
from mosaic.planner.body import Body
from mosaic.registrar.operators import find


def kernels_on_request(body: Body, backend: str) -> frozenset[str]:
    """The kernels for which batch-invariant plans take an implementation that other plans do not.

    Raises
    ------
    GraphError
        If no implementation of a kernel is invariant.
    """
    found = set()
    for kernel in {op.kernel: None for op in body.ops}:
        record = find(kernel, body.operators)
        if record is None or not record.on(backend):
            continue
        if not (ways := record.on(backend, invariant=True)):
            raise GraphError(
                f"a batch-invariant plan cannot take '{kernel}': of its implementations on {backend} none is invariant; plan "
                "without batch_invariant, or declare one that is (`Implementation.invariant`)."
            )
        if any(way.on_request for way in ways):
            found.add(kernel)
    return frozenset(found)
