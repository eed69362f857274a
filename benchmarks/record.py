"""Records of results: figures with the machine, versions, command, method and sources that they come from.

    python -m benchmarks.record fill [COMMIT]
    python -m benchmarks.record run NAME -- benchmarks.quality exact --model small-sdar --lengths 1k

`fill` writes the commit (by default this checkout's) into records that a machine without the history made, and refuses those of
which the commit holds other sources. `run` records what a command finds that writes its results to `--out`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import mosaic
from benchmarks import sources
from benchmarks.bench.environment import PACKAGES
from benchmarks.bench.environment import environment as describe
from benchmarks.sources import ROOT

__all__ = [
    "RESULTS",
    "ROOT",
    "command_line",
    "digest_of",
    "environment",
    "figures_of",
    "fill",
    "load_results",
    "median_seconds",
    "output_folder",
    "source_line",
    "table",
    "write",
]

RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "flashinfer-python"
"""A package whose kernels some figures are compared with, if it is installed."""
COMMANDS = {"mosaic": "mosaic.cli", "benchmarks.quality": "benchmarks.quality.__main__"}
"""The commands that `run` records, and the modules whose `main` parses their arguments."""
_DIGITS = 9
"""Significant digits of a float that is recorded."""
_FILLED = ("commit", "against_commit", "digest")
"""Fields that are added to a record after its figures."""


def command_line() -> str:
    """The command of this process, as a user would write it, without paths of this machine."""
    main = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ is not None else Path(sys.argv[0]).stem
    return " ".join(["python", "-m", name.removesuffix(".__main__"), *map(_shown, sys.argv[1:])])


def _shown(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f"…/{path.name}"


def environment(method: str, *packages: str, data: Iterable[str | Path] = ()) -> dict[str, Any]:
    """Describe this run, before it measures anything.

    Parameters
    ----------
    method
        How a figure is made, as one sentence without a full stop: "median of 20 steps, after 3 that are not counted". One that
        begins with "computed" times nothing: another run may repeat its figures to the bit.
    packages
        Whose versions matter, if others than PyTorch and Triton do.
    data
        Files of this repository that the run reads and that are no modules.

    Raises
    ------
    SystemExit
        If the record is to lie among the results and the tree differs from its commit, or `mosaic` is another checkout's.
    """
    if sources.from_root(Path(mosaic.__file__)) is None:
        raise SystemExit(
            f"mosaic is loaded from {mosaic.__file__}: to measure this checkout, set PYTHONPATH={sources.ROOT}."
        )
    if output_folder() == RESULTS and (others := sources.uncommitted()):
        raise SystemExit(
            f"{', '.join(others[:5])}{', …' * (len(others) > 5)}: not what commit {sources.commit_of()} holds. A record says which "
            "sources it measures: commit them first, or set OUT=DIRECTORY to try something out."
        )
    sources.also(data)
    described = describe(command_line(), packages or (*PACKAGES, BASELINE))
    return {**described, "commit": None, "method": method}


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `<name>.json` whole or not at all: with the time, the sources loaded by now, the commit that holds them, and a digest.

    A record whose sources are not those of this checkout's commit names none; a machine without a history does not know it.
    """
    from mosaic.files import write_atomic

    measured, commit = sources.of_run(), sources.commit_of()
    if commit is not None and (others := sources.differing(measured, commit)):
        print(f"{name}: not of a commit, {', '.join(others)} differ from {commit}", file=sys.stderr)
        commit = None
    recorded = datetime.now(UTC).isoformat(timespec="seconds")
    env = {**result["environment"], "recorded": recorded, "commit": commit, "sources": measured}
    if commit is not None and "against" in env:
        env["against_commit"] = sources.holding(env["against"])
    folder = output_folder()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.json", sealed({**result, "environment": env}))
    return folder / f"{name}.json"


def sealed(result: dict[str, Any]) -> str:
    """Return the text of a record: rounded floats, a digest, and a line for each value that is not long."""
    plain = _rounded(json.loads(json.dumps(result)))
    plain["environment"]["digest"] = digest_of(plain)
    return _lines(plain) + "\n"


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a record, without its provenance."""
    return {name: value for name, value in result.items() if name != "environment"}


def digest_of(result: dict[str, Any]) -> str:
    """Return a digest of all that a record says but its commit, which may be filled in later."""
    env = {name: value for name, value in result["environment"].items() if name not in _FILLED}
    text = json.dumps({**result, "environment": env}, sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _lines(value: Any, indent: str = "\n") -> str:
    """JSON with one line per member of long values, and one per list of numbers."""
    text = json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict) and len(text) > 120:
        members = (f"{json.dumps(name, ensure_ascii=False)}: {_lines(member, inner)}" for name, member in value.items())
        return "{" + ",".join(inner + member for member in members) + indent + "}"
    if isinstance(value, list) and len(text) > 120 and any(isinstance(member, (dict, list)) for member in value):
        return "[" + ",".join(inner + _lines(member, inner) for member in value) + indent + "]"
    return text


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


def load_results(kind: str) -> list[dict[str, Any]]:
    """Every recorded result of one benchmark, `<kind>-*.json` or `<kind>.json`, in order of their names."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"{kind}[-.]*json"))]


def fill(name: str = "HEAD") -> tuple[list[str], list[str]]:
    """Write a commit into the records that have none and whose sources it holds.

    Returns
    -------
    tuple
        The filled records, and the refused ones with reasons.
    """
    commit = sources.commit_of(name)
    if commit is None:
        raise SystemExit(f"'{name}' is no commit of {sources.ROOT}: records are filled in a checkout with its history.")
    filled, refused = [], []
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        env = result["environment"]
        if env.get("commit"):
            continue
        if not env.get("sources"):
            refused.append(f"{file.name}: it does not say which sources were measured. Record it again.")
        elif others := sources.differing(env["sources"], commit):
            refused.append(
                f"{file.name}: {commit} has not what was measured of {', '.join(others)}. Name the commit that has."
            )
        elif "against" in env and (against := sources.holding(env["against"])) is None:
            refused.append(f"{file.name}: no commit holds what it was measured against.")
        else:
            env["commit"] = commit
            if "against" in env:
                env["against_commit"] = against
            file.write_text(_lines(result) + "\n")
            filled.append(file.name)
    return filled, refused


def run(name: str, command: str, arguments: Sequence[str]) -> None:
    """Record the result of one of `COMMANDS`."""
    from mosaic.models import load

    env = environment("one run of every item")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        sys.argv = [command, *arguments, "--out", str(out)]
        try:
            import_module(COMMANDS[command]).main()
        except SystemExit:
            if not out.exists():
                raise
        result = json.loads(out.read_text())
    if path := load(result["model"]).path:
        sources.also(file for file in Path(path).iterdir() if sources.from_root(file))
    result.pop("items", None)  # what was asked and answered, one by one: their figures are kept
    for policies in result.get("schedules", {}).values():
        for figures in policies.values():
            result["answers"] = figures["groups"]["all"]["count"]
            for one_by_one in [key for key, value in figures.items() if isinstance(value, str)]:
                del figures[one_by_one]
            figures["groups"] = {key: group for key, group in figures["groups"].items() if "," not in key}
    env["command"] = shlex.join([*([] if command == "mosaic" else ["python", "-m"]), command, *arguments])
    print(write(name, {**result, "environment": env}))


# --- in documents -------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, align, *rows))


def source_line(result: dict[str, Any]) -> str:
    """Card or machine, versions, command, method and age, in one line under a table."""
    env = result["environment"]
    versions = [f"{name} {version}" for name, version in env["versions"].items() if name != "mosaic-dllm"]
    where = (
        result.get("card") if result.get("card") not in (None, "cpu") else f"{env['machine']}, Python {env['python']}"
    )
    said = ", ".join([where, *versions, f"`{env['command']}`"])
    return f"{said}. {env['method'][:1].upper()}{env['method'][1:]}. {_age(env)}."


def _age(env: dict[str, Any]) -> str:
    """How many of a record's measured files have changed."""
    if "not_repeated" in env:
        return f"{env['not_repeated'].capitalize()}, not repeated: its sources were not recorded"
    if "sources" not in env:
        return "As just measured"
    against = f", against {env['against_commit']}" if "against_commit" in env else ""
    then, others = f"Commit {env['commit']}{against}", sources.changed(env["sources"])
    if not others:
        return f"{then}; none of {len(env['sources'])} measured files had changed when this was written"
    names = ", ".join(others[:3]) + ", …" * (len(others) > 3)
    return f"{then}; {len(others)} of {len(env['sources'])} measured files had changed when this was written ({names})"


def main(given: Sequence[str]) -> None:
    """Fill commits in, or record a command."""
    match given:
        case ["fill", *commits] if len(commits) < 2:
            filled, refused = fill(*commits)
            print("\n".join(filled) or "no record was filled in")
            if refused:
                raise SystemExit("\n".join(refused))
        case ["run", name, "--", command, *arguments] if command in COMMANDS:
            run(name, command, arguments)
        case _:
            raise SystemExit(
                "usage: python -m benchmarks.record fill [COMMIT], or run NAME -- benchmarks.quality exact …"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
