"""An operator, declared once: what it means, what carries it out on each backend, and what pictures call its operands.

The one record holds operands, shape rule, FLOPs and bytes moved, and an `Implementation` per kernel that can launch it.
Nothing here imports torch.
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
"""What an operand is for, as pictures show it."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)

Scratch: TypeAlias = Callable[[Specs, Attrs], Dim]


def _known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operator says of one launch."""

    outputs: tuple[Spec, ...]
    flops: Dim
    bytes: Dim
    rate_rows: Dim
    rate_columns: Dim


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
        implementation that serves every launch on any card.
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
    capability
        The compute capability (90: sm_90) of the only cards that it runs on; None: of any. Where a profile has no rates of
        attention by its name, those of another stand in.
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
    operands
        What it reads, an arrow, what it writes, in the notation of `mosaic.registrar.operands`. Shapes and dtypes of what is
        written follow, and so does the check of every launch.
    attrs
        Names of its attributes, with `=value` behind one that may be left out.
    inplace
        Pairs (write, read) that may share storage: the write may overwrite the read while it is read. No other operand that
        is written overlaps another.
    rules
        What letters do not say, such as an attribute's range: raises `GraphError` through `require`. Takes what letters,
        attributes and operands stand for by name, operands as specs.
    flops
        Floating-point operations of one launch: a sum of products of letters, attributes and operands (their elements).
    moved
        By operand, the elements of it that one launch reads or writes, as such a sum. Of all others every element counts once,
        and twice where it is updated.
    rate
        Which of a device's rates bounds it; where an operand lies in host memory it is `link`, whatever this says.
    rate_rows
        The row count that the rate depends on; by default the first axis of the first operand that has one.
    rate_columns
        The output columns that the rate depends on, of a matrix product; 1 elsewhere.
    implementations
        What carries it out. Without one for its device's backend it can be planned, not run.
    reference
        What it computes, in plain PyTorch: takes the operands it reads and the attributes by name, returns what it writes
        or updates (one tensor, or one by name). None: the `reference` of its CPU kernel's module.
    roles
        What operands are for, by name, as pictures show it.

    Attributes
    ----------
    reads, writes, updates, whole
        Names that follow from `operands`: what it reads in call order, with a trailing `?` where it may be left out; what it
        creates, or fills when given through `out=`; what it also writes in place; what a chunk region never slices.
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
        """Say what a launch writes and costs.

        Parameters
        ----------
        operands
            What it reads, in call order; None for what is left out.
        given
            Other operands that it reads, and attributes, by name.

        Raises
        ------
        GraphError
            If operands are not what the record says, or an attribute is missing or unknown.

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
        """Attributes that may be left out, with their values."""
        return _given(self.attrs)

    def _check_attributes(self, attrs: Attrs) -> None:
        known = _attributes(self.attrs)
        for name in attrs:
            require(name in known, f"there is no attribute '{name}'; there are {', '.join(known) or 'none'}")
        for name, value in known.items():
            require(name in attrs or value is not None, f"attribute '{name}' is missing")

    def check(self, specs: Specs, attrs: Attrs) -> None:
        """Compare the operands of a launch, written ones included, with what the record says.

        Raises
        ------
        GraphError
            Naming the operand, what it is and what it should be.
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
            if way.name == name or (name is None and way.serves is None and way.capability is None):
                return way
        known = [way.name for way in self._all_on(backend)]
        raise UnknownName(f"implementation of {self.name} on {backend}", name or backend, known)

    def serving(self, backend: str, specs: Specs, attrs: Attrs, capability: int = 0) -> tuple[str, ...]:
        """Name the implementations on a backend that serve a launch of these specs, sizes in integers, on cards of a compute
        capability."""
        ways = [way for way in self._all_on(backend) if way.runs_on(capability)]
        return tuple(way.name for way in ways if way.serves is None or way.serves(specs, attrs))

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


# every launch of every layer asks these


@lru_cache(maxsize=1024)
def _on(operator: Operator, backend: str, invariant: bool | None) -> tuple[Implementation, ...]:
    _known("backend", [backend], BACKENDS)
    ways = [way for way in operator.implementations if way.backend == backend]
    if invariant is None:
        return tuple(ways)
    return tuple(way for way in ways if (way.invariant if invariant else not way.on_request))


@lru_cache(maxsize=1024)
def _attributes(text: str) -> Mapping[str, Any]:
    """Attributes with the values that they have where they are left out; None: they may not be."""
    found = {}
    for entry in text.split():
        name, _, value = entry.partition("=")
        found[name] = literal_eval(value) if value else None
    return found


@lru_cache(maxsize=1024)
def _given(text: str) -> Mapping[str, Any]:
    """Attributes that may be left out, with their values."""
    return {name: value for name, value in _attributes(text).items() if value is not None}


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
