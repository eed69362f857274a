"""Likelihoods by LLaDA's published estimate, beside the formula in float64 over a plain network."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference_runner import Network
from safetensors.torch import load_file
from torch import Tensor

import mosaic
from mosaic.errors import UsageError
from mosaic.evaluation import are_greedy, log_likelihoods
from mosaic.models import load

SMALL = load("small")
MASK = SMALL.architecture.mask_token_id


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
