"""Policies side by side: what is read from a command line, pairs and their intervals, forced canvases, and the document."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_session import FAMILIES

import mosaic
from benchmarks.quality.compare import CompareSettings, compare, configurations
from benchmarks.quality.evaluation import evaluation_set, gen_length
from benchmarks.quality.items import LONG_TASKS
from benchmarks.quality.pairing import difference, mcnemar, ratio
from benchmarks.quality.policies import policy, schedule
from benchmarks.quality.replay import Agreement, Decided, Records, forced, recording
from benchmarks.quality.vocabulary import EOS, MASK, vocabulary
from mosaic.decoding import GenerationConfig, generate
from mosaic.errors import UnknownName, UsageError
from mosaic.models import load
from mosaic.models.policies.flashblock import PrefixReuse
from mosaic.models.policies.focus_options import PRESETS as EVICTIONS
from mosaic.models.policies.focus_options import Eviction
from mosaic.models.policies.mage_options import PRESETS
from mosaic.models.policies.sparse_keys import SparseKeys
from mosaic.runtime.compiled import CompiledModel

CONFIG: dict[str, Any] = {
    **FAMILIES["sdar"], "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "block_size": 32, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 640, "mask_token_id": MASK,
    "eos_token_id": EOS, "max_position_embeddings": 1024,
}  # fmt: skip
DYNAMIC = "dynamic:threshold=0.2"
ASKED = {"tasks": ("retrieval", "addition"), "lengths": (128,), "per_task": 2, "batch": 8}


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIG, device="cpu", host_budget=0, seed=3) as compiled:
        generator = torch.Generator().manual_seed(7)
        for name, view in sorted(compiled.weights().items()):
            if not name.startswith("="):
                vector = view.dim() == 1
                view.copy_(torch.empty(view.shape).normal_(1.0 if vector else 0.0, 0.5, generator=generator))
        yield compiled


def test_policies_and_schedules_are_read_as_they_are_written() -> None:
    assert policy("exact", 100).options == {}
    assert policy("exact:threshold=0.9", 100).options == {"threshold": 0.9}
    found = policy("quest:ratio=1/7:exact_layers=1", 1000).options["attention"]
    assert (found.k, found.page, found.by, found.ratio) == (144, 16, "bounds", 1 / 7)  # whole pages
    found = policy("mage:k=24:per=query_head:carried=true:ratio=0.5", 1000).options["attention"]
    assert (found.k, found.per, found.carried, found.ratio) == (24, "query_head", True, 0.5)
    assert policy("flashblock:reuse_steps=4", 9).options["attention"] == PrefixReuse(steps=4)
    both = policy("mage+flashblock:k=24:reuse_change=1/4", 9).options["attention"]
    assert (both.k, both.reuse) == (24, PrefixReuse(change=0.25))
    assert all(policy(name, 9).options["attention"] == preset for name, preset in PRESETS.items())
    assert schedule("dynamic:threshold=0.95")["threshold"] == 0.95 and schedule("static:8")["steps"] == 8
    both = policy("quest:k=24:page=8+focus:alpha=1.2:threshold=mean+dc+:block_commit=cached", 9).options
    assert (both["attention"].k, both["block_cache"], both["block_commit"]) == (24, "dc+", "cached")
    assert both["eviction"] == Eviction(alpha=1.2, threshold="mean")
    assert policy("dc+", 9).options == {"block_cache": "dc+"} == policy("exact+dc+", 9).options
    assert (
        policy("dc++focus", 9).options
        == {"block_cache": "dc+", "eviction": Eviction()}
        == policy("focus+dc+", 9).options
    )
    assert policy("dc+focus-public", 9).options == {"block_cache": "dc", "eviction": EVICTIONS["focus-public"]}
    reusing = policy("mage+flashblock:k=24+dc", 9).options
    assert (reusing["attention"].k, reusing["attention"].reuse, reusing["block_cache"]) == (24, PrefixReuse(), "dc")
    assert [policy(name, 9).options for name in ("dual", "exact+prefix")] == [{"cache": "dual"}, {"cache": "prefix"}]
    asked = policy("sparse:retention=1/5:selection=uniform-published:delay=1:interval=2:threshold=0.8", 9).options
    kept = SparseKeys(retention=0.2, selection="uniform-published", delay=1, interval=2)
    assert asked == {"cache": kept, "threshold": 0.8}
    refused: dict[str, tuple[type[Exception], str]] = {
        "sparse:retention=0": (UsageError, "retention is 0"),
        "sparse:interval=0": (UsageError, "interval is 0"),
        "sparse+dual": (UsageError, "one cache, not two"),
        "dual:retention=0.5": (UnknownName, "unknown option of 'dual:retention=0.5' 'retention'"),
        "mages": (UnknownName, "Did you mean 'mage'"),
        "mage:ratio=1/0": (UsageError, "ratio is '1/0'; it must be a share"),
        "mage:ratio=1/16:page=0": (UsageError, "page is 0; it must be"),
        "mage:ration=2": (UnknownName, "Did you mean 'ratio'"),
        "mage:k": (UsageError, "expected option=value, got 'k'"),
        "exact:k=3": (UsageError, "exact attention selects nothing; leave k out"),
        "mage:k=0": (UsageError, "k is 0"),
        "focus+": (UnknownName, "policy ''"),
        "fokus+dc": (UnknownName, "Did you mean 'focus'"),
        "focus:alfa=2": (UnknownName, "Did you mean 'alpha'"),
        "focus:alpha=0.5": (UsageError, "alpha is 0.5"),
        "focus+focus-public": (UsageError, "policy focus\\+focus-public: one eviction, not two"),
        "dc+dc+": (UsageError, "one block_cache, not two"),
        "mage:k=4+flashblock:k=8": (UsageError, "one k, not two"),
        "exact:threshold=0.5+dc:threshold=0.4": (UsageError, "one threshold, not two"),
        "mage+exact": (UsageError, "exact attention and another do not go together"),
        "mage+quest": (UnknownName, "attention 'mage\\+quest'"),
        "mage:steps=3": (UnknownName, "unknown option of 'mage:steps=3' 'steps'"),
    }
    for text, (kind, message) in refused.items():
        with pytest.raises(kind, match=message):
            policy(text, 100)
    for text, message in (("static", "static:16"), ("static:0", "static:16"), ("statics", "Did you mean 'static'")):
        with pytest.raises(UsageError, match=message):
            schedule(text)


def test_what_cannot_be_compared_is_refused_before_anything_runs() -> None:
    for options, message in (
        ({"policies": ()}, "each of the policies once, got none"),
        ({"policies": ("exact", "exact")}, "each of the policies once"),
        ({"policies": ("exact",), "split": "test"}, "split is 'test'; it must be one of judge, choose"),
        ({"policies": ("exact",), "batch": 0}, "batch 0 and replay 0"),
        ({"policies": ("exact",), "replay": -1}, "batch 16 and replay -1"),
    ):
        with pytest.raises(UsageError, match=message):
            CompareSettings(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="attends in both directions"):
        configurations(CompareSettings(policies=("exact", "mage")), load("small").architecture)
    with pytest.raises(UsageError, match="this model attends by blocks of 32"):
        configurations(CompareSettings(policies=("exact", "sparse")), load("small-sdar").architecture)
    with pytest.raises(UsageError, match="steps is 64 for a block of 32"):
        configurations(CompareSettings(policies=("exact",), schedules=("static:64",)), load("small-sdar").architecture)


def test_the_splits_have_no_document_in_common() -> None:
    tasks = ("retrieval", *LONG_TASKS)
    sets = [
        {
            item.prompt
            for seed in (0, 1)
            for item in evaluation_set(seed, tasks=tasks, lengths=(1024,), choosing=choosing)
        }
        for choosing in (False, True)
    ]
    assert not sets[0] & sets[1] and min(map(len, sets)) == 100


def test_mcnemar_counts_splits_as_uneven() -> None:
    for gained, lost in itertools.product(range(7), repeat=2):
        flips = list(itertools.product((0, 1), repeat=gained + lost))
        uneven = sum(abs(2 * sum(flip) - len(flip)) >= abs(gained - lost) for flip in flips)
        assert mcnemar(gained, lost) == pytest.approx(uneven / len(flips))
    assert 0 < mcnemar(500, 700) < 1e-8 and mcnemar(1000, 1001) == pytest.approx(1.0, abs=0.01)


def test_intervals_hold_what_was_drawn_from() -> None:
    """Of 200 samples with a known mean about 95 % have it within, and pairs are kept together."""
    rng = np.random.default_rng(0)
    inside = ratios = 0
    for _ in range(200):
        base = rng.exponential(50, 60)  # differs far more from item to item than between policies
        values = base * 1.1 + rng.normal(2, 1, 60)
        found, times = (
            difference([*(values - 0.1 * base)], [*base]),
            ratio([*(base * rng.normal(1.2, 0.1, 60))], [*base]),
        )
        inside += found["low"] <= 2 <= found["high"]
        ratios += times["low"] <= 1.2 <= times["high"]
        assert found["low"] <= found["difference"] <= found["high"] < found["low"] + 1
    assert 175 <= inside <= 199 and 175 <= ratios <= 199
    assert difference([3.0] * 5, [1.0] * 5) == {"difference": 2.0, "low": 2.0, "high": 2.0}


def test_agreement_counts_rows_by_words() -> None:
    generator = random.Random(0)
    for _ in range(20):
        total = Agreement()
        expected = dict.fromkeys(("rows", "rows_agree", "committed", "committed_agree", "own"), 0)
        for _ in range(6):
            count = generator.randrange(1, 9)
            tokens, others = ([generator.randrange(3) for _ in range(count)] for _ in range(2))
            taken, own = ([generator.random() < 0.5 for _ in range(count)] for _ in range(2))
            later = generator.random() < 0.5
            total.add(_decided(others, own), _decided(tokens, taken), later=later)
            for a, b, by_record, by_policy in zip(tokens, others, taken, own, strict=True):
                expected["rows"] += later
                expected["rows_agree"] += later and a == b
                expected["committed"] += later and by_record
                expected["committed_agree"] += later and by_record and a == b
                expected["own"] += later and by_policy
        assert {name: getattr(total, name)[1] for name in expected} == expected


def _decided(tokens: list[int], committed: list[bool]) -> Decided:
    return Decided(
        positions=torch.arange(len(tokens)), token_ids=torch.tensor(tokens), committed=torch.tensor(committed), block=0
    )


@pytest.mark.parametrize("steps", ["dynamic:threshold=0.2", pytest.param("static:4", marks=pytest.mark.soak)])
def test_forced_canvases_are_those_of_the_record_whatever_the_policy_decides(model: CompiledModel, steps: str) -> None:
    prompts = [
        torch.tensor(vocabulary().encode(item.prompt)) for item in evaluation_set(tasks=("addition",), per_task=4)
    ]
    prompts += [torch.arange(5, 90), torch.arange(7, 71)]
    dense = GenerationConfig(gen_length=40, **schedule(steps))
    records: Records = {}
    expected = generate(model, prompts, dense)
    watched = generate(model, prompts, recording(dense, model.architecture, records))
    assert [a.token_ids.tolist() for a in watched] == [a.token_ids.tolist() for a in expected]
    for request, answer in enumerate(expected):  # the record has every decision of the answer
        decided = {
            int(place): int(token)
            for step in records[request]
            for place, token, taken in zip(step.positions, step.token_ids, step.committed, strict=True)
            if taken
        }
        start = prompts[request].numel()
        assert [decided[start + place] for place in range(len(answer.token_ids))] == answer.token_ids.tolist()
    for name, same in (("mage:k=256:exact_layers=0", True), ("mage:k=1:exact_layers=0", False)):
        agreements: dict[int, Agreement] = {}
        sparse = GenerationConfig(gen_length=40, **schedule(steps), **policy(name, 256).options)
        answers = generate(model, prompts, forced(sparse, model.architecture, records, agreements))
        assert [a.token_ids.tolist() for a in answers] == [a.token_ids.tolist() for a in expected]
        assert [a.steps for a in answers] == [a.steps for a in expected]
        for request, found in agreements.items():
            rows = sum(step.positions.numel() for step in records[request])
            assert sum(found.rows) == rows
            assert sum(found.committed) == sum(int(step.committed.sum()) for step in records[request])
            assert not same or (found.rows_agree, found.own) == (found.rows, found.committed)
            assert found.rows_agree[0] == found.rows[0]  # a block's first step attends to all keys
        assert same or sum(sum(found.rows_agree) for found in agreements.values()) < sum(
            sum(found.rows) for found in agreements.values()
        )


def test_sparse_keys_are_compared_with_whole_steps_by_the_tokens_that_they_compute() -> None:
    """Keeping all is the dual cache; each block's Refresh computes the canvas, and so does each step without a cache."""
    names = ("exact", "dual", "sparse:retention=1", "sparse:retention=0.1", "sparse:delay=1", "sparse:interval=2")
    tiny = {"max_sequence_length": 256, "d_model": 32, "mlp_hidden_size": 48, "vocab_size": 640, "embedding_size": 640}
    config = {**FAMILIES["llada"], **tiny, "mask_token_id": MASK, "eos_token_id": EOS}
    asked = CompareSettings(policies=names, schedules=("static:8",), tasks=("addition",), per_task=2, replay=1)
    with mosaic.compile(config, device="cpu", host_budget=0, seed=3) as compiled:
        by_policy = compare(compiled, asked)["schedules"]["static:8"]
    computed, forwards = (
        {name: [int(part) for part in figures[key].split()] for name, figures in by_policy.items()}
        for key in ("processed", "forwards")
    )
    canvases = [
        item.tokens + gen_length("addition") for item in evaluation_set(tasks=asked.tasks, per_task=asked.per_task)
    ]
    refreshes = {
        "dual": 2,
        "sparse:retention=1": 2,
        "sparse:retention=0.1": 2,
        "sparse:delay=1": 4,
        "sparse:interval=2": 1,
    }
    assert all(count == 16 for counts in forwards.values() for count in counts)  # no answer ended early
    assert computed["exact"] == [16 * canvas for canvas in canvases]
    for name, full in refreshes.items():
        assert computed[name] == [full * canvas + (16 - full) * 32 for canvas in canvases]
    assert by_policy["sparse:retention=1"]["tokens_right"] == by_policy["dual"]["tokens_right"]
    assert by_policy["sparse:retention=1"]["replay"] == by_policy["dual"]["replay"]


@pytest.mark.soak
def test_the_document_has_every_figure_and_a_whole_budget_changes_nothing(model: CompiledModel) -> None:
    names = ("exact", "mage:ratio=1", "mage:k=1:exact_layers=0", "focus:keep=8+dc+:block_commit=cached")
    asked = CompareSettings(policies=names, schedules=("static:3", "static:2"), replay=1, **ASKED)  # type: ignore[arg-type]
    shown: list[tuple[str, int, int]] = []
    kept: list[list[int]] = []
    found = compare(
        model, asked, progress=lambda *now: shown.append(now),
        keep=lambda document: kept.append([len(by_policy) for by_policy in document["schedules"].values()]),
    )  # fmt: skip
    assert kept == [[1], [2], [3], [4], [4, 1], [4, 2], [4, 3], [4, 4]]
    hurried = compare(
        model, replace(asked, tasks=("addition",), replay=0, seconds=1e-9, schedules=(DYNAMIC, "static:3"))
    )
    assert [*hurried["schedules"]] == [DYNAMIC] and [*hurried["schedules"][DYNAMIC]] == ["exact"]
    prompts = [
        torch.tensor(vocabulary().encode(item.prompt)) for item in evaluation_set(tasks=("addition",), per_task=2)
    ]
    decoded = generate(model, prompts, GenerationConfig(gen_length=gen_length("addition"), **schedule(DYNAMIC)))
    forced = [sum(sure <= 0.2 for sure in answer.confidence.tolist()) for answer in decoded]
    figures = hurried["schedules"][DYNAMIC]["exact"]
    assert figures["forced"] == " ".join(map(str, forced)) and any(forced)
    assert figures["groups"]["all"]["forced"] == sum(forced) / 2
    assert json.loads(json.dumps(found))["settings"]["policies"] == list(names)
    assert shown[-1] == (f"static:2, {names[-1]}", 12, 12)
    items = evaluation_set(tasks=asked.tasks, lengths=asked.lengths, per_task=2)
    for steps, by_policy in zip((3, 2), found["schedules"].values(), strict=True):
        exact, whole, few, evicted = (by_policy[name] for name in names)
        assert "against" not in exact["groups"]["all"]
        same = ("exact", "tokens", "forwards", "tokens_right", "decoded", "processed", "again")
        assert [exact[key] for key in same] == [whole[key] for key in same]
        assert set(whole["groups"]) == {"all", "retrieval", "retrieval, 128", "addition"}
        change = whole["groups"]["all"]["against"]
        assert change["exact"]["p"] == 1.0 and change["forwards"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
        replay = whole["replay"]["all"]
        assert replay["count"] == 2 and replay["later"]["rows_agree"] == 1.0
        assert replay["later"]["own"] == replay["later"]["committed"]
        assert few["replay"]["all"]["first"]["rows_agree"] == 1.0 > few["replay"]["all"]["later"]["rows_agree"]
        for one in (exact, few):
            forwards, tokens = ([int(part) for part in one[key].split()] for key in ("forwards", "tokens"))
            blocks = [
                math.ceil((item.tokens + n) / 32) - item.tokens // 32 for item, n in zip(items, tokens, strict=True)
            ]
            assert all(n <= count * steps for n, count in zip(forwards, blocks, strict=True))
            group = one["groups"]["all"]
            assert group["forwards"] == pytest.approx(sum(forwards) / len(items))
            assert group["tokens_per_forward"] == pytest.approx(sum(tokens) / sum(forwards))
            assert one["processed"] == " ".join(str(32 * count) for count in forwards)
        computed, decoded, again, forwards = (
            [int(part) for part in evicted[key].split()] for key in ("processed", "decoded", "again", "forwards")
        )
        assert all(n >= tokens for n, tokens in zip(computed, decoded, strict=True))
        assert evicted["groups"]["all"]["processed_per_decoded"] == pytest.approx(sum(computed) / sum(decoded))
        assert sum(computed) < 32 * sum(forwards) and 0 < sum(again) < 4 * sum(decoded)
        assert exact["groups"]["all"]["again_per_decoded"] > evicted["groups"]["all"]["again_per_decoded"]
