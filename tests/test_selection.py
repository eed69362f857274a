"""Scores of rows, nuclei of logits, guidance, and which rows are committed: on the CPU, in Triton, in planned graphs.

What is expected is stated here, in float64 or plain Python, from what the operators' contracts say and nothing of the
package; the random numbers by the statement of `test_sampling`.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import sympy
import torch
from numpy.typing import NDArray
from operator_tables import scratch_rules
from runtime_helpers import allocated_bytes
from test_kernels import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    OTHERS_SOAK,
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
from test_sampling import MIXED, NOISE_ERROR, halves_of, noise_of, some_keys, turns, uniform_of, words_of
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.kernels import row_score as row_score_kernel
from mosaic.kernels import transfer as transfer_kernel
from mosaic.kernels.shared import sampling
from mosaic.models.parts import Rule, Score
from mosaic.planner import plan_graph
from mosaic.planner.check import check_plan
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.operators import row_score, transfer
from mosaic.registrar.polynomial import symbol
from mosaic.runtime.executor import Executor
from mosaic.runtime.workspace import Workspace

if importlib.util.find_spec("triton") is not None:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    NO_DEVICE = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device")
    MARKS: Any = () if INTERPRETED else (pytest.mark.gpu, NO_DEVICE)
else:
    MARKS = pytest.mark.skip(reason="triton is not installed")
BACKENDS = ["cpu", pytest.param("triton", marks=MARKS)]
backends = pytest.mark.parametrize("backend", BACKENDS)

KERNELS = ("guide", "perturb_score", "replace_rows", "row_nucleus", "row_score", "transfer")


def launched(case: Case, backend: str) -> dict[str, Tensor]:
    """The outputs of a launch; the case's operands stay as they are, also on the CPU."""
    if backend == "triton":
        return run(case, DEVICE)
    mine = Case(case.kernel, {name: t.clone() for name, t in case.operands.items()}, dict(case.outputs), case.attrs)
    mine.launch()
    for name, given in case.operands.items():
        assert name in contract(case.kernel).updates or torch.equal(mine.operands[name], given), name
    return mine.outputs | {name: mine.operands[name] for name in contract(case.kernel).updates}


def own_uniforms(keys: Tensor, domain: int) -> NDArray[np.float32]:
    """u of word 0 of the counter (0, domain, 0, 0) under each key."""
    return uniform_of(words_of((0, domain, 0, 0), halves_of(keys)))[0][:, 0]


def own_gumbels(keys: Tensor) -> Tensor:
    return torch.from_numpy(-np.log(-np.log1p(-own_uniforms(keys, 3).astype(np.float64))))


# --- scores -----------------------------------------------------------------------------------------------------------


def score_case(rows: int, kind: str, keys: bool = True) -> Case:
    maximum, gap = randn(rows, scale=9), randn(rows, seed=1).abs()
    second = maximum - gap
    second[::7] = float("-inf")  # a vocabulary of one
    operands = {
        "maximum": maximum,
        "second": second,
        "logsumexp": maximum + randn(rows, seed=2).abs() + 0.1,
        "entropy": randn(rows, seed=3).abs(),
        "sample_logit": maximum - randn(rows, seed=4, scale=3).abs(),
    }
    if keys:
        operands["keys"] = some_keys(rows)
    return Case("row_score", operands, {"score": torch.empty(rows)}, {"kind": kind})


@pytest.mark.grid
@backends
@pytest.mark.parametrize("kind", row_score.KINDS)
@pytest.mark.parametrize("rows", [1, 37, 2500])
def test_row_score(rows: int, kind: str, backend: str) -> None:
    case = score_case(rows, kind, keys=kind == "random")
    score = launched(case, backend)["score"]
    maximum, second, total, entropy, drawn = (t.double() for t in list(case.operands.values())[:5])
    if kind == "random":
        assert np.array_equal(score.numpy(), own_uniforms(case.operands["keys"], 2))
        return
    expected = {
        "confidence": (drawn - total).exp(),
        "margin": (maximum - total).exp() - (second - total).exp(),
        "entropy": -entropy,
        "sequential": -torch.arange(rows, dtype=F64),
    }[kind]
    # a difference is rounded, an exponential is off by 2 ulp and by what its argument is
    relative = unit(F32) * (torch.where(second.isfinite(), second, maximum).abs() + maximum.abs() + total.abs() + 8)
    exact = kind in ("entropy", "sequential")
    assert_within(score, expected, 0.0 if exact else 2 * relative * (maximum - total).exp() + torch.finfo(F32).tiny)


def test_numbers_of_rows_are_the_stated_ones() -> None:
    keys = torch.cat([some_keys(1500), torch.tensor([0, -1, 2**63 - 1, -(2**63), 1 << 32])])
    assert np.array_equal(sampling.uniforms(keys).numpy(), own_uniforms(keys, 2))
    assert (sampling.gumbels(keys).double() - own_gumbels(keys)).abs().max() < 1e-5
    assert sampling.uniforms(keys[:0]).shape == sampling.gumbels(keys[:0]).shape == (0,)


def test_numbers_of_rows_are_uniform_and_apart_from_each_other() -> None:
    keys = some_keys(20_000)
    drawn = [torch.from_numpy(own_uniforms(keys, domain)).double() for domain in (0, 1, 2, 3)]
    for u in drawn[2:]:
        counts = torch.histc(u, bins=64, min=0, max=1)
        expected = u.numel() / 64
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - 63) < 4 * (2 * 63) ** 0.5
    for i, u in enumerate(drawn):  # no domain repeats another
        for v in drawn[:i]:
            assert abs(float(((u - 0.5) * (v - 0.5)).mean())) < 4 / 12 / u.numel() ** 0.5


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize("temperature", [0.0, 0.3, 7.0, MIXED], ids=str)
@pytest.mark.parametrize("rows", [1, 300, 2500])
def test_perturb_score(rows: int, temperature: Any, backend: str) -> None:
    score = randn(rows)
    score[::5] = float("-inf")
    operands = {"score": score, "keys": some_keys(rows), "temperature": turns(temperature, rows)}
    found, heat = launched(Case("perturb_score", operands), backend)["score"], operands["temperature"].double()
    assert torch.equal(found[heat == 0], score[heat == 0])
    expected, finite = score.double() / heat + own_gumbels(operands["keys"]), score.isfinite()
    assert torch.equal(found == float("-inf"), ~finite)
    finite &= heat > 0
    heat[heat == 0] = 1.0  # not compared
    bound = NOISE_ERROR + 4 * unit(F32) * (expected.abs() + score.double().abs() / heat)
    assert_within(found[finite], expected[finite], bound[finite])


def test_the_highest_perturbed_scores_are_draws_without_replacement() -> None:
    """The probabilities of ordered pairs drawn from three rows: p_i p_j / (1 - p_i)."""
    score, temperature, groups = torch.tensor([0.9, 0.5, 0.1]), 0.5, 6000
    case = Case("perturb_score", {"score": score.repeat(groups), "keys": some_keys(3 * groups)})
    case.operands["temperature"] = torch.full((3 * groups,), temperature)
    order = launched(case, "cpu")["score"].view(groups, 3).argsort(dim=1, descending=True)
    counts = torch.bincount(order[:, 0] * 3 + order[:, 1], minlength=9).double()
    p = (score.double() / temperature).softmax(0)
    chi_square = 0.0
    for i in range(3):
        for j in set(range(3)) - {i}:
            expected = float(groups * p[i] * p[j] / (1 - p[i]))
            chi_square += (float(counts[3 * i + j]) - expected) ** 2 / expected
    assert chi_square < 5 + 4 * 10**0.5  # five degrees of freedom, four deviations


# --- guidance ---------------------------------------------------------------------------------------------------------


@pytest.mark.grid
@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("guidance", [0.0, 1.5, (0.5, 0.0, 2.0)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (67, 33), (3, 4099)], ids=str)
def test_guide(shape: tuple[int, int], guidance: Any, dtype: torch.dtype, backend: str) -> None:
    if backend == "triton" and dtype in (F64, F16):
        pytest.skip("models on GPUs are float32 or bfloat16")
    x, uncond = strided(randn(*shape, dtype=dtype, scale=3)), strided(randn(*shape, dtype=dtype, seed=1), 8, 8)
    case = Case("guide", {"x": x, "uncond": uncond, "guidance": turns(guidance, shape[0])})
    found = launched(case, backend)["x"]
    c, u, scale = x.double(), uncond.double(), 1 + case.operands["guidance"].double()[:, None]
    expected = u + scale * (c - u)
    magnitude = u.abs() + scale * (c.abs() + u.abs())
    assert_within(found, expected, gamma(4, dtype) * magnitude + rounding(expected, dtype))


# --- nuclei -----------------------------------------------------------------------------------------------------------


def nucleus_case(logits: Tensor, *, temperature: Any = 0.0, top_p: Any = 1.0, top_k: Any = 0) -> Case:
    rows = logits.shape[0]
    operands = {
        "logits": logits,
        "keys": some_keys(rows),
        "temperature": turns(temperature, rows),
        "top_p": turns(top_p, rows),
        "top_k": turns(top_k, rows, torch.int32),
    }
    figures = {name: torch.empty(rows) for name in ("probability", "margin", "entropy")}
    return Case("row_nucleus", operands, {"sample": torch.empty(rows, dtype=torch.int64), **figures})


def shuffled(values: Tensor, rows: int) -> Tensor:
    """Rows of the same values [V] in other places, so that one top_p lies between the same sums in each."""
    generator = torch.Generator().manual_seed(7)
    return strided(torch.stack([values[torch.randperm(len(values), generator=generator)] for _ in range(rows)]))


def split(values: Tensor, kept: int, temperature: float) -> float:
    """A top_p that keeps a given number of tokens, halfway between the sums before and after the last of them."""
    heat = temperature or 1.0
    mass = torch.softmax(values.double().sort(descending=True).values / heat, dim=0).cumsum(0)
    return float((mass[kept - 1] + (mass[kept - 2] if kept > 1 else 0.0)) / 2)


def kept_by_dream(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[int]:
    """Tokens in order, removed where the sum up to the one before is beyond top_p; then the first top_k of the rest."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    heat = temperature if temperature > 0 else 1.0
    weights = [math.exp((logits[v] - logits[order[0]]) / heat) for v in order]
    total, before, kept = math.fsum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if not kept or top_p >= 1.0 or before <= top_p * total:
            kept.append(token)
        before += weight
    return kept[:top_k] if top_k > 0 else kept


def verify_nucleus(case: Case, found: dict[str, Tensor]) -> None:
    """Compare every row with the statement in float64; the masses are clear of top_p."""
    logits = case.operands["logits"].double()
    settings = zip(*(case.operands[name].tolist() for name in ("temperature", "top_p", "top_k")), strict=True)
    noise = noise_of(case.operands["keys"], logits.shape[1])
    for row, (values, (temperature, top_p, top_k)) in enumerate(zip(logits, settings, strict=True)):
        kept, heat = kept_by_dream(values.tolist(), temperature, top_p, top_k), temperature if temperature > 0 else 1.0
        chance = torch.softmax(values[kept] / heat, dim=0)
        drawn = int(found["sample"][row])
        assert drawn in kept
        scores = values[kept] + temperature * noise[row, kept]
        largest = float(
            (values[kept][values[kept].isfinite()].abs() + temperature * noise[row, kept].abs().amax()).amax()
        )
        error = temperature * NOISE_ERROR + 2 * unit(F32) * largest
        assert float(scores[kept.index(drawn)]) >= float(scores.max()) - 2 * error
        if temperature == 0.0:
            assert drawn == kept[0]
        # an argument of exp is rounded twice: relative to the largest difference that leaves a number
        relative = unit(F32) * (8 + 2 * float(values[kept].abs().nan_to_num(posinf=0).max()) / heat) + gamma(64, F32)
        assert abs(float(found["probability"][row]) - float(chance[kept.index(drawn)])) <= relative
        second = float(chance[1]) if len(kept) > 1 else 0.0
        assert abs(float(found["margin"][row]) - (float(chance[0]) - second)) <= 2 * relative
        entropy = float((chance * (chance + 1e-10).log()).sum())
        assert abs(float(found["entropy"][row]) - entropy) <= 4 * relative * (1 + abs(entropy))


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
@pytest.mark.parametrize(
    ("vocabulary", "kept", "top_k"),
    [
        (1, 0, 0),
        (2, 1, 0),
        (300, 0, 0),
        (300, 0, 7),
        (300, 40, 0),
        (300, 40, 7),
        (300, 5, 60),
        (5003, 200, 0),
        (5003, 1, 3),
    ],
)
def test_row_nucleus(
    vocabulary: int, kept: int, top_k: int, temperature: float, dtype: torch.dtype, backend: str
) -> None:
    if backend == "triton" and dtype in (F64, F16):
        pytest.skip("models on GPUs are float32 or bfloat16")
    values = randn(vocabulary, dtype=dtype if dtype != F64 else F32, scale=2).to(dtype)
    logits = shuffled(values, 3)
    top_p = split(logits[0], kept, temperature) if kept else 1.0
    case = nucleus_case(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    verify_nucleus(case, launched(case, backend))


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize(("kept", "temperature"), [(1, 1.0), (3, 0.0), (3, 1.0), (5, 1.0)])
def test_of_equal_logits_the_lower_ids_are_kept(kept: int, temperature: float, backend: str) -> None:
    """Ties at the boundary, far apart: as many of them as fit, by top_p and by top_k."""
    logits = torch.full((4, 9001), -30.0)
    logits[:, [5, 4097, 4098, 8200, 9000]] = 1.0
    logits[1] = -logits[1].abs()  # negative numbers
    logits[2, 8999] = 1.0 + 2**-23  # one of its own before them
    logits[3] = 0.0
    logits[3, 4000:] = -0.0  # one zero
    case = nucleus_case(logits, temperature=temperature, top_k=kept)
    verify_nucleus(case, launched(case, backend))
    case = nucleus_case(logits[:1], temperature=temperature, top_p=(kept - 0.5) / 5)
    found = launched(case, backend)
    verify_nucleus(case, found)
    assert float(found["entropy"][0]) == pytest.approx(-math.log(kept), abs=1e-5)


@backends
def test_each_row_is_cut_by_its_own_settings(backend: str) -> None:
    values = randn(300, scale=2)
    heats, top_p = (0.0, 0.6, 1.7), (split(values, 40, 0.0), 1.0, split(values, 5, 1.7))
    case = nucleus_case(shuffled(values, 7), temperature=heats, top_p=top_p, top_k=(0, 7))
    verify_nucleus(case, launched(case, backend))
    verify_nucleus(case, load("row_nucleus").reference(**case.operands))


@backends
def test_rows_that_are_not_cut_are_not_written(backend: str) -> None:
    logits, some = strided(randn(4, 100, scale=2)), turns((0, 1, 1), 4, torch.uint8)
    case = nucleus_case(logits, temperature=MIXED, top_p=0.9, top_k=20)
    whole = launched(case, backend)
    whole, cut = {name: values.clone() for name, values in whole.items()}, some == 1
    case.operands["cuts"] = some
    for name, values in launched(case, backend).items():
        assert torch.equal(values[cut], whole[name][cut]) and (values != whole[name])[~cut].all(), name


@backends
def test_each_row_has_what_it_has_alone_beside_rows_of_other_settings(backend: str) -> None:
    """To the bit: samples beside greedy rows, which are those of the statistics, and nuclei."""
    from test_kernels import statistics_outputs
    from test_sampling import sample_case

    logits = strided(randn(3, 300, scale=2))
    mixed = launched(sample_case("row_sample", {"logits": logits}, MIXED, 3), backend)
    statistics = launched(Case("row_stats", {"logits": logits}, statistics_outputs(3)), backend)
    assert all(torch.equal(mixed[name], values) for name, values in statistics.items())
    assert (mixed["sample"][0], mixed["sample_logit"][0]) == (statistics["token"][0], statistics["maximum"][0])
    settings = {"temperature": MIXED, "top_p": (0.5, 1.0, 0.8), "top_k": (0, 5, 9)}
    cut = launched(nucleus_case(logits, **settings), backend)
    for row, heat in enumerate(MIXED):
        drawn = launched(sample_case("row_sample", {"logits": logits}, heat, 3), backend)
        assert all(torch.equal(mixed[name][row], values[row]) for name, values in drawn.items())
        kept = launched(nucleus_case(logits, **{name: values[row] for name, values in settings.items()}), backend)
        assert all(torch.equal(cut[name][row], values[row]) for name, values in kept.items())


def replaced(rows: int, dtype: torch.dtype = F32) -> Case:
    y, x = (randn(rows, seed=seed, scale=9).to(dtype) for seed in (0, 1))
    return Case("replace_rows", {"y": y, "x": x, "chosen": turns((1, 0, 0, 1, 1), rows, torch.uint8)})


@backends
@pytest.mark.parametrize("dtype", [F32, torch.int64], ids=name_of)
def test_replace_rows(dtype: torch.dtype, backend: str) -> None:
    case = replaced(600, dtype)
    expected = case.operands["x"].where(case.operands["chosen"] == 1, case.operands["y"])
    assert torch.equal(launched(case, backend)["y"], expected)
    assert torch.equal(load("replace_rows").reference(**case.operands), expected)


@backends
def test_minus_infinity_is_never_drawn(backend: str) -> None:
    logits = torch.full((30, 40), float("-inf"))
    logits[:, [7, 31]] = 0.5
    found = launched(nucleus_case(logits, temperature=1.0), backend)
    assert set(found["sample"].tolist()) == {7, 31}
    assert found["probability"].tolist() == [0.5] * 30 and found["margin"].tolist() == [0.0] * 30
    nothing = launched(nucleus_case(torch.full((2, 300), float("-inf")), temperature=1.0, top_p=0.5), backend)
    assert {name: t.tolist() for name, t in nothing.items()} == {
        "sample": [0, 0], "probability": [0, 0], "margin": [0, 0], "entropy": [0, 0],
    }  # fmt: skip


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize("top_p", [-1.0, 0.0, 1e-9])
def test_the_first_token_is_always_kept(top_p: float, backend: str) -> None:
    logits = shuffled(randn(300, scale=2), 3)
    found = launched(nucleus_case(logits, temperature=1.0, top_p=top_p), backend)
    assert torch.equal(found["sample"], logits.argmax(1)) and found["probability"].tolist() == [1.0] * 3


@backends
def test_without_top_p_and_top_k_the_samples_are_those_of_row_sample(backend: str) -> None:
    from test_sampling import sample_case

    logits = strided(randn(5, 3001, dtype=BF16, scale=2))
    nucleus = launched(nucleus_case(logits, temperature=0.8), backend)
    plain = launched(sample_case("row_sample", {"logits": logits}, 0.8, 5), backend)
    assert torch.equal(nucleus["sample"], plain["sample"])
    confidence = (plain["sample_logit"].double() / 0.8 - torch.logsumexp(logits.double() / 0.8, dim=1)).exp()
    assert_within(nucleus["probability"], confidence, 1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_reference_of_row_nucleus_is_the_stated_rule(temperature: float) -> None:
    values = randn(700, dtype=F64, scale=2)
    case = nucleus_case(shuffled(values, 4), temperature=temperature, top_p=split(values, 90, temperature), top_k=70)
    verify_nucleus(case, load("row_nucleus").reference(**case.operands))


# --- transfer ---------------------------------------------------------------------------------------------------------

MASK = 99


def transfer_case(
    lengths: list[int], rule: str, score: Tensor, *, quota: Any, threshold: Any, padding: int = 0, masked: float = 0.7,
    edit_threshold: float = 0.5, seed: int = 0,
) -> Case:  # fmt: skip
    """Sequences with these numbers of rows, then padding that looks like candidates."""
    generator = torch.Generator().manual_seed(seed)
    rows, seqs = sum(lengths) + padding, len(lengths)
    current = torch.randint(5, (rows,), generator=generator)
    current[torch.rand(rows, generator=generator) < masked] = MASK
    current[sum(lengths) :] = MASK
    operands = {
        "token": torch.randint(5, (rows,), generator=generator),
        "score": score,
        "current": current,
        "cu_rows": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "quota": torch.as_tensor(quota, dtype=torch.int32).expand(seqs).clone(),
        "threshold": torch.as_tensor(threshold, dtype=F32).expand(seqs).clone(),
    }
    if rule == "edit":
        operands["edit_threshold"] = torch.full((seqs,), edit_threshold)
    outputs = {"chosen": torch.empty(rows, dtype=torch.int64), "committed": torch.empty(rows, dtype=torch.uint8)}
    return Case("transfer", operands, outputs, {"rule": rule, "mask_id": MASK})


def stop_of_fast_dllm(confidences: list[float], factor: float) -> int:
    """The number that the factor rule commits, as in its source: counted from 0, in the order of confidence."""
    thresholds = [-1.0] + [
        float(np.float32(1) - np.float32(factor) / np.float32(i + 2)) for i in range(1, len(confidences))
    ]
    stop = 0
    for stop, limit in enumerate(thresholds[: len(confidences)]):
        if confidences[stop] < limit:
            break
    return stop + 1 if confidences and stop in (0, len(confidences) - 1) else stop


def stated(case: Case) -> tuple[list[int], list[int]]:
    """Chosen tokens and committed flags, row by row."""
    given = {name: t.tolist() for name, t in case.operands.items()}
    score, current, token = given["score"], given["current"], given["token"]
    chosen, committed = list(current), [0] * len(current)
    for b, limit in enumerate(given["threshold"]):
        rows = range(given["cu_rows"][b], given["cu_rows"][b + 1])
        ranked = sorted((r for r in rows if current[r] == MASK), key=lambda r: (-score[r], r))
        quota, high = max(given["quota"][b], 0), [r for r in ranked if score[r] > limit]
        taken = {
            "top": lambda ranked=ranked, quota=quota: ranked[:quota],
            "threshold": lambda ranked=ranked, limit=limit: [r for r in ranked if r == ranked[0] or score[r] >= limit],
            "dynamic": lambda ranked=ranked, quota=quota, high=high: high if len(high) >= quota else ranked[:quota],
            "above": lambda high=high: high,
            "factor": lambda ranked=ranked, limit=limit: ranked[: stop_of_fast_dllm([score[r] for r in ranked], limit)],
        }
        taken["edit"] = taken["dynamic"]
        done = set(taken[case.attrs["rule"]]())
        if case.attrs["rule"] == "edit":
            others = {r for r in rows if current[r] != MASK and token[r] != current[r]}
            done |= {r for r in others if score[r] > given["edit_threshold"][b]}
        for row in done:
            chosen[row], committed[row] = token[row], 1
    return chosen, committed


def assert_transfer(case: Case, backend: str) -> list[int]:
    found = launched(case, backend)
    assert (found["chosen"].tolist(), found["committed"].tolist()) == stated(case)
    return found["committed"].tolist()


def scores_of(kind: str, rows: int, seed: int = 0) -> Tensor:
    """Confidences; few values, many ties; negative entropies; any sign, zeros of both and -inf."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(rows, generator=generator)
    if kind == "confidence":
        return u
    if kind == "ties":
        return (u * 4).floor() / 4
    if kind == "entropy":
        return -5 * u
    score = (u * 7).floor() - 3
    score[(u * 1000).floor() % 5 == 0] = -0.0
    score[(u * 1000).floor() % 5 == 1] = float("-inf")
    return score


KINDS = ("confidence", "ties", "entropy", "signs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", transfer.RULES)
def test_transfer_on_the_cpu(rule: str, kind: str) -> None:
    check_transfer(rule, kind, "cpu")


@pytest.mark.some
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", transfer.RULES)
def test_transfer_in_triton(rule: str, kind: str, backend: str) -> None:
    check_transfer(rule, kind, backend)


def check_transfer(rule: str, kind: str, backend: str) -> None:
    """Empty sequences, one row, sizes that are no multiple of a tile, padding; quotas of 0, below it, beyond the rows."""
    for seed, (lengths, padding) in enumerate([([1], 0), ([0, 5, 0, 1, 31, 0], 9), ([1025, 3, 300], 1), ([2500], 700)]):
        seqs, rows = len(lengths), sum(lengths) + padding
        score = scores_of(kind, rows, seed)
        limit = 0.5 if kind in ("confidence", "ties") else -1.25 if kind == "entropy" else 0.0
        quota = torch.tensor([3, 0, 1000, -2, 7, 1])[torch.arange(seqs) % 6]
        threshold = 2.5 if rule == "factor" else limit
        case = transfer_case(
            lengths, rule, score, quota=quota, threshold=threshold, padding=padding, edit_threshold=limit, seed=seed
        )
        assert_transfer(case, backend)


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize("rule", transfer.RULES)
def test_transfer_where_everything_is_decided_and_where_nothing_is(rule: str, backend: str) -> None:
    for masked in (0.0, 1.0):
        case = transfer_case([40, 7], rule, scores_of("ties", 47), quota=3, threshold=0.25, masked=masked)
        committed = sum(assert_transfer(case, backend))
        if masked == 0.0 and rule != "edit":
            assert committed == 0


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize("value", [0.5, float("-inf"), -3.0])
@pytest.mark.parametrize("quota", [0, 1, 1500, 3000])
def test_equal_scores_go_to_the_lower_rows(quota: int, value: float, backend: str) -> None:
    case = transfer_case([2100], "top", torch.full((2100,), value), quota=quota, threshold=0.0, masked=1.0)
    assert assert_transfer(case, backend) == [1] * min(quota, 2100) + [0] * max(2100 - quota, 0)


@backends
def test_thresholds_are_strict_or_not(backend: str) -> None:
    """A score that is the threshold counts for `threshold`, and not for the others; float32 neighbours tell."""
    score = torch.tensor(
        [0.9, np.nextafter(np.float32(0.9), np.float32(1)), np.nextafter(np.float32(0.9), np.float32(0))]
    )
    for rule, expected in (("threshold", [1, 1, 0]), ("above", [0, 1, 0]), ("dynamic", [0, 1, 0])):
        case = transfer_case([3], rule, score, quota=1, threshold=0.9, masked=1.0)
        assert assert_transfer(case, backend) == expected
    high = transfer_case([3], "threshold", score, quota=0, threshold=2.0, masked=1.0)
    assert assert_transfer(high, backend) == [0, 1, 0]  # the first, whatever its score
    assert assert_transfer(transfer_case([3], "above", score, quota=2, threshold=2.0, masked=1.0), backend) == [0, 0, 0]


@backends
def test_the_factor_rule_by_hand(backend: str) -> None:
    """Thresholds -1, 1 - f/3, 1 - f/4, ...: with f = 1 they are -1, 0.667, 0.75, 0.8."""
    for scores, count in (
        ([0.1], 1),
        ([0.9, 0.1], 2),  # stops at the last: one more
        ([0.9, 0.1, 0.05], 1),
        ([0.9, 0.7, 0.1, 0.1], 2),
        ([0.9, 0.8, 0.76, 0.1], 4),  # stops at the last
        ([0.99, 0.98, 0.97, 0.96], 4),  # never stops
        ([0.9, 0.8, 0.7, 0.69, 0.68], 2),
        ([-2.0, -3.0, -4.0], 1),  # stops at the first: one more
    ):
        case = transfer_case([len(scores)], "factor", torch.tensor(scores), quota=0, threshold=1.0, masked=1.0)
        assert sum(assert_transfer(case, backend)) == count, scores


@pytest.mark.grid(together=1)
@backends
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 4.0, 50.0])
def test_the_factor_rule_over_lengths(factor: float, backend: str) -> None:
    lengths = [*range(12), 60]
    score = torch.cat(
        [1 - torch.rand(n, generator=torch.Generator().manual_seed(n)) ** 2 / (1 + n % 3) for n in lengths]
    )
    assert_transfer(transfer_case(lengths, "factor", score, quota=0, threshold=factor, masked=1.0), backend)


@backends
def test_a_sequence_is_served_alike_alone_and_in_a_batch(backend: str) -> None:
    score = scores_of("ties", 90)
    together = transfer_case([40, 20, 30], "dynamic", score, quota=[2, 9, 1], threshold=[0.5, 0.8, 0.1])
    whole = launched(together, backend)
    for b, (start, end) in enumerate(((0, 40), (40, 60), (60, 90))):
        per_row = {name: together.operands[name][start:end] for name in ("token", "score", "current")}
        per_sequence = {name: together.operands[name][b : b + 1] for name in ("quota", "threshold")}
        alone = Case("transfer", per_row | per_sequence, attrs=together.attrs)
        alone.operands["cu_rows"] = torch.tensor([0, end - start], dtype=torch.int32)
        alone.outputs = {name: torch.empty_like(t[start:end]) for name, t in whole.items()}
        for name, t in launched(alone, backend).items():
            assert torch.equal(t, whole[name][start:end])


@pytest.mark.parametrize("rule", transfer.RULES)
def test_the_reference_of_transfer_is_the_stated_rule(rule: str) -> None:
    threshold = 1.5 if rule == "factor" else 0.5
    case = transfer_case([30, 0, 11], rule, scores_of("ties", 45), quota=4, threshold=threshold, padding=4)
    found = case.reference()
    assert (found["chosen"].tolist(), found["committed"].tolist()) == stated(case)


# --- all of them --------------------------------------------------------------------------------------------------------


def cases(rows: int, vocabulary: int = 300, width: int = 64, dtype: torch.dtype = F32) -> Iterator[Case]:
    """A case of every way through the kernels."""
    x = randn(rows, width, dtype=dtype)
    yield Case("guide", {"x": x, "uncond": x.clone(), "guidance": torch.full((rows,), 1.5)})
    yield Case("perturb_score", {"score": randn(rows), "keys": some_keys(rows), "temperature": turns(MIXED, rows)})
    for dtype_of_rows in (F32, torch.int64):
        yield replaced(rows, dtype_of_rows)
    for kind in row_score.KINDS:
        yield score_case(rows, kind)
    for temperature in (0.0, MIXED):
        logits = randn(min(rows, 37), vocabulary, dtype=dtype)
        yield nucleus_case(logits, temperature=temperature, top_p=0.9, top_k=50)
    for rule in transfer.RULES:
        yield transfer_case([rows // 2, rows - rows // 2], rule, scores_of("ties", rows), quota=3, threshold=0.5)


@backends
def test_no_rows_are_no_work(backend: str) -> None:
    for case in cases(0):
        assert all(t.numel() == 0 for name, t in launched(case, backend).items()), case.kernel


@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
def test_selection_allocates_nothing(dtype: torch.dtype) -> None:
    found = list(cases(1100 if dtype == F32 else 130, dtype=dtype))
    assert {case.kernel for case in found} == set(KERNELS)
    for case in found:
        check_allocates_nothing(case)


def test_numpy_takes_little_for_itself() -> None:
    """The memory of a launch besides its scratch does not grow with the rows."""
    import tracemalloc

    for case in cases(20_000, vocabulary=3, width=2):
        if case.kernel != "transfer":
            continue
        launch, scratch = load(case.kernel).launch, case.scratch()
        call = lambda launch=launch, case=case, scratch=scratch: launch(  # noqa: E731
            **case.operands, **case.outputs, **case.attrs, scratch=scratch
        )
        assert allocated_bytes(call) == 0
        tracemalloc.start()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000, case.attrs


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_scratch_is_one_formula_in_the_rows(dtype: torch.dtype) -> None:
    rows, few = symbol("rows"), symbol("seqs")
    for case in cases(37, dtype=dtype):
        everything = case.operands | case.outputs
        shapes: dict[str, tuple[Any, ...]] = {name: tuple(t.shape) for name, t in everything.items()}
        swap = {37: rows, 2: few, 3: few + 1}
        symbolic = {name: (swap.get(shape[0], shape[0]), *shape[1:]) for name, shape in shapes.items()}
        dtypes = {name: name_of(t.dtype) for name, t in everything.items()}
        function = scratch_rules("cpu").get(case.kernel, lambda *_: 0)
        formula = sympy.sympify(function(symbolic, dtypes, case.attrs))
        assert formula.subs({rows: 37, few: 2}) == function(shapes, dtypes, case.attrs)


def test_names_are_those_of_the_contracts() -> None:
    assert row_score_kernel.KINDS == row_score.KINDS
    assert tuple(transfer_kernel.RULES) == transfer.RULES
    assert set(get_args(Score)) == {*row_score.KINDS} and set(get_args(Rule)) == {*transfer.RULES}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=MARKS)])
def test_wrong_operands_are_refused(backend: str) -> None:
    found = {case.kernel: case for case in cases(5)}
    for kernel, name, wrong in (
        ("guide", "guidance", torch.ones(2)),
        ("perturb_score", "keys", torch.zeros(5)),
        ("row_score", "second", torch.ones(4)),
        ("row_nucleus", "top_k", torch.ones(1)),
        ("transfer", "cu_rows", torch.zeros(2)),
        ("transfer", "current", torch.zeros(5, dtype=torch.int32)),
    ):
        case = found[kernel]
        with pytest.raises(GraphError, match=f"{kernel}: operand '{name}' is"):
            load(kernel, backend).launch(**(case.operands | {name: wrong}), **case.outputs, **case.attrs)
    case = found["transfer"]
    launch = load("transfer", backend).launch
    with pytest.raises(GraphError, match=r"rule must be one of top, threshold, .*, not 'topp'"):
        launch(**case.operands, **case.outputs, rule="topp", mask_id=1)
    with pytest.raises(GraphError, match="edit_threshold"):
        launch(**case.operands, **case.outputs, rule="top", mask_id=1)
    case = score_case(5, "random", keys=False)
    with pytest.raises(GraphError, match="random scores need keys"):
        load("row_score", backend).launch(**case.operands, **case.outputs, kind="random")
    with pytest.raises(GraphError, match=r"kind must be one of confidence, .*, not 'margins'"):
        load("row_score", backend).launch(**case.operands, **case.outputs, kind="margins")


ROWS = symbol("rows")
VECTOR, INDEX, SCALAR = Spec((ROWS,), "float32"), Spec((ROWS,), "int64"), Spec((1,), "float32")
PER_SEQUENCE = Spec((3,), "float32")


def transfer_specs(**changes: Spec | None) -> dict[str, Any]:
    return {
        "token": INDEX, "score": VECTOR, "current": INDEX, "cu_rows": Spec((4,), "int32"), "quota": Spec((3,), "int32"),
        "threshold": PER_SEQUENCE, "mask_id": 7,
    } | changes  # fmt: skip


def test_contracts() -> None:
    rule = contract("transfer")
    assert tuple(rule.work(**transfer_specs(), rule="top").outputs) == (INDEX, Spec((ROWS,), "uint8"))
    assert rule.work(**transfer_specs(edit_threshold=PER_SEQUENCE), rule="edit").outputs
    figures = dict.fromkeys(("maximum", "second", "logsumexp", "entropy", "sample_logit"), VECTOR)
    assert contract("row_score").work(**figures, kind="margin").outputs == (VECTOR,)
    logits, narrow = Spec((ROWS, 9), "bfloat16"), Spec((ROWS,), "int32")
    nucleus = {"logits": logits, "keys": INDEX, "temperature": VECTOR, "top_p": VECTOR, "top_k": narrow}
    assert tuple(contract("row_nucleus").work(**nucleus).outputs) == (INDEX, VECTOR, VECTOR, VECTOR)
    for name, specs, attrs, message in (
        (
            "transfer",
            transfer_specs(),
            {"rule": "edit"},
            "rule 'edit' takes edit_threshold and others do not, not 'edit'",
        ),
        (
            "transfer",
            transfer_specs(edit_threshold=PER_SEQUENCE),
            {"rule": "top"},
            "rule 'edit' takes edit_threshold and others do not, not 'top'",
        ),
        ("transfer", transfer_specs(), {"rule": "best"}, "rule must be one of top, threshold"),
        (
            "transfer",
            transfer_specs(quota=Spec((2,), "int32")),
            {"rule": "top"},
            r"operand 'quota' is .*, expected int32\[3\]",
        ),
        (
            "transfer",
            transfer_specs(score=Spec((ROWS,), "bfloat16")),
            {"rule": "top"},
            r"operand 'score' is .*, expected float32\[rows\]",
        ),
        ("row_score", figures, {"kind": "random"}, "random scores need keys"),
        ("row_score", figures, {"kind": "best"}, "kind must be one of confidence"),
        (
            "row_score",
            figures | {"entropy": SCALAR},
            {"kind": "margin"},
            r"operand 'entropy' is .*, expected float32\[rows\]",
        ),
        ("row_nucleus", nucleus | {"top_k": VECTOR}, {}, r"operand 'top_k' is .*, expected int32\[rows\]"),
        ("row_nucleus", nucleus | {"keys": VECTOR}, {}, r"operand 'keys' is .*, expected int64\[rows\]"),
        (
            "perturb_score",
            {"score": VECTOR, "keys": INDEX, "temperature": SCALAR},
            {},
            r"operand 'temperature' is .*, expected float32\[rows\]",
        ),
        (
            "guide",
            {"x": logits, "uncond": Spec((ROWS, 8), "bfloat16"), "guidance": VECTOR},
            {},
            r"operand 'uncond' is .*, expected bfloat16\[rows, 9\]",
        ),
    ):
        with pytest.raises(GraphError, match=message):
            contract(name).work(**specs, **attrs)


# --- planned, checked, executed -----------------------------------------------------------------------------------------

HIDDEN, VOCABULARY = 24, 150


def selection(g: Graph, head: str = "sample", rule: str = "edit", kind: str = "margin") -> None:
    """A guided head over rows of hidden states, sampled, scored, perturbed and committed."""
    masked, seqs = g.dim("masked"), g.dim("seqs")

    def vector(name: str, dtype: str = "float32", length: Any = masked) -> Any:
        return g.input(name, (length,), dtype)

    rows, other = (g.input(name, (masked, HIDDEN), "float32") for name in ("rows", "other"))
    weight, keys, temperature = (
        g.weight("head", (VOCABULARY, HIDDEN), "float32"),
        vector("keys", "int64"),
        vector("heat"),
    )
    score, token = g.output("score", (masked,), "float32"), g.output("token", (masked,), "int64")
    figures = [g.buffer(f"figure{i}", (masked,), "float32") for i in range(3 if head == "nucleus" else 5)]
    argmax = g.buffer("argmax", (masked,), "int64") if head == "sample" else None
    with g.chunk("logits", over=masked, tile=1):
        x, u = g.add_op("copy", rows), g.add_op("copy", other)
        g.add_op("guide", x, u, vector("guidance"))
        logits = g.add_op("linear", x, weight)
        if head == "nucleus":
            limits = vector("top_p"), vector("top_k", "int32")
            g.add_op("row_nucleus", logits, keys, temperature, *limits, out=(token, *figures))
        else:
            g.add_op("row_sample", logits, keys, temperature, out=(argmax, *figures[:4], token, figures[4]))
    if head == "nucleus":
        g.add_op("copy", figures[1], out=score)
    else:
        g.add_op("row_score", *figures, keys, out=score, kind=kind)
    g.add_op("perturb_score", score, keys, vector("score_heat"))
    per_sequence = [vector(name, dtype, length=seqs) for name, dtype in (("quota", "int32"), ("threshold", "float32"))]
    edit = vector("edit_threshold", length=seqs) if rule == "edit" else None
    g.add_op(
        "transfer", token, score, vector("current", "int64"), vector("cu_rows", "int32", seqs + 1), *per_sequence, edit,
        out=(g.output("chosen", (masked,), "int64"), g.output("committed", (masked,), "uint8")), rule=rule, mask_id=MASK,
    )  # fmt: skip


@pytest.mark.parametrize("head", ["sample", "nucleus"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_planned_step_commits_what_is_stated(head: str, chunk: int | None) -> None:
    lengths, rows = [13, 0, 8], 23
    plan = plan_graph(
        lambda g: selection(g, head, rule="edit"),
        dims={"masked": rows, "seqs": 3},
        device="cpu",
        config={"logits": chunk},
    )
    assert check_plan(plan.document) == []
    weight, hidden = randn(VOCABULARY, HIDDEN, seed=1, scale=0.5), randn(rows, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    current = torch.where(
        torch.rand(rows, generator=generator) < 0.6, MASK, torch.randint(5, (rows,), generator=generator)
    )
    given: dict[str, Any] = {
        "rows": hidden, "other": randn(rows, HIDDEN, seed=2), "keys": some_keys(rows), "heat": turns(MIXED, rows),
        "guidance": turns((0.5, 2.0), rows), "score_heat": turns((0.4, 0.8), rows), "quota": torch.tensor([3, 1, 0]),
        "threshold": torch.tensor([0.9, 0.1, 0.3]), "edit_threshold": torch.tensor([1.0, 1.0, -2.0]), "current": current,
        "cu_rows": torch.tensor([0, *np.cumsum(lengths)]),
    }  # fmt: skip
    if head == "nucleus":
        given |= {"top_p": torch.full((rows,), 2.0), "top_k": turns((20, 3), rows, torch.int32)}
    with Workspace() as workspace:
        for pool in ("workspace", "weights"):
            workspace.resize(pool, 1 << 22)
        executor = Executor(plan, workspace, debug="poison")
        executor.buffer("head").copy_(weight)
        for name, value in given.items():
            executor.inputs[name].copy_(value)
        executor.run()
        found = {name: t.clone() for name, t in executor.outputs.items()}
    u = given["other"].double()
    scale = 1 + given["guidance"].double()[:, None]
    logits = ((u + scale * (hidden.double() - u)) @ weight.double().T).float()
    if head == "nucleus":
        drawn = launched(nucleus_case(logits, temperature=MIXED, top_p=2.0, top_k=(20, 3)), "cpu")
        score = drawn["margin"].double()
    else:
        scores = logits.double() + given["heat"].double()[:, None] * noise_of(given["keys"], VOCABULARY)
        drawn = {"sample": scores.argmax(1)}
        chance = logits.double().softmax(1).sort(dim=1, descending=True).values
        score = chance[:, 0] - chance[:, 1]
    assert torch.equal(found["token"], drawn["sample"])
    assert_within(found["score"], score / given["score_heat"].double() + own_gumbels(given["keys"]), 1e-4)
    case = Case("transfer", {"token": found["token"], "score": found["score"]}, attrs={"rule": "edit", "mask_id": MASK})
    case.operands |= {name: given[name] for name in ("current", "cu_rows", "quota", "threshold", "edit_threshold")}
    assert (found["chosen"].tolist(), found["committed"].tolist()) == stated(case)
    assert 0 < found["committed"].sum() < rows and not found["committed"][21:].any()


@pytest.mark.parametrize("head", ["sample", "nucleus"])
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plans_of_a_selection_are_proved_and_their_claims_checked(device: str, head: str) -> None:
    dims = {"masked": 500, "seqs": 4}
    document = plan_graph(lambda g: selection(g, head), dims=dims, device=device).document
    assert check_plan(document) == []
    ops = {op["kernel"]: op for op in document["ops"]}
    changes: list[tuple[str, str, Any, str]] = [
        ("guide", "flops", 1, "flops"),
        ("transfer", "bytes", 1, "bytes"),
        ("perturb_score", "flops", 1, "flops"),
        ("transfer", "mask_id", "mask", "operator"),
        ("transfer", "rule", 1, "operator"),
    ]
    if head == "nucleus":
        changes += [("row_nucleus", "flops", 1, "flops"), ("row_nucleus", "bytes", 1, "bytes")]
    else:
        changes += [("row_score", "kind", 1, "operator"), ("row_score", "bytes", 1, "bytes")]
    for kernel, key, value, code in changes:
        broken = copy.deepcopy(document)
        op = broken["ops"][ops[kernel]["index"]]
        if key in op["attrs"]:
            op["attrs"][key] = value
        else:
            op[key] += value
        assert code in {violation.code for violation in check_plan(broken)}, (kernel, key)
    assert ops["transfer"]["bytes"] == 500 * (8 + 4 + 8 + 8 + 1) + 4 * (5 + 4 + 4 + 4)
    for kernel, operand in (("transfer", "quota"), ("transfer", "committed"), ("guide", "guidance")):
        broken = copy.deepcopy(document)
        broken["buffers"][ops[kernel]["operands"][operand]]["dtype"] = "float16"
        assert "operator" in {violation.code for violation in check_plan(broken)}, (kernel, operand)
