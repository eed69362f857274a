"""Tests of an operator from its own record: every implementation against the reference, on random operands.

Launches are like a plan's: outputs and scratch hold garbage before, bytes around them are guarded, operands are whole
or sliced as by a chunk loop, and share storage where the operator allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from mosaic.errors import MosaicError, UsageError
from mosaic.kernels.binding import Kernel, kernel_of, reference_of
from mosaic.registrar.operands import parse, shapes
from mosaic.registrar.operator import Backend, Dim, Implementation, Operator, Spec
from mosaic.registrar.polynomial import symbol
from mosaic.runtime.opening import card_capability

_GUARD: Final = 512  # bytes before and after each buffer that a launch may write
_GUARD_VALUE: Final = 0xA5
_ROUNDINGS: Final = 64


class OperatorMismatch(MosaicError, AssertionError):
    """An implementation contradicts its operator's record."""


def verify_operator(
    operator: Operator,
    sizes: Mapping[str, int],
    *,
    loops: Sequence[str] = (),
    dtypes: Mapping[str, str] | None = None,
    attrs: Mapping[str, Any] | None = None,
    values: Mapping[str, Tensor] | None = None,
    backend: Backend = "cpu",
    tolerance: float | None = None,
    seed: int = 0,
) -> tuple[str, ...]:
    """Launch every implementation that supports these sizes, and compare it with the operator's reference in float64.

    Each is launched on whole operands, in two unequal slices of every size that a chunk loop may run over, and with
    each allowed pair of operands in one place. An implementation declared invariant must give the same bits in all.

    Parameters
    ----------
    sizes
        A number for every letter of the operator's operands; for `*T` the size of a single axis.
    loops
        The letters that a chunk loop may run over (not the width of a norm, for example).
    dtypes
        The dtypes of letters; float32 if not given.
    values
        Operands that must not be random, such as indices and bounds. Integer operands are 0 by default. An optional
        operand is present if it is given.
    tolerance
        The largest error allowed, as a share of the largest expected value; 64 roundings of the dtype if not given.

    Returns
    -------
    tuple of str
        The implementations that were launched.

    Raises
    ------
    OperatorMismatch
        Naming implementation, operand and launch: a wrong value, a write outside of an output or the scratch, a changed
        read-only operand, or different bits in a slice if it is invariant.
    UsageError
        If there is no implementation, no reference, or a size is missing.
    GraphError
        If a value contradicts the operator's record.

    Examples
    --------
    >>> from mosaic.registrar.operators import operator
    >>> verify_operator(operator("linear"), {"T": 5, "I": 8, "O": 3}, loops=("T", "O"))
    ('cpu',)
    """
    given = dict(attrs or {})
    if not operator.on(backend):
        raise UsageError(f"'{operator.name}' has no implementation on {backend}.")
    case = _Case.draw(operator, sizes, loops, dict(dtypes or {}), given, dict(values or {}), backend, seed)
    serving = operator.serving(backend, case.specs, given, card_capability() if backend == "cuda" else 0)
    for name in serving:
        way = operator.implementation(backend, name)
        whole: Mapping[str, Tensor] | None = None
        for launch in case.launches(way):
            found = case.verify(way, launch, tolerance)
            whole = found if whole is None else whole
            if way.invariant and (backend == "cpu" or torch.cuda.is_available()):  # the interpreter's sums are NumPy's
                case.compare_bits(way, launch, found, whole)
    return serving


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """One kind of launch: over slices of a size (none: whole), with one operand written over another (none: apart)."""

    over: str | None = None
    inplace: tuple[str, str] | None = None

    def __str__(self) -> str:
        sliced = "whole" if self.over is None else f"in slices of {self.over}"
        return sliced if self.inplace is None else f"{sliced}, {self.inplace[0]} over {self.inplace[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    operator: Operator
    backend: Backend
    sizes: Mapping[str, int]
    attrs: Mapping[str, Any]
    symbolic: Mapping[str, Spec]
    specs: Mapping[str, Spec]
    reads: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]

    @classmethod
    def draw(
        cls, operator: Operator, sizes: Mapping[str, int], loops: Sequence[str], dtypes: Mapping[str, str],
        attrs: Mapping[str, Any], values: Mapping[str, Tensor], backend: Backend, seed: int,
    ) -> _Case:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        symbolic = _symbolic(operator, sizes, loops, dtypes, attrs, values)
        rows = {name: sizes[name] for name in loops}
        specs = {name: Spec(_ints(spec.shape, rows), spec.dtype) for name, spec in symbolic.items()}
        device = "cuda" if backend == "cuda" else "cpu"
        read = [name.rstrip("?") for name in operator.reads if name.rstrip("?") in specs]
        reads = {name: values.get(name, _random(specs[name], generator)).to(device) for name in read}
        given = {
            name: Spec(tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in reads.items()
        }
        operator.work(**given, **attrs)
        wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in reads.items()}
        expected = _by_name(operator, reference_of(operator)(**{k: v.clone() for k, v in wide.items()}, **attrs))
        return cls(
            operator=operator, backend=backend, sizes=rows, attrs=attrs, symbolic=symbolic, specs=specs, reads=reads,
            expected=expected,
        )  # fmt: skip

    def launches(self, way: Implementation) -> Iterator[_Launch]:
        """Yield the launches: whole, in place, and in slices of each size that every operand with that size allows."""
        pairs = self.operator.inplace if way.inplace is None else way.inplace
        for over in (None, *filter(self._sliceable, self.sizes)):
            yield _Launch(over=over)
            for pair in pairs:
                yield _Launch(over=over, inplace=pair)

    def _sliceable(self, size: str) -> bool:
        cuts = [self._cuts(name, size) for name in self.symbolic if name not in self.operator.whole]
        written = (*self.operator.writes, *(name for name in self.operator.updates if name not in self.operator.whole))
        return self.sizes[size] > 1 and None not in cuts and all(self._cuts(name, size) for name in written)

    def _cuts(self, name: str, size: str) -> list[tuple[int, int]] | None:
        """(axis, factor) of the axes of an operand that a loop over a size slices; None if one cannot be sliced."""
        found, over = [], symbol(size)
        for axis, dim in enumerate(self.symbolic[name].shape):
            if isinstance(dim, int) or size not in dim.names:
                continue
            factor = dim / over
            if not isinstance(factor, int):
                return None
            found.append((axis, factor))
        return found

    def verify(self, way: Implementation, launch: _Launch, tolerance: float | None) -> Mapping[str, Tensor]:
        """Launch, and compare all written and all unwritten bytes with the reference; return the written values."""
        guards: list[tuple[str, Tensor]] = []
        operands = {name: self._placed(name, spec, guards) for name, spec in self.specs.items()}
        for name, value in self.reads.items():
            operands[name].copy_(value)
        if launch.inplace is not None:
            written, read = launch.inplace
            operands[written] = operands[read]
        size = self.operator.scratch_bytes(self.backend, self.specs, self.attrs)
        run = Kernel(self.operator, way, kernel_of(way)).launch
        for views, start in self._iterations(operands, way, launch):
            more: dict[str, Any] = {} if way.row_origin is None else {"row_start": start}
            if size:
                more["scratch"] = self._placed("scratch", Spec((int(size),), "uint8"), guards)
            run(**views, **self.attrs, **more)
        where = f"'{way.name}' of '{self.operator.name}', {launch}"
        for name, guard in guards:
            if not bool((guard == _GUARD_VALUE).all()):
                raise OperatorMismatch(f"{where}: writes outside of {name}")
        for name, value in self.reads.items():
            overwritten = launch.inplace is not None and name == launch.inplace[1]
            if name not in self.operator.updates and not overwritten and not torch.equal(operands[name], value):
                raise OperatorMismatch(f"{where}: changes {name}, which it only reads")
        for name, value in self.expected.items():
            _compare(f"{where}: {name}", operands[name], value, tolerance)
        return {name: operands[name] for name in self.expected}

    def compare_bits(
        self, way: Implementation, launch: _Launch, found: Mapping[str, Tensor], whole: Mapping[str, Tensor]
    ) -> None:
        """Make sure that a launch of an invariant implementation gave the bits of the launch of whole operands."""
        for name, value in whole.items():
            if not torch.equal(found[name], value):
                raise OperatorMismatch(
                    f"'{way.name}' of '{self.operator.name}', {launch}: {name} has other bits than in one launch, and the "
                    "implementation says that it is invariant"
                )

    def _iterations(
        self, operands: Mapping[str, Tensor], way: Implementation, launch: _Launch
    ) -> Iterator[tuple[dict[str, Tensor], int]]:
        """The operands of each launch, and the first row of the operand that `row_origin` names."""
        if launch.over is None:
            yield dict(operands), 0
            return
        rows = self.sizes[launch.over]
        for start, stop in ((0, first := rows // 2 + 1 if rows > 2 else 1), (first, rows)):
            views, origin = dict(operands), 0
            for name in operands:
                for axis, factor in (self._cuts(name, launch.over) or ()) if name not in self.operator.whole else ():
                    views[name] = views[name].narrow(axis, factor * start, factor * (stop - start))
                    origin = factor * start if name == way.row_origin and axis == 0 else origin
            yield views, origin

    def _placed(self, name: str, spec: Spec, guards: list[tuple[str, Tensor]]) -> Tensor:
        """A buffer for an operand, full of garbage (NaN in every float dtype), between guarded bytes."""
        dtype, shape = getattr(torch, spec.dtype), _ints(spec.shape, {})
        size = prod(shape) * dtype.itemsize
        device = "cuda" if self.backend == "cuda" else "cpu"
        room = torch.full((_GUARD + size + _GUARD,), _GUARD_VALUE, dtype=torch.uint8, device=device)
        guards += [(name, room[:_GUARD]), (name, room[_GUARD + size :])]
        room[_GUARD : _GUARD + size] = 0xFF
        return room[_GUARD : _GUARD + size].view(dtype).view(shape)


def _symbolic(
    operator: Operator, sizes: Mapping[str, int], loops: Sequence[str], dtypes: Mapping[str, str], attrs: Mapping[str, Any],
    values: Mapping[str, Tensor],
) -> dict[str, Spec]:  # fmt: skip
    """The specs of the operands, with a symbol for each size that a loop may run over."""
    known: dict[str, Any] = {**operator.defaults, **attrs}
    known |= {name: symbol(name) if name in loops else size for name, size in sizes.items()}
    reads, writes = parse(operator.operands)
    there = [operand for operand in (*reads, *writes) if not operand.optional or operand.name in values]
    for operand in there:
        if len(operand.dtype) == 1:
            known[operand.dtype] = dtypes.get(operand.dtype, "float32")
        for axis in operand.axes:
            missing = [factor for factor in axis.factors if isinstance(factor, str) and factor not in known]
            if missing:
                raise UsageError(
                    f"operand '{operand.name}' is {operand.text}: it needs sizes for {', '.join(missing)}."
                )
            if axis.many and not isinstance(known[name := str(axis.factors[0])], tuple):
                known[name] = (known[name],)
    return {operand.name: spec for operand, spec in zip(there, shapes(there, known), strict=True)}


def _ints(shape: Sequence[Dim], numbers: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else dim.at(numbers) for dim in shape)


def _random(spec: Spec, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(_ints(spec.shape, {}), dtype=dtype)
    return torch.randn(_ints(spec.shape, {}), generator=generator, dtype=torch.float64).to(dtype)


def _by_name(operator: Operator, result: Any) -> dict[str, Tensor]:
    """The results of a reference, by the names of the operator's writes and updates."""
    names = (*operator.writes, *operator.updates)
    if isinstance(result, Mapping):
        return dict(result)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    if len(results) != len(names):
        raise UsageError(f"the reference of '{operator.name}' returns {len(results)} tensors for {', '.join(names)}.")
    return dict(zip(names, results, strict=True))


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float | None) -> None:
    if found.shape != expected.shape:
        raise OperatorMismatch(f"{what} is {list(found.shape)}, the reference gives {list(expected.shape)}")
    if not found.is_floating_point():
        if not torch.equal(found, expected.to(found.dtype)):
            raise OperatorMismatch(f"{what} differs in {int((found != expected).sum())} of {found.numel()} elements")
        return
    share = _ROUNDINGS * torch.finfo(found.dtype).eps / 2 if tolerance is None else tolerance
    error = float((found.double() - expected).abs().max()) if found.numel() else 0.0
    bound = share * (float(expected.abs().max()) if expected.numel() else 0.0)
    if not error <= bound:  # NaN is wrong too
        raise OperatorMismatch(f"{what} is off by {error:.3g}, where {bound:.3g} passes")
