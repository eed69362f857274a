"""The model `mosaic` of lm-eval: generation through `mosaic.LLM`, likelihoods by a family's published estimate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from mosaic.decoding.config import GenerationConfig
from mosaic.errors import MissingExtra, UsageError
from mosaic.evaluation.likelihood import Pair, are_greedy, estimate_of, log_likelihoods
from mosaic.jobs import LLM, SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingExtra("lm-eval", "eval", "`python -m mosaic.evaluation`") from error

__all__ = ["MosaicLM", "main"]

_log = logging.getLogger(__name__)

_OPTIONS: Final = {entry.name for entry in fields(GenerationConfig)} - {
    "gen_length",
    "temperature",
    "top_p",
    "top_k",
    "seed",
}


class MosaicLM(TemplateLM):
    """A model as lm-eval asks it.

    Parameters
    ----------
    pretrained
        As for `mosaic.compile`.
    batch_size
        Copies whose numbers of masks are drawn together (`strata` of `log_likelihoods`).
    mc_num
        Masked copies for each likelihood.
    check_greedy
        Whether `is_greedy` is found out, which takes a step for each token, or said to be false, as it is where a family's authors
        leave it open. Accuracies of several choices do not depend on it.
    max_length
        Tokens of a window in which `loglikelihood_rolling` estimates; None: the model's longest context.
    max_gen_toks
        Tokens of an answer, where a task says nothing.
    seed
        Of all draws.
    device
        A profile, as for `mosaic.compile`.
    options
        Fields of `GenerationConfig`, such as `block_length` and `steps`, for generation; others as for `mosaic.LLM`.
    """

    def __init__(
        self, pretrained: str, *, batch_size: int | str = 32, mc_num: int = 128, check_greedy: bool = True,
        max_length: int | None = None, max_gen_toks: int = 256, seed: int = 0, device: str | None = None,
        max_batch_size: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        # lm-eval's own default is 1, which would spread nothing, and it may be "auto"
        self._strata = (
            min(int(batch_size), mc_num) if str(batch_size).isdigit() and int(batch_size) > 1 else min(32, mc_num)
        )
        self._samples, self._check_greedy, self._seed, self._max_gen_toks = mc_num, check_greedy, seed, max_gen_toks
        self._decoding = {name: options.pop(name) for name in list(options) if name in _OPTIONS}
        if device and device.startswith("cuda"):  # lm-eval's own default, where nothing is said
            _log.warning(
                "the device '%s' is no profile of Mosaic's: running on the CPU; give for example --device h200", device
            )
            device = None
        self._llm = LLM(pretrained, seed=seed, device=device, **options)
        self._name = pretrained
        self._window = max_length or self._llm.model.architecture.max_context or 4096

    @property
    def eot_token_id(self) -> int:
        """The first token that ends an answer."""
        return int(self._llm.model.architecture.eos_token_ids[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids, with what the tokenizer puts around a text unless that is not wanted."""
        return self._llm.get_tokenizer().encode(string, add_special_tokens=add_special_tokens is not False)

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keeps prompts under."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the checkpoint's template, for lm-eval's records."""
        found: str | None = self._llm.get_tokenizer().info().get("chat_template") if chat_template else None
        return found

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:  # fmt: skip
        """Write a conversation in the checkpoint's template."""
        if not add_generation_prompt:
            raise UsageError(
                "chats that begin the answer (gen_prefix): Mosaic's templates end where the answer begins."
            )
        return self._llm.get_tokenizer().render_chat(chat_history)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts, each with its own options, as many at once as fit."""
        params = [self._params(request.args[1]) for request in requests]
        answers = self._llm.generate([request.args[0] for request in requests], params, use_tqdm=not disable_tqdm)
        texts = []
        for request, found in zip(requests, answers, strict=True):
            if found.error is not None:
                raise found.error
            texts.append(found.outputs[0].text)
            self.cache_hook.add_partial("generate_until", (request.args[0], request.args[1]), texts[-1])
        return texts

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        """A task's options; text that ends an answer may be a special token, which no text of an answer has."""
        until = options.get("until") or []
        texts, ends = [until] if isinstance(until, str) else list(until), []
        tokenizer = self._llm.get_tokenizer()
        for text in [*texts]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 and not tokenizer.decode(ids):
                texts.remove(text)
                ends.append(ids[0])
        sampled = options.get("do_sample", True)
        return SamplingParams(
            max_tokens=int(options.get("max_gen_toks", self._max_gen_toks)), stop=[text for text in texts if text],
            stop_token_ids=ends, temperature=float(options.get("temperature", 0.0)) if sampled else 0.0,
            top_p=options.get("top_p"), top_k=options.get("top_k"), extra_args=self._decoding,
        )  # fmt: skip

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Estimate the likelihood of continuations; an empty context stays empty."""
        pairs = []
        for context, wanted in (request.args for request in requests):
            pairs.append(self._encode_pair(context, wanted) if context else ([], self.tok_encode(wanted)))
        return self._scored(requests, pairs)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self._estimate([(context, wanted) for _, context, wanted in requests])

    def _scored(self, requests: Sequence[Any], pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        found = self._estimate(pairs)
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, one)
        return found

    def _estimate(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        model, found = self._llm.model, self._likelihoods(pairs)
        checked = self._check_greedy and estimate_of(model).greedy
        if self._check_greedy and not checked:
            _log.warning(
                "is_greedy is False throughout, as in the authors' script for '%s': accuracies that need it say nothing",
                model.model.family,
            )
        greedy = are_greedy(model, pairs) if checked else [False] * len(pairs)
        return list(zip(found, greedy, strict=True))

    def _likelihoods(self, pairs: Sequence[Pair]) -> list[float]:
        model, tokenizer, start = self._llm.model, self._llm.get_tokenizer(), list[int]()
        if estimate_of(model).framed:
            start = tokenizer.encode(tokenizer.info()["bos_token"] or "", add_special_tokens=False)
        framed = [([*start, *context], wanted) for context, wanted in pairs]
        return log_likelihoods(model, framed, samples=self._samples, strata=self._strata, seed=self._seed)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Estimate the likelihood of whole texts, window by window, each without a context."""
        found = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows: list[Pair] = [
                ([], ids[start : start + self._window]) for start in range(0, len(ids), self._window)
            ]
            found.append(sum(self._likelihoods(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found


def main() -> None:
    """Run lm-eval's command, whose `--model` may be `mosaic`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


register_model("mosaic")(MosaicLM)
