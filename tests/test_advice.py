"""Every way out that a misfit names is taken as it is written, fits, costs what was said, and is the least of its kind."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mosaic.devices import DEVICES
from mosaic.models import load
from mosaic.planner import Planner, Request
from mosaic.planner.advice import Misfit, Option, misfit
from mosaic.planner.limits import smallest_total
from mosaic.planner.plan import Plan
from mosaic.units import MIB

CARD = replace(DEVICES["rtx-3090"], memory_bytes=64 * MIB, context_bytes=MIB, library_bytes=0, page_bytes=4096)
"""A card about as small as the model: memory runs out in kibibytes."""


@pytest.fixture(scope="module")
def roomy() -> Planner:
    return Planner(load("small"), device=CARD)


@cache
def elsewhere(device: str) -> Planner:
    return Planner(load("small"), device=device)


def settings(arguments: str) -> dict[str, str]:
    words = arguments.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def taken(planner: Planner, request: Request, given: Mapping[str, str]) -> Plan:
    """The plan of the command line with some more options."""
    budget, host_budget = given.get("--budget"), given.get("--host-budget")
    other = planner.with_budgets(budget=budget, host_budget=host_budget)
    if "--device" in given:
        other = elsewhere(given["--device"]).with_budgets(budget=budget, host_budget=planner.host_budget_bytes)
    changed: dict[str, Any] = {}
    if "--ctx" in given:
        changed["seq_lens"] = (int(given["--ctx"]),)
    if "--seq-lens" in given:
        changed["seq_lens"] = tuple(map(int, given["--seq-lens"].split(",")))
    if "--masked" in given:
        changed["masked"] = int(given["--masked"])
    request = replace(request, **changed)
    return other.plan(request, limit=False)


def less(option: Option) -> dict[str, str]:
    """The option with a little less of what it asks for, or more of what it gives up."""
    given = settings(option.arguments)
    if option.what in ("budget", "host-budget"):
        name = f"--{option.what}"
        return {**given, name: str(int(given[name].removesuffix("MiB")) - 1) + "MiB"}
    more = str(int(given[f"--{option.what}"]) + 1)
    return dict.fromkeys(given, more)  # a context and its masked rows are one number


def explained(planner: Planner, request: Request) -> Misfit:
    plan = planner.plan(request)
    assert not plan.fits
    return misfit(planner, request, plan)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("short", [0.0, pytest.param(0.3, marks=pytest.mark.soak), 0.9])
@pytest.mark.parametrize("sequences", [1, 3])
def test_every_option_fits_as_written_and_is_the_least_of_its_kind(
    sequences: int, short: float, roomy: Planner
) -> None:
    """`short` is the share of the workspace that is missing; at 0 it is one page."""
    rng = random.Random(f"{sequences} {short}")
    lengths = tuple(rng.randrange(200, 3000) for _ in range(sequences))
    request = Request(seq_lens=lengths, masked=rng.choice((None, sum(lengths))))
    needed = roomy.needed(request)
    workspace = roomy.with_budgets(budget=needed).plan(request, limit=False).components["workspace"]
    planner = roomy.with_budgets(budget=needed - max(int(short * workspace), CARD.page_bytes))
    found = explained(planner, request)
    kinds = [option.what for option in found.options]
    assert "budget" in kinds and found.suggestion == found.options[0].arguments
    for option in found.options:
        plan = taken(planner, request, settings(option.arguments))
        assert plan.fits, option
        assert (plan.total_bytes, plan.document["host_bytes"]) == (option.device_bytes, option.host_bytes)
        assert plan.document["predicted_step_ms"] == option.predicted_ms
        if kinds.count(option.what) == 1 and option.what not in ("device", "seq-lens"):
            assert not taken(planner, request, less(option)).fits, option
    assert ("masked" in kinds) == (short == 0.0) == taken(planner, request, {"--masked": "1"}).fits
    assert ("ctx" in kinds) == (len(lengths) == 1 and found.max_ctx_tokens > 0)
    first_fits = planner.plan(Request(seq_lens=lengths[:1]), limit=False).fits
    assert ("seq-lens" in kinds) == (len(lengths) > 1 and first_fits)


@pytest.mark.parametrize("seed", range(2))
def test_host_memory_is_offered_where_it_helps_and_only_there(seed: int, roomy: Planner) -> None:
    rng = random.Random(seed)
    request = Request(seq_lens=(rng.randrange(200, 3000),))
    floor = smallest_total(roomy.at(request), 1 << 42)[0]  # with all the host there is
    helped = explained(roomy.with_budgets(budget=floor + MIB // 2), request)
    hopeless = explained(roomy.with_budgets(budget=floor - MIB // 2), request)
    assert "host-budget" in [option.what for option in helped.options]
    assert "host-budget" not in [option.what for option in hopeless.options]


def test_a_budget_below_the_weights_is_helped_by_the_host(roomy: Planner) -> None:
    """It named a larger budget alone."""
    request = Request(seq_lens=(256,))
    weights = roomy.plan(request, limit=False).components["weights"]
    found = explained(roomy.with_budgets(budget=weights), request)
    assert {"budget", "host-budget", "device"} <= {option.what for option in found.options}
    assert found.floor == "the fixed part"
    assert found.max_ctx_tokens == 0 and not {"ctx", "masked"} & {option.what for option in found.options}
    here = [option.predicted_ms for option in found.options if option.what in ("budget", "host-budget")]
    assert here == sorted(here)
    text = list(found.lines())
    assert all(any(option.arguments in line for line in text) for option in found.options)


def test_what_no_single_change_holds_is_offered_both_budgets(roomy: Planner) -> None:
    """More tokens than the whole card holds without the host, in a budget below what the host can help."""
    request = Request(seq_lens=(60_000,), masked=10)
    assert roomy.needed(request) > CARD.memory_bytes
    found = explained(roomy.with_budgets(budget="8MiB"), request)
    both = [settings(option.arguments) for option in found.options if option.what == "host-budget"]
    assert both and all(given.keys() == {"--budget", "--host-budget"} for given in both)
    assert all(taken(roomy, request, given).fits for given in both)


@pytest.mark.parametrize("returned", [pytest.param(0, marks=pytest.mark.soak), 53_236])
def test_no_residency_of_weights_needs_less_than_is_said_to_be_needed(returned: int) -> None:
    """Beside returned logits the head is on the device anyway: streaming it too takes a page more than leaving it there."""
    config = {
        "model_type": "sdar", "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151_936, "mask_token_id": 151_669, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "block_size": 4, "torch_dtype": "bfloat16",
    }  # fmt: skip
    planner = Planner(load(config), device="l40s", host_budget=1 << 40)
    request = Request(seq_lens=(31_532, 4_994, 25_181, 145, 91_423), mask_ratio=0.75, logit_rows=returned)
    needed = {option: planner.with_pinned({"stream": option}).needed(request) for option in ("75%", "layers", "all")}
    assert planner.needed(request) == min(needed.values())
    assert planner.with_budgets(budget=min(needed.values())).plan(request).fits
    assert (needed["all"] > needed["layers"]) == bool(returned)
