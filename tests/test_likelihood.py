"""Likelihoods by the published estimates, beside their formulas in float64 over plain networks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference_runner import Network
from safetensors.torch import load_file
from stock_models import stock_logits, stock_model
from test_rotary_scaling import CONFIGS, enlarge
from torch import Tensor

import mosaic
from mosaic.errors import UsageError
from mosaic.evaluation import are_greedy, log_likelihoods
from mosaic.models import load

SMALL = load("small")
MASK, EOS = SMALL.architecture.mask_token_id, 95


class Watched:
    """A compiled model that notes the sequences of its steps, and what was asked of them."""

    def __init__(self, model: Any) -> None:
        self._model, self.sequences, self.rows = model, list[Tensor](), list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, token_ids: Any, masked: Tensor, **more: Any) -> Any:
        self.sequences += [ids.clone() for ids in token_ids]
        self.rows.append(len(masked))
        return self._model(token_ids, masked, **more)


@pytest.fixture(scope="module")
def model() -> Iterator[Watched]:
    with mosaic.compile(SMALL, dtype="float32") as found:
        yield Watched(found)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    assert SMALL.path is not None
    torch.set_default_dtype(torch.float64)
    tensors = {name: value.double() for name, value in load_file(SMALL.path / "model.safetensors").items()}
    yield Network(SMALL.architecture, tensors)
    torch.set_default_dtype(torch.float32)


def log_probability(network: Network, seen: Tensor, whole: Tensor) -> float:
    """Of the tokens of `whole` that `seen` masks, summed."""
    masked = seen != whole
    return float(network.logits(seen).log_softmax(-1)[masked, whole[masked]].sum())


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 560) for _ in range(count)]


def test_estimates_are_the_formula_over_the_masks_that_were_drawn(model: Watched, network: Network) -> None:
    rng = random.Random(2)
    pairs = [(drawn(rng, context), drawn(rng, wanted)) for context, wanted in ((5, 7), (0, 12), (20, 1), (3, 4))]
    pairs[3][0][1] = MASK  # a literal mask in a context is a token like others
    model.sequences.clear()
    found = log_likelihoods(model, pairs, samples=8, strata=4, seed=3)  # type: ignore[arg-type]
    seen = iter(model.sequences)
    for (context, wanted), estimate in zip(pairs, found, strict=True):
        whole, sums, counts = torch.tensor([*context, *wanted]), 0.0, []
        for copy in itertools.islice(seen, 8):
            counts.append(int((copy != whole).sum()))
            assert bool((copy[copy != whole] == MASK).all()) and bool(
                (copy[: len(context)] == whole[: len(context)]).all()
            )
            sums += len(wanted) / counts[-1] * log_probability(network, copy, whole)
        assert estimate == pytest.approx(sums / 8, rel=2e-4)
        for first, group in ((counts[0], counts[:4]), (counts[4], counts[4:])):  # as eval_llada.py spreads them
            spread = [first + int(place * len(wanted) / 4 + 0.5) for place in range(4)]
            assert group == [(masks - 1) % len(wanted) + 1 for masks in spread]
    again = log_likelihoods(model, pairs[2:], samples=8, strata=4, seed=3)  # type: ignore[arg-type]
    assert again == pytest.approx(found[2:], rel=1e-5), "whatever else is estimated"
    assert log_likelihoods(model, [(pairs[0][0], [])], samples=4, strata=4) == [0.0]  # type: ignore[arg-type]


def test_masks_are_drawn_evenly(model: Watched) -> None:
    """All sets of masks of a size come as often, all sizes too."""
    model.sequences.clear()
    log_likelihoods(model, [([7], [8, 9, 10])], samples=450, strata=2, seed=1)  # type: ignore[arg-type]
    sets = Counter(tuple((copy[1:] == MASK).tolist()) for copy in model.sequences)
    assert len(sets) == 7
    for masks, count in sets.items():
        expected = 450 / 3 / (1 if sum(masks) == 3 else 3)
        assert abs(count - expected) < 5 * expected**0.5


def test_long_continuations_take_bounded_rows(model: Watched, network: Network) -> None:
    rng = random.Random(5)
    model.rows.clear()
    log_likelihoods(model, [(drawn(rng, 3), drawn(rng, 1100))], samples=2, strata=2)  # type: ignore[arg-type]
    assert max(model.rows) <= 512 and len(model.rows) > 2


def test_greedy_continuations_are_those_of_the_original(model: Watched, network: Network) -> None:
    """Written by its loop, then changed in one place."""
    rng, pairs, expected = random.Random(4), list[tuple[list[int], list[int]]](), list[bool]()
    for length in (1, 3, 6):
        context = drawn(rng, 9)
        seen = torch.tensor([*context, *[MASK] * length])
        for _ in range(length):
            masked = torch.nonzero(seen == MASK)[:, 0]
            sure, tokens = network.logits(seen)[masked].softmax(-1).max(-1)
            best = int(sure.argmax())
            seen[masked[best]] = tokens[best]
        written = seen[9:].tolist()
        changed = [*written]
        changed[rng.randrange(length)] += 1
        pairs += [(context, written), (context, changed), (context, [])]
        expected += [True, False, True]
    assert are_greedy(model, pairs) == expected  # type: ignore[arg-type]


def test_other_families_and_odd_samples_are_refused(model: Watched) -> None:
    with pytest.raises(UsageError, match=r"100 samples .* 32 strata"):
        log_likelihoods(model, [], samples=100)  # type: ignore[arg-type]
    with mosaic.compile("small-sdar") as other:
        for refused in (log_likelihoods, are_greedy):
            with pytest.raises(UsageError, match="none for the family 'sdar'"):
                refused(other, [([1], [2])])


# --- other families ---------------------------------------------------------------------------------------------------

Stated = tuple[Watched, Callable[[Tensor, Tensor], float]]


@pytest.fixture(scope="module")
def stated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stated]:
    """A tiny random model, and `log_probability` by a stock class in float64."""
    with mosaic.compile(CONFIGS[request.param] | {"eos_token_id": EOS}) as found:
        enlarge(found)
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        stock = stock_model(found, tmp_path_factory.mktemp("stock"), rope_parameters=rope).double()

        def summed(seen: Tensor, whole: Tensor) -> float:
            masked = torch.nonzero(seen != whole)[:, 0]
            rows = masked - 1 if request.param == "dream" else masked  # Dream's row i - 1 predicts position i
            return float(stock_logits(stock, seen, 0).log_softmax(-1)[rows, whole[masked]].sum())

        yield Watched(found), summed


@pytest.mark.parametrize("stated", ["dream", "llada-moe"], indirect=True)
def test_families_are_estimated_by_the_formula_of_their_authors(stated: Stated) -> None:
    """The weights of two copies follow from four continuations, which are masked alike."""
    (model, summed), rng = stated, random.Random(7)
    dream, context = model.model.family == "dream", [rng.randrange(95) for _ in range(5)]
    pairs = [(context, [rng.randrange(95) for _ in range(12)]) for _ in range(4)]
    estimates = log_likelihoods(model, pairs, samples=2, strata=2, seed=3)  # type: ignore[arg-type]
    found, masked, sums = 2 * torch.tensor(estimates, dtype=torch.float64), [], []
    for place, seen in enumerate(model.sequences):
        whole = torch.tensor([*context, *pairs[place // 2][1], *[EOS] * dream])
        masked.append(seen != whole)
        assert bool((seen[masked[-1]] == 96).all()) and not bool(masked[-1][[*range(5), *range(17, len(whole))]].any())
        sums.append(summed(seen, whole))
    by_copy = torch.tensor(sums, dtype=torch.float64).view(4, 2)
    weights = torch.linalg.lstsq(by_copy, found).solution
    assert torch.allclose(by_copy @ weights, found, rtol=1e-4)
    if dream:
        shares = (1 / weights - 1e-3) / (1 - 1e-3)
        assert abs(float(shares[0] - shares[1])) == pytest.approx(0.5, abs=1e-3) and 0 < shares.min() < 0.5
    else:
        assert weights.tolist() == pytest.approx([12 / int(one.sum()) for one in masked[:2]], rel=1e-3)
        best = int(model(torch.tensor([*context, 96]), torch.tensor([5])).token_ids)
        assert are_greedy(model, [(context, [best]), (context, [best ^ 1])]) == [True, False]  # type: ignore[arg-type]


@pytest.mark.parametrize("stated", ["dream"], indirect=True)
def test_dream_masks_each_token_by_itself_and_never_the_first_of_a_text(stated: Stated) -> None:
    model, _ = stated
    for context, wanted in (([7], [8, 9]), ([], [7, 8, 9])):
        model.sequences.clear()
        log_likelihoods(model, [(context, wanted)], samples=600, strata=2, seed=1)  # type: ignore[arg-type]
        sets = Counter(tuple((copy == 96).tolist()) for copy in model.sequences)
        for at, share in (((1, 2), 3), ((1,), 6), ((2,), 6)):  # a third of the copies has no mask
            assert abs(sets.pop(tuple(place in at for place in range(4))) - 600 / share) < 50
        assert not sets
    with pytest.raises(UsageError, match="'dream' do not say which"):
        are_greedy(model, [([1], [2])])  # type: ignore[arg-type]
