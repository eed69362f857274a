"""Every CUDA kernel in Triton's interpreter against the float64 reference, with bounds derived from dtype and length.

A launch must also leave every byte alone that is not its output's. `CASES` and `check` serve the tests on a GPU too, so
where there is a GPU, or triton is loaded for one already, the interpreter runs in a fresh process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operator_tables import scratch_rules
from test_kernels import (
    BF16,
    F32,
    F64,
    Case,
    assert_statistics,
    assert_within,
    attention_bound,
    attention_case,
    gamma,
    linear_case,
    name_of,
    randn,
    rounding,
    router_case,
    statistics_outputs,
    strided,
    unit,
)
from torch import Tensor

from mosaic.errors import RuntimeMemoryError, UnknownName
from mosaic.kernels import load
from mosaic.kernels.binding import Kernel
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import OPERATORS
from mosaic.registrar.operators import operator as contract

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not (torch.cuda.is_available() or "triton" in sys.modules)
if INTERPRETED:
    import triton_interpreter

FRESH = "test_in_a_fresh_process"
DTYPES = (F32, BF16)
Verify = Callable[[dict[str, Tensor]], None]
Built = tuple[Case, Verify]


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> None:
    if not INTERPRETED and request.node.name != FRESH and request.module.__name__ == __name__:
        pytest.skip(f"triton is loaded for a GPU in this process: {FRESH} runs this")


if not INTERPRETED:

    def test_in_a_fresh_process() -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]


# --- one launch -----------------------------------------------------------------------------------------------------


def scratch_for(case: Case, device: str) -> Tensor | None:
    """Scratch of exactly the planned size, full of NaN."""
    everything = case.operands | case.outputs
    shapes = {name: tuple(t.shape) for name, t in everything.items()}
    dtypes = {name: name_of(t.dtype) for name, t in everything.items()}
    rules = scratch_rules("cuda")
    size = rules[case.kernel](shapes, dtypes, case.attrs) if case.kernel in rules else 0
    return torch.full((int(size),), 0xFF, dtype=torch.uint8, device=device) if size else None


def whole(tensor: Tensor) -> Tensor:
    """The whole buffer that a view lies in, flat."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def moved(tensor: Tensor, device: str) -> Tensor:
    """A copy of the view and of the buffer around it."""
    buffer = whole(tensor).clone().to(device)
    return buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def outside(tensor: Tensor) -> Tensor:
    """Mask, over the whole buffer, of the elements that are not the view's."""
    mask = torch.ones(whole(tensor).numel(), dtype=torch.bool, device=tensor.device)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return mask


def in_bytes(flat: Tensor) -> Tensor:
    """Bytes of every element, so that NaN equals itself."""
    return flat.view(torch.uint8).view(-1, flat.element_size())


def fill_outside(tensor: Tensor) -> None:
    """Put a number around a view that will be written: any arithmetic on the NaN that is there gives the same NaN."""
    whole(tensor)[outside(tensor)] = 121


def on_card(case: Case) -> Kernel:
    """The kernel that this card has for itself, where it serves, or else the plain one."""
    major, minor = (0, 0) if INTERPRETED else torch.cuda.get_device_capability()
    specs = {name: Spec(tuple(t.shape), name_of(t.dtype)) for name, t in (case.operands | case.outputs).items()}
    first, *_ = contract(case.kernel).serving("cuda", specs, case.attrs, 10 * major + minor)
    own = contract(case.kernel).implementation("cuda", first).capability is not None
    return load(case.kernel, "cuda", first if own else None)


def run(case: Case, device: str = "cpu", alias: dict[str, str] | None = None, **more: Any) -> dict[str, Tensor]:
    """Launch on copies; return outputs and updated operands, on the CPU; check that nothing else was written."""
    given = {name: moved(t, device) for name, t in case.operands.items()}
    for name, output in case.outputs.items():
        output.fill_(float("nan") if output.is_floating_point() else -7)
        given[name] = given[alias[name]] if alias and name in alias else moved(output, device)
    written = (written_by(case.kernel) & given.keys()) | set((alias or {}).values())
    for name in written:
        fill_outside(given[name])
    before = {name: whole(t).clone() for name, t in given.items()}
    on_card(case).launch(**given, **case.attrs, **more, scratch=scratch_for(case, device))
    for name, tensor in given.items():
        same = (in_bytes(whole(tensor)) == in_bytes(before[name])).all(dim=1)
        allowed = ~outside(tensor) if name in written else torch.zeros_like(same)
        assert (same | allowed).all(), f"{name}: written where it must not be"
    return {name: given[name].cpu() for name in written}


def written_by(kernel: str) -> set[str]:
    rule = contract(kernel)
    return {*rule.writes, *rule.updates}


# --- cases ----------------------------------------------------------------------------------------------------------


def within(name: str, expected: Tensor, bound: Tensor) -> Verify:
    return lambda result: assert_within(result[name], expected, bound)


def equal(**expected: Tensor) -> Verify:
    def verify(result: dict[str, Tensor]) -> None:
        for name, tensor in expected.items():
            assert torch.equal(result[name], tensor), name

    return verify


def rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> Built:
    x, weight = strided(randn(*shape, dtype=dtype, scale=3)), randn(shape[1], dtype=dtype, seed=1)
    case = Case("rms_norm", {"x": x, "weight": weight}, {"y": strided(torch.empty(*shape, dtype=dtype))}, {"eps": 0.5})
    expected = case.reference()
    bound = gamma(shape[1] // 2 + 14, dtype) * expected.abs() + rounding(expected, dtype)
    return case, within("y", expected, bound)


def head_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    tokens, heads, size = shape
    x, weight = strided(randn(tokens, heads * size, dtype=dtype)), randn(size, dtype=dtype, seed=1)
    case = Case("head_norm", {"x": x, "weight": weight}, attrs={"eps": 0.5})
    expected = case.reference()
    return case, within("x", expected, gamma(size // 2 + 14, dtype) * expected.abs() + rounding(expected, dtype))


def rotary(shape: tuple[int, int, int, int], dtype: torch.dtype, bases: tuple[float, ...] = (500000.0,)) -> Built:
    tokens, heads, size, rotated = shape
    x = strided(randn(tokens, heads * size, dtype=dtype))
    positions = torch.arange(tokens, dtype=torch.int32) * 24103
    inv_freq = torch.stack([b ** (-torch.arange(0, rotated, 2, dtype=F64) / rotated) for b in bases]).to(F32)
    operands = {"x": x, "positions": positions, "inv_freq": inv_freq if len(bases) > 1 else inv_freq[0]}
    number = torch.arange(tokens) * len(bases) // tokens
    more = {"sequences": number.to(torch.int32)} if len(bases) > 1 else {}
    factor = {"factor": 1.3} if more else {}
    case = Case("rotary", operands | more, attrs={"head_size": size, **factor})
    expected = case.reference()
    angle = (positions.double()[:, None] * inv_freq[number].double()).repeat(1, 2)
    pair = x.double().view(tokens, heads, size)[..., :rotated].abs() * 1.3
    bound = torch.zeros(tokens, heads, size, dtype=F64)
    # the angle is rounded once in float32, cosine and sine to 2 ulp, then three products and a sum
    bound[..., :rotated] = (pair + pair.roll(rotated // 2, dims=2)) * (unit(F32) * (angle[:, None, :] + 9))
    return case, within("x", expected, bound.view(tokens, -1) + rounding(expected, dtype))


def silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> Built:
    gate, up = strided(randn(*shape, dtype=dtype, scale=4)), strided(randn(*shape, dtype=dtype, seed=1), 8, 8)
    case = Case("silu_mul", {"gate": gate, "up": up})
    expected = case.reference()
    # silu in float32 (the argument of exp2 is rounded: |gate| roundings), rounded to the dtype, the product rounded again
    relative = 3 * unit(dtype) + unit(F32) * (gate.double().abs() + 12)
    return case, within("gate", expected, relative * expected.abs() + torch.finfo(dtype).tiny * 8)


def rows_of(kernel: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    rows, columns, count = shape
    table = strided(randn(rows, columns, dtype=dtype))
    index = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(0))
    names = ("ids", "table") if kernel == "embedding" else ("rows", "x")
    case = Case(
        kernel, dict(zip(names, (index, table), strict=True)), {"y": strided(torch.empty(count, columns, dtype=dtype))}
    )
    return case, equal(y=table[index])


def copy(shape: tuple[int, int], dtype: torch.dtype) -> Built:
    x, y = strided(randn(*shape, dtype=dtype)), strided(torch.empty(*shape, dtype=dtype))
    return Case("copy", {"x": x}, {"y": y}), equal(y=x)


def linear(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool = False) -> Built:
    case = linear_case(*shape, dtype, bias, wrap=strided)
    case.outputs["y"] = strided(case.outputs["y"])
    magnitude = case.operands["x"].double().abs() @ case.operands["weight"].double().abs().T
    if bias:
        magnitude += case.operands["bias"].double().abs()
    expected = case.reference()
    return case, within("y", expected, gamma(2 * shape[1] + 2, dtype) * magnitude + rounding(expected, dtype))


def linear_add(shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    tokens, inner, outer = shape
    x, weight = strided(randn(tokens, inner, dtype=dtype)), strided(randn(outer, inner, dtype=dtype, seed=1))
    y = strided(randn(tokens, outer, dtype=dtype, seed=2))
    case = Case("linear_add", {"x": x, "weight": weight, "y": y})
    expected = case.reference()
    magnitude = x.double().abs() @ weight.double().abs().T + y.double().abs()
    return case, within("y", expected, gamma(2 * inner + 2, dtype) * magnitude + rounding(expected, dtype))


def attention(shape: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype) -> Built:
    case = attention_case(*shape, dtype)
    case.outputs["y"] = strided(case.outputs["y"])
    expected = case.reference()
    return case, within("y", expected, attention_error(case, expected))


def attention_error(case: Case, expected: Tensor) -> Tensor:
    """Bound the error: as on the CPU, and the weights are rounded to the dtype before they meet the values."""
    wide = case.operands["v"].double().abs()
    # exp2 and its scaled argument lose as much again as the scores themselves
    return 2 * attention_bound(case, expected) + unit(case.operands["v"].dtype) * case.reference(v=wide)


def row_stats(shape: tuple[int, int], dtype: torch.dtype) -> Built:
    logits = strided(randn(*shape, dtype=dtype, scale=5))
    case = Case("row_stats", {"logits": logits}, statistics_outputs(shape[0]))
    return case, statistics(case, logits.double(), unit(F32) * logits.double().abs().amax(1))


def unembed_stats(shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    rows, hidden, vocabulary = shape
    x = strided(randn(rows, hidden, dtype=dtype))
    weight = strided(randn(vocabulary, hidden, dtype=dtype, seed=1), 8, 8)
    case = Case("unembed_stats", {"x": x, "weight": weight}, statistics_outputs(rows))
    magnitude = (x.double().abs() @ weight.double().abs().T).amax(1)
    return case, statistics(case, x.double() @ weight.double().T, gamma(2 * hidden + 3, F32) * magnitude)


def statistics(case: Case, logits: Tensor, delta: Tensor) -> Verify:
    def verify(result: dict[str, Tensor]) -> None:
        case.outputs = result
        assert_statistics(case, logits, delta)

    return verify


def confidence(rows: int, dtype: torch.dtype) -> Built:
    maximum, logsumexp = randn(rows), randn(rows, seed=1).abs() + 3
    case = Case("confidence", {"maximum": maximum, "logsumexp": logsumexp}, {"y": torch.empty(rows)})
    expected = case.reference()
    error = unit(F32) * (2 * (maximum.double() - logsumexp.double()).abs() + 8)
    return case, within("y", expected, 1.01 * error * expected)


def shift_rows(lengths: tuple[int, ...], dtype: torch.dtype) -> Built:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    case = Case(
        "shift_rows",
        {"rows": torch.arange(sum(lengths)), "cu_seqlens": bounds},
        {"y": torch.empty(sum(lengths), dtype=torch.int64)},
    )
    return case, equal(y=case.reference())


def moe_route(shape: tuple[int, int, int, int, bool], dtype: torch.dtype) -> Built:
    rows, hidden, experts, top_k, normalize = shape
    # inputs on a coarse grid keep every product exact, so the order of the experts has to be too
    x = strided((randn(rows, hidden) * 4).round().div(8).to(dtype))
    weight = strided((randn(experts, hidden, seed=1) * 4).round().div(8).to(dtype))
    outputs = {"scores": torch.empty(rows, top_k, dtype=dtype), "experts": torch.empty(rows, top_k, dtype=torch.int64)}
    case = Case("moe_route", {"x": x, "weight": weight}, outputs, {"top_k": top_k, "normalize": normalize})
    expected = case.reference()
    logits = (x.double() @ weight.double().T).abs().amax()
    relative = gamma(2 * experts + 40, dtype) + 4 * unit(F32) * float(logits)

    def verify(result: dict[str, Tensor]) -> None:
        assert torch.equal(result["experts"], expected["experts"])
        bound = relative * expected["scores"] + rounding(expected["scores"], dtype)
        assert_within(result["scores"], expected["scores"], bound)

    return case, verify


def moe_route_by_groups(
    shape: tuple[int, int, int, int, int, int, bool], dtype: torch.dtype, scoring: str = "sigmoid"
) -> Built:
    rows, hidden, experts, top_k, groups, top_groups, bias = shape
    attrs = {"top_k": top_k, "normalize": True, "groups": groups, "top_groups": top_groups, "scale": 2.5}
    case = router_case(rows, hidden, experts, dtype, bias=bias, scoring=scoring, **attrs)
    case.operands |= {name: strided(case.operands[name]) for name in ("x", "weight")}
    expected = case.reference()
    # exponentials of Triton's err by up to 2 ulp and by half an ulp of their argument
    logits = (case.operands["x"].double() @ case.operands["weight"].double().T).abs().amax()
    relative = gamma(2 * experts + 40, dtype) + 4 * unit(F32) * float(logits)

    def verify(result: dict[str, Tensor]) -> None:
        assert torch.equal(result["experts"], expected["experts"])
        bound = relative * expected["scores"] + rounding(expected["scores"], dtype)
        assert_within(result["scores"], expected["scores"], bound)

    return case, verify


def chosen_experts(rows: int, top_k: int, experts: int) -> Tensor:
    draws = torch.rand(rows, experts, generator=torch.Generator().manual_seed(0))
    return draws.pow(3).argsort(dim=1)[:, :top_k].contiguous()


def moe_sort(shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    rows, top_k, experts = shape
    outputs = {
        name: torch.empty(n, dtype=torch.int64) for name, n in (("order", rows * top_k), ("offsets", experts + 1))
    }
    case = Case("moe_sort", {"experts": strided_index(chosen_experts(*shape))}, outputs, {"num_experts": experts})
    return case, equal(**case.reference())


def strided_index(index: Tensor) -> Tensor:
    wide = torch.full((index.shape[0], index.shape[1] + 3), -1, dtype=torch.int64)
    wide[:, : index.shape[1]] = index
    return wide[:, : index.shape[1]]


def moe_gather(shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    rows, top_k, columns = shape
    x, order = strided(randn(rows, columns, dtype=dtype)), torch.randperm(rows * top_k)
    case = Case(
        "moe_gather", {"x": x, "order": order}, {"y": torch.empty(rows * top_k, columns, dtype=dtype)}, {"top_k": top_k}
    )
    return case, equal(y=x[order // top_k])


def grouped_linear(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, *, aligned: bool = False) -> Built:
    counts, inner, outer = shape
    rows, offsets = sum(counts), torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    beside = (8, 8) if aligned else (3, 5)
    x, weight = strided(randn(rows, inner, dtype=dtype), *beside), randn(len(counts), outer, inner, dtype=dtype, seed=1)
    y = strided(torch.empty(rows, outer, dtype=dtype))
    case = Case("grouped_linear", {"x": x, "weight": weight, "offsets": offsets}, {"y": y})
    expected = case.reference()
    magnitude = case.reference(x=x.double().abs(), weight=weight.double().abs())
    return case, within("y", expected, gamma(2 * inner + 2, dtype) * magnitude + rounding(expected, dtype))


def moe_combine(shape: tuple[int, int, int], dtype: torch.dtype) -> Built:
    rows, top_k, columns = shape
    order = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(0))
    y, x = randn(rows * top_k, columns, dtype=dtype), strided(randn(rows, columns, dtype=dtype, seed=2))
    scores = strided(randn(rows, top_k, dtype=dtype, seed=1))
    case = Case("moe_combine", {"y": y, "order": order, "scores": scores, "x": x})
    expected = case.reference()
    magnitude = case.reference(y=y.double().abs(), scores=scores.double().abs(), x=x.double().abs())
    return case, within("x", expected, gamma(2 * top_k + 1, dtype) * magnitude + rounding(expected, dtype))


def cases() -> Iterator[tuple[str, Callable[[torch.dtype], Built]]]:
    """Name a case and how to build it in a dtype; shapes of one, primes, no multiples of a tile."""
    table: list[tuple[str, Callable[..., Built], list[Any]]] = [
        ("rms_norm", rms_norm, [(1, 1), (5, 7), (13, 96), (3, 9001)]),
        ("head_norm", head_norm, [(1, 1, 2), (7, 5, 16), (11, 33, 128)]),
        ("rotary", rotary, [(1, 1, 2, 2), (37, 4, 16, 16), (7, 3, 128, 64), (3, 33, 128, 128)]),
        ("rotary, own", lambda s, d: rotary(s, d, (1e4, 5e5, 3e6)), [(37, 4, 16, 16), (7, 3, 128, 64)]),
        ("silu_mul", silu_mul, [(1, 1), (17, 41), (3, 4099)]),
        ("copy", copy, [(1, 1), (31, 4099)]),
        ("embedding", lambda s, d: rows_of("embedding", s, d), [(1, 1, 1), (31, 13, 5), (7, 4099, 3)]),
        ("gather_rows", lambda s, d: rows_of("gather_rows", s, d), [(1, 1, 1), (31, 64, 37)]),
        ("row_stats", row_stats, [(1, 1), (1, 2), (3, 4097), (13, 4096), (7, 12289)]),
        (
            "attention",
            attention,
            [
                ((1,), 1, 1, 2),
                ((5, 1, 31), 4, 2, 16),
                ((129,), 2, 1, 8),  # one more than a query tile
                ((3, 0, 260, 7), 3, 3, 5),
                ((1,) * 19, 2, 2, 16),
                ((67,), 2, 1, 128),
                ((70,), 2, 1, 192),
            ],
        ),
        ("linear", linear, [(1, 1, 1), (37, 300, 129)]),
        ("linear, bias", lambda s, d: linear(s, d, bias=True), [(1, 1, 1), (37, 300, 129)]),
        ("linear_add", linear_add, [(1, 1, 1), (37, 300, 129)]),
        ("unembed_stats", unembed_stats, [(1, 1, 1), (1, 8, 1025), (67, 33, 2048), (5, 67, 3001)]),
        ("confidence", confidence, [1, 37, 1031]),
        ("shift_rows", shift_rows, [(1,), (5, 0, 7, 1), (300,)]),
        (
            "moe_route",
            moe_route,
            [(1, 4, 1, 1, False), (37, 16, 8, 2, True), (37, 70, 64, 8, False), (5, 33, 60, 6, True)],
        ),
        (
            "moe_route, groups",
            moe_route_by_groups,
            [
                (1, 4, 2, 1, 1, 1, True),
                (37, 70, 256, 8, 8, 4, True),
                (5, 33, 36, 6, 6, 1, False),
                (9, 16, 60, 3, 0, 0, True),
                (7, 16, 20, 2, 0, 0, False),
            ],
        ),
        (
            "moe_route, softmax",
            lambda s, d: moe_route_by_groups(s, d, "softmax"),
            [(11, 33, 36, 4, 6, 3, True), (11, 33, 36, 4, 6, 3, False)],
        ),
        ("moe_sort", moe_sort, [(1, 1, 1), (5, 2, 4), (70, 8, 67), (67, 2, 3)]),
        ("moe_gather", moe_gather, [(1, 1, 1), (37, 3, 65)]),
        ("grouped_linear", grouped_linear, [((1,), 1, 1), ((0, 5, 0, 2), 19, 23), ((3, 0, 64, 0, 70), 65, 130)]),
        ("moe_combine", moe_combine, [(1, 1, 1), (5, 2, 13), (31, 8, 1030)]),
    ]
    for name, build, shapes in table:
        for shape in shapes:
            yield f"{name} {shape}", lambda dtype, build=build, shape=shape: build(shape, dtype)


CASES = dict(cases())
INTEGERS_ONLY = ("confidence", "shift_rows", "moe_sort")  # no operand in the activation dtype


def check(name: str, dtype: torch.dtype, device: str) -> None:
    """Launch one case on a device and compare."""
    case, verify = CASES[name](dtype)
    verify(run(case, device))


PARAMETERS = [
    pytest.param(name, dtype, id=f"{name} {name_of(dtype)}")
    for name in CASES
    for dtype in DTYPES
    if dtype == F32 or not name.startswith(INTEGERS_ONLY)
]


@pytest.mark.grid(together=1)
@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_kernel(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, "cpu")


def test_cases_cover_every_kernel() -> None:
    assert {name.split()[0].rstrip(",") for name in CASES} == set(OPERATORS) - {
        "kv_attention",  # test_kv
        "kv_store",
        "resume_rows",  # test_resume_rows
        "joined_attention",  # test_prefix_reuse_triton
        "prefix_attention",
        "query_change",
        "token_importance",  # test_token_importance
        "evict_tokens",  # test_evict_tokens
        "focus_requests",  # test_focus_requests
        "note_focus",
        "key_mass",  # test_selection_of_keys_triton
        "prefix_logsumexp",
        "selected_attention",
        "top_keys",
        "page_bounds",  # test_pages_triton
        "page_extrema",
        "score_keys",  # test_sparse_keys_triton
        "select_keys",
        "pack_keys",
        "bound_parts",
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
        "minimum",
        "advance_requests",  # test_request_kernels
        "draw_requests",
        "keep_requests",
        "pack_requests",
        "place_requests",
        "reuse_requests",
        "select_requests",
    }


# --- what the operands may be -----------------------------------------------------------------------------------------

ALIASES = [
    ("rms_norm (13, 96)", {"y": "x"}),
    ("attention ((3, 0, 260, 7), 3, 3, 5)", {"y": "q"}),
]


def check_alias(name: str, alias: dict[str, str], dtype: torch.dtype, device: str) -> None:
    case, verify = CASES[name](dtype)
    apart, together = run(case, device), run(case, device, alias)
    verify(together)
    assert torch.equal(together["y"], apart["y"])


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("name", "alias"), ALIASES, ids=str)
def test_output_may_overwrite_an_operand(name: str, alias: dict[str, str], dtype: torch.dtype) -> None:
    check_alias(name, alias, dtype, "cpu")


def check_slices(dtype: torch.dtype, device: str) -> None:
    """Rows of attention computed apart are the rows computed together."""
    case = attention_case((50, 3, 80), 2, 1, 8, dtype)
    expected = case.reference()
    bound = attention_error(case, expected)
    for start, end in ((0, 20), (20, 52), (52, 133)):
        part = Case("attention", case.operands | {"q": case.operands["q"][start:end]}, attrs=case.attrs)
        part.outputs = {"y": torch.empty(end - start, 16, dtype=dtype)}
        assert_within(run(part, device, row_start=start)["y"], expected[start:end], bound[start:end])


def test_attention_on_a_tile_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from mosaic.kernels.cuda import attention
    from mosaic.kernels.cuda.shared import launching

    case, verify = CASES["attention ((129,), 2, 1, 8)"](BF16)
    wide = attention_case((129, 140), 2, 1, 128, BF16)  # a tile of 128 rows spans both sequences
    expected = wide.reference()
    monkeypatch.setattr(launching, "capability", lambda operand: 103)
    assert launching.since(attention.TILES, case.operands["q"]) is attention.HOPPER
    verify(run(case))
    assert_within(run(wide)["y"], expected, attention_error(wide, expected))
    for card, tiles in ((0, attention.SMALL), (80, attention.SMALL), (89, attention.SMALL), (120, attention.SMALL)):
        monkeypatch.setattr(launching, "capability", lambda operand, card=card: card)
        assert launching.since(attention.TILES, case.operands["q"]) is tiles


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_attention_of_a_slice_of_rows_knows_where_it_starts(dtype: torch.dtype) -> None:
    check_slices(dtype, "cpu")


def check_ties(device: str) -> None:
    logits = torch.zeros(4, 12500)
    logits[0, [7, 4500, 12400]] = 2.0  # a tie across tiles
    logits[1, 1:] = float("-inf")  # one candidate
    logits[2] = float("-inf")
    logits[2, [9700, 12300]] = 1.0  # nothing in the first tiles but -inf
    out = run(Case("row_stats", {"logits": logits}, statistics_outputs(4)), device)
    assert out["token"].tolist() == [7, 0, 9700, 0]
    assert out["maximum"].tolist() == [2.0, 0.0, 1.0, 0.0]
    assert out["second"].tolist() == [2.0, float("-inf"), 1.0, 0.0]
    assert out["entropy"][1] == 0.0 and out["entropy"][2] == pytest.approx(0.693147, abs=1e-6)
    assert out["entropy"][3] == pytest.approx(9.433484, abs=1e-5)


def test_statistics_of_ties_and_minus_infinity() -> None:
    check_ties("cpu")


def check_split_ties(device: str) -> None:
    """Equal logits in different splits of the vocabulary: the lower index wins, the second is the maximum."""
    weight = torch.zeros(3000, 16)
    weight[[130, 1700, 2999]] = 1.0
    x = torch.ones(2, 16)
    x[1] = -1.0
    out = run(Case("unembed_stats", {"x": x, "weight": weight}, statistics_outputs(2)), device)
    assert out["token"].tolist() == [130, 0]
    assert out["maximum"].tolist() == [16.0, 0.0] and out["second"].tolist() == [16.0, 0.0]


def test_unembedding_resolves_ties_across_splits() -> None:
    check_split_ties("cpu")


@pytest.mark.parametrize("kernel", ["embedding", "gather_rows"])
def test_an_index_outside_gives_a_row_of_nan(kernel: str) -> None:
    case, _ = CASES[f"{kernel} (1, 1, 1)"](BF16)
    index = case.operands["ids" if kernel == "embedding" else "rows"]
    for wrong in (1, -1):
        index.fill_(wrong)
        assert run(case)["y"].isnan().all()


def test_elements_of_a_vector_are_gathered_like_rows() -> None:
    x, rows = torch.arange(7, 77, dtype=torch.int32), torch.tensor([0, 69, 3, 3, 70, -1])
    case = Case("gather_rows", {"x": x, "rows": rows}, {"y": torch.empty(6, dtype=torch.int32)})
    assert run(case)["y"].tolist() == [7, 76, 10, 10, 0, 0]


@pytest.mark.parametrize("kernel", ["unembed_stats", "moe_sort", "moe_combine"])
def test_a_missing_scratch_buffer_is_refused_with_numbers(kernel: str) -> None:
    case, _ = CASES[next(name for name in CASES if name.startswith(kernel))](F32)
    with pytest.raises(RuntimeMemoryError, match=rf"{kernel}: scratch of 0 bytes, \d[\d,]* needed"):
        load(kernel, "cuda").launch(**case.operands, **case.outputs, **case.attrs)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cuda'"):
        load("linear", "cudaa")


# --- the interpreter itself -----------------------------------------------------------------------------------------


def test_the_interpreter_rounds_bfloat16_to_nearest_even() -> None:
    values = torch.cat([randn(4000), torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, float("inf"), float("nan")])])
    bits = torch.from_numpy(triton_interpreter.to_bfloat16(values.numpy()).view("int16")).view(BF16)
    assert torch.equal(bits.nan_to_num(7.0), values.to(BF16).nan_to_num(7.0))
