"""Steps of tiny models held against a reference's logits: in which configuration, batch and phase is the tests' business.

Each model is loaded from a checkpoint of large random weights, so that attention is far from uniform and a wrong rotation,
a wrong norm, a wrong bias or a wrong expert shows. What a step ran in is read from its plan, never assumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering, some_of
from torch import Tensor

import mosaic
from mosaic.models.parts import KEPT, KV, LOGITS, NO_HEAD, Commit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner import Request
from mosaic.planner.search import whole_grid
from mosaic.runtime.compiled import CompiledModel, StepOutput
from mosaic.runtime.steps import StepRequest

BOUND = 1e-5
"""Tolerance by the logits' scale: a few roundings of float32."""
HOST = "64MiB"
Settings = dict[str, int | str | None]
COMMIT = Phase(cache=KEPT, head=NO_HEAD)
DENOISE = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
DECIDE = Phase(commit=Commit(score="confidence", rule="top"))
FULL = (FULL_STEP, Phase(logits=LOGITS), DECIDE)
CACHED = (COMMIT, DENOISE)
BATCHES = ((0, 1, 2), (0,), (1, 0))
LENGTHS = (290, 17, 103)
"""No multiples of a tile or block; the batches have chunks of 128 and 256 rows, and a short last one."""


def enlarge(model: CompiledModel) -> None:
    """Draw weights that exercise the model; the router's bias is as large as the differences of its scores."""
    generator = torch.Generator().manual_seed(7)
    for name, view in model.weights().items():
        if not name.startswith("="):
            view.normal_(1.0 if "norm" in name or "ln_f" in name else 0.0, 0.12, generator=generator)


@dataclass(frozen=True)
class Point:
    """One step to run: what it asks for, of which sequences, in which configuration."""

    phase: Phase
    batch: tuple[int, ...]
    config: Settings | None = None
    labels: Mapping[str, object] = field(default_factory=dict, compare=False)

    def settings(self, together: int) -> set[frozenset[tuple[str, object]]]:
        """Every one or every two of its settings."""
        return set(map(frozenset, combinations(sorted(self.labels.items(), key=str), together)))


def covered(points: Sequence[Point], seed: str, together: int = 2) -> list[Point]:
    """Points, the best of some drawn at random, until all settings that some point has, so many at a time, are in one of
    them."""
    source, tries = random.Random(seed), min(1000, len(points))
    chosen = covering([point.settings(together) for point in points], lambda: source.sample(range(len(points)), tries))
    return in_turn(points[place] for place in chosen)


def in_turn(points: Iterable[Point]) -> list[Point]:
    """Points in an order in which weights move as seldom as can be."""
    return sorted(points, key=lambda point: str(point.labels["stream"]))


class Case:
    """A tiny model of one family, its inputs and the reference's answer.

    Parameters
    ----------
    reference
        Gives a function from one sequence's ids to float32 logits of its rows, for a model.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        sequences: Sequence[Tensor],
        reference: Callable[[CompiledModel], Callable[[Tensor], Tensor]],
        folder: Path,
    ) -> None:
        self.sequences, self.folder = sequences, folder
        with mosaic.compile(config) as model:
            enlarge(model)
            self.expected = list(map(reference(model), sequences))
            model.save(folder)
        self.model = self.opened(max_tokens=1)

    def opened(self, **options: Any) -> CompiledModel:
        """The model, loaded anew, poisoned."""
        return mosaic.compile(self.folder, **{"debug": "poison", "host_budget": HOST, **options})

    # --- the grid -------------------------------------------------------------------------------------------------

    def request(self, phase: Phase, batch: Sequence[int]) -> Request:
        """The planner's request for a step of these sequences."""
        lengths = tuple(len(self.window(i, phase)) for i in batch)
        rows = {} if not phase.head.decides else {"masked": sum(len(self.rows_of(i, phase)) for i in batch)}
        more = {"logit_rows": sum(lengths)} if phase.logits else {}
        owned = tuple(len(self.sequences[i]) for i in batch)
        cached = {"key_lens": owned, "states": {KV: sum(map(len, self.sequences))}} if phase.cached else {}
        return Request(seq_lens=lengths, phase=phase, **rows, **more, **cached)

    def points(self, phases: Iterable[Phase], few: int | None = None, device: str = "cpu") -> Iterator[Point]:
        """Configurations of a device's grid in every phase and batch: all, or a few of each drawn at random, of a fifth as many
        combinations of choices with every option among them, as each that is looked at has to be compiled."""
        planner = mosaic.Planner(self.model.model, device=device)
        for phase in phases:
            for batch in BATCHES:
                space = planner.at(self.request(phase, batch))
                template = space.space.template
                names = [choice.name for choice in template.choices] + [knob.name for knob in template.knobs]
                options = {choice.name: choice.options for choice in template.choices}
                some = [{}] if few is None else some_of(options, few // 5, str(phase))
                pinned = [space.space.at(space.dims, pinned=choices) for choices in some]
                grid = list(dict.fromkeys(found for point in pinned for found in whole_grid(point, 1 << 40)))
                for settings in grid if few is None else random.Random(few).sample(grid, min(few, len(grid))):
                    # a loop that is never dissolved takes the rows there are, the grid's may be more
                    found = space.config(dict(zip(names, (*settings.choices, *settings.rows), strict=True)))
                    config: Settings = dict(zip(names, (*found.choices, *found.rows), strict=True))
                    labels = {name: self.label(value, space.extents.get(name)) for name, value in config.items()}
                    yield Point(phase, batch, config, {**labels, "phase": str(phase), "batch": batch})

    @staticmethod
    def label(value: int | str | None, extent: int | None) -> object:
        """Rows that are all there are go by one name, however many that is."""
        return "whole" if value is None or (extent is not None and int(value) >= extent) else value

    # --- steps ----------------------------------------------------------------------------------------------------

    def rows_of(self, sequence: int, phase: Phase) -> Tensor:
        """The rows of a sequence that a step decides: every second one, and where keys are kept, those of the window."""
        window = self.window(sequence, phase)
        return torch.arange(1 if window.start else 0, len(window), 2)

    def window(self, sequence: int, phase: Phase) -> range:
        """The positions that a step computes; the others are only seen."""
        count = len(self.sequences[sequence])
        return range(count // 3, count) if phase is DENOISE else range(count)

    def run(self, model: CompiledModel, point: Point) -> None:
        """Run a point and hold it against the reference; the configuration in force must be the one asked for."""
        if point.phase.commit or point.phase.cached:
            self._run_requests(model, point)
        else:
            self._run_call(model, point)

    def _run_call(self, model: CompiledModel, point: Point) -> None:
        expected = torch.cat([self.expected[i] for i in point.batch])
        starts = [sum(len(self.sequences[j]) for j in point.batch[:k]) for k in range(len(point.batch))]
        rows = torch.cat([self.rows_of(i, point.phase) + s for i, s in zip(point.batch, starts, strict=True)])
        everything = torch.arange(len(expected)) if point.phase.logits else None
        step = on_host(
            model([self.sequences[i] for i in point.batch], rows, logits_for=everything, config=point.config)
        )
        assert point.config in (None, step.plan.config)
        scale, chosen = float(expected.abs().max()), expected[rows]
        if point.phase.logits:
            assert step.logits is not None and float((step.logits - expected).abs().max()) <= BOUND * scale
        log_sum, top = chosen.double().logsumexp(1), chosen.topk(2).values
        assert float((step.logsumexp - log_sum).abs().max()) <= BOUND * scale
        assert float((step.maximum - top[:, 0]).abs().max()) <= BOUND * scale
        assert float((step.second - top[:, 1]).abs().max()) <= BOUND * scale
        assert float((step.confidence - (top[:, 0].double() - log_sum).exp()).abs().max()) <= BOUND * scale
        assert torch.equal(step.token_ids, chosen.argmax(1)) and torch.equal(step.rows, rows)

    def _run_requests(self, model: CompiledModel, point: Point) -> None:
        """Of cached phases: fill the keys of whole sequences in this configuration, or compute windows over them."""
        opened = {i: model.open_sequence() for i in range(len(self.sequences)) if point.phase.cached}
        try:
            for i, sequence in opened.items():
                sequence.reserve(len(self.sequences[i]))
            if point.phase.cached:
                own = point.phase is COMMIT
                done = model.step(
                    [self.asked(i, COMMIT, opened) for i in point.batch], config=point.config if own else {}
                )
                assert not own or point.config in (None, done[0].plan.config)
            phase = DENOISE if point.phase.cached else point.phase
            results = model.step(
                [self.asked(i, phase, opened) for i in point.batch],
                config={} if point.phase is COMMIT else point.config,
            )
            assert point.phase is COMMIT or point.config in (None, results[0].plan.config)
            for i, result in zip(point.batch, results, strict=True):
                self._compare(self.expected[i][self.window(i, phase).start :][self.rows_of(i, phase)], result)
        finally:
            for sequence in opened.values():
                sequence.close()

    def asked(self, i: int, phase: Phase, opened: Mapping[int, Any]) -> StepRequest:
        """One sequence's part of a step."""
        window, ids = self.window(i, phase), self.sequences[i]
        rows = self.rows_of(i, phase) if phase.commit else torch.empty(0, dtype=torch.int64)
        kept = {"sequence": opened[i], "key_len": len(ids)} if phase.cached else {}
        return StepRequest(
            phase=phase, token_ids=ids[window.start :], start=window.start, rows=rows,
            current=ids[window.start :][rows], quota=3, **kept,
        )  # fmt: skip

    @staticmethod
    def _compare(expected: Tensor, result: Any) -> None:
        confidence = expected.double().softmax(1).amax(1)
        assert torch.equal(result.token, expected.argmax(1))
        assert float((result.score - confidence).abs().max()) <= BOUND * float(expected.abs().max())


def on_host(step: StepOutput) -> StepOutput:
    """The same in host memory, where it is not there already."""
    copies: dict[str, Any] = {
        entry.name: value.cpu() for entry in fields(step) if isinstance(value := getattr(step, entry.name), Tensor)
    }
    return replace(step, **copies)


def budgets_of(case: Case, request: Request, count: int) -> dict[str, tuple[int, Settings]]:
    """Of budgets from all that a step could use to the least it needs: one for each way of attention that the planner then
    takes by itself, with the configuration that it takes."""
    planner = mosaic.Planner(case.model.model, device="cpu", host_budget=0)
    found: dict[str, tuple[int, Settings]] = {}
    top, low = planner.plan(request, limit=False).total_bytes, planner.needed(request)
    for step in range(count + 1):
        budget = top - (top - low) * step // count
        plan = mosaic.Planner(planner.model, device="cpu", budget=budget, host_budget=0).plan(request, limit=False)
        if plan.fits:
            found.setdefault(str(plan.config["attention"]), (budget, dict(plan.config)))
    return found


# --- what both files of parity tests run, each for its families -----------------------------------------------------------


def check_own_choice(case: Case) -> None:
    """Without a configuration, in every phase and batch."""
    for phase in (*FULL, *CACHED):
        for batch in BATCHES:
            case.run(case.model, Point(phase, batch))


def check_grid(
    case: Case, phases: Sequence[Phase], few: int, model: CompiledModel | None = None, together: int = 2
) -> int:
    """Points with every pair of settings of the grid's, on the case's model or another, or with every setting by itself; gives
    how many they were."""
    model = case.model if model is None else model
    points = list(case.points(phases, few, model.planner.device.name))
    chosen = covered(points, case.model.model.name, together)
    settings = {pair for point in points for pair in point.labels.items()}
    assert settings == {pair for point in chosen for pair in point.labels.items()}
    for point in chosen:
        case.run(model, point)
    return len(chosen)


def check_soak(case: Case, phases: Sequence[Phase], count: int) -> None:
    """Points with every pair of settings of the whole grid, and `count` more."""
    points = list(case.points(phases))
    chosen = covered(points, f"soak {case.model.model.name}")
    assert set().union(*(point.settings(2) for point in points)) == set().union(
        *(point.settings(2) for point in chosen)
    )
    for point in in_turn([*chosen, *random.Random(count).sample(points, count)]):
        case.run(case.model, point)


def check_budgets(case: Case, count: int) -> set[str]:
    """Under budgets that make the planner choose; gives the ways of attention that it chose."""
    ways = budgets_of(case, case.request(FULL_STEP, (0,)), count)
    for way, (budget, config) in ways.items():
        with case.opened(budget=budget, host_budget=0) as model:
            case.run(model, Point(FULL_STEP, (0,)))
            plan = model.plan(len(case.sequences[0]), masked=len(case.rows_of(0, FULL_STEP)))
            assert (plan.config["attention"], plan.config) == (way, config) and plan.total_bytes <= budget
    return set(ways)


def check_other_plans(case: Case, few: int) -> str:
    """Loaded for a long step in a budget that has weights streamed, and run as they lie, in other plans; gives which."""
    asked = Request(seq_lens=(3000,), masked=3000)
    budget = mosaic.Planner(case.model.model, device="cpu", host_budget=0).needed(asked)
    planner = mosaic.Planner(case.model.model, device="cpu", host_budget=HOST)
    while planner.plan(asked, limit=False).config["stream"] == "none":
        budget -= 16 * planner.device.page_bytes
        planner = mosaic.Planner(case.model.model, device="cpu", budget=budget, host_budget=HOST)
    with case.opened(max_tokens=3000, budget=budget) as model:
        streamed = model.planner.pinned["stream"]
        before = dict(model.weights())
        for point in random.Random(1).sample(list(case.points((FULL_STEP, DENOISE), few)), few):
            assert point.config is not None
            case.run(model, Point(point.phase, point.batch, {**point.config, "stream": streamed}))
        assert all(view is before[name] for name, view in model.weights().items()), "weights did not move"
    return streamed


class GridTests:
    """The tests of both files, for the families of the file's fixture `case`.

    Each family runs every setting, and every pair of settings in `make soak` and on a card.
    """

    def test_the_planners_own_choice(self, case: Case) -> None:
        check_own_choice(case)

    def test_full_steps_in_configurations_of_the_grid(self, case: Case) -> None:
        """Head by logits or fused, attention together, by queries or by heads, weights and hidden states here or there, chunks."""
        assert check_grid(case, FULL, few=60, together=1) >= 5

    def test_cached_steps_in_configurations_of_the_grid(self, case: Case) -> None:
        assert check_grid(case, CACHED, few=60, together=1) >= 5

    def test_what_budgets_make_the_planner_choose(self, case: Case) -> None:
        assert len(check_budgets(case, 24)) >= 2

    def test_weights_loaded_for_another_plan(self, case: Case) -> None:
        assert check_other_plans(case, 6) != "none"

    @pytest.mark.soak
    def test_the_whole_grid_pair_by_pair_and_more(self, case: Case) -> None:
        for phases in (FULL, CACHED):
            check_soak(case, phases, 400)
