"""`mosaic generate`: text from a prompt, with a live view of the canvas."""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mosaic.cli import decoding_options as o
from mosaic.cli.completion import model_names
from mosaic.cli.job import SKIP, answer_file
from mosaic.cli.output import note, print_json
from mosaic.cli.request import own_dtype, require_torch, scaled
from mosaic.errors import DoesNotFit, UsageError
from mosaic.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from mosaic.cli.live import Lines, LiveView, Record
    from mosaic.decoding.config import GenerationConfig
    from mosaic.decoding.live import Generation
    from mosaic.decoding.streaming import Step
    from mosaic.decoding.text import TextStreamer
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.models import Model
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.runtime.steps import StepRunner

    View: TypeAlias = LiveView | Lines


def generate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="small, small-sdar; a checkpoint directory; or a preset (random weights).", autocompletion=model_names
        ),
    ] = "small",
    prompt: Annotated[str | None, typer.Option(help="The prompt; - or nothing reads standard input.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Put the prompt into the chat template; the small models' default."),
    ] = None,
    gen_length: Annotated[int | None, typer.Option(help="Tokens to generate, default 128.")] = None,
    steps: o.Steps = None,
    block_length: o.BlockLength = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    remasking: o.Remasking = None,
    algorithm: o.Algorithm = None,
    alg: o.Alg = None,
    alg_temp: o.AlgTemp = None,
    threshold: o.Threshold = None,
    factor: o.Factor = None,
    cache: o.Cache = None,
    small_block_length: o.SmallBlockLength = None,
    edit_threshold: o.EditThreshold = None,
    max_post_steps: o.MaxPostSteps = None,
    minimal_topk: o.MinimalTopK = None,
    attention: o.Attention = None,
    eviction: o.Eviction = None,
    block_cache: o.BlockCache = None,
    block_commit: o.BlockCommit = None,
    rope_scaling: o.RopeScaling = None,
    eps: o.Eps = None,
    cfg_scale: o.CfgScale = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling; the same seed gives the same text.")] = None,
    budget: o.Budget = None,
    host_budget: Annotated[str | None, typer.Option(help="Pinned host memory for weights and hidden states.")] = None,
    device: o.Where = "cpu",
    dtype: o.DType = None,
    threads: o.Threads = None,
    batch_invariant: o.BatchInvariant = False,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of requests instead of a prompt, one JSON object per line.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the answers to --prompts are appended; a job goes on from what is there.")
    ] = None,
    as_finished: Annotated[
        bool, typer.Option("--as-finished", help="Append answers as they end, not in the order of --prompts.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option(SKIP, help="Name lines of --prompts that are no requests, and go on.")
    ] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests of --prompts that are live at once, at most; 256.")
    ] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="Write text as it is committed, no canvas.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Generate text within a plan. In a terminal the canvas fills in live; elsewhere stdout gets the text alone."""
    require_torch("`mosaic generate`")
    if prompts is not None and prompt is not None:
        raise UsageError("give --prompt or --prompts, not both.")
    if prompts is None and (out is not None or as_finished or skip_bad_lines or max_num_seqs is not None):
        raise UsageError(
            "--out, --as-finished, --skip-bad-lines and --max-num-seqs go with --prompts, a file of requests."
        )
    text = _prompt(prompt) if prompts is None else ""
    from mosaic.decoding.config import GenerationConfig, resolve
    from mosaic.decoding.text import TextStreamer
    from mosaic.models import SHIPPED, load

    asked = GenerationConfig(**o.given(context))
    described = scaled(load(model), rope_scaling)
    chat = model in SHIPPED if chat is None else chat
    dtype = dtype or own_dtype(model, device)
    opened = partial(
        _compiled, described, device=device, budget=budget, host_budget=host_budget, dtype=dtype, threads=threads,
        batch_invariant=batch_invariant, seed=asked.seed,
    )  # fmt: skip
    if prompts is not None:
        answer_file(
            described, opened, asked, prompts=prompts, out=out, chat=chat, ordered=not as_finished, skips=skip_bad_lines,
            most_live=max_num_seqs, as_json=as_json,
        )  # fmt: skip
        return
    config = _of_one_request(asked)
    tokenizer = _tokenizer(described)
    prompt_ids = _encode(text, tokenizer, chat, described)
    if tokenizer is None:
        note(
            f"{described.name} has random weights and no tokenizer: the bytes of the prompt stand for tokens, "
            "token ids are printed, and the output is noise."
        )
    job = _Job(
        model=described, opened=opened, tokenizer=tokenizer, prompt_ids=prompt_ids, asked=config,
        config=resolve(config, described.architecture), chat=chat, device=device, budget=budget, host_budget=host_budget,
        dtype=dtype, batch_invariant=batch_invariant,
    )  # fmt: skip
    for warning in _outlook(job):
        note(warning)
    if as_json:
        print_json(_document(job, *_decode(job)))
        return
    terminal = sys.stdout.isatty()
    drawn = terminal and os.environ.get("TERM") != "dumb"  # without colour every state still has its cue
    if no_live:
        found, record, _ = _decode(job, streamer=TextStreamer(_Shown(tokenizer), skip_prompt=True))
    else:
        found, record, _ = _decode(job, view=_live_view if drawn else _lines)
        _write(_text(job, found, terminal=terminal))
    note(record.summary(len(found.token_ids)))


def _of_one_request(config: GenerationConfig) -> GenerationConfig:
    """The options for a request that is alone, if policies do not state how many requests share a step."""
    from mosaic.models.policies.policy import Options
    from mosaic.models.policies.registry import KINDS

    given: dict[str, Any] = {
        name: options.of_one_request() for name in KINDS if isinstance(options := getattr(config, name), Options)
    }
    return replace(config, **given)


# --- the prompt -------------------------------------------------------------------------------------------------------


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise UsageError("give a prompt: --prompt '…', or text on standard input.")
    try:
        text = sys.stdin.read() if given in (None, "-") else str(given)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not {error.encoding} text ({error.reason} at byte {error.start})."
        ) from None
    if not text.strip():
        raise UsageError("the prompt is empty: give --prompt '…', or text on standard input.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(
            f"the prompt is not {sys.stdin.encoding or 'utf-8'} text: it has bytes that are no characters."
        )
    return text if given not in (None, "-") else text.rstrip("\r\n")  # echo and editors end text with a line break


def _tokenizer(model: Model) -> Tokenizer | None:
    """The checkpoint's tokenizer; a preset has none."""
    from mosaic.decoding.tokenizer import Tokenizer

    return None if model.path is None else Tokenizer(model.path, mask=model.architecture.mask_token_id)


def _encode(text: str, tokenizer: Tokenizer | None, chat: bool, model: Model) -> list[int]:
    if tokenizer is not None:
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    if chat:
        raise UsageError(f"--chat needs a checkpoint directory with a chat template; {model.name} is a preset without.")
    return list(text.encode("utf-8", errors="surrogateescape"))


def _outlook(job: _Job) -> list[str]:
    """Warnings about a large model before it is loaded; none for a small one."""
    from mosaic.cli.outlook import LARGE, available_bytes, outlook
    from mosaic.planner import Planner, Request

    if job.model.architecture.parameters < LARGE:
        return []
    model = job.model if job.dtype is None else job.model.with_dtype(job.dtype)
    tokens = len(job.prompt_ids) + job.config.gen_length
    planner = Planner(
        model, device=job.device, budget=job.budget, host_budget=job.host_budget,
        batch_invariant=job.batch_invariant,
    )  # fmt: skip
    plan = planner.plan(Request(seq_lens=(tokens,), masked=job.config.gen_length), limit=False)
    steps, _ = _totals(job.config, len(job.prompt_ids))
    memory = available_bytes() if planner.device.backend == "cpu" else None
    return outlook(plan, steps or job.config.gen_length, memory=memory) if plan.fits else []


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The inputs of a run; `config` has the requested options and the algorithm's defaults."""

    model: Model
    opened: Callable[[], CompiledModel]
    tokenizer: Tokenizer | None
    prompt_ids: list[int]
    asked: GenerationConfig
    config: GenerationConfig
    chat: bool
    device: str
    budget: str | None
    host_budget: str | None
    dtype: str | None
    batch_invariant: bool


def _compiled(model: Model, **options: Any) -> CompiledModel:
    """Load the model."""
    from mosaic.runtime.compile import compile

    try:
        return compile(model, **options)
    except DoesNotFit as misfit:
        raise DoesNotFit(
            f"{model.name} takes {format_bytes(misfit.needed_bytes)} for a single token, the budget is "
            f"{format_bytes(misfit.available_bytes)}: raise --budget, or stream weights with --host-budget.",
            needed_bytes=misfit.needed_bytes,
            available_bytes=misfit.available_bytes,
        ) from None


def _decode(
    job: _Job, *, view: Callable[[_Job, Record], View] | None = None, streamer: TextStreamer | None = None
) -> tuple[Generation, Record, float]:
    """Load the model and generate; return the text, the record of the steps and the seconds of loading."""
    import torch

    from mosaic.cli.live import Record
    from mosaic.decoding import loop

    began = time.perf_counter()
    with job.opened() as compiled:
        loaded = time.perf_counter() - began
        record = Record()
        with nullcontext() if view is None else view(job, record) as shown:

            def watch(step: Step) -> None:
                record(step)
                if shown is not None:
                    shown(step)

            prompt = torch.tensor(job.prompt_ids, dtype=torch.int64)
            try:
                (found,) = loop.generate(compiled, [prompt], job.asked, streamer=streamer, on_step=watch)
            except DoesNotFit as misfit:
                raise _too_long(compiled, job, misfit) from None
    return found, record, loaded


def _too_long(runner: StepRunner, job: _Job, misfit: DoesNotFit) -> DoesNotFit:
    """Raise an error that states the longest prompt that fits."""
    from mosaic.decoding.algorithms import shapes

    def fits(tokens: int) -> bool:
        return runner.admits(shapes(job.asked, [tokens], runner.architecture))

    longest = bisect_left(range(1, len(job.prompt_ids)), True, key=lambda tokens: not fits(tokens))
    needed, available = misfit.needed_bytes, misfit.available_bytes
    remedy = f"the longest prompt that fits has {format_tokens(longest)} tokens" if longest else "no prompt fits"
    return DoesNotFit(
        f"a prompt of {format_tokens(len(job.prompt_ids))} tokens with gen_length {job.config.gen_length} needs "
        f"{format_bytes(needed)}, the budget is {format_bytes(available)}; {remedy}. Shorten it, lower --gen-length or "
        "raise --budget.",
        needed_bytes=needed,
        available_bytes=available,
    )


def _live_view(job: _Job, record: Record) -> View:
    from mosaic.cli.live import LiveView
    from mosaic.cli.output import results
    from mosaic.viz.canvas_picture import CanvasTracker

    config, prompt_tokens = job.config, len(job.prompt_ids)
    title = f"{job.model.name}, {config.algorithm}"
    tracker = CanvasTracker(config.gen_length, _texts(job.tokenizer), title=title, first=prompt_tokens)
    steps, blocks = _totals(config, prompt_tokens)
    return LiveView(results(), tracker, record, steps=steps, blocks=blocks)


def _texts(tokenizer: Tokenizer | None) -> Callable[[Sequence[int]], list[str]]:
    """The text of tokens on the canvas: special ones too, and numbers without a tokenizer."""
    from mosaic.decoding.text import token_texts

    if tokenizer is None:
        return lambda ids: [f"{token} " for token in ids]
    return lambda ids: token_texts(lambda part: tokenizer.decode(part, skip_special_tokens=False), ids)


def _totals(config: GenerationConfig, prompt_tokens: int) -> tuple[int, int]:
    """The expected numbers of steps and blocks; 0 if they depend on the model's confidence."""
    from mosaic.decoding.config import ALGORITHMS

    length = config.block_length
    if not length:
        return config.steps or 0, 0
    if ALGORITHMS[str(config.algorithm)].blockwise:
        return 0, -(-(prompt_tokens + config.gen_length) // length) - prompt_tokens // length
    return config.steps or 0, config.gen_length // length


def _lines(job: _Job, record: Record) -> View:
    from mosaic.cli.live import Lines

    return Lines(record)


# --- what comes out ---------------------------------------------------------------------------------------------------


class _Shown:
    """A tokenizer for `TextStreamer` in terminals, whose decoded text has no control sequences."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text that is safe to print; numbers without a tokenizer."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in token_ids)
        from mosaic.viz.canvas_picture import printable

        return printable(self._tokenizer.decode(token_ids))


def _text(job: _Job, found: Generation, *, terminal: bool) -> str:
    """The final text. In a chat, the leading space of the answer's template is dropped."""
    from mosaic.viz.canvas_picture import printable

    ids = found.token_ids.tolist()
    if job.tokenizer is None:
        return " ".join(map(str, ids))
    text = job.tokenizer.decode(ids)
    text = text.strip() if job.chat else text
    return printable(text) if terminal else text


def _write(text: str) -> None:
    """Text on stdout, whatever its encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def _document(job: _Job, found: Generation, record: Record, loaded: float) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "model": job.model.name,
        "config": asdict(job.config),
        "device": job.device,
        "chat": job.chat,
        "text": None if job.tokenizer is None else _text(job, found, terminal=False),
        "token_ids": found.token_ids.tolist(),
        "finish": found.finish,
        "prompt_tokens": len(job.prompt_ids),
        "steps": record.steps,
        "plans": list(record.plans.values()),
        "peak_bytes": record.peak_bytes,
        "timings": {
            "load_seconds": loaded,
            "generate_seconds": record.seconds,
            "tokens_per_second": record.rate(len(found.token_ids)),
        },
    }
