"""Every decoding algorithm against a statement of its own, written from the published formulas: token for token.

The statements are loops over whole canvases like the originals: they forward everything at every step, unembed every
row, and share nothing with `mosaic.decoding`; of caches they keep only what is approximate about them. Tests run over
every runner in `RUNNERS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from own_algorithms import as_generator
from reference_runner import Network, ReferenceRunner, factor_count, kept, random_tensors
from torch import Tensor

from mosaic import decoding, models
from mosaic.decoding import Generation, GenerationConfig, Step, row_keys, shapes
from mosaic.errors import DoesNotFit, UnknownName, UsageError
from mosaic.kernels.shared import sampling
from mosaic.models.architecture import Architecture

MASK, EOS, VOCABULARY = 95, 7, 96
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "intermediate_size": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 512}  # fmt: skip
_TOKENS = {"mask_token_id": MASK, "eos_token_id": EOS, "torch_dtype": "float32"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {"model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 48,
              "embedding_size": VOCABULARY, "max_sequence_length": 512, **_TOKENS},
    "dream": {"model_type": "Dream", **_SIZES, **_TOKENS},
    "sdar": {"model_type": "sdar", "block_size": 8, **_SIZES, **_TOKENS},
    "fast-dllm-v2": {"model_type": "Fast_dLLM_Qwen", "bd_size": 8, **_SIZES, **_TOKENS},
}  # fmt: skip
FAMILY = {"llada": "llada", "dream": "dream", "fast-dllm-v2": "fast-dllm-v2"}
"""The model of each algorithm; the others run on `sdar`'s."""

RUNNERS: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], Any]] = {
    "reference": lambda config, tensors: ReferenceRunner(Network(models.load(config).architecture, tensors)),
    "compiled": lambda config, tensors: CompiledRunner(config, tensors, debug="poison"),
}
"""Makes a runner from a config.json and tensors by checkpoint name."""


@dataclass
class Case:
    """A tiny random model and a runner of it."""

    runner: Any
    network: Network

    def generate(self, prompts: list[Tensor], **options: Any) -> list[Generation]:
        return decoding.generate(self.runner, prompts, **{"stop_at_eos": False, **options})


Make = Callable[..., Case]


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[tuple[str, str, int], Case]]:
    """Cases by runner, family and seed: one model serves all tests of a worker, and may keep nothing of any."""
    made: dict[tuple[str, str, int], Case] = {}
    yield made
    for case in made.values():
        if isinstance(case.runner, CompiledRunner):
            case.runner.close()


@pytest.fixture(params=[pytest.param("reference", marks=pytest.mark.soak), "compiled"])
def make(request: pytest.FixtureRequest, cases: dict[tuple[str, str, int], Case]) -> Iterator[Make]:
    made: list[Case] = []

    def build(family: str, seed: int = 0) -> Case:
        key = (request.param, family, seed)
        if key not in cases:
            arch = models.load(CONFIGS[family]).architecture
            tensors = random_tensors(arch, seed)
            cases[key] = Case(RUNNERS[request.param](CONFIGS[family], tensors), Network(arch, tensors))
        made.append(cases[key])
        return made[-1]

    yield build
    for case in made:
        case.runner.architecture = case.network.arch
        if isinstance(case.runner, ReferenceRunner):
            assert all(sequence.closed for sequence in case.runner.sequences)


def prompt_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(8, MASK, (length,), generator=torch.Generator().manual_seed(seed + 100 * length))


# --- the statements ---------------------------------------------------------------------------------------------------


def mixed(x: int) -> int:
    """splitmix64's finaliser after one increment."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def key_of(seed: int, request: int, step: int, position: int) -> Tensor:
    key = mixed(mixed(mixed(mixed(seed) ^ request) ^ step) ^ position)
    return torch.tensor([key - 2**64 if key >= 2**63 else key])


@dataclass
class Draw:
    """The sampled token and its score, one row at a time."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    request: int = 0
    scaled: bool = True  # the confidence is a probability after temperature, top-p and top-k
    score: str = "confidence"

    def key(self, step: int, position: int) -> Tensor:
        return key_of(self.seed, self.request, step, position)

    def __call__(self, logits: Tensor, step: int, position: int) -> tuple[int, Tensor]:
        row = logits / self.temperature if self.temperature > 0 else logits
        if self.top_p < 1 or self.top_k:
            row = kept(row, self.top_p, self.top_k)
        if self.temperature > 0 and self.scaled:
            drawn = row - sampling.exponentials(self.key(step, position), len(row))[0].log()
        elif self.temperature > 0:  # the same in real numbers; as it is written for confidences before temperature
            drawn = logits - self.temperature * sampling.exponentials(self.key(step, position), len(row))[0].log()
        else:
            drawn = row
        token = int(drawn.argmax())
        p = (row if self.scaled else logits).softmax(-1)
        if self.score == "margin":
            return token, p.topk(2).values.diff().neg()[0]
        if self.score == "entropy":
            return token, (p * (p + 1e-10).log()).sum()
        return token, p[token]


def canvas_of(net: Network, prompt: Tensor, length: int) -> tuple[Tensor, set[int]]:
    x = torch.full((length,), net.arch.mask_token_id)
    x[: len(prompt)] = prompt
    return x, set(range(len(prompt), length))


def best(scores: dict[int, Tensor], count: int) -> list[int]:
    return sorted(scores, key=lambda position: (-float(scores[position]), position))[:count]


def shifted(logits: Tensor) -> Tensor:
    return torch.cat([logits[:1], logits[:-1]])


def spread(masks: int, steps: int) -> list[int]:
    counts = [masks // steps] * steps
    for i in range(masks % steps):
        counts[i] += 1
    return counts


def llada(
    net: Network,
    prompt: Tensor,
    gen: int,
    block: int,
    steps: int,
    draw: Draw,
    *,
    random: bool = False,
    cfg: float = 0.0,
) -> Tensor:
    """B1: whole canvas, block by block, the scheduled number of masks each step."""
    x, open_ = canvas_of(net, prompt, len(prompt) + gen)
    step = 0
    for start in range(len(prompt), len(x), block):
        for count in spread(block, steps * block // gen):
            logits = net.logits(x)
            if cfg:
                blank = x.clone()
                blank[: len(prompt)] = net.arch.mask_token_id
                other = net.logits(blank)
                logits = other + (cfg + 1) * (logits - other)
            drawn = {p: draw(logits[p], step, p) for p in sorted(open_) if start <= p < start + block}
            scores = {p: score for p, (_, score) in drawn.items()}
            if random:
                scores = {p: sampling.uniforms(draw.key(step, p))[0] for p in drawn}
            for p in best(scores, count):
                x[p] = drawn[p][0]
                open_.remove(p)
            step += 1
    return x


def dream(net: Network, prompt: Tensor, gen: int, steps: int, alg: str, draw: Draw, *, alg_temp: float = 0.0) -> Tensor:
    """B2: no blocks; times in float32."""
    x, open_ = canvas_of(net, prompt, len(prompt) + gen)
    times = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        t, s, last = times[i], times[i + 1], i == steps - 1
        logits = shifted(net.logits(x)) if net.arch.shifted else net.logits(x)
        drawn = {p: draw(logits[p], i, p) for p in sorted(open_)}
        if alg == "origin":
            chance = 1.0 if last else 1 - s / t
            chosen = [p for p in drawn if sampling.uniforms(draw.key(i, p))[0] < chance or last]
        else:
            scores = {p: score for p, (_, score) in drawn.items()}
            if alg_temp:
                scores = {p: s_ / alg_temp + sampling.gumbels(draw.key(i, p))[0] for p, s_ in scores.items()}
            chosen = best(scores, len(open_) if last else int(len(open_) * (1 - s / t)))
        for p in chosen:
            x[p] = drawn[p][0]
            open_.remove(p)
    return x


def fast_dllm(
    net: Network, prompt: Tensor, gen: int, block: int, cache: str | None, draw: Draw, *, threshold: float | None = None,
    factor: float | None = None, steps: int | None = None,
) -> Tensor:  # fmt: skip
    """B3: on a shifted network, with a cache, the first pass of a block decides its first position and no other."""
    x, open_ = canvas_of(net, prompt, len(prompt) + gen)
    total, step, dreams = len(x), 0, net.arch.shifted
    for start in range(len(prompt), total, block):
        kv, whole = net.new_kv(total), True
        counts = spread(block, steps * block // gen) if steps else []
        while left := [p for p in sorted(open_) if start <= p < start + block]:
            if whole or cache is None:
                first, rows = 0, net.unembed(net.hidden(x, 0, kv, total))
            elif cache == "prefix":
                first, again = start, net.new_kv(total)
                for (keys, values), (old_keys, old_values) in zip(again, kv, strict=True):
                    keys[:start], values[:start] = old_keys[:start], old_values[:start]
                rows = net.unembed(net.hidden(x[start:], start, again, total))
            else:
                first, rows = start, net.unembed(net.hidden(x[start : start + block], start, kv, total))
            logits = shifted(rows) if dreams else rows
            drawn = {p: draw(logits[p - first], step, p) for p in left}
            scores = {p: score for p, (_, score) in drawn.items()}
            ranked = best(scores, len(left))
            if whole and cache and dreams:
                chosen = [start]
            elif factor is not None:
                chosen = ranked[: factor_count([float(scores[p]) for p in ranked], factor)]
            elif threshold is not None:
                chosen = ranked[:1] + [p for p in ranked[1:] if scores[p] >= torch.tensor(threshold)]
            else:
                chosen = ranked[: counts.pop(0)]
            for p in chosen:
                x[p] = drawn[p][0]
                open_.remove(p)
            step, whole = step + 1, False
    return x


def by_blocks(net: Network, prompt: Tensor, gen: int) -> tuple[Tensor, set[int], range]:
    block = net.arch.block
    total = -(-(len(prompt) + gen) // block) * block
    x, open_ = canvas_of(net, prompt, total)
    return x, open_, range(len(prompt) // block * block, total, block)


def sdar(
    net: Network, prompt: Tensor, gen: int, steps: int, remasking: str, draw: Draw, threshold: float = 0.85
) -> Tensor:
    """B5, and B6's LLaDA2.0 with `dynamic`: no cache here, everything is forwarded up to the block's end."""
    x, open_, starts = by_blocks(net, prompt, gen)
    step, block = 0, net.arch.block
    for start in starts:
        for count in spread(block, steps):
            left = [p for p in sorted(open_) if start <= p < start + block]
            if not left:
                break
            logits = net.logits(x[: start + block])
            drawn = {p: draw(logits[p], step, p) for p in left}
            scores = {p: score for p, (_, score) in drawn.items()}
            high = [p for p in left if scores[p] > torch.tensor(threshold)]
            if remasking == "sequential":
                chosen = left[:count]
            elif remasking == "low_confidence_dynamic" and len(high) >= count:
                chosen = high
            else:
                chosen = best(scores, count)
            for p in chosen:
                x[p] = drawn[p][0]
                open_.remove(p)
            step += 1
    return x


def fast_dllm_v2(
    net: Network, prompt: Tensor, gen: int, small: int, threshold: float, draw: Draw, *, cache: bool = False
) -> Tensor:
    """B4 of one request: exact prefix; with a block cache, stale keys within the block as in the original."""
    x, open_, starts = by_blocks(net, prompt, gen)
    step, block = 0, net.arch.block
    for start in starts:
        if start in open_ and start > 0:  # the last row before the block predicts its first token, greedily
            x[start] = net.logits(x[:start])[-1].argmax()
            open_.remove(start)
            step += 1
        kv = None
        for first in range(start, start + block, small):
            while left := [p for p in sorted(open_) if first <= p < first + small]:
                if not cache or kv is None or first in open_:
                    kv = net.new_kv(start + block)
                    logits = shifted(net.unembed(net.hidden(x[: start + block], 0, kv, start + block)))[first:]
                else:
                    window = net.hidden(x[first : first + small], first, kv, start + block)
                    logits = shifted(net.unembed(window))
                drawn = {p: draw(logits[p - first], step, p) for p in left}
                scores = {p: score for p, (_, score) in drawn.items()}
                for p in {*best(scores, 1), *(p for p in left if scores[p] > torch.tensor(threshold))}:
                    x[p] = drawn[p][0]
                    open_.remove(p)
                step += 1
    return x


def llada21(
    net: Network, prompt: Tensor, gen: int, draw: Draw, threshold: float, edit: float, post: int
) -> tuple[Tensor, int]:
    """B6, LLaDA2.1: masks to tokens and tokens to tokens; also how many edits there were.

    A block is filled once each position was decided, be it for the mask, which later steps go on treating as one.
    """
    x, open_, starts = by_blocks(net, prompt, gen)
    step, edits, block = 0, 0, net.arch.block
    for start in starts:
        after = 0
        while True:
            own = range(max(start, len(prompt)), start + block)
            filled = not open_.intersection(own)
            if filled:
                after += 1
                if after > post:
                    break
            logits = net.logits(x[: start + block])
            drawn = {p: draw(logits[p], step, p) for p in own}
            scores = {p: score for p, (_, score) in drawn.items()}
            masks = [p for p in own if x[p] == net.arch.mask_token_id]
            high = [p for p in masks if scores[p] > torch.tensor(threshold)]
            chosen = high or best({p: scores[p] for p in masks}, 1)
            changes = [p for p in own if p not in masks and scores[p] > torch.tensor(edit) and drawn[p][0] != int(x[p])]
            before = x.clone()
            for p in chosen + changes:
                x[p] = drawn[p][0]
            open_ -= set(chosen)
            step, edits = step + 1, edits + len(changes)
            if filled and torch.equal(before, x):
                break
    return x, edits


# --- equality ---------------------------------------------------------------------------------------------------------


def assert_same(case: Case, prompt: Tensor, expected: Tensor, **options: Any) -> Generation:
    (found,) = case.generate([prompt], **options)
    answer = expected[len(prompt) : len(prompt) + options["gen_length"]]
    assert found.token_ids.tolist() == answer.tolist()
    assert torch.equal(found.prompt_ids, prompt) and found.finish == "length"
    return found


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize(
    ("length", "gen", "block", "steps"), [(5, 12, 12, 12), (1, 15, 5, 6), (13, 8, 4, 8), (3, 9, 3, 15)]
)
def test_llada(make: Make, length: int, gen: int, block: int, steps: int, remasking: str, temperature: float) -> None:
    case, prompt = make("llada"), prompt_of(length)
    draw = Draw(temperature=temperature, seed=3, scaled=False)
    expected = llada(case.network, prompt, gen, block, steps, draw, random=remasking == "random")
    options = {"block_length": block, "steps": steps, "remasking": remasking, "temperature": temperature, "seed": 3}
    found = assert_same(case, prompt, expected, gen_length=gen, **options)
    assert found.steps == min(steps, gen)  # a step that would commit nothing is not run


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_llada_guided(make: Make, temperature: float) -> None:
    case, prompt = make("llada", 1), prompt_of(6)
    draw = Draw(temperature=temperature, scaled=False)
    expected = llada(case.network, prompt, 10, 5, 4, draw, cfg=1.5)
    plain = llada(case.network, prompt, 10, 5, 4, draw)
    assert not torch.equal(expected, plain)
    options = {"block_length": 5, "steps": 4, "cfg_scale": 1.5, "temperature": temperature}
    assert_same(case, prompt, expected, gen_length=10, **options)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.0, 1.0, 0), (0.0, 0.6, 0), (1.0, 1.0, 0), (0.8, 1.0, 0), (0.8, 0.7, 5)]
)
@pytest.mark.parametrize("alg", ["origin", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize(("length", "gen", "steps"), [(5, 11, 6), (1, 9, 20)])
def test_dream(
    make: Make, length: int, gen: int, steps: int, alg: str, temperature: float, top_p: float, top_k: int
) -> None:
    case, prompt = make("dream"), prompt_of(length)
    score = {"topk_margin": "margin", "entropy": "entropy"}.get(alg, "confidence")
    settings_ = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": 5}
    expected = dream(case.network, prompt, gen, steps, alg, Draw(**settings_, score=score))
    found = assert_same(case, prompt, expected, gen_length=gen, steps=steps, alg=alg, **settings_)
    assert found.steps <= min(steps, gen)


def test_dream_draws_positions(make: Make) -> None:
    case, prompt = make("dream", 2), prompt_of(4)
    draw = Draw(seed=1)
    expected = dream(case.network, prompt, 12, 5, "maskgit_plus", draw, alg_temp=0.4)
    assert not torch.equal(expected, dream(case.network, prompt, 12, 5, "maskgit_plus", draw))
    assert_same(case, prompt, expected, gen_length=12, steps=5, alg="maskgit_plus", alg_temp=0.4, seed=1)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("rule", [{"threshold": 0.3}, {"threshold": 1.0}, {"factor": 0.7}, {"factor": 1.0}])
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_fast_dllm(make: Make, family: str, cache: str | None, rule: dict[str, float], temperature: float) -> None:
    case, prompt = make(family), prompt_of(5)
    draw = Draw(temperature=temperature, seed=2, scaled=family == "dream")
    expected = fast_dllm(case.network, prompt, 18, 6, cache, draw, **rule)
    options = {"algorithm": "fast-dllm", "block_length": 6, "cache": cache, "temperature": temperature, "seed": 2}
    assert_same(case, prompt, expected, gen_length=18, **options, **rule)


def test_fast_dllm_keeps_what_top_p_leaves_on_dream(make: Make) -> None:
    case, prompt = make("dream"), prompt_of(5)
    expected = fast_dllm(case.network, prompt, 12, 6, "prefix", Draw(temperature=0.6, top_p=0.5), threshold=0.6)
    options = {"algorithm": "fast-dllm", "block_length": 6, "cache": "prefix", "temperature": 0.6, "top_p": 0.5}
    assert_same(case, prompt, expected, gen_length=12, threshold=0.6, **options)


@pytest.mark.grid
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("steps", [3, 6, 9, 21])
def test_the_schedule_with_a_cache(make: Make, cache: str, steps: int) -> None:
    case, prompt = make("llada"), prompt_of(7)
    expected = fast_dllm(case.network, prompt, 18, 6, cache, Draw(scaled=False), steps=steps)
    assert_same(case, prompt, expected, gen_length=18, block_length=6, steps=steps, cache=cache)


def test_the_caches_are_approximations_and_differ(make: Make) -> None:
    case, prompt = make("llada"), prompt_of(5)
    options = {"algorithm": "fast-dllm", "gen_length": 24, "block_length": 12, "threshold": 0.99}
    answers = [
        case.generate([prompt], cache=cache, **options)[0].token_ids.tolist() for cache in (None, "prefix", "dual")
    ]
    assert answers[0] != answers[1] != answers[2] != answers[0]


PROMPTS = [3, 8, 13, 24]
"""Shorter than a block, whole blocks, and with a tail."""


@pytest.mark.grid(together=1)
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.6, 0), (1.3, 0.8, 4)]
)
@pytest.mark.parametrize("remasking", ["sequential", "low_confidence_static", "low_confidence_dynamic"])
@pytest.mark.parametrize(("length", "steps"), [(3, 8), (8, 3), (13, 3), (24, 8)])
def test_sdar(
    make: Make, length: int, remasking: str, steps: int, temperature: float, top_p: float, top_k: int
) -> None:
    case, prompt = make("sdar"), prompt_of(length)
    settings_ = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": 4}
    expected = sdar(case.network, prompt, 19, steps, remasking, Draw(**settings_), 0.4)
    options: dict[str, Any] = {} if remasking == "sequential" else {"threshold": 0.4}
    assert_same(case, prompt, expected, gen_length=19, remasking=remasking, steps=steps, **options, **settings_)


@pytest.mark.grid
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize(("threshold", "minimal_topk", "steps"), [(0.95, 1, 8), (0.3, 1, 5), (0.5, 6, 3)])
def test_llada2(make: Make, length: int, threshold: float, minimal_topk: int, steps: int) -> None:
    """With minimal_topk 6, a block of 19 tokens has no more than 3 steps."""
    case, prompt = make("sdar", 3), prompt_of(length)
    expected = sdar(case.network, prompt, 19, steps, "low_confidence_dynamic", Draw(), threshold)
    options = {"algorithm": "llada2", "threshold": threshold, "minimal_topk": minimal_topk}
    assert_same(case, prompt, expected, gen_length=19, **options, **({"steps": steps} if minimal_topk == 1 else {}))


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("threshold", "edit", "post"), [(0.95, 0.9, 16), (0.2, 0.2, 16), (0.2, 0.0, 2), (0.3, 0.3, 0)])
def test_llada21(make: Make, length: int, threshold: float, edit: float, post: int, temperature: float) -> None:
    case, prompt = make("sdar", 5), prompt_of(length)
    draw = Draw(temperature=temperature, seed=9)
    expected, edits = llada21(case.network, prompt, 19, draw, threshold, edit, post)
    assert edits > 0 or edit > 0.2
    options = {"algorithm": "llada2.1", "threshold": threshold, "edit_threshold": edit, "max_post_steps": post}
    assert_same(case, prompt, expected, gen_length=19, temperature=temperature, seed=9, **options)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize(("small", "cache"), [(8, None), (4, None), (4, "dual"), (2, "dual"), (8, "dual")])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 0.95), (1.0, 1.0), (0.6, 0.7)])
def test_fast_dllm_v2(make: Make, length: int, small: int, cache: str | None, temperature: float, top_p: float) -> None:
    case, prompt = make("fast-dllm-v2"), prompt_of(length)
    draw = Draw(temperature=temperature, top_p=top_p if temperature else 1.0, seed=6)
    expected = fast_dllm_v2(case.network, prompt, 21, small, 0.4, draw, cache=cache is not None)
    options = {"small_block_length": small, "cache": cache, "threshold": 0.4, "top_p": top_p, "seed": 6}
    assert_same(case, prompt, expected, gen_length=21, temperature=temperature, **options)


# --- batches, ends, ties ----------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"gen_length": 12, "block_length": 4, "steps": 6, "temperature": 0.8}),
    "llada-random": ("llada", {"gen_length": 12, "block_length": 4, "steps": 6, "remasking": "random"}),
    "llada-guided": ("llada", {"gen_length": 12, "block_length": 4, "steps": 6, "cfg_scale": 0.5}),
    "dream-origin": ("dream", {"gen_length": 12, "steps": 7, "temperature": 1.0}),
    "dream-entropy": ("dream", {"gen_length": 12, "steps": 7, "alg": "entropy", "alg_temp": 0.3, "temperature": 0.5}),
    "fast": ("llada", {"algorithm": "fast-dllm", "gen_length": 12, "block_length": 6, "threshold": 0.2}),
    "fast-prefix": ("dream", {"algorithm": "fast-dllm", "gen_length": 12, "block_length": 6, "cache": "prefix"}),
    "fast-dual": ("dream", {"algorithm": "fast-dllm", "gen_length": 12, "block_length": 6, "factor": 1.0, "cache": "dual"}),
    "sdar": ("sdar", {"gen_length": 17, "threshold": 0.3, "temperature": 1.0}),
    "sdar-sequential": ("sdar", {"gen_length": 17, "remasking": "sequential", "steps": 3, "temperature": 1.0}),
    "v2": ("fast-dllm-v2", {"gen_length": 17, "threshold": 0.3, "small_block_length": 4, "cache": "dual"}),
    "llada2.1": ("sdar", {"algorithm": "llada2.1", "gen_length": 17, "threshold": 0.2, "edit_threshold": 0.2}),
}  # fmt: skip


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return WAYS[request.param]


@pytest.mark.some
def test_batches_of_other_lengths_give_the_same_tokens_as_alone(make: Make, way: tuple[str, dict[str, Any]]) -> None:
    family, options = way
    case, prompts = make(family), [prompt_of(length) for length in (5, 16, 1, 16, 9)]
    together = case.generate(prompts, **options)
    alone = [case.generate([p], request_ids=[i], **options)[0] for i, p in enumerate(prompts)]
    assert [found.token_ids.tolist() for found in together] == [found.token_ids.tolist() for found in alone]
    assert [found.steps for found in together] == [found.steps for found in alone]


@pytest.mark.some
@pytest.mark.parametrize("seed", [1, 6])
def test_generation_stops_at_the_end_of_the_text(make: Make, way: tuple[str, dict[str, Any]], seed: int) -> None:
    """Tokens before the end are the same as without it; every token of an answer is tried as the ending one."""
    family, options = way
    case, prompt = make(family, seed), prompt_of(9)
    (whole,) = case.generate([prompt], **options)
    arch = case.runner.architecture
    tried = whole.token_ids.tolist()[::4]
    for token in tried:
        case.runner.architecture = replace(arch, eos_token_ids=(token, MASK - 1))
        (found,) = case.generate([prompt], stop_at_eos=True, **options)
        end = min(whole.token_ids.tolist().index(t) for t in (token, MASK - 1) if t in whole.token_ids)
        assert found.token_ids.tolist() == whole.token_ids.tolist()[: end + 1]
        assert found.finish == "eos" and found.steps <= whole.steps
    case.runner.architecture = arch


def test_an_early_end_saves_steps(make: Make) -> None:
    case, prompt = make("sdar"), prompt_of(9)
    options = {"gen_length": 64, "remasking": "sequential"}
    (whole,) = case.generate([prompt], **options)
    arch = case.runner.architecture
    case.runner.architecture = replace(arch, eos_token_ids=(int(whole.token_ids[2]),))
    (found,) = case.generate([prompt], stop_at_eos=True, **options)
    case.runner.architecture = arch
    assert len(found.token_ids) <= 3 and found.steps <= 1 + 3


def test_ties_go_to_the_lower_row() -> None:
    """Where nothing depends on what a row sees, all masks are alike."""
    arch = models.load(CONFIGS["llada"]).architecture
    tensors = {name: t * 0 if "attn_out" in name else t for name, t in random_tensors(arch, 0).items()}
    case = Case(ReferenceRunner(Network(arch, tensors)), Network(arch, tensors))
    order: list[int] = []
    case.generate([prompt_of(3)], gen_length=6, on_step=lambda step: order.extend(step.positions.tolist()))
    assert order == [3, 4, 5, 6, 7, 8]


@pytest.mark.some
def test_a_model_that_predicts_the_mask_comes_to_an_end(make: Make, way: tuple[str, dict[str, Any]]) -> None:
    """The originals' loops wait for masks to go away; here a position is decided once, even for the mask."""
    family, options = way
    case = make(family)
    arch = case.runner.architecture
    case.runner.architecture = replace(
        arch, mask_token_id=int(case.generate([prompt_of(9)], **options)[0].token_ids[3])
    )
    mask = case.runner.architecture.mask_token_id
    prompt = prompt_of(9)
    prompt[prompt == mask] = 8 if mask != 8 else 9
    (found,) = case.generate([prompt], **options)
    case.runner.architecture = arch
    assert len(found.token_ids) == options["gen_length"]


@pytest.mark.some
@pytest.mark.parametrize("seed", range(4))
def test_edits_end_where_the_mask_is_the_surest_token(seed: int) -> None:
    """A position decided as the mask looks open to the next step, and once blocked all others for ever."""
    arch = models.load(CONFIGS["sdar"]).architecture
    runner = ReferenceRunner(Network(arch, random_tensors(arch, seed)))
    most = 5 * (
        2 * 8 + 16
    )  # each of five blocks of 8: a step without a new token is followed by one with, then 16 edit

    def count(step: decoding.Step) -> None:
        assert len(runner.packed) <= 1 + most

    options: dict[str, Any] = {"algorithm": "llada2.1", "gen_length": 31, "threshold": 0.9, "edit_threshold": 0.1}
    (usual,) = decoding.generate(runner, [prompt_of(9)], stop_at_eos=False, **options)
    runner.architecture = replace(arch, mask_token_id=Counter(usual.token_ids.tolist()).most_common(1)[0][0])
    mask, prompt = runner.architecture.mask_token_id, prompt_of(9)
    runner.packed.clear()
    prompt[prompt == mask] = 8 if mask != 8 else 9
    (found,) = decoding.generate(runner, [prompt], stop_at_eos=False, on_step=count, **options)
    assert found.confidence.all()


# --- what is asked of the runner --------------------------------------------------------------------------------------


@pytest.mark.some
@pytest.mark.parametrize(
    "lengths",
    [pytest.param([5], marks=pytest.mark.soak), [16], pytest.param([9, 9], marks=pytest.mark.soak), [3, 16, 9]],
)
def test_no_step_is_larger_than_predicted(way: tuple[str, dict[str, Any]], lengths: list[int]) -> None:
    family, options = way
    if family == "sdar":
        options = {**options, "threshold": 0.99}  # a last block that one step decides has no later steps
    arch = models.load(CONFIGS[family]).architecture
    runner = ReferenceRunner(Network(arch, random_tensors(arch, 0)))
    decoding.generate(runner, [prompt_of(n) for n in lengths], stop_at_eos=False, **options)
    predicted = runner.checked
    assert predicted == shapes(as_generator(GenerationConfig(**options, stop_at_eos=False), arch), lengths, arch)
    reached = set()
    for requests in runner.packed:
        tokens, rows = sum(len(r.token_ids) for r in requests), sum(len(r.rows) for r in requests)
        keys, phase = sum(r.key_len for r in requests), requests[0].phase
        size = (tokens, keys, rows)
        own = [(s.tokens, sum(s.keys), s.rows) for s in predicted if s.phase == phase]
        assert any(all(a <= b for a, b in zip(size, most, strict=True)) for most in own), (size, own)
        reached |= {(phase, most) for most in own if most == size}
    if len(lengths) == 1:
        assert len(reached) == len({(s.phase, s.tokens, sum(s.keys), s.rows) for s in predicted})


def test_only_rows_that_may_be_committed_are_unembedded(way: tuple[str, dict[str, Any]]) -> None:
    family, options = way
    arch = models.load(CONFIGS[family]).architecture
    runner = ReferenceRunner(Network(arch, random_tensors(arch, 0)))
    editing = options.get("algorithm") == "llada2.1"
    decoding.generate(runner, [prompt_of(5)], stop_at_eos=False, **options)
    for (request,) in runner.packed:
        assert editing or (request.current == MASK).all()
        assert (request.keys is None) == (not request.phase.noisy)


def test_random_choices_are_made_before_the_step() -> None:
    arch = models.load(CONFIGS["llada"]).architecture
    runner = ReferenceRunner(Network(arch, random_tensors(arch, 0)))
    decoding.generate(runner, [prompt_of(5)], gen_length=32, steps=16, remasking="random", stop_at_eos=False)
    assert [len(request.rows) for (request,) in runner.packed] == [2] * 16


@pytest.mark.parametrize("algorithm", ["sdar", "llada2.1"])
def test_a_block_is_written_by_the_first_step_of_the_next(algorithm: str) -> None:
    arch = models.load(CONFIGS["sdar"]).architecture
    runner = ReferenceRunner(Network(arch, random_tensors(arch, 5)))
    decoding.generate(runner, [prompt_of(16)], gen_length=24, stop_at_eos=False, algorithm=algorithm, threshold=0.2)
    assert [r.phase.head.name for (r,) in runner.packed].count("none") == 1  # the prefill
    windows = [(r.start, len(r.token_ids)) for (r,) in runner.packed]
    assert [window for window in windows if window[1] == 16] == [(0, 16), (16, 16), (24, 16)]


def test_sequences_are_closed_when_a_step_fails() -> None:
    class Failing(ReferenceRunner):
        def step(self, requests: Any) -> Any:
            if len(self.packed) == 3:
                raise RuntimeError("no more")
            return super().step(requests)

    arch = models.load(CONFIGS["sdar"]).architecture
    runner = Failing(Network(arch, random_tensors(arch, 0)))
    with pytest.raises(RuntimeError, match="no more"):
        decoding.generate(runner, [prompt_of(9), prompt_of(20)], gen_length=20)
    assert len(runner.sequences) == 2 and all(sequence.closed for sequence in runner.sequences)


def test_a_generation_that_does_not_fit_runs_no_step() -> None:
    class Small(ReferenceRunner):
        def admits(self, sizes: Any, *, more: Any = None) -> bool:
            return False

        def check(self, sizes: Any, *, more: Any = None) -> Any:
            raise DoesNotFit("at most 100 tokens fit", needed_bytes=2, available_bytes=1)

    arch = models.load(CONFIGS["sdar"]).architecture
    runner = Small(Network(arch, random_tensors(arch, 0)))
    with pytest.raises(DoesNotFit, match="at most 100"):
        decoding.generate(runner, [prompt_of(9)], gen_length=20)
    assert not runner.packed and not runner.sequences


# --- streaming --------------------------------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps everything."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.drafts: list[tuple[list[int], list[float]]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.pieces.append(value.tolist())

    def put_draft(self, token_ids: Tensor, confidence: Tensor) -> None:
        self.drafts.append((token_ids.tolist(), confidence.tolist()))

    def end(self) -> None:
        self.ended += 1


class Plain:
    """Like transformers' streamers: no drafts."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.tolist()

    def end(self) -> None:
        self.ids.append(-1)


@pytest.mark.some
def test_streams_are_the_answer_in_order(make: Make, way: tuple[str, dict[str, Any]]) -> None:
    family, options = way
    case, prompt, streamer, steps = make(family), prompt_of(9), Recorder(), list[Step]()
    (found,) = case.generate([prompt], streamer=streamer, on_step=steps.append, **options)
    assert streamer.pieces[0] == prompt.tolist() and streamer.ended == 1
    assert [token for piece in streamer.pieces[1:] for token in piece] == found.token_ids.tolist()
    assert all(streamer.pieces)
    assert streamer.drafts[-1][0] == found.token_ids.tolist()
    assert len(steps) == found.steps == len(streamer.drafts)
    seen = {}
    for step, (draft, confidence) in zip(steps, streamer.drafts, strict=True):
        seen |= dict(zip(step.positions.tolist(), step.token_ids.tolist(), strict=True))
        assert {9 + i for i, c in enumerate(confidence) if c != 0.0} <= set(seen)
        assert all(draft[p - 9] == token for p, token in seen.items() if p < 9 + options["gen_length"])
        assert step.masked == len([p for p in range(9, 9 + options["gen_length"]) if p not in seen])
        assert step.peak_bytes == step.plan.total_bytes > 0
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert [step.block for step in steps] == sorted(step.block for step in steps)


def test_a_streamer_of_transformers_and_one_a_prompt(make: Make) -> None:
    case, prompts, streamers = make("llada"), [prompt_of(4), prompt_of(6)], [Plain(), Plain()]
    found = case.generate(prompts, gen_length=8, streamer=streamers)
    for prompt, answer, streamer in zip(prompts, found, streamers, strict=True):
        assert streamer.ids == prompt.tolist() + answer.token_ids.tolist() + [-1]
    with pytest.raises(UsageError, match="1 streamer for 2 prompts; give a list"):
        case.generate(prompts, gen_length=8, streamer=Plain())


# --- bad input --------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llada", {"gen_length": 100, "block_length": 32}, "gen_length 100 is not divisible by block_length 32; use gen_length 128"),
    ("llada", {"gen_length": 64, "block_length": 16, "steps": 6}, "steps 6 is not divisible by the 4 blocks"),
    ("llada", {"steps": 0}, "steps is 0; it must be at least 1"),
    ("llada", {"steps": 2.5}, "steps: expected an integer, got 2.5"),
    ("llada", {"gen_length": 0}, "gen_length is 0"),
    ("llada", {"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
    ("llada", {"temperature": float("nan")}, "temperature: expected a number, got nan"),
    ("llada", {"algorithm": "fast-dllm", "threshold": 1.5}, r"threshold is 1.5; it must be in \(0, 1\]"),
    ("llada", {"algorithm": "fast-dllm", "threshold": 0.0}, r"threshold is 0.0; it must be in \(0, 1\]"),
    ("llada", {"algorithm": "fast-dllm", "threshold": 0.5, "factor": 1.0}, "give one of the two"),
    ("llada", {"algorithm": "fast-dllm", "top_p": 0.5}, "fast-dllm on LLaDA samples from all tokens"),
    ("llada", {"algorithm": "lladda"}, "unknown algorithm 'lladda'. Did you mean 'llada'"),
    ("llada", {"remasking": "low-confidence"}, "Did you mean 'low_confidence'"),
    ("llada", {"remasking": "sequential"}, "unknown remasking of 'llada' 'sequential'"),
    ("llada", {"alg": "entropy"}, "alg means nothing to the algorithm 'llada', which takes block_length"),
    ("llada", {"cache": "dual", "cfg_scale": 1.0}, "cfg_scale 1.0 needs whole sequences"),
    ("llada", {"cache": "both"}, "unknown cache 'both'"),
    ("llada", {"gen_lenght": 3}, "unknown option of generate 'gen_lenght'. Did you mean 'gen_length'"),
    ("llada", {"algorithm": "sdar"}, "'sdar' is not for this model, which attends in both directions; use 'llada'"),
    ("dream", {"alg": "topk"}, "unknown alg 'topk'"),
    ("dream", {"cfg_scale": 1.0}, "cfg_scale means nothing to the algorithm 'dream'"),
    ("dream", {"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
    ("sdar", {"algorithm": "llada"}, "'llada' is not for this model, which attends in blocks of 8; use 'sdar'"),
    ("sdar", {"block_length": 4}, "block_length is 4, but this model attends in blocks of 8"),
    ("sdar", {"steps": 9}, "steps is 9 for a block of 8 tokens"),
    ("sdar", {"algorithm": "llada2.1", "edit_threshold": 1.1}, "edit_threshold is 1.1"),
    ("fast-dllm-v2", {"small_block_length": 3}, "block_length 8 is not divisible by small_block_length 3"),
    ("fast-dllm-v2", {"cache": "prefix"}, "what precedes the block is always cached"),
    ("fast-dllm-v2", {"algorithm": "sdar"}, "'sdar' is not for this model, .* row i-1 predicts position i; use 'fast-dllm-v2'"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options", "message"), BAD)
def test_bad_options_are_one_clear_line(family: str, options: dict[str, Any], message: str) -> None:
    arch = models.load(CONFIGS[family]).architecture
    runner = ReferenceRunner(Network(arch, {}))
    with pytest.raises(UsageError, match=message) as caught:
        decoding.generate(runner, [prompt_of(5)], **options)
    assert "\n" not in str(caught.value) and not runner.packed


def test_names_come_with_a_suggestion() -> None:
    with pytest.raises(UnknownName) as caught:
        GenerationConfig(algorithm="fast-dlm")
    assert caught.value.suggestion == "fast-dllm"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt was given"),
        ([torch.tensor([], dtype=torch.int64)], "the prompt is empty; give at least one token"),
        ([torch.tensor([1, 2]), torch.tensor([3, MASK, 4])], f"prompt 1 has the mask token {MASK} at position 1"),
        ([torch.tensor([1, VOCABULARY])], r"expected ids in \[0, 96\), got 96"),
        ([torch.tensor([1.0])], "expected token ids"),
        ([prompt_of(401)], "the prompt of 401 tokens and gen_length 112 take 513 positions, the model has 512; shorten the "
                           "prompt to 400 tokens"),
        ("a text", "has no checkpoint directory, thus no tokenizer: give token ids instead of text"),
        (7, "prompts: expected text, token ids or a list of them, got int"),
    ],
)  # fmt: skip
def test_bad_prompts_are_one_clear_line(prompts: Any, message: str) -> None:
    arch = models.load(CONFIGS["llada"]).architecture
    with pytest.raises(UsageError, match=message) as caught:
        decoding.generate(ReferenceRunner(Network(arch, {})), prompts, gen_length=112)
    assert "\n" not in str(caught.value)


def test_every_option_belongs_to_an_algorithm() -> None:
    taken = {option for traits in decoding.ALGORITHMS.values() for option in traits.options}
    common = {"algorithm", "gen_length", "temperature", "seed", "stop_at_eos"}
    assert taken | common == {entry.name for entry in fields(GenerationConfig)}


def test_resolving_twice_changes_nothing() -> None:
    for family, options in WAYS.values():
        arch = models.load(CONFIGS[family]).architecture
        once = decoding.resolve(GenerationConfig(**options), arch)
        assert decoding.resolve(once, arch) == once


# --- keys -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(-(2**63), 2**64), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**31))
def test_keys_are_those_of_splitmix64(seed: int, request: int, step: int, position: int) -> None:
    found = row_keys(seed, request, step, torch.tensor([position, position + 1]))
    expected = [key_of(seed % 2**64, request, step, position + i) for i in range(2)]
    assert torch.equal(found, torch.cat(expected))


def test_no_two_keys_are_equal() -> None:
    positions = torch.arange(100)
    keys = [row_keys(seed, request, step, positions) for seed in range(3) for request in range(5) for step in range(20)]
    assert len(torch.cat(keys).unique()) == 3 * 5 * 20 * 100


# --- text -------------------------------------------------------------------------------------------------------------


class Texts(ReferenceRunner):
    """A runner of a model that has a directory."""

    def __init__(self, network: Network, directory: Any) -> None:
        super().__init__(network)
        self.model = models.Model(name="tiny", family="llada", config={}, architecture=network.arch, path=directory)


def test_text_in_text_out(tmp_path: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    arch: Architecture = models.load(CONFIGS["llada"]).architecture
    runner = Texts(Network(arch, random_tensors(arch, 0)), tmp_path)
    with pytest.raises(Exception, match=r"tokenizer\.json"):
        decoding.generate(runner, "w1 w2", gen_length=4)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    text, ids = decoding.generate(runner, ["w20 w30", torch.tensor([20, 30])], gen_length=4, stop_at_eos=False)
    (alone,) = decoding.generate(runner, "w20 w30", gen_length=4, stop_at_eos=False)
    assert text.token_ids.tolist() == ids.token_ids.tolist() == alone.token_ids.tolist()
    assert ids.text is None and text.text == alone.text == " ".join(f"w{i}" for i in ids.token_ids.tolist())
    with pytest.raises(UsageError, match="no chat template"):
        decoding.generate(runner, [{"role": "user", "content": "w1"}], gen_length=4)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} w50{% endfor %}")
    (chat,) = decoding.generate(runner, [{"role": "user", "content": "w20"}], gen_length=4)
    assert chat.prompt_ids.tolist() == [20, 50] and chat.text is not None
