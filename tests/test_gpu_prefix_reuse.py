"""Outputs over long prefixes, kept and joined, on a real CUDA device: the kernels for Hopper and others, replayed, unallocated.

The cases of `test_prefix_reuse_triton` run on a GPU too; generations are in `test_gpu_generation`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32, Case, assert_within, name_of, unit
from test_kv import kv_case, softmax_rows, triton_bound
from test_prefix_reuse_kernels import stated_sums, summed
from test_triton_kernels import INTERPRETED, moved, on_card, scratch_for
from torch import Tensor

from mosaic.kernels import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set in this process"),
]

BLOCK = 32
PREFIXES = (9_984, 0, 992)
WINDOWS = [(32, 10_016, 9_984), (32, 32, 0), (64, 1_024, 960)]  # the last has the block before in it


class Chain:
    """The operators over one batch on the card: attention to prefixes, joined with the blocks, then joined from what was kept."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.whole = kv_case(WINDOWS, 16, 4, 128, dtype, block=BLOCK, padding=3)
        counts = torch.tensor(PREFIXES, dtype=torch.int32)
        given = {name: moved(tensor, "cuda") for name, tensor in self.whole.operands.items()}
        rows, heads = given["q"].shape[0], 16
        self.part = summed(
            Case("kv_attention", given | {"seen": counts.cuda()}, self._outputs(given), self.whole.attrs)
        )
        self.part.outputs["logsumexp"] = torch.full((rows, heads), float("nan"), device="cuda")
        states = {
            "kept": torch.full((5, 2 * BLOCK * heads * 128), float("nan"), dtype=dtype, device="cuda"),
            "kept_sums": torch.full((4, 2 * BLOCK * heads), float("nan"), device="cuda"),
        }
        self.attrs = {name: self.whole.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale", "block")}
        self.attrs |= {"slot": 1, "rows": BLOCK}
        owner = torch.tensor([2, 0, 3]).cuda()
        self.joined = Case(
            "joined_attention",
            given | {"prefix": counts.cuda(), **states, "owner": owner},
            self._outputs(given),
            self.attrs,
        )
        outputs = self.part.outputs
        self.fresh = {"fresh": outputs["y"], "fresh_sums": outputs["logsumexp"], "refreshed": counts.cuda()}
        self.scratch = scratch_for(self.part, "cuda")

    def _outputs(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": torch.full_like(given["q"], float("nan"))}

    def refresh(self) -> Tensor:
        part, joined = self.part, self.joined
        on_card(part).launch(**part.operands, **part.outputs, **part.attrs, scratch=self.scratch)
        y = joined.outputs["y"]
        load("joined_attention", "cuda").launch(**joined.operands, **self.fresh, **self.attrs, y=y)
        return y

    def reuse(self, y: Tensor, **changed: Any) -> Tensor:
        load("joined_attention", "cuda").launch(**self.joined.operands | changed, **self.attrs, y=y)
        return y


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_prefixes_and_blocks_joined_are_attention_to_both(dtype: torch.dtype) -> None:
    chain = Chain(dtype)
    (expected, sees), y = softmax_rows(chain.whole), chain.refresh().cpu()
    roundings = 4 * unit(dtype) * softmax_rows(chain.whole, absolute=True)[0]  # of two results and of their join
    assert_within(y[sees], expected[sees], (triton_bound(chain.whole, expected) + roundings)[sees])
    sums, found = chain.part.outputs["logsumexp"].cpu(), Case(
        "prefix_attention", {name: tensor.cpu() for name, tensor in chain.part.operands.items()}, {}, chain.part.attrs
    )  # fmt: skip
    stated = stated_sums(found)
    torch.testing.assert_close(sums.double(), stated, rtol=1e-4, atol=2e-2 if dtype == BF16 else 1e-4, equal_nan=True)
    # the block's own rows again, from what was kept: the same bits
    again = torch.full_like(chain.joined.outputs["y"], float("nan"))
    positions = chain.joined.operands["positions"].clone()
    positions[64:96] += BLOCK  # rows of the block before, which a later step does not have
    chain.reuse(again, positions=positions)
    mine = torch.tensor([*range(32), *range(32, 64), *range(96, 128)])
    assert torch.equal(again.cpu()[mine], y[mine])


def test_a_captured_refresh_serves_other_lengths_and_allocates_nothing() -> None:
    chain = Chain(BF16)
    chain.refresh()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.refresh()
    shorter = torch.tensor([5_024, 0, 992], dtype=torch.int32).cuda()
    for tensor in (chain.part.operands["seen"], chain.joined.operands["prefix"], chain.fresh["refreshed"]):
        tensor.copy_(shorter)
    for tensor, count in ((chain.joined.operands["seen"], 5_056), (chain.whole.operands["seen"], 5_056)):
        tensor[0] = count
    places = torch.arange(5_024, 5_056, dtype=torch.int32)
    for operands in (chain.part.operands, chain.joined.operands, chain.whole.operands):
        operands["positions"][:32] = places.to(operands["positions"].device)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 8  # what this test has made
    expected, sees = softmax_rows(chain.whole)
    roundings = 4 * unit(BF16) * softmax_rows(chain.whole, absolute=True)[0]
    bound = triton_bound(chain.whole, expected) + roundings
    assert_within(chain.joined.outputs["y"].cpu()[sees], expected[sees], bound[sees])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_change_of_many_rows(dtype: torch.dtype) -> None:
    """Blocks of 32 rows of 4,096 columns, of which one is new."""
    generator = torch.Generator().manual_seed(1)
    q, kept = (torch.randn(96, 4096, generator=generator).to(dtype) for _ in range(2))
    kept[32:64] = q[32:64] + 0.01 * kept[32:64]
    operands = {
        "q": q, "kept": kept.view(3, -1), "owner": torch.tensor([0, 1, 2]), "cu_seqlens": torch.tensor([0, 32, 64, 96]).int(),
        "prefix": torch.tensor([64, 32, 96]).int(), "positions": torch.cat([torch.arange(n, n + 32) for n in (64, 32, 96)]).int(),
        "refreshed": torch.tensor([0, 0, 96]).int(),
    }  # fmt: skip
    case = Case("query_change", operands, {"change": torch.full((3,), float("nan"))}, {"rows": 32})
    given = {name: tensor.clone().cuda() for name, tensor in operands.items()}
    change = case.outputs["change"].cuda()
    load("query_change", "cuda").launch(**given, change=change, **case.attrs, scratch=scratch_for(case, "cuda"))
    apart = [
        (q[rows].double() - kept[rows].double()).norm() / kept[rows].double().norm()
        for rows in (slice(0, 32), slice(32, 64))
    ]
    torch.testing.assert_close(
        change.cpu().double(), torch.stack([*apart, torch.tensor(0.0)]).double(), rtol=1e-4, atol=0
    )
    assert torch.equal(given["kept"].view(96, 4096).cpu(), torch.cat([kept[:64], q[64:]]))
