"""Record a result with the machine, versions, commit and command it came from, and put tables into documents."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Machine, versions, commit and command of this run."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "mosaic"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "machine": f"{cpu or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "commit": commit + ("+" if dirty else ""),
        "command": " ".join(["python", "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]),  # type: ignore[union-attr]
    }


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def write(name: str, result: dict[str, Any]) -> None:
    """Write `benchmarks/results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, align, *rows))


def replace_section(document: Path, marker: str, text: str) -> None:
    """Put generated text between `<!-- marker:begin -->` and `<!-- marker:end -->`."""
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    content = document.read_text()
    head, rest = content.split(begin, 1)
    _, tail = rest.split(end, 1)
    document.write_text(f"{head}{begin}\n{text}\n{end}{tail}")
