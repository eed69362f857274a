"""Every CPU kernel against its float64 reference, bounds derived from dtype and reduction length; nothing allocated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from operator_tables import attention_options, scratch_rules
from runtime_helpers import StorageWatch, allocated_bytes, storages
from torch import Tensor

from mosaic.errors import GraphError, RuntimeMemoryError, UnknownName
from mosaic.kernels import load
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import OPERATORS
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.polynomial import symbol

SCRATCH = scratch_rules("cpu")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = (F32, F64, BF16, F16)
OTHERS_SOAK = (F32, BF16, *(pytest.param(dtype, marks=pytest.mark.soak) for dtype in (F64, F16)))
"""For what only depends on a dtype's width: float16 goes the way of bfloat16."""


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff."""
    return torch.finfo(dtype).eps / 2


def gamma(n: int, dtype: torch.dtype) -> float:
    """Bound n roundings in the compute dtype of `dtype`: n u / (1 - n u)."""
    u = unit(F64 if dtype == F64 else F32)
    return n * u / (1 - n * u)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Case:
    """One launch: operands that are read or updated, fresh outputs, attributes."""

    kernel: str
    operands: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)

    def scratch(self) -> Tensor | None:
        function = SCRATCH.get(self.kernel)
        everything = self.operands | self.outputs
        shapes = {name: tuple(t.shape) for name, t in everything.items()}
        dtypes = {name: name_of(t.dtype) for name, t in everything.items()}
        size = function(shapes, dtypes, self.attrs) if function else 0
        return torch.full((size,), 0xFF, dtype=torch.uint8) if size else None  # 0xFF.. is NaN in every float dtype

    def launch(self) -> None:
        for output in self.outputs.values():
            output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)
        load(self.kernel).launch(**self.operands, **self.outputs, **self.attrs, scratch=self.scratch())

    def reference(self, **changes: Any) -> Any:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in self.operands.items()}
        return load(self.kernel).reference(**(wide | changes), **self.attrs)


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=F64) * scale).to(dtype)


def strided(x: Tensor, left: int = 3, right: int = 5) -> Tensor:
    """The same rows, inside a wider buffer."""
    wide = torch.full((x.shape[0], left + x.shape[1] + right), float("nan"), dtype=x.dtype)
    view = wide[:, left : left + x.shape[1]]
    view.copy_(x)
    return view


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Compare with a bound per element; `expected` is float64."""
    assert torch.isfinite(actual).all()
    error = (actual.double() - expected).abs()
    limit = torch.as_tensor(bound, dtype=F64).expand_as(error)
    assert (error <= limit).all(), f"error {error.max():.3e} exceeds {limit[error > limit].min():.3e}"


def rounding(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of storing a result in `dtype`."""
    tiny = torch.finfo(dtype).tiny
    return unit(dtype) * expected.abs() + tiny


# --- the registry ---------------------------------------------------------------------------------------------------


def test_registry_loads_every_kernel() -> None:
    for name in OPERATORS:
        module = load(name)
        assert callable(module.launch) and callable(module.reference)


def test_registry_names_the_nearest_kernel() -> None:
    with pytest.raises(UnknownName, match="silu_mul"):
        load("silu_mult")


def test_registry_and_scratch_table_do_not_import_torch() -> None:
    code = "import sys, mosaic.kernels, mosaic.registrar.tiles; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scratch_table_names_only_kernels() -> None:
    assert set(SCRATCH) <= set(OPERATORS)


def test_an_implementation_is_loaded_by_name() -> None:
    module = load("attention", "cuda", "cudnn")
    assert module.module.__name__ == "mosaic.kernels.cuda.attention_cudnn" and callable(module.launch)
    with pytest.raises(UnknownName, match=r"implementation of attention on cuda 'cudn'. Did you mean 'cudnn'"):
        load("attention", "cuda", "cudn")
    for name, backend in (("linear", "cuda"), ("attention", "cpu")):
        with pytest.raises(UnknownName, match=f"implementation of {name} on {backend} 'cudnn'"):
            load(name, backend, "cudnn")


def test_attention_options_are_those_that_serve_the_step() -> None:
    step = {"seqs": 1, "head_size": 128, "dtype": "bfloat16"}
    assert attention_options("cuda", **step) == ("cudnn", "triton")
    assert attention_options("cuda", **step | {"dtype": "float16", "head_size": 8}) == ("cudnn", "triton")
    for other in ({"seqs": 2}, {"head_size": 136}, {"head_size": 100}, {"dtype": "float32"}):
        assert attention_options("cuda", **step | other) == ("triton",)
    assert attention_options("cpu", **step) == ()
    with pytest.raises(UnknownName, match="cuda"):
        attention_options("cudaa", **step)
    assert set(attention_options("cuda", **step)) == {way.name for way in contract("attention").on("cuda")}


# --- contracts whose widths a region over heads slices ---------------------------------------------------------------

HEADS = symbol("h")
TOKENS, KEYS, SPAN = (symbol(name) for name in ("t", "s", "span"))
BOUNDS = Spec((2,), "int32")


@pytest.mark.parametrize("heads", [HEADS, 8], ids=str)
def test_attention_infers_heads_from_widths(heads: Any) -> None:
    rule = contract("attention")
    q, k = Spec((TOKENS, heads * 4 * 128), "bfloat16"), Spec((KEYS, heads * 128), "bfloat16")
    attrs = {"head_size": 128, "scale": 1.0, "span": SPAN}
    assert rule.work(q, k, k, BOUNDS, **attrs).outputs == (q,)
    assert rule.work(q, k, k, BOUNDS, **attrs).flops == 4 * SPAN * TOKENS * 512 * heads
    assert rule.work(q, k, k, BOUNDS, **attrs).rate_rows == TOKENS * 4 * heads


@pytest.mark.parametrize(
    ("name", "specs", "attrs", "message"),
    [
        ("attention", ((5, 96), (7, 64)), {"head_size": 64}, r"operand 'q' is .*, expected bfloat16\[5, G\*1\*64\]"),
        ("attention", ((5, 64), (7, 96)), {"head_size": 64}, r"operand 'k' is .*, expected bfloat16\[7, K\*64\]"),
        ("attention", ((5, 192), (7, 128)), {"head_size": 64}, r"operand 'q' is .*, expected bfloat16\[5, G\*2\*64\]"),
        (
            "attention",
            ((5, 64 * HEADS), (7, 128)),
            {"head_size": 64},
            r"operand 'q' is .*, expected bfloat16\[5, G\*2\*64\]",
        ),
        ("rotary", ((5, 96),), {"head_size": 64}, r"operand 'x' is .*, expected bfloat16\[5, N\*64\]"),
        ("rotary", ((5, 32),), {"head_size": 32}, "inv_freq rotates 64 dims of 32"),
        ("rotary", ((5, 64),), {"head_size": 64, "factor": 0.0}, "factor must be positive, got 0.0"),
        (
            "rotary own",
            ((5, 64),),
            {"head_size": 64},
            "inv_freq has 0 axes of sequences; give sequences with one, else none",
        ),
        ("head_norm", ((5, 96),), {"eps": 1e-5}, r"operand 'x' is .*, expected bfloat16\[5, N\*64\]"),
    ],
)
def test_widths_that_are_no_heads_are_refused(name: str, specs: Any, attrs: dict[str, Any], message: str) -> None:
    x, *rest = (Spec(shape, "bfloat16") for shape in specs)
    others = {
        "attention": lambda: (rest[0], rest[0], BOUNDS),
        "rotary": lambda: (Spec((5,), "int32"), Spec((32,), "float32")),
        "rotary own": lambda: (Spec((5,), "int32"), Spec((32,), "float32"), Spec((5,), "int32")),
        "head_norm": lambda: (Spec((64,), "bfloat16"),),
    }[name]()
    more = {"scale": 1.0, "span": SPAN} if name == "attention" else {}
    with pytest.raises(GraphError, match=message):
        contract(name.split()[0]).work(x, *others, **attrs, **more)


def test_products_tell_their_columns_and_a_copy_its_bytes() -> None:
    x, weight = Spec((TOKENS, 256), "bfloat16"), Spec((128 * HEADS, 256), "bfloat16")
    assert contract("linear").work(x, weight).rate_columns == 128 * HEADS
    assert contract("linear_add").work(x, weight, Spec((TOKENS, 128 * HEADS), "bfloat16")).rate_columns == 128 * HEADS
    experts = Spec((4, 512, 256), "bfloat16")
    assert contract("grouped_linear").work(x, experts, Spec((5,), "int64")).rate_columns == 512
    assert contract("rms_norm").work(x, Spec((256,), "bfloat16"), eps=1e-5).rate_columns == 1
    copy = contract("copy")
    assert copy.work(x).outputs == (x,) and copy.work(x).flops == 0 and copy.rate == "memory"
    assert copy.work(x).bytes == 4 * 256 * TOKENS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scratch_is_a_polynomial_of_sliced_widths(dtype: str) -> None:
    def shapes(rows: Any, heads: Any) -> dict[str, dict[str, tuple[Any, ...]]]:
        return {
            "head_norm": {"x": (rows, 64 * heads), "weight": (64,)},
            "rotary": {"x": (rows, 64 * heads), "inv_freq": (32,)},
            "linear": {"x": (rows, 96), "weight": (64 * heads, 96)},
            "linear_add": {"x": (rows, 64 * heads), "weight": (96, 64 * heads)},
            "attention": {"q": (rows, 64 * heads), "k": (7, 64 * heads)},
        }

    for name, symbolic in shapes(TOKENS, HEADS).items():
        dtypes = dict.fromkeys((*symbolic, "q"), dtype)
        formula = sympy.sympify(SCRATCH[name](symbolic, dtypes, {"head_size": 64}))
        assert formula.is_polynomial(TOKENS, HEADS)
        assert name not in ("linear", "linear_add") or not formula.free_symbols  # tiles of one size whatever the widths
        for rows, heads in ((1, 1), (300, 4)):
            exact = SCRATCH[name](shapes(rows, heads)[name], dtypes, {"head_size": 64})
            assert formula.subs({TOKENS: rows, HEADS: heads}) == exact


# --- dense ops ------------------------------------------------------------------------------------------------------

SHAPES = [
    (1, 1, 1),
    (1, 64, 37),
    (7, 13, 5),
    (37, 300, 129),
    (257, 64, 1),
    (300, 17, 280),
    (258, 515, 514),
    (513, 600, 1100),
]


def linear_case(
    tokens: int,
    inner: int,
    outer: int,
    dtype: torch.dtype,
    bias: bool = False,
    wrap: Callable[[Tensor], Tensor] = lambda x: x,
) -> Case:
    operands = {"x": wrap(randn(tokens, inner, dtype=dtype)), "weight": wrap(randn(outer, inner, dtype=dtype, seed=1))}
    if bias:
        operands["bias"] = randn(outer, dtype=dtype, seed=2)
    return Case("linear", operands, {"y": torch.empty(tokens, outer, dtype=dtype)})


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_linear(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool) -> None:
    case = linear_case(*shape, dtype, bias)
    case.launch()
    magnitude = case.operands["x"].double().abs() @ case.operands["weight"].double().abs().T
    if bias:
        magnitude += case.operands["bias"].double().abs()
    expected = case.reference()
    assert_within(case.outputs["y"], expected, gamma(shape[1] + 1, dtype) * magnitude + rounding(expected, dtype))


@pytest.mark.parametrize("shape", [(37, 300, 129), (513, 600, 1100)], ids=["kept", "made anew"])
def test_a_bound_product_runs_again(shape: tuple[int, int, int]) -> None:
    case = linear_case(*shape, BF16)
    run, y = load("linear").bind(**case.operands, **case.outputs, scratch=case.scratch()), case.outputs["y"]
    run()
    first = y.clone()
    y.zero_()
    run()
    assert torch.equal(y, first)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_linear_takes_row_strided_operands(dtype: torch.dtype) -> None:
    plain, padded = linear_case(37, 64, 29, dtype), linear_case(37, 64, 29, dtype, wrap=strided)
    padded.outputs["y"] = strided(padded.outputs["y"])
    plain.launch()
    padded.launch()
    magnitude = plain.operands["x"].double().abs() @ plain.operands["weight"].double().abs().T
    assert_within(
        padded.outputs["y"], plain.reference(), gamma(65, dtype) * magnitude + rounding(plain.reference(), dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_add(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, inner, outer = shape
    x, weight, y = (
        randn(tokens, inner, dtype=dtype),
        randn(outer, inner, dtype=dtype, seed=1),
        randn(tokens, outer, dtype=dtype, seed=2),
    )
    case = Case("linear_add", {"x": x, "weight": weight, "y": y})
    expected = case.reference()
    magnitude = x.double().abs() @ weight.double().abs().T + y.double().abs()
    case.launch()
    assert_within(y, expected, gamma(inner + 1, dtype) * magnitude + rounding(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("counts", [(1,), (0, 5, 0, 2), (3, 0, 0, 0, 290)], ids=str)
def test_grouped_linear(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, inner, outer = sum(counts), 19, 23
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    x, weight = randn(rows, inner, dtype=dtype), randn(len(counts), outer, inner, dtype=dtype, seed=1)
    case = Case(
        "grouped_linear", {"x": x, "weight": weight, "offsets": offsets}, {"y": torch.empty(rows, outer, dtype=dtype)}
    )
    case.launch()
    expected = case.reference()
    magnitude = case.reference(x=x.double().abs(), weight=weight.double().abs())
    assert_within(case.outputs["y"], expected, gamma(inner + 1, dtype) * magnitude + rounding(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (300, 96), (9, 40000)], ids=str)
@pytest.mark.parametrize("aliased", [False, True], ids=["", "y=x"])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, aliased: bool) -> None:
    x, weight = strided(randn(*shape, dtype=dtype, scale=3)), randn(shape[1], dtype=dtype, seed=1)
    case = Case(
        "rms_norm",
        {"x": x, "weight": weight},
        {} if aliased else {"y": torch.empty(*shape, dtype=dtype)},
        {"eps": 1e-5},
    )
    expected = case.reference()
    if aliased:
        load("rms_norm").launch(x=x, weight=weight, y=x, eps=1e-5, scratch=case.scratch())
    else:
        case.launch()
    # the sum of D squares under a square root, and a handful of roundings
    bound = gamma(shape[1] // 2 + 10, dtype) * expected.abs() + rounding(expected, dtype)
    assert_within(x if aliased else case.outputs["y"], expected, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1, 2), (37, 4, 16), (600, 3, 128)], ids=str)
def test_head_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, heads, size = shape
    x, weight = strided(randn(tokens, heads * size, dtype=dtype)), randn(size, dtype=dtype, seed=1)
    case = Case("head_norm", {"x": x, "weight": weight}, attrs={"eps": 1e-6})
    expected = case.reference()
    case.launch()
    assert_within(x, expected, gamma(size // 2 + 10, dtype) * expected.abs() + rounding(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (37, 4, 16, 16), (530, 3, 128, 64)], ids=str)
@pytest.mark.parametrize(("bases", "factor"), [((500000.0,), 1.0), ((500000.0,), 1.2), ((1e4, 5e5, 3e6), 0.7)], ids=str)
def test_rotary(shape: tuple[int, int, int, int], bases: tuple[float, ...], factor: float, dtype: torch.dtype) -> None:
    """One base for all tokens, or a row of frequencies for each of several sequences."""
    tokens, heads, size, rotated = shape
    x = strided(randn(tokens, heads * size, dtype=dtype))
    positions = torch.arange(tokens, dtype=torch.int32) * 241
    inv_freq = torch.stack([b ** (-torch.arange(0, rotated, 2, dtype=F64) / rotated) for b in bases]).to(F32)
    operands = {"x": x, "positions": positions, "inv_freq": inv_freq if len(bases) > 1 else inv_freq[0]}
    number = torch.arange(tokens) * len(bases) // tokens
    if len(bases) > 1:
        operands["sequences"] = number.to(torch.int32)
    case = Case("rotary", operands, attrs={"head_size": size, "factor": factor})
    angle = (positions.double()[:, None] * inv_freq[number].double()).repeat(1, 2)[:, None, :]
    turning = x.double().view(tokens, heads, size)[..., :rotated].clone()
    first, second = turning.chunk(2, dim=2)
    turned = turning * angle.cos() + torch.cat([-second, first], dim=2) * angle.sin()
    expected = x.double().view(tokens, heads, size).clone()
    expected[..., :rotated] = factor * turned
    expected = expected.view(tokens, -1)
    torch.testing.assert_close(case.reference(), expected, rtol=1e-9, atol=1e-9)
    pair = turning.abs() + turning.abs().roll(rotated // 2, dims=2)
    bound = torch.zeros(tokens, heads, size, dtype=F64)
    # the angle is rounded once in float32, cosine and sine to 2 ulp, then three products and a sum
    bound[..., :rotated] = factor * pair * (unit(F32) * (angle + 9))
    case.launch()
    assert_within(x, expected, bound.view(tokens, -1) + rounding(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate, up = strided(randn(37, 41, dtype=dtype, scale=4)), randn(37, 41, dtype=dtype, seed=1)
    case = Case("silu_mul", {"gate": gate, "up": up})
    expected = case.reference()
    case.launch()
    # silu in the compute dtype, rounded to the dtype, then the product rounded again
    assert_within(gate, expected, (3 * unit(dtype) + gamma(8, dtype)) * expected.abs() + torch.finfo(dtype).tiny * 8)


# --- attention ------------------------------------------------------------------------------------------------------

ATTENTION = [
    ((1,), 1, 1, 2),
    ((5, 1, 31), 4, 2, 16),
    ((257,), 2, 1, 8),  # one more than a query tile
    ((3, 0, 1030, 7), 3, 3, 5),  # an empty sequence; two key tiles, or one of fewer rows that has all keys
    ((2100,), 2, 2, 4),  # three key tiles
]


def attention_case(lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Case:
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    operands = {
        "q": strided(randn(tokens, heads * size, dtype=dtype, scale=2)),
        "k": strided(randn(tokens, kv_heads * size, dtype=dtype, seed=1, scale=2)),
        "v": strided(randn(tokens, kv_heads * size, dtype=dtype, seed=2)),
        "cu_seqlens": cu_seqlens,
    }
    attrs = {"head_size": size, "scale": size**-0.5}
    return Case("attention", operands, {"y": torch.empty(tokens, heads * size, dtype=dtype)}, attrs)


def attention_bound(case: Case, expected: Tensor) -> Tensor:
    """Bound the error: e^(2 d) - 1 for scores off by d, S roundings in each of two sums, applied to the sums of |v|."""
    dtype, attrs, wide = case.operands["q"].dtype, case.attrs, {n: t.double() for n, t in case.operands.items()}
    keys = int(case.operands["cu_seqlens"].diff().max())
    longest = [float(wide[name].unflatten(1, (-1, attrs["head_size"])).norm(dim=2).max()) for name in ("q", "k")]
    largest = longest[0] * longest[1] * attrs["scale"]
    delta = gamma(attrs["head_size"] + 4, dtype) * largest
    magnitude = case.reference(v=wide["v"].abs())
    return (2.1 * delta + gamma(2 * keys + 40, dtype)) * magnitude + rounding(expected, dtype)


@pytest.mark.some
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", ATTENTION, ids=str)
def test_attention(shape: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype) -> None:
    case = attention_case(*shape, dtype)
    case.launch()
    expected = case.reference()
    assert_within(case.outputs["y"], expected, attention_bound(case, expected))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_attention_may_overwrite_its_queries(dtype: torch.dtype) -> None:
    case = attention_case((3, 600), 4, 2, 8, dtype)
    case.launch()
    q = case.operands["q"]
    load("attention").launch(**case.operands, **case.attrs, y=q, scratch=case.scratch())
    assert torch.equal(q, case.outputs["y"])


def test_attention_of_a_slice_of_rows_knows_where_it_starts() -> None:
    case = attention_case((50, 3, 80), 2, 1, 8, F32)
    case.launch()
    for start, end in ((0, 20), (20, 52), (52, 133)):
        y = torch.full((end - start, 16), float("nan"))
        operands = case.operands | {"q": case.operands["q"][start:end]}
        load("attention").launch(**operands, **case.attrs, y=y, row_start=start, scratch=case.scratch())
        expected = case.reference()[start:end]
        assert_within(y, expected, attention_bound(case, case.reference())[start:end])


def test_attention_survives_scores_that_overflow_exp() -> None:
    case = attention_case((700,), 1, 1, 4, F32)
    case.operands["q"].mul_(1000)
    case.launch()
    assert torch.isfinite(case.outputs["y"]).all()


# --- rows and statistics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_embedding_and_gather_rows_copy_exactly(dtype: torch.dtype) -> None:
    table, ids = strided(randn(31, 13, dtype=dtype)), torch.tensor([0, 30, 7, 7, 1])
    for kernel, operands in (("embedding", {"ids": ids, "table": table}), ("gather_rows", {"x": table, "rows": ids})):
        case = Case(kernel, operands, {"y": torch.empty(5, 13, dtype=dtype)})
        case.launch()
        assert torch.equal(case.outputs["y"], table[ids])
    positions = torch.arange(100, 131, dtype=torch.int32)
    case = Case("gather_rows", {"x": positions, "rows": ids}, {"y": torch.empty(5, dtype=torch.int32)})
    case.launch()
    assert case.outputs["y"].tolist() == [100, 130, 107, 107, 101]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1,), (37, 13), (3, 5, 7)], ids=str)
def test_copy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    case = Case("copy", {"x": strided(x) if len(shape) == 2 else x}, {"y": torch.empty(shape, dtype=dtype)})
    case.launch()
    assert torch.equal(case.outputs["y"], x)
    with pytest.raises(GraphError, match="copy: operand 'y' is"):
        load("copy").launch(x=x, y=torch.empty(shape[0] + 1, dtype=dtype))


def test_embedding_refuses_ids_outside_the_table() -> None:
    case = Case("embedding", {"ids": torch.tensor([31]), "table": randn(31, 4)}, {"y": torch.empty(1, 4)})
    with pytest.raises(IndexError):
        case.launch()


@pytest.mark.parametrize("aliased", [False, True], ids=["", "y=rows"])
def test_shift_rows(aliased: bool) -> None:
    rows = torch.tensor([0, 1, 4, 5, 6, 11, 12])
    case = Case("shift_rows", {"rows": rows, "cu_seqlens": torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)})
    assert case.reference().tolist() == [0, 0, 3, 5, 5, 10, 12]
    case.outputs = {"y": torch.empty_like(rows)}
    case.launch()
    expected = case.outputs["y"].tolist()
    assert expected == [0, 0, 3, 5, 5, 10, 12]
    if aliased:
        load("shift_rows").module.launch(**case.operands, y=rows, scratch=case.scratch())
        assert rows.tolist() == expected


STATISTICS = ("maximum", "second", "logsumexp", "entropy")


def statistics_outputs(rows: int) -> dict[str, Tensor]:
    return {"token": torch.empty(rows, dtype=torch.int64)} | {name: torch.empty(rows) for name in STATISTICS}


def assert_statistics(case: Case, logits: Tensor, delta: Tensor) -> None:
    """`logits` in float64; `delta` [C] bounds the error of each logit before the statistics."""
    expected, actual = case.reference(), case.outputs
    rows = torch.arange(logits.shape[0])
    assert (logits[rows, actual["token"]] >= expected["maximum"] - 2 * delta).all()
    clear = expected["maximum"] - expected["second"] > 2 * delta
    assert torch.equal(actual["token"][clear], expected["token"][clear])
    g = gamma(logits.shape[1] + 20, F32)
    for name in ("maximum", "second", "logsumexp"):
        if name == "second" and logits.shape[1] == 1:
            assert (actual[name] == float("-inf")).all()
            continue
        own = g if name == "logsumexp" else 0.0
        assert_within(actual[name], expected[name], delta + own + 2 * unit(F32) * expected[name].abs())
    # |dH| <= 2 H d to first order; the sums carry g relative, the shifted logits one rounding each
    spread = (
        expected["maximum"] - (logits - expected["logsumexp"][:, None]).exp().mul(logits).nan_to_num(0).sum(1)
    ).abs()
    assert_within(actual["entropy"], expected["entropy"], 2.1 * delta * expected["entropy"] + 3 * g * (1 + spread))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1025), (131, 1024), (7, 3001)], ids=str)
def test_row_stats(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = strided(randn(*shape, dtype=dtype, scale=5))
    before = logits.clone()
    case = Case("row_stats", {"logits": logits}, statistics_outputs(shape[0]))
    case.launch()
    assert torch.equal(logits, before)
    wide = logits.double()
    assert_statistics(case, wide, unit(F32) * wide.abs().amax(1))


def test_statistics_of_ties_and_minus_infinity() -> None:
    logits = torch.zeros(4, 2500)
    logits[0, [7, 1500, 2400]] = 2.0  # a tie across tiles
    logits[1, 1:] = float("-inf")  # one candidate
    logits[2] = float("-inf")
    logits[2, [1700, 2300]] = 1.0  # nothing in the first tile but -inf
    case = Case("row_stats", {"logits": logits}, statistics_outputs(4))
    case.launch()
    out = case.outputs
    assert out["token"].tolist() == [7, 0, 1700, 0]
    assert out["maximum"].tolist() == [2.0, 0.0, 1.0, 0.0]
    assert out["second"].tolist() == [2.0, float("-inf"), 1.0, 0.0]
    assert out["entropy"][1] == 0.0 and out["entropy"][2] == pytest.approx(0.693147, abs=1e-6)
    assert out["entropy"][3] == pytest.approx(7.824046, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 1025), (129, 33, 2048), (5, 64, 3001)], ids=str)
def test_unembed_stats(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, hidden, vocabulary = shape
    x, weight = strided(randn(rows, hidden, dtype=dtype)), randn(vocabulary, hidden, dtype=dtype, seed=1)
    case = Case("unembed_stats", {"x": x, "weight": weight}, statistics_outputs(rows))
    case.launch()
    magnitude = (x.double().abs() @ weight.double().abs().T).amax(1)
    # float64 operands are rounded to float32 once each
    assert_statistics(case, x.double() @ weight.double().T, gamma(hidden + 3, F32) * magnitude)


@pytest.mark.parametrize("aliased", [False, True], ids=["", "y=maximum"])
def test_confidence(aliased: bool) -> None:
    maximum, logsumexp = randn(37), randn(37, seed=1).abs() + 3
    case = Case("confidence", {"maximum": maximum, "logsumexp": logsumexp}, {"y": torch.empty(37)})
    expected = case.reference()
    bound = expected * 1.01 * unit(F32) * ((maximum.double() - logsumexp.double()).abs() + 4)
    case.launch()
    assert_within(case.outputs["y"], expected, bound)
    if aliased:
        load("confidence").module.launch(maximum=maximum, logsumexp=logsumexp, y=maximum)
        assert torch.equal(maximum, case.outputs["y"])


# --- mixture of experts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (37, 16, 8, 2), (300, 33, 64, 8)], ids=str)
def test_moe_route(shape: tuple[int, int, int, int], normalize: bool, dtype: torch.dtype) -> None:
    rows, hidden, experts, top_k = shape
    # inputs on a coarse grid keep every product exact, so the order of the experts has to be too
    x = (randn(rows, hidden) * 4).round().div(8).to(dtype)
    weight = (randn(experts, hidden, seed=1) * 4).round().div(8).to(dtype)
    outputs = {"scores": torch.empty(rows, top_k, dtype=dtype), "experts": torch.empty(rows, top_k, dtype=torch.int64)}
    case = Case("moe_route", {"x": x, "weight": weight}, outputs, {"top_k": top_k, "normalize": normalize})
    case.launch()
    expected = case.reference()
    assert torch.equal(outputs["experts"], expected["experts"])
    bound = gamma(2 * experts + 40, dtype) * expected["scores"] + rounding(expected["scores"], dtype)
    assert_within(outputs["scores"], expected["scores"], bound)


def router_case(rows: int, hidden: int, experts: int, dtype: torch.dtype, *, bias: bool, **attrs: Any) -> Case:
    """A router by sigmoid; inputs and bias lie on a coarse grid, so that experts tie and the order is exact."""
    given = {
        "x": (randn(rows, hidden) * 4).round().div(16).to(dtype),
        "weight": (randn(experts, hidden, seed=1) * 4).round().div(16).to(dtype),
    } | ({"bias": (randn(experts, seed=2) * 4).round().div(8)} if bias else {})
    shape = rows, int(attrs["top_k"])
    outputs = {"scores": torch.empty(shape, dtype=dtype), "experts": torch.empty(shape, dtype=torch.int64)}
    return Case("moe_route", given, outputs, {"scoring": "sigmoid", **attrs})


def router_bound(expected: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """A sigmoid's exponential of an exact logit, the sum, the division and the scale."""
    return gamma(2 * top_k + 40, dtype) * expected + rounding(expected, dtype)


ROUTERS: list[dict[str, Any]] = [
    {"bias": False, "top_k": 3, "normalize": True},
    {"bias": True, "top_k": 3, "normalize": False, "scale": 0.5},
    {"bias": True, "top_k": 3, "normalize": True, "groups": 4, "top_groups": 2, "scale": 2.5},
    {"bias": False, "top_k": 6, "normalize": True, "groups": 6, "top_groups": 1},
    {"bias": True, "top_k": 2, "normalize": False, "scoring": "softmax", "groups": 3, "top_groups": 3},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("attrs", ROUTERS, ids=str)
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_moe_route_by_sigmoid_bias_and_groups(rows: int, attrs: dict[str, Any], dtype: torch.dtype) -> None:
    case = router_case(rows, 33, 36, dtype, **attrs)
    case.launch()
    expected = case.reference()
    assert torch.equal(case.outputs["experts"], expected["experts"])
    bound = router_bound(expected["scores"], 36 if attrs.get("scoring") else attrs["top_k"], dtype)
    assert_within(case.outputs["scores"], expected["scores"], bound)


def test_a_bias_below_every_score_still_chooses_within_the_top_groups() -> None:
    """Scores + bias may be negative: what is outside the chosen groups, or taken, has to be lower still."""
    case = router_case(7, 16, 8, F32, bias=True, top_k=4, normalize=False, groups=4, top_groups=2)
    case.operands["bias"] = torch.tensor([-9.0, -9.0, -3.0, -3.0, -9.0, -9.0, -4.0, -4.0])
    case.launch()
    assert case.outputs["experts"].sort(dim=1).values.tolist() == [[2, 3, 6, 7]] * 7


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"scoring": "tanh"}, "softmax or sigmoid, got 'tanh'"),
        ({"groups": 3, "top_groups": 1}, "8 experts do not divide into 3 groups"),
        ({"groups": 8, "top_groups": 1}, "groups of 1 expert have no two best"),
        ({"groups": 4, "top_groups": 5}, r"top_groups must be in 1\.\.4, got 5"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "1 groups hold 2 experts, top_k is 3"),
        ({"top_groups": 2}, "top_groups is 2, but there are no groups"),
        ({"bias": Spec((7,), "float32")}, r"operand 'bias' is .*, expected float32\[8\]"),
        ({"bias": Spec((8,), "bfloat16")}, r"operand 'bias' is .*, expected float32\[8\]"),
    ],
)
def test_routers_that_cannot_be_are_refused(attrs: dict[str, Any], message: str) -> None:
    x, weight = Spec((TOKENS, 16), "bfloat16"), Spec((8, 16), "bfloat16")
    with pytest.raises(GraphError, match=message):
        contract("moe_route").work(x, weight, attrs.pop("bias", None), **{"top_k": 2, "normalize": True} | attrs)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 2, 4), (333, 8, 64)], ids=str)
def test_moe_sort_and_gather(shape: tuple[int, int, int]) -> None:
    rows, top_k, experts = shape
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    outputs = {
        "order": torch.empty(rows * top_k, dtype=torch.int64),
        "offsets": torch.empty(experts + 1, dtype=torch.int64),
    }
    case = Case("moe_sort", {"experts": chosen}, outputs, {"num_experts": experts})
    case.launch()
    expected = case.reference()
    assert torch.equal(outputs["order"], expected["order"]) and torch.equal(outputs["offsets"], expected["offsets"])
    x = randn(rows, 7)
    gather = Case(
        "moe_gather", {"x": x, "order": outputs["order"]}, {"y": torch.empty(rows * top_k, 7)}, {"top_k": top_k}
    )
    gather.launch()
    assert torch.equal(gather.outputs["y"], gather.reference().float())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 2, 13), (300, 8, 32)], ids=str)
def test_moe_combine(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, top_k, hidden = shape
    order = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(0))
    y, scores, x = (
        randn(rows * top_k, hidden, dtype=dtype),
        randn(rows, top_k, dtype=dtype, seed=1),
        randn(rows, hidden, dtype=dtype, seed=2),
    )
    case = Case("moe_combine", {"y": y, "order": order, "scores": scores, "x": x})
    expected = case.reference()
    magnitude = case.reference(y=y.double().abs(), scores=scores.double().abs(), x=x.double().abs())
    case.launch()
    assert_within(x, expected, gamma(2 * top_k + 1, dtype) * magnitude + rounding(expected, dtype))


# --- memory ---------------------------------------------------------------------------------------------------------


@cache
def memory_cases(dtype: torch.dtype) -> list[Case]:
    """A case per kernel, larger than one tile; made once for all tests."""
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    experts = torch.rand(300, 8, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :2].contiguous()
    offsets = torch.tensor([0, 100, 100, 600])
    index = {"order": torch.empty(600, dtype=torch.int64), "offsets": torch.empty(9, dtype=torch.int64)}
    route = {"scores": torch.empty(300, 2, dtype=dtype), "experts": torch.empty(300, 2, dtype=torch.int64)}
    x, y = randn(300, 64, dtype=dtype), torch.empty(300, 64, dtype=dtype)
    positions, inv_freq = (
        torch.arange(300, dtype=torch.int32),
        torch.rand(8, generator=torch.Generator().manual_seed(0)),
    )
    vector = torch.rand(300, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(300)
    return [
        attention_case((3, 1100), 4, 2, 16, dtype),
        attention_case((2100,), 1, 1, 16, dtype),
        Case("confidence", {"maximum": vector, "logsumexp": vector.clone()}, {"y": torch.empty(300)}),
        Case("copy", {"x": x}, {"y": y}),
        Case("embedding", {"ids": rows, "table": randn(300, 64, dtype=dtype)}, {"y": y}),
        Case("gather_rows", {"x": x, "rows": rows}, {"y": y}),
        Case(
            "grouped_linear",
            {"x": randn(600, 64, dtype=dtype), "weight": randn(3, 530, 64, dtype=dtype), "offsets": offsets},
            {"y": torch.empty(600, 530, dtype=dtype)},
        ),
        Case("head_norm", {"x": x.clone(), "weight": randn(16, dtype=dtype)}, attrs={"eps": 1e-6}),
        linear_case(300, 270, 530, dtype, bias=True),
        linear_case(513, 600, 1100, dtype),
        linear_case(1, 64, 290, dtype),
        Case("linear_add", {"x": x, "weight": randn(64, 64, dtype=dtype), "y": y.zero_()}),
        Case(
            "moe_combine",
            {"y": randn(600, 64, dtype=dtype), "order": order, "scores": randn(300, 2, dtype=dtype), "x": x.clone()},
        ),
        Case(
            "minimum",
            {"x": rows[:7].int(), "other": torch.tensor([3, 9, 1, 0, 5, 2, 8], dtype=torch.int32)},
            {"y": torch.empty(7, dtype=torch.int32)},
        ),
        Case("moe_gather", {"x": x, "order": order}, {"y": torch.empty(600, 64, dtype=dtype)}, {"top_k": 2}),
        Case("moe_route", {"x": x, "weight": randn(8, 64, dtype=dtype)}, route, {"top_k": 2, "normalize": True}),
        router_case(300, 64, 8, dtype, bias=True, top_k=2, normalize=True, groups=4, top_groups=2, scale=2.5),
        Case("moe_sort", {"experts": experts}, index, {"num_experts": 8}),
        Case("rms_norm", {"x": x, "weight": randn(64, dtype=dtype)}, {"y": y.clone()}, {"eps": 1e-5}),
        Case(
            "rotary",
            {"x": x.clone(), "positions": positions, "inv_freq": inv_freq},
            attrs={"head_size": 16},
        ),
        Case(
            "rotary",
            {"x": x.clone(), "positions": positions, "inv_freq": inv_freq.repeat(2, 1), "sequences": positions // 150},
            attrs={"head_size": 16, "factor": 1.5},
        ),
        Case("row_stats", {"logits": randn(300, 1500, dtype=dtype)}, statistics_outputs(300)),
        Case(
            "shift_rows",
            {"rows": rows, "cu_seqlens": torch.tensor([0, 100, 300], dtype=torch.int32)},
            {"y": torch.empty(300, dtype=torch.int64)},
        ),
        Case("silu_mul", {"gate": x.clone(), "up": y.clone()}),
        Case("unembed_stats", {"x": x, "weight": randn(1500, 64, dtype=dtype)}, statistics_outputs(300)),
    ]


def test_memory_cases_cover_every_kernel() -> None:
    assert {case.kernel for case in memory_cases(F32)} == set(OPERATORS) - {
        "kv_attention",  # test_kv
        "kv_store",
        "resume_rows",  # test_resume_rows
        "joined_attention",  # test_prefix_reuse_kernels
        "prefix_attention",
        "query_change",
        "token_importance",  # test_token_importance
        "evict_tokens",  # test_evict_tokens
        "focus_requests",  # test_focus_requests
        "note_focus",
        "key_mass",  # test_selection_of_keys
        "prefix_logsumexp",  # test_selection_of_keys
        "selected_attention",  # test_selected_attention
        "top_keys",  # test_selection_of_keys
        "page_bounds",  # test_pages
        "page_extrema",
        "score_keys",  # test_sparse_keys_kernels
        "select_keys",
        "pack_keys",
        "bound_parts",  # test_packed_attention
        "packed_attention",
        "key_change",  # test_key_change
        "row_sample",  # test_sampling
        "unembed_sample",
        "guide",  # test_selection
        "perturb_score",
        "replace_rows",
        "row_nucleus",
        "row_score",
        "transfer",
        "read_canvas",  # test_canvas_kernels
        "write_canvas",
        "norm_gate_up",  # test_few_rows
        "norm_qkv",
        "rotary_store",
        "split_linear_add",
        "zeros",
        "advance_requests",  # test_request_kernels
        "draw_requests",
        "keep_requests",
        "pack_requests",
        "place_requests",
        "reuse_requests",
        "select_requests",
    }


@pytest.mark.some
@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
@pytest.mark.parametrize("kernel", OPERATORS)
def test_kernels_allocate_nothing(kernel: str, dtype: torch.dtype) -> None:
    for case in memory_cases(dtype):
        if case.kernel == kernel:
            check_allocates_nothing(case)


def check_allocates_nothing(case: Case) -> None:
    launch, scratch = load(case.kernel).launch, case.scratch()
    call = lambda: launch(**case.operands, **case.outputs, **case.attrs, scratch=scratch)  # noqa: E731
    assert allocated_bytes(call) == 0, case.kernel
    with StorageWatch() as watch:
        call()
    given = [*case.operands.values(), *case.outputs.values(), *([] if scratch is None else [scratch])]
    assert watch.pointers <= storages(given), case.kernel


def test_the_allocation_counter_counts() -> None:
    assert allocated_bytes(lambda: torch.ones(100) + 1) >= 800


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_scratch_sizes_agree_with_symbolic_ones(dtype: torch.dtype) -> None:
    for case in memory_cases(dtype):
        if case.kernel not in SCRATCH:
            continue
        everything = case.operands | case.outputs
        varying = [t.shape[0] for n, t in everything.items() if n not in ("weight", "bias", "table", "inv_freq")]
        symbols = {size: symbol(f"n{size}") for size in varying}
        shapes = {n: tuple(t.shape) for n, t in everything.items()}
        symbolic = {
            n: s if n in ("weight", "bias", "table", "inv_freq") else (symbols[s[0]], *s[1:]) for n, s in shapes.items()
        }
        dtypes = {n: name_of(t.dtype) for n, t in everything.items()}
        function = SCRATCH[case.kernel]
        formula = sympy.sympify(function(symbolic, dtypes, case.attrs))
        assert formula.subs({symbol: size for size, symbol in symbols.items()}) == function(shapes, dtypes, case.attrs)


def test_a_scratch_buffer_that_is_too_small_is_refused_with_numbers() -> None:
    case = attention_case((5,), 1, 1, 2, F32)
    with pytest.raises(RuntimeMemoryError, match=r"attention: scratch of 100 bytes, \d[\d,]+ needed"):
        load("attention").launch(
            **case.operands, **case.outputs, **case.attrs, scratch=torch.empty(100, dtype=torch.uint8)
        )


def test_wrong_shapes_and_strides_are_refused() -> None:
    with pytest.raises(GraphError, match=r"linear: operand 'y' is float32\[3, 4\], expected float32\[3, 5\]"):
        load("linear").launch(x=torch.ones(3, 2), weight=torch.ones(5, 2), y=torch.empty(3, 4))
    table = {"positions": torch.zeros(3, dtype=torch.int32), "inv_freq": torch.ones(2)}
    with pytest.raises(GraphError, match=r"rotary: operand 'x' is float32\[3, 9\], expected float32\[3, N\*4\]"):
        load("rotary").launch(x=torch.ones(3, 9), **table, head_size=4)
    case = attention_case((5,), 3, 2, 4, F32)
    with pytest.raises(GraphError, match=r"attention: operand '.' is float32\[5, 12\], expected float32\[5, G\*2\*4\]"):
        case.launch()
    with pytest.raises(GraphError, match="stride"):
        load("silu_mul").launch(gate=torch.ones(4, 4), up=torch.ones(4, 4).t())
