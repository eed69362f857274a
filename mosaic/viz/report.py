"""One self-contained HTML page about a plan: verdict, pictures to explore, every buffer, the search, the formula.

Needs no network and no matplotlib. Every name is escaped in the markup, and the plan is a JSON island that cannot close
its element. Works in light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from mosaic.units import format_bytes, format_seconds, format_tokens
from mosaic.viz.palette import COLORS
from mosaic.viz.profile import (
    CATEGORIES,
    Document,
    LiveProfile,
    check_schema,
    held_intervals,
    largest_live,
    live_profile,
    optimality,
    placed_roots,
    root_categories,
    sizes_text,
)
from mosaic.viz.report_assets import SCRIPT, STYLE

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_COMPONENT_COLORS: Final = {
    "context": "#8A8A8A",
    "library": "#B9B9B9",
    "weights": COLORS["weights"],
    "state": COLORS["state"],
    "workspace": COLORS["hidden"],
}


def html_report(doc: Document) -> str:
    """Return the report of a plan as one HTML document.

    Parameters
    ----------
    doc
        A plan document. At 128K tokens LLaDA-8B's report is about 0.3 MB.
    """
    check_schema(doc)
    profile = live_profile(doc)
    title = f"{doc['model']}, {sizes_text(doc)} on {doc['device']}"
    sections = (
        _summary(doc, title),
        _facts(doc, profile),
        f'<div class="columns"><div>{_components(doc)}</div><div>{_chunks(doc)}</div></div>',
        _pictures(profile),
        f'<div class="columns"><div>{_at_peak(doc, profile)}</div><div>{_formula(doc)}</div></div>',
        _buffers(doc),
        _search(doc),
        _provenance(doc),
    )
    return _PAGE.format(
        policy=escape(_POLICY),
        title=escape(title),
        style=STYLE,
        body="\n".join(sections),
        data=_island(_data(doc, profile)),
        script=SCRIPT,
    )


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Mosaic: {title}</title>
<style>{style}</style>
</head>
<body>
{body}
<div id="tip" hidden></div>
<script type="application/json" id="plan">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _island(data: object) -> str:
    """JSON that cannot become markup: the escaped text means the same to a JSON reader."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(doc: Document, profile: LiveProfile) -> dict[str, Any]:
    category_of = root_categories(doc)
    return {
        "ops": [[op["name"], op["kernel"], op["stream"]] for op in doc["ops"]],
        "buffers": [_buffer(doc, b, profile.categories.index(category_of[b["id"]])) for b in placed_roots(doc)],
        "regions": _loops(doc),
        "categories": list(profile.categories),
        "colors": [COLORS[category] for category in profile.categories],
        "live": [list(profile.live_bytes[category]) for category in profile.categories],
        "total": list(profile.total_bytes),
        "peak": {"index": profile.peak_index, "bytes": profile.peak_bytes},
        "placed": doc["peak_bytes"],
        "bound": doc["lower_bound_bytes"],
    }


def _buffer(doc: Document, buffer: Mapping[str, Any], category: int) -> dict[str, Any]:
    kept = ("name", "kind", "offset", "size", "start", "end", "dtype", "shape")
    aliases = [other["name"] for other in doc["buffers"] if other["alias_of"] == buffer["id"]]
    held = [list(interval) for interval in held_intervals(buffer)]
    return {key: buffer[key] for key in kept} | {"cat": category, "held": held, "aliases": aliases}


def _loops(doc: Document) -> list[dict[str, Any]]:
    depth: dict[str, int] = {}
    loops = []
    for region in sorted(doc["regions"], key=lambda region: (region["start"], -region["end"])):
        depth[region["name"]] = depth.get(region["parent"], -1) + 1
        label = f"{region['knob']} x {region['count']}"
        level = min(depth[region["name"]], 2)
        loops.append({"start": region["start"], "end": region["end"], "label": label, "depth": level})
    return loops


def _summary(doc: Document, title: str) -> str:
    total, budget = doc["total_bytes"], doc["budget_bytes"]
    room = format_bytes(abs(budget - total))
    if doc["fits"]:
        verdict = f'<span class="verdict yes">Fits</span>: {room} of the budget are left.'
    else:
        verdict = f'<span class="verdict no">Does not fit</span>: {room} more than the budget.'
    dims = ", ".join(f"{name} {value:,}" for name, value in doc["dims"].items())
    about = f"{doc['phase']}, {doc['dtype']}; {dims}"
    return f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(about)}</p>\n<p>{verdict}</p>'


def _facts(doc: Document, profile: LiveProfile) -> str:
    estimated = ", estimated" if doc["estimated"] else ""
    facts = (
        (format_bytes(doc["total_bytes"]), f"of {format_bytes(doc['budget_bytes'])} budget"),
        (format_bytes(doc["peak_bytes"]), f"workspace, {optimality(doc)}"),
        (f"{profile.peak_to_average:.2f} x", "workspace peak over average"),
        (format_tokens(doc["max_ctx_tokens"]), "tokens, the largest context that fits"),
        (format_seconds(doc["predicted_step_ms"] / 1e3), f"predicted step{estimated}"),
    )
    boxes = "".join(f'<div class="fact"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in facts)
    return f'<div class="facts">{boxes}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Lay out escaped cells; the columns in `numeric` are aligned to the right."""
    side = ["n" if column in numeric else "" for column in range(len(head))]
    heads = "".join(f'<th class="{c}">{h}</th>' if c else f"<th>{h}</th>" for h, c in zip(head, side, strict=True))
    lines = (
        "".join(f'<td class="{c}">{v}</td>' if c else f"<td>{v}</td>" for v, c in zip(row, side, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _dot(color: str) -> str:
    return f'<i class="dot" style="background:{color}"></i>'


def _components(doc: Document) -> str:
    parts = [(name, size, _COMPONENT_COLORS.get(name, COLORS["other"])) for name, size in doc["components"].items()]
    whole = max(doc["budget_bytes"], doc["total_bytes"], 1)
    bar = "".join(f'<i style="width:{100 * size / whole:.3f}%;background:{color}"></i>' for _, size, color in parts)
    rows = [(_dot(color) + escape(name), format_bytes(size)) for name, size, color in parts]
    rows.append(("<b>total</b>", f"<b>{format_bytes(doc['total_bytes'])}</b>"))
    rows.append(("budget", format_bytes(doc["budget_bytes"])))
    return f'<h2>What the device holds</h2><div class="bar">{bar}</div>{_table(("component", "size"), rows, (1,))}'


def _chunks(doc: Document) -> str:
    """List the loops once per knob and shape, and the settings of the other knobs."""
    groups: dict[tuple[str, str, int, int, int], int] = {}
    for region in doc["regions"]:
        key = (region["knob"], region["dim"], region["extent"], region["rows"], region["count"])
        groups[key] = groups.get(key, 0) + 1
    rows = [
        (escape(knob), escape(dim), f"{extent:,}", f"{rows:,}", f"{count:,}", f"{loops:,}")
        for (knob, dim, extent, rows, count), loops in groups.items()
    ]
    looped = {region["knob"] for region in doc["regions"]}
    settings = ", ".join(f"{k}: {_setting(v)}" for k, v in doc["config"].items() if k not in looped)
    table = _table(("knob", "over", "extent", "rows", "chunks", "loops"), rows, (2, 3, 4, 5))
    others = f'<p class="soft">Other settings: {escape(settings)}.</p>' if settings else ""
    return f"<h2>Chunk loops</h2>{table if rows else '<p>No loops: nothing is chunked.</p>'}{others}"


def _setting(value: object) -> str:
    return "off" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _pictures(profile: LiveProfile) -> str:
    key = "".join(f"<span>{_dot(COLORS[name])}{escape(name)}</span>" for name in profile.categories)
    return f"""<h2>Live bytes, and where they lie</h2>
<p class="soft">Time runs by op in program order, loop bodies once. Drag to zoom, double-click to see the whole step,
hover for details. Dashed lines: the lower bound in the upper picture, the placed size in the lower one.</p>
<div class="tools"><button type="button" id="whole">Whole step</button>
<button type="button" id="around">Around the peak</button></div>
<div class="key">{key}</div>
<canvas id="timeline" style="height:240px" role="img" aria-label="live bytes by op and category"></canvas>
<canvas id="map" style="height:380px" role="img" aria-label="workspace addresses by op"></canvas>
<noscript><p>The pictures need JavaScript; the tables do not.</p></noscript>"""


def _at_peak(doc: Document, profile: LiveProfile) -> str:
    if not profile.num_ops:
        return "<h2>At the peak</h2><p>The plan has no ops.</p>"
    rows = [
        (_dot(COLORS[b.category]) + f"<code>{escape(b.name)}</code>", escape(b.category), format_bytes(b.size_bytes))
        for b in largest_live(doc, 8)
    ]
    name = escape(doc["ops"][profile.peak_index]["name"])
    where = f"<code>{name}</code>, op {profile.peak_index} of {profile.num_ops}"
    return (
        f"<h2>At the peak</h2><p>{format_bytes(profile.peak_bytes)} are live at {where}. The largest:</p>"
        f"{_table(('buffer', 'category', 'size'), rows, (2,))}"
    )


def _formula(doc: Document) -> str:
    rows = [(f"<code>{escape(form['expr'])}</code>", f"<code>{escape(form['at'])}</code>") for form in doc["formula"]]
    return (
        "<h2>Memory law</h2><p>The workspace needs the largest of the following sums, in bytes:</p>"
        f"{_table(('bytes', 'at'), rows) if rows else '<p>None was recorded.</p>'}"
    )


def _buffers(doc: Document) -> str:
    category_of = root_categories(doc)
    roots = placed_roots(doc)
    names = ("buffer", "category", "kind", "size", "offset", "from op", "to op", "shape")
    numeric = (3, 4, 5, 6)
    head = "".join(
        f'<th class="n"><button type="button">{name}</button></th>'
        if column in numeric
        else f'<th><button type="button">{name}</button></th>'
        for column, name in enumerate(names)
    )
    body = "".join(_buffer_row(doc, buffer, category_of[buffer["id"]], at) for at, buffer in enumerate(roots))
    present = {category_of[buffer["id"]] for buffer in roots}
    options = "".join(f"<option>{escape(name)}</option>" for name in CATEGORIES if name in present)
    return f"""<h2>Workspace buffers</h2>
<div class="tools"><input id="filter" type="search" placeholder="filter" aria-label="filter buffers">
<select id="pick" aria-label="category"><option value="">every category</option>{options}</select>
<span class="soft" id="shown"></span></div>
<div class="scroll"><table id="buffers"><thead><tr>{head}</tr></thead><tbody id="rows">{body}</tbody></table></div>"""


def _buffer_row(doc: Document, buffer: Mapping[str, Any], category: str, at: int) -> str:
    ops = doc["ops"]
    first = ops[buffer["start"]]["name"] if buffer["start"] < len(ops) else ""
    last = ops[buffer["end"] - 1]["name"] if 0 < buffer["end"] <= len(ops) else ""
    shape = f"{buffer['dtype']} {'x'.join(map(str, buffer['shape']))}"
    cells = (
        f"<td>{_dot(COLORS[category])}<code>{escape(buffer['name'])}</code></td>",
        f"<td>{escape(category)}</td><td>{escape(buffer['kind'])}</td>",
        f'<td class="n" data-v="{buffer["size"]}">{format_bytes(buffer["size"])}</td>',
        f'<td class="n" data-v="{buffer["offset"]}">{buffer["offset"]:,}</td>',
        f'<td class="n" data-v="{buffer["start"]}" title="{escape(first)}">{buffer["start"]}</td>',
        f'<td class="n" data-v="{buffer["end"]}" title="last in {escape(last)}">{buffer["end"]}</td>',
        f"<td>{escape(shape)}</td>",
    )
    return f'<tr data-at="{at}" data-category="{escape(category)}">{"".join(cells)}</tr>'


def _search(doc: Document) -> str:
    rows = [_search_row(step, number) for number, step in enumerate(doc["trace"])]
    head = ("step", "move", "workspace", "total", "predicted", "bottleneck")
    table = _table(head, rows, (0, 2, 3, 4)) if rows else "<p>None was recorded.</p>"
    return f"<h2>How the search got there</h2>{table}"


def _search_row(step: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """A step of the search; a value that it does not record is blank."""
    sizes = [format_bytes(step[key]) if key in step else "" for key in ("peak_bytes", "total_bytes")]
    predicted = f"{step['predicted_ms']:,.1f} ms" if step.get("predicted_ms") is not None else ""
    places = dict.fromkeys(_said(step.get(key)) for key in ("bottleneck", "at"))
    where = " at ".join(f"<code>{escape(place)}</code>" for place in places if place)
    return (str(number), escape(_said(step.get("move"))), *sizes, predicted, where)


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_setting(item)}" for key, item in value.items())
    return "" if value is None else str(value)


def _provenance(doc: Document) -> str:
    pools = ", ".join(f"{pool['name']} {format_bytes(pool['capacity'])}" for pool in doc["pools"])
    text = f"Mosaic {doc['mosaic_version']}, {doc['schema']}; offsets by {doc['solver']}; pools: {pools}."
    return f'<p class="soft" style="margin-top:32px">{escape(text)}</p>'
