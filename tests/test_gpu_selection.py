"""Selection on a real CUDA device: sizes of models and contexts, nothing allocated, one captured graph for other settings.

The cases of `test_selection` in Triton run on a GPU too.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32, Case, assert_within, name_of, randn
from test_sampling import some_keys
from test_selection import (
    MASK,
    assert_transfer,
    cases,
    nucleus_case,
    scores_of,
    shuffled,
    split,
    stated,
    transfer_case,
    verify_nucleus,
)
from test_triton_kernels import INTERPRETED, moved, run, scratch_for

from mosaic.kernels import load
from mosaic.registrar.operators import transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set in this process"),
]

VOCABULARY = 126_464  # LLaDA-8B's


@pytest.mark.parametrize("rule", transfer.RULES)
@pytest.mark.parametrize("kind", ["confidence", "ties"])
def test_a_context_of_131072_rows(kind: str, rule: str) -> None:
    lengths = [1 << 17, 1, 4097, 0, 32]
    score = scores_of(kind, sum(lengths) + 77)
    threshold = 2.0 if rule == "factor" else 0.75
    assert_transfer(transfer_case(lengths, rule, score, quota=700, threshold=threshold, padding=77), "triton")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("kept", "top_k"), [(0, 0), (500, 0), (0, 50), (30_000, 20_000)])
def test_a_vocabulary_of_126464_tokens(kept: int, top_k: int, temperature: float, dtype: torch.dtype) -> None:
    """In bfloat16 thousands of tokens tie, at the boundary too."""
    logits = shuffled(randn(VOCABULARY, dtype=dtype, scale=3), 3)
    top_p = split(logits[0], kept, temperature) if kept else 1.0
    case = nucleus_case(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    verify_nucleus(case, run(case, "cuda"))


def test_samples_and_figures_are_those_of_the_cpu() -> None:
    case = nucleus_case(shuffled(randn(32_000, dtype=BF16, scale=2), 64), temperature=1.0, top_k=200)
    found = run(case, "cuda")
    case.launch()
    assert (found["sample"] == case.outputs["sample"]).sum() >= 63  # one draw may be a tie within the noise's error
    for name in ("margin", "entropy"):
        assert_within(found[name], case.outputs[name].double(), 1e-4)


def test_a_launch_allocates_nothing() -> None:
    for case in cases(3000, vocabulary=5000, dtype=BF16):
        given = {name: moved(t, "cuda") for name, t in (case.operands | case.outputs).items()}
        launch, scratch = load(case.kernel, "cuda").launch, scratch_for(case, "cuda")
        launch(**given, **case.attrs, scratch=scratch)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launch(**given, **case.attrs, scratch=scratch)
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, case.kernel


def captured(case: Case) -> tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor]]:
    given = {name: moved(t, "cuda") for name, t in (case.operands | case.outputs).items()}
    launch = load(case.kernel, "cuda").launch
    launch(**given, **case.attrs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(**given, **case.attrs)
    return graph, given


@pytest.mark.parametrize("rule", transfer.RULES)
def test_one_graph_serves_other_sequences_quotas_and_thresholds(rule: str) -> None:
    """A bucket of rows and sequences: fewer rows than it has are padding, missing sequences are empty."""
    rows, seqs = 600, 5
    graph, given = captured(transfer_case([120] * 5, rule, scores_of("ties", rows), quota=3, threshold=0.5))
    for seed, lengths in enumerate(([600, 0, 0, 0, 0], [32, 17, 1, 250, 0], [0, 0, 0, 0, 0])):
        case = transfer_case(
            lengths, rule, scores_of("ties", rows, seed), quota=np.arange(seqs) * 9, threshold=0.25 * seed,
            padding=rows - sum(lengths), seed=seed,
        )  # fmt: skip
        for name, value in case.operands.items():
            given[name].copy_(value)
        graph.replay()
        assert (given["chosen"].tolist(), given["committed"].tolist()) == stated(case)
        assert case.attrs["mask_id"] == MASK


def test_one_graph_serves_every_temperature_top_p_and_top_k() -> None:
    logits = shuffled(randn(5000, dtype=BF16, scale=2), 4)
    graph, given = captured(nucleus_case(logits))
    for temperature, kept, top_k in ((0.0, 0, 0), (0.0, 9, 0), (1.3, 100, 0), (0.5, 0, 20), (1.0, 50, 300)):
        top_p = split(logits[0], kept, temperature) if kept else 1.0
        case = nucleus_case(logits, temperature=temperature, top_p=top_p, top_k=top_k)
        case.operands["keys"] = some_keys(4, top_k)
        for name, value in case.operands.items():
            given[name].copy_(value)
        graph.replay()
        verify_nucleus(case, {name: given[name].cpu() for name in case.outputs})
