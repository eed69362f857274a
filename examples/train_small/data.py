"""Training rows made on the fly: token ids, which of them are masked, and how much each counts.

A row is one conversation of exactly `length` tokens: a document with many questions, one with questions that have long
answers, or several small tasks. Batch i of
a stage depends on (seed, stage, i) alone, whichever worker makes it. No turn in it is held out for evaluation.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.quality import arithmetic, gathering, retrieval, stories
from benchmarks.quality.items import Turn, pick
from benchmarks.quality.vocabulary import ASSISTANT, EOS, MASK, USER, vocabulary

__all__ = ["Batch", "Loader", "Stage", "make_batch", "row"]

MOST_QUESTIONS = 96
TAIL_WEIGHT = 0.1  # of an [EOS] after the first: easy, and many
DOCUMENT_WEIGHT = 0.2  # of a masked token outside answers
ALL_MASKED = 0.35  # share of answers masked whole: where decoding starts
LEAST_RATIO = 0.05
COUNTING = 0.25  # share of the documents with long answers that ask for the most frequent words
RANKED_TOKENS = 16  # of the question and answer about one kind of word, and what else it takes
OPERATIONS = (*arithmetic.OPERATIONS, "multiplication")  # twice as often: its steps are the most different ones


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the curriculum.

    Parameters
    ----------
    share
        Of the training time.
    lengths
        Row length in tokens -> share of the batches.
    tasks
        Row length -> share of its rows that hold arithmetic, sorting and stories; the others are documents.
    long
        Row length -> share of the documents whose questions have long answers; a row has at least 256 tokens then.
    stories
        Share of the small tasks that are stories.
    whole
        Share of rows of which the document is masked in places, too.
    """

    share: float
    lengths: Mapping[int, float]
    tasks: Mapping[int, float] = field(default_factory=lambda: {128: 0.8, 256: 0.5, 512: 0.2})
    long: Mapping[int, float] = field(default_factory=dict)
    stories: float = 0.3
    whole: float = 0.0


@dataclass(frozen=True)
class Batch:
    """uint16 tokens [B, L] and float32 weights [B, L]; a token is masked where its weight is positive."""

    tokens: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]

    @property
    def noisy(self) -> npt.NDArray[np.uint16]:
        """The tokens with [MASK] where they are to be predicted."""
        return np.where(self.weights > 0, np.uint16(MASK), self.tokens)


Span = tuple[int, int, int]
"""Start of an answer, end of its content with the first [EOS], end of the [EOS] after it."""


def log_uniform(rng: Random, low: int, high: int) -> int:
    """An integer in [low, high], small ones as likely as large ones of ten times the size."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def row(
    rng: Random, length: int, tasks: float, long: float = 0.0, stories: float = 0.3
) -> tuple[list[int], list[Span]]:
    """One conversation of `length` tokens and its answers.

    Parameters
    ----------
    tasks
        Probability of small tasks.
    long
        Probability that a document's questions have long answers.
    stories
        Probability that a small task is a story.
    """
    if rng.random() < tasks:
        return _tasks(rng, length, stories)
    if long and rng.random() < long:
        return _counting(rng, length) if rng.random() < COUNTING else _gathering(rng, length)
    return _retrieval(rng, length)


def _tasks(rng: Random, length: int, share: float) -> tuple[list[int], list[Span]]:
    """Arithmetic, sorting and stories, one after the other."""
    ids: list[int] = []
    spans: list[Span] = []
    most = 1 + int(rng.random() * max(1, length // 48))
    while len(spans) < most:
        turn = stories.draw(rng, evaluation=False) if rng.random() < share else arithmetic.draw(
            rng, pick(rng, OPERATIONS), evaluation=False
        )  # fmt: skip
        question, answer = _encoded(turn)
        if len(ids) + len(question) + len(answer) + 1 > length:
            break
        _append(ids, spans, [USER, *question], answer, 0)
    return _filled(ids, spans, length)


def _retrieval(rng: Random, length: int) -> tuple[list[int], list[Span]]:
    """A document, then questions about different facts of it."""
    tail = int(rng.random() * min(64, length // 8))
    most = max(1, min(MOST_QUESTIONS, length // 22))
    asked = log_uniform(rng, max(1, most // 2 if length <= 512 else most // 8), most)
    others = log_uniform(rng, 1, max(2, min(256, length // 20)))
    facts = retrieval.draw_facts(rng, min(asked + others, length // 20), retrieval.for_training)
    turns: list[Turn] = []
    remaining = list(facts)
    while remaining and len(turns) < asked:
        first = remaining.pop()
        second = remaining.pop() if remaining and rng.random() < 0.25 else None
        turns.append(retrieval.ask(first, second))
    rng.shuffle(turns)
    encoded = [_encoded(turn) for turn in turns]
    extra = [int(rng.random() * 8) if rng.random() < 0.2 else 0 for _ in encoded]
    sizes = [len(question) + len(answer) + 2 + more for (question, answer), more in zip(encoded, extra, strict=True)]
    lengths = {fact.key: len(vocabulary().encode(fact.sentence)) for fact in facts}
    while len(sizes) > 1 and sum(lengths.values()) + sum(sizes) + tail > length:
        sizes.pop()
    wanted = {key for turn in turns[: len(sizes)] for key in turn.keys}
    spare = [key for key in lengths if key not in wanted]
    while spare and sum(lengths.values()) + sum(sizes) > length:
        del lengths[spare.pop()]
    facts = [fact for fact in facts if fact.key in lengths]
    needed = sum(lengths.values())
    tail = max(0, min(tail, length - needed - sum(sizes)))
    document = retrieval.document(rng, facts, length - sum(sizes) - tail)
    ids, spans = [USER, *document.ids], list[Span]()
    for index, size in enumerate(sizes):
        question, answer = encoded[index]
        _append(ids, spans, [USER, *question] if index else question, answer, extra[index])
        assert size == len(question) + len(answer) + 2 + extra[index]
    return _filled(ids, spans, length)


def _gathering(rng: Random, length: int) -> tuple[list[int], list[Span]]:
    """A document with series, chains, passages and some facts, then questions of all kinds in any order."""
    most = int(length * rng.uniform(0.25, 0.42))
    sources = gathering.draw_sources(rng, most, _size)
    pieces = [_encode(piece) for source in sources for piece in source.pieces]
    most -= sum(map(len, pieces))
    facts = retrieval.draw_facts(rng, min(16, max(0, most // 12)), retrieval.for_training) if rng.random() < 0.5 else []
    pieces += [_encode(fact.sentence) for fact in facts]
    turns = [turn for source in sources for turn in _asked(rng, source)] + [retrieval.ask(fact) for fact in facts]
    rng.shuffle(turns)
    return _conversation(rng, pieces, turns, length)


def _asked(rng: Random, source: gathering.Source) -> list[Turn]:
    """Questions about one source: most about all of it, others about its parts one by one."""
    if isinstance(source, gathering.Passage):
        return [source.ask()]
    series = isinstance(source, gathering.Series)
    last = len(source.values) if isinstance(source, gathering.Series) else len(source.names) - 1
    if rng.random() < 0.6 or last < 4:
        return [source.ask()]
    cuts = [0, *sorted(rng.sample(range(1, last), min(3, last - 1))), last]
    return [source.ask(first + series, end) for first, end in pairwise(cuts)]


def _counting(rng: Random, length: int) -> tuple[list[int], list[Span]]:
    """A document of words to be counted, then one to three questions about different kinds of them."""
    each = gathering.LEAST_MENTIONS + RANKED_TOKENS
    most = min(len(gathering.COUNTED), int(length * 0.6) // each)
    kinds = rng.sample(gathering.COUNTED, most if rng.random() < 0.5 else 1 + int(rng.random() * most))
    room = length - RANKED_TOKENS * len(kinds)
    mentions = max(gathering.LEAST_MENTIONS, int(room * rng.uniform(0.35, 0.55) / len(kinds)))
    tally = gathering.draw_tally(rng, kinds, mentions, evaluation=False)
    asked = rng.sample(kinds, len(kinds))
    turns = []
    while asked:
        count = len(asked) if rng.random() < 0.7 else 1 + int(rng.random() * len(asked))
        turns.append(tally.ask(asked[:count]))
        del asked[:count]
    return _conversation(rng, [_encode(piece) for piece in tally.pieces], turns, length)


def _conversation(
    rng: Random, pieces: Sequence[Sequence[int]], turns: Sequence[Turn], length: int
) -> tuple[list[int], list[Span]]:
    """A document that holds the pieces, then as many of the turns as fit, in their order."""
    used = sum(map(len, pieces)) + 1
    least = used + int((length - used) * rng.random() * 0.3)  # tokens of the document, before what is left over
    asked: list[tuple[list[int], list[int]]] = []
    for turn in turns:
        question, answer = _encoded(turn)
        size = len(question) + len(answer) + (1 if asked else 0)
        if (least if asked else used) + size <= length:
            asked.append((question, answer))
            used, least = used + size, least + size
    rest = length - used
    tail = min(rest, int(rng.random() * min(64, length // 8)))
    ids, _ = retrieval.scatter(rng, pieces, sum(map(len, pieces)) + rest - tail)
    ids, spans = [USER, *ids], list[Span]()
    for index, (question, answer) in enumerate(asked):
        _append(ids, spans, [USER, *question] if index else question, answer, 0)
    return _filled(ids, spans, length)


def _encode(text: str) -> list[int]:
    return vocabulary().encode(text)


def _size(text: str) -> int:
    return len(vocabulary().encode(text))


def _encoded(turn: Turn) -> tuple[list[int], list[int]]:
    """The question with the next role, and the answer with its [EOS]."""
    encode = vocabulary().encode
    return [*encode(turn.question), ASSISTANT], [*encode(turn.answer), EOS]


def _append(ids: list[int], spans: list[Span], question: list[int], answer: list[int], extra: int) -> None:
    start = len(ids) + len(question)
    end = start + len(answer)
    ids += question + answer + [EOS] * extra
    spans.append((start, end, end + extra))


def _filled(ids: list[int], spans: list[Span], length: int) -> tuple[list[int], list[Span]]:
    """[EOS] up to the row's end, as part of the last answer."""
    start, end, _ = spans[-1]
    spans[-1] = (start, end, length)
    return ids + [EOS] * (length - len(ids)), spans


def make_batch(seed: int, stage_index: int, index: int, stage: Stage, num_tokens: int, block: int) -> Batch:
    """Batch `index` of a stage: `num_tokens` in rows of one length.

    Parameters
    ----------
    block
        0: an answer has one ratio of masks. Else every block of this many tokens has its own, as in block diffusion.
    """
    rng = Random(f"{seed}/{stage_index}/{index}")
    noise = np.random.default_rng([seed, stage_index, index])
    lengths = list(stage.lengths)
    length = rng.choices(lengths, [stage.lengths[length] for length in lengths])[0]
    rows = [
        row(rng, length, stage.tasks.get(length, 0.0), stage.long.get(length, 0.0), stage.stories)
        for _ in range(max(1, num_tokens // length))
    ]
    tokens = np.array([ids for ids, _ in rows], dtype=np.uint16)
    whole = [rng.random() < stage.whole for _ in rows]
    return Batch(tokens, weigh([spans for _, spans in rows], length, whole, block, noise))


def weigh(
    spans: Sequence[Sequence[Span]], length: int, whole: Sequence[bool], block: int, noise: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Draw a ratio t of masks for every answer (or block of it) and weigh masked tokens by 1/t (LLaDA, eq. 3)."""
    segment = np.full((len(spans), length), -1, dtype=np.int32)
    worth = np.full((len(spans), length), DOCUMENT_WEIGHT, dtype=np.float32)
    tails: list[bool] = []
    for index, answers in enumerate(spans):
        for start, middle, end in answers:
            for low, high, tail in ((start, middle, False), (middle, end, True)):
                for cut in _cuts(low, high, block):
                    segment[index, cut[0] : cut[1]] = len(tails)
                    worth[index, cut[0] : cut[1]] = TAIL_WEIGHT if tail else 1.0
                    tails.append(tail)
        if whole[index]:
            for cut in _cuts(0, length, block or length):
                part = segment[index, cut[0] : cut[1]]
                part[part < 0] = len(tails) + (1 << 30)
            # all of a row's document segments share the numbers from 1 << 30 on, one a block
    count = len(tails) + 1
    ratio = np.maximum(noise.random(count), LEAST_RATIO)
    ratio[noise.random(count) < ALL_MASKED] = 1.0
    ratio[:-1][np.array(tails) & (noise.random(count - 1) < 0.5)] = 1.0
    document = segment >= 1 << 30
    t = ratio[np.where(document, count - 1, segment)].astype(np.float32)
    if document.any():
        blocks = -(-length // (block or length))
        by_block = noise.uniform(LEAST_RATIO, 0.5, (len(spans), blocks)).astype(np.float32)
        t = np.where(document, np.repeat(by_block, block or length, axis=1)[:, :length], t)
    masked = (noise.random(segment.shape, dtype=np.float32) < t) & (segment >= 0)
    return np.where(masked, worth / t, 0).astype(np.float32)


def _cuts(start: int, end: int, block: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut at multiples of `block`."""
    while start < end:
        stop = end if not block else min(end, (start // block + 1) * block)
        yield start, stop
        start = stop


class Loader:
    """Worker processes that fill slots of shared memory; batches come in order, so that runs repeat.

    Start it before CUDA is touched: the workers are forked.
    """

    def __init__(self, seed: int, stages: Sequence[Stage], num_tokens: int, block: int, workers: int) -> None:
        self.seed, self.stages, self.num_tokens, self.block = seed, stages, num_tokens, block
        self.waited_s = 0.0
        self._stage = self._asked = self._given = 0
        self._ready: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
        self._held: int | None = None
        context = multiprocessing.get_context("fork")
        slots = 4 * workers
        self._tokens = [context.RawArray(ctypes.c_uint16, num_tokens) for _ in range(slots)]
        self._weights = [context.RawArray(ctypes.c_float, num_tokens) for _ in range(slots)]
        self._orders, self._done = context.SimpleQueue(), context.SimpleQueue()
        self._free = list(range(slots))
        self._workers = [context.Process(target=self._work, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            stage, index, slot = order
            batch = make_batch(self.seed, stage, index, self.stages[stage], self.num_tokens, self.block)
            shape = batch.tokens.shape
            count = batch.tokens.size
            np.frombuffer(self._tokens[slot], np.uint16)[:count] = batch.tokens.reshape(-1)
            np.frombuffer(self._weights[slot], np.float32)[:count] = batch.weights.reshape(-1)
            self._done.put((stage, index, slot, shape))

    def next(self, stage: int) -> Batch:
        """The next batch of a stage; valid until the next call."""
        if not self._workers:
            self._asked = 0 if stage != self._stage else self._asked
            self._stage = stage
            self._asked += 1
            return make_batch(self.seed, stage, self._asked - 1, self.stages[stage], self.num_tokens, self.block)
        if self._held is not None:
            self._free.append(self._held)
            self._held = None
        if stage != self._stage:
            self._stage, self._asked, self._given = stage, 0, 0
            self._free += [slot for slot, _ in self._ready.values()]
            self._ready.clear()
        while self._free:
            self._orders.put((stage, self._asked, self._free.pop()))
            self._asked += 1
        started = time.perf_counter()
        while (stage, self._given) not in self._ready:
            done_stage, index, slot, shape = self._done.get()
            if done_stage == stage:
                self._ready[done_stage, index] = slot, shape
            else:
                self._orders.put((stage, self._asked, slot))
                self._asked += 1
        self.waited_s += time.perf_counter() - started
        slot, shape = self._ready.pop((stage, self._given))
        self._given += 1
        self._held = slot
        count = shape[0] * shape[1]
        tokens = np.frombuffer(self._tokens[slot], np.uint16)[:count].reshape(shape)
        return Batch(tokens, np.frombuffer(self._weights[slot], np.float32)[:count].reshape(shape))

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
