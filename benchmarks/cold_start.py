"""How soon a new process answers, with kernels kept and without: `python -m benchmarks.cold_start sdar-8b --device h200`.

Each start is a process of its own over one folder of kernels, which is empty before the first: that one warms a session, another
finds what it kept and warms nothing, a third does both. Seconds count from the process's start to its imports, to the end of
`mosaic.compile`, of `Session.warm`, and to the first outcome of a request: the step that decides first, behind its prompt. Gaps are
between such outcomes from there on. Weights are random, and their time is in that of `compile`.
Writes `cold-start-<model>-<device>.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from benchmarks import sources
from benchmarks.cases import options
from benchmarks.record import environment, source_line, table, write
from mosaic.units import format_bytes, parse_tokens

__all__ = ["HEADER", "STARTS", "main", "rows_of", "section", "started"]


class Start(NamedTuple):
    """What a process finds, and whether it warms its session."""

    kept: str
    warms: bool


STARTS: Final = (Start("none", True), Start("all", False), Start("all", True))
METHOD: Final = "one process of each kind, in this order, over one folder of kernels that is empty at first"


def started(model: Any, device: str, prompt: int, answer: int, *, warms: bool, began: float) -> dict[str, Any]:
    """Answer one request in this process, which began then (Unix time), and return when what was done."""
    import torch

    import mosaic
    from benchmarks.bench.meters import card
    from benchmarks.traffic import prompt_of
    from mosaic.decoding import GenerationConfig, Session

    found: dict[str, Any] = {"imported_s": time.time() - began}
    with mosaic.compile(model, device=device, seed=3) as compiled, Session(compiled) as session:
        found["compiled_s"] = time.time() - began
        config = GenerationConfig(gen_length=answer, stop_at_eos=False)
        if warms:
            session.warm(config, requests=1, tokens=prompt + answer)
            found["warm_s"] = time.time() - began
        asked, outcomes = time.time(), list[float]()
        ids = prompt_of(compiled.architecture, prompt, torch.Generator().manual_seed(prompt))
        request = session.submit(
            ids, config, on_step=lambda step: outcomes.extend([time.time()] * bool(len(step.positions)))
        )
        while session.live:
            session.advance()
        gaps = [1e3 * (after - before) for before, after in pairwise(outcomes)]
        assert request.generation is not None and len(request.generation.token_ids) == answer
        found |= {
            "first_s": outcomes[0] - asked, "whole_s": outcomes[0] - began, "median_ms": statistics.median(gaps),
            "most_ms": max(gaps), "card": card(cuda=compiled.asynchronous), "files": sources.loaded(),
        }  # fmt: skip
    return found


def starts(model: str, asked: Any) -> Iterator[dict[str, Any]]:
    """The figures of each start, in a process of its own."""
    with TemporaryDirectory() as folder:
        for start in STARTS:
            case = {"model": model, "device": asked.device, "prompt": asked.prompt, "answer": asked.answer}
            kernels = Path(folder, "kernels")
            environ = {**os.environ, "MOSAIC_KERNELS": str(kernels)}
            given = json.dumps({**case, "warms": start.warms, "began": time.time()})
            command = [sys.executable, "-m", "benchmarks.cold_start", "--start", given]
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            sources.also(found.pop("files"))
            kept = sum(file.stat().st_size for file in kernels.rglob("*") if file.is_file())
            yield {**start._asdict(), **found, "kernel_bytes": kept}


HEADER: Final = (
    "kernels kept before", "warms", "imported, s", "compiled, s", "warm, s", "first outcome after it, s", "in all, s",
    "between outcomes, ms", "longest, ms", "kernels",
)  # fmt: skip


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of the table, one a start."""
    for point in result["points"]:
        seconds = [
            f"{point[name]:.2f}" if name in point else "" for name in ("imported_s", "compiled_s", "warm_s", "first_s")
        ]
        yield [
            point["kept"], "yes" if point["warms"] else "no", *seconds, f"{point['whole_s']:.2f}", f"{point['median_ms']:.1f}",
            f"{point['most_ms']:.1f}", format_bytes(point["kernel_bytes"]),
        ]  # fmt: skip


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """The tables of all runs."""
    return "\n\n".join(
        f"**{result['model']}, a prompt of {result['prompt']:,} tokens**\n\n{table(HEADER, [*rows_of(result)])}\n\n"
        f"{source_line(dict(result))}"
        for result in results
    )


def main(arguments: Sequence[str]) -> None:
    """Start a model in new processes, and record the figures."""
    if arguments[:1] == ["--start"]:
        print(json.dumps(started(**json.loads(arguments[1]))))
        return
    parser = options(__doc__)
    parser.add_argument("--prompt", type=parse_tokens, default=32_000, help="tokens of the prompt")
    parser.add_argument("--answer", type=parse_tokens, default=64, help="tokens of the answer")
    asked = parser.parse_args(arguments)
    for model in asked.models:
        points = [*starts(model, asked)]
        (seen,) = {point.pop("card") for point in points}
        result = {
            "environment": environment(METHOD), "model": model, "device": asked.device, "card": seen, "prompt": asked.prompt,
            "answer": asked.answer, "points": points,
        }  # fmt: skip
        write(f"cold-start-{model}-{asked.device}", result)
        print(section([result]))


if __name__ == "__main__":
    main(sys.argv[1:])
