"""Selection of keys and attention to them, in Triton's interpreter or on a GPU: random batches against float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from test_kernels import BF16, F32
from test_kv import kv_case, starts
from test_selected_attention import assert_attended, selected_case, slices_of
from test_selection_of_keys import (
    SHARES,
    TOPS,
    assert_mass,
    assert_selection_of_equation_3,
    assert_sums,
    key_mass_case,
    mass_case,
    share_case,
    stated_selection,
    sums_case,
    sums_of_prefixes,
    tiles_of,
    top_case,
)
from test_triton_kernels import INTERPRETED, run

from mosaic.errors import RuntimeMemoryError
from mosaic.kernels import load

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def split_as(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    from mosaic.kernels.cuda import prefix_logsumexp, selected_attention

    monkeypatch.setattr(selected_attention, "splits_of", lambda *sizes: splits)
    monkeypatch.setattr(selected_attention, "SPLIT_KEYS", 1)
    monkeypatch.setattr(prefix_logsumexp, "SPLITS", 4 if splits > 1 else 1)
    monkeypatch.setattr(prefix_logsumexp, "SPLIT_KEYS", 1)


@pytest.mark.some
@pytest.mark.parametrize(
    ("statistic", "dtype", "seeds"),
    [
        ("max", F32, (0, 1, 4)), ("mean", BF16, (7, 10, 15)), ("worst", F32, (1,)),
        *(pytest.param(statistic, F32, range(5, 15), marks=pytest.mark.soak) for statistic in ("mean", "max", "worst")),
    ],
    ids=str,
)  # fmt: skip
def test_mass_of_keys_in_triton(statistic: str, dtype: torch.dtype, seeds: Sequence[int]) -> None:
    for seed in seeds:
        tiled = tiles_of(4, 3) if statistic == "worst" else tiles_of(16, 2) if seed == 4 else None
        case = key_mass_case(seed, dtype, statistic, longest=200 if statistic == "mean" else 50, tiled=tiled)
        assert_mass(case, run(case, DEVICE)["mass"], slack=2)


@pytest.mark.parametrize(
    ("splits", "dtype", "seeds"),
    [(1, F32, (0, 1)), (3, BF16, (7, 10)), pytest.param(3, F32, range(5, 15), marks=pytest.mark.soak)],
    ids=str,
)
def test_sums_of_prefixes_in_triton(
    splits: int, dtype: torch.dtype, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_as(monkeypatch, splits)
    for seed in seeds:
        case = sums_case(seed, dtype, longest=50 if splits == 1 else 200)
        assert_sums(case, run(case, DEVICE)["logsumexp"], slack=2)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_scores_far_from_0_in_triton(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their exponentials are 0, or beyond float32."""
    split_as(monkeypatch, 2)
    case = sums_case(8, F32, longest=60)
    operands = case.operands | {"q": sign * 150 * case.operands["q"].abs(), "kv": case.operands["kv"].abs()}
    far = replace(case, operands=operands)
    sums = sums_of_prefixes(far)
    assert sums.nan_to_num().abs().max() > 300 and (sums[~sums.isnan()] * sign > 0).all()
    assert_sums(far, run(far, DEVICE)["logsumexp"], slack=2)


@pytest.mark.parametrize(
    ("votes", "statistic"), [((1, 1), "mean"), ((1, 1), "worst"), ((0, 1), "mean"), ((1, 0), "max")]
)
def test_mass_of_a_wide_group_in_triton(votes: tuple[int, int], statistic: str) -> None:
    """More heads of a set than a tile has rows, so that tiles have rows of which none votes."""
    given = kv_case([(2, 40, 38)], 67, 1, 4, F32)
    operands = {name: given.operands[name] for name in ("q", "kv", "extents", "cu_extents", "cu_seqlens")}
    operands |= {"captured": torch.tensor([38], dtype=torch.int32), "cu_keys": starts([38])}
    operands |= {"votes": torch.tensor(votes, dtype=torch.uint8)}
    attrs = {name: given.attrs[name] for name in ("layer", "kv_heads", "head_size", "scale")}
    attrs |= {"sets": 1, "columns": 38, "statistic": statistic}
    case = mass_case(operands, attrs, torch.full((1, 38), float("nan")))
    assert_mass(case, run(case, DEVICE)["mass"], slack=2)


@pytest.mark.some
@pytest.mark.parametrize(("kind", "ratio", "enough"), TOPS)
def test_pages_with_the_most_mass_in_triton(kind: str, ratio: float, enough: float) -> None:
    for seed in (7, 3):
        case = top_case(seed, kind, ratio, enough)
        assert torch.equal(run(case, DEVICE)["selected"], stated_selection(case))


def test_so_many_keys_are_chosen_in_triton() -> None:
    for ratio, keys, chosen in SHARES:
        assert run(share_case(ratio, [keys]), DEVICE)["selected"][0, 0] == chosen, ratio


@pytest.mark.some
@pytest.mark.parametrize(
    ("kind", "ratio", "enough", "seed"),
    [
        pytest.param(*top, seed, marks=pytest.mark.soak if top in (TOPS[0], TOPS[2], TOPS[4]) else ())
        for seed, top in zip((8, 9, 12, 10, 11, 15, 16), TOPS, strict=True)
    ],
)
def test_prefixes_in_parts_in_triton(
    kind: str, ratio: float, enough: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pages than a tile has; where many tie, more that may be chosen than are listed."""
    tile = cut_as(monkeypatch)
    case = top_case(seed, kind, ratio, enough, longest=2100)
    assert case.operands["mass"].shape[1] > 4 * case.attrs["page"] * tile
    assert torch.equal(run(case, DEVICE)["selected"], stated_selection(case))


def cut_as(monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut pages into small tiles; return how many a tile has."""
    from mosaic.kernels.cuda import top_keys

    monkeypatch.setattr(top_keys, "TILE", 256)
    monkeypatch.setattr(top_keys, "LISTED", 256)
    monkeypatch.setattr(top_keys, "PASSED", 256)
    monkeypatch.setattr(top_keys, "parts_of", lambda pairs: 4)
    return 256


def test_a_longer_prefix_than_the_mean_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefix has more pages than a tile has, the mean has fewer."""
    cut_as(monkeypatch)
    given = top_case(1, "floats", longest=700)
    lengths = [min(keys, 9) if keys < 700 else keys for keys in given.operands["captured"].tolist()]
    operands = given.operands | {"captured": torch.tensor(lengths, dtype=torch.int32), "cu_keys": starts(lengths)}
    operands["mass"] = operands["mass"][:, : sum(lengths)]
    case = replace(given, operands=operands)
    assert torch.equal(run(case, DEVICE)["selected"], stated_selection(case))


def test_selection_of_equation_3_in_triton() -> None:
    assert_selection_of_equation_3(lambda case: run(case, DEVICE), [1])


@pytest.mark.parametrize("splits", [1, 3])
def test_selected_attention_with_indices_ahead_in_triton(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mosaic.kernels.cuda import selected_attention

    split_as(monkeypatch, splits)
    monkeypatch.setattr(selected_attention, "AHEAD_ROWS", 1)
    for seed in (1, 21, 35):
        case = selected_case(seed, F32, 4, longest=150)
        y = run(case, DEVICE)["y"]
        assert_attended(case, y, torch.full_like(y, float("nan")), triton=True)


@pytest.mark.some
@pytest.mark.parametrize(
    ("splits", "dtype", "block", "rows", "seeds"),
    [
        (1, F32, 4, 0, (0, 3, 21)), (1, F32, 4, 3, (2, 4)), (1, BF16, 0, 0, (5, 6)), (3, BF16, 0, 0, (38,)),
        (2, F32, 32, 2, (35,)),
        *(pytest.param(splits, BF16, 4, splits - 1, range(5, 15), marks=pytest.mark.soak) for splits in (1, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_selected_attention_in_triton(
    splits: int, dtype: torch.dtype, block: int, rows: int, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_as(monkeypatch, splits)
    for seed in seeds:
        case = selected_case(seed, dtype, block, longest=50, rows=rows)
        y = run(case, DEVICE)["y"]
        assert_attended(case, y, torch.full_like(y, float("nan")), triton=True)


def test_more_selected_keys_than_a_split_has_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, 3)
    case = selected_case(13, BF16, 4, longest=200, whole=True)
    y = run(case, DEVICE)["y"]
    assert_attended(case, y, torch.full_like(y, float("nan")), triton=True)


@pytest.mark.parametrize("splits", [1, 3])
def test_selected_attention_in_triton_may_overwrite_its_queries(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, splits)
    case = selected_case(35, BF16, 4, longest=50)
    assert_attended(case, run(case, DEVICE, {"y": "q"})["y"], case.operands["q"], triton=True)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_slice_of_a_window_in_triton(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, splits)
    for start, part in slices_of(selected_case(38, BF16, 4, longest=50)):
        y = run(part, DEVICE, row_start=start)["y"]
        assert_attended(part, y, torch.full_like(y, float("nan")), start, triton=True)


def test_missing_scratch_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    split_as(monkeypatch, 2)
    for case in (sums_case(0, F32), selected_case(0, F32)):
        with pytest.raises(RuntimeMemoryError, match=rf"{case.kernel}: scratch of 0 bytes, \d[\d,]* needed"):
            load(case.kernel, "cuda").launch(**case.operands, **case.outputs, **case.attrs)
