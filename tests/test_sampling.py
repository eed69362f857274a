"""Samples of rows: the CPU kernels, and the Triton ones in the interpreter or on a GPU, against an independent statement.

`words_of`, `noise_of` and `assert_samples` state the random numbers and the rule in NumPy and float64, from what is
published and nothing of the package.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from numpy.typing import NDArray
from operator_tables import scratch_rules
from runtime_helpers import StorageWatch, allocated_bytes, storages
from test_kernels import (
    BF16,
    DTYPES,
    F32,
    F64,
    OTHERS_SOAK,
    Case,
    assert_statistics,
    gamma,
    name_of,
    randn,
    statistics_outputs,
    strided,
    unit,
)
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels import load
from mosaic.kernels.shared import sampling
from mosaic.registrar import tiles
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.polynomial import symbol

KERNELS = ("row_sample", "unembed_sample")
NOISE_ERROR = 1.2e-5  # of g, in float32 and with a GPU's fast logarithm


def words_of(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], rounds: int = 7) -> NDArray[np.uint32]:
    """Philox 4x32 of Salmon, Moraes, Dror and Shaw (2011)."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p, q = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (q >> np.uint64(32)) ^ c1 ^ k0, q & low, (p >> np.uint64(32)) ^ c3 ^ k1, p & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3)).astype(np.uint32)


def halves_of(keys: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    key = keys.numpy().view(np.uint64)[:, None]
    return key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)


def uniform_of(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(u, np.float32(1 - 2.0**-24))


def uniforms_of(keys: Tensor, columns: int) -> NDArray[np.float32]:
    """u of the first columns under each key: what a column's number exceeds the two smallest of its group by."""
    column = np.arange(columns)
    words = words_of((column // 128 * 32 + column % 32, 0, 0, 0), halves_of(keys))
    return uniform_of(np.take_along_axis(words, np.broadcast_to(column // 32 % 4, words.shape[1:])[None], axis=0)[0])


def groups_of(keys: Tensor, groups: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[Any], NDArray[Any]]:
    """u of the smallest number, u of the next, and the places of the two, of the first groups under each key."""
    words = words_of((np.arange(groups), 1, 0, 0), halves_of(keys))
    place = words[2].astype(np.int64) % 32
    return (
        uniform_of(words[0]),
        uniform_of(words[1]),
        place,
        (place + 1 + words[2].astype(np.int64) // 32 * 31 // 2**27) % 32,
    )


def exponentials_of(keys: Tensor, columns: int) -> NDArray[np.float64]:
    """E of the first columns under each key."""
    column = np.arange(columns)
    group, place = column // 128 * 4 + column % 32 // 8, column // 32 % 4 * 8 + column % 8
    u, v, lowest, next_lowest = (x[:, group] for x in groups_of(keys, -(-columns // 128) * 4))
    own, first, second = (-np.log1p(-x.astype(np.float64)) for x in (uniforms_of(keys, columns), u, v))
    first, second = first / 32, first / 32 + second / 31
    return np.where(place == lowest, first, np.where(place == next_lowest, second, second + own))


def noise_of(keys: Tensor, columns: int) -> Tensor:
    """g of the first columns under each key, in float64."""
    return torch.from_numpy(-np.log(exponentials_of(keys, columns)))


def assert_samples(case: Case, logits: Tensor, delta: Tensor) -> None:
    """`logits` in float64; `delta` [C] bounds the error of each logit before it is sampled."""
    temperature = case.operands["temperature"].double()
    noise = temperature[:, None] * noise_of(case.operands["keys"], logits.shape[1])
    score, rows = logits + noise, torch.arange(logits.shape[0])
    sample = case.outputs["sample"]
    best, expected = score.max(dim=1)
    # a score is a product and a sum in float32
    error = delta + temperature * NOISE_ERROR + 2 * unit(F32) * (logits.abs() + noise.abs()).amax(1)
    assert (score[rows, sample] >= best - 2 * error).all()
    others = score.clone()
    others[rows, expected] = float("-inf")
    clear = best - others.amax(1) > 2 * error
    assert torch.equal(sample[clear], expected[clear])
    assert ((case.outputs["sample_logit"].double() - logits[rows, sample]).abs() <= delta).all()
    greedy = temperature == 0.0
    assert torch.equal(sample[greedy], case.outputs["token"][greedy])
    assert torch.equal(case.outputs["sample_logit"][greedy], case.outputs["maximum"][greedy])


def some_keys(rows: int, seed: int = 0) -> Tensor:
    """Keys of all 64 bits, both signs."""
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(seed))


MIXED = 0.0, 0.7, 2.5
"""Temperatures of neighbouring rows."""


def turns(values: Any, rows: int, dtype: torch.dtype = F32) -> Tensor:
    """One value for all rows, or several that rows have in turn."""
    several = torch.tensor(values, dtype=dtype).view(-1)
    return several.repeat(-(-rows // len(several)))[:rows]


def sample_case(kernel: str, operands: dict[str, Tensor], temperature: Any, rows: int) -> Case:
    drawn = {"keys": some_keys(rows), "temperature": turns(temperature, rows)}
    outputs = {"sample": torch.empty(rows, dtype=torch.int64), "sample_logit": torch.empty(rows)}
    return Case(kernel, operands | drawn, statistics_outputs(rows) | outputs)


def row_case(shape: tuple[int, int], dtype: torch.dtype, temperature: Any, scale: float = 2.0) -> Case:
    logits = strided(randn(*shape, dtype=dtype, scale=scale))
    return sample_case("row_sample", {"logits": logits}, temperature, shape[0])


def unembed_case(shape: tuple[int, int, int], dtype: torch.dtype, temperature: Any, aligned: bool = False) -> Case:
    rows, hidden, vocabulary = shape
    x, weight = randn(rows, hidden, dtype=dtype), randn(vocabulary, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    if not aligned:
        x, weight = strided(x), strided(weight, 8, 8)
    return sample_case("unembed_sample", {"x": x, "weight": weight}, temperature, rows)


def verify(case: Case) -> None:
    """Check statistics and samples of a launched case."""
    if case.kernel == "row_sample":
        logits = case.operands["logits"].double()
        delta = unit(F32) * logits.abs().amax(1)
    else:
        x, weight = case.operands["x"].double(), case.operands["weight"].double()
        logits = x @ weight.T
        delta = gamma(2 * x.shape[1] + 3, F32) * (x.abs() @ weight.abs().T).amax(1)
    assert_statistics(case, logits, delta)
    assert_samples(case, logits, delta)


# --- the random numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_statement_of_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert tuple(words_of(counter, key, rounds=10).tolist()) == expected


def test_the_statement_of_seven_rounds_gives_the_published_answer() -> None:
    assert words_of((0, 0, 0, 0), (0, 0)).tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("columns", [1, 127, 128, 3001])
def test_numbers_on_the_cpu_are_the_stated_ones_bit_for_bit(columns: int) -> None:
    keys = torch.cat([some_keys(5), torch.tensor([0, -1, 2**63 - 1, -(2**63), 1 << 32])])
    blocks = -(-columns // 128)
    own, *others = sampling.random_numbers(keys, columns)
    stated = uniforms_of(keys, 128 * blocks).reshape(10, blocks, 4, 4, 8).swapaxes(2, 3)
    assert np.array_equal(own.numpy(), stated.reshape(10, 4 * blocks, 32))
    for mine, expected in zip(others, groups_of(keys, 4 * blocks), strict=True):
        assert np.array_equal(mine.numpy(), expected)
    relative = sampling.exponentials(keys, columns).double().numpy() / exponentials_of(keys, columns) - 1
    assert np.abs(relative).max() < 1e-6


def test_uniforms_lie_strictly_between_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([0, 1, 2**24 + 1, 2**32 - 257, 2**32 - 129, 2**32 - 1]).repeat(6)[:32].view(1, 32)
    monkeypatch.setattr(sampling, "philox", lambda counters, *_: (words[:, : counters[0].shape[1]].clone(),) * 4)
    u = sampling.random_numbers(torch.zeros(1, dtype=torch.int64), 128)[0]
    assert float(u.min()) == 2.0**-33 and float(u.max()) == 1.0 - 2.0**-24


def test_numbers_are_exponential_and_their_columns_independent() -> None:
    u = -torch.expm1(-sampling.exponentials(some_keys(64), 4096).double())
    counts = torch.histc(u, bins=256, min=0, max=1)
    expected = u.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5
    centred = u - 0.5
    for lag in (1, 8, 32, 128):  # neighbours and groups, words of one counter, neighbouring counters
        product = centred[:, lag:] * centred[:, :-lag]
        assert abs(float(product.mean())) < 4 / 12 / product.numel() ** 0.5
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 4 / 12 / centred[1:].numel() ** 0.5


def test_the_two_smallest_of_a_group_are_where_they_are_said_to_be_and_anywhere() -> None:
    keys = some_keys(64)
    made = sampling.exponentials(keys, 4096).view(64, 32, 4, 4, 8).transpose(2, 3).reshape(64, 128, 32)
    _, _, _, place, next_place = sampling.random_numbers(keys, 4096)
    order = made.argsort(dim=2)
    assert torch.equal(order[:, :, 0], place) and torch.equal(order[:, :, 1], next_place)
    pairs = torch.bincount((place * 32 + next_place).flatten(), minlength=1024).double()
    expected = place.numel() / (32 * 31)
    assert (pairs.view(32, 32).diagonal() == 0).all()
    chi_square = float(((pairs - expected) ** 2 / expected).sum()) - 32 * expected
    assert abs(chi_square - 991) < 4 * (2 * 991) ** 0.5


# --- on the CPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 7.0, MIXED], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1025), (131, 300)], ids=str)
def test_row_sample(shape: tuple[int, int], temperature: Any, dtype: torch.dtype) -> None:
    case = row_case(shape, dtype, temperature)
    before = case.operands["logits"].clone()
    case.launch()
    assert torch.equal(case.operands["logits"], before)
    verify(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (129, 33, 1100), (5, 64, 2100)], ids=str)
def test_unembed_sample(shape: tuple[int, int, int], temperature: Any, dtype: torch.dtype) -> None:
    case = unembed_case(shape, dtype, temperature)
    case.launch()
    verify(case)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_reference_is_the_stated_rule(kernel: str) -> None:
    case = row_case((9, 1500), F64, 0.8) if kernel == "row_sample" else unembed_case((9, 16, 1500), F64, 0.8)
    given = {name: t.double() if t.is_floating_point() else t for name, t in case.operands.items()}
    case.outputs = load(kernel).reference(**given)
    verify(case)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 0.5, float("-inf"), 1.0, -2.0])
    rows = 5_000
    case = sample_case("row_sample", {"logits": logits.repeat(rows, 1)}, temperature, rows)
    case.launch()
    counts = torch.bincount(case.outputs["sample"], minlength=7).double()
    expected = rows * (logits.double() / temperature).softmax(0)
    assert counts[4] == 0
    kept = expected > 0
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi_square < 5 + 4 * 10**0.5  # five degrees of freedom, four deviations


def test_the_tail_is_finer_than_24_bits() -> None:
    """-log(-log u) ends at 16.6 where u is a float32 just below 1; here the largest noise comes from the smallest u."""
    made = sampling.exponentials(some_keys(512), 8192)
    small = made[made < 2.0**-12].double()
    assert small.numel() > 500
    assert ((small * 2**24).frac() != 0).double().mean() > 0.9


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sample_does_not_depend_on_chunks_places_or_tiles(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = row_case((150, 1500), F32, 1.0) if kernel == "row_sample" else unembed_case((150, 16, 1500), F32, 1.0)
    case.launch()
    whole = {name: t.clone() for name, t in case.outputs.items()}
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
    first = "logits" if kernel == "row_sample" else "x"
    for chosen in (torch.arange(40, 97), order):
        part = Case(kernel, dict(case.operands), {name: torch.empty_like(t[chosen]) for name, t in whole.items()})
        part.operands |= {name: case.operands[name][chosen] for name in (first, "keys", "temperature")}
        part.launch()
        assert torch.equal(part.outputs["sample"], whole["sample"][chosen])
    monkeypatch.setattr(tiles, "VOCABULARY_COLUMNS", 256)
    case.launch()
    assert torch.equal(case.outputs["sample"], whole["sample"])


def test_another_key_draws_another_sample() -> None:
    case = row_case((64, 4096), F32, 1.0, scale=0.1)
    case.launch()
    first = case.outputs["sample"].clone()
    case.operands["keys"] = case.operands["keys"] ^ 1
    case.launch()
    assert (case.outputs["sample"] != first).sum() > 60


def test_a_row_of_minus_infinity_draws_the_first_column() -> None:
    case = sample_case("row_sample", {"logits": torch.full((2, 300), float("-inf"))}, 1.0, 2)
    case.launch()
    assert case.outputs["sample"].tolist() == [0, 0] == case.outputs["token"].tolist()


@pytest.mark.some
@pytest.mark.parametrize("dtype", OTHERS_SOAK, ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sampling_allocates_nothing(kernel: str, temperature: float, dtype: torch.dtype) -> None:
    shape = (140, 1100)
    case = row_case(shape, dtype, temperature) if kernel == "row_sample" else unembed_case((140, 64, 1100), dtype, 1.0)
    launch, scratch = load(kernel).launch, case.scratch()
    call = lambda: launch(**case.operands, **case.outputs, scratch=scratch)  # noqa: E731
    assert allocated_bytes(call) == 0
    with StorageWatch() as watch:
        call()
    assert scratch is not None
    assert watch.pointers <= storages([*case.operands.values(), *case.outputs.values(), scratch])


def test_wrong_operands_are_refused() -> None:
    case = row_case((3, 8), F32, 1.0)
    for name, wrong in (("keys", torch.zeros(3, dtype=torch.int32)), ("temperature", torch.ones(1))):
        with pytest.raises(GraphError, match=f"row_sample: operand '{name}' is"):
            load("row_sample").launch(**(case.operands | {name: wrong}), **case.outputs, scratch=case.scratch())


def test_contracts_of_samples() -> None:
    logits, keys, temperature = Spec((4, 9), "bfloat16"), Spec((4,), "int64"), Spec((4,), "float32")
    rule = contract("row_sample")
    assert not rule.whole
    inferred = dict(zip(rule.writes, rule.work(logits=logits, keys=keys, temperature=temperature).outputs, strict=True))
    assert inferred["sample"] == Spec((4,), "int64") and inferred["sample_logit"] == Spec((4,), "float32")
    assert rule.writes[:5] == contract("row_stats").writes
    with pytest.raises(GraphError, match=r"operand 'keys' is .*, expected int64\[4\]"):
        rule.work(logits=logits, keys=Spec((3,), "int64"), temperature=temperature)
    with pytest.raises(GraphError, match=r"operand 'temperature' is .*, expected float32\[4\]"):
        rule.work(logits=logits, keys=keys, temperature=Spec((1,), "float32"))
    with pytest.raises(GraphError, match=r"operand 'weight' is .*, expected bfloat16\[5, 9\]"):
        contract("unembed_sample").work(
            x=Spec((4, 9), "bfloat16"), weight=Spec((5, 8), "bfloat16"), keys=keys, temperature=temperature
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_scratch_is_one_formula_in_the_rows(kernel: str) -> None:
    case = row_case((300, 1500), BF16, 1.0) if kernel == "row_sample" else unembed_case((300, 64, 1500), BF16, 1.0)
    rows = symbol("rows")
    shapes: dict[str, tuple[Any, ...]] = {name: tuple(t.shape) for name, t in case.operands.items()}
    first = "logits" if kernel == "row_sample" else "x"
    symbolic = shapes | {first: (rows, *shapes[first][1:]), "keys": (rows,), "temperature": (rows,)}
    dtypes = {name: name_of(t.dtype) for name, t in case.operands.items()}
    formula = sympy.sympify(scratch_rules("cpu")[kernel](symbolic, dtypes, {}))
    assert formula.subs({rows: 300}) == scratch_rules("cpu")[kernel](shapes, dtypes, {})


def test_partials_of_the_fused_kernel_fit_the_scratch() -> None:
    """The scratch is linear in the rows and knows no card: no card's splits may exceed it, with any tile."""
    from mosaic.registrar.operators.unembed_stats import PARTIAL_BYTES, UNEMBED_PROGRAMS, unembed_splits

    for tile_rows in (32, 64, 128):
        for rows in (1, 63, 64, 65, 500, 2047, 2048, 2049, 40_000):
            available = scratch_rules("cuda")["unembed_stats"]({"x": (rows, 64)}, {}, {})
            for places in (1, 7, 82, 132, 264, 400):
                row_tiles = -(-rows // tile_rows)
                splits = unembed_splits(row_tiles, places)
                assert 1 <= splits <= UNEMBED_PROGRAMS and rows * splits * PARTIAL_BYTES <= available


# --- in Triton --------------------------------------------------------------------------------------------------------

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")


def launched(case: Case) -> Case:
    case.outputs = run(case, DEVICE)
    return case


@pytest.mark.grid(together=1)
@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 7.0, MIXED], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 4097), (13, 700), (2, 33000)], ids=str)
def test_row_sample_in_triton(shape: tuple[int, int], temperature: Any, dtype: torch.dtype) -> None:
    verify(launched(row_case(shape, dtype, temperature)))


@pytest.mark.grid
@triton_test
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("temperature", [0.0, 1.0, MIXED], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (67, 33, 300), (5, 67, 1100)], ids=str)
def test_unembed_sample_in_triton(shape: tuple[int, int, int], temperature: Any, dtype: torch.dtype) -> None:
    verify(launched(unembed_case(shape, dtype, temperature)))


@pytest.mark.grid(together=1)
@triton_test
@pytest.mark.parametrize("sampled", [False, True], ids=["", "sampled"])
@pytest.mark.parametrize("shape", [(3, 24, 1025), (70, 72, 700), (300, 64, 130)], ids=str)
def test_unembedding_by_tensor_descriptors(
    shape: tuple[int, int, int], sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned operands: descriptors on a Hopper GPU, and in the interpreter, which is no GPU, when told so."""
    from mosaic.kernels.cuda import unembed_stats

    if INTERPRETED:
        monkeypatch.setattr(unembed_stats, "has_descriptors", lambda x, weight: True)
    case = unembed_case(shape, BF16, 1.0, aligned=True)
    if sampled:
        return verify(launched(case))
    drawn = ("keys", "temperature")
    case.kernel, case.operands = "unembed_stats", {n: t for n, t in case.operands.items() if n not in drawn}
    case.outputs = statistics_outputs(shape[0])
    x, weight = case.operands["x"].double(), case.operands["weight"].double()
    delta = gamma(2 * shape[1] + 3, F32) * (x.abs() @ weight.abs().T).amax(1)
    assert_statistics(launched(case), x @ weight.T, delta)


@triton_test
@pytest.mark.parametrize("described", [False, True], ids=["", "described"])
@pytest.mark.parametrize(("vocabulary", "narrow"), [(1100, 128), (1400, 128), (1536, 128), (1537, 0)])
def test_a_narrow_tile_ends_every_split(
    vocabulary: int, narrow: int, described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four splits of one whole tile, then half a tile each: columns for one of them, three, all, and one more."""
    from mosaic.kernels.cuda import unembed_stats
    from mosaic.kernels.cuda.shared.launching import Tile

    if INTERPRETED:
        monkeypatch.setattr(unembed_stats, "has_descriptors", lambda x, weight: described)
    monkeypatch.setattr(unembed_stats, "unembed_splits", lambda row_tiles, places: 4)
    monkeypatch.setattr(unembed_stats, "tile_of", lambda x, sampled, described: Tile(64, 256, 32, 8, 2))
    tiles = -(-vocabulary // 256)
    assert unembed_stats.narrow_columns(tiles, 4, vocabulary, 256) == narrow
    case = unembed_case((70, 64, vocabulary), BF16, 1.0, aligned=True)
    given, ties = ((4 * case.operands[name]).round() for name in ("x", "weight"))  # their products add up without error
    ties[[3, 1030, vocabulary - 1]] = 8.0 * ties[3]  # the largest for every second row or so, in all kinds of tiles
    case.kernel, case.operands = "unembed_stats", {"x": given, "weight": ties}
    case.outputs = statistics_outputs(70)
    x, weight = given.double(), ties.double()
    delta = gamma(2 * 64 + 3, F32) * (x.abs() @ weight.abs().T).amax(1)
    done = launched(case)
    assert_statistics(done, x @ weight.T, delta)
    assert not {1030, vocabulary - 1} & {*done.outputs["token"].tolist()}


@triton_test
@pytest.mark.parametrize("rows", [pytest.param(40, marks=pytest.mark.soak), 90])
def test_splits_of_the_vocabulary_join(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles to a split, a number of splits that is no power of two, several groups of row tiles."""
    from mosaic.kernels.cuda import unembed_stats

    monkeypatch.setattr(unembed_stats, "unembed_splits", lambda row_tiles, places: 3)
    monkeypatch.setattr(unembed_stats, "ROW_TILES", 2)
    verify(launched(unembed_case((rows, 16, 700), F32, 1.0)))


@triton_test
@pytest.mark.parametrize("kernel", KERNELS)
def test_ruling_tiles_out_changes_no_sample(kernel: str) -> None:
    """Logits from flat to peaked, so that all, some or nearly none of the tiles are ruled out before their numbers."""
    for seed, scale in enumerate((0.01, 4.0)):
        if kernel == "row_sample":
            case = row_case((4, 21_000), F32, 1.0, scale)
        else:
            case = unembed_case((4, 16, 1100), F32, 1.0)
            case.operands["x"] *= scale
        case.operands["keys"] = some_keys(4, seed)
        verify(launched(case))


@triton_test
@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_scores_go_to_the_lower_column(kernel: str) -> None:
    """At a temperature too small to tell equal logits apart in float32, the draw is a tie of scores."""
    vocabulary, tied = 3000, [131, 145, 1700, 2999]
    if kernel == "row_sample":
        logits = torch.zeros(1, vocabulary)
        logits[0, tied] = 1000.0
        case = sample_case(kernel, {"logits": logits}, 1e-9, 1)
    else:
        weight = torch.zeros(vocabulary, 16)
        weight[tied] = 1000.0 / 16
        case = sample_case(kernel, {"x": torch.ones(1, 16), "weight": weight}, 1e-9, 1)
    out = launched(case).outputs
    assert out["sample"].tolist() == [131] == out["token"].tolist()
    assert out["sample_logit"].tolist() == [1000.0] == out["second"].tolist()


@triton_test
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_rows_are_no_work(kernel: str) -> None:
    case = row_case((0, 300), F32, 1.0) if kernel == "row_sample" else unembed_case((0, 16, 300), F32, 1.0)
    case.launch()
    assert launched(case).outputs["sample"].shape == (0,)


@triton_test
def test_numbers_in_triton_are_the_stated_ones_bit_for_bit() -> None:
    import triton_words

    keys = torch.cat([some_keys(3), torch.tensor([0, -1, -(2**63)])])
    words = torch.empty(6, 1024, dtype=torch.int32, device=DEVICE)
    exponentials = torch.empty(6, 1024, device=DEVICE)
    smallest = torch.empty(6, 32, 2, device=DEVICE)
    places = torch.empty(6, 32, 2, dtype=torch.int32, device=DEVICE)
    triton_words.launch(keys.to(DEVICE), words, exponentials, smallest, places)
    u = uniforms_of(keys, 1024)
    assert np.array_equal(uniform_of(words.cpu().numpy().view(np.uint32)), u)
    first, second, *stated = groups_of(keys, 32)
    for index, place in enumerate(stated):
        assert np.array_equal(places.cpu().numpy()[:, :, index], place)
    first, second = (-np.log1p(-x.astype(np.float64)) for x in (first, second))
    expected = np.stack([first / 32, first / 32 + second / 31], axis=2)
    assert np.abs(np.log(smallest.cpu().numpy().astype(np.float64) / expected)).max() <= NOISE_ERROR
    expected = -np.log1p(-u.astype(np.float64))
    assert np.abs(np.log(exponentials.cpu().numpy().astype(np.float64) / expected)).max() <= NOISE_ERROR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_graph_serves_every_temperature_and_allocates_nothing(kernel: str) -> None:
    from test_triton_kernels import moved, scratch_for

    case = row_case((40, 5000), BF16, 1.0) if kernel == "row_sample" else unembed_case((40, 64, 5000), BF16, 1.0, True)
    given = {name: moved(t, "cuda") for name, t in (case.operands | case.outputs).items()}
    launch, scratch = load(kernel, "cuda").launch, scratch_for(case, "cuda")
    launch(**given, scratch=scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which allocates two numbers of its own, for PyTorch's generator
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launch(**given, scratch=scratch)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 0
    for seed, temperature in enumerate((0.0, 0.4, MIXED)):
        case.operands["temperature"] = turns(temperature, 40)
        given["temperature"].copy_(case.operands["temperature"])
        case.operands["keys"] = some_keys(40, seed)
        given["keys"].copy_(case.operands["keys"])
        graph.replay()
        case.outputs = {name: given[name].cpu() for name in case.outputs}
        verify(case)
