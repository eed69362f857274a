"""Token eviction as a part of a phase: requests decode block by block, each step against plain code of the paper's equations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from dropping import TOP, UNCUT, DroppingNetwork
from reference_runner import PlainSequence, rule
from test_cut import ARCH, CONFIG, LAYERS, TENSORS, filled
from test_decoding import MASK
from test_evict_tokens import stated
from test_kernels import Case
from torch import Tensor

from mosaic.errors import MosaicError, UnknownName, UsageError
from mosaic.models import load
from mosaic.models.parts import APART, KEPT
from mosaic.models.parts.windows import WINDOWS
from mosaic.models.phase import Phase
from mosaic.models.policies.focus import HISTORY, BlockProgress, Focus
from mosaic.models.policies.focus_options import PRESETS, Eviction
from mosaic.models.policies.registry import token_eviction
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.state_rows import OwnedRows
from mosaic.runtime.steps import StepRequest, StepResult

BLOCK = ARCH.block
READINGS = {
    **PRESETS,
    "ema": Eviction(history="ema", placeholders="masked", alpha=1.2),
    "mixed": Eviction(history="block", threshold="mean", pool=5, first_step="whole", alpha=1.0),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[CompiledRunner]:
    found = CompiledRunner(CONFIG, TENSORS, debug="poison")
    yield found
    found.close()


@pytest.fixture
def model(runner: CompiledRunner) -> Iterator[CompiledModel]:
    yield runner.model
    assert not runner.model.state_rows


def phase_of(eviction: Eviction) -> Phase:
    return Phase(cache=KEPT, commit=TOP, cut=Focus(eviction=eviction))


DELAYS: dict[str, Callable[[bool, bool], bool]] = {
    "none": lambda decided, neighbour: False,
    "delayed": lambda decided, neighbour: decided,
    "neighbour": lambda decided, neighbour: decided and neighbour,
}
"""Whether a token is computed no more, once a step has computed it: it was decided before that step, and so was its right neighbour
(section 4.3)."""


@dataclass
class FocusNetwork(DroppingNetwork):
    """The same transformer, of which a step keeps what the paper's equations say."""

    eviction: Eviction = field(default_factory=Eviction)
    block: BlockProgress | None = None
    importance: list[Tensor] = field(default_factory=list)
    history: Tensor = field(default_factory=lambda: torch.zeros(1, 2))
    seen: int = 0

    def _of_block(self) -> tuple[BlockProgress, list[int]]:
        assert self.block is not None
        whole = self.eviction.importance == "block"
        return self.block, list(range(BLOCK)) if whole else list(self.block.masked)

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor) -> None:
        """Equation 15, in float64."""
        block, listed = self._of_block()
        places = torch.tensor(listed, dtype=torch.int64) + block.start
        queries = q.double()[torch.isin(positions, places)]
        k = (
            keys.double()[places]
            .view(len(listed), -1, q.shape[2])
            .repeat_interleave(self.arch.attention.heads // self.arch.attention.kv_heads, 1)
        )
        scores = torch.einsum("anh,bnh->nab", queries, k) * q.shape[2] ** -0.5
        pooled = torch.max_pool1d(scores, self.eviction.pool, 1, self.eviction.pool // 2)
        found = torch.zeros(BLOCK, dtype=torch.float64)
        found[listed] = pooled.softmax(2).sum((0, 1))
        self.importance = [*self.importance[: layer and 1], found]

    def choose(self, positions: Tensor) -> list[int]:
        """The statement of `evict_tokens`, for one request."""
        block, listed = self._of_block()
        chosen, places = self.eviction, positions.tolist()
        evicts = block.step > 0 or chosen.first_step != "whole"
        status = [0] * len(places)
        for offset in block.masked if evicts else ():
            status[places.index(block.start + offset)] = 1 if offset < block.processed else 2
        new = block.decoded is None or (chosen.history == "block" and block.step == 0)
        one: dict[str, Any] = {
            "first": [block.start], "progress": [block.processed * (chosen.reach == "block")], "status": status,
            "cu_seqlens": [0, len(places)], "owner": [0],
            "positions": places, "decoded": [-1 if new else block.decoded],
            "listed": [listed + [-1] * (BLOCK - len(listed))],
        }  # fmt: skip
        operands = {name: torch.tensor(values) for name, values in one.items()} | {"state": self.history}
        operands |= {name: of[None, None] for name, of in zip(("before", "after"), self.importance, strict=True)}
        named = ("alpha", "history", "threshold", "placeholders", "weight", "keep", "rank")
        attrs = {name: getattr(chosen, name) for name in named}
        found = stated(Case("evict_tokens", operands, attrs=attrs))
        self.history, self.seen = found["state"], found["seen"][0]
        return list(found["rows"][: found["total"][0]])

    def sees(self, key_len: int) -> int:
        """Equation 16, or what this step keeps."""
        return self.seen


@dataclass
class Live:
    """A request that decodes blocks after its prompt, on the model and in plain code."""

    model: CompiledModel
    network: FocusNetwork
    tokens: Tensor
    masked: list[bool]
    owned: OwnedRows
    history: OwnedRows
    plain: PlainSequence
    block: BlockProgress
    unwritten: int = 0
    delay: str = "none"
    frozen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, model: CompiledModel, eviction: Eviction, rng: random.Random, delay: str = "none") -> Live:
        prompt, blocks = rng.choice([BLOCK, 2 * BLOCK + 3]), rng.randint(2, 3)
        prefix = prompt // BLOCK * BLOCK
        tokens = torch.full((prefix + blocks * BLOCK,), MASK)
        tokens[:prompt] = torch.tensor([rng.randrange(8, MASK) for _ in range(prompt)])
        network = FocusNetwork(ARCH, TENSORS, layer=LAYERS)
        plain = PlainSequence(network)
        plain.reserve(len(tokens))
        quiet = DroppingNetwork(ARCH, TENSORS, layer=LAYERS)
        quiet.hidden(tokens[:prefix], 0, plain.kv, prefix)
        network.layer, network.eviction = 1, eviction
        owned, history = filled(model, tokens[:prefix]), model.open_rows(HISTORY)
        owned.reserve(len(tokens))
        history.reserve(1)
        masked = [position >= prompt for position in range(len(tokens))]
        live = cls(
            model, network, tokens, masked, owned, history, plain,
            BlockProgress(start=prefix, masked=(), processed=0, step=0, decoded=None), delay=delay,
        )  # fmt: skip
        live.block = replace(live.block, masked=live.open())
        return live

    def open(self) -> tuple[int, ...]:
        return tuple(offset for offset in range(BLOCK) if self.masked[self.block.start + offset])

    @property
    def finished(self) -> bool:
        return not any(self.masked)

    def ask(self, rng: random.Random, phase: Phase) -> StepRequest:
        start, end = self.block.start - self.unwritten, self.block.start + BLOCK
        places = [place for place in range(start, end) if place not in self.frozen]
        rows = torch.tensor([places.index(self.block.start + offset) for offset in self.block.masked])
        values = {"block": self.block} | (
            {} if self.delay == "none" else {"positions": torch.tensor(places, dtype=torch.int32)}
        )
        return StepRequest(
            phase=phase, token_ids=self.tokens[places], start=places[0], sequence=self.owned, key_len=end, rows=rows,
            current=torch.full((len(rows),), MASK), quota=rng.randint(1, 2), states={HISTORY: self.history}, values=values,
        )  # fmt: skip

    def take(self, request: StepRequest, result: StepResult) -> int:
        """Compare with plain code, and go on; gives how many rows were kept."""
        self.network.block = self.block
        first, count = request.start, len(request.token_ids)
        places = request.values.get("positions", torch.arange(first, first + count))
        hidden = self.network.hidden(request.token_ids, first, self.plain.kv, request.key_len, places)
        kept, rows = self.network.kept, request.rows.tolist()
        mine = torch.tensor([row in kept for row in rows])
        assert torch.equal(result.values["kept"], mine)
        logits = self.network.unembed(hidden[request.rows])
        token, score = logits.argmax(1), logits.softmax(-1).max(-1).values
        assert torch.equal(result.token[mine], token[mine])
        torch.testing.assert_close(result.score[mine], score[mine], rtol=1e-4, atol=1e-6)
        few = replace(request, phase=UNCUT, rows=request.rows[mine], current=request.current[mine])
        committed = torch.zeros(len(rows), dtype=torch.bool)
        committed[mine] = rule(few, token[mine], score[mine], MASK)
        assert torch.equal(result.committed, committed) and committed.any()
        reached = int(places[max(kept)]) + 1 - self.block.start
        before = self.block.processed if self.network.eviction.reach == "block" else 0
        assert self.network.seen == self.block.start + max(before, reached)
        done = {place for place in places.tolist() if place >= self.block.start}
        self._go_on(places[request.rows[result.committed].long()].tolist(), result, reached, done)
        return len(kept)

    def _go_on(self, taken: list[int], result: StepResult, reached: int, computed: set[int]) -> None:
        end = self.block.start + BLOCK
        self.frozen |= {
            place
            for place in computed
            if DELAYS[self.delay](not self.masked[place], place + 1 == end or not self.masked[place + 1])
        }
        self.tokens[taken] = result.chosen[result.committed]
        for position in taken:
            assert self.masked[position]
            self.masked[position] = False
        self.unwritten = 0
        self.block = replace(
            self.block, processed=max(self.block.processed, reached), step=self.block.step + 1, decoded=len(taken)
        )
        if not self.open():
            self.unwritten, self.frozen = BLOCK, set()
            self.block = replace(self.block, start=end, processed=0, step=0)
        if not self.finished:
            self.block = replace(self.block, masked=self.open())

    def close(self) -> None:
        self.owned.close()
        self.history.close()


@pytest.mark.some
@pytest.mark.parametrize(
    ("name", "delay"),
    [
        *(pytest.param(name, "none", marks=pytest.mark.soak if name in PRESETS else ()) for name in READINGS),
        *((name, "neighbour") for name in PRESETS),
        ("ema", "delayed"),
    ],
)
def test_steps_keep_and_decide_what_the_equations_say(model: CompiledModel, name: str, delay: str) -> None:
    """Under poison; requests at different progress share steps, packed at random, until all are done; with all tokens of a block
    computed in each step, and with the settled ones left out."""
    eviction = READINGS[name]
    rng = random.Random(name)
    phase, kept, asked_for = phase_of(eviction), 0, 0
    if delay != "none":
        phase = replace(phase, tokens=APART)
    live = [Live.of(model, eviction, rng, delay) for _ in range(3)]
    while active := [one for one in live if not one.finished]:
        now = rng.sample(active, rng.randint(1, len(active)))
        asked = [one.ask(rng, phase) for one in now]
        for one, request, result in zip(now, asked, model.step(asked), strict=True):
            kept += one.take(request, result)
            asked_for += len(request.token_ids)
    assert kept < 0.95 * asked_for
    for one in live:
        one.close()


@pytest.mark.parametrize("delay", ["none", pytest.param("delayed", marks=pytest.mark.soak), "neighbour"])
def test_with_a_large_alpha_nothing_is_evicted(model: CompiledModel, delay: str) -> None:
    """Tokens, scores and decisions are those of the step that is not cut and leaves out the same tokens, to the bit."""
    rng = random.Random(5)
    tokens = WINDOWS if delay == "none" else APART
    phase, whole = (replace(one, tokens=tokens) for one in (phase_of(Eviction(alpha=1e6)), UNCUT))
    live, fewest = [Live.of(model, Eviction(alpha=1e6), rng, delay) for _ in range(2)], BLOCK
    while active := [one for one in live if not one.finished]:
        asked = [one.ask(rng, phase) for one in active]
        uncut = model.step([replace(request, phase=whole, states={}) for request in asked])
        for one, request, other, mine in zip(active, asked, uncut, model.step(asked), strict=True):
            assert bool(mine.values["kept"].all())
            for what in ("token", "score", "committed", "chosen"):
                assert torch.equal(getattr(mine, what), getattr(other, what))
            one.take(request, mine)
            fewest = min(fewest, len(request.token_ids))
    assert (fewest < BLOCK) == (delay != "none")
    for one in live:
        one.close()


@pytest.mark.parametrize(("positions", "message"), [
    (None, "needs 'positions': one for each of the 3 tokens"), ([8, 9], "needs 'positions'"),
    ([7, 9, 10], "from the window's start 8"),
    ([8, 10, 10], r"positions ascend .* got \[8, 10, 10\]"), ([8, 9, 16], "at position 16 sees that many keys and its own, got 16"),
])  # fmt: skip
def test_positions_that_cannot_be_are_refused(model: CompiledModel, positions: list[int] | None, message: str) -> None:
    tokens = torch.full((16,), MASK)
    owned = filled(model, tokens)
    request = StepRequest(
        phase=replace(UNCUT, tokens=APART), token_ids=tokens[:3], start=8, sequence=owned, key_len=16, rows=torch.tensor([0]),
        current=tokens[:1], quota=1, values={} if positions is None else {"positions": torch.tensor(positions)},
    )  # fmt: skip
    with pytest.raises(UsageError, match=message):
        model.step([request])
    owned.close()


AT_8 = BlockProgress(start=8, masked=(0,), processed=0, step=0, decoded=None)


@pytest.mark.parametrize(("values", "window", "message"), [
    ({}, (0, 8), "needs its progress"), ({"block": 3}, (0, 8), "needs its progress"),
    ({"block": AT_8}, (0, 8), r"which is \[8, 16\), and has its masked positions \[8\]; got \[0, 1"),
    ({"block": replace(AT_8, start=0)}, (0, 16), "got .* 15]"), ({"block": replace(AT_8, masked=(0, 1, 7))}, (8, 15), "got .* 14]"),
    ({"block": AT_8}, (8, 16), r"masks \[8\] stand before decided tokens.*first_step='whole'"),
    ({"block": replace(AT_8, ranks=(0.5,) * 8)}, (8, 16), r"rank='random' takes a number .* 8 positions, others none; got 8"),
])  # fmt: skip
def test_a_request_that_does_not_say_how_far_it_is_is_refused(
    model: CompiledModel, values: dict[str, Any], window: tuple[int, int], message: str
) -> None:
    tokens = torch.full((16,), MASK)
    owned, history, (start, end) = filled(model, tokens), model.open_rows(HISTORY), window
    history.reserve(1)
    request = StepRequest(
        phase=phase_of(Eviction()), token_ids=tokens[start:end], start=start, sequence=owned, key_len=16,
        rows=torch.tensor([0]), current=tokens[:1], quota=1, states={HISTORY: history}, values=values,
    )  # fmt: skip
    with pytest.raises(UsageError, match=message):
        model.step([request])
    owned.close()
    history.close()


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"alpha": 0.9}, UsageError, "alpha is 0.9; it must be a number of at least 1"),
    ({"alpha": True}, UsageError, "alpha is True"), ({"alpha": float("nan")}, UsageError, "alpha is nan"),
    ({"alpha": float("inf")}, UsageError, "alpha is inf"), ({"alpha": "2"}, UsageError, "alpha is '2'"),
    ({"weight": 0}, UsageError, "weight is 0; it must be a share above 0"), ({"weight": 1.5}, UsageError, "weight is 1.5"),
    ({"pool": 2}, UsageError, "pool is 2; it must be an odd number"), ({"pool": -1}, UsageError, "pool is -1"),
    ({"pool": 3.0}, UsageError, "pool is 3.0"), ({"pool": True}, UsageError, "pool is True"),
    ({"history": "blok"}, UnknownName, "eviction's history 'blok'.*block"),
    ({"threshold": "sum"}, UnknownName, "eviction's threshold"), ({"importance": "all"}, UnknownName, "eviction's importance"),
    ({"placeholders": "all"}, UnknownName, "eviction's placeholders"),
    ({"first_step": "warm"}, UnknownName, "eviction's first_step"), ({"reach": "ever"}, UnknownName, "eviction's reach"),
    ({"rank": "botom"}, UnknownName, "rank 'botom'.*bottom"),
    ({"keep": -1}, UsageError, "keep is -1; it must be a number of tokens, or 0"), ({"keep": True}, UsageError, "keep is True"),
    ({"keep": 2.0}, UsageError, "keep is 2.0"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options: dict[str, Any], error: type[MosaicError], message: str) -> None:
    with pytest.raises(error, match=message):
        Eviction(**options)


def test_presets_by_name() -> None:
    assert token_eviction("focus") == Eviction() and token_eviction(Eviction(alpha=2)) == Eviction(alpha=2)
    assert [str(PRESETS[name]) for name in PRESETS] == [*PRESETS]
    assert str(Eviction(pool=1)) == "eviction(pool=1)" and Eviction(pool=1).changed == {"pool": 1}
    with pytest.raises(UnknownName, match="focus-public"):
        token_eviction("focus-publik")
    with pytest.raises(UsageError, match="eviction is 3; it must be Eviction"):
        token_eviction(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changed", "message"), [
    ({"num_hidden_layers": 2}, "the model's 2 leave none to save"), ({"block_size": 0}, None),
])  # fmt: skip
def test_models_whose_tokens_cannot_be_evicted_are_refused(changed: dict[str, Any], message: str | None) -> None:
    Eviction().check(load({**CONFIG, "num_hidden_layers": 3}).architecture)
    arch = load("llada-8b").architecture if message is None else load({**CONFIG, **changed}).architecture
    with pytest.raises(UsageError, match=message or "attends in both directions"):
        Eviction().check(arch)


@pytest.mark.parametrize("tokens", [1, 31, 64, 65, 100, 1000, 5120, 16384])
def test_second_graphs_have_sizes_close_to_what_is_kept(tokens: int) -> None:
    """A step's time goes by its rows: from an eighth of the tokens on, a size has at most a quarter more than the one before, of
    many rows an eighth; so few rows as take the time of one have one size."""
    sizes = [*Focus(eviction=Eviction()).buckets(tokens)]
    assert sizes[-1] == tokens and sizes == sorted({*sizes}) and len(sizes) <= 26
    assert sizes[0] == min(tokens, max(64, -(-tokens // 128) * 16))
    for smaller, larger in pairwise(sizes):
        assert larger <= smaller * (1.13 if smaller > 512 else 1.25)
