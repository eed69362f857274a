"""Steps of packed requests in mixed phases: a whole canvas without and with keeping keys, and a block over what was kept.

Attention is flash attention over packed rows. Kept keys lie in a pool of rows, those of a request in one run; its block's own keys
are written behind them, or among them where all are kept. `published` is dLLM-Serve's public way: kept keys of each request are
read into new tensors, own ones are set behind them, then all of them are set side by side, and selection goes request by request;
the logits of all rows of the step are computed. Legend as in `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench.baselines import Transformer
from benchmarks.dllm_serve.forward import Angles, Bounds, attend_packed, commit, decided, run_layers
from benchmarks.dllm_serve.selection import DELAY, OPTIONS, chosen, scores_of
from benchmarks.dllm_serve.trace import BLOCK, Asked

__all__ = ["MOST_LOGITS", "Live", "PackedSteps", "Phase", "Pool"]

MOST_LOGITS: Final = 2048
"""Rows whose logits exist at once: "max materialized logits" of the paper's table 3."""


class Phase(Enum):
    """What a request does in a step."""

    FULL = 0
    REFRESH = 1
    REUSE = 2


@dataclass(slots=True, eq=False)
class Live:
    """A request that is served: its row of the canvases, the first row of its kept keys, and steps taken.

    Parameters
    ----------
    dual
        Whether all keys are kept, each in the row of its position, from the first step of a block on.
    """

    asked: Asked
    place: int
    base: int
    dual: bool
    steps: int = 0

    @property
    def kept(self) -> int:
        """Keys that are kept of those outside the block."""
        return self.asked.length - BLOCK if self.dual else OPTIONS.kept(self.asked.length - BLOCK)

    @property
    def is_over(self) -> bool:
        """Whether all is decided."""
        return self.steps == self.asked.answer

    @property
    def phase(self) -> Phase:
        """What its next step does."""
        number, delay = self.steps % BLOCK, 0 if self.dual else DELAY
        return Phase.FULL if number < delay else Phase.REFRESH if number == delay else Phase.REUSE

    @property
    def block(self) -> tuple[int, int]:
        """Positions of its block."""
        start = self.asked.prompt + self.steps // BLOCK * BLOCK
        return start, start + BLOCK

    @property
    def window(self) -> tuple[int, int]:
        """Positions that its next step computes."""
        return self.block if self.phase is Phase.REUSE else (0, self.asked.length)

    @property
    def tokens(self) -> int:
        """How many these are."""
        start, end = self.window
        return end - start

    @property
    def own(self) -> int:
        """The first of its block's rows in the pool."""
        return self.base + (self.block[0] if self.dual else self.kept)


@dataclass(slots=True)
class Pool:
    """Rows of keys and values of every layer, [rows, K, H] each, and the runs that are taken."""

    k: list[Tensor]
    v: list[Tensor]
    runs: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, network: Transformer, rows: int) -> Pool:
        """Make one for a model."""
        own = network.arch.attention
        shape = rows, own.kv_heads, own.head_size
        device, layers = network.embedding.device, range(network.arch.layers)
        return cls(*([torch.zeros(shape, dtype=network.dtype, device=device) for _ in layers] for _ in "kv"))

    @property
    def rows(self) -> int:
        """How many it has."""
        return len(self.k[0])

    def take(self, rows: int) -> int | None:
        """Take the first run of `rows` rows that nobody has; None if there is none."""
        base = 0
        for place, (start, end) in enumerate([*self.runs, (self.rows, self.rows)]):
            if start - base >= rows:
                self.runs.insert(place, (base, base + rows))
                return base
            base = end
        return None

    def free(self, base: int) -> None:
        """Give a run back."""
        self.runs = [run for run in self.runs if run[0] != base]


class _Layout(NamedTuple):
    """Where the rows of a step lie: its requests by phase, and int64 indices on the device."""

    cells: Tensor
    """[T] in the flat canvases."""
    positions: Tensor
    block_cells: Tensor
    """[B, BLOCK] in the flat canvases."""
    block_rows: Tensor
    """[B, BLOCK] in the step."""
    bounds: Bounds
    own_rows: Tensor
    """Rows of the step whose keys are written to the pool, and where."""
    own_slots: Tensor
    run: tuple[int, int] | None
    """The pool's rows that are the keys of all requests in order; None if these are gathered."""
    fresh_rows: Tensor
    """Rows of the step that are keys of the step, and where among them."""
    fresh_keys: Tensor
    pool_rows: Tensor
    """Rows of the pool that are keys of the step, and where among them."""
    pool_keys: Tensor


@dataclass(slots=True)
class _Keep:
    """What requests keep of a step, by rows of the step.

    Parameters
    ----------
    slots
        Where it goes in the pool.
    outside
        What is kept; or, with the others, the candidates [B, C], -1 beyond a request's.
    queries
        The blocks' rows [B, BLOCK].
    ranks
        Which of [B, most] candidates in order are kept, flat.
    most
        The most that a request keeps.
    """

    slots: Tensor
    outside: Tensor
    queries: Tensor | None = None
    ranks: Tensor | None = None
    most: int = 0

    def taken(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the rows that are kept, by queries [T, N, H] and keys [T, K, H] of a layer."""
        if self.queries is None or self.ranks is None:
            return self.outside
        scores = scores_of(q[self.queries].mean(1, keepdim=True), k[self.outside.clamp(min=0)])
        order = chosen(scores.masked_fill(self.outside < 0, float("-inf")), self.most)
        return self.outside.gather(1, order).flatten()[self.ranks]


class PackedSteps:
    """Canvases of requests, and steps of some of them.

    Parameters
    ----------
    network
        The model.
    pool
        Where kept keys lie.
    places
        Requests that are live together at most.
    longest
        Positions of a request at most.
    """

    def __init__(self, network: Transformer, pool: Pool, places: int, longest: int, *, published: bool = False) -> None:
        self.network, self.pool, self.longest, self.published = network, pool, longest, published
        self.device = network.embedding.device
        self.ids = torch.zeros(places, longest, dtype=torch.int64, device=self.device)
        self.open_ = torch.zeros(places, longest, dtype=torch.bool, device=self.device)
        self._free = [*range(places)][::-1]
        self._angles = Angles.of(network, longest)
        self._last: tuple[object, _Layout] | None = None

    def begin(self, asked: Asked, prompt: Tensor, rows: int, *, dual: bool) -> Live | None:
        """Take a place and `rows` rows of the pool for a request with a prompt int64 [P]; None if there is no room."""
        if not self._free or (base := self.pool.take(rows)) is None:
            return None
        place = self._free.pop()
        ids = torch.full((self.longest,), self.network.arch.mask_token_id)
        ids[: asked.prompt] = prompt
        self.ids[place] = ids.to(self.device)
        self.open_[place] = (torch.arange(self.longest) >= asked.prompt).to(self.device)
        return Live(asked, place, base, dual)

    def end(self, live: Live) -> Tensor:
        """Give back what a request has; return its answer int64 [answer]."""
        self.pool.free(live.base)
        self._free.append(live.place)
        return self.ids[live.place, live.asked.prompt : live.asked.length].clone()

    def step(self, lives: Sequence[Live]) -> None:
        """Compute what each request's phase says, and decide one token of each."""
        layout, keeps = self._layout(lives), self._keeps(lives)
        assemble = self._assembled_published if self.published else self._assembled

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = assemble(layer, k, v, layout, lives)
            for keep in keeps:
                taken = keep.taken(q, k)
                self.pool.k[layer][keep.slots], self.pool.v[layer][keep.slots] = k[taken], v[taken]
            return attend_packed(q, keys, values, layout.bounds)

        ids = self.ids.view(-1)
        hidden = run_layers(self.network, ids[layout.cells], self._angles.at(layout.positions), attend)
        if self.published:
            token, confidence = decided(self.network, hidden, torch.float32, MOST_LOGITS)
            token, confidence = token[layout.block_rows], confidence[layout.block_rows]
        else:
            found = decided(self.network, hidden[layout.block_rows.flatten()], torch.float32, MOST_LOGITS)
            token, confidence = (part.view(-1, BLOCK) for part in found)
        open_ = self.open_.view(-1)
        block_ids, block_open = ids[layout.block_cells], open_[layout.block_cells]
        commit(block_ids, block_open, token, confidence)
        ids[layout.block_cells], open_[layout.block_cells] = block_ids, block_open
        for live in lives:
            live.steps += 1

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _layout(self, lives: Sequence[Live]) -> _Layout:
        """Where rows lie; the last step's, if nothing has changed."""
        key = [(live, live.phase) for live in lives]  # a block does not begin in the phase in which one ends
        if self._last is None or self._last[0] != key:
            self._last = key, self._laid_out(lives)
        return self._last[1]

    def _laid_out(self, lives: Sequence[Live]) -> _Layout:
        cells, positions, block_cells, block_rows = [], [], [], []
        pairs: dict[str, list[np.ndarray]] = {name: [] for name in ("own", "fresh", "pool")}
        row, key, keys = 0, 0, []
        for live in lives:
            (first, end), (start, _), reuses = live.window, live.block, live.phase is Phase.REUSE
            here = np.arange(first, end)
            positions.append(here)
            cells.append(here + live.place * self.longest)
            block_cells.append(np.arange(start, start + BLOCK) + live.place * self.longest)
            block_rows.append(np.arange(start, start + BLOCK) - first + row)
            rows = np.arange(row, row + len(here))
            if reuses:
                count = live.kept + BLOCK
                pairs["own"].append(np.stack([rows, np.arange(live.own, live.own + BLOCK)]))
                pairs["pool"].append(np.stack([np.arange(live.base, live.base + count), np.arange(key, key + count)]))
            else:
                count = len(here)
                pairs["fresh"].append(np.stack([rows, np.arange(key, key + count)]))
            keys.append(count)
            row, key = row + len(here), key + count
        none = np.zeros((2, 0), dtype=np.int64)
        own, fresh, pooled = (np.concatenate([none, *pairs[name]], axis=1) for name in ("own", "fresh", "pool"))
        in_order = not fresh.size and bool((np.diff(pooled[0]) == 1).all())
        lengths = [len(part) for part in positions]
        return _Layout(
            *map(self._on_device, (np.concatenate(cells), np.concatenate(positions), np.stack(block_cells), np.stack(block_rows))),
            Bounds.of(lengths, keys, self.device), *map(self._on_device, own),
            (int(pooled[0, 0]), int(pooled[0, -1]) + 1) if in_order else None,
            *map(self._on_device, (*fresh, *pooled)),
        )  # fmt: skip

    def _on_device(self, found: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(found, dtype=np.int64)).to(self.device)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _assembled(
        self, layer: int, k: Tensor, v: Tensor, layout: _Layout, lives: Sequence[Live]
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a step, packed: the pool's own rows where all requests reuse and lie side by side."""
        found = []
        for new, pool in ((k, self.pool.k[layer]), (v, self.pool.v[layer])):
            if not layout.own_rows.numel():
                found.append(new)
                continue
            pool[layout.own_slots] = new[layout.own_rows]
            if layout.run is not None:
                found.append(pool[slice(*layout.run)])
                continue
            packed = new.new_empty(layout.bounds.keys_listed[-1], *new.shape[1:])
            packed[layout.fresh_keys] = new[layout.fresh_rows]
            packed[layout.pool_keys] = pool[layout.pool_rows]
            found.append(packed)
        return found[0], found[1]

    def _assembled_published(
        self, layer: int, k: Tensor, v: Tensor, layout: _Layout, lives: Sequence[Live]
    ) -> tuple[Tensor, Tensor]:
        """The same with the copies of the published code."""
        found = []
        for new, pool in ((k, self.pool.k[layer]), (v, self.pool.v[layer])):
            parts = []
            for live, own in zip(lives, new.split([live.tokens for live in lives]), strict=True):
                kept = pool[live.base : live.base + live.kept].clone() if live.phase is Phase.REUSE else None
                parts.append(own if kept is None else torch.cat([kept, own]))
            found.append(torch.cat(parts))
        return found[0], found[1]

    def _keeps(self, lives: Sequence[Live]) -> list[_Keep]:
        """What requests that refresh keep: all together, or one after the other as published."""
        ends = [*accumulate((live.tokens for live in lives), initial=0)]
        found = [(live, row) for live, row in zip(lives, ends, strict=False) if live.phase is Phase.REFRESH]
        groups = [[one] for one in found] if self.published else [found] if found else []
        return [self._keep(group) for group in groups]

    def _keep(self, group: Sequence[tuple[Live, int]]) -> _Keep:
        """The same of requests and their first rows in the step."""
        if group[0][0].dual:
            rows = [row + np.arange(live.asked.length) for live, row in group]
            slots = [live.base + np.arange(live.asked.length) for live, _ in group]
            return _Keep(self._on_device(np.concatenate(slots)), self._on_device(np.concatenate(rows)))
        outside = np.full((len(group), max(live.asked.length for live, _ in group) - BLOCK), -1)
        for number, (live, row) in enumerate(group):
            (start, end), length = live.block, live.asked.length
            outside[number, : length - BLOCK] = row + np.r_[0:start, end:length]
        counts = np.array([live.kept for live, _ in group])
        queries = np.stack([row + np.arange(*live.block) for live, row in group])
        slots = np.concatenate([live.base + np.arange(live.kept) for live, _ in group])
        ranks = np.flatnonzero(np.arange(counts.max()) < counts[:, None])
        return _Keep(*map(self._on_device, (slots, outside, queries, ranks)), most=int(counts.max()))
