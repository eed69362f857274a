"""What an operator means: operands, shape rule, FLOPs, bytes moved.

A contract knows nothing of backends; scratch bytes are an implementation's
affair (`registrar/implementations`), launching is a kernel's (`kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

import sympy

from mosaic.errors import GraphError
from mosaic.registrar.dtypes import ITEMSIZE

__all__ = ["Contract", "Dim", "Rate", "Spec", "divides", "require"]

Dim: TypeAlias = int | sympy.Expr
Rate: TypeAlias = Literal["memory", "gemm", "attention", "unembed", "sampled_unembed", "link"]


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of one operand, the shape possibly symbolic."""

    shape: tuple[Dim, ...]
    dtype: str

    @property
    def elements(self) -> Dim:
        """Number of elements, a polynomial in the dims."""
        return prod(self.shape)

    @property
    def bytes(self) -> Dim:
        """Bytes when stored densely."""
        return self.elements * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def require(condition: bool, message: str) -> None:
    """Refuse operands that a contract does not accept; `add_op` adds the op, its operands and the source line."""
    if not condition:
        raise GraphError(message)


def divides(size: Dim, width: Dim) -> bool:
    """Tell whether `width` is a multiple of `size` whatever the dims are.

    >>> divides(128, 4096), divides(128, 128 * sympy.Symbol("r", integer=True)), divides(3, 4)
    (True, True, False)
    """
    return (sympy.sympify(width) / size).is_integer is True


Infer: TypeAlias = Callable[..., Sequence[Spec]]
Count: TypeAlias = Callable[..., Dim]


def _leading(**operands: Any) -> Dim:
    """Rows of the first operand that has any: one where a contract reads nothing or only scalars."""
    return next((o.shape[0] for o in operands.values() if isinstance(o, Spec) and o.shape), 1)


def _one(*_: Any, **__: Any) -> Dim:
    """Count one of whatever a rate does not depend on."""
    return 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contract:
    """The meaning of one operator, shared by every backend.

    Parameters
    ----------
    name
        The one name of the operator: its contract, implementations, kernel, test and benchmark.
    reads
        Operand names in call order; a trailing `?` marks an optional one.
    writes
        Names of the buffers it creates (or fills, when given through `out=`).
    updates
        Those of `reads` that it also writes in place.
    whole
        Operands that a chunk region never slices (keys and values, row tables).
    inplace
        Pairs (write, read) that may share storage: the write may overwrite the read while it is read.
    infer
        Shape rule: specs of the operands and attributes to the specs of `writes`; raises `GraphError` through `require`.
    flops
        Floating-point operations of one launch, from the same arguments.
    rate
        Which of a device's rates bounds it; where an operand lies in host memory it is `link`, whatever this says.
    rate_rows
        The row count that the rate depends on; by default the first operand's leading dim.
    rate_columns
        The output columns that the rate depends on, of a matrix product; 1 elsewhere.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    inplace: tuple[tuple[str, str], ...] = ()
    infer: Infer = field(default=lambda *_, **__: ())
    flops: Count = field(default=lambda *_, **__: 0)
    bytes_moved: Callable[[Mapping[str, Spec], Mapping[str, Any]], Dim] | None = None
    rate: Rate = "memory"
    rate_rows: Count = field(default=_leading)
    rate_columns: Count = field(default=_one)

    def __post_init__(self) -> None:
        names = {name.rstrip("?") for name in self.reads}
        unknown = [name for name in self.updates if name not in names]
        if unknown:
            raise GraphError(f"contract '{self.name}' updates {unknown}, which it does not read")

    def moved(self, specs: Mapping[str, Spec], attrs: Mapping[str, Any]) -> Dim:
        """Bytes of device memory that one launch reads and writes."""
        if self.bytes_moved is not None:
            return self.bytes_moved(specs, attrs)
        total: Dim = 0
        for name, spec in specs.items():
            total += spec.bytes * (2 if name in self.updates else 1)
        return total
