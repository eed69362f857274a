"""Attention over kept keys on a real CUDA device: sizes of decoding, replay with other lengths, rows beyond 2^31 elements."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32, Case, assert_within, name_of, randn
from test_kv import FEW, check_bits, check_in_triton, kv_case, softmax_rows, tables, triton_bound
from test_triton_kernels import INTERPRETED, moved, on_card, scratch_for

from mosaic.kernels import load
from mosaic.kernels.binding import kernel_of
from mosaic.registrar.operators import operator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set in this process"),
]

# windows of (tokens, keys, position of the first), query heads, KV heads, head size, block
SIZES = {
    "a block of 32 over 9,000 keys": ([(32, 9_000, 8_968)], 32, 8, 128, 0),
    "without groups": ([(16, 5_003, 4_000)], 8, 8, 128, 0),
    "one token, groups of 8": ([(1, 9_001, 9_000)], 8, 1, 128, 0),
    "a batch": ([(4, 37 + 301 * i, 20) for i in range(20)], 8, 2, 64, 4),
    "prefill in blocks": ([(700, 700, 0), (333, 333, 0)], 4, 1, 128, 32),
    "groups of 7": ([(32, 3_000, 100), (5, 17, 12)], 28, 4, 128, 0),
}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_decoding(name: str, dtype: torch.dtype) -> None:
    windows, heads, kv_heads, size, block = SIZES[name]
    check_in_triton(kv_case(windows, heads, kv_heads, size, dtype, block=block, padding=3))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("heads, kv_heads", [(16, 8), (8, 2), (8, 8)])
def test_results_do_not_depend_on_the_batch_around_a_sequence(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """For plans that are asked to be batch-invariant: to the bit, however few tokens there are of a sequence or of its mates."""
    rng = random.Random(heads * kv_heads)
    for _ in range(4):
        windows = []
        for _ in range(6):
            tokens = rng.choice((rng.randint(1, 12), rng.randint(13, 70)))
            keys = tokens + rng.choice((0, rng.randint(1, 3_000)))
            windows.append((tokens, keys, keys - tokens))
        together = kv_case(windows, heads, kv_heads, 128, dtype)
        way = "hopper_invariant" if on_card(together).way.name == "hopper" else "invariant"
        launch = kernel_of(operator("kv_attention").implementation("cuda", way))
        given = {name: moved(t, "cuda") for name, t in together.operands.items()}
        scratch, whole = scratch_for(together, "cuda"), torch.empty_like(given["q"])
        launch(**given, **together.attrs, y=whole, scratch=scratch)
        first = 0
        for number, (tokens, _, _) in enumerate(windows):
            rows = slice(first, first + tokens)
            alone = {name: given[name][rows] for name in ("q", "positions")}
            bounds = {name: given[name][number : number + 2].clone() for name in ("cu_seqlens", "cu_extents")}
            bounds["cu_seqlens"] -= first
            bounds["seen"] = given["seen"][number : number + 1].clone()
            y = torch.empty(tokens, heads * 128, dtype=dtype, device="cuda")
            launch(**(given | alone | bounds), **together.attrs, y=y, scratch=scratch)
            assert torch.equal(y, whole[rows]), windows
            first += tokens


@pytest.mark.parametrize("size", [16, 64, 128])
def test_segments_are_the_same_bits_in_one_program_and_in_many(size: int) -> None:
    """On Hopper heads of 64 and 128 have a kernel of their own."""
    check_bits([(32, 5_000, 4_968), (64, 9_001, 8_937), (30, 700, 670), (41, 3_003, 2_960)], 16, 4, size)


def test_whole_lines_in_bfloat16_have_the_kernel_for_hopper() -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for size, dtype, whole in ((64, BF16, True), (128, BF16, True), (32, BF16, False), (128, F32, False)):
        case = kv_case([(32, 300, 268)], 8, 2, size, dtype)
        assert (on_card(case).way.name == "hopper") == (hopper and whole)


@pytest.mark.parametrize("name", FEW)
def test_a_launch_allocates_nothing(name: str) -> None:
    windows, heads, kv_heads, size, block = FEW[name]
    case = kv_case(windows, heads, kv_heads, size, BF16, block=block)
    given = {name: moved(t, "cuda") for name, t in (case.operands | case.outputs).items()}
    store = {name: torch.zeros_like(given["q"][:, : kv_heads * size]) for name in ("k", "v")}
    store |= {name: given[name] for name in ("extents", "cu_extents", "cu_seqlens", "positions")}
    store |= {"kv": given["kv"].clone(), "head_size": size}
    scratch = scratch_for(case, "cuda")

    def launch() -> None:
        load("kv_store", "cuda").launch(**store, layer=0)
        on_card(case).launch(**given, **case.attrs, scratch=scratch)

    launch()  # compiles
    torch.cuda.synchronize()
    requests = torch.cuda.memory_stats()["allocation.all.allocated"]
    launch()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests


def test_a_captured_launch_serves_other_lengths() -> None:
    """Splits and tiles depend on shapes alone: replayed, the launches read what the lengths are then."""
    first = kv_case([(10, 3_000, 100), (22, 50, 28)], 8, 2, 64, BF16, block=4, most=1)
    second = kv_case([(31, 40, 9), (1, 3_010, 3_009)], 8, 2, 64, BF16, block=4, most=1)
    rows = max(case.operands["kv"].shape[0] for case in (first, second))
    for case in (first, second):
        more = rows - case.operands["kv"].shape[0]
        case.operands["kv"] = torch.nn.functional.pad(case.operands["kv"], (0, 0, 0, more))
    given: dict[str, Any] = {name: t.cuda() for name, t in first.operands.items()}
    y, scratch = torch.zeros(32, 8 * 64, dtype=BF16, device="cuda"), scratch_for(first, "cuda")

    def launch() -> None:
        on_card(first).launch(**given, **first.attrs, y=y, scratch=scratch)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case in (first, second):
        for name in ("kv", "extents"):
            assert case.operands[name].shape == given[name].shape
        for name, tensor in case.operands.items():
            given[name].copy_(tensor)
        graph.replay()
        expected, sees = softmax_rows(case)
        assert sees.all()
        assert_within(y.cpu(), expected, triton_bound(case, expected))


def test_rows_beyond_two_to_the_31_elements() -> None:
    rows, layers, size = 70_000, 128, 128  # 2.3e9 elements of bfloat16, 4.3 GiB
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("less than 6 GiB of free memory on the GPU")
    kv = torch.zeros(rows, layers * 2 * size, dtype=BF16, device="cuda")
    pieces = [(rows - 1, 1, 0, 0), (0, 1, 1, 0), (rows - 2, 1, 2, 0)]
    k, v = (randn(3, size, dtype=BF16, seed=seed).cuda() for seed in (1, 2))
    places = {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32), "positions": torch.arange(3, dtype=torch.int32)}
    where = {name: t.cuda() for name, t in {**tables([pieces]), **places}.items()}
    load("kv_store", "cuda").launch(k=k, v=v, kv=kv, **where, layer=layers - 1, head_size=size)
    slots = [row for row, *_ in pieces]
    assert torch.equal(kv[slots, -2 * size :], torch.cat([k, v], dim=1))
    assert not kv[:, : -2 * size].any() and not kv[1 : rows - 2].any()
    small = torch.cat([k, v], dim=1).cpu()
    operands = {
        "q": randn(3, size, dtype=BF16), "kv": small, **tables([[(i, 1, i, 0) for i in range(3)]]), **places,
        "seen": torch.tensor([3], dtype=torch.int32),
    }  # fmt: skip
    attrs = {"layer": 0, "kv_heads": 1, "head_size": size, "scale": size**-0.5, "block": 0}
    case = Case("kv_attention", operands, {"y": torch.empty(3, size, dtype=BF16)}, attrs)
    expected, _ = softmax_rows(case)
    given = {name: t.cuda() for name, t in operands.items()} | {"kv": kv, **where}
    y = torch.empty(3, size, dtype=BF16, device="cuda")
    on_card(case).launch(**given, **attrs | {"layer": layers - 1}, y=y, scratch=scratch_for(case, "cuda"))
    assert_within(y.cpu(), expected, triton_bound(case, expected))
