"""`generate`: a session that every prompt is submitted to at once, advanced until all have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.decoding.live import Generation, Submission
from mosaic.decoding.session import Session
from mosaic.decoding.streaming import OnStep, Streamer, streamers_of
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mosaic.decoding.config import GenerationConfig
    from mosaic.runtime.steps import StepRunner

__all__ = ["generate"]


def generate(
    runner: StepRunner,
    prompts: Sequence[Tensor],
    config: GenerationConfig,
    *,
    streamer: Streamer | Sequence[Streamer] | None = None,
    on_step: OnStep | None = None,
    request_ids: Sequence[int] | None = None,
) -> list[Generation]:
    """Generate an answer to every prompt.

    Parameters
    ----------
    runner
        What runs the steps, a compiled model.
    prompts
        int64 [P] each.
    config
        As given by the caller; what it leaves out is the algorithm's own.
    streamer
        One for a single prompt, or one for each prompt.
    on_step
        Called with every `Step`.
    request_ids
        The numbers that stand for the requests in random draws; 0, 1, … if not given. A request draws the same tokens
        alone as in a batch if it has the same number.

    Raises
    ------
    UsageError
        If an option or a prompt cannot be.
    DoesNotFit
        If a step of the generation would not fit the budget: before any has run.
    """
    if not prompts:
        raise UsageError("no prompt was given; give at least one.")
    numbers = list(range(len(prompts)) if request_ids is None else request_ids)
    if len(numbers) != len(prompts):
        raise UsageError(f"{len(numbers)} request_ids for {len(prompts)} prompts; give one for each prompt.")
    streamers = streamers_of(streamer, len(prompts))
    with runner.exclusive(), Session(runner) as session:
        requests = session.submit_all(
            [
                Submission(prompt=prompt, config=config, request_id=number, streamer=shown, on_step=on_step)
                for prompt, number, shown in zip(prompts, numbers, streamers, strict=True)
            ]
        )
        while session.live:
            session.advance()
    return [request.generation for request in requests if request.generation is not None]
