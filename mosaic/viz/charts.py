"""Pictures of plans with matplotlib: timelines above address maps, before and after.

matplotlib (extra `viz`) is imported when a picture is drawn; without it every picture raises `MissingExtra`. Figures are
drawn by Agg and belong to the caller: no pyplot, no global state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from mosaic.errors import MissingExtra
from mosaic.units import GIB, format_bytes
from mosaic.viz.palette import COLORS, LIMIT_COLOR, PEAK_COLOR, ink_on
from mosaic.viz.profile import (
    CATEGORIES,
    Document,
    LiveProfile,
    held_intervals,
    live_profile,
    optimality,
    placed_roots,
    root_categories,
    sizes_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAYER: Final = re.compile(r"^\w+\.\d+/")  # every tick would repeat it
_INK: Final = "#333333"
_FAINT: Final = "#E4E4E4"
_ZOOM_OPS: Final = 24  # about two layers, with readable op names
_LOOP_STEP: Final = 0.08  # share of the peak between the bars of nested loops: room for a name
_Box = tuple[Mapping[str, Any], int, int, str]  # buffer, [start, end) as drawn, colour of its name


def before_after_figure(before: Document, after: Document, *, labels: tuple[str, str] = ("before", "after")) -> Figure:
    """Draw two plans side by side with the same scale of bytes."""
    profiles = (live_profile(before), live_profile(after))
    figure = blank_figure(11, 4.4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, doc, profile, label in zip(panels, (before, after), profiles, labels, strict=True):
        _draw_timeline(axes, profile)
        _label_peak(axes, doc, profile)
        axes.set_title(f"{label}: {format_bytes(doc['peak_bytes'])}", loc="left", fontsize=10, color=_INK)
        axes.set_xlabel("op index in program order")
    panels[1].set_ylabel("")
    panels[0].set_ylim(0, max(profile.peak_bytes for profile in profiles) / GIB * 1.14 or 1)
    headline(figure, _change(before["peak_bytes"], after["peak_bytes"], labels), _subject(after))
    _legend(figure, [c for c in CATEGORIES if any(c in profile.categories for profile in profiles)])
    return figure


def plan_figure(doc: Document) -> Figure:
    """Draw timeline above map: the whole step on the left, the ops around the peak on the right."""
    profile = live_profile(doc)
    zoomed = profile.num_ops > 2 * _ZOOM_OPS
    figure = blank_figure(13 if zoomed else 9, 7.4)
    panels = figure.subplots(
        2, 2 if zoomed else 1, sharey="row", squeeze=False, gridspec_kw={"width_ratios": [3, 2] if zoomed else [1]}
    )
    _draw_timeline(panels[0, 0], profile)
    _label_peak(panels[0, 0], doc, profile)
    _draw_bounds(panels[0, 0], doc, profile)
    panels[0, 0].set_title("live bytes, whole step", loc="left", fontsize=10, color=_INK)
    _draw_map(panels[1, 0], doc, 0, max(profile.num_ops, 1))
    panels[1, 0].set_title("addresses, whole step", loc="left", fontsize=10, color=_INK, pad=14)
    panels[1, 0].set_xlabel("op index in program order")
    if zoomed:
        _draw_zoom(panels[0, 1], panels[1, 1], doc, profile)
    headline(figure, f"Workspace of {format_bytes(doc['peak_bytes'])}, {optimality(doc)}", _subject(doc))
    _legend(figure, profile.categories, panels[1, 0] if zoomed else None)
    return figure


def figure_png(figure: Figure) -> bytes:
    """Return a figure as PNG bytes."""
    stream = io.BytesIO()
    # No date and no version in the metadata: the same plan gives the same bytes.
    figure.savefig(stream, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def plan_png(doc: Document) -> bytes:
    """Return the picture of a plan that notebooks show: `plan_figure` as PNG bytes."""
    return figure_png(plan_figure(doc))


def blank_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Return an empty white figure of some inches, drawn by Agg."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "viz", "drawing a picture") from error
    figure = Figure(figsize=(width, height), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _subject(doc: Document) -> str:
    estimated = ", estimated profile" if doc["estimated"] else ""
    return f"{doc['model']}, {doc['phase']}, {sizes_text(doc)}, {doc['dtype']}, {doc['device']}{estimated}"


def _change(before: int, after: int, labels: tuple[str, str]) -> str:
    if not before or before == after:
        return f"Workspace peak is {format_bytes(after)} in both"
    if after < before:
        return f"Workspace peak falls to {100 * after / before:.1f} % ({labels[1]} against {labels[0]})"
    return f"Workspace peak grows {after / before:.2f} times ({labels[1]} against {labels[0]})"


def headline(figure: Figure, title: str, subject: str) -> None:
    """Write the title in bold and the subject beneath, and keep the panels below both."""
    height = figure.get_figheight()
    left = 0.1 / figure.get_figwidth()
    figure.text(left, 1 - 0.10 / height, title, va="top", fontsize=13, fontweight="bold", color=_INK)
    figure.text(left, 1 - 0.37 / height, subject, va="top", fontsize=9.5, color="#666666")
    margin = (0.66 if subject else 0.42) / height
    figure.set_layout_engine("constrained", rect=(0.004, 0, 0.996, 1 - margin))


def _legend(figure: Figure, categories: Sequence[str], beneath: Axes | None = None) -> None:
    """List the colours at the foot of the figure, or beneath one panel whose neighbour has tall tick labels."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLORS[category], label=category) for category in categories]
    if not handles:
        return
    if beneath is None:
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
        return
    key = beneath.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(-0.03, -0.17), ncols=max(len(handles) // 2 + 1, 7),
        frameon=False, fontsize=8.5, handlelength=1.2, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip
    key.set_in_layout(False)


def tidy(axes: Axes) -> None:
    """Leave two axes and faint lines of the grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, length=3)


def _draw_timeline(axes: Axes, profile: LiveProfile) -> None:
    tidy(axes)
    edges = range(profile.num_ops + 1)
    floor = [0.0] * (profile.num_ops + 1)
    for category in profile.categories:
        values = profile.live_bytes[category]
        top = [low + value / GIB for low, value in zip(floor, (*values, values[-1]), strict=True)]
        axes.fill_between(edges, floor, top, step="post", color=COLORS[category], linewidth=0)
        floor = top
    axes.set_xlim(0, max(profile.num_ops, 1))
    axes.set_ylim(0, profile.peak_bytes / GIB * 1.14 or 1)
    axes.set_ylabel("live, GiB")


def _label_peak(axes: Axes, doc: Document, profile: LiveProfile) -> None:
    if not profile.num_ops:
        return
    at, height = profile.peak_index + 0.5, profile.peak_bytes / GIB
    right = at > profile.num_ops / 2
    axes.plot([at], [height], marker="v", markersize=7, color=PEAK_COLOR, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {format_bytes(profile.peak_bytes)} at {doc['ops'][profile.peak_index]['name']}",
        (at, height),
        xytext=(-9 if right else 9, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        color=PEAK_COLOR,
    )


def _draw_bounds(axes: Axes, doc: Document, profile: LiveProfile) -> None:
    """Draw the lower bound, and the placed size where it is larger; their text keeps clear of the peak's."""
    bound, peak = doc["lower_bound_bytes"], doc["peak_bytes"]
    axes.axhline(bound / GIB, color=PEAK_COLOR, linewidth=1.0, linestyle=(0, (4, 3)))
    if peak > bound:
        axes.axhline(peak / GIB, color=LIMIT_COLOR, linewidth=1.0)
        axes.set_ylim(0, peak / GIB * 1.14)
    left = profile.peak_index + 0.5 > profile.num_ops / 2
    axes.annotate(
        "lower bound, reached" if peak == bound else f"placed {format_bytes(peak)}, {optimality(doc)}",
        (0.005 if left else 0.995, peak / GIB),
        xycoords=("axes fraction", "data"),
        xytext=(0, 6),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=9,
        color=PEAK_COLOR if peak == bound else LIMIT_COLOR,
    )


def _draw_map(axes: Axes, doc: Document, first: int, last: int) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    tidy(axes)
    axes.grid(visible=False)
    category_of = root_categories(doc)
    by_category: dict[str, list[Rectangle]] = {}
    boxes: list[_Box] = []
    for buffer in placed_roots(doc):
        for start, end in held_intervals(buffer):
            start, end = max(start, first), min(end, last)
            if start < end:
                box = Rectangle((start, buffer["offset"] / GIB), end - start, buffer["size"] / GIB)
                by_category.setdefault(category_of[buffer["id"]], []).append(box)
                boxes.append((buffer, start, end, ink_on(COLORS[category_of[buffer["id"]]])))
    for category, patches in by_category.items():
        line = 0.5 if last - first < 200 else 0.15
        axes.add_collection(PatchCollection(patches, facecolor=COLORS[category], edgecolor="white", linewidth=line))
    top = max(doc["peak_bytes"], 1) / GIB
    axes.set_xlim(first, last)
    axes.axhline(doc["peak_bytes"] / GIB, color=PEAK_COLOR, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylabel("workspace offset, GiB")
    _draw_names(axes, boxes, first, last, top)
    _draw_loops(axes, doc, first, last, top)


def _draw_names(axes: Axes, boxes: Sequence[_Box], first: int, last: int, top: float) -> None:
    """Write a buffer's name if it has room; names left out are in the report's hover."""
    for buffer, start, end, ink in boxes:
        wide, tall = (end - start) / (last - first), buffer["size"] / GIB / top
        label = buffer["name"].rsplit("/", 1)[-1]
        if tall >= 0.045 and wide >= 0.017 * len(label):
            axes.text(
                (start + end) / 2, (buffer["offset"] + buffer["size"] / 2) / GIB, label,
                ha="center", va="center", fontsize=8, color=ink, clip_on=True,
            )  # fmt: skip


def _draw_loops(axes: Axes, doc: Document, first: int, last: int, top: float) -> None:
    """Mark each chunk loop above the map by a bar, inner ones above outer ones; wide bars show the iterations."""
    depth: dict[str, int] = {}
    for region in doc["regions"]:
        depth[region["name"]] = depth.get(region["parent"], -1) + 1
        start, end = max(region["start"], first), min(region["end"], last)
        if start >= end:
            continue
        height = top * (1.035 + _LOOP_STEP * depth[region["name"]])
        inset = 0.002 * (last - first)
        axes.plot([start + inset, end - inset], [height, height], color="#777777", linewidth=3, solid_capstyle="butt")
        label = f"{region['knob']} x {region['count']}"
        if (end - start) / (last - first) >= 0.016 * len(label):
            axes.text((start + end) / 2, height + 0.012 * top, label, ha="center", va="bottom", fontsize=8, color=_INK)
    axes.set_ylim(0, top * (1.14 + _LOOP_STEP * max(depth.values(), default=0)))


def _draw_zoom(timeline: Axes, addresses: Axes, doc: Document, profile: LiveProfile) -> None:
    first = max(0, min(profile.peak_index - _ZOOM_OPS // 2, profile.num_ops - _ZOOM_OPS))
    last = first + _ZOOM_OPS
    limits = timeline.get_ylim()
    _draw_timeline(timeline, profile)
    timeline.set_xlim(first, last)
    timeline.set_ylim(limits)
    _draw_map(addresses, doc, first, last)
    timeline.set_title("around the peak", loc="left", fontsize=10, color=_INK)
    addresses.set_title("around the peak", loc="left", fontsize=10, color=_INK, pad=14)
    for axes in (timeline, addresses):
        axes.set_ylabel("")
        axes.axvspan(profile.peak_index, profile.peak_index + 1, facecolor="none", edgecolor=PEAK_COLOR, linewidth=1)
    timeline.set_xticks([])
    addresses.set_xticks([op + 0.5 for op in range(first, last)])
    names = [doc["ops"][op]["name"] for op in range(first, last)]
    addresses.set_xticklabels([_LAYER.sub("", name) for name in names], rotation=90, fontsize=7.5)
