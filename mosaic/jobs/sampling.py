"""vLLM's `SamplingParams` and `CompletionOutput`, where their words mean the same here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from mosaic.decoding.config import ALGORITHMS, GenerationConfig, NamedAlgorithm, own_algorithm, with_options
from mosaic.decoding.live import Submission
from mosaic.decoding.prompts import is_integer
from mosaic.decoding.text import token_texts
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mosaic.decoding.live import Generation
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.models.architecture import Architecture

__all__ = ["CompletionOutput", "SamplingParams", "completion", "submissions"]

_NEXT_ANSWER: Final = 1 << 32
"""Between the numbers by which two answers to one prompt draw: beyond those of all prompts of a job."""
_TRUTHS: Final = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
_ALL: Final = {"top_p": (1.0,), "top_k": (0, -1)}
"""Values that keep every token, which any algorithm does by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample, in vLLM's words and with its defaults.

    Parameters
    ----------
    n
        Answers to each prompt, each drawn by itself.
    temperature, top_p, top_k
        Of the distribution of each token; top_p 1 and top_k 0 or -1 keep all tokens, None is the algorithm's own.
    seed
        Of all random draws; None: that of the `LLM`.
    stop
        Texts at the first of which an answer is cut, without it unless `include_stop_str_in_output`. Steps behind it have run.
    stop_token_ids
        Tokens behind the first of which an answer is cut; its text is left out, as of `stop`.
    ignore_eos
        Go on behind an end-of-sequence token.
    max_tokens
        Tokens to generate: the `gen_length` of the canvas.
    detokenize
        Whether there is text, or token ids alone.
    skip_special_tokens
        Leave special tokens out of the text.
    extra_args
        Any other field of `GenerationConfig`, by name, such as {"steps": 64, "attention": "mage"}.
    presence_penalty, frequency_penalty, repetition_penalty, min_p, min_tokens, logprobs, prompt_logprobs, logit_bias
        Refused, as all further options of vLLM are, unless they are left as they are: no algorithm here has them.

    Raises
    ------
    UsageError
        In one line, if an option is refused or its value cannot be.

    Examples
    --------
    >>> SamplingParams(temperature=0, max_tokens=64, stop=["Q:"]).n
    1
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = 16
    detokenize: bool = True
    skip_special_tokens: bool = True
    extra_args: Mapping[str, Any] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        names = [entry.name for entry in fields(self)]
        for entry in fields(self)[names.index("extra_args") + 1 :]:
            if (value := getattr(self, entry.name)) not in (entry.default, {}, []):
                raise UsageError(f"{entry.name}={value!r}: no decoding algorithm here has this; leave it out.")
        for name in _TRUTHS:
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name}: expected True or False, got {value!r}.")
        if not is_integer(self.n) or self.n < 1:
            raise UsageError(f"n: expected a number of answers, at least 1, got {self.n!r}.")
        if self.max_tokens is None:
            raise UsageError("max_tokens: a diffusion model fills a canvas of a given length; give a number.")
        if self.n > 1 and self.temperature == 0:
            raise UsageError(
                f"n={self.n} at temperature 0 would give the same answer {self.n} times; raise temperature."
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop: expected a text or a list of texts, got {self.stop!r}.")
        object.__setattr__(self, "stop", tuple(stop))
        ends = self.stop_token_ids or ()
        if not isinstance(ends, list | tuple) or not all(map(is_integer, ends)):
            raise UsageError(f"stop_token_ids: expected a list of token ids, got {self.stop_token_ids!r}.")
        self.config(GenerationConfig())

    def config(self, base: GenerationConfig, arch: Architecture | None = None) -> GenerationConfig:
        """Return a config with these options; `arch` says whether its algorithm asks for `top_p` and `top_k`."""
        options = {
            "gen_length": self.max_tokens, "temperature": self.temperature, "stop_at_eos": not self.ignore_eos,
            **({} if self.seed is None else {"seed": self.seed}), **(self.extra_args or {}),
        }  # fmt: skip
        config = with_options(base, options)
        taken = frozenset[str]()
        if arch is not None:
            chosen = config.algorithm or own_algorithm(arch)
            taken = (chosen.traits if isinstance(chosen, NamedAlgorithm) else ALGORITHMS[chosen]).options
        for name, neutral in _ALL.items():
            if (value := getattr(self, name)) is not None and (name in taken or value not in neutral):
                config = with_options(config, {name: neutral[0] if value in neutral else value})
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer, in vLLM's words.

    Parameters
    ----------
    index
        Its place among the answers to the prompt.
    text
        Empty without a tokenizer.
    token_ids
        Up to and with what ended it, as far as it is among them.
    finish_reason
        "stop" at an end-of-sequence token or what the parameters name, "length" at `max_tokens`.
    stop_reason
        The text or token of the parameters that ended it.
    steps
        Steps that were run for it.
    logprobs, cumulative_logprob
        None: the step that decides a token does not say how likely it was behind those before it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    steps: int = 0
    logprobs: None = None
    cumulative_logprob: None = None


def submissions(prompt: Tensor, config: GenerationConfig, number: int, answers: int) -> list[Submission]:
    """Return the submissions of the answers to prompt `number` of a job, int64 [P]; the first one draws by that number."""
    return [
        Submission(prompt=prompt, config=config, request_id=number + place * _NEXT_ANSWER) for place in range(answers)
    ]


def completion(index: int, found: Generation, params: SamplingParams, tokenizer: Tokenizer | None) -> CompletionOutput:
    """Return a generation as vLLM would, cut where the parameters say."""
    ids: list[int] = found.token_ids.tolist()
    ends = [place for place, token in enumerate(ids) if token in (params.stop_token_ids or ())]
    reason: int | str | None = None
    if ends:
        reason, ids = ids[ends[0]], ids[: ends[0] + 1]

    def decode(part: list[int]) -> str:
        return "" if tokenizer is None else tokenizer.decode(part, skip_special_tokens=params.skip_special_tokens)

    shown = ids if reason is None or params.include_stop_str_in_output else ids[:-1]
    text = decode(shown) if params.detokenize else ""
    if params.stop and tokenizer is not None:
        whole, longest = "", max(map(len, params.stop))
        for kept, added in enumerate(token_texts(decode, shown), start=1):
            start, whole = max(len(whole) - longest, 0), whole + added
            at, stop = min(
                ((whole.find(stop, start), stop) for stop in params.stop if stop in whole[start:]), default=(-1, "")
            )
            if stop:
                reason, ids = stop, ids[:kept]
                text = whole[: at + len(stop) * params.include_stop_str_in_output] if params.detokenize else ""
                break
    ended = "stop" if reason is not None or found.finish == "eos" else found.finish
    return CompletionOutput(
        index=index, text=text, token_ids=ids, finish_reason=ended, stop_reason=reason, steps=found.steps
    )
