"""Random requests: plans of the shipped models on any device within any budget, and scaled-down models executed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final

import torch

import mosaic
from mosaic.devices import DEVICES
from mosaic.errors import MosaicError
from mosaic.models import PRESETS, Model, load
from mosaic.models.parts import KEPT, KV, NO_HEAD, Commit
from mosaic.models.phase import Phase
from mosaic.planner import Plan, Planner, Request
from mosaic.planner.advice import misfit
from mosaic.planner.check import check_plan
from mosaic.planner.search import TOLERANCE
from mosaic.planner.space import Config, Point

from .findings import Finding, Tally, require

__all__ = ["examine_request"]

ERRORS: Final = (MosaicError, IndexError, KeyError, RuntimeError, TypeError, ValueError, AssertionError)
MIB: Final = 1 << 20
LAYERS: Final = {"llada": "n_layers"}
"""The key of config.json that says how many layers there are, where it is not `num_hidden_layers`."""
COMMON: Final = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "float32"}
TINY: Final[Mapping[str, Mapping[str, Any]]] = {
    "llada": {
        "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 72, "embedding_size": 64,
        "mask_token_id": 63, "torch_dtype": "float32",
    },
    "dream": {
        **COMMON, "model_type": "Dream", "hidden_size": 32, "intermediate_size": 88, "vocab_size": 71, "mask_token_id": 70,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    },
    "llada-moe": {
        **COMMON, "model_type": "lladamoe", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 32,
        "expert_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 61, "mask_token_id": 60,
    },
    "sdar": {
        **COMMON, "model_type": "sdar", "hidden_size": 48, "head_dim": 16, "intermediate_size": 80, "vocab_size": 101,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "block_size": 4, "mask_token_id": 100,
    },
    "fast-dllm-v2": {
        **COMMON, "model_type": "Fast_dLLM_Qwen", "hidden_size": 48, "intermediate_size": 80, "vocab_size": 91,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "bd_size": 32, "tie_word_embeddings": True, "mask_token_id": 90,
    },
    "llada2": {
        **COMMON, "model_type": "llada2_moe", "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16,
        "intermediate_size": 72, "moe_intermediate_size": 40, "num_experts": 16, "num_experts_per_tok": 3,
        "num_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "score_function": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5, "use_qk_norm": True, "vocab_size": 101, "rope_theta": 600000.0, "rms_norm_eps": 1e-6,
        "mask_token_id": 100,
    },
}  # fmt: skip
BOUND: Final = 1e-4
"""Tolerance by the logits' scale, in float32: other chunks add up in another order."""


def examine_request(seed: int, tally: Tally) -> None:
    """Plan a request of a shipped model, or run a step of a scaled-down one in a configuration at random.

    Raises
    ------
    Finding
        If a plan says something untrue, or two configurations give two results.
    """
    rng = random.Random(f"request/{seed}")
    try:
        if rng.random() < 0.5:
            _plan(rng, tally)
        else:
            _step(rng, tally)
    except ERRORS as error:
        if isinstance(error, Finding):
            raise
        raise Finding(type(error).__name__, str(error)) from error


# --- plans ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _model(preset: str, layers: int | None) -> Model:
    """A preset, with fewer layers if a number is given."""
    family, config = PRESETS[preset]
    model = load(preset)
    if layers is None:
        return model
    return replace(load({**config, LAYERS.get(family, "num_hidden_layers"): layers}), name=f"{preset}, {layers} layers")


@lru_cache(maxsize=64)
def _planner(preset: str, layers: int | None, device: str) -> Planner:
    """One planner for all requests, which keeps what it has compiled."""
    return Planner(_model(preset, layers), device=device)


def _plan(rng: random.Random, tally: Tally) -> None:
    layers = rng.choice([2, 2, 2, 3, 3, None]) if rng.random() < 0.9 else None
    preset, device = rng.choice(list(PRESETS)), rng.choice([*DEVICES])
    shared = _planner(preset, layers, device)
    request = _request(rng)
    host = rng.choice([0, 0, rng.randrange(1 << 36), 1 << 40])
    roomy = shared.with_budgets(budget=shared.device.memory_bytes, host_budget=host)
    least = roomy.needed(request)
    budget = rng.choice([least, least - 1, rng.randint(max(1, least // 2), 2 * least), shared.device.memory_bytes])
    planner = roomy.with_budgets(budget=budget)
    plan = planner.plan(request, limit=rng.random() < 0.5)
    where = f"{preset} ({layers or 'all'} layers) on {device}, {request}, budget {budget:,}, host budget {host:,}"
    tally.add(
        "requests planned",
        f"preset {preset}",
        f"device {device}",
        f"phase {request.size.kind.name}",
        f"fits {plan.fits}",
    )
    _claims(plan, budget, host, where)
    require(plan.fits is (budget >= least), "fits", f"{where}: fits {plan.fits}, smallest budget {least:,}")
    point = planner.at(request)
    _beats_others(point, plan, rng, where, tally)
    if plan.max_ctx_tokens and rng.random() < 0.4:
        _limit(planner, request, plan, where, tally)
    if not plan.fits and rng.random() < 0.5:
        _advice(planner, request, plan, where, tally)


def _request(rng: random.Random) -> Request:
    lengths = tuple(int(2 ** rng.uniform(0, 17)) for _ in range(rng.choice([1, 1, 1, 2, 5])))
    masked: dict[str, Any] = {"mask_ratio": rng.choice([0.01, 0.5, 0.75, 1.0])}
    if rng.random() < 0.3:
        masked = {"masked": rng.randint(1, sum(lengths))}
    if rng.random() < 0.7:
        logits = rng.randint(1, sum(lengths)) if rng.random() < 0.2 else 0
        return Request(seq_lens=lengths, logit_rows=logits, **masked)
    keys = tuple(length + rng.choice([0, rng.randrange(1 << 16)]) for length in lengths)
    phase = rng.choice(
        [
            Phase(cache=KEPT, head=NO_HEAD),
            Phase(cache=KEPT),
            Phase(cache=KEPT, commit=Commit(score="confidence", rule="top")),
        ]
    )
    more = {"states": {KV: sum(keys) + rng.randrange(1000)}} if rng.random() < 0.5 else {}
    return Request(seq_lens=lengths, key_lens=keys, phase=phase, **masked, **more)


def _claims(plan: Plan, budget: int, host: int, where: str) -> None:
    """The checker accepts what a file would hold, and the plan's own figures agree."""
    violations = check_plan(Plan.from_json(plan.to_json()).document)
    require(not violations, "check", f"{where}: {[str(v) for v in violations[:3]]}")
    require(
        plan.peak_bytes >= plan.lower_bound_bytes, "peak", f"{where}: {plan.peak_bytes} below {plan.lower_bound_bytes}"
    )
    held = plan.total_bytes <= budget and plan.document["host_bytes"] <= host
    require(plan.fits is held, "fits", f"{where}: {plan.total_bytes} of {budget}, said {plan.fits}")


def _beats_others(point: Point, plan: Plan, rng: random.Random, where: str, tally: Tally) -> None:
    """No configuration at random that fits is faster than the one that the search found."""
    for config in _some(point, rng, 4):
        if point.fits(config, int(plan.document["budget_bytes"]), int(plan.document["host_budget_bytes"])):
            tally.add("configurations beaten")
            other = point.seconds(config) * 1e3
            require(plan.fits, "search", f"{where}: does not fit, but {config} does")
            require(
                plan.predicted_step_ms <= other * (1 + TOLERANCE) + 1e-6, "search",
                f"{where}: found {plan.config}, {plan.predicted_step_ms} ms; {config} takes {other} ms",
            )  # fmt: skip


def _some(point: Point, rng: random.Random, count: int) -> Iterator[Config]:
    for _ in range(count):
        choices = rng.choice(point.choice_combinations)
        yield Config(
            choices, tuple(rng.choice(point.options(choices, k)) for k in range(len(point.space.template.knobs)))
        )


def _limit(planner: Planner, request: Request, plan: Plan, where: str, tally: Tally) -> None:
    """The largest context fits, and one token more does not."""
    if len(request.seq_lens) > 1 or request.masked is not None or request.logit_rows or request.phase.cached:
        return
    longest = planner.max_context(request)
    if not 0 < longest < 1 << 31:
        return
    tally.add("largest contexts")
    at, beyond = (planner.plan(replace(request, seq_lens=(length,)), limit=False) for length in (longest, longest + 1))
    require(
        at.fits and not beyond.fits, "largest context", f"{where}: {longest} fits {at.fits}, one more {beyond.fits}"
    )


def _advice(planner: Planner, request: Request, plan: Plan, where: str, tally: Tally) -> None:
    """Every option of the advice fits if it is followed, with the bytes it names; the budget is the smallest."""
    advice = misfit(planner, request, plan)
    tally.add("advice", *(f"option {option.what}" for option in advice.options))
    for option in advice.options:
        changed, other = _followed(planner, request, option.arguments.split())
        made = changed.plan(other, limit=False)
        taken = made.fits, made.total_bytes, made.document["host_bytes"]
        # of one way to stream; the search knows more of them
        most = option.at_most and made.total_bytes < option.device_bytes
        said = True, made.total_bytes if most else option.device_bytes, option.host_bytes
        require(taken == said, "advice", f"{where}: '{option.arguments}' says {said}, gives {taken}")
    if advice.smallest_budget_bytes > MIB:
        less = planner.with_budgets(budget=advice.smallest_budget_bytes - MIB).plan(request, limit=False)
        require(not less.fits, "advice", f"{where}: {advice.smallest_budget_bytes:,} is not the smallest budget")


def _followed(planner: Planner, request: Request, words: Sequence[str]) -> tuple[Planner, Request]:
    """The planner and the request that options of the command line change."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    if "--device" in given:
        planner = Planner(planner.model, device=given["--device"], host_budget=planner.host_budget_bytes)
    planner = planner.with_budgets(budget=given.get("--budget"), host_budget=given.get("--host-budget"))
    lengths = given.get("--seq-lens", given.get("--ctx"))
    if lengths is not None:
        cut = tuple(map(int, lengths.split(",")))
        rows = {"masked": int(given["--masked"])} if "--masked" in given else {}
        request = replace(request, seq_lens=cut, logit_rows=min(request.logit_rows, sum(cut)), **rows)
    elif "--masked" in given:
        request = replace(request, masked=int(given["--masked"]))
    return planner, request


# --- steps ------------------------------------------------------------------------------------------------------------


@cache
def _compiled(family: str) -> Any:
    """A scaled-down model, its weights drawn large enough for every product to matter."""
    return mosaic.compile(TINY[family], debug="poison", threads=1, host_budget="64MiB")


def _step(rng: random.Random, tally: Tally) -> None:
    """One step in the configuration that the planner finds and in one at random: the same results."""
    family = rng.choice(list(TINY))
    model = _compiled(family)
    lengths = [rng.choice([1, 5, 17, 64, 130, 300]) for _ in range(rng.choice([1, 1, 2, 3]))]
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    ids = [torch.randint(0, model.mask_token_id + 1, (length,), generator=generator) for length in lengths]
    ids[0][0] = model.mask_token_id
    rows = torch.arange(sum(lengths))[: rng.randint(1, sum(lengths))]
    own = model(ids, logits_for=rows)
    expected = {name: getattr(own, name).clone() for name in ("token_ids", "maximum", "logsumexp", "logits")}
    count = len(own.rows)
    request = Request(seq_lens=tuple(lengths), masked=count, logit_rows=len(rows))
    config = _configuration(model, request, rng)
    where = f"{family}, lengths {lengths}, {count} masked, logits of {len(rows)} rows, {config}"
    step = model(ids, logits_for=rows, config=config)
    said = {name: step.plan.config[name] for name in config}
    same = all(_alike(value, said[name], sum(lengths)) for name, value in config.items())
    require(same, "configuration", f"{where}: {said} was in force")
    tally.add(
        "steps of models",
        f"family {family}",
        *(f"{name} {value}" for name, value in config.items() if isinstance(value, str)),
    )
    scale = max(1.0, float(expected["logits"].abs().max()))
    for name in ("maximum", "logsumexp", "logits"):
        error = float((getattr(step, name) - expected[name]).abs().max())
        require(error <= BOUND * scale, "another result", f"{where}: {name} is off by {error:.3g} of {scale:.3g}")


def _alike(asked: int | str | None, said: int | str | None, tokens: int) -> bool:
    """Whether a setting is the one that was asked for: a loop that cannot be dissolved may take any rows that are enough."""
    enough = isinstance(asked, int) and isinstance(said, int) and min(asked, said) >= tokens
    return asked == said or enough


def _configuration(model: Any, request: Request, rng: random.Random) -> dict[str, int | str | None]:
    point = model.planner.at(request)
    template = point.space.template
    config = next(iter(_some(point, rng, 1)))
    names = [choice.name for choice in template.choices] + [knob.name for knob in template.knobs]
    streams = next(choice.options for choice in template.choices if choice.name == "stream")
    return dict(zip(names, (*config.choices, *config.rows), strict=True)) | {
        "stream": rng.choice(["none", "none", *streams])
    }
