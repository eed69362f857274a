"""Likelihoods of texts, by the estimates that the families' authors publish.

**LLaDA**, *Large Language Diffusion Models* (arXiv 2502.09992), eq. 6, and its repository's `eval_llada.py`; **LLaDA-MoE** has the
same in `evaluations/eval_dinfer.py` of its authors' dInfer. A continuation of L tokens has at least the log-likelihood
E[L / l * sum of log p(token)], where l is uniform in 1..L, l of its tokens are masked, each set of l as likely as any other, and
the sum is over these. The original spreads the numbers of masks of a batch evenly: l + j * L / batch, rounded. It rounds halves to
the even number, so short continuations get some numbers too seldom. Here halves go up, and each number is as likely as any other.

**Dream**, `eval/eval.py` of its repository (`nll_type=mc`, `log_type=ftb`): E[1 / r * sum of log p(token)], where each token is
masked with probability r by itself, the sum is over those that are, and r is uniform in 0.001..1, spread evenly over a batch. An
end of sequence stands behind the continuation. It is never masked, nor is the first token of the whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.runtime.compiled import CompiledModel

__all__ = ["Estimate", "Pair", "are_greedy", "estimate_of", "log_likelihoods"]

Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, which may be empty, and of its continuation."""
_TOKENS: Final = 8192
"""Tokens of a step, unless one sequence has more."""
_ROWS: Final = 512
"""Rows of logits that a step returns: 123 MiB of LLaDA's in bfloat16."""
_LEAST_RATE: Final = 1e-3
"""Dream's `sampling_eps`."""


class Estimate(NamedTuple):
    """What a family's authors estimate by.

    Parameters
    ----------
    masks
        Of a batch of copies, given the positions of the continuation: those that each copy masks, and the weight of the
        log-probabilities there.
    framed
        Whether texts begin with a beginning of sequence, which callers give, and end with an end of sequence.
    greedy
        Whether they say which continuations are greedy.
    """

    masks: Callable[[random.Random, range, int], Iterator[tuple[list[int], float]]]
    framed: bool
    greedy: bool


def _by_number(rng: random.Random, positions: range, copies: int) -> Iterator[tuple[list[int], float]]:
    """LLaDA's masks: their numbers are spread evenly over 1..L."""
    length = len(positions)
    first = rng.randint(1, length)
    for place in range(copies):
        masks = (first - 1 + (2 * place * length + copies) // (2 * copies)) % length + 1
        yield sorted(rng.sample(positions, masks)), length / masks


def _by_rate(rng: random.Random, positions: range, copies: int) -> Iterator[tuple[list[int], float]]:
    """Dream's masks: their rates are spread evenly, and the first token of a text has none."""
    first = rng.random()
    for place in range(copies):
        rate = (1 - _LEAST_RATE) * ((first + place / copies) % 1) + _LEAST_RATE
        yield [at for at in positions if at and rng.random() < rate], 1 / rate


_LLADA: Final = Estimate(masks=_by_number, framed=False, greedy=True)
_ESTIMATES: Final[Mapping[str, Estimate]] = {
    "llada": _LLADA,
    "llada-moe": _LLADA,
    "dream": Estimate(masks=_by_rate, framed=True, greedy=False),
}


def estimate_of(model: CompiledModel) -> Estimate:
    """Return what a model's family is estimated by.

    Raises
    ------
    UsageError
        If its authors publish no estimate.
    """
    family = model.model.family
    if family not in _ESTIMATES:
        raise UsageError(
            f"likelihoods: Mosaic has the published estimates of {', '.join(_ESTIMATES)}, and none for the family '{family}'; "
            "take a task that generates."
        )
    return _ESTIMATES[family]


class _Masked(NamedTuple):
    """A pair with some tokens of its continuation masked: its number, all tokens, and of those that are asked for the rows, the
    tokens and the weight of their log-probabilities."""

    number: int
    token_ids: list[int]
    rows: list[int]
    targets: list[int]
    weight: float


def log_likelihoods(
    model: CompiledModel, pairs: Sequence[Pair], *, samples: int = 128, strata: int = 32, seed: int = 0
) -> list[float]:
    """Estimate the log-likelihood of each continuation behind its context.

    Parameters
    ----------
    samples
        Masked copies of each pair, `mc_num` of the original; a multiple of `strata`.
    strata
        Copies whose numbers or rates of masks are drawn together, evenly spread: its `batch_size`.
    seed
        Of all draws. Continuations of one length behind the same context get the same masks; what else is estimated changes
        nothing. The original draws from PyTorch's global generator.

    Returns
    -------
    list of float
        In natural logarithms; 0 for an empty continuation. Sums are in float64.

    Raises
    ------
    UsageError
        If the family has no published estimate, or `samples` is no multiple of `strata`.
    DoesNotFit
        If a step over one pair does not fit.
    """
    estimate = estimate_of(model)
    if samples < 1 or strata < 1 or samples % strata:
        raise UsageError(f"{samples} samples are no multiple of {strata} strata; give for example {strata}.")
    sums = [0.0] * len(pairs)
    copies = (
        copy for number, pair in enumerate(pairs) for copy in _copies(model, estimate, number, pair, samples, strata, seed)
    )  # fmt: skip
    for step in _steps(copies):
        for copy, found in zip(step, _log_probabilities(model, step), strict=True):
            sums[copy.number] += copy.weight * float(found.sum())
    return [total / samples for total in sums]


def are_greedy(model: CompiledModel, pairs: Sequence[Pair]) -> list[bool]:
    """Say of each continuation whether the model writes it, token by token in the order of its confidence.

    That is LLaDA's `suffix_greedy_prediction`: all of the continuation is masked, each step decides the token of the highest
    probability, and the continuation is greedy if all of its tokens come out. It ends at the first that does not.

    Raises
    ------
    UsageError
        If the family's authors do not say which continuations are greedy.
    DoesNotFit
        If a step over one pair does not fit.
    """
    if not estimate_of(model).greedy:
        raise UsageError(f"greedy continuations: the authors of '{model.model.family}' do not say which these are.")
    greedy = [True] * len(pairs)
    mask = model.mask_token_id
    live = [
        (number, [*context, *[mask] * len(wanted)], list(range(len(context), len(context) + len(wanted))))
        for number, (context, wanted) in enumerate(pairs)
    ]
    while live := [entry for entry in live if entry[2] and greedy[entry[0]]]:
        for step in _steps(_Masked(number, ids, rows, [], 0.0) for number, ids, rows in live):
            found = model([torch.tensor(one.token_ids) for one in step], _packed_rows(step))
            sizes = [len(one.rows) for one in step]
            for one, tokens, sure in zip(
                step, found.token_ids.split_with_sizes(sizes), found.confidence.split_with_sizes(sizes), strict=True
            ):
                best = int(sure.argmax())
                row, token = one.rows.pop(best), int(tokens[best])
                one.token_ids[row] = token
                context, wanted = pairs[one.number]
                greedy[one.number] &= token == wanted[row - len(context)]
    return greedy


def _copies(
    model: CompiledModel, estimate: Estimate, number: int, pair: Pair, samples: int, strata: int, seed: int
) -> Iterator[_Masked]:
    """Masked copies of a pair."""
    context, wanted = pair
    start = len(context)
    whole = [*context, *wanted, *(model.architecture.eos_token_ids[:1] if estimate.framed else ())]
    rng = random.Random(f"{seed}/{','.join(map(str, context))}")
    for _ in range(samples // strata if wanted else 0):
        for at, weight in estimate.masks(rng, range(start, start + len(wanted)), strata):
            ids = [*whole]
            for one in at:
                ids[one] = model.mask_token_id
            for cut in range(0, len(at), _ROWS):
                part = at[cut : cut + _ROWS]
                yield _Masked(number, ids, part, [whole[one] for one in part], weight)


def _steps(copies: Iterable[_Masked]) -> Iterator[list[_Masked]]:
    """Copies that share a step."""
    step, tokens, rows = list[_Masked](), 0, 0
    for copy in copies:
        more, asked = len(copy.token_ids), len(copy.rows)
        if step and (tokens + more > _TOKENS or rows + asked > _ROWS):
            yield step
            step, tokens, rows = [], 0, 0
        step.append(copy)
        tokens, rows = tokens + more, rows + asked
    if step:
        yield step


def _packed_rows(step: Sequence[_Masked]) -> Tensor:
    """The rows of a packed step that its copies ask for, int64 [M]."""
    found, start = list[int](), 0
    for copy in step:
        found.extend(start + row for row in copy.rows)
        start += len(copy.token_ids)
    return torch.tensor(found)


def _log_probabilities(model: CompiledModel, step: Sequence[_Masked]) -> Sequence[Tensor]:
    """Log-probabilities of the targets, float64 [m] of each copy: their logits, less the log-sum-exp of the row."""
    rows = _packed_rows(step)
    with model.exclusive():
        found = model([torch.tensor(copy.token_ids) for copy in step], rows, logits_for=rows)
        assert found.logits is not None
        targets = torch.tensor([token for copy in step for token in copy.targets], device=found.logits.device)
        logits = found.logits.gather(1, targets[:, None])[:, 0].double()
        return (logits - found.logsumexp.double()).cpu().split_with_sizes([len(copy.rows) for copy in step])
