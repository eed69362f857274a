"""One function per way to use an operator: it writes statements into a scope, or returns False where nothing suits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .language import Shape, Size
from .scope import Scope, Value, cuts

__all__ = ["OPERATORS", "fresh_matrix", "linear"]

EPS: Final = 1e-5


def fresh_matrix(scope: Scope) -> Value:
    """An input to begin with."""
    rows = scope.rng.choice([d for d in ("tokens", "tokens", "masked") if d in scope.dims])
    return scope.declare("x", "input", ((rows, 1), any_width(scope)), fill="normal")


def any_width(scope: Scope) -> Size:
    if "groups" in scope.dims and scope.rng.random() < 0.35:
        return ("groups", scope.rng.choice([2, 4, 6]))
    return scope.rng.choice([2, 4, 6, 8, 12, 17])


def target(scope: Scope, shape: Shape, reads: tuple[Value, ...]) -> Value | None:
    """A buffer to write instead of a new one: an output, one that is overwritten, or one filled slice by slice."""
    rng = scope.rng
    if rng.random() < 0.55:
        return None
    known = scope.pick(
        lambda v: (
            v.shape == shape and v.dtype == scope.dtype and scope.writable(v) and v not in reads and v.kind != "state"
        )
    )
    if known is not None and rng.random() < 0.6:
        return known
    if not all(cuts(d, shape) for d in scope.open):
        return scope.declare("t", "transient", shape) if rng.random() < 0.3 else None
    kind = "output" if rng.random() < 0.3 else "transient"
    return scope.declare(
        "y" if kind == "output" else "t",
        kind,
        shape,
        outside=kind == "transient" and bool(scope.open) and rng.random() < 0.7,
    )


def make(
    scope: Scope, kernel: str, *reads: Value | None, shape: Shape, whole: tuple[Value, ...] = (), **attrs: object
) -> Value:
    """An op with one result, new or into a target."""
    into = target(scope, shape, tuple(v for v in reads if v is not None))
    if into is not None:
        return scope.call(kernel, *reads, into=(into,), whole=whole, **attrs)
    return scope.call(kernel, *reads, shapes=(shape,), whole=whole, **attrs)


def linear(scope: Scope, x: Value | None = None, width: Size | None = None) -> Value | None:
    x = x or scope.matrix(lambda v: scope.sums(v.width))
    if x is None:
        return None
    width = width or any_width(scope)
    bias = scope.weight((width,), "normal") if scope.rng.random() < 0.3 else None
    return make(scope, "linear", x, scope.weight((width, x.width)), bias, shape=(x.rows, width))


def linear_add(scope: Scope) -> bool:
    """Accumulate, into a value of its own rows; a loop may cut what is summed up where it does not cut the value."""
    x = scope.matrix()
    if x is None:
        return False

    def accepts(y: Value) -> bool:
        inside = not isinstance(x.width, int) and x.width[0] in scope.open and x.width[0] in y.home
        inside = inside or (not isinstance(x.width, int) and x.width[0] in scope.open and cuts(x.width[0], y.shape))
        return (
            y is not x and y.ready and len(y.shape) == 2 and y.rows == x.rows and y.dtype == scope.dtype
            and scope.writable(y, summed=x.width) and (scope.ordered or not inside)
        )  # fmt: skip

    y = scope.pick(accepts)
    if y is None:
        return False
    weight = scope.weight((y.width, x.width))
    if isinstance(x.width, int) and isinstance(y.width, int) and scope.rng.random() < 0.3:
        arrivals = scope.call("zeros", shapes=((2,),), dtypes=("int32",), count=2)
        scope.call("split_linear_add", x, weight, y, arrivals, updates=y, whole=(arrivals,))
        return True
    scope.call("linear_add", x, weight, y, updates=y)
    return True


def rms_norm(scope: Scope) -> bool:
    x = scope.matrix(lambda v: scope.sums(v.width))
    if x is None:
        return False
    make(scope, "rms_norm", x, scope.weight((x.width,), "around one"), shape=x.shape, eps=EPS)
    return True


def norm_gate_up(scope: Scope) -> bool:
    """A feed-forward at once; no loop cuts the weights."""
    x = scope.matrix(lambda v: isinstance(v.width, int))
    if x is None:
        return False
    width = scope.rng.choice([2, 3, 5])
    weights = scope.weight((x.width,), "around one"), scope.weight((width, x.width)), scope.weight((width, x.width))
    make(scope, "norm_gate_up", x, *weights, shape=(x.rows, width), eps=EPS)
    return True


def _in_place(scope: Scope, accept: Callable[[Value], bool] = lambda _: True) -> Value | None:
    return scope.matrix(lambda v: scope.writable(v) and accept(v))


def head_norm(scope: Scope) -> bool:
    x = _in_place(scope, lambda v: _factor(v.width) % 2 == 0)
    if x is None:
        return False
    scope.call("head_norm", x, scope.weight((2,), "around one"), updates=x, eps=EPS)
    return True


def rotary(scope: Scope) -> bool:
    x = _in_place(scope, lambda v: _factor(v.width) % 2 == 0)
    if x is None:
        return False
    size = 4 if _factor(x.width) % 4 == 0 else 2
    positions = _given(scope, "p", (x.rows,), "int32", "positions")
    frequencies = scope.weight((scope.rng.randint(1, size // 2),), "frequencies", "float32")
    scope.call("rotary", x, positions, frequencies, updates=x, head_size=size)
    return True


def _factor(size: Size) -> int:
    return size if isinstance(size, int) else size[1]


def _given(scope: Scope, stem: str, shape: Shape, dtype: str, fill: str) -> Value:
    """An input of integers, shared where there is one already."""
    known = [
        v
        for v in scope.values.values()
        if v.kind == "input" and (v.shape, v.dtype) == (shape, dtype) and v.name.startswith(stem)
    ]
    return (
        scope.rng.choice(known)
        if known and scope.rng.random() < 0.7
        else scope.declare(stem, "input", shape, dtype, fill)
    )


def silu_mul(scope: Scope) -> bool:
    """Each value once: squared in every iteration of a loop, it would leave the range of float32."""
    gate = _in_place(scope, lambda v: all(cuts(d, v.shape) for d in scope.outer(v)))
    if gate is None:
        return False
    up = scope.matrix(lambda v: v.shape == gate.shape and v is not gate)
    if up is None:
        up = scope.call("copy", gate, shapes=(gate.shape,))
    scope.call("silu_mul", gate, up, updates=gate)
    return True


def guide(scope: Scope) -> bool:
    x = _in_place(scope)
    other = x and scope.matrix(lambda v: v.shape == x.shape and v is not x)
    if x is None or other is None:
        return False
    scope.call("guide", x, other, scope.declare("g", "input", (x.rows,), "float32", "normal"), updates=x)
    return True


def copy(scope: Scope) -> bool:
    x = scope.matrix()
    if x is None:
        return False
    make(scope, "copy", x, shape=x.shape)
    return True


def gather(scope: Scope) -> bool:
    """Rows of a matrix that is there as a whole, now and then those before them."""
    rng = scope.rng
    x = scope.matrix(lambda v: not isinstance(v.rows, int), whole=True)
    if x is None:
        return False
    dim = x.rows[0]  # type: ignore[index]
    over = rng.choice([d for d in ("tokens", "masked") if d in scope.dims])
    rows = _given(scope, f"rows_{dim}_", ((over, 1),), "int64", f"rows:{dim}")
    if rng.random() < 0.3:
        bounds = _given(scope, f"cu_{dim}_", (rng.randint(2, 4),), "int32", f"bounds:{dim}")
        rows = scope.call("shift_rows", rows, bounds, shapes=(rows.shape,), dtypes=("int64",))
    make(scope, "gather_rows", x, rows, shape=((over, 1), x.width), whole=(x,))
    return True


def embedding(scope: Scope) -> bool:
    over = scope.rng.choice([d for d in ("tokens", "masked") if d in scope.dims])
    ids = _given(scope, "ids", ((over, 1),), "int64", "rows:11")
    width = any_width(scope)
    make(scope, "embedding", ids, scope.weight((11, width)), shape=((over, 1), width))
    return True


def attention(scope: Scope) -> bool:
    """Queries, keys and values from projections; keys and values from outside of loops over rows, whole."""
    rng = scope.rng
    size, kv, group = rng.choice([2, 4]), rng.choice([1, 2]), rng.choice([1, 2])
    if "groups" in scope.open:
        widths: tuple[Size, Size] = ("groups", size * kv * group), ("groups", size * kv)
    else:
        widths = size * kv * group * 2, size * kv * 2
    x = scope.matrix(lambda v: v.rows == ("tokens", 1) and scope.sums(v.width))
    if x is None:
        return False

    def whole() -> Value | None:
        """Keys or values as a whole: at home in no loop over rows, so inside one they come from before it."""
        known = scope.pick(
            lambda v: v.shape == (("tokens", 1), widths[1]) and v.dtype == scope.dtype and v.kind != "host"
            and scope.readable(v) and "tokens" not in v.home and not ("tokens" in scope.open and "tokens" in v.written)
            and not ("groups" in scope.open and "groups" not in v.home)
        )  # fmt: skip
        return (
            known
            if "tokens" in scope.open or (known is not None and rng.random() < 0.4)
            else linear(scope, x, widths[1])
        )

    q = linear(scope, x, widths[0])  # first: it may be written over what would be the keys
    k, v = whole(), whole()
    if q is None or k is None or v is None or any("groups" in scope.open and "groups" not in y.home for y in (k, v)):
        return False
    bounds = _given(scope, "cu_tokens_", (rng.randint(2, 4),), "int32", "bounds:tokens")
    block = rng.choice([0, 0, 3])
    make(
        scope, "attention", q, k, v, bounds, shape=q.shape, whole=(k, v), head_size=size, scale=size**-0.5,
        span=scope.dims["tokens"].value, block=block,
    )  # fmt: skip
    return True


def statistics(scope: Scope) -> bool:
    """Statistics of rows into outputs, which nothing reads: a token may be another one where two are as likely."""
    x = scope.matrix(lambda v: isinstance(v.width, int) and v.width >= 2)
    if x is None or not all(cuts(d, (x.rows,)) for d in scope.open):
        return False
    x = scope.call("rms_norm", x, scope.weight((x.width,), "around one"), shapes=(x.shape,), eps=EPS)  # for float32
    outputs = tuple(
        scope.declare("s", "output", (x.rows,), dtype)
        for dtype in ("int64", "float32", "float32", "float32", "float32")
    )
    if scope.rng.random() < 0.5:
        scope.call("row_stats", x, into=outputs)
    else:
        scope.call("unembed_stats", x, scope.weight((scope.rng.choice([3, 9]), x.width)), into=outputs)
    return True


def experts(scope: Scope) -> bool:
    """A mixture of experts over a matrix of fixed width, added to it or to another one."""
    rng = scope.rng
    x = scope.matrix(lambda v: isinstance(v.width, int) and not isinstance(v.rows, int))
    y = x and scope.pick(
        lambda v: v.ready and v is not x and v.shape == x.shape and scope.writable(v) and v.dtype == scope.dtype
    )
    if x is None or y is None or scope.dtype != "float64":
        return False
    count, k, inner = rng.randint(2, 5), rng.randint(1, 2), rng.choice([2, 4, 6])
    dim, (_, width) = x.rows[0], x.shape  # type: ignore[index]
    bias = scope.weight((count,), "normal", "float32") if rng.random() < 0.3 else None
    scoring = rng.choice(["softmax", "sigmoid"])
    scores = scope.call(
        "moe_route", x, scope.weight((count, width)), bias, shapes=((x.rows, k), (x.rows, k)), dtypes=(scope.dtype, "int64"),
        top_k=k, normalize=rng.random() < 0.5, scoring=scoring,
    )  # fmt: skip
    chosen = scope.values[scope.here[-1].writes[1]]  # type: ignore[union-attr]
    assigned: Size = (dim, k)
    order = scope.call(
        "moe_sort", chosen, shapes=((assigned,), (count + 1,)), dtypes=("int64", "int64"), num_experts=count
    )
    offsets = scope.values[scope.here[-1].writes[1]]  # type: ignore[union-attr]
    rows = scope.call("moe_gather", x, order, shapes=((assigned, width),), top_k=k)
    gate = scope.call("grouped_linear", rows, scope.weight((count, inner, width)), offsets, shapes=((assigned, inner),))
    up = scope.call("grouped_linear", rows, scope.weight((count, inner, width)), offsets, shapes=((assigned, inner),))
    scope.call("silu_mul", gate, up, updates=gate)
    down = scope.call("grouped_linear", gate, scope.weight((count, width, inner)), offsets, shapes=((assigned, width),))
    scope.call("moe_combine", down, order, scores, y, updates=y)
    for value in (order, rows, gate, up, down):  # in the order of experts, which depends on how loops are cut
        del scope.values[value.name]
    return True


def cached_attention(scope: Scope) -> bool:
    """Keys and values kept in a state, and attention to them."""
    rng, size = scope.rng, 2
    heads, layers = rng.choice([1, 2]), rng.choice([1, 2])
    x = scope.matrix(lambda v: v.rows == ("tokens", 1) and scope.sums(v.width))
    if x is None or "groups" in scope.open:
        return False
    width, layer = heads * size, rng.randrange(layers)
    kv = next(
        (v for v in scope.values.values() if v.kind == "state" and v.shape == (("kv_rows", 1), layers * 2 * width)),
        None,
    )
    kv = kv or scope.declare("kv", "state", (("kv_rows", 1), layers * 2 * width), fill="normal")
    count = rng.randint(2, 4)
    drawn = rng.randrange(2)
    stem, whose = (
        f"{count - 1}_{drawn}_",
        f"kv_rows:{count - 1}:{drawn}",
    )  # what speaks of the same sequences is drawn alike
    extents = _given(scope, f"extents_{stem}", (("extents", 1), 4), "int64", f"extents:{whose}")
    cu_extents = _given(scope, f"cu_extents_{stem}", (count,), "int32", f"cu_extents:{whose}")
    bounds = _given(scope, "cu_tokens_", (count,), "int32", "bounds:tokens")
    positions = _given(scope, "at", (("tokens", 1),), "int32", "slots:kv_rows")
    where = kv, extents, cu_extents
    if rng.random() < 0.8 and (scope.ordered or not kv.uncut & set(scope.open)):
        keys, values = linear(scope, x, width), linear(scope, x, width)
        scope.call("kv_store", keys, values, *where, bounds, positions, updates=kv, layer=layer, head_size=size)
    if not scope.readable(kv, whole=True):
        return True
    q = linear(scope, x, width * rng.choice([1, 2]))
    seen = _given(scope, f"seen_{stem}", (count - 1,), "int32", f"seen:{whose}")
    if rng.random() < 0.4:
        captured = _given(scope, f"captured_{stem}", (count - 1,), "int32", f"seen:{whose}")
        attrs = {"layer": layer, "kv_heads": heads, "head_size": size, "scale": 0.5, "block": rng.choice([0, 0, 4])}
        _attend_selected(scope, q, (*where, captured, seen, bounds, positions), **attrs)
        return True
    make(
        scope, "kv_attention", q, *where, seen, bounds, positions, shape=q.shape, whole=(kv,), layer=layer,
        kv_heads=heads, head_size=size, scale=0.5, span=rng.randint(1, 20), keys=rng.randint(1, 40), block=rng.choice([0, 0, 4]),
    )  # fmt: skip
    return True


def _attend_selected(
    scope: Scope, q: Value, kept: tuple[Value, ...], *, kv_heads: int, head_size: int, **attrs: Any
) -> None:
    """Attention to pages of a prefix that an input lists, and to the keys behind it."""
    rng = scope.rng
    kv, extents, cu_extents, captured, seen, bounds, positions = kept
    members = q.width // (kv_heads * head_size)  # type: ignore[operator]
    sets, pages, page = kv_heads * rng.choice([1, members]), rng.randint(1, 4), rng.choice([1, 2, 3])
    slots, rows = rng.randint(1, 2), captured.shape[0] + 1
    shape = rows, slots * sets * (1 + pages)
    selected = scope.declare("selected_", "input", shape, "int32", f"selected:{pages}:{slots * sets}")
    owner = scope.declare("owner_", "input", captured.shape, "int64", f"rows:{rows}")
    make(
        scope, "selected_attention", q, kv, extents, cu_extents, selected, owner, captured, seen, bounds, positions, shape=q.shape,
        whole=(kv,), kv_heads=kv_heads, head_size=head_size, sets=sets, k=pages * page, page=page, slot=rng.randrange(slots),
        attended=rng.randint(1, 20), **attrs,
    )  # fmt: skip


def state(scope: Scope) -> bool:
    """A state that is read, added to, or overwritten."""
    rng = scope.rng
    known = scope.pick(lambda v: v.kind == "state" and not cuts("kv_rows", v.shape))
    if known is None or rng.random() < 0.3:
        known = scope.declare("s", "state", (("tokens", 1), any_width(scope)), fill="normal")
    if rng.random() < 0.4 and scope.readable(known):
        scope.call("copy", known, shapes=(known.shape,))
        return True
    x = scope.matrix(lambda v: v.shape == known.shape and v is not known)
    if x is None or not scope.writable(known):
        return False
    scope.call("copy", x, into=(known,))
    return True


OPERATORS: Final[Mapping[str, tuple[float, Callable[[Scope], object]]]] = {
    "linear": (5, linear), "linear_add": (4, linear_add), "rms_norm": (2, rms_norm), "norm_gate_up": (1, norm_gate_up),
    "head_norm": (1, head_norm),
    "rotary": (1, rotary), "silu_mul": (2, silu_mul), "guide": (1, guide), "copy": (2, copy), "gather_rows": (1.5, gather),
    "embedding": (0.7, embedding), "attention": (0.7, attention), "statistics": (0.5, statistics),
    "experts": (0.6, experts), "kv_attention": (0.4, cached_attention), "state": (0.6, state),
}  # fmt: skip
"""Weight and function of every operator."""
