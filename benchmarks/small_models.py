"""What the small models learned, and how: sections and pictures of docs/small-models.md.

python examples/train_small/train.py --family llada --out DIRECTORY      (its curves.json is training-<model>.json)
mosaic bench quality --model small --lengths 256,512,1k,2k,4k,8k --per-cell 2 --per-task 50 --out quality-<model>.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.record import source_line, table
from mosaic.bench.quality.items import TASKS
from mosaic.bench.quality.plot import png
from mosaic.viz.palette import COLORS

__all__ = ["SECTIONS", "quality_section", "training_section", "write_plots"]

Result = Mapping[str, Any]
_LINES: Final = ("logits and head", "ffn", "attention", "hidden", "inputs", "statistics", "weights", "other")


def name_of(result: Result) -> str:
    """The checkpoint that a training made."""
    return f"small-{result['family']}"


def training_section(results: Sequence[Result]) -> str:
    """Size, time and held-out exact match at the end of every stage, per model."""
    parts = []
    for result in results:
        lengths = sorted({int(n) for e in result["evaluations"] for n in e["by_length"].get("retrieval", {})})
        rows = [
            (
                f"{entry['step']:,}", f"{entry['seconds']:.0f}", *(_share(entry["by_task"], task) for task in TASKS),
                *(_share(entry["by_length"].get("retrieval", {}), str(length)) for length in lengths),
            )
            for entry in result["evaluations"]
        ]  # fmt: skip
        header = ("step", "seconds", *TASKS, *(f"retrieval, {length:,}" for length in lengths))
        facts = (
            f"**{name_of(result)}**: {result['model']['parameters']:,} parameters, {result['steps']:,} steps, "
            f"{result['tokens'] / 1e6:,.0f} million tokens, {result['wall_s']:.0f} s in all. Exact match of small "
            "held-out sets at the end of every stage:"
        )
        parts.append("\n\n".join((facts, table(header, rows), source_line(dict(result)))))
    return "\n\n".join(parts)


def quality_section(results: Sequence[Result]) -> str:
    """Exact match by task and by length, per run of the quality bench."""
    parts = []
    for result in results:
        by_task = table(
            ("task", "exact", "items"),
            [(task, f"{share['exact']:.1%}", share["count"]) for task, share in result["by_task"].items()],
        )
        lengths = sorted({int(n) for shares in result["by_length"].values() for n in shares})
        by_length = [
            (task, *(_share(shares, str(length)) for length in lengths)) for task, shares in result["by_length"].items()
        ]
        header = ("exact by context", *(f"{length:,}" for length in lengths))
        tables = (by_task, table(header, by_length)) if by_length else (by_task,)
        note = (result["note"],) if "note" in result else ()
        parts.append("\n\n".join((f"**{result['model']}**", *tables, *note, source_line(dict(result)))))
    return "\n\n".join(parts)


SECTIONS: Final[Mapping[str, tuple[str, Callable[[Sequence[Any]], str]]]] = {
    "training": ("training", training_section),
    "quality": ("quality", quality_section),
}
"""Marker in docs/small-models.md -> kind of result, and what writes the section."""


def _share(shares: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return f"{shares[name]['exact']:.0%}" if name in shares else ""


def write_plots(trainings: Sequence[Result], qualities: Sequence[Result], folder: Path) -> list[Path]:
    """Draw loss curves, and exact match by task, length and depth."""
    written = []
    if trainings:
        written.append(_curves(trainings, folder / "training-small.png"))
    for result in qualities:
        if result["by_length"]:  # one run a model has contexts
            file = folder / f"quality-{result['model']}.png"
            file.write_bytes(png(result, f"{result['model']}, {result['card']}"))
            written.append(file)
    return written


def _curves(trainings: Sequence[Result], file: Path) -> Path:
    """Loss by row length over the training time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(trainings), 3.8), dpi=150, layout="constrained")
    for axis, result in zip(figure.subplots(1, len(trainings), squeeze=False)[0], trainings, strict=True):
        lengths = sorted({int(length) for point in result["curve"] for length in point["loss"]})
        for color, length in zip(_LINES, lengths, strict=False):
            found = [(p["seconds"], p["loss"].get(str(length), math.nan)) for p in result["curve"]]
            axis.plot(*zip(*found, strict=True), color=COLORS[color], linewidth=1, label=f"{length:,} tokens")
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("seconds")
        axis.set_ylabel("loss")
        axis.set_title(name_of(result))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(file, metadata={"Software": None})
    return file
