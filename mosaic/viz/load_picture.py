"""A picture of a load: times of its requests, requests in flight, and the server's memory, from the results of a load."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from mosaic.units import GIB, MIB
from mosaic.viz.charts import blank_figure, figure_png, headline, tidy
from mosaic.viz.palette import COLORS, PEAK_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS: Final = [
    COLORS[name] for name in ("hidden", "ffn", "logits and head", "attention", "statistics", "inputs", "other")
]


def load_figure(found: Mapping[str, Any]) -> Figure:
    """Draw the distribution of the times of requests and of tokens above what happened over time.

    `found` has the results of `mosaic bench serve`, with those of each request. Failed requests are left out.
    """
    done = [index for index, error in enumerate(found["errors"]) if not error]
    figure = blank_figure(11, 7)
    panels = figure.subplots(2, 2)
    for axes in panels.flat:
        tidy(axes)
    _distribution(panels[0, 0], {
        "to the first piece": [found["ttfts"][index] for index in done],
        "to the last piece": [found["latencies"][index] for index in done],
    }, "seconds of a request")  # fmt: skip
    _distribution(panels[0, 1], {
        "for each token behind the first piece": [
            1e3 * (found["latencies"][index] - found["ttfts"][index]) / (found["output_lens"][index] - 1)
            for index in done if found["output_lens"][index] > 1
        ],
        "between pieces": [1e3 * gap for index in done for gap in found["itls"][index]],
    }, "milliseconds")  # fmt: skip
    panels[0, 1].set_xscale("symlog", linthresh=1.0)  # tokens come by blocks: the two are far apart
    _in_flight(panels[1, 0], [(found["start_times"][index], found["latencies"][index]) for index in done])
    _memory(panels[1, 1], found.get("memory"))
    failed = f", {found['failed']:,} failed" if found["failed"] else ""
    headline(
        figure, f"{found['output_throughput']:,.1f} tokens/s, {found['request_throughput']:,.2f} requests/s",
        f"{found['model_id']}, {found['completed']:,} requests in {found['duration']:,.1f} s{failed}",
    )  # fmt: skip
    return figure


def load_png(found: Mapping[str, Any]) -> bytes:
    """Return the picture as PNG bytes."""
    return figure_png(load_figure(found))


def load_svg(found: Mapping[str, Any]) -> bytes:
    """Return the picture as SVG."""
    stream = io.BytesIO()
    load_figure(found).savefig(stream, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _distribution(axes: Axes, series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Shares of values that are at most so large."""
    for (label, values), color in zip(series.items(), _COLORS, strict=False):
        if values:
            rising = sorted(values)
            shares = [(place + 1) / len(rising) for place in range(len(rising))]
            axes.step(rising, shares, where="post", color=color, label=label, linewidth=1.6)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    axes.set_ylabel("share at most")
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _in_flight(axes: Axes, spans: Sequence[tuple[float, float]]) -> None:
    changes = sorted([(start, 1) for start, _ in spans] + [(start + length, -1) for start, length in spans])
    axes.step(
        [at for at, _ in changes], list(accumulate(change for _, change in changes)), where="post", color=PEAK_COLOR,
        linewidth=1.2,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests in flight")


def _memory(axes: Axes, memory: Mapping[str, Any] | None) -> None:
    """What the server had committed, by pool; above it what its plans needed."""
    if memory is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "the server says nothing of its memory", ha="center", va="center", color="#666666")
        return
    totals = [sum(column) for column in zip(*memory["committed"].values(), strict=True)]
    unit, name = (GIB, "GiB") if max(totals, default=0) >= GIB else (MIB, "MiB")
    largest = sorted(memory["committed"], key=lambda pool: -max(memory["committed"][pool]))
    kept = largest[: len(_COLORS) - 1]
    layers = [[value / unit for value in memory["committed"][pool]] for pool in kept]
    if rest := largest[len(kept) :]:
        layers.append(
            [sum(column) / unit for column in zip(*(memory["committed"][pool] for pool in rest), strict=True)]
        )
    axes.stackplot(
        memory["times_s"], layers, labels=[*kept, *(["other pools"] if rest else [])], colors=_COLORS, linewidth=0
    )
    planned = [sum(column) / unit for column in zip(*memory["planned"].values(), strict=True)]
    if planned:
        axes.plot(memory["times_s"], planned, color=PEAK_COLOR, linewidth=1.2, linestyle="--", label="planned")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"committed, {name}")
    axes.legend(loc="lower right", fontsize=8)
