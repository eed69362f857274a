"""Selected keys on a real CUDA device: contexts of thousands of keys, nothing allocated, one captured graph for other lengths.

The cases of `test_selection_of_keys_triton` run on a GPU too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, Case
from test_kv import kv_case, starts
from test_selected_attention import assert_attended
from test_selection_of_keys import assert_mass, assert_sums, stated_selection
from test_triton_kernels import INTERPRETED, scratch_for
from torch import Tensor

from mosaic.kernels import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set in this process"),
]

KEPT = ("q", "kv", "extents", "cu_extents", "captured", "cu_seqlens")
READS = {
    "prefix_logsumexp": (*KEPT, "votes"),
    "key_mass": (*KEPT, "cu_keys", "votes", "logsumexp"),
    "top_keys": ("mass", "captured", "cu_keys", "owner", "selected"),
    "selected_attention": (*KEPT, "selected", "owner", "seen", "positions"),
}


@dataclass
class Chain:
    """The operators over one batch: all operands by name, and the attributes of each."""

    operands: dict[str, Tensor]
    attrs: dict[str, dict[str, Any]]

    def case(self, kernel: str) -> Case:
        """One of the launches, as the operands are now."""
        outputs = {
            "prefix_logsumexp": ("logsumexp",),
            "key_mass": ("mass",),
            "top_keys": (),
            "selected_attention": ("y",),
        }[kernel]
        operands = {name: self.operands[name] for name in READS[kernel]}
        return Case(kernel, operands, {name: self.operands[name] for name in outputs}, self.attrs[kernel])


def chain(windows: Sequence[tuple[int, int, int]], prefixes: Sequence[int], rows: int, columns: int) -> Chain:
    """Windows of (tokens, keys, position of the first) behind prefixes, in a state of `rows` rows; one extent a sequence."""
    given = kv_case(windows, 8, 2, 64, BF16, block=4, most=1)
    kv = given.operands["kv"]
    sets, k, page = 4, 512, 2
    operands = given.operands | {
        "kv": torch.nn.functional.pad(kv, (0, 0, 0, rows - kv.shape[0])),
        "captured": torch.tensor(prefixes, dtype=torch.int32), "cu_keys": starts(prefixes),
        "votes": torch.ones(given.operands["q"].shape[0], dtype=torch.uint8),
        "owner": torch.tensor([2, 0]), "selected": torch.zeros(3, 2 * sets * (1 + k // page), dtype=torch.int32),
        "logsumexp": torch.full((given.operands["q"].shape[0], 8), float("nan")),
        "mass": torch.full((sets, columns), float("nan")), "y": torch.full_like(given.outputs["y"], float("nan")),
    }  # fmt: skip
    of_rows = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    heads = of_rows | {"sets": sets}
    pages = {"slot": 1, "sets": sets, "k": k, "page": page}
    attrs = {
        "prefix_logsumexp": of_rows, "key_mass": heads | {"columns": columns, "statistic": "mean"},
        "top_keys": pages | {"ratio": 0.0, "enough": 0.0}, "selected_attention": heads | pages | {"block": 4},
    }  # fmt: skip
    return Chain(operands, attrs)


def run_chain(one: Chain, scratch: dict[str, Tensor | None]) -> None:
    for kernel in READS:
        case = one.case(kernel)
        load(kernel, "cuda").launch(**case.operands, **case.outputs, **case.attrs, scratch=scratch[kernel])


def check_chain(one: Chain, before: Chain) -> None:
    """Each launch against float64, given what the one before it left."""
    done = Chain({name: tensor.cpu() for name, tensor in one.operands.items()}, one.attrs)
    assert_sums(done.case("prefix_logsumexp"), done.operands["logsumexp"], slack=2)
    assert_mass(done.case("key_mass"), done.operands["mass"], slack=2)
    selection = done.case("top_keys")
    selection.operands["selected"] = before.operands["selected"]
    chosen = done.operands["selected"]
    masses = selection.operands["mass"].double()
    expected = stated_selection(selection)
    numbers = 1 + selection.attrs["k"] // selection.attrs["page"]
    for b, prefix in enumerate(before.operands["captured"].tolist()):
        start = int(before.operands["cu_keys"][b])
        for own in range(4):
            at = (4 + own) * numbers
            mine, wanted = (x[int(before.operands["owner"][b]), at : at + numbers].tolist() for x in (chosen, expected))
            assert mine[0] == wanted[0] and sorted(mine[1 : 1 + mine[0]]) == mine[1 : 1 + mine[0]]
            sums = torch.stack(
                [masses[own, j : min(j + 2, start + prefix)].sum() for j in range(start, start + prefix, 2)]
            )
            # sums in float32: a page that nearly ties with the last may be another
            torch.testing.assert_close(
                sums[mine[1 : 1 + mine[0]]].sort().values,
                sums[wanted[1 : 1 + mine[0]]].sort().values,
                rtol=1e-6,
                atol=0,
            )
    y = done.operands["y"]
    assert_attended(done.case("selected_attention"), y, torch.full_like(y, float("nan")), triton=True)


def test_a_captured_chain_serves_other_lengths_and_allocates_nothing() -> None:
    """Replayed, the launches read what the lengths are then."""
    first = chain([(10, 3_000, 2_990), (22, 50, 28)], [2_990, 28], 3_200, 3_100)
    second = chain([(31, 60, 29), (1, 3_010, 3_009)], [28, 3_008], 3_200, 3_100)
    now = Chain({name: tensor.cuda() for name, tensor in first.operands.items()}, first.attrs)
    scratch = {kernel: scratch_for(first.case(kernel), "cuda") for kernel in READS}
    run_chain(now, scratch)
    torch.cuda.synchronize()
    requests = torch.cuda.memory_stats()["allocation.all.allocated"]
    run_chain(now, scratch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requests
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_chain(now, scratch)
    for one in (first, second):
        for name, tensor in one.operands.items():
            assert tensor.shape == now.operands[name].shape
            now.operands[name].copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        check_chain(now, one)
