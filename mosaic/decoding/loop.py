"""`generate`: a session that every prompt is submitted to at once, advanced until all have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mosaic.decoding.config import GenerationConfig, with_options
from mosaic.decoding.live import Generation, Submission
from mosaic.decoding.prompts import Prompt, listed
from mosaic.decoding.session import Session
from mosaic.decoding.streaming import OnStep, Streamer, of_each
from mosaic.errors import UsageError
from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through

if TYPE_CHECKING:
    from mosaic.runtime.steps import StepRunner

__all__ = ["generate"]


def generate(
    model: StepRunner,
    prompts: Prompt | Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    streamer: Streamer | Sequence[Streamer] | None = None,
    on_step: OnStep | None = None,
    request_ids: Sequence[int] | None = None,
    **options: Any,
) -> list[Generation]:
    """Generate an answer to every prompt.

    Parameters
    ----------
    model
        A compiled model; for text, one of a checkpoint directory that has a tokenizer.
    prompts
        One prompt or several: text, token ids [P] or [B, P], or conversations.
    config
        How to generate; `options` are its fields by name, and come before it.
    streamer
        One for a single prompt, or one for each prompt.
    on_step
        Called with every `Step`.
    request_ids
        The numbers that stand for the requests in random draws; 0, 1, … if not given. A request draws the same tokens
        alone as in a batch if it has the same number.

    Returns
    -------
    list of Generation
        One per prompt; with `text` where the prompt was text or a conversation.

    Raises
    ------
    UsageError
        If an option or a prompt cannot be.
    CheckpointError
        If a prompt is text and there is no tokenizer.
    DoesNotFit
        If the generation would not fit the budget: before any step has run.
    """
    chosen, given = with_options(config, options), listed(prompts)
    if not given:
        raise UsageError("no prompt was given; give at least one.")
    numbers = of_each("request_ids", range(len(given)) if request_ids is None else request_ids, len(given))
    streamers = of_each("streamer", [None] * len(given) if streamer is None else streamer, len(given))
    submissions = [
        Submission(prompt=prompt, config=chosen, request_id=number, streamer=shown, on_step=on_step)
        for prompt, number, shown in zip(given, numbers, streamers, strict=True)
    ]
    with interrupts_held(), model.exclusive(), Session(model) as session, interrupts_let_through():
        requests = session.submit_all(submissions)
        while session.live:
            session.advance()
    return [request.generation for request in requests if request.generation is not None]
