"""An operator's record: its meaning, its implementations on each backend, and the roles of its operands in pictures.

It has operands, shape rule, FLOPs and bytes moved, and an `Implementation` per kernel. Nothing here imports torch.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Literal, TypeAlias, get_args

from mosaic.errors import GraphError, UnknownName
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operands import (
    DTYPES,
    Attrs,
    Dim,
    Operand,
    Sizes,
    Spec,
    Specs,
    bind,
    count,
    divides,
    exact,
    parse,
    require,
    shapes,
)

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
    "Work",
    "divides",
    "exact",
    "require",
]

Backend: TypeAlias = Literal["cuda", "cpu"]
Rate: TypeAlias = Literal["memory", "gemm", "few_rows", "attention", "unembed", "sampled_unembed", "link"]
Role: TypeAlias = Literal["hidden", "attention", "ffn", "logits and head", "statistics"]
"""The role of an operand in pictures."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)

Scratch: TypeAlias = Callable[[Specs, Attrs], Dim]


def _known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The outputs, FLOPs and bytes of one launch."""

    outputs: tuple[Spec, ...]
    flops: Dim
    bytes: Dim
    rate_rows: Dim
    rate_columns: Dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One implementation of an operator.

    Parameters
    ----------
    backend
        The memory that it works on: `cuda` or `cpu`.
    kernel
        The dotted name of the module with its `launch` (and `bind`, if it has one), imported when a plan is bound;
        `module:launcher`; an object with a `launch`; or the launcher itself. A launcher takes operands, attributes and
        `scratch` by name, writes into the given tensors, and allocates nothing.
    name
        Its name in plans if the backend has several; the backend's name by default. A device's profile has the rates of
        attention by this name.
    scratch
        Bytes that one launch needs besides its operands, computed from the operands' specs and the attributes; a
        polynomial in the dims. None: no scratch.
    inplace
        Pairs (write, read) that may share storage with this kernel; None: those of the operator.
    serves
        Whether it supports a launch, from specs with the step's sizes (a sliced axis has its whole length) and the
        attributes; None: it supports every launch. Each operator has, on each backend that it runs on, one
        implementation that supports every launch on any card.
    rate
        The device's rate that bounds it; None: the operator's.
    row_origin
        The operand whose first row, on axis 0 of the whole buffer, the kernel gets as `row_start`.
    on_host
        Operands in host memory that the kernel takes by the host's address; it reads others through the link.
    invariant
        Whether slices of a launch give the bits of the whole launch, however they are cut, so that no row's result
        depends on the number of other rows.
    on_request
        Whether only batch-invariant plans take it.
    capability
        The compute capability (90: sm_90) of the only cards that it runs on; None: it runs on any. If a profile has no rates
        of attention by its name, those of another implementation stand in.
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
    capability: int | None = None

    def __post_init__(self) -> None:
        _known("backend", [self.backend], BACKENDS)
        if self.rate is not None:
            _known("rate", [self.rate], get_args(Rate))
        if not self.name:
            object.__setattr__(self, "name", self.backend)

    def runs_on(self, capability: int) -> bool:
        """Tell whether it runs on cards of a compute capability; 0 where it is not known."""
        return self.capability in (None, capability)

    @property
    def operands(self) -> frozenset[str]:
        """The operands that it names."""
        pairs = chain.from_iterable(self.inplace or ())
        return self.on_host.union(pairs, () if self.row_origin is None else (self.row_origin,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """One operator: its meaning, which every backend shares, and its implementations.

    Parameters
    ----------
    name
        The operator's only name: in graphs and plans, of its kernel, test and benchmark.
    operands
        Its reads, an arrow, its writes, in the notation of `mosaic.registrar.operands`. Shapes and dtypes of the writes
        follow, and so does the check of every launch.
    attrs
        Names of its attributes, with `=value` after an optional one.
    inplace
        Pairs (write, read) that may share storage: the write may overwrite the read while it is read. No other written
        operand overlaps another.
    rules
        Conditions that letters cannot express, such as an attribute's range: raises `GraphError` through `require`.
        Takes the values of letters, attributes and operands by name, operands as specs.
    flops
        Floating-point operations of one launch: a sum of products of letters, attributes and operands (their elements).
    moved
        By operand, the number of its elements that one launch reads or writes, as such a sum. For other operands every
        element counts once, or twice if it is updated.
    rate
        The device's rate that bounds it; `link` in any case if an operand lies in host memory.
    rate_rows
        The row count that the rate depends on; by default the first axis of the first operand with an axis.
    rate_columns
        For a matrix product, the output columns that the rate depends on; 1 for other operators.
    implementations
        The implementations. An operator without one for its device's backend can be planned, not run.
    reference
        Its computation in plain PyTorch: takes its reads and the attributes by name, returns its writes and updates
        (one tensor, or several by name). None: the `reference` of its CPU kernel's module.
    roles
        The role of operands in pictures, by name.

    Attributes
    ----------
    reads, writes, updates, whole
        Names from `operands`: its reads in call order, with a trailing `?` if optional; its new outputs, which may be
        given through `out=`; the reads that it also writes in place; the operands that a chunk region never slices.
    """

    name: str
    operands: str
    attrs: str = ""
    inplace: tuple[tuple[str, str], ...] = ()
    rules: Callable[..., object] | None = None
    flops: str = "0"
    moved: Mapping[str, str] = field(default_factory=dict)
    rate: Rate = "memory"
    rate_rows: str = ""
    rate_columns: str = "1"
    implementations: tuple[Implementation, ...] = ()
    reference: Callable[..., Any] | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    reads: tuple[str, ...] = field(init=False)
    writes: tuple[str, ...] = field(init=False)
    updates: tuple[str, ...] = field(init=False)
    whole: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        reads, writes = parse(self.operands)
        derived = {
            "reads": tuple(operand.name + "?" * operand.optional for operand in reads),
            "writes": tuple(operand.name for operand in writes),
            "updates": tuple(operand.name for operand in reads if operand.updated),
            "whole": frozenset(operand.name for operand in (*reads, *writes) if operand.whole),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _known("rate", [self.rate], get_args(Rate))
        _known("role", self.roles.values(), get_args(Role))
        for backend in {way.backend for way in self.implementations}:
            self._check_implementations(backend)
        for operand in (*reads, *writes):
            if len(operand.dtype) > 1:
                _known("dtype", [operand.dtype], [*DTYPES, *_attributes(self.attrs)])
        operands = {operand.name for operand in (*reads, *writes)}
        said = {
            *self.roles,
            *self.moved,
            *chain.from_iterable((*self.inplace, *(way.operands for way in self.implementations))),
        }
        if said - operands:
            odd = ", ".join(sorted(said - operands))
            raise GraphError(f"operator '{self.name}' says something of {odd}, which it neither reads nor writes")

    def work(self, *operands: Spec | None, **given: Any) -> Work:
        """Compute the outputs and costs of a launch.

        Parameters
        ----------
        operands
            Its reads, in call order; None for an optional one that is absent.
        given
            Other reads, and attributes, by name.

        Raises
        ------
        GraphError
            If operands contradict the record, or an attribute is missing or unknown.

        Examples
        --------
        >>> from mosaic.registrar.operators import operator
        >>> work = operator("embedding").work(Spec((7,), "int64"), Spec((99, 4), "bfloat16"))
        >>> str(work.outputs[0]), work.bytes
        ('bfloat16[7, 4]', 168)
        """
        reads, writes = parse(self.operands)
        names = [operand.name for operand in reads]
        specs = {name: spec for name, spec in zip(names, operands, strict=False) if spec is not None}
        specs |= {name: given[name] for name in names if given.get(name) is not None}
        attrs = {name: value for name, value in given.items() if name not in names}
        self._check_attributes(attrs)
        sizes = self._sizes(reads, specs, attrs)
        outputs = shapes(writes, sizes)
        every = {**specs, **dict(zip(self.writes, outputs, strict=True))}
        leading = next((spec.shape[0] for spec in specs.values() if spec.shape), 1)
        return Work(
            outputs=outputs,
            flops=count(self.flops, sizes, every),
            bytes=sum((self._bytes_moved(name, spec, sizes, every) for name, spec in every.items()), 0),
            rate_rows=count(self.rate_rows, sizes, every) if self.rate_rows else leading,
            rate_columns=count(self.rate_columns, sizes, every),
        )

    @property
    def defaults(self) -> Attrs:
        """Optional attributes, with their default values."""
        return _given(self.attrs)

    def _check_attributes(self, attrs: Attrs) -> None:
        known = _attributes(self.attrs)
        for name in attrs:
            require(name in known, f"there is no attribute '{name}'; there are {', '.join(known) or 'none'}")
        for name, value in known.items():
            require(name in attrs or value is not None, f"attribute '{name}' is missing")

    def check(self, specs: Specs, attrs: Attrs) -> None:
        """Compare the operands of a launch, writes included, with the record.

        Raises
        ------
        GraphError
            Naming the operand, and the actual and expected spec.
        """
        self._sizes(tuple(chain(*parse(self.operands))), specs, attrs)

    def _sizes(self, operands: Sequence[Operand], specs: Specs, attrs: Attrs) -> Sizes:
        sizes = bind(operands, specs, {**self.defaults, **attrs})
        if self.rules is not None:
            self.rules(**{**dict.fromkeys(operand.name for operand in operands if operand.optional), **sizes, **specs})
        return sizes

    def _bytes_moved(self, name: str, spec: Spec, sizes: Sizes, specs: Specs) -> Dim:
        if name in self.moved:
            return count(self.moved[name], sizes, specs) * ITEMSIZE[spec.dtype]
        return spec.bytes * (2 if name in self.updates else 1)

    def _check_implementations(self, backend: str) -> None:
        ways, names = self.on(backend), [way.name for way in self._all_on(backend)]
        if len(set(names)) < len(names):
            raise GraphError(f"operator '{self.name}' has two implementations of one name on {backend}: {names}")
        if all(way.serves is not None or way.capability is not None for way in ways):
            raise GraphError(
                f"operator '{self.name}': of its implementations none on {backend} serves every launch on any card; leave "
                f"`serves` and `capability` out of one of {', '.join(names)}"
            )

    def on(self, backend: str, *, invariant: bool = False) -> tuple[Implementation, ...]:
        """Return the implementations on a backend that plans choose from, in the order in which they are declared.

        Parameters
        ----------
        invariant
            For batch-invariant plans.

        Raises
        ------
        UnknownName
            If there is no such backend.
        """
        return _on(self, backend, invariant)

    def _all_on(self, backend: str) -> tuple[Implementation, ...]:
        """The implementations for either sort of plan."""
        return _on(self, backend, None)

    def implementation(self, backend: str, name: str | None = None) -> Implementation:
        """Return the implementation of a name, or the first that supports every launch.

        Raises
        ------
        UnknownName
            If there is no such backend, or no such implementation on it.
        """
        for way in self._all_on(backend):
            if way.name == name or (name is None and way.serves is None and way.capability is None):
                return way
        known = [way.name for way in self._all_on(backend)]
        raise UnknownName(f"implementation of {self.name} on {backend}", name or backend, known)

    def serving(self, backend: str, specs: Specs, attrs: Attrs, capability: int = 0) -> tuple[str, ...]:
        """Name the implementations on a backend that support a launch of these specs, sizes in integers, on cards of a compute
        capability."""
        ways = [way for way in self._all_on(backend) if way.runs_on(capability)]
        return tuple(way.name for way in ways if way.serves is None or way.serves(specs, attrs))

    def scratch_bytes(self, backend: str, specs: Specs, attrs: Attrs) -> Dim:
        """Return the scratch bytes of one launch on a backend, the largest of all implementations; 0 if none."""
        needed: Dim = 0
        for way in self._all_on(backend):
            if way.scratch is not None:
                needed = _larger(needed, way.scratch(specs, attrs))
        return needed

    def inplace_on(self, backend: str) -> tuple[tuple[str, str], ...]:
        """Return pairs (write, read) that may share storage on a backend with some implementation."""
        return _inplace_on(self, backend)


# cached: every launch of every layer asks for these


@lru_cache(maxsize=1024)
def _on(operator: Operator, backend: str, invariant: bool | None) -> tuple[Implementation, ...]:
    _known("backend", [backend], BACKENDS)
    ways = [way for way in operator.implementations if way.backend == backend]
    if invariant is None:
        return tuple(ways)
    return tuple(way for way in ways if (way.invariant if invariant else not way.on_request))


@lru_cache(maxsize=1024)
def _attributes(text: str) -> Mapping[str, Any]:
    """Attributes with their defaults; None: not optional."""
    found = {}
    for entry in text.split():
        name, _, value = entry.partition("=")
        found[name] = literal_eval(value) if value else None
    return found


@lru_cache(maxsize=1024)
def _given(text: str) -> Mapping[str, Any]:
    """Optional attributes, with their default values."""
    return {name: value for name, value in _attributes(text).items() if value is not None}


@lru_cache(maxsize=1024)
def _inplace_on(operator: Operator, backend: str) -> tuple[tuple[str, str], ...]:
    stated = [way.inplace for way in operator.implementations if way.backend == backend and way.inplace is not None]
    return tuple(pair for pair in operator.inplace if all(pair in pairs for pairs in stated))


def _larger(a: Dim, b: Dim) -> Dim:
    """The larger of two sizes; for polynomials of which neither is always the larger, their sum."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    difference = exact(a - b)
    if difference.is_nonnegative:
        return a
    return b if exact(b - a).is_nonnegative else a + b
