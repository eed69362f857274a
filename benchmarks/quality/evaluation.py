"""Evaluation sets: the same items for the same seed, all of them held out of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from benchmarks.quality import arithmetic, gathering, retrieval, stories
from benchmarks.quality.items import LONG_TASKS, TASKS, Item, Turn, pick, prompt_of
from benchmarks.quality.split import held_out
from benchmarks.quality.vocabulary import CODES, NAMES, vocabulary
from mosaic.errors import UnknownName, UsageError

__all__ = ["ANSWER_ROOM", "DEPTHS", "LENGTHS", "evaluation_set", "gen_length", "seen_in_training"]

LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192)
DEPTHS: Final = 10
ANSWER_ROOM: Final = 32
"""Tokens of a retrieval context that are left for the answer."""

LEAST_LONG: Final = 1024
"""Shortest context of a task of `LONG_TASKS`."""

_LONGEST: Final = {
    "retrieval": 32, "pair": 32, "addition": 64, "subtraction": 64, "multiplication": 64,
    "listing": 256, "chain": 128, "passage": 224,
}  # fmt: skip


def gen_length(task: str) -> int:
    """Return tokens to generate for a task: its longest answer with [EOS], in whole blocks of 32."""
    return _LONGEST.get(task, 96)


def evaluation_set(
    seed: int = 0,
    *,
    tasks: Sequence[str] = TASKS,
    lengths: Sequence[int] = LENGTHS,
    per_cell: int = 1,
    per_task: int = 50,
    choosing: bool = False,
) -> list[Item]:
    """Draw an evaluation set.

    Parameters
    ----------
    seed
        Another seed, another set; any seed's items are held out of training.
    tasks
        Of `TASKS` and `LONG_TASKS`.
    lengths
        Contexts of the tasks with a document, prompt and answer, in tokens.
    per_cell
        Items per length and tenth of depth, for each retrieval task; `frequent` has as many, without a depth.
    per_task
        Items of every other task.
    choosing
        Draw from a stream of its own: settings are chosen on these items and judged on others.

    Examples
    --------
    >>> items = evaluation_set(tasks=("addition",), per_task=2)
    >>> items == evaluation_set(tasks=("addition",), per_task=2)
    True
    """
    if per_cell < 1 or per_task < 1:
        raise UsageError(f"an evaluation set has at least one item per cell, got {per_cell} and {per_task}.")
    if min(lengths, default=256) < 128:
        raise UsageError(f"a retrieval context has at least 128 tokens, got {min(lengths)}.")
    if min(lengths, default=LEAST_LONG) < LEAST_LONG and set(tasks) & set(LONG_TASKS):
        raise UsageError(
            f"a context of {', '.join(LONG_TASKS)} has at least {LEAST_LONG:,} tokens, got {min(lengths)}."
        )
    found: list[Item] = []
    for task in tasks:
        rng = Random(f"{'choosing' if choosing else 'evaluation'}/{seed}/{task}")
        if task in ("retrieval", "pair", *LONG_TASKS):
            draw = _gathering if task in LONG_TASKS else _retrieval
            for length in lengths:
                for index in range(DEPTHS * per_cell):
                    depth = (index % DEPTHS + rng.uniform(0.2, 0.8)) / DEPTHS
                    found.append(draw(rng, task, length, depth))
        elif task in TASKS:
            found += (_small(rng, task) for _ in range(per_task))
        else:
            raise UnknownName("task", task, (*TASKS, *LONG_TASKS))
    return found


def _small(rng: Random, task: str) -> Item:
    turn = stories.draw(rng, evaluation=True) if task == "story" else arithmetic.draw(rng, task, evaluation=True)
    return _item(turn, prompt_of(turn))


def _retrieval(rng: Random, task: str, length: int, depth: float) -> Item:
    """A document with the (first) fact asked for at `depth`."""
    asked = 2 if task == "pair" else 1
    most = min(256, length // 20)
    count = max(asked, round(math.exp(rng.uniform(math.log(4), math.log(most)))))
    facts = retrieval.draw_facts(rng, count, lambda index, fact: index >= asked or held_out(*fact.key))
    turn = retrieval.ask(*facts[:asked])
    encode = vocabulary().encode
    room = length - ANSWER_ROOM - len(encode(prompt_of(turn)))
    while sum(len(encode(fact.sentence)) for fact in facts) > room:
        facts.pop()
    made = retrieval.document(rng, facts, room, depth=depth)
    where = made.starts[0] / max(1, len(made.ids))
    return _item(turn, prompt_of(turn, vocabulary().decode(made.ids)), length=length, depth=where)


def _gathering(rng: Random, task: str, length: int, depth: float) -> Item:
    """A document with the answer's facts, the first at `depth`, among other sources; some sentences state nothing."""

    def size(text: str) -> int:
        return len(encode(text))

    encode, decode = vocabulary().encode, vocabulary().decode
    if task == "frequent":
        kinds = rng.sample(gathering.COUNTED, len(gathering.COUNTED))
        room = length - gen_length(task) - 16
        mentions = int(room * rng.uniform(0.35, 0.55) / len(kinds))
        tally = gathering.draw_tally(rng, kinds, mentions, evaluation=True)
        ids, _ = retrieval.scatter(rng, [encode(piece) for piece in tally.pieces], room)
        return _item(tally.ask(kinds), prompt_of(tally.ask(kinds), decode(ids)), length=length, depth=None)
    asked: gathering.Source
    if task == "listing":
        count = rng.randint(8, gathering.LONGEST_SERIES)
        asked = gathering.draw_series(rng, pick(rng, CODES), pick(rng, NAMES), count, evaluation=True)
    elif task == "chain":
        asked = gathering.draw_chain(rng, NAMES, rng.randint(32, gathering.LONGEST_CHAIN), evaluation=True)
    else:
        tokens = rng.randint(76, gathering.LONGEST_PASSAGE)
        asked = gathering.draw_passage(rng, pick(rng, NAMES), size, tokens, evaluation=True)
    turn = asked.ask()
    room = length - gen_length(task) - size(prompt_of(turn))
    spare = room - sum(map(size, asked.pieces))
    others = gathering.draw_sources(rng, int(spare * rng.uniform(0.1, 0.5)), size, [asked])
    pieces = [encode(piece) for source in (asked, *others) for piece in source.pieces]
    ids, starts = retrieval.scatter(rng, pieces, room, depth=depth)
    return _item(turn, prompt_of(turn, decode(ids)), length=length, depth=starts[0] / (len(ids) - len(pieces[0]) + 1))


def _item(turn: Turn, prompt: str, *, length: int = 0, depth: float | None = 0.0) -> Item:
    tokens = len(vocabulary().encode(prompt))
    return Item(
        task=turn.task, prompt=prompt, answer=turn.answer, tokens=tokens, length=length, depth=depth, keys=turn.keys
    )


def seen_in_training(items: Iterable[Item]) -> list[Item]:
    """Return items that a training stream could contain: every one with a key that is not held out; empty if all is well."""
    return [item for item in items if not item.keys or not all(held_out(*key) for key in item.keys)]
