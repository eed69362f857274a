"""One denoising step on the CUDA card of this machine: time, predicted time, and bytes by the device's own counter.

`python -m benchmarks.step llada-8b 4096 32768` writes benchmarks/results/step-<card>.json. Random weights, bf16,
half of the tokens masked, one model after the other in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.record import ROOT, environment, replace_section, table, write

DEVICE = "h200"
GIB = 2**30


def measure(model: str, tokens: int) -> dict[str, Any]:
    """Run one model at one length; everything is released when the process ends."""
    import torch

    import mosaic

    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    with mosaic.compile(model, device=DEVICE) as compiled:
        ids = torch.randint(0, compiled.mask_token_id, (tokens,), generator=torch.Generator().manual_seed(0))
        ids[tokens // 2 :] = compiled.mask_token_id
        compiled(ids)
        seconds = []
        for _ in range(1 if tokens > 65536 else 5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step = compiled(ids)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        plan = compiled.plan(tokens, masked=tokens // 2)
        return {
            "model": model,
            "tokens": tokens,
            "step_s": statistics.median(seconds),
            "predicted_s": plan.predicted_step_ms / 1e3,
            "used_bytes": used(),
            "planned_bytes": plan.total_bytes,
            "workspace_bytes": plan.components["workspace"],
            "config": dict(plan.config),
            "finite": bool(torch.isfinite(step.entropy).all()),
            "card": torch.cuda.get_device_name(),
        }


def main() -> None:
    """Measure every length in a process of its own, record, and print the table."""
    model, *lengths = sys.argv[1:]
    if lengths[0] == "one":
        print(json.dumps(measure(model, int(lengths[1]))))
        return
    rows = []
    for tokens in lengths:
        command = [sys.executable, "-m", "benchmarks.step", model, "one", tokens]
        rows.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        )
        print(rows[-1], file=sys.stderr)
    write(
        f"step-{model}-{DEVICE}",
        {"environment": environment("torch", "triton"), "card": rows[0]["card"], "steps": rows},
    )
    report(model)


def report(model: str) -> None:
    """Put the recorded table into docs/performance.md."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"step-{model}-{DEVICE}.json").read_text())
    env = result["environment"]
    text = table(
        ("tokens", "step", "predicted", "device in use", "planned"),
        [
            (f"{r['tokens']:,}", f"{r['step_s']:.3f} s", f"{r['predicted_s']:.3f} s", f"{r['used_bytes'] / GIB:.2f} GiB",
             f"{r['planned_bytes'] / GIB:.2f} GiB")
            for r in result["steps"]
        ],
    )  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    text += f"\n\n{model} on one {result['card']}, {versions}, commit {env['commit']}, `{env['command']}`."
    replace_section(ROOT / "docs" / "performance.md", f"step-{model}", text)
    print(text)


if __name__ == "__main__":
    main()
