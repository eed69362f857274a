"""The summary of a plan: components, chunks, time, headroom, and the live buffers at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mosaic.units import format_bytes, format_seconds, format_tokens
from mosaic.viz.profile import largest_live, peak_index
from mosaic.viz.text import text_timeline

_COMPONENTS = (
    ("context and libraries", ("context", "library")),
    ("weights", ("weights",)),
    ("state", ("state",)),
    ("workspace", ("workspace",)),
)


def print_plan(console: Console, document: Mapping[str, Any]) -> None:
    """Print the summary of one plan."""
    for part in (_headline(document), _components(document), _facts(document), _at_peak(document)):
        console.print(part)
    console.print(
        Text(text_timeline(document, width=min(console.width, 100), ascii_only=console.options.ascii_only), style="dim")
    )


def _headline(document: Mapping[str, Any]) -> RenderableType:
    dims = document["dims"]
    title = Text(f"{document['model']}, {document['phase'].replace('_', ' ')}", style="bold")
    parts = [f"{format_tokens(dims[name])} {name}" for name in ("tokens", "masked") if name in dims]
    if dims.get("seqs", 1) > 1:
        parts.append(f"{dims['seqs']} sequences")
    estimated = " (estimated profile)" if document["estimated"] else ""
    title.append(f": {', '.join(parts)}, {document['dtype']}, on {document['device']}{estimated}", style="not bold")
    return title


def _components(document: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for label, names in _COMPONENTS:
        amount = sum(document["components"][name] for name in names)
        if amount or label != "state":
            table.add_row(label, format_bytes(amount), _note(document, label))
    fits = document["fits"]
    verdict = Text("fits" if fits else "does not fit", style="bold green" if fits else "bold red")
    headroom = document["budget_bytes"] - document["total_bytes"]
    verdict.append(f", {'headroom' if fits else 'short by'} {format_bytes(abs(headroom))}", style="not bold")
    total = f"{format_bytes(document['total_bytes'])} of {format_bytes(document['budget_bytes'])}"
    table.add_row(Text("total", style="bold"), Text(total, style="bold"), verdict)
    if document["host_bytes"]:
        of_host = f"of {format_bytes(document['host_budget_bytes'])}"
        table.add_row(
            "pinned host memory", format_bytes(document["host_bytes"]), f"{of_host}: streamed weights and hidden states"
        )
    return table


def _note(document: Mapping[str, Any], label: str) -> str:
    if label == "state":
        pools = ((pool["name"].removeprefix("state/"), pool) for pool in document["pools"])
        return ", ".join(f"{name} {format_bytes(pool['capacity'])}" for name, pool in pools if name != pool["name"])
    return _workspace_note(document) if label == "workspace" else ""


def _workspace_note(document: Mapping[str, Any]) -> str:
    peak, bound = document["peak_bytes"], document["lower_bound_bytes"]
    if document["optimal"]:
        return "peak equals the lower bound: optimal"
    return f"{(peak / bound - 1) * 100:.2f} % above the lower bound"


def _facts(document: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim")
    table.add_column()
    choices = [f"{name} {value}" for name, value in document["config"].items() if isinstance(value, str)]
    if choices:
        table.add_row("choices", ", ".join(choices))
    table.add_row("chunks", ", ".join(_chunks(document)) or "none")
    shown = format_seconds(document["predicted_step_ms"] / 1e3)
    table.add_row("predicted step", shown + (" (estimated)" if document["estimated"] else ""))
    table.add_row(
        "largest context", f"{format_tokens(document['max_ctx_tokens'])} tokens (same device, budget and mask)"
    )
    return table


def _chunks(document: Mapping[str, Any]) -> list[str]:
    counts = {region["knob"]: region["count"] for region in document["regions"]}
    found = []
    for knob, value in document["config"].items():
        if isinstance(value, int):
            found.append(f"{knob} {counts[knob]:,} x {value:,}")
    return found


def _at_peak(document: Mapping[str, Any]) -> RenderableType:
    at = peak_index(document)
    table = Table(box=None, padding=(0, 2), title=f"live at the peak, {document['ops'][at]['name']}", title_justify="left",
                  title_style="dim")  # fmt: skip
    table.add_column("buffer", style="dim", header_style="dim")
    table.add_column("bytes", justify="right", header_style="dim")
    table.add_column("shape", header_style="dim")
    for live in largest_live(document, 5, at=at):
        buffer = document["buffers"][live.id]
        shape = " x ".join(f"{n:,}" for n in buffer["shape"])
        table.add_row(live.name, format_bytes(live.size_bytes), f"{shape} {buffer['dtype']}")
    return table


def explanation(document: Mapping[str, Any]) -> RenderableType:
    """Return the peak formula and the search trace."""
    law = Table(
        box=None, padding=(0, 2), title="peak of the workspace = maximum of", title_justify="left", title_style="dim"
    )
    law.add_column("bytes", header_style="dim")
    law.add_column("at", style="dim", header_style="dim")
    for line in document["formula"]:
        law.add_row(line["expr"], line["at"])
    trace = Table(box=None, padding=(0, 2), title="search", title_justify="left", title_style="dim")
    for name, justify in (("move", "left"), ("bottleneck", "left"), ("total", "right"), ("step", "right")):
        trace.add_column(name, justify=justify, header_style="dim")  # type: ignore[arg-type]
    for step in document["trace"]:
        trace.add_row(
            step["move"],
            step["bottleneck"],
            format_bytes(step["total_bytes"]),
            format_seconds(step["predicted_ms"] / 1e3),
        )
    return Group(law, Text(), trace)


def comparison(documents: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> RenderableType:
    """Return two plans side by side."""
    table = Table(box=None, padding=(0, 2))
    table.add_column("", style="dim")
    for label in labels:
        table.add_column(label, justify="right", header_style="bold")
    table.add_column("change", justify="right", header_style="dim")
    for key in ("model", "device", "dtype", "solver"):
        table.add_row(key, *(str(d[key]) for d in documents), "")
    for dim in documents[0]["dims"]:
        table.add_row(dim, *(format_tokens(d["dims"].get(dim, 0)) for d in documents), "")
    for label, names in _COMPONENTS:
        table.add_row(label, *_pair([sum(d["components"][n] for n in names) for d in documents]))
    for key in ("total_bytes", "budget_bytes", "host_bytes", "peak_bytes", "lower_bound_bytes"):
        table.add_row(key.removesuffix("_bytes").replace("_", " "), *_pair([d[key] for d in documents]))
    for knob in documents[0]["config"] | documents[1]["config"]:
        table.add_row(knob, *(str(d["config"].get(knob) or "off") for d in documents), "")
    times = [d["predicted_step_ms"] for d in documents]
    table.add_row(
        "predicted step", *(format_seconds(t / 1e3) for t in times), f"{(times[1] / times[0] - 1) * 100:+.1f} %"
    )
    table.add_row("largest context", *(format_tokens(d["max_ctx_tokens"]) for d in documents), "")
    table.add_row("fits", *("yes" if d["fits"] else "no" for d in documents), "")
    return table


def _pair(values: Sequence[int]) -> tuple[str, str, str]:
    a, b = values
    sign = "+" if b >= a else ""
    return format_bytes(a), format_bytes(b), sign + format_bytes(b - a) if b != a else "="
