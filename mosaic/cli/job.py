"""`mosaic generate --prompts … --out …`: a job from a file into a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.cli.output import note, print_json
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models import Model
    from mosaic.runtime.compiled import CompiledModel

SKIP = "--skip-bad-lines"


def answer_file(
    model: Model, compiled: Callable[[], AbstractContextManager[CompiledModel]], config: GenerationConfig, *, prompts: Path,
    out: Path | None, chat: bool, ordered: bool, skips: bool, most_live: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Answer the requests of a file; `compiled` opens the model, which is not done before the files are."""
    from mosaic.decoding.stream import MOST_LIVE
    from mosaic.jobs.job import Job

    if out is None:
        raise UsageError("give --out, a file for the answers to --prompts.")
    bad_line = (lambda said: note(f"{said}; skipped")) if skips else None
    with Job(model, prompts, out, config, chat=chat, bad_line=bad_line) as job:
        tally = job.tally
        if not job.done:
            try:
                with compiled() as opened:
                    job.run(opened, ordered=ordered, most_live=most_live or MOST_LIVE, shown=True)
            except KeyboardInterrupt:
                note(f"{tally.answered:,} more answers are in {out}; the same command goes on from there.")
                raise
    if as_json:
        print_json(asdict(tally))
        return
    rate = tally.tokens / tally.seconds if tally.seconds else 0.0
    note(
        f"{tally.answered:,} new answers in {out}, {tally.refused:,} of them errors; {tally.bad:,} lines skipped; "
        f"{tally.tokens:,} tokens in {tally.seconds:.2f} s, {tally.forwards:,} forwards, {rate:,.1f} tokens/s"
    )
