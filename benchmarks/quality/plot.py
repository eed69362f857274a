"""The quality bench's picture: exact match by task, and by length and depth. Imports matplotlib when it is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.quality.evaluation import DEPTHS
from mosaic.errors import MissingExtra

__all__ = ["decodability_png", "estimation_png", "png"]


def png(result: Mapping[str, Any], title: str = "") -> bytes:
    """Draw a result of `run`: a bar per task, a map of length and depth per retrieval task.

    Raises
    ------
    MissingExtra
        If matplotlib is not installed.
    """
    maps = {task: cells for task, cells in result["by_length_and_depth"].items() if cells}
    figure = _figure(4.5 + 4.2 * len(maps), 3.6)
    axes = figure.subplots(1, 1 + len(maps), squeeze=False)[0]
    _bars(axes[0], result["by_task"])
    for place, (task, cells) in zip(axes[1:], maps.items(), strict=True):
        _map(place, task, cells)
    return _png_of(figure, title)


def _figure(width: float, height: float) -> Any:
    """An empty figure of the given inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "viz", "the picture") from None
    return Figure(figsize=(width, height), layout="constrained")


def _png_of(figure: Any, title: str) -> bytes:
    """The figure under its title, without matplotlib's version in the metadata."""
    if title:
        figure.suptitle(title, fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _bars(axes: Any, by_task: Mapping[str, Any]) -> None:
    tasks = list(by_task)
    shares = [by_task[task]["exact"] for task in tasks]
    axes.barh(range(len(tasks)), shares, color="#0072B2", height=0.6)
    for row, share in enumerate(shares):
        axes.text(share + 0.02, row, f"{share:.0%}", va="center", ha="left", fontsize=8)
    axes.set_yticks(range(len(tasks)), [f"{task} ({by_task[task]['count']})" for task in tasks], fontsize=8)
    axes.set_xlim(0, 1.2)
    axes.set_xticks([0, 0.5, 0.95], ["0", "50%", "95%"], fontsize=8)
    axes.invert_yaxis()
    axes.set_title("exact match", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _map(axes: Any, task: str, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Depth downwards, length to the right; every cell with its share in numbers, so that colour is not the only cue."""
    lengths = sorted(cells, key=int)
    tenths = [f"{index / DEPTHS:.1f}" for index in range(DEPTHS)]
    rows = [[cells[length].get(tenth, {}).get("exact", float("nan")) for length in lengths] for tenth in tenths]
    axes.imshow(rows, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, values in enumerate(rows):
        for column, share in enumerate(values):
            if share == share:
                ink = "#1A1A1A" if share > 0.6 else "#FFFFFF"
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(lengths)), [f"{int(length):,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(DEPTHS), [f"{10 * index}%" for index in range(DEPTHS)], fontsize=8)
    axes.set_xlabel("context, tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    axes.set_title(f"{task}: exact match, %", fontsize=9)


def estimation_png(result: Mapping[str, Any], title: str = "") -> bytes:
    """Draw a result of `estimate`: unions over k, recall by share of masks left, estimation accuracy by set of keys.

    Raises
    ------
    MissingExtra
        If matplotlib is not installed.
    """
    figure = _figure(13.5, 3.8)
    union, recall, accuracy = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    for index, (ratio, sizes) in enumerate(result["unions"].items()):
        color, label = _INKS[index % len(_INKS)], f"k = {float(ratio):.3g} of the prefix"
        ordered = sorted(sizes)
        union.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], color=color, label=label)
        points = sorted((float(left), value) for left, value in result["recall"].get(ratio, {}).items())
        recall.plot([x for x, _ in points], [y for _, y in points], color=color, marker="o", markersize=3, label=label)
    union.set_xlabel("union of the tokens' sets over k", fontsize=8)
    union.set_ylabel("share of blocks, layers and heads", fontsize=8)
    union.set_title("first step of a block", fontsize=9)
    recall.set_xlabel("share of masks left", fontsize=8)
    recall.set_title("first step's set in the block's oracle", fontsize=9)
    recall.invert_xaxis()
    later = result["later"] or result["first"]
    names = [name for name in next(iter(later.values())) if name != "recall"]
    for index, shares in enumerate(later.values()):
        places = [row + (index - 1) * 0.25 for row in range(len(names))]
        accuracy.barh(places, [shares[name] for name in names], height=0.22, color=_INKS[index % len(_INKS)])
    accuracy.set_yticks(range(len(names)), names, fontsize=7)
    accuracy.invert_yaxis()
    accuracy.set_title("estimation accuracy, later steps", fontsize=9)
    for axes in (union, recall, accuracy):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (recall, accuracy):
        (axes.set_ylim if axes is recall else axes.set_xlim)(0, 1)
    union.legend(frameon=False, fontsize=7)
    return _png_of(figure, title)


def decodability_png(result: Mapping[str, Any], title: str = "") -> bytes:
    """Draw a result of `decodability.measure`: tokens decided per step, decided share by rank of each signal, computed per decided.

    Raises
    ------
    MissingExtra
        If matplotlib is not installed.
    """
    figure = _figure(12.5, 3.6)
    histogram, signals, ways = figure.subplots(1, 3)
    counts = {int(count): steps for count, steps in result["decoded_per_step"].items()}
    histogram.bar(list(counts), list(counts.values()), color=_INKS[0])
    histogram.set_xlabel("tokens decided in a step", fontsize=8)
    histogram.set_title("steps", fontsize=9)
    for index, (name, row) in enumerate(result["signals"].items()):
        shares = [part / of if of else 0.0 for part, of in zip(row["decoded"], row["masked"], strict=True)]
        places = [place + (index - 1) * 0.27 for place in range(len(shares))]
        auc = "" if row["auc"] is None else f" (AUC {row['auc']:.3f})"
        signals.bar(places, shares, width=0.25, color=_INKS[index], label=name + auc)
    fifths = [f"{100 * place // len(shares)}-{100 * (place + 1) // len(shares)}" for place in range(len(shares))]
    signals.set_xticks(range(len(shares)), fifths)
    signals.set_xlabel("rank among masked tokens, percent", fontsize=8)
    signals.set_title("share decided", fontsize=9)
    signals.set_ylim(0, 1.35 * max(bar.get_height() for bar in signals.patches))
    signals.legend(frameon=False, fontsize=7, loc="upper left")
    names = list(result["ways"])
    ratios = [result["ways"][name]["computed_per_decoded"] for name in names]
    ways.barh(range(len(names)), ratios, color=_INKS[0], height=0.6)
    for row, ratio in enumerate(ratios):
        ways.text(ratio, row, f" {ratio:.2f}, {result['ways'][names[row]]['steps']} steps", va="center", fontsize=7)
    ways.set_yticks(range(len(names)), names)
    ways.set_xlim(0, 1.5 * max(ratios))
    ways.invert_yaxis()
    ways.set_title("tokens computed for one decided", fontsize=9)
    for axes in (histogram, signals, ways):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return _png_of(figure, title)


_INKS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
