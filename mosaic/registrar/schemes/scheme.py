"""Storage schemes of matrices: the parts that a matrix is stored in, and the products that read them.

A model registers products of bundles and names no scheme. A scheme names its parts and operators and knows no model.
Shape legend: T rows, E experts, O rows of a matrix, I its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mosaic.registrar.operator import Dim, Operator

if TYPE_CHECKING:
    from mosaic.registrar.graph import Buffer, Graph

PART: Final = "|"
"""Separates the checkpoint's tensor and the part's name in the `tensor` of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a stored matrix [O, I], or of a stack of them [E, O, I].

    It is sliced with the matrix along its axes: by rows unless `rows` is 0, by columns unless `columns` is 0.

    Parameters
    ----------
    name
        Its own name; the first part may have none.
    dtype
        Of its elements; the model's by default.
    rows, columns
        Rows and columns of the matrix per element; 0: the part does not have the axis.

    Examples
    --------
    >>> Part(name="scale", rows=1, columns=0).shape((8, 64, 32)), Part(columns=2).shape((64, 32))
    ((8, 64), (64, 16))
    """

    name: str = ""
    dtype: str = ""
    rows: int = 1
    columns: int = 1

    def shape(self, matrix: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return its shape, given that of the matrix or stack."""
        *lead, rows, columns = matrix
        axes = ((rows, self.rows), (columns, self.columns))
        return (*lead, *(size if each == 1 else size // each for size, each in axes if each))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scheme:
    """A way to store matrices.

    Parameters
    ----------
    name
        The name in reports.
    parts
        The parts of a matrix, in the order in which operators read them; the first has both axes.
    linear, linear_add, grouped_linear
        Operators of products: their operands are those of the shipped operators of these names, with the parts instead
        of the weight. Without `grouped_linear` stacks are stored plain.
    encode
        Called by the runtime with a tensor [O, I] of a checkpoint, on the CPU: returns the parts by name. None: the
        only part is that tensor.
    """

    name: str
    parts: tuple[Part, ...]
    linear: str | Operator
    linear_add: str | Operator
    grouped_linear: str | Operator | None = None
    encode: Callable[[Any], Mapping[str, Any]] | None = None

    def sources(self, weights: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Give the checkpoint's tensors, with their shapes, that a plan's weights are encoded from."""
        first = self.parts[0]
        for tensor, shape in weights:
            source, name = part_of(tensor)
            if not name:
                yield tensor, shape
            elif name == first.name:
                yield source, (*shape[:-2], shape[-2] * first.rows, shape[-1] * first.columns)


class Matrix(NamedTuple):
    """A matrix [O, I] of a model, or a stack of them [E, O, I]: its buffer's name, its possibly symbolic shape, the
    checkpoint's tensor, and its scheme."""

    name: str
    shape: tuple[Dim, ...]
    tensor: str
    scheme: Scheme

    def bundle(self, dtype: str, declare: Callable[[str, tuple[Dim, ...], str, str], Buffer]) -> Bundle:
        """Declare each part by its name, shape, dtype and tensor; `dtype` is the model's."""
        found = []
        for part in self.scheme.parts:
            name, tensor = self.name, self.tensor
            if part.name:
                name, tensor = f"{name}_{part.name}", f"{tensor}{PART}{part.name}"
            found.append(declare(name, part.shape(self.shape), part.dtype or dtype, tensor))
        return Bundle(self.scheme, self.shape[-2], tuple(found))


class Bundle(NamedTuple):
    """A matrix of O = `rows` rows in a step: the buffers of its scheme's parts."""

    scheme: Scheme
    rows: Dim
    parts: tuple[Buffer, ...]

    @property
    def whole(self) -> Buffer:
        """The matrix, if it is one buffer."""
        (found,) = self.parts
        return found


def part_of(tensor: str) -> tuple[str, str]:
    """Split a weight's `tensor` into the checkpoint's tensor and the part's name.

    >>> part_of("o.weight|scale"), part_of("o.weight")
    (('o.weight', 'scale'), ('o.weight', ''))
    """
    source, _, name = tensor.partition(PART)
    return source, name


def product(
    g: Graph, x: Buffer, matrix: Bundle, bias: Buffer | None = None, *, name: str, out: Buffer | None = None,
    onto: Buffer | None = None, offsets: Buffer | None = None, arrivals: Buffer | None = None,
) -> Buffer:  # fmt: skip
    """Register x @ matrix.T, [T, O].

    Parameters
    ----------
    bias
        [O], added.
    out, onto
        [T, O]: the buffer that is written, or the one that is added to; a new buffer if neither is given.
    offsets
        int32 [E + 1], of a stack: the first row of x of each matrix.
    arrivals
        The counters of a split plain product.
    """
    scheme, operands = matrix.scheme, (x, *matrix.parts)
    operator: str | Operator | None = scheme.linear
    if offsets is not None:
        operator, operands = scheme.grouped_linear, (*operands, offsets)
    elif onto is not None and arrivals is not None:
        operator, operands = "split_linear_add", (x, matrix.whole, onto, arrivals)
    elif onto is not None:
        operator, operands = scheme.linear_add, (*operands, onto)
    elif bias is not None:
        operands = (*operands, bias)
    assert operator is not None
    found: Buffer = g.add_op(operator, *operands, out=out, name=name)
    return found
