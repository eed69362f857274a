"""Random traffic: requests of all lengths, temperatures and policies, and sessions that are driven by them as they arrive.

`mixed` serves the same requests several times, by sessions that are warm: queued at once, twice; as a Poisson process at 1.25 of
the rate that the queue was served at, so that the engine is saturated; and at half of it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.eviction import NewSizes
from benchmarks.served import TIMES, Meter, StepServed, percentiles, shown_times, useful
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Submission
from mosaic.decoding.algorithms import table_row
from mosaic.decoding.config import ALGORITHMS, own_algorithm, resolve
from mosaic.models.architecture import Architecture
from mosaic.runtime.compiled import CompiledModel

__all__ = [
    "POLICIES",
    "RUNS",
    "Arrival",
    "Traffic",
    "drawn",
    "kinds_of",
    "longest_of",
    "mixed",
    "percentiles",
    "poisson",
    "policies_of",
    "prompt_of",
]

RUNS: Final[Mapping[str, float]] = {
    "queued, first": math.inf, "queued": math.inf, "saturated": 1.25, "half": 0.5,
}  # fmt: skip
"""Passes over the same requests, and how often they come, as a multiple of the queue's requests per second."""
TEMPERATURES: Final = (0.0, 0.0, 0.7, 0.8, 1.0)
POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "exact": {}, "mage": {"attention": "mage:k=1024"}, "flashblock": {"attention": "flashblock"}, "focus": {"eviction": "focus"},
    "dc+": {"block_cache": "dc+"},
}  # fmt: skip


class Arrival(NamedTuple):
    """A request, and when it comes, in seconds."""

    at_s: float
    submission: Submission


def policies_of(arch: Architecture) -> list[str]:
    """Name the policies that the model's own algorithm takes."""
    return [name for name, taken in POLICIES.items() if taken.keys() <= ALGORITHMS[own_algorithm(arch)].options]


def prompt_of(arch: Architecture, length: int, generator: torch.Generator) -> Tensor:
    """Draw a prompt of tokens other than the mask."""
    drawn = torch.randint(0, arch.vocabulary - 1, (length,), generator=generator)
    return drawn + (drawn >= arch.mask_token_id)


def drawn(
    arch: Architecture, seed: int, *, prompts: tuple[int, int], answers: tuple[int, int], policies: Iterable[str], **more: Any
) -> Iterator[Submission]:  # fmt: skip
    """Draw requests without end: lengths evenly in their logarithms, temperatures and policies evenly; `more` are options of all.

    Answers of models that attend to all of a sequence are whole blocks.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    unit = 1 if arch.block else more.get("block_length", 32)
    policies = [*policies]
    for number in count():
        length, answer = (round(math.exp(rng.uniform(*map(math.log, ends)))) for ends in (prompts, answers))
        config = GenerationConfig(
            gen_length=-(-answer // unit) * unit, temperature=rng.choice(TEMPERATURES), seed=seed, stop_at_eos=False,
            **POLICIES[rng.choice(policies)], **more,
        )  # fmt: skip
        yield Submission(prompt=prompt_of(arch, length, generator), config=config, request_id=number)


def poisson(submissions: Iterable[Submission], rate: float, seed: int) -> Iterator[Arrival]:
    """Let requests come at random, `rate` a second on average; at an infinite rate all come at once."""
    rng, at = random.Random(seed), 0.0
    for submission in submissions:
        at += rng.expovariate(1.0) / rate
        yield Arrival(at, submission)


def kinds_of(arch: Architecture, submissions: Iterable[Submission]) -> list[GenerationConfig]:
    """Return one configuration of each policy and kind of sampling, but those that generators decode."""
    found = {
        (
            str(one.config.attention),
            str(one.config.eviction),
            one.config.block_cache,
            one.config.temperature > 0,
        ): one.config
        for one in submissions
    }
    return [one for one in found.values() if table_row(resolve(one, arch), arch, arch.block or 1, 0) is not None]


def longest_of(traffic: Mapping[str, Any]) -> int:
    """Return the most positions of a request of traffic."""
    most: int = traffic["prompts"][1] + traffic["answers"][1]
    return most


class Traffic:
    """A session, driven by requests that arrive. Who is not admitted waits, and all behind wait with them.

    Parameters
    ----------
    session, arrivals
        The session, and requests in the order in which they come.
    between
        The most that are submitted between two steps.

    Attributes
    ----------
    steps_ms
        Milliseconds of each call of `advance`.
    submitting_s
        Seconds of admission and submission together.
    answers
        By number, token ids of requests that have ended.
    latencies_s
        Seconds from each one's arrival to its end.
    finishes
        How each ended.
    refused
        Numbers of requests that do not fit an idle session.
    most_live
        The most requests that were live together.
    """

    def __init__(self, session: Session, arrivals: Iterable[Arrival], between: int | None = None) -> None:
        self._session, self._arrivals, self._between = session, iter(arrivals), between
        self._next = next(self._arrivals, None)
        self._began, self._live = time.perf_counter(), dict[LiveRequest, Arrival]()
        self.steps_ms, self.latencies_s = list[float](), list[float]()
        self.submitting_s = 0.0
        self.answers, self.finishes = dict[int, list[int]](), list[str]()
        self.refused: list[int] = []
        self.most_live = 0

    @property
    def is_over(self) -> bool:
        """Whether all requests have come and ended."""
        return self._next is None and not self._session.live

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._began

    def step(self) -> None:
        """Submit who has come and is admitted; run a step, or wait for the next one to come."""
        self._submit()
        if live := len(self._session.live):
            self.most_live = max(self.most_live, live)
            began = time.perf_counter()
            self._session.advance()
            self.steps_ms.append(1e3 * (time.perf_counter() - began))
            self._note_ends()
        elif self._next is not None:
            time.sleep(max(self._next.at_s - self.seconds, 0.0))

    def _submit(self) -> None:
        began = time.perf_counter()
        for _ in count() if self._between is None else range(self._between):
            if self._next is None or self._next.at_s > self.seconds:
                break
            if self._session.admits(self._next.submission):
                (request,) = self._session.submit_all([self._next.submission])
                self._live[request] = self._next
            elif self._session.live:
                break
            else:
                self.refused.append(request_number(self._next))
            self._next = next(self._arrivals, None)
        self.submitting_s += time.perf_counter() - began

    def _note_ends(self) -> None:
        if len(self._session.live) == len(self._live):
            return
        for request in [request for request in self._live if request.generation is not None]:
            arrival, generation = self._live.pop(request), request.generation
            assert generation is not None
            self.latencies_s.append(self.seconds - arrival.at_s)
            self.answers[request_number(arrival)] = generation.token_ids.tolist()
            self.finishes.append(generation.finish)


def request_number(arrival: Arrival) -> int:
    """Return the number of the request, which its draws go by."""
    assert arrival.submission.request_id is not None
    return arrival.submission.request_id


# --- mixed traffic ------------------------------------------------------------------------------------------------------


def mixed(
    model: CompiledModel, requests: int, *, seed: int, prompts: tuple[int, int], answers: tuple[int, int],
    policies: Iterable[str], tabled: bool = True, warm: int = 0, **more: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Serve the same requests as `RUNS` says; yield the figures of each pass. Sessions are `warm` for so many, if any."""
    lengths = {"prompts": prompts, "answers": answers}
    submissions = [*islice(drawn(model.architecture, seed, policies=policies, **lengths, **more), requests)]
    ladder = {"requests": min(warm, requests), "tokens": longest_of(lengths)} if warm and tabled else None
    queued = None
    for run, pace in RUNS.items():
        rate = math.inf if queued is None or math.isinf(pace) else pace * requests / queued["seconds"]
        answered, found = served(model, poisson(submissions, rate, seed), tabled=tabled, ladder=ladder)
        if queued is None or run == "queued":
            queued, reference = found, answered
        same = sum(answered[number] == tokens for number, tokens in reference.items())
        found |= {"of_queued": queued["seconds"] / found["seconds"], "same_as_queued": same}
        yield {"run": run, "requests": requests, **found}


def served(
    model: CompiledModel, arrivals: Iterable[Arrival], *, tabled: bool = True, ladder: Mapping[str, int] | None = None,
    **options: Any,
) -> tuple[dict[int, list[int]], dict[str, Any]]:  # fmt: skip
    """Serve requests as they come, in a session of its own; return their answers by number, and figures.

    `ladder` are options with which the session is warmed before.
    """
    meter, arrivals = Meter(model, tabled=tabled), [*arrivals]
    with Session(meter, **options) as session:
        submissions = [arrival.submission for arrival in arrivals]
        if ladder is not None and (kinds := kinds_of(model.architecture, submissions)):
            session.warm(kinds, **ladder)
        new = NewSizes(model)
        traffic = Traffic(session, arrivals)
        times = driven(traffic, meter)
        seconds = traffic.seconds
    latencies_ms = [1e3 * latency for latency in traffic.latencies_s]
    return traffic.answers, {
        "tokens_per_s": sum(map(len, traffic.answers.values())) / seconds, "seconds": seconds, "steps": len(traffic.steps_ms),
        **percentiles(traffic.steps_ms), **percentiles(latencies_ms, "latency_"), **beyond_predicted(times),
        "submit_ms": 1e3 * traffic.submitting_s / len(latencies_ms), "useful": useful(meter.steps), "most_live": traffic.most_live,
        "refused": len(traffic.refused), "new_sizes": new.count(),
    }  # fmt: skip


def driven(traffic: Traffic, meter: Meter) -> list[tuple[float, StepServed]]:
    """Drive traffic to its end; return the milliseconds of steps beside what they served."""
    found = list[tuple[float, StepServed]]()
    while not traffic.is_over:
        before = len(meter.steps)
        traffic.step()
        if len(meter.steps) == before + 1:
            found.append((traffic.steps_ms[-1], meter.steps[-1]))
    return found


def beyond_predicted(times: Iterable[tuple[float, StepServed]]) -> dict[str, float]:
    """Return how many steps had prompts or refreshes, and their times as multiples of what their plans predict."""
    found = sorted([ms / step.predicted_ms for ms, step in times if step.prompts or step.refreshed])
    if not found:
        return {"large_steps": 0}
    p99 = found[int(0.99 * (len(found) - 1))]
    return {"large_steps": len(found), "of_predicted": statistics.median(found), "of_predicted_p99": p99}


MIXED: Final = (
    "run", "requests", "tokens/s", "of the queued", "steps", *TIMES, "a request, ms", "99th, ms", "longest, ms", "large steps",
    "of predicted: median, 99th", "to submit, ms", "useful rows", "new sizes", "same answers", "refused",
)  # fmt: skip


def mixed_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    over = [f"{point[name]:.2f}" if name in point else "" for name in ("of_predicted", "of_predicted_p99")]
    return [
        point["run"], f"{point['requests']}", f"{point['tokens_per_s']:,.0f}", f"{point['of_queued']:.2f}", f"{point['steps']:,}",
        *shown_times(point), *shown_times(point, "latency_"), f"{point['large_steps']}", ", ".join(over),
        f"{point['submit_ms']:.2f}", f"{point['useful']:.1%}",
        *(f"{point[name]}" for name in ("new_sizes", "same_as_queued", "refused")),
    ]  # fmt: skip
