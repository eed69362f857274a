"""A dense float32 transformer in plain PyTorch, and a `StepRunner` over it: what compiled models are held against.

`Network` reads tensors by their checkpoint names. `ReferenceRunner` carries out phases by naive code: every sequence by
itself, keys and values as plain tensors, one row at a time for the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mosaic.kernels.shared import sampling
from mosaic.models import parts
from mosaic.models.architecture import Architecture
from mosaic.models.parts import Commit
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.steps import StateRows, StepRequest, StepResult

KV = list[tuple[Tensor, Tensor]]
"""Keys and values [R, W] of every layer."""


def random_tensors(arch: Architecture, seed: int) -> dict[str, Tensor]:
    """Weights of a dense model by checkpoint name, such that answers vary and depend on all that a row sees.

    Attention is far from uniform, and masks, which are most of what there is, say little by themselves.
    """
    generator, names = torch.Generator().manual_seed(seed), arch.names
    wide, narrow, fed = arch.attention.width, arch.attention.kv_width, arch.feed_forward.size
    found = {names.embedding: (arch.vocabulary, arch.hidden), names.final_norm: (arch.hidden,)}
    if not arch.tied:
        found[names.head] = (arch.vocabulary, arch.hidden)
    for layer in range(arch.layers):
        sizes: dict[str, tuple[int, ...]] = {
            names.attention_norm: (arch.hidden,), names.ffn_norm: (arch.hidden,), names.output: (arch.hidden, wide),
            names.gate: (fed, arch.hidden), names.up: (fed, arch.hidden), names.down: (arch.hidden, fed),
        }  # fmt: skip
        for name, size in ((names.query, wide), (names.key, narrow), (names.value, narrow)):
            stem = name.removesuffix(".weight")
            sizes[stem + ".weight"] = (size, arch.hidden)
            if arch.attention.qkv_bias:
                sizes[stem + ".bias"] = (size,)
        if arch.attention.head_norms:
            sizes |= {names.query_norm: (arch.attention.head_size,), names.key_norm: (arch.attention.head_size,)}
        found |= {name.format(layer=layer): shape for name, shape in sizes.items()}
    tensors = {}
    for name, shape in found.items():
        drawn = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = drawn if name.endswith(".bias") else 1.0 + 0.2 * drawn
        else:
            tensors[name] = 3.0 * drawn * shape[1] ** -0.5
    tensors[names.embedding] *= arch.hidden**0.5 / 3.0
    tensors[names.embedding][arch.mask_token_id] *= 0.3
    return tensors


class Network:
    """A dense transformer over tensors by checkpoint name."""

    def __init__(self, arch: Architecture, tensors: dict[str, Tensor]) -> None:
        self.arch, self.tensors = arch, tensors

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.arch.norm_eps).rsqrt() * self.tensors[name]

    def _project(self, x: Tensor, name: str) -> Tensor:
        stem = name.removesuffix(".weight")
        y = x @ self.tensors[stem + ".weight"].T
        return y + self.tensors[stem + ".bias"] if self.arch.attention.qkv_bias else y

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        size = self.arch.attention.head_size
        angle = positions[:, None] * self.arch.rotary.theta ** -(torch.arange(0, size, 2) / size)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        arch = self.arch
        keys, values = (x.view(-1, arch.attention.kv_heads, arch.attention.head_size) for x in (k, v))
        group = arch.attention.heads // arch.attention.kv_heads
        scores = torch.einsum("tnh,snh->nts", q, keys.repeat_interleave(group, 1)) / math.sqrt(arch.attention.head_size)
        if arch.block:
            hidden = torch.arange(len(keys))[None] // arch.block > positions[:, None] // arch.block
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("nts,snh->tnh", scores.softmax(-1), values.repeat_interleave(group, 1)).flatten(1)

    def new_kv(self, rows: int) -> KV:
        width = self.arch.attention.kv_heads * self.arch.attention.head_size
        return [
            (torch.full((rows, width), torch.nan), torch.full((rows, width), torch.nan))
            for _ in range(self.arch.layers)
        ]

    def hidden(self, tokens: Tensor, start: int, kv: KV, key_len: int) -> Tensor:
        """Last hidden rows of a window from `start` on; its keys and values are written into kv, key_len are seen."""
        arch, names = self.arch, self.arch.names
        positions = torch.arange(start, start + len(tokens))
        x = self.tensors[names.embedding][tokens]
        for layer in range(self.arch.layers):
            own = {name: getattr(names, name).format(layer=layer) for name in ("attention_norm", "ffn_norm", "query", "key",
                   "value", "output", "gate", "up", "down", "query_norm", "key_norm")}  # fmt: skip
            normed = self._norm(x, own["attention_norm"])
            q, k, v = (self._project(normed, own[name]) for name in ("query", "key", "value"))
            q, k = q.view(len(tokens), -1, arch.attention.head_size), k.view(len(tokens), -1, arch.attention.head_size)
            if arch.attention.head_norms:
                q, k = self._norm(q, own["query_norm"]), self._norm(k, own["key_norm"])
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            kv[layer][0][start : start + len(tokens)] = k.flatten(1)
            kv[layer][1][start : start + len(tokens)] = v
            x = (
                x
                + self._attend(q, kv[layer][0][:key_len], kv[layer][1][:key_len], positions)
                @ self.tensors[own["output"]].T
            )
            normed = self._norm(x, own["ffn_norm"])
            gate, up = (normed @ self.tensors[own[name]].T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.tensors[own["down"]].T
        return self._norm(x, names.final_norm)

    def unembed(self, rows: Tensor) -> Tensor:
        """Logits of hidden rows, float32."""
        names = self.arch.names
        return rows @ self.tensors[names.embedding if self.arch.tied else names.head].T

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [N, V] of a whole sequence as the model gives them: not shifted."""
        return self.unembed(self.hidden(tokens, 0, self.new_kv(len(tokens)), len(tokens)))


@dataclass
class PlainSequence:
    """Keys and values of one sequence; rows that were never written are NaN."""

    network: Network
    kv: KV = field(default_factory=list)
    length: int = 0
    closed: bool = False

    def reserve(self, tokens: int) -> None:
        assert not self.closed
        if tokens > self.length:
            fresh = self.network.new_kv(tokens)
            for (keys, values), (old_keys, old_values) in zip(fresh, self.kv, strict=False):
                keys[: self.length], values[: self.length] = old_keys, old_values
            self.kv, self.length = fresh, tokens

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def kept(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """A row's logits with what top-p, then top-k, leave out at -inf."""
    order = torch.sort(logits, descending=True, stable=True).indices
    probabilities, total, left = logits.softmax(-1), 0.0, []
    for token in order.tolist():
        if left and total > top_p:
            break
        left.append(token)
        total += float(probabilities[token])
    if top_k:
        left = left[:top_k]
    cut = torch.full_like(logits, float("-inf"))
    cut[left] = logits[left]
    return cut


class ReferenceRunner:
    """Runs steps one request and one row at a time."""

    def __init__(self, network: Network) -> None:
        self.network, self.architecture = network, network.arch
        self.sequences: list[PlainSequence] = []
        self.packed: list[list[StepRequest]] = []
        self.checked: list[StepSize] = []

    def sharing(self) -> SharedSizes:
        return SharedSizes()

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def open_rows(self, state: State) -> StateRows:
        assert state is parts.KV
        self.sequences.append(PlainSequence(self.network))
        return self.sequences[-1]

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Any:
        self.checked = list(sizes)
        return SimpleNamespace(total_bytes=1)

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        self.checked = list(sizes)
        return True

    asynchronous = False

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        self.packed.append(list(requests))
        assert len({request.phase for request in requests}) == 1, "one step has one phase"
        return [self._one(request) for request in requests]

    def _hidden(self, request: StepRequest, tokens: Tensor) -> Tensor:
        if not request.phase.cached:
            assert request.start == 0 and request.sequence is None
            return self.network.hidden(tokens, 0, self.network.new_kv(len(tokens)), len(tokens))
        sequence = request.sequence
        assert isinstance(sequence, PlainSequence) and not sequence.closed
        assert request.start + len(tokens) <= request.key_len <= sequence.length
        return self.network.hidden(tokens, request.start, sequence.kv, request.key_len)

    def _one(self, request: StepRequest) -> StepResult:
        phase, rows = request.phase, request.rows
        hidden = self._hidden(request, request.token_ids)
        if not phase.head.decides:
            assert not len(rows)
            nothing = torch.empty(0, dtype=torch.int64)
            return self._result(nothing, torch.empty(0), nothing.bool(), nothing)
        assert len(rows) and torch.equal(rows, rows.sort().values) and len(request.current) == len(rows)
        assert isinstance(phase.commit, Commit)
        source = (rows - 1).clamp(min=0) if self.architecture.shifted else rows
        logits = self.network.unembed(hidden[source])
        if phase.guidance is not None:
            assert request.unconditional is not None
            other = self.network.unembed(self._hidden(request, request.unconditional)[source])
            logits = other + (request.guidance + 1) * (logits - other)
        token, score = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        noise = torch.zeros_like(logits)
        head = request.head or phase.head
        if head.samples and request.temperature > 0:
            assert request.keys is not None
            noise = -sampling.exponentials(request.keys, logits.shape[1]).log()
        for i, row in enumerate(logits):
            scaled = row
            if head.name == "nucleus":
                scaled = row / request.temperature if request.temperature > 0 else row
                scaled = kept(scaled, request.top_p, request.top_k)
                token[i] = (scaled + noise[i]).argmax()
            else:
                token[i] = (row + request.temperature * noise[i]).argmax()
            p = scaled.softmax(-1)
            top = p.topk(2).values
            score[i] = {
                "confidence": p[token[i]], "margin": top[0] - top[1], "entropy": (p * (p + 1e-10).log()).sum(),
            }[phase.commit.score]  # fmt: skip
        if phase.commit.perturb and request.score_temperature > 0:
            assert request.keys is not None
            score = score / request.score_temperature + sampling.gumbels(request.keys)
        committed = rule(request, token, score, self.architecture.mask_token_id)
        return self._result(token, score, committed, torch.where(committed, token, request.current))

    def _result(self, token: Tensor, score: Tensor, committed: Tensor, chosen: Tensor) -> StepResult:
        plan: Any = SimpleNamespace(total_bytes=1)
        return StepResult(token=token, score=score, committed=committed, chosen=chosen, plan=plan, seconds=0.0)


def rule(request: StepRequest, token: Tensor, score: Tensor, mask_id: int) -> Tensor:
    """The committed rows by the definitions of the operator `transfer`."""
    rows = [i for i in range(len(score)) if int(request.current[i]) == mask_id]
    ranked = sorted(rows, key=lambda i: (-float(score[i]), i))
    threshold, top = torch.tensor(request.threshold), ranked[: request.quota]
    above = [i for i in rows if score[i] > threshold]
    commit = request.phase.commit
    assert isinstance(commit, Commit)
    kind = commit.rule
    if kind == "top":
        taken = top
    elif kind == "threshold":
        taken = ranked[:1] + [i for i in ranked[1:] if score[i] >= threshold]
    elif kind in ("dynamic", "edit"):
        taken = above if len(above) >= request.quota else top
    elif kind == "factor":
        taken = ranked[: factor_count([float(score[i]) for i in ranked], request.threshold)]
    else:
        raise AssertionError(kind)
    if kind == "edit":
        tokens = [i for i in range(len(score)) if i not in rows]
        edit = torch.tensor(request.edit_threshold)
        taken = taken + [i for i in tokens if score[i] > edit and token[i] != request.current[i]]
    committed = torch.zeros(len(score), dtype=torch.bool)
    committed[taken] = True
    return committed


def factor_count(scores: list[float], factor: float) -> int:
    """The number of descending scores that Fast-dLLM's factor rule takes."""
    stop = len(scores) - 1
    for n, score in enumerate(scores, start=1):
        if score < (-1.0 if n == 1 else 1 - factor / (n + 1)):
            stop = n - 1
            break
    return stop + 1 if stop in (0, len(scores) - 1) else stop
