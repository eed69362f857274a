"""Traces of block diffusion: how many tokens of a block each step finds masked, keeps and decides; and sessions that go by them.

What random weights decide and drop says nothing about a trained model. A replayed session runs the real loop and the real kernels,
with two things forced: which of the kept rows are decided, and how many rows an eviction is told to keep. Both go through public
options: an eviction whose budget is what the request says that its last step has decided (`EVICTION`), and outcomes that a wrapped
algorithm gives on. Rows whose importance stands out are kept beside the budget. With `flat_importance` few do.
"""

from __future__ import annotations

import json
import math
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, cycle, groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import torch

import mosaic
from benchmarks.cases import options, tag_of
from benchmarks.quality.decodability import DecodabilitySettings
from benchmarks.quality.estimation import items_of
from benchmarks.quality.evaluation import gen_length
from benchmarks.quality.items import LONG_TASKS
from benchmarks.quality.replay import Records, recording
from benchmarks.quality.vocabulary import vocabulary
from benchmarks.record import environment, write
from benchmarks.sparse import NoPrefill
from mosaic.decoding import ALGORITHMS, Algorithm, Canvas, GenerationConfig, resolve
from mosaic.decoding.algorithms import algorithm_of
from mosaic.decoding.llada import schedule
from mosaic.models.parts.cut import KEPT
from mosaic.models.policies.focus import BlockProgress
from mosaic.models.policies.focus_options import Eviction
from mosaic.runtime.steps import StepResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.decoding.canvas import Steps
    from mosaic.models.architecture import Architecture
    from mosaic.models.phase import Phase
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.runtime.steps import StepRequest, StepRunner

__all__ = [
    "EVICTION",
    "PAPER",
    "Attending",
    "Counted",
    "Replay",
    "Sizes",
    "Trace",
    "TraceStep",
    "flat_importance",
    "load_trace",
    "main",
    "paper_trace",
    "recorded_trace",
]

EVICTION: Final = Eviction(alpha=1.0, history="ema", weight=1.0)
"""Keeps as many masked tokens as the request states for its previous step, and tokens whose importance stands out."""
PAPER: Final[Mapping[str, tuple[float, float]]] = {"sdar": (15.02, 3.12), "llada2": (19.73, 4.19)}
"""By family, tokens computed for each that is decided in blocks of 32, without eviction and with it: FOCUS, table 5, ShareGPT."""
_AS: Final[Mapping[str, str]] = {"fast-dllm-v2": "sdar"}
"""Families that the paper has no figures of, and whose stand for theirs."""
_PAPER_BLOCK: Final = 32
_GAIN: Final = 8.0
_BEHIND: Final = 4.0
"""Rows, kept too many or too few, that later steps make up for."""
_LAST: Final = 16
_PRIME: Final = 7919
Places: TypeAlias = "NDArray[np.int32] | None"
"""Positions of a request's tokens, where they stand apart."""


class TraceStep(NamedTuple):
    """One step of one request: masked tokens of its block, tokens of the block that are kept, tokens that are decided."""

    masked: int
    kept: int
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The steps of some blocks, one after another; after the last block comes the first again.

    Parameters
    ----------
    name
        Where it comes from.
    block
        Tokens of a block.
    blocks
        The steps of each, which decide all of its tokens.
    """

    name: str
    block: int
    blocks: tuple[tuple[TraceStep, ...], ...]

    @property
    def steps(self) -> float:
        """Steps of a block, on average."""
        return sum(map(len, self.blocks)) / len(self.blocks)

    @property
    def mean(self) -> tuple[float, float, float]:
        """Tokens that a step finds masked, keeps and decides, on average."""
        masked, kept, committed = (sum(counts) for counts in zip(*chain.from_iterable(self.blocks), strict=True))
        steps = sum(map(len, self.blocks))
        return masked / steps, kept / steps, committed / steps

    def most_blocks(self, steps: int) -> int:
        """Return the most blocks that a request of the trace is in during a number of steps."""
        lengths = [*map(len, self.blocks)]
        ends = [*accumulate(islice(cycle(lengths), len(lengths) + steps), initial=0)]
        return max(bisect_left(ends, ends[first] + steps) - first + 1 for first in range(len(lengths)))

    def at(self, number: int, requests: int) -> tuple[int, int]:
        """Return the block that a request begins with, and its first step there: all together are spread over all steps, and so
        decide as many tokens in each step as the trace does on average."""
        step = number * sum(map(len, self.blocks)) // requests
        for block, steps in enumerate(self.blocks):
            if step < len(steps):
                return block, step
            step -= len(steps)
        raise AssertionError


def paper_trace(family: str, block: int, blocks: int = 8) -> Trace:
    """Make a trace whose averages are those of the paper's table 5: the same tokens decided and kept a step, whatever the block.

    A family that the paper has no figures of goes by those of another one, which the trace's name says.

    >>> trace = paper_trace("sdar", 32)
    >>> trace.steps, [round(count, 1) for count in trace.mean], trace.blocks[0][:2]
    (15.0, [16.9, 6.6, 2.1], (TraceStep(masked=32, kept=6, committed=3), TraceStep(masked=29, kept=7, committed=3)))
    """
    of = _AS.get(family, family)
    without, evicted = PAPER[of]
    steps_of_block, decided = without * block / _PAPER_BLOCK, _PAPER_BLOCK / without
    ends = [math.floor(number * steps_of_block) for number in range(blocks + 1)]
    keeps = [math.floor(step * evicted * decided) for step in range(ends[-1] + 1)]
    found = []
    for first, end in pairwise(ends):
        quotas = schedule(block, end - first)
        masked = [block - before for before in accumulate([0, *quotas[:-1]])]
        kept = [after - before for before, after in pairwise(keeps[first : end + 1])]
        found.append(tuple(map(TraceStep, masked, kept, quotas)))
    return Trace(name="paper" if of == family else f"paper, of {of}", block=block, blocks=tuple(found))


def recorded_trace(model: CompiledModel, name: str, tasks: Sequence[str], items: int) -> Trace:
    """Decode answers of a trained model with `focus` and the block cache, and write down their whole blocks."""
    arch, found = model.architecture, []
    for item in items_of(DecodabilitySettings(tasks=tuple(tasks), items=items)):
        records: Records = {}
        config = GenerationConfig(
            gen_length=gen_length(item.task), eviction="focus", block_cache="dc+", block_commit="cached"
        )
        model.generate(
            [torch.tensor(vocabulary().encode(item.prompt))], recording(config, arch, records)
        )  # fmt: skip
        for _, group in groupby(records[0], lambda step: step.block):
            steps = [TraceStep(len(step.positions), step.computed, int(step.committed.sum())) for step in group]
            if steps[0].masked == arch.block and steps[-1].masked == steps[-1].committed:
                found.append(tuple(steps))
    return Trace(name=name, block=arch.block, blocks=tuple(found))


def load_trace(path: Path) -> Trace:
    """Read a trace: `name`, `block` and `blocks`, of each step the numbers of a `TraceStep`."""
    found = json.loads(path.read_text())
    blocks = tuple(tuple(TraceStep(*step) for step in steps) for steps in found["blocks"])
    return Trace(name=found["name"], block=found["block"], blocks=blocks)


def flat_importance(model: CompiledModel) -> None:
    """Write weights of the first layers' queries, so that the importance of few masked tokens stands out.

    Layer 0 attends to all alike, layer 1 to few positions: rarely to masked ones, whose keys are alike. So deltas of masked
    tokens are small beside the deviation over the block, and the budget says how many are kept. Scores of layer 1 have a
    deviation of `_GAIN`: by the weight of its heads' norm, or by that of the projection where heads are not normed.
    """
    arch, weights = model.architecture, model.weights()
    names = arch.names
    if arch.attention.head_norms:
        weights[names.query_norm.format(layer=0)].zero_()
        weights[names.query_norm.format(layer=1)].fill_(_GAIN)
        return
    for layer in (0, 1):
        query, key = (weights[name.format(layer=layer)] for name in (names.query, names.key))
        query.mul_(layer * _GAIN / (arch.hidden * query.std() * key.std()))
        weights[names.query.format(layer=layer).replace(".weight", ".bias")].zero_()


@dataclass(slots=True)
class Replay:
    """Lets requests go by a trace.

    Parameters
    ----------
    trace
        The trace.
    requests
        How many there are.
    all_kept
        Whether an eviction keeps everything.

    Attributes
    ----------
    seconds
        What the replay itself has taken of the host's time.
    kept
        Tokens that steps have computed to the last layer, of all requests together. Of a shifted model's, the expected number.
    unembedded
        The unembedded ones among them.
    """

    trace: Trace
    requests: int
    all_kept: bool = False
    seconds: float = 0.0
    kept: float = 0
    unembedded: int = 0

    def options(self, config: GenerationConfig, architecture: Architecture) -> GenerationConfig:
        """Return options that decode as `config` does, by the trace. A request begins where its number says (`Trace.at`)."""
        own = resolve(config, architecture)
        inner = algorithm_of(own)

        def decode(canvas: Canvas) -> Steps:
            steps, script = inner.decode(canvas), _Script(self.trace, *self.trace.at(canvas.request, self.requests))
            asked = next(steps, None)
            while asked is not None:
                began = time.perf_counter()
                places = asked.values.get("positions")
                stand = None if places is None else places.numpy()
                self._tell(asked, stand, script)
                self.seconds += time.perf_counter() - began
                result = yield asked
                began = time.perf_counter()
                if asked.rows.numel():
                    result = self._outcome(canvas, asked, stand, result, script)
                self.seconds += time.perf_counter() - began
                try:
                    asked = steps.send(result)
                except StopIteration:
                    return

        traits = ALGORITHMS[str(inner)]
        return replace(
            own, algorithm=Algorithm(name=f"{inner}, replayed", decode=decode, shapes=inner.shapes, traits=traits)
        )

    def place(self, number: int) -> int:
        """Return how many tokens of its first block a request knows when it begins."""
        block, step = self.trace.at(number, self.requests)
        return self.trace.block - self.trace.blocks[block][step].masked

    def _tell(self, asked: StepRequest, places: Places, script: _Script) -> None:
        """Give the step a budget that keeps as many rows as the trace states."""
        told = asked.values.get("block")
        if told is None:
            return
        block, masked = self.trace.block, len(told.masked)
        fixed = block if places is None else len(places) - int(places.searchsorted(told.start))
        budget = block if self.all_kept else script.budget(masked, fixed - masked)
        cast("dict[str, Any]", asked.values)["block"] = BlockProgress(
            start=told.start, masked=told.masked, processed=block, step=told.step, decoded=budget
        )

    def _outcome(
        self, canvas: Canvas, asked: StepRequest, places: Places, result: StepResult, script: _Script
    ) -> StepResult:  # fmt: skip
        """The outcome with as many of the kept rows decided, the first ones, as the trace says; tokens differ from row to row."""
        wanted, tokens = asked.rows.numpy(), asked.token_ids.numel()
        rows = len(wanted)
        cut = KEPT in result.values
        here = result.values[KEPT].numpy().nonzero()[0] if cut else np.arange(rows)
        kept = float(len(here))
        if cut and canvas.architecture.shifted:  # `here` lacks the last row of each run of masked ones
            kept -= (1 + np.count_nonzero(np.diff(wanted) > 1)) * (1 - script.share)
        self.kept += tokens - rows + kept
        self.unembedded += len(here)
        if wanted[0] == tokens:  # row i-1 predicts position i: the step commits a block, and decides what follows it
            script.decided_first()
            return result
        if places is None:
            again = (asked.start + int(wanted[0])) // self.trace.block * self.trace.block - asked.start
        else:
            again = int(places.searchsorted(int(places[wanted[0]]) // self.trace.block * self.trace.block))
        taken = np.zeros(rows, dtype=bool)
        taken[here[: script.take(rows, tokens - again - rows + kept, len(here))]] = True
        chosen = (wanted * _PRIME + (canvas.step * _PRIME + canvas.request)) % canvas.architecture.mask_token_id
        token = torch.from_numpy(chosen)
        return StepResult(
            token=token, score=result.score, committed=torch.from_numpy(taken), chosen=token, plan=result.plan,
            seconds=result.seconds, values=result.values,
        )  # fmt: skip


class _Script:
    """The position of one request in the trace, and its backlog. `share` of the masked rows is its last budget."""

    def __init__(self, trace: Trace, block: int, step: int) -> None:
        self._trace, self._block = trace, block
        self.share = 1.0
        self._more = 0.0  # rows that steps before have kept too many
        self._enter(step)

    def _enter(self, step: int = 0) -> None:
        self._steps = iter(self._trace.blocks[self._block % len(self._trace.blocks)][step:])
        self._now, self._owed = next(self._steps), 0  # tokens that steps before should have decided

    def budget(self, masked: int, fixed: int) -> int:
        """Return the masked rows to keep beside `fixed` others: each that is kept also keeps the one before it."""
        least = self._now.committed + self._owed
        wanted = min(max(self._now.kept - fixed - self._more, least, 1), masked)
        budget = max(round(masked * (1 - math.sqrt(1 - wanted / masked))), 1)
        self.share = budget / masked
        return budget

    def decided_first(self) -> None:
        """Take note that the first token of the block is known: its first step decides one fewer."""
        self._owed -= 1

    def take(self, masked: int, kept: float, most: int) -> int:
        """Return how many of the masked rows a step decides, at most so many, that has kept `kept` rows of the block; go on."""
        self._more = min(max(self._more + kept - self._now.kept, -_BEHIND), _BEHIND)
        count = min(max(self._now.committed + self._owed, 0), most)
        self._owed += self._now.committed - count
        self._now = next(self._steps, self._now)
        if count == masked:
            self._block += 1
            self._enter()
        return count


class Attending(NamedTuple):
    """How some requests of a step attend: by their phase, which others may share, whether they select, and whether they attend
    to their prefix anew; and how many keys each sees."""

    phase: Phase
    selects: bool
    refreshes: bool
    keys: list[int]


class Sizes(NamedTuple):
    """Sizes of a step."""

    tokens: int
    attending: list[Attending]


class Counted(NoPrefill):
    """A runner without prefills that notes the sizes of its steps: those of generators, so its sessions have no table."""

    def __init__(self, runner: StepRunner) -> None:
        super().__init__(runner)
        self.sizes: list[Sizes] = []
        self.last: deque[Sequence[StepRequest]] = deque(maxlen=_LAST)
        """The sizes of the last steps."""

    def request_table(self) -> None:
        """Return no table."""

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step."""
        kinds: dict[tuple[int, bool, bool], Attending] = {}  # by ids: phases take long to compare, and this is timed
        for request in requests:
            kind = bool(request.values.get("candidates")), bool(request.values.get("refreshes", True))
            key = id(request.phase), *kind
            if key not in kinds:
                kinds[key] = Attending(request.phase, *kind, [])
            kinds[key].keys.append(request.key_len)
        tokens = sum([request.token_ids.numel() for request in requests])
        self.last.append(requests)
        self.sizes.append(Sizes(tokens, [*kinds.values()]))
        return super().step(requests)


def main(arguments: Sequence[str]) -> None:
    """Record the trace of a trained model."""
    parser = options(__doc__)
    parser.add_argument("--items", type=int, default=2, help="answers of each long task")
    asked = parser.parse_args(arguments)
    for name in asked.models:
        described = environment("computed along the answers, nothing is timed")
        with mosaic.compile(name, device=asked.device) as model:
            trace = recorded_trace(model, name, LONG_TASKS, asked.items)
        masked, kept, committed = trace.mean
        print(
            f"{len(trace.blocks)} blocks of {trace.steps:.1f} steps: {masked:.1f} masked, {kept:.1f} kept, {committed:.1f} decided"
        )
        write(f"trace-{name}{tag_of(asked)}", {"environment": described, **asdict(trace)})


if __name__ == "__main__":
    main(sys.argv[1:])
