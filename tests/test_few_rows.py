"""The fused kernels of small steps: norm and projections, rotation and store, split products, against float64.

On the CPU and in Triton alike; what a row comes to depends on no other row, nor on what was launched before.
"""

from __future__ import annotations

import importlib.util
import random
from itertools import product
from typing import Any

import pytest
import torch
from test_kernels import (
    BF16,
    DTYPES,
    F32,
    Case,
    assert_within,
    check_allocates_nothing,
    gamma,
    name_of,
    randn,
    rounding,
    strided,
    unit,
)
from test_kv import STORED, store_case
from test_parity_block import SDAR
from torch import Tensor

from mosaic.errors import GraphError, RuntimeMemoryError
from mosaic.kernels import load
from mosaic.models import load as load_model
from mosaic.models.parts import KEPT, KV, NO_HEAD, Commit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner import Plan, Planner, Request
from mosaic.registrar.few_rows import split_count, tile_count

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")

Bounds = dict[str, tuple[Tensor, Tensor]]
"""By output, what is expected in float64, and the bound of the error."""


def launched(case: Case, backend: str, **more: Any) -> dict[str, Tensor]:
    """The writes and updates of a launch."""
    if backend == "cuda":
        return run(case, DEVICE, **more)
    case.launch()
    return case.operands | case.outputs


def check(case: Case, bounds: Bounds, backend: str) -> None:
    found = launched(case, backend)
    for name, (expected, bound) in bounds.items():
        assert_within(found[name], expected, bound)
    if "arrivals" in found:
        assert not found["arrivals"].any()


def normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.pow(2).mean(1, keepdim=True) + eps) * norm.double()


def product_error(h: Tensor, weight: Tensor, dtype: torch.dtype, magnitude: Tensor | float = 0.0) -> Tensor:
    """Tolerance of h @ weight.T with h rounded to the dtype, and its norm in the compute dtype."""
    sums = h.abs() @ weight.double().abs().T
    return 1.01 * unit(dtype) * sums + gamma(3 * h.shape[1] + 20, dtype) * (sums + magnitude)


def norm_qkv(rows: int, inner: int, q: int, k: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[Case, Bounds]:
    x = strided(randn(rows, inner, dtype=dtype, scale=3))
    operands = {"x": x, "norm": randn(inner, dtype=dtype, seed=1)}
    columns = {"q": q, "k": k, "v": k}
    for seed, (name, width) in enumerate(columns.items(), 2):
        operands[f"{name}_weight"] = strided(randn(width, inner, dtype=dtype, seed=seed), 8, 8)
    operands["arrivals"] = torch.zeros(tile_count(q, k, k) + 1, dtype=torch.int32)
    if bias:
        operands |= {f"{name}_bias": randn(width, dtype=dtype, seed=ord(name)) for name, width in columns.items()}
    outputs = {name: strided(torch.empty(rows, width, dtype=dtype)) for name, width in columns.items()}
    h, bounds = normed(x, operands["norm"], 0.5), {}
    for name in columns:
        added = operands[f"{name}_bias"].double() if bias else torch.zeros(())
        expected = h @ operands[f"{name}_weight"].double().T + added
        error = product_error(h, operands[f"{name}_weight"], dtype, added.abs())
        bounds[name] = expected, error + rounding(expected, dtype)
    return Case("norm_qkv", operands, outputs, {"eps": 0.5}), bounds


def norm_gate_up(rows: int, inner: int, feed: int, dtype: torch.dtype) -> tuple[Case, Bounds]:
    x, norm = strided(randn(rows, inner, dtype=dtype, scale=3)), randn(inner, dtype=dtype, seed=1)
    gate, up = (strided(randn(feed, inner, dtype=dtype, seed=seed, scale=inner**-0.5), 8, 8) for seed in (2, 3))
    outputs = {"y": strided(torch.empty(rows, feed, dtype=dtype))}
    case = Case("norm_gate_up", {"x": x, "norm": norm, "gate": gate, "up": up}, outputs, {"eps": 0.5})
    h = normed(x, norm, 0.5)
    z, other = h @ gate.double().T, h @ up.double().T
    z_error, other_error = (product_error(h, w, dtype) + rounding(s, dtype) for w, s in ((gate, z), (up, other)))
    silu = z / (1 + torch.exp(-z))
    expected = silu * other
    # silu has slopes up to 1.1; it is rounded to the dtype where the two are launched one by one
    relative = (3 * unit(dtype) + unit(F32) * (z.abs() + 12)) * expected.abs()
    error = 1.1 * z_error * (other.abs() + other_error) + silu.abs() * other_error + relative
    return case, {"y": (expected, error + rounding(expected, dtype) + 8 * torch.finfo(dtype).tiny)}


def split_linear_add(rows: int, inner: int, outer: int, dtype: torch.dtype) -> tuple[Case, Bounds]:
    x, weight = strided(randn(rows, inner, dtype=dtype)), strided(randn(outer, inner, dtype=dtype, seed=1), 8, 8)
    y = strided(randn(rows, outer, dtype=dtype, seed=2))
    operands = {"x": x, "weight": weight, "y": y, "arrivals": torch.zeros(tile_count(outer) + 1, dtype=torch.int32)}
    expected = y.double() + x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T + y.double().abs()
    bound = gamma(2 * inner + 12, dtype) * magnitude + rounding(expected, dtype)
    return Case("split_linear_add", operands), {"y": (expected, bound)}


def drawn(kernel: str, source: random.Random, dtype: torch.dtype, least: int, most: int) -> tuple[Case, Bounds]:
    """A launch of random sizes; from 1,024 inputs on it has splits, where it may."""
    rows, inner = source.choice([1, 2, 7, 16, 17, 32, 33, 50, 64, 65, 130]), source.randint(least, most)
    inner = source.choice([inner, -(-inner // 64) * 64])
    if kernel == "norm_qkv":
        k = source.randint(1, 150)
        return norm_qkv(rows, inner, k * source.randint(1, 3), k, dtype, bias=source.random() < 0.5)
    columns = source.randint(1, 300)
    return (
        norm_gate_up(rows, inner, columns, dtype)
        if kernel == "norm_gate_up"
        else split_linear_add(rows, inner, columns, dtype)
    )


PRODUCTS = ("norm_qkv", "norm_gate_up", "split_linear_add")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products(kernel: str, dtype: torch.dtype) -> None:
    source = random.Random(f"{kernel} {dtype}")
    for _ in range(8):
        check(*drawn(kernel, source, dtype, 1, 700), "cpu")


@pytest.mark.some
@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_in_triton(kernel: str, dtype: torch.dtype) -> None:
    source = random.Random(f"{kernel} {dtype} Triton")
    for least in (1, 1, 1024):
        check(*drawn(kernel, source, dtype, least, least + 200), "cuda")


def of_rows(case: Case, rows: slice) -> Case:
    """The same launch for some of its rows."""
    sliced = lambda tensors: {name: t[rows] if name in ("x", "y", "q", "k", "v") else t for name, t in tensors.items()}  # noqa: E731
    return Case(case.kernel, sliced(case.operands), sliced(case.outputs), case.attrs)


@triton_test
@pytest.mark.parametrize("kernel", [pytest.param("norm_qkv", marks=pytest.mark.soak), *PRODUCTS[1:]])
def test_a_row_in_triton_depends_on_no_other(kernel: str) -> None:
    """To the bit; and a launch leaves nothing behind that the next one would notice. In the interpreter, whose products are
    NumPy's, where as many rows are padded to."""
    build = {"norm_qkv": (norm_qkv, (70, 1100, 96, 40)), "norm_gate_up": (norm_gate_up, (70, 300, 90))}
    function, sizes = build.get(kernel, (split_linear_add, (70, 1100, 90)))
    case, _ = function(*sizes, BF16)  # type: ignore[operator]
    whole, again = run(case, DEVICE), run(case, DEVICE)
    for rows in (slice(0, 40), slice(3, 64), *(() if INTERPRETED else (slice(0, 1), slice(3, 20), slice(10, 70)))):
        alone = run(of_rows(case, rows), DEVICE)
        for name in case.outputs or ("y",):
            assert torch.equal(alone[name], whole[name][rows]) and torch.equal(again[name], whole[name])


def test_tiles_are_split_while_a_gpu_has_room() -> None:
    for tiles, programs, inner in product((1, 3, 64, 96, 192, 193, 500), (160, 384), (1, 511, 512, 1024, 4096, 18944)):
        splits = split_count(tiles, inner, programs)
        assert splits == 1 or (splits <= 4 and splits * tiles <= programs and splits * 512 <= inner)
        assert splits == 4 or (splits + 1) * tiles > programs or (splits + 1) * 512 > inner


# --- rotation and store -----------------------------------------------------------------------------------------------


def rotary_store(
    name: str,
    heads: int,
    group: int,
    size: int,
    rotated: int,
    dtype: torch.dtype,
    *,
    norm: bool,
    row_start: int = 0,
    own: bool = False,
) -> tuple[Case, Bounds]:
    """`own`: each sequence has frequencies of its own."""
    windows, lengths = STORED[name]
    stored = store_case(windows, lengths, heads, size, dtype)
    operands = dict(stored.operands)
    tokens = operands["k"].shape[0]
    operands["q"] = strided(randn(tokens, heads * group * size, dtype=dtype, seed=5))
    operands["positions"] = operands["positions"] + 0
    operands["inv_freq"] = (1e4 ** (-torch.arange(0, rotated, 2) / rotated)).to(F32)
    if norm:
        operands |= {f"{part}_norm": randn(size, dtype=dtype, seed=8 + i) for i, part in enumerate("qk")}
    sliced = ["q", "k", "v", "positions"]
    if own:
        ends = operands["cu_seqlens"][1:]
        bases = 10.0 ** torch.arange(1, len(ends) + 1)[:, None]
        operands["inv_freq"] = (bases ** (-torch.arange(0, rotated, 2) / rotated)).to(F32)
        numbers = torch.searchsorted(ends, torch.arange(tokens), right=True).clamp_max(len(ends) - 1)
        operands["sequences"] = numbers.to(torch.int32)
        sliced.append("sequences")
    for part in sliced:
        operands[part] = operands[part][row_start:]
    attrs = {**stored.attrs, "eps": 0.5, "factor": 1.25}
    case = Case("rotary_store", operands, attrs=attrs)
    turned, error = {}, {}
    for part in "qk":
        turned[part], error[part] = rotated_heads(operands[part], operands, f"{part}_norm", size)
    where = {key: operands[key] for key in ("extents", "cu_extents", "cu_seqlens", "positions")}
    keep = lambda k, v, kv: load("kv_store").reference(  # noqa: E731
        k=k, v=v, kv=kv, **where, layer=1, head_size=size, row_start=row_start
    )
    v = operands["v"].double()
    kv, kv_error = keep(turned["k"], v, operands["kv"].double()), keep(error["k"], v * 0, operands["kv"].double() * 0)
    return case, {"q": (turned["q"], error["q"]), "kv": (kv, kv_error)}


def rotated_heads(x: Tensor, operands: dict[str, Tensor], norm: str, size: int) -> tuple[Tensor, Tensor]:
    """Heads normed and rotated from the formulas, and a bound of the error."""
    dtype, x_TNH = x.dtype, x.double().view(x.shape[0], -1, size)
    relative = 0.0
    if norm in operands:
        x_TNH = x_TNH / torch.sqrt(x_TNH.pow(2).mean(2, keepdim=True) + 0.5) * operands[norm].double()
        relative = gamma(size // 2 + 14, dtype) + unit(dtype)  # rounded before it is rotated, where that is apart
    half = operands["inv_freq"].shape[-1]
    turned = operands["inv_freq"].double().view(-1, 1, half)
    angle = operands["positions"].double()[:, None, None] * turned[operands.get("sequences", torch.zeros(1)).long()]
    first, second, rest = x_TNH[..., :half], x_TNH[..., half : 2 * half], x_TNH[..., 2 * half :]
    cos, sin = 1.25 * angle.cos(), 1.25 * angle.sin()
    result = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 2)
    pair = 1.25 * (first.abs() + second.abs()) * (relative + unit(F32) * (angle + 12))
    bound = torch.cat([pair, pair, rest.abs() * relative], 2).view(x.shape)
    return result.reshape(x.shape), bound + rounding(result.reshape(x.shape), dtype)


FORMS: list[tuple[str, int, int, int, int, bool]] = [
    ("scattered", 2, 2, 16, 16, True), ("scattered", 2, 7, 8, 4, False), ("one", 1, 1, 2, 2, True), ("scattered", 3, 1, 6, 2, True),
    ("a whole prompt", 2, 4, 16, 16, False),
]  # fmt: skip
"""Windows, heads of keys, query heads of each, columns of a head and those that turn, and whether heads are normed."""


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rotary_store(form: tuple[str, int, int, int, int, bool], dtype: torch.dtype) -> None:
    for own in (False, True):
        check(*rotary_store(*form[:5], dtype, norm=form[5], own=own), "cpu")


@triton_test
@pytest.mark.grid(together=1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("form", FORMS[:-1], ids=str)
def test_rotary_store_in_triton(form: tuple[str, int, int, int, int, bool], dtype: torch.dtype) -> None:
    for own in (False, True):
        check(*rotary_store(*form[:5], dtype, norm=form[5], own=own), "cuda")


@pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("cuda", marks=() if HAS_TRITON and INTERPRETED else pytest.mark.gpu)]
)
def test_a_slice_of_what_is_rotated_knows_where_it_starts(backend: str) -> None:
    case, bounds = rotary_store("scattered", 2, 2, 8, 8, F32, norm=True, row_start=4, own=True)
    if backend == "cuda":
        found = run(case, DEVICE, row_start=4)
    else:
        load("rotary_store").launch(**case.operands, **case.attrs, row_start=4, scratch=case.scratch())
        found = case.operands
    for name, (expected, bound) in bounds.items():
        assert_within(found[name], expected, bound)


# --- steps ------------------------------------------------------------------------------------------------------------

DENOISE = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
AT_ONCE = {"norm_qkv", "rotary_store", "norm_gate_up", "split_linear_add", "zeros"}


def planned(model: str, device: str, rows: int, products: str | None = None) -> Plan:
    """A step of so many rows, all decided, over 1,024 keys."""
    pinned: dict[str, str] = {} if products is None else {"products": products}
    asked = Request(seq_lens=(rows,), masked=rows, phase=DENOISE, key_lens=(1024,), states={KV: 1024})
    return Planner(model, device=device, budget="200GiB", pinned=pinned).plan(asked, limit=False)


@pytest.mark.parametrize(
    "device",
    ["h200", pytest.param("rtx-4090", marks=pytest.mark.soak), pytest.param("a100-80g", marks=pytest.mark.soak), "cpu"],
)
def test_the_planner_chooses_by_rows(device: str) -> None:
    """On GPUs small steps are fused and large ones are not; on the CPU none is."""
    for rows in (1, 32, 64, 128, 512):
        plan = planned("sdar-8b", device, rows)
        few = rows <= 64 and device != "cpu"
        assert plan.config["products"] == ("fused" if few else "apart")
        kernels = {op["kernel"] for op in plan.document["ops"]}
        assert (kernels >= AT_ONCE) if few else not kernels & AT_ONCE
        other = planned("sdar-8b", device, rows, "apart" if few else "fused")
        assert plan.predicted_step_ms <= other.predicted_step_ms


def test_a_small_step_at_once_has_six_ops_a_layer() -> None:
    """Norm and projections, rotation and store, attention, and three products; experts stay apart."""
    layers = [
        op["kernel"] for op in planned("sdar-8b", "h200", 32).document["ops"] if op["name"].startswith("layers.3/")
    ]
    assert layers == [
        "norm_qkv",
        "rotary_store",
        "kv_attention",
        "split_linear_add",
        "norm_gate_up",
        "split_linear_add",
    ]
    experts = {
        op["kernel"] for op in planned("llada2-mini", "h200", 32, "fused").document["ops"] if "layers.3/" in op["name"]
    }
    assert {"norm_qkv", "rotary_store", "moe_route", "grouped_linear"} <= experts and "norm_gate_up" not in experts


@pytest.mark.parametrize("phase", [Phase(cache=KEPT, head=NO_HEAD), FULL_STEP], ids=["prefill", "whole"])
def test_large_steps_have_no_such_choice(phase: Phase) -> None:
    assert "products" not in load_model("sdar-8b").graph(phase=phase).choices


def test_float16_has_no_such_choice() -> None:
    """Rows times the weight of their norm might be beyond it."""
    for dtype, offered in (("bfloat16", True), ("float32", True), ("float16", False)):
        choices = load_model(SDAR | {"torch_dtype": dtype}).graph(phase=DENOISE).choices
        assert ("products" in choices) == offered


# --- contracts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_kernels_allocate_nothing(dtype: torch.dtype) -> None:
    for case in (
        norm_qkv(70, 300, 96, 40, dtype, bias=True)[0],
        norm_gate_up(70, 300, 90, dtype)[0],
        split_linear_add(70, 300, 90, dtype)[0],
        rotary_store("scattered", 2, 2, 8, 8, dtype, norm=True)[0],
        rotary_store("scattered", 2, 2, 8, 8, dtype, norm=True, own=True)[0],
        Case("zeros", {}, {"y": torch.empty(7, dtype=torch.int32)}, {"count": 7}),
    ):
        check_allocates_nothing(case)


@triton_test
@pytest.mark.parametrize("kernel", ["norm_qkv", "split_linear_add"])
def test_a_missing_scratch_buffer_is_refused_with_numbers(kernel: str) -> None:
    case, _ = norm_qkv(1, 1100, 8, 8, BF16) if kernel == "norm_qkv" else split_linear_add(1, 1100, 8, BF16)
    with pytest.raises(RuntimeMemoryError, match=rf"{kernel}: scratch of 0 bytes, \d[\d,]* needed"):
        load(kernel, "cuda").launch(**case.operands, **case.outputs, **case.attrs)


def test_launches_refuse_wrong_operands() -> None:
    case, _ = split_linear_add(2, 8, 130, F32)
    with pytest.raises(GraphError, match=r"arrivals must be int32\[3\] at least, not int32\[2\]"):
        load("split_linear_add").launch(**case.operands | {"arrivals": torch.zeros(2, dtype=torch.int32)})
    case, _ = norm_qkv(2, 8, 16, 8, F32)
    with pytest.raises(GraphError, match=r"'v_weight' is float32\[16, 8\], expected float32\[8, 8\]"):
        load("norm_qkv").launch(**case.operands | {"v_weight": case.operands["q_weight"]}, **case.outputs, eps=0.5)
    case, _ = norm_gate_up(2, 8, 16, F32)
    with pytest.raises(GraphError, match=r"'up' is float32\[15, 8\]"):
        load("norm_gate_up").launch(**case.operands | {"up": case.operands["up"][1:]}, **case.outputs, eps=0.5)
    case, _ = rotary_store("one", 1, 1, 4, 4, F32, norm=True)
    with pytest.raises(GraphError, match=r"'k_norm' is float32\[3\]"):
        load("rotary_store").launch(**case.operands | {"k_norm": torch.ones(3)}, **case.attrs)
