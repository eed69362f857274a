"""The launches of a plan on tensors without memory: they compute nothing, and ask for the kernels that a step asks for.

A launcher chooses its kernel, and Triton the code for it, by dtypes, shapes, strides, addresses modulo 16, and numbers. Tensors on
PyTorch's device `meta` have all of these, each at the offset that the plan gives it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.kernels.cuda.shared.ahead import Compilers, recording
from mosaic.kernels.cuda.shared.kept import kernel_folder
from mosaic.planner.plan_records import records_in
from mosaic.registrar.operators import OPERATORS
from mosaic.runtime.opening import current_card
from mosaic.runtime.regions import Regions
from mosaic.runtime.unroll import Arguments, Unroller
from mosaic.runtime.views import Views
from mosaic.runtime.workspace import torch_dtype

if TYPE_CHECKING:
    from mosaic.kernels.cuda.shared.ahead import Kernels
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import SizedStep
    from mosaic.runtime.engine import Engine

__all__ = ["Launches", "compile_ahead"]

_log = logging.getLogger(__name__)
APART: Final = 1 << 44
"""Bytes between the first addresses of two pools."""
PERIOD: Final = 16
"""Iterations of a loop after which addresses and numbers come again, modulo 16."""


class _Addresses:
    """In place of a workspace: views at a plan's offsets."""

    def __init__(self) -> None:
        self._starts: dict[str, int] = {}
        self._wholes: dict[torch.dtype, Tensor] = {}

    def view(self, name: str, offset: int, shape: Sequence[int], dtype: str, *, on_device: bool = False) -> Tensor:
        """View a place of a pool."""
        kind = torch_dtype(dtype)
        start = self._starts.setdefault(name, len(self._starts) * APART)
        if kind not in self._wholes:
            self._wholes[kind] = torch.empty(0, dtype=kind, device="meta")
        strides, stride = list[int](), 1
        for size in reversed(shape):
            strides.insert(0, stride)
            stride *= max(size, 1)
        return self._wholes[kind].as_strided(tuple(shape), strides, (start + offset) // kind.itemsize)


def compile_ahead(engine: Engine, steps: Iterable[SizedStep], progress: Callable[[str], object]) -> Kernels | None:
    """Compile the kernels that steps of one graph each ask for into this user's folder.

    What cannot be compiled is left for its first launch, and said in a warning; so is all that is not kept, and the result is None,
    if the folder cannot be written.

    Parameters
    ----------
    progress
        Called with a line for each kernel that is compiled.
    """
    card = current_card() if engine.ahead is None else engine.ahead
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET is set, so that kernels are interpreted and none is compiled: unset it.")
    try:
        kernel_folder().require_writable()
    except UsageError as error:
        _log.warning("kernels that are not kept are compiled when they are first launched: %s", error)
        return None
    with Compilers(card, kernel_folder()) as compilers:
        with recording(card) as asked:
            launches = Launches(engine.weights.adopted)
            for step in steps:
                launches.run(engine.plans.plan(step))
        found = compilers.run(asked, progress)
    for name, why in found.failed:
        _log.warning("%s is compiled when it is first launched: %s", name, why)
    return found


class Launches:
    """Launches the steps of plans on tensors without memory, each form of a launch once.

    Launchers of operators that Mosaic does not ship are left out: they may do anything with an address.

    Parameters
    ----------
    adopted
        Tensors that steps take instead of a plan's offsets, by tensor name.
    """

    def __init__(self, adopted: Mapping[str, Tensor]) -> None:
        self._addresses: Any = _Addresses()
        self._adopted = {name: _without_memory(tensor) for name, tensor in adopted.items()}
        self._done = set[Hashable]()

    def run(self, plan: Plan) -> None:
        """Launch a plan's step."""
        records = records_in(plan)
        regions = Regions(records)
        views = Views(records, regions, self._addresses, self._adopted)
        for segment in Unroller(records, plan.operators, regions, views, None, None).segments():
            for step, table in zip(segment.steps, segment.tables, strict=True):
                if records.ops[step.op].kernel in OPERATORS:
                    for more in _differing(table):
                        self._launch(step.function, {**step.arguments, **more})

    def _launch(self, launch: Callable[..., object], arguments: Arguments) -> None:
        form = launch, *[(name, _form(value)) for name, value in arguments.items()]
        if form not in self._done:
            self._done.add(form)
            launch(**arguments)


def _differing(table: Sequence[Arguments]) -> Iterator[Arguments]:
    """Iterations that stand for all of a loop: the last chunk may be shorter."""
    yield from table[:PERIOD]
    if len(table) > PERIOD:
        yield table[-1]


def _form(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(value)
    return value.dtype, value.shape, value.stride(), value.data_ptr() % 16


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor like another one, at an address that is as aligned."""
    at = tensor.data_ptr() % 512 // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device="meta").as_strided(tensor.shape, tensor.stride(), at)
