"""The notation of operands in an operator's record, and its evaluation: sizes, shapes, dtypes, errors.

`x:a[T, F] weight:w[N, F] bias?:w[N] -> y:a[T, N]`: the reads in call order, an arrow, the writes. Each operand has a
name, a dtype and axes.

- Axes are products of numbers, attributes and letters, plus a number at the end, such as `B+1` or `2*K*head_size`. A letter
  stands for one size in all operands. `*T` stands for any number of axes.
- A dtype is PyTorch's name, `f32`, `i64`, `i32`, `u8`, `index` (i64 or i32), an attribute that names it, or a lower-case letter
  that stands for one dtype in all operands.
- Marks follow the name: `?` may be left out; `!` is updated in place; `@` is never sliced by a loop; `#` has no gap between its
  rows, which may lie apart elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from mosaic.errors import GraphError
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.polynomial import Dim, Polynomial

__all__ = [
    "DTYPES", "Attrs", "Dim", "Operand", "Sizes", "Spec", "Specs", "bind", "count", "divides", "exact", "parse", "require",
    "shapes",
]  # fmt: skip


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
"""Operands by name: the reads, and the writes."""
Attrs: TypeAlias = Mapping[str, Any]
Sizes: TypeAlias = dict[str, Any]
"""The values of letters and attributes; for `*T` a tuple."""

DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (name,) for name in ITEMSIZE},
    "f32": ("float32",), "i64": ("int64",), "i32": ("int32",), "u8": ("uint8",), "index": ("int64", "int32"),
}  # fmt: skip
_OPERAND: Final = re.compile(r"\s*([a-z_]\w*)([?!@#]*):(\w+)\[([^\]]*)\]\s*")


class Axis(NamedTuple):
    """A product plus a number; `many`: any number of axes."""

    factors: tuple[str | int, ...]
    added: int = 0
    many: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One operand of a record."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    text: str
    optional: bool
    updated: bool
    whole: bool
    dense: bool


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
    """Tell whether `width` is a multiple of `size` for all dims.

    >>> from mosaic.registrar.polynomial import symbol
    >>> divides(128, 4096), divides(128, 128 * symbol("r")), divides(3, 4)
    (True, True, False)
    """
    return _quotient(width, size) is not None


@lru_cache(maxsize=256)
def parse(text: str) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Parse a list of operands into reads and writes.

    Raises
    ------
    GraphError
        If the text is not in the notation.

    Examples
    --------
    >>> reads, writes = parse("x:a[T, F] bias?:a[F] -> y:a[T, F]")
    >>> [operand.name for operand in reads if operand.optional], writes[0].dtype
    (['bias'], 'a')
    """
    reads, _, writes = text.partition("->")
    return tuple(_operands(reads)), tuple(_operands(writes))


def _operands(text: str) -> Iterable[Operand]:
    end = 0
    while text[end:].strip():
        found = _OPERAND.match(text, end)
        if found is None:
            raise GraphError(f"operands are written as 'x:a[T, F]', not {text[end:].strip()!r}")
        name, marks, dtype, axes = found.groups()
        end = found.end()
        yield Operand(
            name=name, dtype=dtype, axes=tuple(_axis(axis.strip()) for axis in axes.split(",") if axis.strip()),
            text=f"{dtype}[{axes}]", optional="?" in marks, updated="!" in marks, whole="@" in marks, dense="#" in marks,
        )  # fmt: skip


def _axis(text: str) -> Axis:
    if text[0] == "*":
        return Axis((text[1:],), many=True)
    product, _, added = text.replace(" ", "").partition("+")
    return Axis(tuple(int(part) if part.isdigit() else part for part in product.split("*")), int(added or 0))


def bind(operands: Sequence[Operand], specs: Specs, attrs: Attrs) -> Sizes:
    """Find the value of each letter, and compare all given operands with the record.

    Parameters
    ----------
    operands
        The operands to compare; each that is not optional is in `specs`.
    attrs
        The values of attributes. A missing one is found like a letter.

    Returns
    -------
    dict
        Attributes, and the values of letters: sizes, dtypes, for `*T` a tuple.

    Raises
    ------
    GraphError
        Naming the operand, and the actual and expected spec.
    """
    sizes: Sizes = dict(attrs)
    pending: list[tuple[Operand, Axis, Dim]] = []
    for operand in operands:
        spec = specs.get(operand.name)
        if spec is None:
            require(operand.optional, f"operand '{operand.name}' is missing, expected {operand.text}")
            continue
        dtypes = DTYPES.get(operand.dtype) or (sizes.setdefault(operand.dtype, spec.dtype),)
        for axis, size in _paired(operand, spec, sizes):
            if not _settled(operand, axis, size, specs, sizes):
                pending.append((operand, axis, size))
        if spec.dtype not in dtypes:
            _refuse(operand, spec, sizes)
    while pending:
        left = [entry for entry in pending if not _settled(*entry, specs, sizes)]
        if len(left) == len(pending):
            operand, _, _ = left[0]
            raise GraphError(f"operand '{operand.name}' leaves sizes open: {operand.text}")
        pending = left
    return sizes


def _paired(operand: Operand, spec: Spec, sizes: Sizes) -> Iterable[tuple[Axis, Dim]]:
    """Axes with their sizes; those of `*T` are compared here."""
    many = next((at for at, axis in enumerate(operand.axes) if axis.many), None)
    if many is None:
        if len(spec.shape) != len(operand.axes):
            _refuse(operand, spec, sizes)
        return zip(operand.axes, spec.shape, strict=True)
    after = len(operand.axes) - many - 1
    if len(spec.shape) < many + after:
        _refuse(operand, spec, sizes)
    end = len(spec.shape) - after
    if sizes.setdefault(str(operand.axes[many].factors[0]), spec.shape[many:end]) != spec.shape[many:end]:
        _refuse(operand, spec, sizes)
    axes = operand.axes[:many] + operand.axes[many + 1 :]
    return zip(axes, spec.shape[:many] + spec.shape[end:], strict=True)


def _settled(operand: Operand, axis: Axis, size: Dim, specs: Specs, sizes: Sizes) -> bool:
    """Compare one size, or find its one unknown letter; False if there are several."""
    known: Dim = 1
    unknown: str | None = None
    for factor in axis.factors:
        value = factor if isinstance(factor, int) else sizes.get(factor)
        if value is not None:
            known = known * value
        elif unknown is not None:
            return False
        else:
            unknown = str(factor)
    if unknown is None:
        if known + axis.added != size:
            _refuse(operand, specs[operand.name], sizes)
        return True
    found = size - axis.added
    quotient = found if isinstance(known, int) and known == 1 else _quotient(found, known)
    if quotient is None or (isinstance(quotient, int) and quotient < 0):
        _refuse(operand, specs[operand.name], sizes)
    sizes[unknown] = quotient
    return True


def _quotient(size: Dim, by: Dim) -> Dim | None:
    """The quotient of `size` by `by`, if it is a whole number for all dims."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if by and size % by == 0 else None
    quotient = exact(size) / by
    return quotient if isinstance(quotient, int) or quotient.is_whole else None


def _refuse(operand: Operand, spec: Spec, sizes: Sizes) -> None:
    dtypes = DTYPES.get(operand.dtype, (str(sizes.get(operand.dtype, operand.dtype)),))
    shape = ", ".join(_shown(axis, sizes) for axis in operand.axes)
    raise GraphError(f"operand '{operand.name}' is {spec}, expected {' or '.join(dtypes)}[{shape}] ({operand.text})")


def _shown(axis: Axis, sizes: Sizes) -> str:
    if axis.many:
        found = sizes.get(str(axis.factors[0]))
        return f"*{axis.factors[0]}" if found is None else ", ".join(map(str, found))
    values = [factor if isinstance(factor, int) else sizes.get(factor, factor) for factor in axis.factors]
    if not any(isinstance(value, str) for value in values):
        return str(prod(values) + axis.added)
    return "*".join(map(str, values)) + (f"+{axis.added}" if axis.added else "")


def shapes(operands: Sequence[Operand], sizes: Sizes) -> tuple[Spec, ...]:
    """Compute operands' specs once all letters are known."""
    return tuple(
        Spec(
            tuple(dim for axis in operand.axes for dim in _dims(axis, sizes)),
            DTYPES.get(operand.dtype, (sizes.get(operand.dtype, operand.dtype),))[0],
        )
        for operand in operands
    )


def _dims(axis: Axis, sizes: Sizes) -> tuple[Dim, ...]:
    if axis.many:
        found: tuple[Dim, ...] = sizes[str(axis.factors[0])]
        return found
    return (prod(factor if isinstance(factor, int) else sizes[factor] for factor in axis.factors) + axis.added,)


def count(text: str, sizes: Sizes, specs: Specs) -> Dim:
    """Evaluate a sum of products of numbers, letters, attributes and operands (their elements).

    `/` divides without rounding.

    Raises
    ------
    GraphError
        If it contains an unknown name.

    Examples
    --------
    >>> count("2*x*O + 1", {"O": 5}, {"x": Spec((3, 4), "float32")})
    121
    """
    return sum(_term(term, sizes, specs) for term in text.replace(" ", "").split("+"))


def _term(text: str, sizes: Sizes, specs: Specs) -> Dim:
    over, *under = text.split("/")
    value = prod(_value(name, sizes, specs) for name in over.split("*"))
    for name in under:
        value = exact(value) / _value(name, sizes, specs)
    return value


def _value(name: str, sizes: Sizes, specs: Specs) -> Dim:
    if name.isdigit():
        return int(name)
    if name in specs:
        return specs[name].elements
    require(name in sizes, f"'{name}' is neither an operand nor a size nor an attribute that is given")
    found = sizes[name]
    return prod(found) if isinstance(found, tuple) else found
