"""The training and the results of the small models: sections and pictures of docs/small-models.md and docs/records.md.

PYTHONPATH=. python examples/train_small/train.py --family llada --out DIRECTORY      (its curves.json is training-<model>.json)
python -m benchmarks.quality exact --model small --lengths 256,512,1k,2k,4k,8k --per-cell 2 --per-task 50 --out quality-<model>.json
python -m benchmarks.quality policies --policies exact,mage:ratio=1/16 --schedules dynamic,static:16 --out policies-<model>.json
python -m benchmarks.quality policies --policies exact,dc+,focus+dc+ --schedules dynamic --out evictions-<model>-<run>.json
python -m benchmarks.quality estimation --lengths 2k --out estimation-<model>.json
python -m benchmarks.quality decodability --lengths 1k --out decodability-<model>.json
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.quality.items import LONG_TASKS, TASKS
from benchmarks.quality.plot import decodability_png, estimation_png, png
from benchmarks.record import source_line, table
from mosaic.viz.palette import COLORS

__all__ = [
    "RECORDS",
    "SECTIONS",
    "decodability_section",
    "estimation_section",
    "policies_section",
    "quality_section",
    "training_section",
    "write_plots",
]

Result = Mapping[str, Any]
_LINES: Final = ("logits and head", "ffn", "attention", "hidden", "inputs", "statistics", "weights", "other")
_STAGES: Final = {"first": "", "long": ", then long answers", "last": ", then a last stage on everything"}


def name_of(result: Result) -> str:
    """The checkpoint of a training, and the checkpoint that it continued."""
    return f"small-{result['family']}{_STAGES[_stage(result)]}"


def _stage(result: Result) -> str:
    return str(result.get("stage") or ("long" if result.get("from") else "first"))


def _lengths(results: Sequence[Result]) -> set[int]:
    """Tokens of the rows that trainings saw."""
    return {int(length) for result in results for point in result["curve"] for length in point["loss"]}


def _in_order(results: Sequence[Result]) -> list[Result]:
    """Trainings of a model one after the other, as they were run."""
    return sorted(results, key=lambda result: (result["family"], [*_STAGES].index(_stage(result))))


def training_section(results: Sequence[Result]) -> str:
    """Size, time and held-out exact match at the end of every stage, per model."""
    parts = []
    for result in _in_order(results):
        lengths = sorted({int(n) for e in result["evaluations"] for n in e["by_length"].get("retrieval", {})})
        tasks = [*TASKS, *(task for task in LONG_TASKS if any(task in e["by_task"] for e in result["evaluations"]))]
        rows = [
            (
                f"{entry['step']:,}", f"{entry['seconds']:.0f}", *(_share(entry["by_task"], task) for task in tasks),
                *(_share(entry["by_length"].get("retrieval", {}), str(length)) for length in lengths),
            )
            for entry in result["evaluations"]
        ]  # fmt: skip
        header = ("step", "seconds", *tasks, *(f"retrieval, {length:,}" for length in lengths))
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


def policies_section(results: Sequence[Result]) -> str:
    """Policies side by side, by schedule: all answers, exact answers by task, and forced canvases."""
    parts = []
    for result in results:
        asked = result["settings"]
        if len(result["schedules"]) > 1:
            parts.append(_by_schedule(result["schedules"]))
        lines = "\n\n".join(source_line(dict(run)) for run in result.get("runs", (result,)))
        for schedule, by_policy in result["schedules"].items():
            first = next(iter(by_policy))
            tasks = [group for group in by_policy[first]["groups"] if "," not in group and group != "all"]
            contexts = f"contexts of {', '.join(f'{n:,}' for n in asked['lengths'])} tokens"
            if tasks and not {*tasks} & {"retrieval", "pair", *LONG_TASKS}:
                contexts = f"{', '.join(tasks)} without a document"
            title = f"**{result['model']}, {schedule}**: {contexts}, {result['answers']:,} answers under each policy"
            title += ", items to choose settings on" if asked["split"] == "choose" else ""
            figures = {name: _figures(found, first) for name, found in by_policy.items()}
            columns = [
                column for column in max(figures.values(), key=len) if column != "tokens/s" or not result.get("shared")
            ]
            rows = [(name, *(found.get(column, "") for column in columns)) for name, found in figures.items()]
            by_task = [
                (name, *(_changed(found["groups"][task]) for task in tasks)) for name, found in by_policy.items()
            ]
            tables = [table(("policy", *columns), rows), table(("exact by task", *tasks), by_task)]
            if any("replay" in found for found in by_policy.values()):
                tables.append(_replayed(by_policy))
            note = (result["note"],) if "note" in result else ()
            parts.append("\n\n".join((title, *tables, *note)))
        parts.append(lines)
    return "\n\n".join(parts)


def _by_schedule(schedules: Mapping[str, Mapping[str, Result]]) -> str:
    """Exact answers and forwards, a row for each policy and a column for each schedule."""
    names = dict.fromkeys(name for by_policy in schedules.values() for name in by_policy)
    rows = []
    for name in names:
        groups = [by_policy[name]["groups"]["all"] if name in by_policy else None for by_policy in schedules.values()]
        rows.append((name, *(f"{_changed(group)}, {group['forwards']:.1f}" if group else "" for group in groups)))
    return table(("exact, forwards", *schedules), rows)


def _figures(found: Result, first: str) -> dict[str, str]:
    """Figures of all answers, by column."""
    group, change, p, times = found["groups"]["all"], "", "", ""
    if "against" in group:
        exact, forwards = group["against"]["exact"], group["against"]["forwards"]
        change = f"{exact['difference']:+.1%} ({exact['low']:+.1%} to {exact['high']:+.1%})"
        p = f"{exact['p']:.2g}"
        times = f"{forwards['ratio']:.3f} ({forwards['low']:.3f} to {forwards['high']:.3f})"
    columns = {
        "exact": f"{group['exact']:.1%}", f"against {first}": change, "p": p, "tokens right": f"{group['tokens_right']:.1%}",
        "forwards": f"{group['forwards']:.1f}", f"of {first}'s": times, "tokens / forward": f"{group['tokens_per_forward']:.2f}",
    }  # fmt: skip
    if "processed_per_decoded" in group:
        columns["processed / decoded"] = f"{group['processed_per_decoded']:.2f}"
        columns["again / decoded"] = f"{group['again_per_decoded']:.2f}"
    if "forced" in group:
        lost = group.get("against", {}).get("exact")
        columns["forced / answer"] = f"{group['forced']:.2f}"
        columns["lost, forced"] = f"{lost['lost']}, {lost['lost_forced']}" if lost else ""
    return {**columns, "tokens/s": f"{found['tokens_per_s']:,.0f}"}


def _changed(group: Result) -> str:
    """Exact answers; with a star where the interval of the change leaves out 0."""
    exact = group.get("against", {}).get("exact")
    clear = exact is not None and (exact["low"] > 0 or exact["high"] < 0)
    return f"{group['exact']:.1%}{'*' if clear else ''}"


def _replayed(by_policy: Mapping[str, Any]) -> str:
    """The same tokens or others in a block's later steps, on the canvases of the first policy."""
    rows = []
    for name, found in by_policy.items():
        group = found.get("replay", {}).get("all", {})
        if "later" in group:
            later = group["later"]
            rows.append(
                (
                    name, f"{group['count']:,}", f"{later['rows_agree']:.2%}", f"{later['committed_agree']:.2%}",
                    f"{later['own'] / max(later['committed'], 1):.3f}",
                )
            )  # fmt: skip
    header = (
        "on forced canvases, a block's later steps", "answers", "same token", "same, of those committed",
        "would commit, of those committed",
    )  # fmt: skip
    return table(header, rows)


def estimation_section(results: Sequence[Result]) -> str:
    """Estimation accuracy by set of keys, the size of unions, and both by layer, per run."""
    parts = []
    for result in results:
        ratios = list(result["unions"])
        shown = [f"k = {float(ratio):.3g} of the prefix" for ratio in ratios]
        unions = {ratio: sum(sizes) / len(sizes) for ratio, sizes in result["unions"].items()}
        rows: list[tuple[str, ...]] = [
            ("union of the tokens' sets over k", *(f"{unions[ratio]:.2f}" for ratio in ratios))
        ]
        for when, words in (("first", "first step"), ("later", "later steps")):
            names = dict.fromkeys(name for ratio in ratios for name in result[when].get(ratio, {}))
            rows += [(f"{words}: {name}", *(f"{result[when][ratio][name]:.1%}" for ratio in ratios)) for name in names]
        layers = list(next(iter(result["by_head"].values()), {}))
        measured = ("union", "oracle", "mage", "recall")
        middle = ratios[len(ratios) // 2]
        by_layer = [(layer, *(_mean(result["by_head"][middle][layer], what) for what in measured)) for layer in layers]
        settings = result["settings"]
        title = (
            f"**{result['model']}**: {settings['items']} answers of each of {', '.join(settings['tasks'])}, contexts of "
            f"{', '.join(f'{n:,}' for n in settings['lengths'])} tokens"
        )
        header = (f"layer, {shown[len(ratios) // 2]}", *measured)
        parts.append(
            "\n\n".join((title, table(("", *shown), rows), table(header, by_layer), source_line(dict(result))))
        )
    return "\n\n".join(parts)


def _mean(by_head: Mapping[str, Mapping[str, float]], what: str) -> str:
    values = [measures[what] for measures in by_head.values() if what in measures]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{mean:.2f}" if what == "union" else f"{mean:.1%}"


def decodability_section(results: Sequence[Result]) -> str:
    """Decided masked tokens by the rank of their importance, and the rows that decoding computes, per run."""
    parts = []
    for result in results:
        settings = result["settings"]
        title = (
            f"**{result['model']}**: {settings['items']} answers of each of {', '.join(settings['tasks'])}, contexts of "
            f"{', '.join(f'{n:,}' for n in settings['lengths'])} tokens"
        )
        title += f", by {settings['preset']}"
        signals = [
            (
                name, *(f"{part / of:.1%}" if of else "" for part, of in zip(row["decoded"], row["masked"], strict=True)),
                "" if row["auc"] is None else f"{row['auc']:.3f}", f"{row['reached']:.1%}" if row["reached"] is not None else "",
            )
            for name, row in result["signals"].items()
        ]  # fmt: skip
        ways = [
            (
                name, row["steps"], f"{row['decoded']:,}", f"{row['computed']:,}", f"{row['again']:,}",
                f"{row['computed_per_decoded']:.2f}",
            )
            for name, row in result["ways"].items()
        ]  # fmt: skip
        header = (
            "decided, of masked tokens by rank in",
            "lowest fifth",
            "second",
            "third",
            "fourth",
            "highest",
            "AUC",
            "of two",
        )
        counted = ("", "steps", "decided", "computed in their block", "again", "computed / decided")
        parts.append("\n\n".join((title, table(header, signals), table(counted, ways), source_line(dict(result)))))
    return "\n\n".join(parts)


SECTIONS: Final[Mapping[str, tuple[str, Callable[[Sequence[Any]], str]]]] = {
    "quality": ("quality", quality_section),
}
"""Marker in docs/small-models.md -> kind of result, and what writes the section."""
RECORDS: Final[Mapping[str, tuple[str, Callable[[Sequence[Any]], str]]]] = {
    "training": ("training", training_section),
    "policies": ("policies", policies_section),
    "evictions": ("evictions", policies_section),
    "decodability": ("decodability", decodability_section),
    "estimation": ("estimation", estimation_section),
}
"""The same, in docs/records.md."""


def _share(shares: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return f"{shares[name]['exact']:.0%}" if name in shares else ""


def write_plots(
    trainings: Sequence[Result],
    qualities: Sequence[Result],
    estimations: Sequence[Result],
    decodabilities: Sequence[Result],
    folder: Path,
) -> list[Path]:
    """Draw loss curves, exact match by task, length and depth, how well sets of keys serve a block, and what steps decide."""
    written = []
    if trainings:
        written.append(_curves(trainings, folder / "training-small.png"))
    for result in qualities:
        if result["by_length"]:  # one run a model has contexts
            file = folder / f"quality-{result['model']}.png"
            file.write_bytes(png(result, f"{result['model']}, {result['card']}"))
            written.append(file)
    for result in estimations:
        file = folder / f"estimation-{result['model']}.png"
        file.write_bytes(estimation_png(result, result["model"]))
        written.append(file)
    for result in decodabilities:
        tasks = result["settings"]["tasks"]
        name = result["model"] if len(tasks) > 1 else f"{result['model']}-{tasks[0]}"
        if (preset := result["settings"]["preset"]) != "focus":
            name = "-".join((name, *re.findall(r"\w+", preset.partition("(")[2] or preset)))
        file = folder / f"decodability-{name}.png"
        file.write_bytes(decodability_png(result, name))
        written.append(file)
    return written


def _curves(trainings: Sequence[Result], file: Path) -> Path:
    """Loss by row length over the training time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(trainings), 3.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(trainings), squeeze=False)[0]
    everywhere = sorted(_lengths(trainings))  # a length has one colour
    for axis, result in zip(axes, _in_order(trainings), strict=True):
        for length in sorted(_lengths([result])):
            color = _LINES[everywhere.index(length)]
            found = [(p["seconds"], p["loss"].get(str(length), math.nan)) for p in result["curve"]]
            axis.plot(*zip(*found, strict=True), color=COLORS[color], linewidth=1, label=f"{length:,} tokens")
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("seconds")
        axis.set_ylabel("loss")
        axis.set_title(name_of(result), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(file, metadata={"Software": None})
    return file
