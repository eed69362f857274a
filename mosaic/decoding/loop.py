"""The loop: packs what the running requests ask for into steps, hands the outcomes back, and reports.

Requests never wait for each other and share nothing but the steps, so each gets the tokens that it would get alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mosaic.decoding.algorithms import algorithm_of, canvas_length, shapes
from mosaic.decoding.canvas import Canvas, Steps
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.streaming import DraftStreamer, OnStep, Step, Streamer, streamers_of
from mosaic.errors import UsageError
from mosaic.runtime.steps import StepRequest, StepResult, StepRunner

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = ["Generation", "generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one request generated.

    Parameters
    ----------
    prompt_ids
        int64 [P].
    token_ids
        int64 [n], the answer, up to and with the first end-of-sequence token where generation stops at it.
    confidence
        float32 [n], the score that each token was committed by.
    finish
        "eos" or "length".
    steps
        Steps that were run for it, prefill and commits included.
    text
        The answer as text, where the prompt was text.
    """

    prompt_ids: Tensor
    token_ids: Tensor
    confidence: Tensor
    finish: Literal["eos", "length"]
    steps: int
    text: str | None = None


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in flight: its canvas, its algorithm, what that waits for, and what has been shown."""

    place: int
    canvas: Canvas
    algorithm: Steps
    streamer: Streamer | None
    pending: StepRequest | None = field(init=False)
    steps: int = 0
    shown: int = field(init=False)

    def __post_init__(self) -> None:
        self.shown = self.canvas.prompt_len
        self.pending = next(self.algorithm, None)
        if self.streamer is not None:
            self.streamer.put(self.canvas.prompt.clone())

    def take(self, result: StepResult) -> Step:
        """Go on with an outcome, to the next request or the end."""
        assert self.pending is not None
        phase, canvas = self.pending.phase, self.canvas
        canvas.last = None
        block = canvas.block
        try:
            self.pending = self.algorithm.send(result)
        except StopIteration:
            self.pending = None
            canvas.close()
        self.steps += 1
        nothing = torch.empty(0, dtype=torch.int64)
        last = canvas.last
        return Step(
            request=self.place,
            step=self.steps,
            block=block,
            phase=phase.name,
            masked=int(canvas.masked[canvas.prompt_len : canvas.end].sum()),
            positions=last.positions if last else nothing,
            token_ids=last.token_ids if last else nothing.clone(),
            confidence=last.confidence if last else torch.empty(0),
            plan=result.plan,
            peak_bytes=result.plan.total_bytes,
            seconds=result.seconds,
        )

    def show(self) -> None:
        """Feed the streamer what is new."""
        canvas, streamer = self.canvas, self.streamer
        if streamer is None:
            return
        if isinstance(streamer, DraftStreamer):
            answer = slice(canvas.prompt_len, canvas.end)
            streamer.put_draft(canvas.tokens[answer].clone(), canvas.confidence[answer].clone())
        end = _answer_end(canvas)
        if end > self.shown:
            streamer.put(canvas.tokens[self.shown : end].clone())
            self.shown = end
        if self.pending is None:
            streamer.end()


def _answer_end(canvas: Canvas) -> int:
    """Where the final text ends: after the first end-of-sequence token, if generation stops at it."""
    return canvas.final if canvas.eos is None else canvas.eos + 1


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
        One for a single prompt, or one a prompt.
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
    arch = runner.architecture
    found = resolve(config, arch)
    lengths = _checked(prompts, found, arch)
    numbers = list(range(len(lengths)) if request_ids is None else request_ids)
    if len(numbers) != len(lengths):
        raise UsageError(f"{len(numbers)} request_ids for {len(lengths)} prompts; give one a prompt.")
    streamers = streamers_of(streamer, len(lengths))
    with runner.exclusive():
        runner.check(shapes(config, lengths, arch, numbers))
        canvases = [
            Canvas(
                prompt=prompt.to("cpu", torch.int64),
                config=found,
                architecture=arch,
                request=number,
                length=canvas_length(found, arch, prompt.numel()),
                open_sequence=runner.open_sequence,
            )
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        try:
            return _run(runner, canvases, streamers, on_step)
        finally:
            for canvas in canvases:
                canvas.close()


def _checked(prompts: Sequence[Tensor], config: GenerationConfig, arch: Architecture) -> list[int]:
    """Check the prompts against the options, resolved, and the model; give their lengths."""
    if not prompts:
        raise UsageError("no prompt was given; give at least one.")
    if not 0 <= arch.mask_token_id < arch.vocabulary:
        raise UsageError(
            f"config.json names the mask token {arch.mask_token_id}, the model has tokens 0 to {arch.vocabulary - 1}; "
            "give mask_token_id there."
        )
    for place, prompt in enumerate(prompts):
        which = f"prompt {place}" if len(prompts) > 1 else "the prompt"
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
            raise UsageError(f"{which}: expected token ids [P], got {prompt.dtype} of shape {list(prompt.shape)}.")
        if not prompt.numel():
            raise UsageError(f"{which} is empty; give at least one token.")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= arch.vocabulary:
            raise UsageError(
                f"{which}: expected ids in [0, {arch.vocabulary}), got {low if low < 0 else high}; is it of another tokenizer?"
            )
        found = (prompt == arch.mask_token_id).nonzero()
        if len(found):
            raise UsageError(
                f"{which} has the mask token {arch.mask_token_id} at position {int(found[0])}, where it would be "
                "overwritten; remove it."
            )
        length = canvas_length(config, arch, prompt.numel())
        if arch.max_context and length > arch.max_context:
            room = arch.max_context - (length - prompt.numel())
            shorter = f"shorten the prompt to {room:,} tokens or lower gen_length" if room > 0 else "lower gen_length"
            raise UsageError(
                f"{which} of {prompt.numel():,} tokens and gen_length {config.gen_length:,} take {length:,} positions, the "
                f"model has {arch.max_context:,}; {shorter}."
            )
    return [prompt.numel() for prompt in prompts]


def _run(
    runner: StepRunner, canvases: Sequence[Canvas], streamers: Sequence[Streamer | None], on_step: OnStep | None
) -> list[Generation]:
    """Run all requests to their ends."""
    requests = [
        _Running(place=place, canvas=canvas, algorithm=algorithm_of(canvas.config).decode(canvas), streamer=streamer)
        for place, (canvas, streamer) in enumerate(zip(canvases, streamers, strict=True))
    ]
    while running := [request for request in requests if request.pending is not None]:
        for group in _packed(running):
            results = runner.step([request.pending for request in group if request.pending is not None])
            for request, result in zip(group, results, strict=True):
                step = request.take(result)
                if on_step is not None:
                    on_step(step)
                request.show()
    return [_outcome(request) for request in requests]


def _packed(running: Sequence[_Running]) -> list[list[_Running]]:
    """Group requests whose steps can be one: of the same phase and sampling."""
    groups: dict[Hashable, list[_Running]] = {}
    for request in running:
        asked = request.pending
        assert asked is not None
        settings = (asked.temperature, asked.top_p, asked.top_k, asked.score_temperature, asked.guidance)
        groups.setdefault((asked.phase, *settings), []).append(request)
    return list(groups.values())


def _outcome(request: _Running) -> Generation:
    canvas = request.canvas
    answer = slice(canvas.prompt_len, _answer_end(canvas))
    return Generation(
        prompt_ids=canvas.prompt,
        token_ids=canvas.tokens[answer].clone(),
        confidence=canvas.confidence[answer].clone(),
        finish="length" if canvas.eos is None else "eos",
        steps=request.steps,
    )
