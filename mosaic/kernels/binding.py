"""Binding a launch: its operands are compared with the operator's record once, not again when it runs.

Kernels check nothing: launch them through `Kernel`, or through a plan that the runtime binds.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from mosaic.errors import GraphError, RuntimeMemoryError, UsageError
from mosaic.registrar.operands import Operand, Spec, parse
from mosaic.registrar.operator import Implementation, Operator

_NAMES: Final = {getattr(torch, name): name for name in (
    "float64", "int64", "float32", "int32", "int16", "bfloat16", "float16", "int8", "uint8", "bool",
)}  # fmt: skip


class Kernel:
    """One implementation of an operator, as callers outside of a plan launch it.

    Parameters
    ----------
    operator, way
        The operator, and which of its implementations.
    module
        What the implementation names: an object with a `launch`, such as a module, or the launcher itself.
    """

    def __init__(self, operator: Operator, way: Implementation, module: Any) -> None:
        self.operator, self.way, self.module = operator, way, module

    @property
    def reference(self) -> Callable[..., Any]:
        """The operator in plain PyTorch: takes its reads and attributes by name."""
        return reference_of(self.operator)

    def bind(self, **given: Any) -> Callable[[], object]:
        """Check a launch, and return a call that launches it.

        Parameters
        ----------
        given
            Operands, attributes and `scratch` by name; None for an operand that is left out.

        Raises
        ------
        GraphError
            If an operand is not what the operator says, has a gap inside a row, or overlaps one that is written.
        RuntimeMemoryError
            If the scratch is too small.
        """
        check(self.operator, self.way, given)
        self._check_scratch(given)
        bind = getattr(self.module, "bind", None)
        run: Callable[[], object] = bind(**given) if bind is not None else partial(launcher_of(self.module), **given)
        return run

    def _check_scratch(self, given: Mapping[str, Any]) -> None:
        if self.way.scratch is None:
            return
        specs, attrs = _described(self.operator, given)
        needed = int(self.way.scratch(dict(specs), dict(attrs)))
        available = 0 if given.get("scratch") is None else given["scratch"].numel()
        if available < needed:
            raise RuntimeMemoryError(
                f"{self.operator.name}: scratch of {available:,} bytes, {needed:,} needed: give the plan's scratch buffer, sized "
                f"by the operator's scratch on {self.way.backend}."
            )

    def launch(self, **given: Any) -> None:
        """Check a launch, and launch it once."""
        self.bind(**given)()


def kernel_of(implementation: Implementation) -> Any:
    """Get what launches an implementation: an object with a `launch`, such as its module, or the launcher itself."""
    kernel = implementation.kernel
    if not isinstance(kernel, str):
        return kernel
    module, _, launcher = kernel.partition(":")
    return getattr(import_module(module), launcher) if launcher else import_module(module)


def launcher_of(kernel: Any) -> Callable[..., object]:
    """Return the function that launches what an implementation names."""
    found: Callable[..., object] = getattr(kernel, "launch", kernel)
    return found


def reference_of(operator: Operator) -> Callable[..., Any]:
    """Return what an operator computes, in plain PyTorch: its own reference, or that of its CPU kernel's module.

    Raises
    ------
    UsageError
        If there is none.
    """
    ways = operator.on("cpu")
    found = operator.reference or (getattr(kernel_of(ways[0]), "reference", None) if ways else None)
    if found is None:
        raise UsageError(f"'{operator.name}' has no reference; give Operator(reference=…).")
    return found


def check(operator: Operator, way: Implementation, given: Mapping[str, Any]) -> None:
    """Compare a launch with the operator's record: shapes, dtypes, strides and overlap.

    Raises
    ------
    GraphError
        As for `Kernel.bind`.
    """
    operands = _operands(operator)
    tensors = {name: given[name] for name in operands if given.get(name) is not None}
    try:
        _check_specs(operator, *_described(operator, given))
        for name, tensor in tensors.items():
            _check_strides(operands[name], tensor)
        _check_overlap(operator, way, operands, tensors)
    except GraphError as error:
        raise GraphError(f"{operator.name}: {error}.") from None


_Specs: TypeAlias = tuple[tuple[str, Spec], ...]
_Attributes: TypeAlias = tuple[tuple[str, Any], ...]
_APART: Final = ("scratch", "row_start")
"""Arguments of a launcher besides operands and attributes."""


@lru_cache(maxsize=256)
def _operands(operator: Operator) -> Mapping[str, Operand]:
    reads, writes = parse(operator.operands)
    return {operand.name: operand for operand in (*reads, *writes)}


def _described(operator: Operator, given: Mapping[str, Any]) -> tuple[_Specs, _Attributes]:
    operands = _operands(operator)
    there = ((name, given[name]) for name in operands if given.get(name) is not None)
    return (
        tuple((name, Spec(tuple(tensor.shape), _NAMES[tensor.dtype])) for name, tensor in there),
        tuple((name, value) for name, value in given.items() if name not in operands and name not in _APART),
    )


@lru_cache(maxsize=4096)
def _check_specs(operator: Operator, specs: _Specs, attrs: _Attributes) -> None:
    """Compare shapes and dtypes: layers repeat theirs."""
    operator.check(dict(specs), dict(attrs))


def _check_strides(operand: Operand, tensor: Tensor) -> None:
    if tensor.is_contiguous():
        return
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise GraphError(f"operand '{operand.name}' has stride {tensor.stride(-1)} inside a row, expected 1")
    if operand.dense:
        raise GraphError(
            f"rows of '{operand.name}' lie {tensor.stride(-2)} elements apart, expected {tensor.shape[-1]}: they must lie side "
            "by side"
        )


def _check_overlap(
    operator: Operator, way: Implementation, operands: Mapping[str, Operand], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse a written operand that shares bytes with another, but for a pair in one place that may."""
    pairs = operator.inplace if way.inplace is None else way.inplace
    ranges = {name: _range(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name not in operator.writes and not operands[name].updated:
            continue
        start, end = ranges[name]
        for other, (first, last) in ranges.items():
            if other == name or first >= end or last <= start or _apart(tensor, tensors[other]):
                continue
            if (name, other) not in pairs or first != start or tensor.stride() != tensors[other].stride():
                raise GraphError(f"operand '{name}' is written and overlaps '{other}'")


def _range(tensor: Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first to its last element."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _apart(a: Tensor, b: Tensor) -> bool:
    """Tell whether two matrices are columns of one buffer that have none in common."""
    if a.dim() != 2 or b.dim() != 2 or a.element_size() != b.element_size() or a.stride(0) != b.stride(0):
        return False
    pitch = a.stride(0) * a.element_size()
    if not pitch:
        return False
    between = (b.data_ptr() - a.data_ptr()) % pitch
    return between >= a.shape[1] * a.element_size() and between + b.shape[1] * b.element_size() <= pitch
