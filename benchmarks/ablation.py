"""The contribution of each part (Mosaic, section 5.3): to the largest context by planning, to latency by running.

    python -m benchmarks.ablation llada-8b --budgets 16GiB,24GiB,40GiB --ctx 32k --minutes 8

Levels add one another: the manager alone (every buffer placed, logits of all rows, no chunks), masked rows only, chunks,
attention split, weights streamed, hidden states offloaded. Latencies take one move each on top of the fastest plan, at
the same context. Writes `ablation-<model>-<device>[-tag].json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import GRACE_S, Clock, cut, in_own_process, options, parse_ratio, sizes, tag_of, token_counts
from benchmarks.engines.limits import largest
from benchmarks.record import environment, table, write
from mosaic.devices import Device, load_device
from mosaic.errors import UnknownName
from mosaic.models import Model, load
from mosaic.planner import Planner, Request
from mosaic.units import GIB, MIB, format_bytes

Settings = dict[str, int | str | None]

MOVES = ("attention", "stream", "hidden")
"""Choices whose first option is no move."""
LEVELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("chunks", ("attention", "stream", "hidden")),
    ("attention split", ("stream", "hidden")),
    ("weights streamed", ("hidden",)),
    ("hidden states offloaded", ()),
)
"""The addition of a level to earlier ones, and the choices that it still keeps fixed."""
_MOST = 1 << 24


def fixed_choices(model: str | Model, device: str | Device, names: Sequence[str] = MOVES) -> dict[str, str]:
    """The options of some choices that take no move."""
    choices = Planner(model, device=device).space().template.choices
    return {choice.name: choice.options[0] for choice in choices if choice.name in names}


def split_attention(model: str | Model, device: str | Device) -> Settings:
    """Attention by quarters of the key-value heads."""
    planner = Planner(model, device=device)
    split = next(choice.options[-1] for choice in planner.space().template.choices if choice.name == "attention")
    return {"attention": split, "heads": max(planner.model.architecture.attention.kv_heads // 4, 1)}


# --- the largest context ------------------------------------------------------------------------------------------------


def limits(model: str, budget: int, device: str, host_budget: int, ratio: float) -> list[dict[str, Any]]:
    """The largest context of every level, by the planner."""
    given: dict[str, Any] = {"device": device, "budget": budget, "host_budget": host_budget}
    found = []
    for name, share in (("manager alone", 1.0), ("masked rows only", ratio)):
        planner = Planner(model, **given)
        found.append((name, _largest_unchunked(planner, share)))
    for name, fixed in LEVELS:
        planner = Planner(model, **given, pinned=fixed_choices(model, device, fixed))
        found.append((name, planner.max_context(Request(seq_lens=(1,), mask_ratio=ratio))))
    return [{"level": name, "budget_bytes": budget, "max_tokens": tokens} for name, tokens in found]


def _largest_unchunked(planner: Planner, ratio: float) -> int:
    """The largest context without a single move: every knob off, every choice at its first option."""

    def fits(tokens: int) -> bool:
        request = Request(seq_lens=(tokens,), mask_ratio=ratio)
        return planner.plan(request, config={}).fits

    return largest(fits, guess=16384, step=1, most=_MOST)


# --- latency ------------------------------------------------------------------------------------------------------------


def variants(model: str, tokens: int, device: str, ratio: float) -> dict[str, Settings]:
    """Configurations by name, each one change from the fastest plan."""
    planner = Planner(model, device=device, pinned=fixed_choices(model, device))
    fastest: Settings = dict(planner.plan(Request(seq_lens=(tokens,), mask_ratio=ratio)).config)
    split = split_attention(model, device)
    return {
        "no moves": {},
        "fastest": fastest,
        "attention split": {**fastest, **split},
        "weights streamed": {**fastest, "stream": "all"},
        "hidden states offloaded": {**fastest, "hidden": "host"},
        "all together": {**fastest, **split, "stream": "all", "hidden": "host"},
    }


def run_variant(case: Mapping[str, Any]) -> dict[str, Any]:
    """Time one configuration in this process."""
    import statistics

    import mosaic
    from benchmarks.bench.inputs import make_inputs
    from benchmarks.bench.meters import card, driver_bytes, timed

    device = load_device(case["device"])
    cuda = device.backend == "cuda"
    model = cut(load(case["model"]), case["layers"])
    inputs = make_inputs(model.architecture, case["tokens"], case["mask_ratio"], case["seed"])
    with mosaic.compile(
        model, device=device, host_budget=case["host_budget"], config=case["config"], seed=case["seed"]
    ) as compiled:
        plan = compiled(inputs.token_ids, config=case["config"]).plan
        seconds = timed(lambda: compiled(inputs.token_ids, config=case["config"]), case["repeats"], cuda=cuda)
        return {
            **case, "failed": None, "in_force": dict(plan.config), "card": card(cuda), "seconds": seconds,
            "step_s": statistics.median(seconds),
            "predicted_s": plan.predicted_step_ms / 1e3, "workspace_bytes": plan.components["workspace"],
            "driver_bytes": driver_bytes(cuda), "planned_bytes": plan.total_bytes,
        }  # fmt: skip


# --- tables -------------------------------------------------------------------------------------------------------------


def limits_table(found: list[dict[str, Any]]) -> str:
    """Levels down, budgets across."""
    budgets = sorted({entry["budget_bytes"] for entry in found})
    levels = list(dict.fromkeys(entry["level"] for entry in found))
    value = {(entry["level"], entry["budget_bytes"]): entry["max_tokens"] for entry in found}
    return table(
        ("largest context", *(format_bytes(b) for b in budgets)),
        [(level, *(f"{value[level, b]:,}" for b in budgets)) for level in levels],
    )


RUN_HEADER = ("step", "tokens", "ms", "over the fastest", "predicted ms", "workspace MiB", "device MiB")


def run_rows(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line per configuration, with its extra time over the fastest at the same context."""
    base = {run["tokens"]: run["step_s"] for run in runs if run["variant"] == "fastest" and not run["failed"]}
    rows: list[tuple[str, ...]] = []
    for run in runs:
        head = (run["variant"], f"{run['tokens']:,}")
        if run["failed"]:
            rows.append((*head, str(run["failed"]), *[""] * 4))
            continue
        over = f"{run['step_s'] / base[run['tokens']] - 1:+.1%}" if run["tokens"] in base else ""
        used = "" if run["driver_bytes"] is None else f"{run['driver_bytes'] / MIB:,.0f}"
        rows.append(
            (*head, f"{run['step_s'] * 1e3:,.1f}", over, f"{run['predicted_s'] * 1e3:,.1f}",
             f"{run['workspace_bytes'] / MIB:,.0f}", used)
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    """Plan the levels, time the variants, record both."""
    parser = options(__doc__, models="*")
    parser.add_argument("--budgets", default=(16 * GIB, 24 * GIB, 40 * GIB), type=sizes)
    parser.add_argument("--ctx", default="32k", help="contexts to time, or none")
    parser.add_argument("--mask-ratio", default=0.5, type=lambda text: parse_ratio(text)[0])
    parser.add_argument("--layers", default=None, type=int, help="time with fewer layers")
    parser.add_argument("--only", default="", help="variants to time, by name, with commas; all if not given")
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--case", help="one variant as JSON, run in this process")
    arguments = parser.parse_args(argv)
    if arguments.case:
        print(json.dumps(run_variant(json.loads(arguments.case))))
        return
    clock = Clock.start(arguments.minutes)
    for model in arguments.models:
        _ablate(model, arguments, clock)


def _ablate(model: str, arguments: Any, clock: Clock) -> None:
    described = environment(
        f"largest contexts computed by the planner; a step is the median of {arguments.repeats} after one that is not counted"
    )
    loaded = load(model)
    ratio = arguments.mask_ratio
    found = [
        entry
        for budget in arguments.budgets
        for entry in limits(model, budget, arguments.device, arguments.host_budget, ratio)
    ]
    runs: list[dict[str, Any]] = []
    result = {"environment": described, "card": None, "model": loaded.name, "limits": found, "runs": runs}
    cases = []
    for tokens in () if arguments.ctx == "none" else token_counts(arguments.ctx):
        known = variants(model, tokens, arguments.device, ratio)
        for name in arguments.only.split(",") if arguments.only else known:
            if name not in known:
                raise UnknownName("variant", name, known)
            cases.append(
                {
                    "model": model, "device": arguments.device, "host_budget": arguments.host_budget, "tokens": tokens,
                    "mask_ratio": ratio, "seed": arguments.seed, "layers": arguments.layers, "variant": name,
                    "config": known[name], "repeats": arguments.repeats,
                }
            )  # fmt: skip
    for case in clock.while_left(cases, print):
        runs.append(in_own_process("benchmarks.ablation", case, clock.left_s + GRACE_S))
        result["card"] = runs[-1].get("card") or result["card"]
        print(runs[-1], file=sys.stderr, flush=True)
    write(f"ablation-{loaded.name}-{load_device(arguments.device).name}{tag_of(arguments)}", result)
    print(f"\n{loaded.name}\n{limits_table(found)}")
    if runs:
        print(f"\n{table(RUN_HEADER, run_rows(runs))}")


if __name__ == "__main__":
    main()
