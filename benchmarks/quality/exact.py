"""Exact match of a decoding configuration: an evaluation set, decoded by a compiled model, scored.

Every option of `GenerationConfig` can be measured, on any checkpoint that has the small models' vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.quality.evaluation import LENGTHS, evaluation_set, gen_length, seen_in_training
from benchmarks.quality.items import TASKS, Item
from benchmarks.quality.scoring import Score, score, summary
from benchmarks.quality.vocabulary import EOS, SPECIAL, vocabulary
from mosaic.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from mosaic.models import Model
    from mosaic.runtime.steps import StepRunner

__all__ = ["SCHEMA", "ExactSettings", "check_vocabulary", "measure_exact", "trained"]

SCHEMA: Final = "mosaic.quality/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSettings:
    """The items, and how they are decoded.

    Parameters
    ----------
    tasks, lengths, per_cell, per_task, seed
        As for `evaluation_set`.
    options
        Fields of `GenerationConfig`; without `gen_length` each task gets the length of its longest answer.
    batch
        Prompts decoded together; the result does not depend on it, up to the numerics of the device.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = LENGTHS
    per_cell: int = 1
    per_task: int = 50
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 8

    def __post_init__(self) -> None:
        if len(set(self.tasks)) < len(self.tasks):
            raise UsageError(f"each task once, got --tasks {','.join(self.tasks)}.")
        if self.batch < 1:
            raise UsageError(f"prompts are decoded at least one at a time, got --batch {self.batch}.")


def check_vocabulary(directory: Path) -> None:
    """Refuse a checkpoint whose tokens are not the small models'.

    Raises
    ------
    CheckpointError
        If there is no tokenizer.json, or it numbers tokens in another way.
    """
    file = directory / "tokenizer.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} cannot be read: the questions need the checkpoint's tokenizer.") from None
    probe = {text: index for index, text in enumerate(SPECIAL)} | {"ĠAnna": vocabulary().word(" Anna")}
    if len(found) != len(vocabulary()) or any(found.get(text) != index for text, index in probe.items()):
        raise CheckpointError(
            f"{directory} has another vocabulary than the small models ({len(found):,} tokens, not {len(vocabulary())}): "
            "the questions are in their words; give --model small or small-sdar, or a checkpoint trained "
            "by examples/train_small."
        )


def trained(described: Model, asked: str, *, instead: str = "small-sdar") -> Model:
    """Return a model that has weights and the vocabulary of the questions; refuse others, before they are loaded.

    Parameters
    ----------
    asked
        What was asked for, by name.
    instead
        What to give instead.
    """
    if described.path is None:
        raise UsageError(f"{asked} is a preset with random weights: give {instead} or a checkpoint directory.")
    check_vocabulary(Path(described.path))
    return described


def measure_exact(
    model: StepRunner, settings: ExactSettings, *, progress: Callable[[int, int, Score], None] | None = None
) -> dict[str, Any]:
    """Decode the set and score it.

    Parameters
    ----------
    model
        A compiled model with the small models' vocabulary.
    settings
        What to ask and how to decode.
    progress
        Called with (done, total, score) after every item.

    Returns
    -------
    dict
        The document that `--json` prints: settings, shares by task, length and depth, every item's outcome.

    Raises
    ------
    UsageError, UnknownName, DoesNotFit
        From the options, before anything is decoded.
    """
    import torch

    from mosaic.decoding import GenerationConfig, generate, resolve, shapes
    from mosaic.decoding.algorithms import canvas_length

    items = evaluation_set(
        settings.seed, tasks=settings.tasks, lengths=settings.lengths, per_cell=settings.per_cell,
        per_task=settings.per_task,
    )  # fmt: skip
    assert not seen_in_training(items)
    table = vocabulary()
    outcomes: list[dict[str, Any]] = []
    scores: list[Score] = []
    arch = model.architecture
    asked = []
    for part in batches(items, settings.batch):
        config = GenerationConfig(**{"gen_length": gen_length(part[0].task), **settings.options})
        prompts = [torch.tensor(table.encode(item.prompt), dtype=torch.int64) for item in part]
        lengths = [prompt.numel() for prompt in prompts]
        taken = canvas_length(resolve(config, arch), arch, max(lengths))
        if arch.max_context and taken > arch.max_context:
            raise UsageError(
                f"a context of {part[0].length:,} tokens and its answer take {taken:,} positions, the model has "
                f"{arch.max_context:,}; leave the length out."
            )
        model.check(shapes(config, lengths, arch))
        asked.append((part, prompts, config))
    began = time.perf_counter()
    for part, prompts, config in asked:
        for item, answer in zip(part, generate(model, prompts, config), strict=True):
            ids = [int(token) for token in answer.token_ids]
            text = table.decode(ids[: ids.index(EOS)] if EOS in ids else ids)
            scores.append(score(item, text))
            outcomes.append(_outcome(scores[-1], answer.steps))
            if progress is not None:
                progress(len(scores), len(items), scores[-1])
    return {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "seconds": time.perf_counter() - began,
        **summary(scores),
        "items": outcomes,
    }


def _outcome(one: Score, steps: int) -> dict[str, Any]:
    depth = one.item.depth
    return {
        "task": one.item.task, "length": one.item.length, "depth": None if depth is None else round(depth, 4),
        "tokens": one.item.tokens, "expected": one.item.answer, "text": one.text, "exact": one.exact, "whole": one.whole,
        "tokens_right": round(one.tokens, 4), "faults": list(one.faults), "steps": steps,
    }  # fmt: skip


def batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Yield items of one task and length, at most `size` together, in their order."""
    part: list[Item] = []
    for item in items:
        if part and (len(part) == size or (item.task, item.length) != (part[0].task, part[0].length)):
            yield part
            part = []
        part.append(item)
    if part:
        yield part
