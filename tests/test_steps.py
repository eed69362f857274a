"""Sizes of steps, what parts of phases declare, and how requests are packed into it: against naive code.

The last tests are a newcomer's: a commit rule and a cache policy of one's own, with inputs of their own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mosaic
from mosaic.errors import DeviceLost, GraphError, UsageError
from mosaic.models import load
from mosaic.models.inputs import Input
from mosaic.models.parts import (
    EACH,
    GUIDED,
    KEPT,
    KV,
    LOGITS,
    NO_HEAD,
    NUCLEUS,
    SAMPLE,
    STATISTICS,
    WHOLE,
    Commit,
    CommitRule,
)
from mosaic.models.parts.cache import Whole
from mosaic.models.parts.part import Part, ResultPer
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.rotary import Rotary
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.planner.check import check_plan
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.host_copy import Arriving, HostCopy, spans
from mosaic.runtime.host_inputs import Numbers
from mosaic.runtime.packing import group_of, pack_step
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.steps import StepRequest

TINY = {
    "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64,
    "mask_token_id": 63, "torch_dtype": "float32",
}  # fmt: skip
LLADA = load(TINY).architecture
TOP = Commit(score="confidence", rule="top")
PHASES = (
    FULL_STEP, Phase(logits=LOGITS), Phase(cache=KEPT), Phase(cache=KEPT, head=NO_HEAD), Phase(commit=TOP),
    Phase(head=SAMPLE, commit=Commit(score="random", rule="edit"), guidance=GUIDED),
    Phase(cache=KEPT, head=NUCLEUS, commit=Commit(score="margin", rule="top", perturb=True)),
    Phase(cache=KEPT, head=EACH, commit=TOP),
    Phase(cache=KEPT, head=SAMPLE, commit=Commit(score="entropy", rule="edit")),
)  # fmt: skip


# --- sizes ------------------------------------------------------------------------------------------------------------


def sizes(seed: int, count: int) -> Iterator[StepSize]:
    source = random.Random(seed)
    for _ in range(count):
        phase = source.choice(PHASES)
        windows = tuple(source.randint(1, 90) for _ in range(source.randint(1, 3)))
        keys = tuple(n + source.randint(0, 40) for n in windows) if phase.cached else ()
        owned = tuple(n + source.randint(0, 40) for n in keys)
        rows = source.randint(1, sum(windows))
        returned = source.choice([0, source.randint(1, sum(windows))]) if phase.head.decides else 0
        states = {KV: sum(owned) + source.randint(0, 99)} if source.random() < 0.7 else {}
        extents = len(owned) + source.choice([0, source.randint(0, 40)]) if owned else 0
        yield StepSize(
            phase=phase, windows=windows, keys=keys, owned=owned, extents=extents, rows=rows, logit_rows=returned,
            states=states,
        )  # fmt: skip


def seen_by(position: int, keys: int, block: int) -> int:
    return min((position // block + 1) * block, keys) if block else keys


def parts_of(windows: Sequence[int], owned: Sequence[int]) -> int:
    """The rows of partial results: at most 512 a window, at most 16 for each of its tokens and one for each 1,024 keys."""
    each = [min(512, n * 16, n * math.ceil(k / 1024)) if k > 1024 else 0 for n, k in zip(windows, owned, strict=True)]
    return max(sum(each), 1) if sum(windows) <= 512 else 1


@pytest.mark.parametrize("block", [0, 1, 8])
def test_dims_are_those_counted_one_query_at_a_time(block: int) -> None:
    arch = replace(LLADA, block=block)
    for size in sizes(block, 60):
        owned, dims = size.owned or size.windows, size.dims(arch)
        pairs = sum(seen_by(k - n + i, k, block) for n, k in zip(size.windows, owned, strict=True) for i in range(n))
        copies = 2 if size.phase.guidance else 1
        assert size.extents >= len(size.owned)
        expected = {"tokens": copies * sum(size.windows), "seqs": copies * len(size.windows)}
        expected["span"] = -(-pairs // sum(size.windows))
        if size.phase.head.name != "none":
            expected["masked"] = size.rows
        if size.logit_rows:
            expected["logit_rows"] = size.logit_rows
        if size.phase.cached:
            expected |= {"keys": sum(owned), "extents": size.extents, "parts": parts_of(size.windows, owned)}
        if size.states:
            expected["kv_rows"] = size.states[KV]
        assert dims == expected
        assert size.kind.logits == (LOGITS if size.phase.logits or size.logit_rows else None)
        assert bool(size.kind.held) == (not size.phase.cached and bool(size.states))


def test_a_rounded_size_holds_what_it_was_rounded_from_and_stays_as_it_is() -> None:
    found = list(sizes(5, 200))
    for size in found:
        most = size.rounded()
        assert most.windows == size.windows and most.rounded() == most and most.key == size.key
        assert all(most.dims()[name] >= value for name, value in size.dims().items())
        for name, value in most.states.items():
            assert value <= max(64, size.states[name] * 9 / 8)
    by_key: dict[Any, list[StepSize]] = {}
    for size in found:
        by_key.setdefault(size.key, []).append(size)
    for group in by_key.values():
        first = group[0].rounded().dims() | {"span": 0}
        assert all(size.rounded().dims() | {"span": 0} == first and size.phase == group[0].phase for size in group)


def test_states_of_few_large_rows_are_planned_for_few() -> None:
    """And for powers of two of them, as requests come and go; those of tokens for 64 at least, and an eighth more at most."""
    few, many = State(name="few", width=9, least_rows=1), State(name="many", width=9)
    for rows, planned in ((1, 1), (2, 2), (3, 4), (9, 16), (33, 36), (67, 72), (100, 104)):
        size = StepSize(windows=(8,), rows=4, states={few: rows, many: rows}).rounded()
        assert size.states == {few: planned, many: max(planned, 64)}, rows


def test_another_context_keeps_the_rows_and_what_others_hold() -> None:
    size = StepSize(phase=Phase(cache=KEPT, commit=TOP), windows=(8, 4), keys=(30, 9), rows=5, states={KV: 139})
    assert size.at(50) == replace(size, windows=(8,), keys=(50,), owned=(), states={KV: 150})
    assert size.at(3) == replace(size, windows=(3,), keys=(3,), owned=(), rows=3, states={KV: 103})
    fill = StepSize(phase=Phase(cache=KEPT, head=NO_HEAD), windows=(8,), keys=(30,), rows=7)
    assert fill.rows == 0 and fill.at(50).windows == (50,) and fill.at(50).states == {KV: 50}
    whole = StepSize(windows=(8, 4), rows=12, logit_rows=9, states={KV: 7})
    assert whole.at(3) == replace(whole, windows=(3,), rows=3, logit_rows=3)
    half = mosaic.Request(seq_lens=(8, 4), mask_ratio=0.5, states={KV: 7})
    assert half.at(9).rows == 5 and half.at(9).states == {KV: 7} and half.size.rows == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"windows": ()}, "at least one window"),
        ({"windows": (3, 0)}, "at least one token"),
        ({"windows": (2**31,)}, "positions are 32-bit"),
        ({"rows": 0}, "between 1 and the 8 tokens, got 0"),
        ({"rows": 9}, "between 1 and the 8 tokens, got 9"),
        ({"logit_rows": 9}, "logit rows must be between 0"),
        ({"phase": FULL_STEP}, "keys are seen in cached phases"),
        ({"keys": ()}, "one number of keys each"),
        ({"keys": (7,)}, "sees at least its own keys, got 7"),
        ({"owned": (19,)}, "has rows for as many tokens, got 19"),
        ({"states": {KV: 19}}, "do not fit 19 rows"),
    ],
)
def test_numbers_that_make_no_step_are_refused(wrong: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StepSize(**{"phase": Phase(cache=KEPT), "windows": (8,), "keys": (20,), "rows": 1, **wrong})


# --- packing ----------------------------------------------------------------------------------------------------------


def requests_of(phase: Phase, source: random.Random, memory: RowTable) -> list[StepRequest]:
    """Random requests of a phase; sequences' rows lie in pieces."""
    found, opened = [], [memory.open() for _ in range(source.randint(1, 3))]
    for length in (20, 40, 60):
        for owned in opened:
            owned.reserve(length)
    for sequence in opened:
        length = source.randint(1, 20)
        start = source.randint(0, 20) if phase.cached else 0
        count = source.randint(1, length) if phase.head.decides else 0
        rows = torch.tensor(sorted(source.sample(range(length), count)), dtype=torch.int64)
        ids = torch.tensor([source.randrange(64) for _ in range(length)])
        found.append(
            StepRequest(
                phase=phase, token_ids=ids, start=start, rows=rows, current=ids[rows], keys=rows * 7 + length,
                sequence=sequence, key_len=start + length + source.randint(0, 20), quota=source.randint(1, 4),
                threshold=source.random(), edit_threshold=source.random(),
                temperature=source.random(), top_p=source.random(), top_k=source.randrange(5),
                score_temperature=source.random(), guidance=source.random(),
                head=source.choice((STATISTICS, SAMPLE, NUCLEUS)), unconditional=63 - ids, logit_rows=rows.flip(0),
            )
        )  # fmt: skip
    return found


def expected_inputs(requests: Sequence[StepRequest], shifted: bool) -> dict[str, list[Any]]:
    """All inputs that there may be, one element at a time."""
    phase, settings = requests[0].phase, ("temperature", "top_p", "top_k", "score_temperature", "guidance")
    tokens = [list(r.token_ids) for r in requests]
    if phase.guidance:
        tokens += [list(r.unconditional) for r in requests]  # type: ignore[arg-type]
    found: dict[str, list[Any]] = {
        "token_ids": [int(t) for part in tokens for t in part],
        "positions": [requests[i % len(requests)].start + j for i, part in enumerate(tokens) for j in range(len(part))],
        "cu_seqlens": [sum(map(len, tokens[:i])) for i in range(len(tokens) + 1)],
        "rows": [], "unconditional_rows": [], "logit_rows": [], "current": [], "keys": [], "extents": [],
        "cu_extents": [0], "seen": [], "cu_rows": [0], "quota": [], "threshold": [], "edit_threshold": [],
        "cuts": [], **{name: [] for name in settings},
    }  # fmt: skip
    total, first = sum(r.token_ids.numel() for r in requests), 0
    for r in requests:
        for row in r.rows.tolist():
            source = max(row - 1, 0) if shifted and phase.commit else row
            found["rows"].append(first + source)
            found["unconditional_rows"].append(total + first + (max(row - 1, 0) if shifted else row))
            found["current"].append(int(r.token_ids[row]))
            found["keys"].append(row * 7 + r.token_ids.numel())
            found["cuts"].append(int(r.head == NUCLEUS))
            for name in settings:
                found[name].append(getattr(r, name))
        found["logit_rows"] += [first + row for row in reversed(r.rows.tolist())]
        first += r.token_ids.numel()
        position = 0
        for row, count in r.sequence.runs():  # type: ignore[union-attr]
            found["extents"].append([row, count, position, 0])
            position += count
        found["cu_extents"].append(len(found["extents"]))
        found["seen"].append(r.key_len)
        found["cu_rows"].append(len(found["current"]))
        for name in ("quota", "threshold", "edit_threshold"):
            found[name].append(getattr(r, name))
    if phase.guidance:
        found["cu_rows"] += found["cu_rows"][-1:] * len(requests)
        for name in ("quota", "threshold", "edit_threshold"):
            found[name] += [0] * len(requests)
    return found


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_random_requests_are_packed_as_one_at_a_time(phase: Phase, shifted: bool) -> None:
    """And into exactly the inputs of the phase's graph, in their dtypes and sizes."""
    arch, source = replace(LLADA, shifted=shifted), random.Random(str(phase))
    graph = replace(load(TINY), architecture=arch).graph(phase=phase)
    declared = {b.name: b for b in graph.buffers if b.kind == "input"}
    for _ in range(8):
        requests = requests_of(phase, source, RowTable("kv", extents=True))
        packed = pack_step(requests, arch, states={KV: 200})
        expected = expected_inputs(requests, shifted)
        assert packed.inputs.keys() == declared.keys()
        dims = packed.size.dims(arch)
        for name, given in packed.inputs.items():
            value = given.tensor() if isinstance(given, Numbers) else given
            assert len(given) == len(value)
            torch.testing.assert_close(value, torch.tensor(expected[name], dtype=value.dtype), msg=name)
            assert str(value.dtype) == f"torch.{declared[name].dtype}"
            rows = declared[name].shape[0]
            assert len(value) == (rows if isinstance(rows, int) else rows.at(dims))
        assert packed.size.windows == tuple(r.token_ids.numel() for r in requests)
        assert packed.size.keys == (tuple(r.key_len for r in requests) if phase.cached else ())
        assert packed.size.owned == (tuple(60 for _ in requests) if phase.cached else ())
        assert packed.size.extents == len(expected["extents"]) * phase.cached


@dataclass(frozen=True, slots=True)
class Softened(Part):
    """A number that a step has once."""

    def inputs(self, arch: Any) -> Sequence[Input]:
        return (Input(name="cap", dtype="float32", per="step"),)


def test_requests_of_one_step_share_what_a_step_has_once_and_nothing_else() -> None:
    memory, source = RowTable("kv", extents=True), random.Random(0)
    for phase in PHASES:
        for request in requests_of(replace(phase, others=(Softened(),)), source, memory):
            request = replace(request, values={**request.values, "cap": 30.0})
            other = replace(request, values={**request.values, "cap": 50.0})
            assert group_of(other, LLADA) != group_of(request, LLADA)
            with pytest.raises(UsageError, match=r"share their cap, got 30\.0 and 50\.0"):
                pack_step([request, other], LLADA)
            more = dict.fromkeys(("temperature", "top_p", "score_temperature", "guidance", "threshold"), 9.0)
            other = replace(request, quota=9, top_k=9, **more)
            assert group_of(other, LLADA) == group_of(request, LLADA)
            packed = pack_step([request, other], LLADA).inputs["cap"]
            assert isinstance(packed, Numbers) and packed.parts == (30.0,)


@dataclass(frozen=True, slots=True)
class Everything(Whole):
    """Every form that a value of a token or of a sequence may have; the windows' own tokens last."""

    def inputs(self, arch: Any) -> Sequence[Input]:
        return (
            Input(name="tensors", dtype="int64", per="token", value=lambda window: window.token_ids * 2),
            Input(name="ranges", dtype="int32", per="token", value=lambda window: range(window.start, window.end)),
            Input(
                name="runs", dtype="int32", per="token",
                value=lambda window: (range(7, 8), range(20, 19 + window.length)),
            ),
            Input(name="numbers", dtype="int16", per="token", value=lambda window: window.number),
            Input(
                name="mixed", dtype="int32", per="token",
                value=lambda window: (range(window.length), 5, (range(3), range(window.length - 3)))[window.number % 3],
            ),
            Input(name="vectors", dtype="float32", per="sequence", width=2, value=lambda window: [window.start, 0.5]),
        )  # fmt: skip


def test_values_of_every_form_are_laid_one_after_another() -> None:
    source = random.Random(3)
    for count in (1, 2, 5):
        lengths = [source.randint(3, 9) for _ in range(count)]
        requests = [
            StepRequest(
                phase=Phase(cache=Everything()), token_ids=torch.arange(n) + 10 * n, start=3 * n,
                rows=torch.tensor([n - 1]), current=torch.tensor([0]),
            )
            for n in lengths
        ]  # fmt: skip
        packed = pack_step(requests, LLADA)
        found = {name: value.tensor() if isinstance(value, Numbers) else value for name, value in packed.inputs.items()}
        assert packed.size.rows == count and not packed.size.states
        mixed = [([*range(n)], [5] * n, [*range(3), *range(n - 3)])[i % 3] for i, n in enumerate(lengths)]
        expected: dict[str, tuple[torch.dtype, list[Any]]] = {
            "tensors": (torch.int64, [2 * (10 * n + i) for n in lengths for i in range(n)]),
            "ranges": (torch.int32, [3 * n + i for n in lengths for i in range(n)]),
            "runs": (torch.int32, [value for n in lengths for value in (7, *range(20, 19 + n))]),
            "numbers": (torch.int16, [i for i, n in enumerate(lengths) for _ in range(n)]),
            "mixed": (torch.int32, [value for part in mixed for value in part]),
            "vectors": (torch.float32, [[3.0 * n, 0.5] for n in lengths]),
            "rows": (torch.int64, [sum(lengths[: i + 1]) - 1 for i in range(count)]),
        }
        for name, (dtype, values) in expected.items():
            assert (found[name].dtype, found[name].tolist()) == (dtype, values), name


def test_frequencies_are_those_of_each_sequences_own_end() -> None:
    rotary = Rotary(theta=100.0, dim=4, kind="dynamic", factor=2.0, original=8)
    requests = [
        StepRequest(phase=FULL_STEP, token_ids=torch.arange(n), rows=torch.tensor([0]), current=torch.tensor([0]))
        for n in (5, 16)
    ]
    (layer, *_), own = LLADA.stack, replace(LLADA.attention, rotary=rotary)
    changed = replace(LLADA, stack=replace(layer, attention=own).times(LLADA.layers))
    found = pack_step(requests, changed).inputs["frequencies"]
    assert isinstance(found, Tensor) and found.dtype == torch.float32
    bases = [100.0, 100.0 * (2.0 * 16 / 8 - 1) ** 2]  # dim / (dim - 2) = 2
    assert found.tolist() == [pytest.approx([1.0, base**-0.5]) for base in bases]


def test_requests_that_are_no_step_are_refused() -> None:
    one = torch.tensor([0])
    request = StepRequest(phase=FULL_STEP, token_ids=torch.arange(4), rows=one, current=one)
    with pytest.raises(UsageError, match="at least one request"):
        pack_step([], LLADA)
    with pytest.raises(UsageError, match=r"at least one token, got windows of \[0\]"):
        pack_step([request, replace(request, token_ids=one[:0])], LLADA)
    for rows in ([-1], [4], [0, 9]):
        with pytest.raises(UsageError, match=r"rows of a window of 4 tokens are in \[0, 4\), got"):
            pack_step([replace(request, rows=torch.tensor(rows))], LLADA)
    two = [
        replace(request, token_ids=torch.arange(n), rows=torch.tensor(rows))
        for n, rows in ((5, [2]), (3, [3]), (4, [7]))
    ]
    with pytest.raises(UsageError, match=r"rows of a window of 3 tokens are in \[0, 3\), got \[3\]"):
        pack_step(two, LLADA)  # the first that has them is named
    with pytest.raises(UsageError, match="decides at least one row"):
        pack_step([replace(request, phase=Phase(commit=TOP), rows=one[:0], current=one[:0])], LLADA)
    assert pack_step([replace(request, rows=one[:0], current=one[:0])], LLADA).size.rows == 1


# --- parts of one's own -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Echo(Part):
    """Give back what a step was told: of each token, and of each sequence."""

    @property
    def results(self) -> Mapping[str, ResultPer]:
        return {"echo": "token", "limit": "sequence"}

    def finish(self, step: Any) -> None:
        g = step.g
        g.add_op("copy", step.inputs["positions"], out=g.output("echo", (g.dim("tokens"),), "int32"), name="echo")
        g.add_op("copy", step.inputs["threshold"], out=g.output("limit", (g.dim("seqs"),), "float32"), name="limits")


def test_results_of_a_part_of_ones_own_go_back_to_their_requests() -> None:
    phase, plain = Phase(commit=TOP, others=(Echo(),)), Phase(commit=TOP)
    assert [*phase.results] == ["echo", "limit", *plain.results] and not FULL_STEP.results
    with mosaic.compile(TINY, debug="poison") as model:
        for lengths in ((7,), (9, 3, 30)):
            requests = [
                StepRequest(
                    phase=phase, token_ids=torch.arange(n), start=2 * n, rows=torch.arange(n - 2),
                    current=torch.full((n - 2,), 63), quota=1, threshold=n / 2,
                )
                for n in lengths
            ]  # fmt: skip
            others = model.step([replace(request, phase=plain) for request in requests])
            for request, result, other in zip(requests, model.step(requests), others, strict=True):
                n = request.token_ids.numel()
                assert result.values["echo"].tolist() == [*range(2 * n, 3 * n)]
                assert result.values["limit"].tolist() == [n / 2] and not other.values
                assert result.committed.dtype == torch.bool and torch.equal(result.chosen, other.chosen)
                assert len(result.token) == n - 2 and int(result.committed.sum()) == 1


@dataclass(frozen=True, slots=True)
class Ranked(CommitRule):
    """Commit the rows that the request ranks highest, whatever the model thinks of them."""

    def inputs(self, arch: Any) -> Sequence[Input]:
        return (*TOP.inputs(arch), Input(name="rank", dtype="float32", per="row"))

    def register(self, end: Any, token: Any, figures: Any) -> None:
        g, inputs, shape = end.g, end.inputs, (end.masked,)
        score = g.output("score", shape, "float32")
        g.add_op("copy", inputs["rank"], out=score, name="ranks")
        g.add_op(
            "transfer", token, score, *(inputs[name] for name in ("current", "cu_rows", "quota", "threshold")), None,
            out=(g.output("chosen", shape, "int64"), g.output("committed", shape, "uint8")), rule="top",
            mask_id=end.arch.mask_token_id,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed(Whole):
    """Whole sequences whose tokens are where the request says, `stretch` times as far apart in some."""

    stretch: int = 1

    def inputs(self, arch: Any) -> Sequence[Input]:
        places = Input(name="places", dtype="int32", per="token", value=lambda w: w.request.values["at"] * self.stretch)
        return (*Whole.inputs(self, arch), places)

    def declare(self, step: Any) -> None:
        Whole.declare(self, step)
        usual, step.positions = step.positions, step.inputs["places"]
        step.g.add_op("copy", usual, out=step.g.output("usual_positions", usual.shape, usual.dtype))


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(TINY, debug="poison") as compiled:
        yield compiled


def asked(phase: Phase, ids: Tensor, rows: Tensor, **values: Any) -> StepRequest:
    return StepRequest(phase=phase, token_ids=ids, rows=rows, current=ids[rows], quota=1, values=values)


def test_a_commit_rule_of_ones_own_gets_its_input_through_the_packer(model: CompiledModel) -> None:
    ids = [torch.tensor([1, 63, 63, 63]), torch.tensor([63, 5, 63])]
    rows = [torch.tensor([1, 2, 3]), torch.tensor([0, 2])]
    ranks = [torch.tensor([0.1, 7.0, 0.2]), torch.tensor([3.0, -1.0])]
    phase = Phase(commit=Ranked())
    found = model.step([asked(phase, *own, rank=rank) for *own, rank in zip(ids, rows, ranks, strict=True)])
    usual = model.step([asked(Phase(commit=TOP), *own) for own in zip(ids, rows, strict=True)])
    assert check_plan(found[0].plan.document) == []
    for result, rank, other in zip(found, ranks, usual, strict=True):
        assert torch.equal(result.score, rank) and torch.equal(result.token, other.token)
        assert result.committed.tolist() == [value == rank.max() for value in rank]


def test_tokens_that_the_host_has_are_read_in_every_step(model: CompiledModel) -> None:
    """Requests that are asked for again, themselves, may have other tokens by then."""
    windows = [torch.tensor([1, 63, 63]), torch.tensor([63, 5])]
    requests = [asked(Phase(commit=TOP), ids, torch.tensor([1])) for ids in windows]
    before = model.step(requests)
    for ids in windows:
        ids[0] = 7
    again, fresh = model.step(requests), model.step([replace(request) for request in requests])
    for first, second, other in zip(before, again, fresh, strict=True):
        assert torch.equal(second.score, other.score) and not torch.equal(second.score, first.score)


def test_a_cache_policy_of_ones_own_gets_its_input_through_the_packer(model: CompiledModel) -> None:
    ids, rows = torch.tensor([1, 2, 3, 63, 5, 63]), torch.tensor([3, 5])
    near, far = (Phase(cache=Placed(stretch), commit=TOP) for stretch in (1, 40))
    (usual,) = model.step([asked(Phase(commit=TOP), ids, rows)])
    (same,) = model.step([asked(near, ids, rows, at=torch.arange(6, dtype=torch.int32))])
    (moved,) = model.step([asked(near, ids, rows, at=torch.arange(0, 240, 40, dtype=torch.int32))])
    (stretched,) = model.step([asked(far, ids, rows, at=torch.arange(6, dtype=torch.int32))])
    assert torch.equal(same.score, usual.score) and not torch.equal(moved.score, usual.score)
    assert torch.equal(moved.score, stretched.score)


def test_what_a_part_declares_and_what_it_uses_are_the_same(model: CompiledModel) -> None:
    ids, rows = torch.tensor([1, 63]), torch.tensor([1])

    @dataclass(frozen=True, slots=True)
    class Unused(Whole):
        def inputs(self, arch: Any) -> Sequence[Input]:
            return (Input(name="spare", dtype="int32", per="token", value="rows"),)

    @dataclass(frozen=True, slots=True)
    class Undeclared(Whole):
        def declare(self, step: Any) -> None:
            step.positions = step.inputs["nowhere"]

    @dataclass(frozen=True, slots=True)
    class Strange(Whole):
        def declare(self, step: Any) -> None:
            step.positions = step.g.input("nowhere", step.positions.shape, "int32")

    for policy, message in (
        (Unused(), "inputs that no op reads: spare"),
        (Undeclared(), "declares the input 'nowhere'; there are token_ids, positions"),
        (Strange(), "declares the inputs nowhere, so nothing fills them"),
    ):
        with pytest.raises(GraphError, match=message):
            load(TINY).graph(phase=Phase(cache=policy))
    with pytest.raises(UsageError, match=r"needs 'rank' of every request, a value per row.*values=\{\"rank\""):
        model.step([asked(Phase(commit=Ranked()), ids, rows)])


def test_parts_are_told_apart_by_what_they_are_not_by_their_names(model: CompiledModel) -> None:
    """A class that is written again, as in a notebook, has a graph of its own."""

    def placed(shift: int) -> Phase:
        @dataclass(frozen=True, slots=True)
        class Shifted(Whole):
            def inputs(self, arch: Any) -> Sequence[Input]:
                return (Input(name=f"by{shift}", dtype="int32", per="token", value="at"),)

            def declare(self, step: Any) -> None:
                used, step.positions = step.positions, step.inputs[f"by{shift}"]
                step.g.add_op("copy", used, out=step.g.output("usual", used.shape, used.dtype))

        return Phase(cache=Shifted(), commit=TOP)

    ids, rows = torch.tensor([1, 2, 63]), torch.tensor([2])
    for shift in (1, 2):
        phase = placed(shift)
        (result,) = model.step([asked(phase, ids, rows, at=torch.arange(3, dtype=torch.int32))])
        names = {b["name"] for b in result.plan.document["buffers"] if b["kind"] == "input"}
        assert f"by{shift}" in names and f"by{3 - shift}" not in names
    assert str(placed(1)) == str(placed(2)) and placed(1).cache != WHOLE


# --- results on their way to the host ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("CUDA error: an illegal memory access was encountered", DeviceLost), ("out of luck", RuntimeError)],
)
def test_whoever_waits_for_results_is_told_that_the_device_is_lost(text: str, expected: type[Exception]) -> None:
    """Launches are asynchronous: most often the wait is the first to know."""

    class Event:
        def synchronize(self) -> None:
            raise RuntimeError(text)

    with pytest.raises(expected, match=text) as caught:
        Arriving([], Event()).wait()  # type: ignore[arg-type]
    assert type(caught.value) is expected


def test_results_come_to_the_host_whole_whatever_lies_between_them() -> None:
    """Tensors of all dtypes at random places of two storages, empty ones too; near ones come in one piece."""
    source, copies = random.Random(4), HostCopy()
    storages = [torch.randint(0, 255, (1 << 16,), dtype=torch.uint8) for _ in range(2)]
    dtypes = (torch.int64, torch.float32, torch.uint8, torch.int16)
    pieces = set()
    for _ in range(200):
        tensors = []
        for _ in range(source.randint(1, 5)):
            dtype, count = source.choice(dtypes), source.choice([0, 1, 3, 17, 600])
            start = source.randrange(0, 48_000) // 8 * 8 + 8 // dtype.itemsize * dtype.itemsize % 8
            tensors.append(source.choice(storages)[start : start + count * dtype.itemsize].view(dtype))
        before = [tensor.clone() for tensor in tensors]
        found = copies.start(tensors).wait()
        for one, other in zip(found, before, strict=True):
            assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            assert not one.numel() or all(one.data_ptr() != tensor.data_ptr() for tensor in tensors)
        pieces.add((len([t for t in tensors if t.numel()]), len(spans(tensors))))
    assert {(n, 1) for n in range(2, 4)} <= pieces and (3, 3) in pieces
    side = storages[0][:4000].view(torch.int64).split([128, 64, 300, 8])
    assert len(spans([side[2], side[0], side[3], side[1]])) == 1 and len(spans([side[0], storages[0][9000:]])) == 2
