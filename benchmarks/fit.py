"""How long a context fits how small a card: the planner's largest contexts, and plans executed within their budget.

    python -m benchmarks.fit llada-8b dream-7b llada-moe --table
    python -m benchmarks.fit llada-8b --run 128k:6GiB 32k:4GiB 512k:12GiB:3 1m:24GiB:3 1m:8GiB:3

A case is CONTEXT:BUDGET, or CONTEXT:BUDGET:LAYERS to execute the full model's plan with fewer layers: the same
configuration, the same workspace to the byte, and as ballast what the missing layers would hold on the device, so that
the driver's counter shows what the full model would take. Writes `fit-<device>[-tag].json`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.cases import GRACE_S, Clock, cut, in_own_process, options, parse_ratio, sizes, tag_of
from benchmarks.engines.plans import alive_by_plan
from benchmarks.record import environment, table, write
from mosaic.devices import Device, load_device
from mosaic.errors import UsageError
from mosaic.models import load
from mosaic.planner import Plan, Planner, Request
from mosaic.units import format_bytes, parse_bytes, parse_tokens

BUDGETS = "4GiB,6GiB,8GiB,12GiB,16GiB,24GiB,40GiB"
_AGAIN_S = 30.0
"""A step shorter than this runs twice, and the second counts: the first compiles kernels."""
COMPUTED = "computed by the planner, nothing is timed"
EXECUTED = f"one step; the second of two where the first takes less than {_AGAIN_S:g} s"


# --- the planner's table ------------------------------------------------------------------------------------------------


def limit(model: str, budget: int, arguments: Any) -> dict[str, Any]:
    """The largest context of a budget, and how it is reached."""
    planner = Planner(model, device=arguments.device, budget=budget, host_budget=arguments.host_budget)
    longest = planner.max_context(Request(seq_lens=(1,), mask_ratio=arguments.mask_ratio))
    found: dict[str, Any] = {"model": planner.model.name, "budget_bytes": budget, "max_tokens": longest}
    if longest:
        plan = planner.plan(Request(seq_lens=(longest,), mask_ratio=arguments.mask_ratio))
        found |= {
            "config": dict(plan.config), "total_bytes": plan.total_bytes, "predicted_s": plan.predicted_step_ms / 1e3,
            "host_bytes": plan.document["host_bytes"], "peak_to_average": _peak_to_average(plan, planner.device),
        }  # fmt: skip
    return found


def _peak_to_average(plan: Plan, device: Device) -> float:
    peak, average = alive_by_plan(plan.records, device)
    return peak / average


# --- execution ----------------------------------------------------------------------------------------------------------


def parse_case(text: str) -> dict[str, Any]:
    """`128k:6GiB` or `512k:12GiB:3`.

    >>> parse_case("128k:6GiB:3") == {"tokens": 131072, "budget_bytes": 6 << 30, "layers": 3}
    True
    """
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise UsageError(f"a case is CONTEXT:BUDGET or CONTEXT:BUDGET:LAYERS, such as 128k:6GiB:3; got '{text}'.")
    layers = int(parts[2]) if len(parts) == 3 else None
    return {"tokens": parse_tokens(parts[0]), "budget_bytes": parse_bytes(parts[1]), "layers": layers}


def execute(case: dict[str, Any]) -> dict[str, Any]:
    """Plan the full model, run the plan with the layers asked for, and read the driver's counter."""
    import torch

    import mosaic
    from benchmarks.bench.inputs import make_inputs
    from benchmarks.bench.meters import card, driver_bytes, synchronise
    from benchmarks.engines.mosaic_engine import fixed_part

    model, device = load(case["model"]), load_device(case["device"])
    cuda = device.backend == "cuda"
    given = {"device": device, "budget": case["budget_bytes"], "host_budget": case["host_budget"]}
    request = Request(seq_lens=(case["tokens"],), mask_ratio=case["mask_ratio"])
    full = Planner(model, **given).plan(request)
    if not full.fits:
        return {**case, "failed": f"does not fit: needs {full.total_bytes}", "max_tokens": full.max_ctx_tokens}
    part = cut(model, case["layers"])
    inputs = make_inputs(part.architecture, case["tokens"], case["mask_ratio"], case["seed"])
    with mosaic.compile(
        part, device=device, budget=case["budget_bytes"], host_budget=case["host_budget"], config=full.config,
        seed=case["seed"],
    ) as compiled:  # fmt: skip
        plan = compiled.plan(case["tokens"], masked=inputs.masked)
        ballast = full.total_bytes - plan.total_bytes
        if ballast > 0:
            compiled.workspace.resize("ballast", ballast)
        seconds: list[float] = []
        while len(seconds) < (1 if seconds and seconds[0] > _AGAIN_S else 2):
            synchronise(cuda)
            began = time.perf_counter()
            step = compiled(inputs.token_ids)
            synchronise(cuda)
            seconds.append(time.perf_counter() - began)
        used = driver_bytes(cuda)
        finite = bool(torch.isfinite(step.entropy).all() and torch.isfinite(step.confidence).all())
        committed = dict(compiled.memory().committed)
    return {
        **case, "failed": None, "card": card(cuda), "config": dict(full.config), "driver_bytes": used,
        "within": used is None or used <= case["budget_bytes"], "ballast_bytes": ballast,
        "planned_bytes": full.total_bytes, "planned_part_bytes": plan.total_bytes, "committed_bytes": committed,
        "peak_bytes": full.peak_bytes, "same_peak": full.peak_bytes == plan.peak_bytes, "host_bytes": full.document["host_bytes"],
        "seconds": seconds, "step_s": seconds[-1], "predicted_s": plan.predicted_step_ms / 1e3,
        **fixed_part(used, committed, plan.components),
        "peak_to_average": _peak_to_average(full, device), "full_predicted_s": full.predicted_step_ms / 1e3,
        "executed_layers": part.architecture.layers, "layers_of": model.architecture.layers, "finite": finite,
    }  # fmt: skip


# --- tables -------------------------------------------------------------------------------------------------------------


def limits_table(limits: list[dict[str, Any]]) -> str:
    """Budgets down, models across."""
    models = list(dict.fromkeys(entry["model"] for entry in limits))
    budgets = sorted({entry["budget_bytes"] for entry in limits})
    longest = {(entry["model"], entry["budget_bytes"]): entry["max_tokens"] for entry in limits}
    return table(
        ("largest context in", *models),
        [(format_bytes(b), *(f"{longest.get((m, b), 0):,}" for m in models)) for b in budgets],
    )


RUN_HEADER = (
    "model", "tokens", "budget", "layers run", "device in use", "planned", "host", "step s", "predicted s",
    "full step, predicted s", "moves",
)  # fmt: skip


def run_rows(cases: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line per executed case."""
    rows = []
    for c in cases:
        head = (c["name"], f"{c['tokens']:,}", format_bytes(c["budget_bytes"]))
        if c["failed"]:
            rows.append((*head, str(c["failed"]), *[""] * 7))
            continue
        used = "" if c["driver_bytes"] is None else format_bytes(c["driver_bytes"]) + ("" if c["within"] else " (over)")
        moves = ", ".join(f"{k} {v}" for k, v in c["config"].items() if v is not None)
        rows.append(
            (
                *head, f"{c['executed_layers']} of {c['layers_of']}", used, format_bytes(c["planned_bytes"]),
                format_bytes(c["host_bytes"]), f"{c['step_s']:.3f}", f"{c['predicted_s']:.3f}",
                f"{c['full_predicted_s']:.2f}", moves + ("" if c["same_peak"] else " (another peak)"),
            )
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    """Plan the table, execute the cases, record both."""
    parser = options(__doc__, models="*")
    parser.add_argument("--table", action="store_true", help="the planner's largest contexts")
    parser.add_argument("--budgets", default=sizes(BUDGETS), type=sizes)
    parser.add_argument("--run", nargs="*", default=[], help="cases to execute")
    parser.add_argument("--mask-ratio", default=0.5, type=lambda text: parse_ratio(text)[0])
    parser.add_argument("--case", help="one case as JSON, run in this process (used by --run)")
    arguments = parser.parse_args(argv)
    if arguments.case:
        print(json.dumps(execute(json.loads(arguments.case))))
        return
    clock = Clock.start(arguments.minutes)
    limits = [limit(m, b, arguments) for m in arguments.models for b in arguments.budgets] if arguments.table else []
    given = {name: getattr(arguments, name) for name in ("device", "host_budget", "mask_ratio", "seed")}
    cases = [
        {"model": m, "name": load(m).name, **parse_case(text), **given}
        for m in arguments.models
        for text in arguments.run
    ]
    runs: list[dict[str, Any]] = []
    result = {
        "environment": environment(COMPUTED if not cases else EXECUTED),
        "card": None,
        "limits": limits,
        "runs": runs,
    }
    for case in clock.while_left(cases, print):
        runs.append(in_own_process("benchmarks.fit", case, clock.left_s + GRACE_S))
        result["card"] = runs[-1].get("card") or result["card"]
        print(runs[-1], file=sys.stderr, flush=True)
        write(f"fit-{load_device(arguments.device).name}{tag_of(arguments)}", result)
    write(f"fit-{load_device(arguments.device).name}{tag_of(arguments)}", result)
    if limits:
        print(limits_table(limits))
    if runs:
        print(table(RUN_HEADER, run_rows(runs)))


if __name__ == "__main__":
    main()
