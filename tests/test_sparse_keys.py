"""Sparse keys of bidirectional models: generations against a loop in float64, the dual cache, sessions, plans, bad input."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from reference_runner import Network, random_tensors
from sparse_keys_stated import Options, Stated
from test_decoding import CONFIGS, Case, Draw, assert_same, fast_dllm, llada, prompt_of

from mosaic import models
from mosaic.decoding import GenerationConfig, Session, Step
from mosaic.decoding.config import resolve
from mosaic.errors import MosaicError, UsageError
from mosaic.models.parts import KV, Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.sparse_keys import PACKED, SparseKeys
from mosaic.planner import Planner, Request

FAMILIES = ("llada", "dream")
WAYS: dict[str, dict[str, Any]] = {
    "hosted": {"config": {"stream": "all", "hidden": "host", "proj": 128}, "host_budget": "64MiB"},
    "by heads": {"config": {"attention": "heads", "heads": 1, "proj": 128}},
    "by heads, hosted": {
        "config": {"attention": "heads", "heads": 1, "hidden": "host", "stream": "all", "proj": 128}, "host_budget": "64MiB",
    },
}  # fmt: skip
"""Settings that every step takes as far as it has them."""


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[str, Case]]:
    """A model of each family, whose memory is poisoned; and one of Dream in each of the other `WAYS`."""
    made = {}
    for name in (*FAMILIES, *WAYS):
        family = name if name in FAMILIES else "dream"
        arch = models.load(CONFIGS[family]).architecture
        tensors, options = random_tensors(arch, 0), WAYS.get(name, {})
        made[name] = Case(CompiledRunner(CONFIGS[family], tensors, debug="poison", **options), Network(arch, tensors))
    yield made
    for case in made.values():
        case.runner.close()


def spelled(chosen: Options) -> str:
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    if not {"sample", "drift"} & given.keys():
        del given["near"]
    return "sparse:" + ":".join(f"{name}={value}" for name, value in given.items())


def some_options(rng: random.Random) -> tuple[Options, dict[str, Any]]:
    selection = rng.choice(["head-centric", "head-centric", "uniform", "uniform-published"])
    chosen = Options(
        retention=rng.choice([0.05, 0.29, 0.5, 1.0]), selection=selection, pool=rng.choice([1, 3, 5]),
        group=rng.choice(["max", "mean"]) if selection == "head-centric" else "max", interval=rng.choice([1, 1, 2, 3]),
    )  # fmt: skip
    if rng.random() < 0.5:
        chosen.delay = rng.randint(0, 1)
        return chosen, rng.choice([{"threshold": 0.3}, {"threshold": 1.0}, {"factor": 0.8}])
    chosen.sample, chosen.near = rng.choice([0, 0.125, 0.3, 0.5, 1]), rng.choice([0, 2, 32])
    if rng.random() < 0.5:
        chosen.drift, chosen.sample = rng.choice([0.0, 0.2, 0.4]), rng.choice([None, chosen.sample])
    return chosen, rng.choice([{"threshold": 0.3}, {"threshold": 1.0}, {"factor": 0.8}])


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 16))])
def test_generations_equal_a_loop_in_float64(cases: dict[str, Case], seed: int) -> None:
    rng = random.Random(seed)
    family = FAMILIES[seed % 2]
    case, prompt, block = cases[family], prompt_of(rng.choice([1, 5, 13, 22]), seed), rng.choice([3, 4, 8])
    chosen, rule = some_options(rng)
    gen, temperature = block * rng.randint(2, 4), rng.choice([0.0, 0.0, 0.7])
    draw = Draw(temperature=temperature, seed=seed, scaled=family == "dream")
    expected, said = Stated(case.network).generate(prompt, gen, block, chosen, draw, **rule)
    given = {"algorithm": "fast-dllm", "block_length": block, "temperature": temperature, "seed": seed, **rule}
    found = assert_same(case, prompt, expected, gen_length=gen, cache=spelled(chosen), **given)
    assert found.steps == len(said)
    taken: list[str] = []
    steps: list[Step] = []
    with Session(case.runner) as session:
        session.submit(prompt, cache=spelled(chosen), gen_length=gen, stop_at_eos=False, on_step=steps.append, **given)
        while session.advance():
            pass
        taken = [step.phase for step in steps]
    assert taken == said


def test_a_schedule_takes_its_steps(cases: dict[str, Case]) -> None:
    """LLaDA's own schedule, with which the phases of a block are known: one Refresh, of every two blocks one with interval 2."""
    case, prompt = cases["llada"], prompt_of(9)
    for chosen in (Options(retention=0.3), Options(retention=0.3, delay=1, interval=2, selection="uniform")):
        expected, said = Stated(case.network).generate(prompt, 16, 4, chosen, Draw(scaled=False), steps=16)
        assert_same(case, prompt, expected, gen_length=16, block_length=4, steps=16, cache=spelled(chosen))
        first = ["full_step"] * chosen.delay + ["refresh"]
        blocks = [first + ["reuse"] * (4 - len(first)), ["reuse"] * 4]
        assert said == (2 * (blocks[0] + blocks[1]) if chosen.interval == 2 else 4 * blocks[0])


def test_every_reading_of_the_selection_gives_an_answer_of_its_own(cases: dict[str, Case]) -> None:
    """Few keys, wide windows and grouped heads, so that each reading keeps others."""
    case, prompt = cases["dream"], prompt_of(40)
    readings = [
        Options(retention=0.1, pool=5, selection=name) for name in ("head-centric", "uniform", "uniform-published")
    ]
    readings += [Options(retention=0.1, pool=5, group="mean"), Options(retention=0.1, pool=1)]
    answers = set()
    for chosen in readings:
        expected, _ = Stated(case.network).generate(prompt, 16, 8, chosen, Draw(), threshold=1.0)
        found = assert_same(
            case,
            prompt,
            expected,
            gen_length=16,
            block_length=8,
            threshold=1.0,
            cache=spelled(chosen),
            algorithm="fast-dllm",
        )
        answers.add(tuple(found.token_ids.tolist()))
    assert len(answers) == len(readings)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("selection", ["head-centric", "uniform", "uniform-published"])
def test_all_keys_kept_are_the_dual_cache(cases: dict[str, Case], family: str, selection: str) -> None:
    case, prompt = cases[family], prompt_of(11)
    options = {"algorithm": "fast-dllm", "block_length": 6, "threshold": 0.4, "gen_length": 24, "stop_at_eos": False}
    draw = Draw(scaled=family == "dream")
    expected = fast_dllm(case.network, prompt, 24, 6, "dual", draw, threshold=0.4)
    for cache in ("dual", f"sparse:retention=1:selection={selection}"):
        assert_same(case, prompt, expected, cache=cache, **options)
    (fewer,) = case.generate([prompt], cache=f"sparse:retention=0.1:selection={selection}", **options)
    assert fewer.token_ids.tolist() != expected[11:].tolist()


def test_a_refresh_at_every_step_is_the_plain_algorithm(cases: dict[str, Case]) -> None:
    """A block of one token has one step."""
    case, prompt = cases["llada"], prompt_of(7)
    expected = llada(case.network, prompt, 10, 1, 10, Draw(scaled=False))
    for retention in (1.0, 0.2):
        assert_same(
            case, prompt, expected, gen_length=10, block_length=1, steps=10, cache=SparseKeys(retention=retention)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_windowed_refresh_of_everything_is_a_whole_one(cases: dict[str, Case], family: str) -> None:
    """The whole prompt is sampled. With all keys kept that is the dual cache."""
    case, prompt = cases[family], prompt_of(11)
    options = {"algorithm": "fast-dllm", "block_length": 6, "threshold": 0.4, "gen_length": 24, "stop_at_eos": False}
    expected = fast_dllm(case.network, prompt, 24, 6, "dual", Draw(scaled=family == "dream"), threshold=0.4)
    assert_same(case, prompt, expected, cache="sparse:retention=1:sample=1:near=3", **options)


@pytest.mark.parametrize(("family", "sample"), [("llada", 0.5), ("dream", None)])
def test_refreshes_are_left_out_while_keys_change_little(
    cases: dict[str, Case], family: str, sample: float | None
) -> None:
    """Each block's keys have changed by 0.06 to 0.98."""
    case, prompt, chosen = cases[family], prompt_of(22), Options(retention=0.3, sample=sample, near=2, drift=0.58)
    expected, said = Stated(case.network).generate(prompt, 24, 4, chosen, Draw(scaled=family == "dream"), threshold=1.0)
    given = {"algorithm": "fast-dllm", "gen_length": 24, "block_length": 4, "threshold": 1.0}
    assert_same(case, prompt, expected, cache=spelled(chosen), **given)
    assert 0 < said.count("windowed" if sample else "refresh") - (sample is None) < 5


@pytest.mark.parametrize("way", WAYS)
def test_heads_at_a_time_streams_and_the_host_change_nothing(cases: dict[str, Case], way: str) -> None:
    given = {
        "algorithm": "fast-dllm",
        "block_length": 4,
        "threshold": 0.3,
        "gen_length": 12,
        "cache": "sparse:retention=0.3:sample=0.5",
    }
    steps: list[Step] = []
    plain = cases["dream"].generate([prompt_of(150)], **given)[0]
    other = cases[way].generate([prompt_of(150)], on_step=steps.append, **given)[0]
    assert plain.token_ids.tolist() == other.token_ids.tolist()
    took = {step.phase: step.plan.config for step in steps}
    assert took.keys() == {"refresh", "windowed", "reuse"} and WAYS[way]["config"].items() <= took["refresh"].items()


@pytest.mark.soak
def test_requests_of_one_session_get_what_they_get_alone(cases: dict[str, Case]) -> None:
    """Of several lengths and options, one with a dual cache; they come one after another, so phases mix."""
    rng = random.Random(5)
    for family in FAMILIES:
        case = cases[family]
        asked: list[tuple[torch.Tensor, dict[str, Any]]] = []
        for length in (3, 17, 8, 21, 5):
            chosen, rule = some_options(rng)
            asked.append((prompt_of(length), {"cache": spelled(chosen), "block_length": rng.choice([4, 6]), **rule}))
        asked[3][1]["cache"] = "dual"
        given = {"algorithm": "fast-dllm", "gen_length": 12, "stop_at_eos": False}
        alone = [case.generate([prompt], **given, **options)[0].token_ids.tolist() for prompt, options in asked]
        with Session(case.runner) as session:
            live = []
            for prompt, options in asked:
                live.append(session.submit(prompt, **given, **options))
                session.advance()
            while session.advance():
                pass
        assert [one.generation.token_ids.tolist() for one in live if one.generation is not None] == alone


def test_a_step_serves_refreshes_of_several_requests(cases: dict[str, Case]) -> None:
    """Requests that begin together refresh together, whatever their retention, and reuse together."""
    case, steps = cases["llada"], list[Step]()
    with Session(case.runner) as session:
        for length, retention in ((9, 0.5), (4, 0.2)):
            session.submit(
                prompt_of(length), algorithm="fast-dllm", block_length=4, gen_length=8, threshold=1.0, stop_at_eos=False,
                cache=SparseKeys(retention=retention), on_step=steps.append,
            )  # fmt: skip
        advances = 0
        while session.advance():
            advances += 1
    phases = [[step.phase for step in steps if step.request == number] for number in (0, 1)]
    assert phases[0] == phases[1] == ["refresh", "reuse", "reuse", "reuse"] * 2
    assert advances in (7, 8)  # the last one may end the session


def test_a_cancelled_request_leaves_no_rows(cases: dict[str, Case]) -> None:
    case = cases["dream"]
    with Session(case.runner) as session:
        live = [
            session.submit(prompt_of(n), algorithm="fast-dllm", gen_length=8, block_length=4, cache="sparse")
            for n in (12, 6)
        ]
        for _ in range(3):
            session.advance()
        assert case.runner.model.state_rows == {"packed": (8 + 4) + (5 + 4)}  # floor(0.5 x 16), floor(0.5 x 10)
        session.cancel(live[0])
        session.cancel(live[1])
        assert case.runner.model.state_rows == {}


# --- plans ------------------------------------------------------------------------------------------------------------


def test_no_layer_keeps_its_full_keys() -> None:
    """A Refresh has no state but the packed keys, in the bytes that its retention says, and one layer's keys at a time."""
    planner = Planner("llada-8b", device="h200")
    phase = Phase(commit=Commit(score="confidence", rule="top"))
    refresh, reuse = SparseKeys(retention=0.1).steps(phase, 8192, 32).values()
    rows = (8192 - 32) // 10 + 32
    for size in (refresh, reuse):
        plan = planner.plan(size)
        assert [pool for pool in plan.pools if pool.startswith("state/")] == ["state/packed"]
        exact = rows * 32 * 2 * 4096 * 2
        assert exact <= plan.pools["state/packed"] <= exact * 9 / 8 + (2 << 20)  # rows are rounded up for planning
        assert plan.dims["packed_rows"] >= rows and KV.rows_dim not in plan.dims
    assert refresh.name == "refresh" and reuse.name == "reuse"
    keys = [b for b in planner.plan(refresh).records.buffers if b.name.endswith((".k", "/k", "/v"))]
    assert len(keys) == 64 and all(one.pool == "workspace" for one in keys)
    spans = sorted((one.start, one.end) for one in keys if one.name.endswith("/k"))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_steps_are_no_larger_than_their_sizes(cases: dict[str, Case]) -> None:
    for family in FAMILIES:
        for chosen in (
            SparseKeys(interval=2, delay=1),
            SparseKeys(retention=1.0),
            SparseKeys(sample=0.5, near=2, drift=0.0),
        ):
            case = cases[family]
            case.generate(
                [prompt_of(14)], algorithm="fast-dllm", gen_length=12, block_length=4, threshold=0.3, cache=chosen
            )
            assert case.runner.peak_bytes <= case.runner.checked.total_bytes


def test_the_largest_context_counts_the_packed_keys() -> None:
    from mosaic.cli.sparse_keys import requests_of

    planner = Planner("llada-8b", device="h200", budget="24GiB")
    for name, request in requests_of(planner, "128k", SparseKeys(retention=0.1), 32, 256)[0].items():
        longest = planner.max_context(request)
        for context, fits in ((longest, True), (longest + 1, False)):
            again = requests_of(planner, str(context), SparseKeys(retention=0.1), 32, 256)[0][name]
            assert isinstance(again, Request) and planner.plan(again, limit=False).fits == fits, (name, context)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "cache", "message"),
    [
        ("llada", "sparse:retention=0", r"cache: retention is 0; it must be a share of the keys, in \(0, 1\]."),
        ("llada", "sparse:retention=1.5", r"cache: retention is 1.5; it must be a share of the keys, in \(0, 1\]."),
        ("llada", "sparse:interval=0", "cache: interval is 0; it must be a number of blocks, at least 1."),
        ("llada", "sparse:pool=4", "cache: pool is 4; it must be an odd number of positions."),
        ("llada", "sparse:delay=2", "cache: delay is 2; it must be 0 or 1."),
        ("llada", "sparse:drift=-1", "cache: drift is -1; it must be a number of at least 0, relative to kept keys."),
        ("llada", "sparse:sample=1.5", r"cache: sample is 1.5; it must be a share of the prompt, in \[0, 1\]."),
        (
            "llada",
            "sparse:sample=0:delay=1",
            "cache: a delay computes every block in full; leave out delay, or sample and drift.",
        ),
        ("llada", "sparse:sample=0:near=-1", "cache: near is -1; it must be a number of tokens."),
        (
            "llada",
            "sparse:near=4",
            "cache: near is about the answer's side; give sample or drift too, or leave it out.",
        ),
        ("llada", "sparse:selection=global", "unknown cache's selection 'global'"),
        (
            "llada",
            "sparse:selection=uniform:group=mean",
            "cache: group 'mean' is about selection 'head-centric'; leave it out.",
        ),
        ("llada", "dual:retention=0.5", "cache 'dual' has no options; retention is for sparse."),
        ("llada", "sparce", "unknown cache 'sparce'. Did you mean 'sparse'"),
        ("llada", 3, r"cache is 3; it must be SparseKeys\(…\), or one of prefix, dual, sparse."),
        (
            "sdar",
            "sparse",
            "cache 'sparse': this model attends by blocks of 8; sparse keys are for models that attend in both",
        ),
        ("dream", "sparse", "cache means nothing to the algorithm 'dream'"),
    ],
)
def test_bad_input(family: str, cache: Any, message: str) -> None:
    with pytest.raises(MosaicError, match=message) as raised:
        resolve(GenerationConfig(cache=cache, gen_length=16), models.load(CONFIGS[family]).architecture)
    assert "\n" not in str(raised.value)


def test_policies_that_do_not_go_with_it() -> None:
    arch = models.load(CONFIGS["llada"]).architecture
    for options, message in (({"eviction": "focus"}, "dual"), ({"cfg_scale": 1.0}, "leave out cache 'sparse'")):
        with pytest.raises(UsageError, match=message):
            resolve(GenerationConfig(cache="sparse", gen_length=16, block_length=8, **options), arch)


def test_requests_without_what_the_phases_need_are_refused(cases: dict[str, Case]) -> None:
    from mosaic.runtime.steps import StepRequest

    runner, phase = cases["llada"].runner, Phase(commit=Commit(score="confidence", rule="top"))
    sizes = SparseKeys().steps(phase, 16, 4)
    for name, message in (("refresh", "needs 'spans'"), ("reuse", "needs 'shift'")):
        with pytest.raises(UsageError, match=message):
            runner.step([
                StepRequest(phase=sizes[name].phase, token_ids=prompt_of(16), rows=torch.tensor([3]), current=torch.tensor([95]))
            ])  # fmt: skip
    assert PACKED.name == "packed"
    windowed = SparseKeys(sample=0.5).renewing(phase)
    given = {"positions": torch.arange(16, dtype=torch.int32), "spans": (8, 12, 8, 16, 4)}
    with pytest.raises(UsageError, match="a windowed Refresh needs 'spans' and 'part'"):
        runner.step([
            StepRequest(phase=windowed, token_ids=prompt_of(16), rows=torch.tensor([9]), current=torch.tensor([95]), values=given)
        ])  # fmt: skip
