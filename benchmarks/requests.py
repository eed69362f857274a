"""Random requests, each of which runs within its budget by the driver's counter or is refused before it runs.

    python -m benchmarks.requests llada-8b dream-7b llada-moe --requests 0:200

Model, layers (cut to what the time allows), context, mask ratio and budget are drawn from the request's number, so that
any part of the list can be run again. Writes `requests-<device>[-tag].json`.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import Clock, cut, options, tag_of
from benchmarks.record import environment, table, write
from mosaic.devices import Device, load_device
from mosaic.errors import DoesNotFit
from mosaic.models import load
from mosaic.planner import Planner, Request
from mosaic.units import format_bytes

LONGEST = 65536
MOST_LAYERS = 3


def draw(
    number: int, models: Sequence[str], device: Device, host_budget: int, longest: int, seed: int
) -> dict[str, Any]:
    """One request: most budgets are near the smallest that works, on both sides of it."""
    rng = random.Random(f"{seed}/{number}")
    model, layers = rng.choice(list(models)), rng.randint(1, MOST_LAYERS)
    tokens = round(math.exp(rng.uniform(math.log(16), math.log(longest))))
    ratio = rng.choice((0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0))
    host = rng.choice((0, host_budget))
    planner = Planner(cut(load(model), layers), device=device, host_budget=host)
    needed = planner.needed(Request(seq_lens=(tokens,), mask_ratio=ratio))
    budget = round(needed * rng.choice((rng.uniform(0.6, 1.0), rng.uniform(1.0, 1.1), rng.uniform(1.0, 2.0))))
    return {
        "number": number, "model": model, "layers": layers, "tokens": tokens, "mask_ratio": ratio, "budget_bytes": max(budget, 1),
        "host_budget_bytes": host, "needed_bytes": needed,
    }  # fmt: skip


def serve(request: dict[str, Any], device: Device, seed: int) -> dict[str, Any]:
    """Compile, run one step, read the counters; `outcome` is "ran", "refused" or "error"."""
    import torch

    import mosaic
    from benchmarks.bench.inputs import make_inputs
    from benchmarks.bench.meters import driver_bytes

    cuda = device.backend == "cuda"
    model = cut(load(request["model"]), request["layers"])
    budgets = {"budget": request["budget_bytes"], "host_budget": request["host_budget_bytes"]}
    asked = Request(seq_lens=(request["tokens"],), mask_ratio=request["mask_ratio"])
    fits = Planner(model, device=device, **budgets).plan(asked).fits
    inputs = make_inputs(model.architecture, request["tokens"], request["mask_ratio"], seed)
    began = time.perf_counter()
    try:
        with mosaic.compile(
            model, device=device, budget=request["budget_bytes"], host_budget=request["host_budget_bytes"], seed=seed
        ) as compiled:
            step = compiled(inputs.token_ids)
            finite = bool(torch.isfinite(step.entropy).all())
            used = driver_bytes(cuda)
            memory = compiled.memory()
            found = {
                "outcome": "ran", "finite": finite, "driver_bytes": used,
                "pages_as_planned": dict(memory.committed) == dict(memory.planned),
                "within": used is None or used <= request["budget_bytes"],
            }  # fmt: skip
            del step
    except DoesNotFit as error:
        found = {"outcome": "refused", "needed_bytes": error.needed_bytes}
    except Exception as error:
        found = {"outcome": "error", "error": f"{type(error).__name__}: {error}"}
    gc.collect()
    as_planned = found["outcome"] == ("ran" if fits else "refused")
    return {**request, **found, "as_planned": as_planned, "seconds": time.perf_counter() - began}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The requests' outcomes, and how near the counter came to the budget."""
    ran = [row for row in rows if row["outcome"] == "ran"]
    shares = [row["driver_bytes"] / row["budget_bytes"] for row in ran if row["driver_bytes"] is not None]
    return table(
        ("requests", "number"),
        [
            ("asked", len(rows)),
            ("ran", len(ran)),
            ("refused beforehand", sum(row["outcome"] == "refused" for row in rows)),
            ("errors, out of memory included", sum(row["outcome"] == "error" for row in rows)),
            ("ran or were refused as planned", sum(row["as_planned"] for row in rows)),
            ("over the budget by the driver's counter", sum(not row["within"] for row in ran)),
            ("pages other than the plan's", sum(not row["pages_as_planned"] for row in ran)),
            ("not finite", sum(not row["finite"] for row in ran)),
            ("highest use of a budget", f"{max(shares):.4f}" if shares else ""),
        ],
    )


def main(argv: list[str] | None = None) -> None:
    """Serve the requests and record them."""
    parser = options(__doc__)
    parser.add_argument("--requests", default="0:200", help="numbers FROM:TO of the list")
    parser.add_argument("--longest", default=LONGEST, type=int, help="longest context drawn")
    arguments = parser.parse_args(argv)
    device = load_device(arguments.device)
    first, last = map(int, arguments.requests.split(":"))
    rows: list[dict[str, Any]] = []
    result = {
        "environment": environment("each request once, with the driver's counter read after its step"),
        "card": _card(device),
        "requests": rows,
    }
    clock = Clock.start(arguments.minutes)
    for number in clock.while_left(range(first, last), print):
        request = draw(number, arguments.models, device, arguments.host_budget, arguments.longest, arguments.seed)
        rows.append(serve(request, device, arguments.seed))
        if rows[-1]["outcome"] == "error" or not rows[-1].get("within", True):
            print(rows[-1], file=sys.stderr, flush=True)
    write(f"requests-{device.name}{tag_of(arguments)}", result)
    print(summary(rows))
    for row in rows:
        if row["outcome"] == "ran" and not row["within"]:
            print(f"over: {format_bytes(row['driver_bytes'])} of {format_bytes(row['budget_bytes'])}: {row}")


def _card(device: Device) -> str:
    from benchmarks.bench.meters import card

    return card(device.backend == "cuda")


if __name__ == "__main__":
    main()
