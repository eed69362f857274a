"""`LLM` in the manner of vLLM: each prompt gets the answer that it gets alone, and what has no meaning here is refused by name."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generate_cli import CONFIG, written_checkpoint

import mosaic
from mosaic import LLM, SamplingParams
from mosaic.decoding import Generation, GenerationConfig, generate
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import DoesNotFit, MosaicError, UsageError
from mosaic.jobs.progress import Progress
from mosaic.jobs.sampling import completion
from mosaic.models import load
from mosaic.runtime.compiled import CompiledModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompiledModel]:
    """A tiny model of random weights whose tokens are bytes."""
    path = written_checkpoint(tmp_path_factory.mktemp("llm"))
    with mosaic.compile(CONFIG, seed=3) as random_weights:
        random_weights.save(path)
    with mosaic.compile(path) as found:
        yield found


def alone(model: CompiledModel, ids: list[int], number: int, **options: Any) -> list[int]:
    config = GenerationConfig(**options)
    (found,) = generate(model, [torch.tensor(ids)], config, request_ids=[number])
    return found.token_ids.tolist()


def test_each_prompt_gets_the_answers_that_it_gets_alone(model: CompiledModel) -> None:
    rng = random.Random(5)
    prompts: list[Any] = []
    for _ in range(24):
        text = "".join(rng.choices("aéz 東?", k=rng.randint(1, 40)))
        prompts.append(
            rng.choice([text, list(text.encode()), {"prompt": text}, {"prompt_token_ids": [*text.encode()]}])
        )
    prompts[7] = [{"role": "user", "content": "hi"}]
    params = [
        SamplingParams(
            temperature=rng.choice([0.5, 1.0]), max_tokens=8, n=rng.choice([1, 1, 2]), ignore_eos=True,
            seed=rng.choice([None, 4]), extra_args={"block_length": 8, "steps": 4},
        )
        for _ in prompts
    ]  # fmt: skip
    found = LLM(model, seed=11, max_num_seqs=7).generate(prompts, params, use_tqdm=False)
    assert [one.request_id for one in found] == [str(place) for place in range(24)]
    tokenizer = Tokenizer(model.model.path or "")
    for place, (prompt, asked, answer) in enumerate(zip(prompts, params, found, strict=True)):
        given = prompt.get("prompt", prompt.get("prompt_token_ids")) if isinstance(prompt, dict) else prompt
        assert answer.prompt == (given if isinstance(given, str) else None) and answer.error is None and answer.finished
        ids = [257, *b"hi", 259] if place == 7 else list(given.encode()) if isinstance(given, str) else given
        assert answer.prompt_token_ids == ids and [one.index for one in answer.outputs] == [*range(asked.n)]
        for one in answer.outputs:
            number, seed = place + (one.index << 32), 11 if asked.seed is None else asked.seed
            assert one.token_ids == alone(
                model, ids, number, gen_length=asked.max_tokens, temperature=asked.temperature, seed=seed, block_length=8,
                steps=4, stop_at_eos=False,
            )  # fmt: skip
            assert one.text == tokenizer.decode(one.token_ids) and one.finish_reason == "length"
    assert max(len({tuple(one.token_ids) for one in answer.outputs}) for answer in found) > 1
    (chat,) = LLM(model, seed=11).chat([{"role": "user", "content": "hi"}], params[7], use_tqdm=False)
    assert chat.prompt_token_ids == [257, *b"hi", 259]


def test_a_prompt_that_cannot_be_answered_says_why_and_the_others_are(model: CompiledModel) -> None:
    with mosaic.compile(model.model.path or "", budget="1280KiB", host_budget=0) as small:
        prompts: list[Any] = ["one", "", "x" * 4_000, {"prompt": "a", "multi_modal_data": 1}, [300], 5, "two"]
        params = SamplingParams(temperature=0, max_tokens=8)
        found = LLM(small, max_model_len=70_000).generate(prompts, params, use_tqdm=False)
        expected = [alone(small, list(text), 0, gen_length=8) for text in (b"one", b"two")]
        (long,) = LLM(small, max_model_len=10).generate("abc", params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in (found[0], found[6])] == expected
    says = ["is empty", "the budget is", "key 'multi_modal_data'", "expected ids in", "expected text, token ids"]
    for one, text in zip(found[1:6], says, strict=True):
        assert not one.outputs and text in str(one.error), one.error
    assert isinstance(found[2].error, DoesNotFit)
    assert "take 11 positions, max_model_len is 10" in str(long.error)


# --- where answers end ------------------------------------------------------------------------------------------------


def generated(ids: list[int], finish: str = "length") -> Generation:
    answer = torch.tensor(ids, dtype=torch.int64)
    return Generation(
        prompt_ids=answer, token_ids=answer, confidence=torch.ones(len(ids)), finish=finish, steps=3  # type: ignore[arg-type]
    )  # fmt: skip


class Words:
    """A tokenizer of a few words, of one and of several characters, and a special token."""

    texts = ("a", "b", "ab", "ba", "c", "", "<s>")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.texts[one] for one in ids if one != 6 or not skip_special_tokens)


@given(
    st.lists(st.integers(0, 6), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 6), max_size=1), st.booleans(), st.booleans(),
)  # fmt: skip
def test_an_answer_is_cut_at_the_first_text_or_token_that_stops_it(
    ids: list[int], stop: list[str], tokens: list[int], included: bool, skipped: bool
) -> None:
    params = SamplingParams(
        stop=stop, stop_token_ids=tokens, include_stop_str_in_output=included, skip_special_tokens=skipped
    )
    found = completion(0, generated(ids), params, Words())  # type: ignore[arg-type]

    def text(part: list[int]) -> str:
        return Words().decode(part, skip_special_tokens=skipped)

    # What comes out token by token, as a reader sees it: a token that stops is not shown unless it is included.
    expected, out, reason = list[int](), "", None
    for one in ids:
        expected.append(one)
        if one in tokens and not included:
            reason = one
            break
        out += text([one])
        hits = [word for word in stop if word in out]
        if hits:
            at = min(out.find(word) for word in hits)
            reason = next(word for word in sorted(hits) if out.find(word) == at)
            out = out[: at + len(reason) * included]
            break
        if one in tokens:
            reason = one
            break
    assert found.token_ids == expected and found.text == out
    assert found.stop_reason == reason and found.finish_reason == ("length" if reason is None else "stop")


def test_an_answer_ends_as_its_generation_did_and_may_be_tokens_alone() -> None:
    eos = completion(1, generated([0, 1], "eos"), SamplingParams(), Words())  # type: ignore[arg-type]
    assert (eos.finish_reason, eos.stop_reason, eos.index, eos.text, eos.steps) == ("stop", None, 1, "ab", 3)
    params = SamplingParams(detokenize=False, stop="b")
    assert completion(0, generated([0, 1, 0]), params, Words()).text == ""  # type: ignore[arg-type]
    assert completion(0, generated([0, 1, 0]), params, None).token_ids == [0, 1, 0]


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_reach_the_algorithms_that_take_them() -> None:
    base = GenerationConfig(seed=9, steps=4)
    sdar, llada = load("sdar-8b").architecture, load("llada-8b").architecture
    params = SamplingParams(max_tokens=32, temperature=0.3, extra_args={"threshold": 0.5})
    assert params.config(base, sdar) == GenerationConfig(
        seed=9, steps=4, gen_length=32, temperature=0.3, threshold=0.5, top_p=1.0, top_k=0
    )
    assert params.config(base, llada).top_p is None and params.config(base, llada).top_k is None
    own = SamplingParams(top_p=None, top_k=None, seed=3, ignore_eos=True).config(base, sdar)
    assert (own.top_p, own.top_k, own.seed, own.stop_at_eos, own.gen_length) == (None, None, 3, False, 16)
    few = SamplingParams(top_p=0.9, top_k=40, extra_args={"algorithm": "fast-dllm"}).config(base, llada)
    assert (few.top_p, few.top_k) == (0.9, 40)
    assert SamplingParams(top_k=-1).config(base, sdar).top_k == 0
    assert SamplingParams(logit_bias={}, bad_words=[]).config(base, sdar) == SamplingParams().config(base, sdar)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_p": 0.1}, "min_p=0.1: no decoding algorithm here has this; leave it out."),
        ({"logprobs": 5}, "logprobs=5: no decoding algorithm"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: no decoding"),
        ({"n": 0}, "n: expected a number of answers"),
        ({"n": 2, "temperature": 0}, "n=2 at temperature 0 would give the same answer 2 times"),
        ({"max_tokens": None}, "max_tokens: a diffusion model fills a canvas"),
        ({"max_tokens": 0}, "gen_length is 0; it must be at least 1."),
        ({"temperature": -1}, "temperature is -1; it must be at least 0."),
        ({"top_p": 2}, "top_p is 2; it must be in (0, 1]."),
        ({"stop": [""]}, "stop: expected a text or a list of texts"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected a list of token ids"),
        ({"extra_args": {"stps": 2}}, "Did you mean 'steps'?"),
    ],
)
def test_options_without_meaning_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        SamplingParams(**options)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"trust_remote_code": True},
            "trust_remote_code=True: Mosaic has nothing that this would change; leave it out.",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: Mosaic has nothing"),
        ({"budgt": "1GiB"}, "unknown option of LLM 'budgt'. Did you mean 'budget'?"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected a number of prompts"),
        ({"max_model_len": 0}, "max_model_len: expected a number of tokens, at least 1, got 0."),
        ({"gpu_memory_utilization": 1.5}, "expected a share above 0, at most 1, got 1.5"),
        ({"gpu_memory_utilization": 0.5, "budget": "1GiB"}, "give one of the two"),
        ({"cpu_offload_gb": -1}, "cpu_offload_gb: expected a number, at least 0"),
        ({"gpu_memory_utilization": 1e-9}, "budget"),
    ],
)
def test_keywords_of_vllm_are_mapped_or_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(MosaicError) as refused:
        LLM("small", **options)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_budgets_dtype_and_parameters_are_checked_before_anything_runs(model: CompiledModel) -> None:
    path = str(model.model.path)
    with LLM(path, gpu_memory_utilization=0.25, cpu_offload_gb=0.5, dtype="auto") as llm:
        assert llm.model.memory().budget_bytes == mosaic.DEVICES["cpu"].memory_bytes // 4
        assert llm.model.architecture.dtype == "float32" and llm.get_tokenizer() is llm.get_tokenizer()
        with pytest.raises(UsageError, match="2 sampling_params for 1 prompts"):
            llm.generate("a", [SamplingParams()] * 2)
        with pytest.raises(UsageError, match="expected SamplingParams"):
            llm.generate("a", 5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="top_p means nothing to the algorithm 'llada'"):
            llm.generate("a", SamplingParams(top_p=0.5))
        assert llm.generate([]) == []
    with pytest.raises(UsageError, match="budget: the model is compiled already"):
        LLM(model, budget="1GiB")
    with LLM(model):
        pass
    assert model.generate("a", gen_length=4)  # it stays open


# --- how far it is ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("drawn", [True, False])
def test_progress_says_rate_forwards_memory_and_time_left_now_and_then(drawn: bool) -> None:
    file, share = Terminal() if drawn else io.StringIO(), [0.0]
    report = SimpleNamespace(resident={"weights": 1 << 20, "kv": 1 << 20}, budget_bytes=4 << 20)
    stream: Any = SimpleNamespace(tokens=0, forwards=0)
    told = ((0.1, 0, 0.0), (6.0, 60, 0.0), (6.1, 90, 0.25), (12.0, 120, 0.25), (12.05, 150, 0.5))
    now = iter([0.0, *(at for at, _, _ in told for _ in range(1 + (at in (6.0, 12.0))))])
    with Progress(lambda: report, lambda: share[0], file=file, clock=lambda: next(now)) as progress:
        for _, tokens, share[0] in told:
            stream.tokens, stream.forwards, progress.answers = tokens, stream.forwards + 1, tokens // 30
            progress(stream)
        said = file.getvalue()
    first = "2 answers, 10.0 tokens/s, 2 forwards, 2.00 MiB of 4.00 MiB"
    second = "4 answers, 10.0 tokens/s, 4 forwards, 2.00 MiB of 4.00 MiB, 36.00 s left"
    if drawn:
        assert said == f"\r[{'.' * 20}] {first}\r[{'#' * 5}{'.' * 15}] {second}"
        assert file.getvalue().endswith("\r") and file.getvalue()[len(said) :].strip() == ""
    else:
        assert file.getvalue() == f"mosaic: {first}\nmosaic: {second}\n"


def test_generate_shows_progress_unless_it_is_not_asked_for(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mosaic.jobs.progress.Progress.__init__.__kwdefaults__", {"file": None, "clock": FakeClock()})
    LLM(model).generate(["a", "b"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert capsys.readouterr().err == ""
    LLM(model).generate(["a", "b"], SamplingParams(max_tokens=4))
    assert "forwards" in capsys.readouterr().err


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10
        return self.now
