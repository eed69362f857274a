"""Record a result with the machine, versions, commit and command it came from, and put tables into documents.

A machine without the repository's history (a borrowed GPU) records no commit: `python -m benchmarks.record fill` writes
the commit of this checkout into the results that have none, before they are committed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mosaic.bench.environment import PACKAGES, commit_of
from mosaic.bench.environment import environment as describe

__all__ = [
    "RESULTS",
    "ROOT",
    "command_line",
    "environment",
    "fill_commits",
    "load_results",
    "median_seconds",
    "output_folder",
    "replace_section",
    "source_line",
    "table",
    "write",
]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "flashinfer-python"
"""Whose kernels some figures are set beside, where it is installed."""


def command_line() -> str:
    """How this process was started, as a user would write it."""
    main = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ is not None else Path(sys.argv[0]).stem
    return " ".join(["python", "-m", name, *sys.argv[1:]])


def environment(*packages: str) -> dict[str, Any]:
    """Machine, versions, commit and command of this run."""
    return describe(command_line(), packages or (*PACKAGES, BASELINE))


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def output_folder() -> Path:
    """Where results go: the folder that the variable OUT names, else benchmarks/results."""
    return Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `<name>.json` whole or not at all."""
    from mosaic.files import write_atomic

    folder = output_folder()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    return folder / f"{name}.json"


def load_results(kind: str) -> list[dict[str, Any]]:
    """Every recorded result of one benchmark, `<kind>-*.json` or `<kind>.json`, in order of their names."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"{kind}[-.]*json"))]


def fill_commits() -> list[str]:
    """Write this checkout's commit into results that have none; return their names."""
    commit, filled = commit_of(ROOT), []
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        if "environment" in result and not result["environment"].get("commit"):
            result["environment"]["commit"] = commit
            file.write_text(json.dumps(result, indent=1) + "\n")
            filled.append(file.name)
    return filled


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, align, *rows))


def source_line(result: dict[str, Any]) -> str:
    """Card or machine, versions, commit and command, in one line under a table."""
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if name != "mosaic-dllm")
    where = result.get("card") if result.get("card") not in (None, "cpu") else env["machine"]
    return f"{where}, {versions}, commit {env['commit']}, `{env['command']}`."


def replace_section(document: Path, marker: str, text: str) -> None:
    """Put generated text between `<!-- marker:begin -->` and `<!-- marker:end -->`.

    Raises
    ------
    SystemExit
        If the document has no such markers.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    content = document.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise SystemExit(f"{document} needs the markers {begin} and {end}, each once: add them where the table goes.")
    head, rest = content.split(begin)
    _, tail = rest.split(end)
    document.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


if __name__ == "__main__":
    if sys.argv[1:] != ["fill"]:
        raise SystemExit("usage: python -m benchmarks.record fill")
    print("\n".join(fill_commits()) or "every result names its commit")
