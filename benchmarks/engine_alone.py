"""The engine of a server without the server: requests as the server reads them, through a stream. A worker of `over_http`.

Takes a case as JSON, and prints a line of JSON for each point, with the files that it has loaded by then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import sources
from benchmarks.bench.meters import card
from benchmarks.cases import Clock
from benchmarks.eviction import NewSizes
from benchmarks.over_http import figures, load_of
from mosaic.bench import asked, results
from mosaic.bench.client import Outcome
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.decoding.stream import MOST_LIVE, Stream
from mosaic.decoding.words import WordTokenizer
from mosaic.errors import MosaicError
from mosaic.models import load
from mosaic.models.architecture import Architecture
from mosaic.runtime.compile import compile
from mosaic.serving.protocol import read

__all__ = ["main"]

_AHEAD: Final = 1 << 62


class _Feed:
    """Times what becomes final of an answer, as a client does, behind its prompt."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._began, self._last = outcome, time.perf_counter(), 0.0
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        outcome, now = self._outcome, time.perf_counter()
        outcome.tokens += len(value.tolist())
        outcome.latency_s = now - self._began
        if outcome.ttft_s:
            outcome.gaps_s.append(now - self._last)
        else:
            outcome.ttft_s = outcome.latency_s
        self._last = now

    def end(self) -> None:
        """What ends is in the outcome of the stream."""


def served(session: Session, arch: Architecture, trace: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a pass over a trace, read before as the server reads it."""
    given, tokenizer = load_of(trace, point), WordTokenizer(arch)
    questions = list[tuple[Tensor, GenerationConfig]]()
    for one in asked(given):
        body = {"prompt": one.prompt, "max_tokens": one.tokens, "temperature": 0.0, **given.body, **one.body}
        question = read(body, "/v1/completions", GenerationConfig(), arch, tokenizer, strict=True)
        questions.append((torch.tensor(question.prompts[0], dtype=torch.int64), question.config))
    outcomes, steps, began = list[Outcome](), 0, time.perf_counter()

    def entries() -> Iterator[tuple[int, list[Submission]]]:
        for number, (prompt, config) in enumerate(questions):
            outcome = Outcome(number, 0.0, began_s=time.perf_counter() - began, prompt_tokens=len(prompt), counted=True)
            outcomes.append(outcome)
            yield number, [Submission(prompt=prompt, config=config, request_id=number, streamer=_Feed(outcome))]

    stream = Stream(session, most_live=point["count"], most_ahead=_AHEAD)
    for ended in stream.run(entries(), ordered=False):
        if ended.error is not None:
            raise ended.error
        steps += sum(one.steps for one in ended.generations)
    found = figures(results(given, outcomes, time.perf_counter() - began))
    return {**found, "forwards_per_token": steps / found["tokens"]}


def main(arguments: Sequence[str]) -> None:
    """Measure the points of a case."""
    case = json.loads(arguments[0])
    clock, model = Clock.start(case["minutes"]), replace(load(case["model"]), path=None)

    def tell(**found: Any) -> None:
        print(json.dumps({**found, "files": sources.loaded()}), flush=True)

    with compile(model, **case["compile"]) as compiled, Session(compiled) as session:
        if compiled.asynchronous:
            session.warm(GenerationConfig(), requests=MOST_LIVE, **case["options"])
        tell(card=card(compiled.asynchronous))
        new = NewSizes(compiled)
        for point in clock.while_left(case["points"], lambda line: print(line, file=sys.stderr)):
            uncounted, counted = point["traces"]
            try:
                served(session, model.architecture, uncounted, point)
                new.count()
                found = served(session, model.architecture, counted, point)
            except MosaicError as error:
                print(error, file=sys.stderr)
                tell(error=str(error))
            else:
                tell(**found, new_sizes=new.count())


if __name__ == "__main__":
    main(sys.argv[1:])
