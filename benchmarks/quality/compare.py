"""Policies side by side: the same items with the same seeds under each, and the differences from the first policy.

Every answer counts its forwards, since a policy that needs more of them is not faster for making each one cheaper, and the tokens
that they compute in all layers, of which eviction and block caches leave some out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from benchmarks.quality.answers import Answers
from benchmarks.quality.evaluation import evaluation_set, gen_length, seen_in_training
from benchmarks.quality.items import LONG_TASKS, Item
from benchmarks.quality.policies import of_canvas, policy, schedule
from benchmarks.quality.scoring import score
from benchmarks.quality.vocabulary import EOS, vocabulary
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.quality.replay import Agreement, Records
    from mosaic.decoding import GenerationConfig
    from mosaic.models.architecture import Architecture
    from mosaic.runtime.steps import StepRunner

__all__ = ["SCHEMA", "SPLITS", "CompareSettings", "compare", "configurations"]

SCHEMA: Final = "mosaic.policies/1"
SPLITS: Final = ("judge", "choose")
Progress: TypeAlias = Callable[[str, int, int], None]
ByTask: TypeAlias = "Mapping[str, GenerationConfig]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """The items, policies and schedules.

    Parameters
    ----------
    policies
        As `policy` reads them; the others are compared with the first.
    schedules
        As `schedule` reads them.
    tasks, lengths, per_cell, per_task, seed
        As for `evaluation_set`.
    split
        "judge", or "choose" for items to choose settings on: their documents are in no set of the other split.
    batch
        Answers that are decoded at a time.
    replay
        Answers of each task and length whose canvases every policy is forced through; 0: none.
    seconds
        No policy begins after that time; 0: all are run.
    """

    policies: tuple[str, ...]
    schedules: tuple[str, ...] = ("dynamic",)
    tasks: tuple[str, ...] = LONG_TASKS
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    per_cell: int = 1
    per_task: int = 50
    seed: int = 0
    split: str = "judge"
    batch: int = 16
    replay: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (("policies", self.policies), ("schedules", self.schedules), ("tasks", self.tasks)):
            if not values or len(set(values)) < len(values):
                raise UsageError(f"each of the {name} once, got {', '.join(values) or 'none'}.")
        if self.split not in SPLITS:
            raise UsageError(f"split is '{self.split}'; it must be one of {', '.join(SPLITS)}.")
        if self.batch < 1 or self.replay < 0:
            raise UsageError(f"batch {self.batch} and replay {self.replay}: at least 1, and at least 0.")


def configurations(settings: CompareSettings, architecture: Architecture) -> dict[str, dict[str, ByTask]]:
    """Return how every task is decoded, by schedule and policy.

    Raises
    ------
    UsageError, UnknownName
        If the model cannot be decoded so.
    """
    from mosaic.decoding import GenerationConfig, resolve

    longest = max(settings.lengths)
    found: dict[str, dict[str, ByTask]] = {}
    for text in settings.schedules:
        steps, lengths = schedule(text), {task: gen_length(task) for task in settings.tasks}
        given = {task: steps if architecture.block else of_canvas(steps, length) for task, length in lengths.items()}
        for one in (policy(name, longest) for name in settings.policies):
            options = {**one.options, "seed": settings.seed}
            by_task = {
                task: GenerationConfig(gen_length=length, **{**given[task], **options})
                for task, length in lengths.items()
            }
            for config in by_task.values():
                resolve(config, architecture)
            found.setdefault(text, {})[one.name] = by_task
    return found


def compare(
    model: StepRunner,
    settings: CompareSettings,
    *,
    progress: Progress | None = None,
    keep: Callable[[Mapping[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Decode the set under every policy and schedule, and compare.

    Parameters
    ----------
    model
        A compiled model with the small models' vocabulary.
    settings
        What to ask and how to decode.
    progress
        Called with (name of the run, answers done, answers in all).
    keep
        Called with the document so far, after every policy.

    Returns
    -------
    dict
        The document that `--json` prints.

    Raises
    ------
    UsageError, UnknownName, DoesNotFit
        From the options, before anything is decoded.
    """
    items = evaluation_set(
        settings.seed, tasks=settings.tasks, lengths=settings.lengths, per_cell=settings.per_cell,
        per_task=settings.per_task, choosing=settings.split == "choose",
    )  # fmt: skip
    assert not seen_in_training(items)
    schedules: dict[str, Any] = {}
    document = {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "items": [{"task": item.task, "length": item.length, "tokens": item.tokens} for item in items],
        "schedules": schedules,
    }
    until = time.perf_counter() + (settings.seconds or math.inf)
    for text, configs in configurations(settings, model.architecture).items():
        schedules[text] = {}
        for name, figures in _of_schedule(model, items, configs, settings, _named(progress, text)):
            schedules[text][name] = figures
            keep(document)
            if time.perf_counter() > until:
                return document
    return document


def _named(progress: Progress | None, schedule: str) -> Progress:
    return lambda what, done, total: progress(f"{schedule}, {what}", done, total) if progress else None


def _of_schedule(
    model: StepRunner,
    items: Sequence[Item],
    configs: Mapping[str, ByTask],
    settings: CompareSettings,
    progress: Progress,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every policy under one schedule: figures by task, against the first, and agreement on its canvases."""
    from benchmarks.quality.replay import forced, recording

    arch, chosen = model.architecture, _some_of_each(items, settings.replay)
    baseline: Answers | None = None
    first: Records = {}
    for name, by_task in configs.items():
        records: Records = {}
        watching = {task: recording(config, arch, records) for task, config in by_task.items()}
        asked = [watching[item.task] for item in items]
        answers = _answers(model, items, asked, records, settings.batch, partial(progress, name))
        figures = answers.figures([(item.task, item.length) for item in items], baseline or answers)
        if chosen:
            part = [items[index] for index in chosen]
            first = first or {place: records[index] for place, index in enumerate(chosen)}
            agreements: dict[int, Agreement] = {}
            watching = {task: forced(config, arch, first, agreements) for task, config in by_task.items()}
            _decode(model, part, [watching[item.task] for item in part], settings.batch)
            figures["replay"] = _agreement([agreements[index] for index in range(len(part))], part)
        baseline = baseline or answers
        yield name, figures


def _some_of_each(items: Sequence[Item], count: int) -> list[int]:
    """The first `count` items of every task and length."""
    seen: dict[tuple[str, int], int] = {}
    chosen = []
    for index, item in enumerate(items):
        cell = item.task, item.length
        if seen.setdefault(cell, 0) < count:
            chosen.append(index)
        seen[cell] += 1
    return chosen


def _answers(
    model: StepRunner,
    items: Sequence[Item],
    configs: Sequence[GenerationConfig],
    records: Records,
    batch: int,
    done: Callable[[int, int], None],
) -> Answers:
    """Decode items by options that write `records`, and judge them."""
    table, began = vocabulary(), time.perf_counter()
    decoded = _decode(model, items, configs, batch, done)
    seconds = time.perf_counter() - began
    found = Answers(exact=[], right=[], tokens=[], forwards=[], seconds=seconds)
    for index, (item, config, (ids, steps, confidence)) in enumerate(zip(items, configs, decoded, strict=True)):
        judged = score(item, table.decode(ids[: ids.index(EOS)] if EOS in ids else ids))
        found.exact.append(judged.exact)
        found.right.append(judged.tokens)
        found.tokens.append(len(ids))
        block = model.architecture.block
        found.forwards.append(steps - (0 < block <= item.tokens))  # a shorter prompt is not prefilled
        found.decoded.append(sum(int(step.committed.sum()) for step in records[index]))
        found.processed.append(sum(step.computed for step in records[index]))
        found.again.append(sum(step.again for step in records[index]))
        if config.remasking == "low_confidence_dynamic" and config.threshold is not None:
            found.forced.append(sum(sure <= config.threshold for sure in confidence))
    return found


def _decode(
    model: StepRunner,
    items: Sequence[Item],
    configs: Sequence[GenerationConfig],
    batch: int,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[list[int], int, list[float]]]:
    """Decode items, `batch` of them live at a time: of each its token ids, steps, and confidences."""
    import torch

    from mosaic.decoding import LiveRequest, Session, Submission

    encode = vocabulary().encode
    waiting = [
        Submission(prompt=torch.tensor(encode(item.prompt), dtype=torch.int64), config=config, request_id=index)
        for index, (item, config) in enumerate(zip(items, configs, strict=True))
    ]
    waiting.reverse()
    requests: list[LiveRequest] = []
    with model.exclusive(), Session(model) as session:
        while waiting or session.live:
            room = batch - len(session.live)
            if waiting and (room >= max(batch // 4, 1)):  # several at a time: their prefills are one step
                requests += session.submit_all([waiting.pop() for _ in range(min(room, len(waiting)))])
            session.advance()
            done(len(requests) - len(session.live), len(items))
    answers = [request.generation for request in requests]
    return [
        (answer.token_ids.tolist(), answer.steps, answer.confidence.tolist())
        for answer in answers
        if answer is not None
    ]


def _agreement(agreements: Sequence[Agreement], items: Sequence[Item]) -> dict[str, Any]:
    """Shares of the same tokens on forced canvases, of a block's first steps and of the later ones, by task."""
    groups: dict[str, list[Agreement]] = {"all": list(agreements)}
    for agreement, item in zip(agreements, items, strict=True):
        groups.setdefault(item.task, []).append(agreement)
    found: dict[str, Any] = {}
    for name, members in groups.items():
        found[name] = {"count": len(members)}
        for later, when in enumerate(("first", "later")):
            rows, committed = (sum(getattr(one, key)[later] for one in members) for key in ("rows", "committed"))
            if rows:
                found[name][when] = {
                    "rows": rows,
                    "rows_agree": sum(one.rows_agree[later] for one in members) / rows,
                    "committed": committed,
                    "committed_agree": sum(one.committed_agree[later] for one in members) / max(committed, 1),
                    "own": sum(one.own[later] for one in members),
                }
    return found
