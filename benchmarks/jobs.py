"""A job of many prompts beside a session that serves the same requests: what the files, the window and the lines cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from torch import Tensor

from benchmarks.traffic import drawn, poisson, served
from mosaic.decoding import GenerationConfig, Submission
from mosaic.decoding.stream import MOST_LIVE
from mosaic.jobs.job import Job
from mosaic.runtime.compiled import CompiledModel

__all__ = ["JOB", "UNCOUNTED", "job_row", "jobs"]

UNCOUNTED: Final = 256
"""Of the requests, so many are served first without being counted."""
_OPTIONS: Final = ("gen_length", "temperature", "seed", "stop_at_eos")


def jobs(model: CompiledModel, requests: int, *, seed: int, **drawn_by: Any) -> Iterator[dict[str, Any]]:
    """Answer the same requests by a session to which all are submitted as it admits them, and by jobs; yield each one's figures.

    One job has as many live as the session had at most, one as many as a job has that is told nothing.
    """
    submissions = [*islice(drawn(model.architecture, seed, **drawn_by), requests)]
    served(model, poisson(submissions[:UNCOUNTED], math.inf, seed))
    answers, engine = served(model, poisson(submissions, math.inf, seed))
    yield {"run": "the engine", "requests": requests, **engine, "of_engine": 1.0, "same": len(answers)}
    for most_live in (engine["most_live"], MOST_LIVE):
        with TemporaryDirectory() as folder:
            asked, answered = Path(folder, "asked.jsonl"), Path(folder, "answered.jsonl")
            asked.write_text("".join(map(_line, submissions)))
            with Job(model.model, asked, answered, GenerationConfig()) as job:
                tally = job.run(model, most_live=most_live)
            found = [json.loads(line) for line in answered.read_text().splitlines()]
        tokens_per_s = sum(len(one["token_ids"]) for one in found) / tally.seconds
        yield {
            "run": "a job", "requests": requests, "tokens_per_s": tokens_per_s, "seconds": tally.seconds, "most_live": most_live,
            "steps": tally.forwards, "of_engine": tokens_per_s / engine["tokens_per_s"],
            "same": sum(one["token_ids"] == answers[one["line"] - 1] for one in found),
        }  # fmt: skip


def _line(submission: Submission) -> str:
    options = {name: getattr(submission.config, name) for name in _OPTIONS}
    assert isinstance(submission.prompt, Tensor)
    return json.dumps({"prompt": submission.prompt.tolist(), **options}) + "\n"


JOB: Final[Sequence[str]] = ("run", "requests", "tokens/s", "of the engine", "live at most", "steps", "same answers")


def job_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    return [
        point["run"], f"{point['requests']:,}", f"{point['tokens_per_s']:,.0f}", f"{point['of_engine']:.2f}",
        f"{point['most_live']}", f"{point['steps']:,}", f"{point['same']:,}",
    ]  # fmt: skip
