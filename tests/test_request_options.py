"""Whatever a request says: it runs, with sizes that its canvas has use for, or it is refused at once with a typed error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from test_decoding import CONFIGS
from torch import Tensor

import mosaic
from mosaic.decoding import GenerationConfig, Session, resolve
from mosaic.decoding.prompts import Prompt
from mosaic.errors import MosaicError, UsageError
from mosaic.models import load
from mosaic.models.policies.flashblock import PrefixReuse
from mosaic.models.policies.focus_options import Eviction
from mosaic.models.policies.mage_options import ALIKE, SparseAttention
from mosaic.models.policies.registry import attention_policy
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.sharing import SharedSizes

PROMPT = torch.arange(9, 12)
VALUES: list[Any] = [999_999_999, 10**12, 0, -1, 2**63, 2**70, 10**400, math.nan, math.inf, True, "3"]
SECONDS = 0.5
"""Seconds of CPU time that an answer may take."""
ARCHITECTURES = {
    family: load({**config, "num_hidden_layers": 3} if family == "sdar" else config).architecture
    for family, config in CONFIGS.items()
}


class Rows:
    """Rows of a state, of which nothing is read."""

    def reserve(self, count: int) -> None: ...

    def close(self) -> None: ...


class Room:
    """Takes every request, and notes what steps would need."""

    asynchronous = False

    def __init__(self, family: str) -> None:
        self.architecture, self.pays = ARCHITECTURES[family], lambda size: True
        self.numbers = 0

    def sharing(self) -> SharedSizes:
        return SharedSizes()

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open_rows(self, state: State) -> Rows:
        return Rows()

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int]) -> bool:
        self.numbers = sum(rows * max(state.columns(self.architecture), 1) for state, rows in more.items())
        return max(size.tokens for size in sizes) < 100


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    configs = {**CONFIGS, "sdar": {**CONFIGS["sdar"], "num_hidden_layers": 3}}
    with ExitStack() as opened:
        yield {
            family: opened.enter_context(mosaic.compile(config, device="cpu", host_budget=0, budget="64MiB"))
            for family, config in configs.items()
        }


def option(name: str, **beside: Any) -> Any:
    return lambda value: {name: value, **beside}


def of(policy: Any, where: str, name: str, **beside: Any) -> Any:
    return lambda value: {where: policy(**{name: value, **beside})}


def spelled(text: str, where: str = "attention") -> Any:
    return lambda value: {where: text.format(value)}


OPTIONS: list[tuple[str, str, Any]] = [
    *(("llada", name, option(name)) for name in ("gen_length", "steps", "block_length", "seed", "temperature", "cfg_scale")),
    ("llada", "steps of a cache", option("steps", cache="dual")),
    ("llada", "steps at random", option("steps", remasking="random", temperature=0.5)),
    *(("dream", name, option(name)) for name in ("gen_length", "steps", "eps")),
    *(("dream", name, option(name, steps=4)) for name in ("alg_temp", "top_p", "top_k")),
    ("dream", "steps of ranks", option("steps", alg="entropy")),
    *(("llada", f"{name} of fast-dllm", option(name, algorithm="fast-dllm")) for name in ("factor", "threshold", "block_length")),
    *(("sdar", name, option(name)) for name in ("gen_length", "steps", "block_length", "top_k", "top_p", "threshold")),
    *(("sdar", f"{name} of k", of(SparseAttention, "attention", name)) for name in ("k", "ratio", "mass", "exact_layers",
      "exact_last", "every", "rows", "exact_steps")),
    ("sdar", "page", lambda value: {"attention": SparseAttention(k=value, page=value)}),
    ("sdar", "k of pages", of(SparseAttention, "attention", "k", page=4, selects="every", by="bounds")),
    *(("sdar", f"{name} of reuse", of(PrefixReuse, "attention", name)) for name in ("steps", "change")),
    *(("sdar", f"{name} of eviction", of(Eviction, "eviction", name)) for name in ("alpha", "weight", "pool", "keep", "requests")),
    *(("sdar", text, spelled(text)) for text in ("mage:k={}", "mage:ratio={}", "flashblock:reuse_steps={}",
      "mage+flashblock:reuse_change={}")),
    ("sdar", "focus:keep", spelled("focus:keep={}", "eviction")),
    *(("fast-dllm-v2", name, option(name)) for name in ("small_block_length", "gen_length", "block_length", "top_p")),
    *(("sdar", f"{name} of llada2", option(name, algorithm="llada2")) for name in ("minimal_topk", "steps")),
    *(("sdar", f"{name} of llada2.1", option(name, algorithm="llada2.1")) for name in ("edit_threshold",)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "made"), OPTIONS, ids=[f"{family}-{name}" for family, name, _ in OPTIONS])
def test_an_option_of_any_value_is_taken_or_refused_at_once(family: str, name: str, made: Any) -> None:
    """Up to its first step, with no more numbers to keep than canvas and `ALIKE` say."""
    gone = 0
    for value in VALUES:
        runner, began = Room(family), process_time()
        try:
            with Session(runner) as session:  # type: ignore[arg-type]
                request = session.submit(PROMPT, **{"gen_length": 8, **made(value)})
                assert request.pending is not None
            assert runner.numbers <= 2 * 4 * ALIKE
        except MosaicError:
            gone += 1
        assert process_time() - began < SECONDS, (name, value)
    assert gone >= 3, "True, a text and one that is no number"


def bytes_of(model: CompiledModel, **options: Any) -> int:
    """The size that admission counts for a request."""
    with model.session() as session:
        session.submit(PROMPT, gen_length=8, **options)
        while session.live:
            most = max(step.peak_bytes for step in session.advance())
        return most


def test_keys_to_select_are_counted_to_the_end_of_the_canvas(models: dict[str, CompiledModel]) -> None:
    model = models["sdar"]
    few = bytes_of(model, attention="mage:k=4096")
    assert bytes_of(model, attention="mage:k=999999999") == few
    assert bytes_of(model, attention=SparseAttention(k=2**31 - 16, page=16, selects="every", by="bounds")) <= 2 * few
    prompt = torch.arange(8, 18)
    found = [model.generate([prompt], gen_length=16, attention=f"oracle:k={k}")[0] for k in (26, 999_999_999)]
    exact = model.generate([prompt], gen_length=16)[0]
    assert torch.equal(found[0].token_ids, found[1].token_ids) and torch.equal(found[0].token_ids, exact.token_ids)


def test_requests_of_several_lengths_share_steps_of_as_many_keys(models: dict[str, CompiledModel]) -> None:
    with models["sdar"].session() as session:
        for blocks in (1, 2, 6):
            session.submit(torch.arange(8, 8 + 8 * blocks), gen_length=16, attention="mage:k=4096")
        assert [len(session.advance()) for _ in range(4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("cache", [None, "dual"])
def test_more_steps_than_tokens_are_steps_that_decide_nothing(
    models: dict[str, CompiledModel], remasking: str, cache: str | None
) -> None:
    def answer(steps: int) -> Tensor:
        options = {"gen_length": 8, "temperature": 0.7, "remasking": remasking, "cache": cache, "stop_at_eos": False}
        return models["llada"].generate([PROMPT], steps=steps, **options)[0].token_ids

    assert torch.equal(answer(10**9), answer(8)) and not torch.equal(answer(8), answer(4))


def test_what_is_more_than_there_is_means_all_of_it() -> None:
    arch = ARCHITECTURES["sdar"]
    assert resolve(GenerationConfig(temperature=0.9, top_k=10**12), arch) == resolve(
        GenerationConfig(temperature=0.9), arch
    )
    for name, huge, most in (
        ("alpha", 1e30, arch.block),
        ("keep", 10**12, arch.block),
        ("pool", 10**12 + 1, 2 * arch.block + 1),
    ):
        assert resolve(GenerationConfig(eviction=Eviction(**{name: huge})), arch).eviction == Eviction(**{name: most})


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("mage:k=4+flashblock", "mage+flashblock:k=4"),
        ("mage:k=4:every=2+flashblock:reuse_steps=4", "mage+flashblock:k=4:every=2:reuse_steps=4"),
        ("mage:ratio=1/16", SparseAttention(ratio=0.0625)),
        ("mage:ratio=1e-1:k=4e2", SparseAttention(ratio=0.1, k=400)),
        ("mage:k=+8", SparseAttention(k=8)),
        ("mage:k=16/2", SparseAttention(k=8)),
    ],
)
def test_what_a_spelling_means(text: str, same: Any) -> None:
    assert attention_policy(text) == attention_policy(same)


@pytest.mark.parametrize("text", ["mage:k=4+flashblock:k=8", "mage:k=1e999999999", "mage:k=4+", "mage+", "flashblock:steps=4",
                                  "mage:k=" + "9" * 5000, "mage:k=nan", "mage:ratio=1/0", "mage:k=4++flashblock"])  # fmt: skip
def test_what_spells_nothing_is_refused_at_once(text: str) -> None:
    began = process_time()
    with pytest.raises(UsageError):
        attention_policy(text)
    assert process_time() - began < SECONDS


# --- what a session takes is what `generate` takes --------------------------------------------------------------------

IDS = [9, 10, 11]
SAME: list[Any] = [IDS, tuple(IDS), np.array(IDS), np.array(IDS, dtype=np.uint16), torch.tensor(IDS, dtype=torch.int32)]


@pytest.mark.parametrize("prompt", SAME, ids=["list", "tuple", "array", "uint16", "int32"])
def test_token_ids_of_any_kind_are_the_same_prompt(models: dict[str, CompiledModel], prompt: Prompt) -> None:
    model = models["sdar"]
    (expected,) = model.generate(PROMPT, gen_length=8)
    (generated,) = model.generate(prompt, gen_length=8)
    with model.session() as session:
        assert session.admits(mosaic.Submission(prompt=prompt))
        request = session.submit(prompt, gen_length=8)
        while session.live:
            session.advance()
    assert request.generation is not None and torch.equal(request.generation.token_ids, expected.token_ids)
    assert torch.equal(generated.token_ids, expected.token_ids) and torch.equal(generated.prompt_ids, PROMPT)


def test_the_mask_may_be_the_first_token_of_a_vocabulary() -> None:
    config = {**CONFIGS["sdar"], "mask_token_id": 0}
    with mosaic.compile(config, device="cpu", host_budget=0, budget="64MiB") as model:
        (answer,) = model.generate(IDS, gen_length=8, stop_at_eos=False)
        assert len(answer.token_ids) == 8 and answer.prompt_ids.tolist() == IDS


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("text", {}, "has no checkpoint directory, thus no tokenizer"),
    (b"ids", {}, "expected text, token ids .* got bytes"),
    ([{"role": "user"}, "text"], {}, "expected text, token ids|no tokenizer"),
    ([2**70], {}, "1180591620717411303424 is no token id"),
    ([9.5], {}, "expected text, token ids"),
    ([True], {}, "expected text, token ids"),
    ([], {}, "is empty|no prompt was given"),
    (np.array([1.5]), {}, r"got ndarray of float64 \[1\]"),
    (np.array([2**64 - 1], dtype=np.uint64), {}, "18446744073709551615 is no token id"),
    (torch.tensor([1 + 2j]), {}, "expected token ids"),
    (torch.zeros(3, dtype=torch.int64).to_sparse(), {}, "expected token ids"),
    (torch.zeros(3, dtype=torch.int64, device="meta"), {}, "expected token ids"),
    ([{"role": "user", "content": None}], {}, "a message has a text as 'role' and one as 'content'"),
    ([{"role": 3, "content": "x"}], {}, "a message has a text as 'role' and one as 'content'"),
    ([{"role": "user", "content": ["x"]}], {}, "a message has a text as 'role' and one as 'content'"),
    (PROMPT, {"attention": "mage:page=999999999:k=999999999"}, "pages have 4096 keys at most"),
    (PROMPT, {"gen_lenght": 8}, "unknown option of generate 'gen_lenght'. Did you mean 'gen_length'"),
    (PROMPT, {"config": {"gen_length": 8}}, r"config: expected GenerationConfig\(…\) .* got dict"),
    (PROMPT, {"algorithm": 3}, "algorithm: expected a name"),
    (PROMPT, {"remasking": 3}, "remasking: expected a name"),
    (PROMPT, {"streamer": 3}, "streamer: expected an object with put"),
    (PROMPT, {"on_step": 3}, "on_step: expected a function"),
    (PROMPT, {"stop_at_eos": "no"}, "stop_at_eos: expected True or False"),
]


@pytest.mark.parametrize(("prompt", "given", "message"), REFUSED)
def test_what_generate_refuses_a_session_refuses_alike(
    models: dict[str, CompiledModel], prompt: Any, given: dict[str, Any], message: str
) -> None:
    model = models["sdar"]
    with pytest.raises(UsageError, match=message):
        model.generate(prompt, **given)
    with model.session() as session:
        with pytest.raises(UsageError, match=message):
            session.submit(prompt, **given)
        assert session.live == () and model.state_rows == {}


@pytest.mark.parametrize("number", ["3", 1.5, None, [1], True])
def test_a_number_of_a_request_is_an_integer(models: dict[str, CompiledModel], number: Any) -> None:
    if number is not None:
        with pytest.raises(UsageError, match="request_id: expected an integer"), models["sdar"].session() as session:
            session.submit(PROMPT, request_id=number)
        with pytest.raises(UsageError, match="request_id: expected an integer"):
            mosaic.decoding.generate(models["sdar"], PROMPT, request_ids=[number])
    for way in (np.int64(3), 2**70, -1):  # modulo 2^64
        with models["sdar"].session() as session:
            assert session.submit(PROMPT, gen_length=8, request_id=way).number == 0


def test_what_is_no_submission_and_no_request_is_refused(models: dict[str, CompiledModel]) -> None:
    with models["sdar"].session() as session:
        for given in (PROMPT, "text", None, {"prompt": PROMPT}):
            with pytest.raises(UsageError, match=r"expected Submission\(prompt=…\)"):
                session.admits(given)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=r"expected Submission\(prompt=…\)"):
                session.submit_all([given])  # type: ignore[list-item]
            with pytest.raises(UsageError, match="cancel: expected a request"):
                session.cancel(given)  # type: ignore[arg-type]
        for several in (3, None, mosaic.Submission(prompt=PROMPT), iter([]), {mosaic.Submission(prompt="x"): 1}):
            with pytest.raises(UsageError, match="expected a list of Submission"):
                session.submit_all(several)  # type: ignore[arg-type]
        for steps in ("3", -1, 1.0):
            with pytest.raises(UsageError, match="steps: expected an integer, at least 0"):
                session.advance(steps)  # type: ignore[arg-type]
        assert session.advance(10**12) == [] == session.advance(np.int64(1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the session is closed"):
        session.admits(mosaic.Submission(prompt=PROMPT))


def test_what_users_look_for_is_where_they_look() -> None:
    assert mosaic.DoesNotFit.exit_code == 3 and issubclass(mosaic.UsageError, mosaic.MosaicError)
    assert mosaic.Submission(prompt="text", config=mosaic.GenerationConfig(gen_length=8)).request_id is None
    assert {"DoesNotFit", "UsageError", "Submission", "Session", "GenerationConfig", "Generation"} <= set(dir(mosaic))


def test_submissions_without_numbers_draw_as_prompts_of_one_generation(models: dict[str, CompiledModel]) -> None:
    config = mosaic.GenerationConfig(gen_length=8, temperature=1.0, stop_at_eos=False)
    with models["sdar"].session() as session:
        several = session.submit_all([mosaic.Submission(prompt=PROMPT, config=config) for _ in range(2)])
        while session.live:
            session.advance()
    found = [request.generation.token_ids.tolist() for request in several if request.generation is not None]
    expected = [answer.token_ids.tolist() for answer in models["sdar"].generate([PROMPT, PROMPT], config)]
    assert found == expected and found[0] != found[1]


@pytest.mark.parametrize("no_model", [None, 3, "small"])
def test_a_session_is_of_a_model(no_model: object) -> None:
    with pytest.raises(UsageError, match="a session is of a compiled model"):
        mosaic.Session(no_model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option", [{"batch_invariant": "no"}, {"batch_invariant": None}, {"seed": "x"}, {"seed": 1.5}, {"seed": True}]
)
def test_compile_refuses_what_an_option_cannot_be(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(option))}: expected"):
        mosaic.compile("small", **option)


@pytest.mark.parametrize("given", [{"streamer": list}, {"request_ids": list}, {"request_ids": "a"}])
def test_what_is_no_list_is_one_of_what_it_should_be(models: dict[str, CompiledModel], given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"streamer: expected|request_id: expected"):
        mosaic.decoding.generate(models["sdar"], PROMPT, **given)
