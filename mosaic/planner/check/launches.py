"""Check launches of shipped operators against their letters: shapes, attributes, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from math import prod
from typing import Any, Final, NamedTuple

from mosaic.planner.check.columns import FULL_STEP, HOST, ITEM_BYTES, Columns
from mosaic.planner.check.notation import SCRATCH, Known, Operand, Product, Rule, product_of
from mosaic.planner.check.operators import OPERATORS
from mosaic.planner.check.reading import Work, type_names

_CLASSES: Final = {"index": ("int64", "int32"), "floats": ("bfloat16", "float16", "float32", "float64")}
_SYMBOLIC: Final = frozenset({"span", "keys", "page_span", "tokens"})  # for the cost model: dims, or not stated


class _Axis(NamedTuple):
    """Length of an axis in a full iteration, and which loop slices it by how many of its rows per row."""

    length: int
    loop: str | None = None
    factor: int = 0


_Letters = dict[str, tuple[_Axis, ...]]
_View = Sequence[_Axis]


def check_launches(plan: Columns, work: Work) -> None:
    """Check shapes, attributes, FLOPs and bytes of shipped operators; once per distinct launch.

    Layers repeat their launches: what differs between two of them are names and buffer ids. An op whose slices do not fit
    has been reported, and says nothing of shapes.
    """
    ops = range(len(plan.op_name))
    seen: dict[tuple[Any, ...], int] = {}
    alike = list(map(seen.setdefault, _launches(plan, work), ops))  # op -> the first op of the same launch
    uncut = plan.uncut | plan.odd_cuts
    unsound: set[int] = set()
    for i in seen.values():
        before = len(plan.found)
        if i not in uncut:
            _check_operator(plan, i, work)
        if len(plan.found) > before or i in uncut:
            unsound.add(i)
    for i in ops if unsound else ():
        if alike[i] in unsound and alike[i] != i and i not in uncut:
            _check_operator(plan, i, work)


def _launches(plan: Columns, work: Work) -> Iterator[tuple[Any, ...]]:
    """The key of equal launches: kernel, work, operands' names, shapes and slices, loops, attributes."""
    loops, depths = _number_loops(plan)
    numbers: dict[Any, int] = {}
    homes = map(loops.__getitem__, plan.home) if plan.regions else repeat(-1)
    on_host = map(HOST.__eq__, plan.pool) if HOST in plan.pool else repeat(False)
    specs = zip(map(tuple, plan.shape), plan.dtype, plan.rotate, on_host, homes, strict=False)
    spec = [numbers.setdefault(value, k) for k, value in enumerate(specs)]
    cuts: list[Any] = [()] * len(plan.slices)
    for i, slices in enumerate(plan.slices):
        if slices:
            cut: list[Any] = [*chain.from_iterable(slices)]
            depth = depths[plan.op_region[i]]
            cut[2::4] = [depth.get(name) for name in cut[2::4]]
            cuts[i] = tuple(cut)
    shapes = [tuple(map(spec.__getitem__, operands.values())) for operands in plan.operands]
    names, attrs = map(tuple, plan.operands), [tuple(attrs.items()) for attrs in plan.attrs]
    around = map(loops.__getitem__, plan.op_region)
    return zip(plan.kernel, *work, names, shapes, cuts, around, attrs, strict=True)


def _number_loops(plan: Columns) -> tuple[dict[str | None, int], dict[str | None, dict[str, int]]]:
    """Number the loops so that loops of as many rows in different layers are equal; the depth of each loop's parents."""
    numbers: dict[Any, int] = {}
    loops: dict[str | None, int] = {None: -1}
    depths: dict[str | None, dict[str, int]] = {None: {}}
    for name, around in plan.enclosing.items():
        nest = tuple(map(plan.loops.__getitem__, around))
        loops[name] = numbers.setdefault(nest, len(numbers))
        depths[name] = {at: depth for depth, at in enumerate(around)}
    return loops, depths


def _check_operator(plan: Columns, i: int, work: Work) -> None:
    """Check one launch of a shipped operator against its table entry."""
    known = OPERATORS.get(plan.kernel[i])
    if known is None:
        return
    operands, attrs = plan.operands[i], plan.attrs[i]
    names = [entry.name for entry in known.operands if entry.name in operands or not entry.optional]
    if operands.keys() - {SCRATCH} != set(names):
        _fail(plan, i, f"takes {', '.join(names)}, got {', '.join(operands)}")
        return
    odd = {key for key in attrs if type(attrs[key]) not in known.attrs.get(key, ())}
    odd.update(known.attrs.keys() - attrs.keys() - known.optional)
    if odd:
        wanted = ", ".join(f"{key} ({type_names(types)})" for key, types in known.attrs.items()) or "none"
        amiss = ", ".join(f"{key}={attrs.get(key)!r}" for key in sorted(odd))
        _fail(plan, i, f"has attributes {wanted}; amiss: {amiss}")
        return
    views = {name: _view(plan, i, name) for name in names}
    given = {**known.defaults, **attrs}
    letters: _Letters = {name: (_Axis(value),) for name, value in given.items() if type(value) is int}
    for name in _SYMBOLIC & plan.header["dims"].keys():
        letters.setdefault(name, (_Axis(plan.header["dims"][name]),))
    for name, dividend, divisor in known.quotients:
        letters[name] = (_Axis(1 + attrs[dividend] // max(attrs[divisor], 1)),)
    if not _bind_operands(plan, i, known, views, letters):
        return
    _check_residence(plan, i, known, names)
    for rule in known.rules:
        _check_rule(plan, i, rule, letters)
    _check_flops(plan, i, known, letters, work.flops[i])
    _check_bytes(plan, i, known, views, letters, work.moved[i])
    _check_full_step(plan, i, letters)


def _fail(plan: Columns, i: int, message: str, *buffers: int) -> None:
    plan.fail("operator", f"{plan.say_op(i)}: {plan.kernel[i]} {message}", buffers, (i,))


def _bind_operands(plan: Columns, i: int, known: Known, views: Mapping[str, _View], letters: _Letters) -> bool:
    """Bind the letters of axes and dtypes operand by operand; False if a shape contradicts them."""
    dtypes: dict[str, str] = {}
    for entry in known.operands:
        if entry.name not in views:
            continue
        b, view = plan.operands[i][entry.name], views[entry.name]
        if not _unify_shape(entry.axes, view, letters):
            expected = ", ".join(_spell(axis, letters) for axis in entry.axes)
            _fail(plan, i, f"sees {entry.name} {plan.say(b)} as {_shown(view)}, expected [{expected}]", b)
            return False
        _check_dtype(plan, i, entry, dtypes)
    for letter in known.whole:
        axes = letters.get(letter, ())  # none of an optional operand that is not there
        if any(axis.loop is not None for axis in axes):
            _fail(plan, i, f"needs all of {letter}, it sees {_shown(axes)}")
    return True


def _view(plan: Columns, i: int, operand: str) -> tuple[_Axis, ...]:
    """An operand as one full iteration of the loops around an op sees it."""
    b = plan.operands[i][operand]
    axes = [_Axis(length) for length in plan.shape[b]]
    for name, axis, loop, factor in plan.slices[i]:
        if name == operand:
            axes[axis] = _Axis(factor * plan.loops[loop].full, loop, factor)
    return tuple(axes)


def _unify_shape(axes: Sequence[str | Product], view: _View, letters: _Letters) -> bool:
    """Bind new letters and compare known ones."""
    spread = len(view) - len(axes) + 1
    if spread < 0 or (spread != 1 and not any(isinstance(axis, str) for axis in axes)):
        return False
    at = 0
    for axis in axes:
        if isinstance(axis, str):
            seen = tuple(view[at : at + spread])
            at += spread
            if letters.setdefault(axis[1:], seen) != seen:
                return False
            continue
        actual = view[at]
        at += 1
        name, added = axis[0][0], axis[1]
        if len(axis[0]) == 1 and name not in letters and not name.isdecimal():
            if added and actual.loop is not None:
                return False
            letters[name] = (actual._replace(length=actual.length - added),)
        elif _evaluate(axis, letters) != actual:
            return False
    return True


def _evaluate(product: Product, letters: _Letters) -> _Axis | None:
    """The axis that a product stands for; None if it is unknown."""
    length, loop, factor = 1, None, 1
    for name in product[0]:
        if name.isdecimal():
            axis = _Axis(int(name))
        elif len(letters.get(name, ())) == 1:
            axis = letters[name][0]
        else:
            return None
        length *= axis.length
        if axis.loop is None:
            factor *= axis.length
        elif loop is None:
            loop, factor = axis.loop, factor * axis.factor
        else:
            return None
    return _Axis(length + product[1], loop, factor if loop is not None else 0)


def _check_dtype(plan: Columns, i: int, entry: Operand, dtypes: dict[str, str]) -> None:
    """Bind a dtype's letter, or compare it."""
    b, expected = plan.operands[i][entry.name], entry.dtype
    dtype = plan.dtype[b]
    if expected in _CLASSES:
        holds = dtype in _CLASSES[expected]
    elif len(expected) == 1:
        holds = dtypes.setdefault(expected, dtype) == dtype
    else:
        holds = not expected or dtype == expected
    if not holds:
        _fail(plan, i, f"has {entry.name} {plan.say(b)} in {dtype}, not {dtypes.get(expected, expected)}", b)


def _check_residence(plan: Columns, i: int, known: Known, names: Iterable[str]) -> None:
    """Check that at most one operand lies in host memory, and only one that the kernel reaches through the link."""
    on_host = [name for name in names if plan.pool[plan.operands[i][name]] == HOST]
    if len(on_host) > 1 or not known.host.issuperset(on_host):
        may = f"one of {', '.join(sorted(known.host))}" if known.host else "none"
        ids = [plan.operands[i][name] for name in on_host]
        _fail(plan, i, f"has {', '.join(on_host)} in host memory; it may have {may} there", *ids)


def _check_rule(plan: Columns, i: int, rule: Rule, letters: _Letters) -> None:
    relation, left, right = rule
    low, high = _evaluate(product_of(left), letters), _evaluate(product_of(right), letters)
    if low is None or high is None:
        return
    if relation == "at most":
        holds = low.length <= high.length
    elif relation == "divides":
        holds = _divides(low, high)
    else:  # groups: as many of the right for each of the left, in every iteration alike
        holds = low.loop == high.loop and _divides(low, high)
    if not holds:
        _fail(plan, i, f"needs {left} {relation} {right}: {_length(low)}, {_length(high)}")


def _divides(low: _Axis, high: _Axis) -> bool:
    """Whether an axis divides another in every iteration, the last and shorter one included."""
    a, b = (axis.factor if axis.loop is not None else axis.length for axis in (low, high))
    return a >= 1 and b % a == 0


def _check_flops(plan: Columns, i: int, known: Known, letters: _Letters, claimed: int) -> None:
    """Check the FLOPs of all iterations together."""
    flops = 0
    for term in known.flops:
        factors = [(_Axis(int(name)),) if name.isdecimal() else letters.get(name) for name in term]
        if None in factors:  # attention without a dim or attribute of its span: the graph's own word
            return
        product = _over_iterations(plan, i, chain.from_iterable(filter(None, factors)))
        if product is None:
            return
        flops += product
    if flops != claimed:
        formula = "+".join(map("*".join, known.flops))
        plan.fail("flops", f"{plan.say_op(i)}: {claimed} FLOPs, {formula} is {flops}", (), (i,))


def _check_bytes(
    plan: Columns, i: int, known: Known, views: Mapping[str, _View], letters: _Letters, claimed: int
) -> None:
    """Check the bytes that all iterations together move."""
    total = 0
    for name, counted in known.moved:
        if name in views:
            some = [_evaluate(product, letters) for product in counted]
            if None in some:  # attention without a dim or attribute of its keys: the graph's own word
                return
            elements = _over_iterations(plan, i, filter(None, some) if some else views[name])
            if elements is None:
                return
            total += elements * ITEM_BYTES[plan.dtype[plan.operands[i][name]]]
    if total != claimed:
        plan.fail("bytes", f"{plan.say_op(i)}: {claimed} bytes, its operands have {total}", (), (i,))


def _over_iterations(plan: Columns, i: int, axes: Iterable[_Axis]) -> int | None:
    """Product of axes, summed over all iterations of the loops around op i; None if two axes follow one loop."""
    total, loops = 1, list(plan.around(i))
    for axis in axes:
        if axis.loop is None:
            total *= axis.length
        elif axis.loop in loops:
            loops.remove(axis.loop)
            total *= axis.factor * plan.loops[axis.loop].extent
        else:
            return None
    return total * prod(plan.loops[loop].num_chunks for loop in loops)


def _check_full_step(plan: Columns, i: int, letters: _Letters) -> None:
    """Check that operators of the shipped step run over as many rows as its dims say."""
    if plan.header["phase"] != FULL_STEP:
        return
    known = {name: (_Axis(value),) for name, value in plan.header["dims"].items()}
    for letter, dim in OPERATORS[plan.kernel[i]].shown:
        expected = _evaluate(product_of(dim), letters | known)
        total = prod(
            axis.length if axis.loop is None else axis.factor * plan.loops[axis.loop].extent for axis in letters[letter]
        )
        if expected is not None and total != expected.length:
            text = f"{plan.say_op(i)} runs over {total}, dims say {dim} = {expected.length}"
            plan.fail("dims", text, (), (i,))


def _spell(axis: str | Product, letters: _Letters) -> str:
    if isinstance(axis, str):
        return ", ".join(map(_length, letters.get(axis[1:], ()))) or axis[1:]
    value = _evaluate(axis, letters)
    return "*".join(axis[0]) if value is None else _length(value)


def _length(axis: _Axis) -> str:
    return str(axis.length) if axis.loop is None else f"{axis.length} by '{axis.loop}'"


def _shown(view: Iterable[_Axis]) -> str:
    return f"[{', '.join(map(_length, view))}]"
