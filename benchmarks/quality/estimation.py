"""How well sets of keys serve a block: MAGE's figures 1 to 3 (arXiv 2602.14209, section 3) for a model and its own answers.

Answers are decoded with exact attention. Their canvases go once more through the model in plain PyTorch, which shows the
queries and keys. A token's oracle is the k keys of the prefix that get the most attention, as a mean over the query heads of a
key-value head; a block's, as a mean over its tokens, too (equation 2). Legend: T tokens of a block, P keys of its prefix, D hidden,
N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.evaluation import evaluation_set, gen_length, seen_in_training
from benchmarks.quality.items import LONG_TASKS
from benchmarks.quality.replay import Decided, Records, recording
from benchmarks.quality.vocabulary import vocabulary
from mosaic.decoding import GenerationConfig, generate
from mosaic.errors import UsageError
from mosaic.registrar.operators.top_keys import keys_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.runtime.compiled import CompiledModel

__all__ = [
    "PAGES",
    "SCHEMA",
    "EstimationSettings",
    "Plain",
    "canvases",
    "estimate",
    "items_of",
    "measures",
    "plain_of",
    "union_sizes",
]

SCHEMA: Final = "mosaic.estimation/1"
PAGES: Final = (16, 8, 4, 2)
BINS: Final = 8
"""Of the share of masks left in a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimationSettings:
    """The measurements.

    Parameters
    ----------
    ratios
        k as shares of a block's prefix, in whole pages of 16 keys.
    tasks, lengths, seed
        As for `evaluation_set`.
    items
        Answers of each task and length.
    options
        Fields of `GenerationConfig`: how the answers are decoded.
    """

    ratios: tuple[float, ...] = (1 / 64, 1 / 16, 1 / 4)
    tasks: tuple[str, ...] = LONG_TASKS
    lengths: tuple[int, ...] = (2048,)
    items: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise UsageError(f"ratios are shares of the prefix, in (0, 1], got {', '.join(map(str, self.ratios))}.")
        if self.items < 1:
            raise UsageError(f"at least one answer of each task and length is measured, got {self.items}.")


class Plain:
    """SDAR in float32, a block at a time, over the keys and values of the tokens before it.

    Parameters
    ----------
    weights
        By their names in a checkpoint.
    """

    def __init__(self, weights: Mapping[str, Tensor], architecture: Architecture) -> None:
        self._w = {name: tensor.float() for name, tensor in weights.items()}
        self.architecture = architecture
        half = architecture.attention.head_size // 2
        self._frequency = architecture.rotary.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        self.keys: list[Tensor] = [torch.empty(0) for _ in range(architecture.layers)]  # [P, K, H] each
        self.values: list[Tensor] = list(self.keys)

    def prefill(self, tokens: Tensor) -> None:
        """Forget earlier keys, and keep keys and values of whole blocks, int64 [P]."""
        kv = self.architecture.attention.kv_heads, self.architecture.attention.head_size
        self.keys = [torch.empty(0, *kv) for _ in self.keys]
        self.values = [torch.empty(0, *kv) for _ in self.values]
        for start in range(0, tokens.numel(), self.architecture.block):
            self.block(tokens[start : start + self.architecture.block], keep=True)

    def block(self, tokens: Tensor, *, keep: bool = False) -> tuple[list[Tensor], Tensor]:
        """Forward the block after the kept keys, int64 [T].

        Returns
        -------
        Queries [T, N, H] of every layer, turned to their positions, and the logits [T, V].
        """
        arch, w, queries = self.architecture, self._w, list[Tensor]()
        angle = (self.keys[0].shape[0] + torch.arange(tokens.numel())).float()[:, None] * self._frequency
        x_TD = w["model.embed_tokens.weight"][tokens]
        for layer in range(arch.layers):
            at = f"model.layers.{layer}."
            y_TD = self._norm(x_TD, at + "input_layernorm")
            q, k, v = (
                F.linear(y_TD, w[f"{at}self_attn.{name}_proj.weight"]).view(
                    tokens.numel(), -1, arch.attention.head_size
                )
                for name in "qkv"
            )
            q = _turned(self._norm(q, at + "self_attn.q_norm"), angle)
            k = _turned(self._norm(k, at + "self_attn.k_norm"), angle)
            queries.append(q)
            keys, values = torch.cat([self.keys[layer], k]), torch.cat([self.values[layer], v])
            if keep:
                self.keys[layer], self.values[layer] = keys, values
            group = arch.attention.heads // arch.attention.kv_heads
            seen, shown = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (keys, values))
            attended = F.scaled_dot_product_attention(q.transpose(0, 1), seen, shown)
            x_TD = x_TD + F.linear(attended.transpose(0, 1).flatten(1), w[at + "self_attn.o_proj.weight"])
            y_TD = self._norm(x_TD, at + "post_attention_layernorm")
            gate, up = (F.linear(y_TD, w[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x_TD = x_TD + F.linear(F.silu(gate) * up, w[at + "mlp.down_proj.weight"])
        return queries, F.linear(self._norm(x_TD, "model.norm"), w["lm_head.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.architecture.norm_eps) * self._w[name + ".weight"]
        )


def _turned(x_TNH: Tensor, angle: Tensor) -> Tensor:
    """Rotary embedding, rotate-half."""
    first, second = x_TNH.chunk(2, dim=-1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def canvases(prompt: Tensor, steps: Sequence[Decided], block: int, mask: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (start of the block, the tokens up to its end int64 [P + T]) as every recorded step saw them."""
    last = max((int(step.positions.max()) for step in steps), default=0)
    tokens = torch.full((-(-(max(last, prompt.numel()) + 1) // block) * block,), mask)
    tokens[: prompt.numel()] = prompt
    for step in steps:
        start = int(step.positions[0]) // block * block
        yield start, tokens[: start + block].clone()
        taken = step.positions[step.committed]
        tokens[taken] = step.token_ids[step.committed]


def measures(
    q_TNH: Tensor, keys_PKH: Tensor, k: int, first: Tensor | None = None, pages: Sequence[int] = PAGES
) -> tuple[dict[str, Tensor], Tensor]:
    """Compare sets of k keys with each token's own best set (equation 1).

    Parameters
    ----------
    first
        bool [K, P], the block's oracle at its first step; this is the first step if not given.

    Returns
    -------
    dict
        By set the mean over tokens of the share of a token's oracle that is in it, [K]: "oracle", the block's own; "mage", the
        first step's; "quest P" and "quest P, per token" by pages of P keys. And "recall", the share of the block's oracle that is
        in the first step's.
    Tensor
        bool [K, P], the block's oracle.
    """
    token_KTP = _attention(q_TNH, keys_PKH)
    own_KTP, oracle_KP = _largest(token_KTP, k), _largest(token_KTP.mean(1), k)

    def served(chosen_KTP: Tensor) -> Tensor:
        return (chosen_KTP & own_KTP).sum(2).float().mean(1) / k

    found = {"oracle": served(oracle_KP[:, None])}
    if first is not None:
        found |= {"mage": served(first[:, None]), "recall": (first & oracle_KP).sum(1) / k}
    for page in pages:
        bounds_KTP = _bounds(q_TNH, keys_PKH, page)
        count = min(max(k // page, 1), bounds_KTP.shape[2])
        for name, scores in (
            (f"quest {page}", bounds_KTP.mean(1, keepdim=True)),
            (f"quest {page}, per token", bounds_KTP),
        ):
            found[name] = served(_largest(scores, count).repeat_interleave(page, 2))
    return found, oracle_KP


def union_sizes(q_TNH: Tensor, keys_PKH: Tensor, k: int) -> Tensor:
    """Return the size of the union of all tokens' oracles over k, [K]."""
    return _largest(_attention(q_TNH, keys_PKH), k).any(1).sum(1) / k


def _attention(q_TNH: Tensor, keys_PKH: Tensor) -> Tensor:
    """The softmax over the prefix, a mean over the query heads of each key-value head: [K, T, P]."""
    q_KGTH = _grouped(q_TNH, keys_PKH)
    scores: Tensor = q_KGTH @ keys_PKH.permute(1, 2, 0)[:, None] / q_TNH.shape[2] ** 0.5
    return scores.softmax(-1).mean(1)


def _bounds(q_TNH: Tensor, keys_PKH: Tensor, page: int) -> Tensor:
    """The upper bound of a query's product with any key of a page, a mean over query heads: [K, T, pages]."""
    q_KGTH = _grouped(q_TNH, keys_PKH)
    paged = keys_PKH.view(-1, page, *keys_PKH.shape[1:])
    least, most = (extreme.permute(1, 2, 0)[:, None] for extreme in (paged.amin(1), paged.amax(1)))
    bounds: Tensor = q_KGTH.clamp(min=0) @ most + q_KGTH.clamp(max=0) @ least
    return bounds.mean(1)


def _grouped(q_TNH: Tensor, keys_PKH: Tensor) -> Tensor:
    """The query heads of each key-value head together: [K, G, T, H]."""
    q_NTH = q_TNH.transpose(0, 1)
    return q_NTH.reshape(keys_PKH.shape[1], -1, *q_NTH.shape[1:])


def _largest(scores: Tensor, k: int) -> Tensor:
    """bool, where the k largest of the last dimension are."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(k, dim=-1).indices, True)


class _Means:
    """Sums and counts by key."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, value: float, *key: str) -> None:
        self._sums[key][0] += value
        self._sums[key][1] += 1

    def nested(self) -> dict[str, Any]:
        """The means, a dict for each part of the key."""
        found: dict[str, Any] = {}
        for key, (total, count) in self._sums.items():
            place = found
            for part in key[:-1]:
                place = place.setdefault(part, {})
            place[key[-1]] = total / count
        return found


def estimate(
    model: CompiledModel,
    settings: EstimationSettings,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Decode answers with exact attention, and measure sets of keys along their way.

    Returns
    -------
    dict
        `union`: union over k at the first step, by ratio and layer, with all its values. `first`, `later`: estimation accuracy
        by ratio and set, of a block's first step and of the others. `recall`: of the first step's set by ratio and share of
        masks left. `by_head`: by ratio, layer, head and measure. `by_task`: by ratio, task and measure.

    Raises
    ------
    UsageError
        If the model is not an SDAR.
    """
    arch, plain, items = model.architecture, plain_of(model, "sets of keys are"), items_of(settings)
    means, unions = _Means(), defaultdict[str, list[float]](list)
    for done, item in enumerate(items):
        prompt = torch.tensor(vocabulary().encode(item.prompt))
        records: Records = {}
        config = GenerationConfig(gen_length=gen_length(item.task), **settings.options)
        generate(model, [prompt], recording(config, arch, records))
        _follow(plain, prompt, records[0], settings, item.task, means, unions)
        progress(done + 1, len(items))
    return {
        "schema": SCHEMA,
        "settings": {**asdict(settings), "options": dict(settings.options)},
        "unions": {name: [round(value, 3) for value in values] for name, values in unions.items()},
        **{name: {} for name in ("first", "later", "recall", "by_head", "by_task")},
        **means.nested(),
    }


def plain_of(model: CompiledModel, what: str) -> Plain:
    """Return a model's own forward in plain PyTorch.

    Raises
    ------
    UsageError
        If the model is no SDAR: `what` is measured on SDAR models only.
    """
    if not model.architecture.block or "model.layers.0.self_attn.q_norm.weight" not in model.weights():
        raise UsageError(f"{what} measured on SDAR models only: give small-sdar, or a checkpoint of its family.")
    return Plain(model.weights(), model.architecture)


class _Asked(Protocol):
    """The measured items."""

    @property
    def tasks(self) -> Sequence[str]: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def items(self) -> int: ...
    @property
    def seed(self) -> int: ...


def items_of(settings: _Asked) -> list[Any]:
    """Return the first items of every task and length, which are at all depths."""
    found = evaluation_set(
        settings.seed, tasks=tuple(settings.tasks), lengths=tuple(settings.lengths), per_task=settings.items
    )
    assert not seen_in_training(found)
    cells: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for item in found:
        cells[item.task, item.length].append(item)
    stride = {cell: max(len(members) // settings.items, 1) for cell, members in cells.items()}
    return [item for cell, members in cells.items() for item in members[:: stride[cell]][: settings.items]]


@torch.no_grad()
def _follow(
    plain: Plain, prompt: Tensor, steps: Sequence[Decided], settings: EstimationSettings, task: str, means: _Means,
    unions: dict[str, list[float]],
) -> None:  # fmt: skip
    """Measure every step of one answer."""
    arch, at = plain.architecture, -1
    firsts: dict[tuple[float, int], Tensor] = {}
    for start, tokens in canvases(prompt, steps, arch.block, arch.mask_token_id):
        if at < 0:
            plain.prefill(tokens[:start])
        elif start > at:
            plain.block(tokens[at:start], keep=True)
        begins, at = start != at, start
        queries, _ = plain.block(tokens[start:])
        left = f"{int(BINS * (tokens[start:] == arch.mask_token_id).sum() / arch.block) / BINS:.3f}"
        for ratio in settings.ratios if start else ():
            k, name = -(-keys_of(ratio, start) // PAGES[0]) * PAGES[0], f"{ratio:.6g}"  # whole pages of every size
            for layer, q in enumerate(queries):
                keys = plain.keys[layer]
                if begins:
                    sizes = union_sizes(q, keys, k).tolist()
                    unions[name] += sizes
                    for head, value in enumerate(sizes):
                        means.add(value, "by_head", name, str(layer), str(head), "union")
                found, oracle = measures(q, keys, k, None if begins else firsts[ratio, layer])
                if begins:
                    firsts[ratio, layer] = oracle
                for what, values in found.items():
                    for head, value in enumerate(values.tolist()):
                        if what == "recall":
                            means.add(value, "recall", name, left)
                        means.add(value, "first" if begins else "later", name, what)
                        if not begins:
                            means.add(value, "by_head", name, str(layer), str(head), what)
                            means.add(value, "by_task", name, task, what)
