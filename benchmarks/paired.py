"""Two checkouts of Mosaic on one card, in turns: steps, generations, and the host's time between two small steps.

    python -m benchmarks.paired --against ../mosaic-before --device h100

writes `paired-<device>.json`. Each turn is a process of its own, the other checkout's first, then this one's, as often as asked;
a figure is the median of both turns. Random weights, the same in both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import sources
from benchmarks.cases import options, tag_of
from benchmarks.record import ROOT, environment, table, write

__all__ = ["HEADER", "main", "rows_of"]

MODELS: Final = ("llada-8b", "sdar-8b")
HEADER: Final = ("", "before, ms", "now, ms", "now / before")
_WORKER: Final = Path(__file__).parent / "paired_worker.py"


def _turn(checkout: Path, device: str, models: Sequence[str]) -> dict[str, Any]:
    """Measure one checkout in a process of its own."""
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(_WORKER), device, *models]
    found = subprocess.run(
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


def rows_of(result: Mapping[str, Any]) -> list[list[str]]:
    """Rows for a table, one a figure."""
    rows = []
    for name in result["now"]:
        before, now = (result[which][name] for which in ("before", "now"))
        rows.append([name, f"{before:.3f}", f"{now:.3f}", f"{now / before:.3f}"])
    return rows


def main(arguments: Sequence[str]) -> None:
    """Measure both checkouts and record the figures."""
    parser = options(__doc__, models="*")
    parser.add_argument("--against", required=True, type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each checkout")
    asked = parser.parse_args(arguments)
    described = environment(f"medians of {asked.rounds} turns of each checkout, in alternation")
    found: dict[str, dict[str, list[float]]] = {"before": {}, "now": {}}
    card = None
    for _ in range(asked.rounds):
        for which, checkout in (("before", asked.against.resolve()), ("now", ROOT)):
            turn = _turn(checkout, asked.device, asked.models or MODELS)
            card, files = turn.pop("card"), turn.pop("files")
            if which == "now":
                sources.also(file for file in files if sources.from_root(Path(file)))
            else:
                described["against"] = sources.of_checkout(files, checkout)
            for name, values in turn.items():
                found[which].setdefault(name, []).extend(values)
    result = {"environment": described, "card": card}
    result |= {which: {name: statistics.median(values) for name, values in by.items()} for which, by in found.items()}
    write(f"paired-{asked.device}{tag_of(asked)}", result)
    print(table(HEADER, rows_of(result)))


if __name__ == "__main__":
    main(sys.argv[1:])
