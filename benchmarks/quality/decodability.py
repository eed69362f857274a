"""Whether importance predicts the tokens of a block that a step decides: FOCUS's figures 2 to 4 and 13, and table 5.

Answers are decoded with all tokens computed. Their canvases go once more through the model in plain PyTorch, which shows queries
and keys of the first two layers: importance is equation 2 of the paper, over the block or over its masked tokens, its delta
equation 3. The same answers are then decoded with a block cache and with eviction, and what steps compute is counted. Legend: T
tokens of a block, N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from benchmarks.quality.estimation import EstimationSettings, Plain, canvases, items_of, plain_of
from benchmarks.quality.evaluation import gen_length
from benchmarks.quality.items import LONG_TASKS
from benchmarks.quality.replay import Decided, Records, recording
from benchmarks.quality.vocabulary import vocabulary
from mosaic.decoding import GenerationConfig, generate
from mosaic.models.policies.focus_options import Eviction
from mosaic.models.policies.registry import token_eviction

if TYPE_CHECKING:
    from mosaic.runtime.compiled import CompiledModel

__all__ = ["BINS", "LEAST_KEPT", "SCHEMA", "DecodabilitySettings", "importance", "measure", "reaches"]

SCHEMA: Final = "mosaic.decodability/1"
BINS: Final = 5
"""Of the rank of a masked token among those of its step, as in figure 4."""
LEAST_KEPT: Final = 2
"""Masked tokens that an eviction keeps at least, by any alpha above 1 and at most 2."""
SIGNALS: Final = ("delta", "layer 1", "layer 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodabilitySettings:
    """The measurements.

    Parameters
    ----------
    alphas
        Of the evictions whose computed tokens are counted.
    preset
        The readings of FOCUS; their importance is measured, too.
    tasks, lengths, items, seed
        As for `EstimationSettings`.
    options
        Fields of `GenerationConfig`: how the answers are decoded.
    """

    alphas: tuple[float, ...] = (1.2, 1.5, 1.8)
    preset: str | Eviction = "focus"
    tasks: tuple[str, ...] = LONG_TASKS
    lengths: tuple[int, ...] = (2048,)
    items: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        EstimationSettings(items=self.items)
        _ = self.ways

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """By name, options of `GenerationConfig` beside those of the answers: nothing, the block cache alone, and evictions."""
        eviction, cached = token_eviction(self.preset), {"block_cache": "dc+", "block_commit": "cached"}
        evictions = {
            f"alpha {alpha:g}": {"eviction": replace(eviction, alpha=alpha), **cached} for alpha in self.alphas
        }
        return {"all tokens": {}, "dc+": cached, **evictions}


def importance(q_TNH: Tensor, keys_TKH: Tensor, pool: int) -> Tensor:
    """Return the attention that each of some tokens gets from them: scores pooled over neighbours, a softmax over the tokens,
    summed over queries and heads (equations 2 and 15), [T]."""
    group = q_TNH.shape[1] // keys_TKH.shape[1]
    scores = torch.einsum("tnh,snh->nts", q_TNH, keys_TKH.repeat_interleave(group, 1)) * q_TNH.shape[2] ** -0.5
    return torch.max_pool1d(scores, pool, 1, pool // 2).softmax(2).sum((0, 1))


def reaches(values: Tensor, decided: Tensor, count: int) -> bool:
    """Return whether one of the `count` tokens with the most of a signal is decided; equal ones as they stand."""
    return bool(decided[values.argsort(descending=True, stable=True)[:count]].any())


def measure(
    model: CompiledModel,
    settings: DecodabilitySettings,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Decode answers, and measure importance and computed tokens along their way.

    Returns
    -------
    dict
        `decoded_per_step`: steps by the tokens that they decided. `signals`: by signal `decoded` and `masked`, numbers of masked
        tokens by fifth of their rank among those of the step, ascending, and `auc`, the share of pairs of a step, a token decided
        and one that was not, in which the first has more of the signal, and `reached`, the share of steps in which one of the
        `LEAST_KEPT` tokens with the most of it was decided. `ways`: by name `steps`, tokens `decoded`, `computed` in
        their block beyond the layer in which tokens are dropped, `again` of the block before, and `computed_per_decoded`.

    Raises
    ------
    UsageError
        If the model is not an SDAR.
    """
    arch, plain, items = model.architecture, plain_of(model, "importance is"), items_of(settings)
    table, histogram = {signal: _Table() for signal in SIGNALS}, Counter[int]()
    ways: dict[str, Counter[str]] = {name: Counter() for name in settings.ways}
    for done, item in enumerate(items):
        prompt = torch.tensor(vocabulary().encode(item.prompt))
        for name, way in settings.ways.items():
            records: Records = {}
            config = GenerationConfig(gen_length=gen_length(item.task), **{**settings.options, **way})
            generate(model, [prompt], recording(config, arch, records))
            ways[name] += _counted(records[0])
            if not way:
                histogram += Counter(int(step.committed.sum()) for step in records[0])
                for delta, raw, before, decided in _signals(plain, prompt, records[0], token_eviction(settings.preset)):
                    for signal, values in zip(SIGNALS, (delta, raw, before), strict=True):
                        table[signal].add(values, decided)
        progress(done + 1, len(items))
    return {
        "schema": SCHEMA,
        "settings": {
            **asdict(settings), "options": dict(settings.options), "preset": str(token_eviction(settings.preset))
        },
        "decoded_per_step": {str(count): steps for count, steps in sorted(histogram.items())},
        "signals": {signal: found.figures() for signal, found in table.items()},
        "ways": {
            name: {**counts, "computed_per_decoded": counts["computed"] / counts["decoded"]}
            for name, counts in ways.items()
        },
    }  # fmt: skip


def _counted(steps: Sequence[Decided]) -> Counter[str]:
    return Counter(
        steps=len(steps), decoded=sum(int(step.committed.sum()) for step in steps),
        computed=sum(step.computed for step in steps), again=sum(step.again for step in steps),
    )  # fmt: skip


@torch.no_grad()
def _signals(
    plain: Plain, prompt: Tensor, steps: Sequence[Decided], eviction: Eviction
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The signals of the masked tokens of each step, and which were decided."""
    arch, at = plain.architecture, -1
    for (start, tokens), step in zip(canvases(prompt, steps, arch.block, arch.mask_token_id), steps, strict=True):
        if at < 0:
            plain.prefill(tokens[:start])
        elif start > at:
            plain.block(tokens[at:start], keep=True)
        at, before = start, (list(plain.keys), list(plain.values))
        queries, _ = plain.block(tokens[start:], keep=True)
        masked = step.positions - start
        among = masked if eviction.importance == "masked" else torch.arange(len(tokens) - start)
        first, second = (
            importance(queries[layer][among], plain.keys[layer][start:][among], eviction.pool) for layer in (0, 1)
        )
        plain.keys, plain.values = before
        own = torch.isin(among, masked)
        yield (second - first)[own], second[own], first[own], step.committed


class _Table:
    """Masked tokens by rank of a signal, and pairs."""

    def __init__(self) -> None:
        self.decoded, self.masked, self._pairs, self._ordered = [0] * BINS, [0] * BINS, 0, 0.0
        self._steps = self._reached = 0

    def add(self, values: Tensor, decided: Tensor) -> None:
        """Take note of one step, unless all of its masked tokens were decided."""
        count = values.numel()
        if bool(decided.all()):
            return
        self._steps += 1
        self._reached += reaches(values, decided, LEAST_KEPT)
        for rank, row in enumerate(values.argsort(stable=True).tolist()):
            place = rank * BINS // count
            self.masked[place] += 1
            self.decoded[place] += int(decided[row])
        more, others = values[decided][:, None], values[~decided]
        self._pairs += more.numel() * others.numel()
        self._ordered += float((more > others).sum() + 0.5 * (more == others).sum())

    def figures(self) -> dict[str, Any]:
        """Return the recorded figures."""
        return {
            "decoded": self.decoded, "masked": self.masked, "auc": self._ordered / self._pairs if self._pairs else None,
            "reached": self._reached / self._steps if self._steps else None,
        }  # fmt: skip
