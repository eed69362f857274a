"""An operator, declared once: what it means, what carries it out on each backend, and what pictures call its operands.

The one record holds operands, shape rule, FLOPs and bytes moved, and an `Implementation` per kernel that can launch it.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, Final, Literal, TypeAlias, get_args

from mosaic.errors import GraphError, UnknownName
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.polynomial import Dim, Polynomial

__all__ = [
    "BACKENDS",
    "Attrs",
    "Backend",
    "Dim",
    "Implementation",
    "Operator",
    "Rate",
    "Role",
    "Scratch",
    "Spec",
    "Specs",
    "divides",
    "exact",
    "require",
]

Backend: TypeAlias = Literal["cuda", "cpu"]
Rate: TypeAlias = Literal["memory", "gemm", "few_rows", "attention", "unembed", "sampled_unembed", "link"]
Role: TypeAlias = Literal["hidden", "attention", "ffn", "logits and head", "statistics"]
"""What an operand is for, as pictures show it."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)


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


Specs: TypeAlias = Mapping[str, Spec]
"""Operands by name: the ones that are read, and the ones that are written."""
Attrs: TypeAlias = Mapping[str, Any]


def require(condition: bool, message: str) -> None:
    """Refuse operands that an operator does not accept; `add_op` adds the op, its operands and the source line."""
    if not condition:
        raise GraphError(message)


def exact(size: Dim) -> Polynomial:
    """Take a size as a polynomial, whose quotients are not rounded.

    >>> exact(3) / 2, exact(4096) / 128
    (3/2, 32)
    """
    return size if isinstance(size, Polynomial) else Polynomial([((), size)])


def divides(size: Dim, width: Dim) -> bool:
    """Tell whether `width` is a multiple of `size` whatever the dims are.

    >>> from mosaic.registrar.polynomial import symbol
    >>> divides(128, 4096), divides(128, 128 * symbol("r")), divides(3, 4)
    (True, True, False)
    """
    return exact(exact(width) / size).is_whole


Infer: TypeAlias = Callable[..., Sequence[Spec]]
Count: TypeAlias = Callable[..., Dim]
Scratch: TypeAlias = Callable[[Specs, Attrs], Dim]


def _leading(**operands: Any) -> Dim:
    """Rows of the first operand that has any: one where an operator reads nothing or only scalars."""
    return next((o.shape[0] for o in operands.values() if isinstance(o, Spec) and o.shape), 1)


def _one(*_: Any, **__: Any) -> Dim:
    """Count one of whatever a rate does not depend on."""
    return 1


def _known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to carry an operator out.

    Parameters
    ----------
    backend
        Whose memory it works on: `cuda` or `cpu`.
    kernel
        The dotted name of the module that holds its `launch` (and `bind`, where it has one), imported when a plan is
        bound; that of a launcher, its module before a colon; or an object with a `launch`; or the launcher itself. A
        launcher takes operands, attributes and `scratch` by name, writes into the tensors that it is given, and allocates
        nothing.
    name
        What plans call it where the backend has several; the backend's name if not given. A device's profile has the
        rates of attention by this name.
    scratch
        Bytes that one launch needs besides its operands, from the specs of the operands and the attributes; a polynomial in
        the dims. None: no scratch.
    inplace
        Pairs (write, read) that this kernel lets share storage; None: those of the operator.
    serves
        Whether it can carry out a launch, from specs with the step's sizes (an axis that a loop slices has its whole
        length) and the attributes; None: it serves every launch. Each operator has, on each backend that it runs on, one
        implementation that serves every launch.
    rate
        Which of a device's rates bounds it; None: the operator's.
    row_origin
        The operand whose first row, counted on axis 0 of the whole buffer, the kernel is told as `row_start`.
    on_host
        Operands in host memory that the kernel takes by the host's address; others it reads through the link.
    invariant
        Whether slices of a launch get the bits of the whole launch, however they are cut: so no row's result depends on
        how many others there are.
    on_request
        Whether only plans that are asked to be batch-invariant take it.
    """

    backend: Backend
    kernel: Any
    name: str = ""
    scratch: Scratch | None = None
    inplace: tuple[tuple[str, str], ...] | None = None
    serves: Callable[[Specs, Attrs], bool] | None = None
    rate: Rate | None = None
    row_origin: str | None = None
    on_host: frozenset[str] = frozenset()
    invariant: bool = False
    on_request: bool = False

    def __post_init__(self) -> None:
        _known("backend", [self.backend], BACKENDS)
        if self.rate is not None:
            _known("rate", [self.rate], get_args(Rate))
        if not self.name:
            object.__setattr__(self, "name", self.backend)

    @property
    def operands(self) -> frozenset[str]:
        """The operands that it says something of."""
        pairs = chain.from_iterable(self.inplace or ())
        return self.on_host.union(pairs, () if self.row_origin is None else (self.row_origin,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """One operator: its meaning, which every backend shares, and what carries it out.

    Parameters
    ----------
    name
        The one name of the operator: in graphs and plans, of its kernel, test and benchmark.
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
    bytes_moved
        Bytes of device memory that one launch reads and writes, from the specs of all operands, those written included,
        and the attributes; None: every operand once, and those it updates twice.
    rate
        Which of a device's rates bounds it; where an operand lies in host memory it is `link`, whatever this says.
    rate_rows
        The row count that the rate depends on; by default the first operand's leading dim.
    rate_columns
        The output columns that the rate depends on, of a matrix product; 1 elsewhere.
    implementations
        What carries it out. Without one for its device's backend it can be planned, not run.
    reference
        What it computes, in plain PyTorch: takes the operands it reads and the attributes by name, returns what it writes
        or updates (one tensor, or one by name). None: the `reference` of its CPU kernel's module.
    roles
        What operands are for, by name, as pictures show it.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    inplace: tuple[tuple[str, str], ...] = ()
    infer: Infer = field(default=lambda *_, **__: ())
    flops: Count = field(default=lambda *_, **__: 0)
    bytes_moved: Callable[[Specs, Attrs], Dim] | None = None
    rate: Rate = "memory"
    rate_rows: Count = field(default=_leading)
    rate_columns: Count = field(default=_one)
    implementations: tuple[Implementation, ...] = ()
    reference: Callable[..., Any] | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {name.rstrip("?") for name in self.reads}
        unknown = [name for name in self.updates if name not in names]
        if unknown:
            raise GraphError(f"operator '{self.name}' updates {unknown}, which it does not read")
        _known("rate", [self.rate], get_args(Rate))
        _known("role", self.roles.values(), get_args(Role))
        for backend in {way.backend for way in self.implementations}:
            self._check_implementations(backend)
        operands = names.union(self.writes)
        said = {*self.roles, *chain.from_iterable(way.operands for way in self.implementations)}
        if said - operands:
            odd = ", ".join(sorted(said - operands))
            raise GraphError(f"operator '{self.name}' says something of {odd}, which it neither reads nor writes")

    def _check_implementations(self, backend: str) -> None:
        ways, names = self.on(backend), [way.name for way in self._all_on(backend)]
        if len(set(names)) < len(names):
            raise GraphError(f"operator '{self.name}' has two implementations of one name on {backend}: {names}")
        if all(way.serves is not None for way in ways):
            raise GraphError(
                f"operator '{self.name}': of its implementations none on {backend} serves every launch; leave `serves` out of "
                f"one of {', '.join(names)}"
            )

    def on(self, backend: str, *, invariant: bool = False) -> tuple[Implementation, ...]:
        """Return the implementations on a backend that plans choose from, in the order in which they are declared.

        Parameters
        ----------
        invariant
            For plans that are asked to be batch-invariant.

        Raises
        ------
        UnknownName
            If there is no such backend.
        """
        return _on(self, backend, invariant)

    def _all_on(self, backend: str) -> tuple[Implementation, ...]:
        """Those for either sort of plan."""
        return _on(self, backend, None)

    def implementation(self, backend: str, name: str | None = None) -> Implementation:
        """Return the implementation of a name, or the first that serves every launch.

        Raises
        ------
        UnknownName
            If there is no such backend, or no such implementation on it.
        """
        for way in self._all_on(backend):
            if way.name == name or (name is None and way.serves is None):
                return way
        known = [way.name for way in self._all_on(backend)]
        raise UnknownName(f"implementation of {self.name} on {backend}", name or backend, known)

    def serving(self, backend: str, specs: Specs, attrs: Attrs) -> tuple[str, ...]:
        """Name the implementations on a backend that serve a launch of these specs, sizes in integers."""
        return tuple(way.name for way in self._all_on(backend) if way.serves is None or way.serves(specs, attrs))

    def scratch_bytes(self, backend: str, specs: Specs, attrs: Attrs) -> Dim:
        """Return the scratch that one launch needs on a backend, in bytes, whichever implementation it is; 0 if none."""
        needed: Dim = 0
        for way in self._all_on(backend):
            if way.scratch is not None:
                needed = _larger(needed, way.scratch(specs, attrs))
        return needed

    def inplace_on(self, backend: str) -> tuple[tuple[str, str], ...]:
        """Return pairs (write, read) that may share storage on a backend, whichever implementation it is."""
        return _inplace_on(self, backend)

    def moved(self, specs: Specs, attrs: Attrs) -> Dim:
        """Return the bytes of device memory that one launch reads and writes."""
        if self.bytes_moved is not None:
            return self.bytes_moved(specs, attrs)
        total: Dim = 0
        for name, spec in specs.items():
            total += spec.bytes * (2 if name in self.updates else 1)
        return total


# every launch of every layer asks these


@lru_cache(maxsize=1024)
def _on(operator: Operator, backend: str, invariant: bool | None) -> tuple[Implementation, ...]:
    _known("backend", [backend], BACKENDS)
    ways = [way for way in operator.implementations if way.backend == backend]
    if invariant is None:
        return tuple(ways)
    return tuple(way for way in ways if (way.invariant if invariant else not way.on_request))


@lru_cache(maxsize=1024)
def _inplace_on(operator: Operator, backend: str) -> tuple[tuple[str, str], ...]:
    stated = [way.inplace for way in operator.implementations if way.backend == backend and way.inplace is not None]
    return tuple(pair for pair in operator.inplace if all(pair in pairs for pairs in stated))


def _larger(a: Dim, b: Dim) -> Dim:
    """The larger of two sizes; of polynomials of which neither is the larger for all dims, their sum."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    difference = exact(a - b)
    if difference.is_nonnegative:
        return a
    return b if exact(b - a).is_nonnegative else a + b
