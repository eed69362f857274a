"""`LLM`: a model and its prompts, in the manner of vLLM's class of this name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.prompts import is_integer, listed, token_ids, tokenizer_of
from mosaic.decoding.session import Session
from mosaic.decoding.stream import MOST_LIVE, Stream
from mosaic.devices import load_device
from mosaic.errors import MosaicError, UnknownName, UsageError
from mosaic.jobs.progress import Progress
from mosaic.jobs.sampling import CompletionOutput, SamplingParams, completion, submissions
from mosaic.runtime.compile import compile
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.units import GIB

if TYPE_CHECKING:
    from mosaic.decoding.live import Submission
    from mosaic.decoding.prompts import Prompt
    from mosaic.decoding.tokenizer import Tokenizer

__all__ = ["LLM", "RequestOutput"]

PromptType: TypeAlias = "Prompt | Mapping[str, Any]"
"""A prompt, or vLLM's {"prompt": text} or {"prompt_token_ids": [...]}."""
_OF_COMPILE: Final = frozenset(signature(compile).parameters) - {"model", "weights", "dims", "seed", "max_tokens"}
_OF_VLLM: Final = frozenset({
    "block_size", "code_revision", "compilation_config", "disable_custom_all_reduce", "disable_log_stats", "download_dir",
    "enable_chunked_prefill", "enable_lora", "enable_prefix_caching", "enforce_eager", "hf_overrides", "hf_token",
    "kv_cache_dtype", "limit_mm_per_prompt", "load_format", "max_seq_len_to_capture", "pipeline_parallel_size",
    "quantization", "revision", "runner", "skip_tokenizer_init", "speculative_config", "swap_space", "task",
    "tensor_parallel_size", "tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What came of one prompt, in vLLM's words.

    Parameters
    ----------
    request_id
        The prompt's place, as text.
    prompt
        The text, if it was text.
    prompt_token_ids
        Empty if it could not be read.
    outputs
        `n` answers; none where there is an error.
    error
        Why there is no answer: the prompt cannot be, or does not fit, alone either.
    finished
        True.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: MosaicError | None = None
    finished: bool = True


class LLM(ClosesOnExit):
    """A model that answers lists of prompts, with as many live at once as its memory admits.

    Parameters
    ----------
    model
        As for `mosaic.compile`, or a compiled model, which stays open when this is closed.
    seed
        Of random draws whose `SamplingParams` have none, and of random weights.
    max_num_seqs
        The most prompts that are live at once.
    max_num_batched_tokens
        Tokens of a step, as for a `Session`; None: its own.
    max_model_len
        The most positions of a prompt and its answer; None: the model's own.
    gpu_memory_utilization
        The share of the device's memory that may be used; instead of it `budget`, in bytes.
    cpu_offload_gb
        GiB of host memory for weights; instead of it `host_budget`, in bytes. None: 0, as in vLLM.
    options
        Keywords of `mosaic.compile`, such as `device` and `dtype` ("auto": the checkpoint's). Others of vLLM's are refused by name.

    Raises
    ------
    UsageError
        In one line, if an option cannot be.
    DoesNotFit
        If not even one token fits.

    Examples
    --------
    >>> from mosaic import LLM, SamplingParams
    >>> with LLM("small-sdar", dtype="float32") as llm:
    ...     (answer,) = llm.generate(["Tom had"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    >>> len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason
    (8, 'length')
    """

    def __init__(
        self, model: Any, *, seed: int = 0, max_num_seqs: int = MOST_LIVE, max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None, gpu_memory_utilization: float | None = None, cpu_offload_gb: float | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        for name in options:
            if name in _OF_VLLM:
                raise UsageError(f"{name}={options[name]!r}: Mosaic has nothing that this would change; leave it out.")
            if name not in _OF_COMPILE:
                raise UnknownName("option of LLM", name, sorted(_OF_COMPILE))
        if not is_integer(max_num_seqs) or max_num_seqs < 1:
            raise UsageError(f"max_num_seqs: expected a number of prompts, at least 1, got {max_num_seqs!r}.")
        if max_model_len is not None and (not is_integer(max_model_len) or max_model_len < 1):
            raise UsageError(f"max_model_len: expected a number of tokens, at least 1, got {max_model_len!r}.")
        self._owned = not isinstance(model, CompiledModel)
        if self._owned:
            given = {**options, **_budgets(options, gpu_memory_utilization, cpu_offload_gb)}
            given["dtype"] = None if given.get("dtype") == "auto" else given.get("dtype")
            model = compile(model, seed=seed, max_tokens=max_model_len, **given)
        elif options:
            raise UsageError(f"{next(iter(options))}: the model is compiled already; give it to mosaic.compile.")
        self.model: CompiledModel = model
        self._seed, self._most_live, self._longest = seed, max_num_seqs, max_model_len
        self._of_session = {} if max_num_batched_tokens is None else {"max_num_batched_tokens": max_num_batched_tokens}
        self._tokenizer: Tokenizer | None = None

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, read once."""
        self._tokenizer = self._tokenizer or tokenizer_of(self.model.model)
        return self._tokenizer

    def generate(
        self, prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer all prompts.

        Prompt i draws as request i of `mosaic.generate` does, alone or beside others; calls with the same seed draw the same.

        Parameters
        ----------
        prompts
            One or several: texts, token ids, conversations, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params
            For all, or a list of one for each.
        use_tqdm
            Whether to show the progress on stderr.

        Returns
        -------
        list of RequestOutput
            One for each prompt, in order; those that cannot be answered have an `error`.

        Raises
        ------
        UsageError
            If the parameters cannot be, or are not for this model: before any step has run.
        """
        one = isinstance(prompts, Mapping)
        several = isinstance(prompts, Sequence) and any(map(_is_mapped, prompts))
        given: list[Any] = [prompts] if one else list(prompts) if several else listed(prompts)
        return self._answers(given, sampling_params, use_tqdm)

    def chat(
        self, messages: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, use_tqdm: bool = True,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer a conversation, or each of several, as `generate` does."""
        return self._answers(listed(messages), sampling_params, use_tqdm)

    def close(self) -> None:
        """Close the model, unless it was given compiled."""
        if self._owned:
            self.model.close()

    def _answers(
        self, prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None, shown: bool
    ) -> list[RequestOutput]:
        params = SamplingParams() if params is None else params
        chosen = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(chosen) != len(prompts):
            raise UsageError(f"{len(chosen)} sampling_params for {len(prompts)} prompts; give one, or one for each.")
        arch, configs = self.model.architecture, dict[int, GenerationConfig]()
        for one in chosen:
            if not isinstance(one, SamplingParams):
                raise UsageError(f"sampling_params: expected SamplingParams(…), got {type(one).__name__}.")
            if id(one) not in configs:
                configs[id(one)] = one.config(GenerationConfig(seed=self._seed), arch)
                resolve(configs[id(one)], arch)
        found: list[RequestOutput] = [
            RequestOutput(request_id=str(place), prompt=text, prompt_token_ids=[], outputs=[])
            for place, text in enumerate(map(_text, prompts))
        ]
        done = 0

        def entries() -> Iterator[tuple[int, list[Submission]]]:
            for place, (prompt, one) in enumerate(zip(prompts, chosen, strict=True)):
                try:
                    ids = token_ids(_prompt(prompt), self.get_tokenizer, which=f"prompt {place}")
                    self._check(ids.numel() + one.max_tokens, place)
                except UsageError as error:
                    found[place] = replace(found[place], error=error)
                    yield place, []
                    continue
                found[place] = replace(found[place], prompt_token_ids=ids.tolist())
                yield place, submissions(ids, configs[id(one)], place, one.n)

        progress = Progress(self.model.memory, lambda: done / max(len(prompts), 1))
        has_text = self.model.model.path is not None and any(one.detokenize for one in chosen)
        tokenizer = self.get_tokenizer() if has_text else None
        with (
            interrupts_held(), self.model.exclusive(), Session(self.model, **self._of_session) as session,
            interrupts_let_through(), progress if shown else nullcontext(),
        ):  # fmt: skip
            stream = Stream(session, most_live=self._most_live, after_step=progress if shown else None)
            for outcome in stream.run(entries(), ordered=False):
                place = outcome.number
                answers = [completion(at, one, chosen[place], tokenizer) for at, one in enumerate(outcome.generations)]
                found[place] = replace(found[place], outputs=answers, error=outcome.error or found[place].error)
                progress.answers += 1
                done += 1
        return found

    def _check(self, positions: int, place: int) -> None:
        if self._longest is not None and positions > self._longest:
            raise UsageError(
                f"prompt {place} and max_tokens take {positions:,} positions, max_model_len is {self._longest:,}; shorten it."
            )


def _budgets(options: Mapping[str, Any], share: float | None, offload_gb: float | None) -> dict[str, Any]:
    """The budgets of device and host, in bytes, that vLLM's words name."""
    found = dict[str, Any]()
    for name, value, of_ours in (
        ("gpu_memory_utilization", share, "budget"),
        ("cpu_offload_gb", offload_gb, "host_budget"),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UsageError(f"{name}: expected a number, at least 0, got {value!r}.")
        if options.get(of_ours) is not None:
            raise UsageError(f"{name}={value} and {of_ours}={options[of_ours]!r}: give one of the two.")
    if share is not None:
        if not 0 < share <= 1:
            raise UsageError(f"gpu_memory_utilization: expected a share above 0, at most 1, got {share}.")
        found["budget"] = int(load_device(options.get("device") or "cpu").memory_bytes * share)
    if options.get("host_budget") is None:
        found["host_budget"] = int((offload_gb or 0) * GIB)
    return found


def _is_mapped(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and not {"prompt", "prompt_token_ids"}.isdisjoint(prompt)


def _text(prompt: Any) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _prompt(prompt: Any) -> Any:
    """What Mosaic takes for a prompt of vLLM."""
    if not _is_mapped(prompt):
        return prompt
    if other := sorted({*prompt} - {"prompt", "prompt_token_ids"}):
        raise UsageError(
            f"a prompt of the key '{other[0]}': Mosaic reads 'prompt' or 'prompt_token_ids'; leave it out."
        )
    return prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
