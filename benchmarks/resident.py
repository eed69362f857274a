"""How many requests are resident together under each cache, from plans alone.

    python -m benchmarks.resident llada-8b --device h200

A request holds its keys from its first step to its last; the steps of one request are planned beside the keys of all. Without a
cache nothing is held between steps, so there is no limit. Writes `resident-<model>-<device>.json`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.cases import options, tag_of
from benchmarks.record import environment, source_line, table, write
from mosaic.decoding import GenerationConfig, shapes
from mosaic.models import load
from mosaic.models.step import most_rows
from mosaic.planner import Planner
from mosaic.units import GIB, format_tokens

__all__ = ["main", "rows_of", "section"]

BUDGETS_GIB: Final = (24, 48, 80)
LENGTHS: Final = (8192, 32768, 131072)
CACHES: Final = ("dual", "sparse:retention=0.5", "sparse:retention=0.3", "sparse:retention=0.1")
ANSWER, BLOCK = 256, 32
MOST: Final = 4096
PLACES: Final = ("none", "embedding")
"""What is in host memory."""
METHOD: Final = (
    "computed from plans, with the embedding in host memory where that leaves more room: canvases of these tokens, of which "
    f"{ANSWER} are the answer, in blocks of {BLOCK}; steps of one request beside the keys of all"
)


def resident(planner: Planner, cache: str, length: int) -> int:
    """Return for how many requests with canvases of `length` tokens there is room."""
    return max(_resident(planner.with_pinned({"stream": place}), cache, length) for place in PLACES)


def _resident(planner: Planner, cache: str, length: int) -> int:
    config = GenerationConfig(algorithm="fast-dllm", gen_length=ANSWER, block_length=BLOCK, cache=cache, threshold=0.9)
    sizes = shapes(config, [length - ANSWER], planner.architecture)
    own = most_rows(sizes)

    def fits(count: int) -> bool:
        return all(planner.fits(size.beside({state: count * rows for state, rows in own.items()})) for size in sizes)

    return bisect_left(range(1, MOST + 1), True, key=lambda count: not fits(count))


def points(model: str, device: str) -> Iterator[dict[str, Any]]:
    """Yield the requests of each cache and budget, by length."""
    for budget in BUDGETS_GIB:
        planner = Planner(model, device=device, budget=budget * GIB, host_budget=GIB)
        for cache in CACHES:
            found = {str(length): resident(planner, cache, length) for length in LENGTHS}
            yield {"budget_gib": budget, "cache": cache, "requests": found}


def rows_of(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a record's table."""
    return [
        [f"{point['budget_gib']} GiB", f"`{point['cache']}`", *(f"{count:,}" for count in point["requests"].values())]
        for point in result["points"]
    ]


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table per record."""
    header = ("budget", "cache", *(format_tokens(length) for length in LENGTHS))
    return "\n\n".join(
        f"**{result['model']}, {result['device']}**\n\n{table(header, rows_of(result))}\n\n{source_line(result)}"
        for result in results
    )


def main(arguments: Sequence[str]) -> None:
    """Plan, record, and print the table."""
    asked = options(__doc__).parse_args(arguments)
    for name in asked.models:
        described = environment(METHOD)
        result = {
            "environment": described,
            "model": name,
            "device": asked.device,
            "points": [*points(load(name), asked.device)],
        }
        write(f"resident-{name}-{asked.device}{tag_of(asked)}", result)
        print(section([result]))


if __name__ == "__main__":
    main(sys.argv[1:])
