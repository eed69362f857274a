"""Tables, figures and plots from the records: `python -m benchmarks.report`, or `make report`.

Reads benchmarks/results and rewrites README.md and docs/*.md: what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`
is a table of `DOCUMENTS`, between `<!--fig NAME-->` and `<!--/fig-->` one of `benchmarks.figures`. Draws the plots in docs/images.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import (
    ablation,
    across,
    batch_mates,
    block,
    cold_start,
    decoding,
    eviction,
    fit,
    kv_attention,
    offset_families,
    offsets,
    over_http,
    paired,
    planning,
    requests,
    resident,
    same_results,
    search,
    serving,
    small_models,
    sparse,
    sparse_keys,
    speed,
    unembed,
)
from benchmarks.bench import ENGINES
from benchmarks.dllm_serve import tables as dllm_serve
from benchmarks.dllm_serve.curves import write_curves
from benchmarks.figures import FIGURES, HEADLINE, points_of
from benchmarks.record import ROOT, load_results, source_line, table
from mosaic.units import GIB, MIB, format_bytes

__all__ = ["DOCUMENTS", "SECTIONS", "documents", "main", "readme", "write_plots"]

LABEL: Final = {"mosaic": "Mosaic", "eager": "eager PyTorch", "compile": "torch.compile"}
HEADLINE_RATIO: Final = 0.5
Result = dict[str, Any]


def by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results of each model, in order of their names."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result["model"], []).append(result)
    return found


def sources(results: Sequence[Result]) -> str:
    """Where a table's figures come from, one line per run."""
    return "\n\n".join(dict.fromkeys(source_line(result) for result in results))


def titled(model: str, *parts: str) -> str:
    """A model's part of a section."""
    return "\n\n".join((f"**{model}**", *(part for part in parts if part)))


# --- sections -----------------------------------------------------------------------------------------------------------


def speed_section(results: Sequence[Result]) -> str:
    """Latency side by side and against the floor, a table per run."""
    parts = []
    for model, mine in by_model(results).items():
        for run in sorted(mine, key=lambda run: -len(run["points"])):
            if rows := speed.rows_of(run):
                parts.append(titled(model, table(speed.HEADER, rows), sources([run])))
    return "\n\n".join(parts)


MEMORY_HEADER: Final = (
    "tokens", "masked", "engine", "activations MiB", "peak / average", "inflation", "reserved by PyTorch MiB", "device MiB",
    "planned MiB", "fixed part MiB", "declared", "allocations in a step",
)  # fmt: skip


def memory_rows(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Every counter of every point."""
    rows: list[tuple[str, ...]] = []
    for p in sorted(points, key=lambda p: (p["tokens"], p["mask_ratio"], ENGINES.index(p["engine"]))):
        if p["failed"] or p.get("same_work_as_ratio") is not None:
            continue
        committed = p.get("planned_bytes")
        rows.append(
            (
                f"{p['tokens']:,}", f"{p['mask_ratio']:g}", LABEL[p["engine"]], _mib(p.get("activation_peak_bytes")),
                _number(p.get("peak_to_average"), ".2f"), _number(p.get("inflation"), ".1%"), _mib(p.get("reserved_bytes")),
                _mib(p.get("driver_bytes")), _mib(committed), _mib(p.get("fixed_bytes")),
                _mib(p.get("declared_fixed_bytes")), _number(p.get("allocations_in_step"), "d"),
            )
        )  # fmt: skip
    return rows


def memory_section(results: Sequence[Result]) -> str:
    """Memory by every counter, per model."""
    parts = []
    for model, mine in by_model(results).items():
        if rows := memory_rows(points_of(mine)):
            parts.append(titled(model, table(MEMORY_HEADER, rows)))
    return "\n\n".join(parts)


def fit_section(results: Sequence[Result]) -> str:
    """The largest contexts of the planner and of plain PyTorch, and the executed plans."""
    parts = []
    if limits := [entry for result in results for entry in result["limits"]]:
        parts.append(fit.limits_table(limits))
    if measured := baseline_limits(load_results("speed")):
        parts.append(
            table(
                ("PyTorch, measured", "engine", "cap", "largest context"),
                [(m, LABEL[e], format_bytes(cap), f"{tokens:,}") for (m, e, cap), tokens in sorted(measured.items())],
            )
        )
    if runs := [run for result in results for run in result["runs"]]:
        parts.append(table(fit.RUN_HEADER, fit.run_rows(runs)))
    return "\n\n".join((*parts, sources(results)))


def baseline_limits(results: Sequence[Result]) -> dict[tuple[str, str, int], int]:
    """Largest contexts of the PyTorch engines by model, engine and cap, at the highest mask ratio tried."""
    found: dict[tuple[str, str, int], int] = {}
    for result in results:
        for entry in result["limits"]:
            if entry["engine"] != "mosaic" and entry["max_tokens"] is not None:
                found[result["model"], entry["engine"], entry["cap_bytes"]] = entry["max_tokens"]
    return found


def requests_section(results: Sequence[Result]) -> str:
    """The outcomes of the random requests."""
    return f"{requests.summary([row for result in results for row in result['requests']])}\n\n{sources(results)}"


def ablation_section(results: Sequence[Result]) -> str:
    """Contributions to the largest context and to latency, per model."""
    parts = []
    for model, mine in by_model(results).items():
        runs = [run for result in mine for run in result["runs"]]
        parts.append(
            titled(
                model, ablation.limits_table(mine[-1]["limits"]),
                table(ablation.RUN_HEADER, ablation.run_rows(runs)) if runs else "", sources(mine),
            )
        )  # fmt: skip
    return "\n\n".join(parts)


def same_section(results: Sequence[Result]) -> str:
    """Errors against the float32 reference, per model."""
    return "\n\n".join(
        titled(
            f"{r['model']}, {r['tokens']:,} tokens, {r['mask_ratio']:g} masked",
            table(same_results.HEADER, same_results.rows_of(r["rows"])),
            source_line(r),
        )
        for r in results
    )


def unembed_section(results: Sequence[Result]) -> str:
    """The unembedding as ratios to the bare product, per model."""
    parts = []
    for result in results:
        kinds = [kind for kind in result["targets"] if all(kind in entry for entry in result["rows"])]
        rows = unembed.rows_of(result["rows"], kinds)
        parts.append(titled(result["model"], table(unembed.header_of(kinds), rows), source_line(result)))
    return "\n\n".join(parts)


def paired_section(results: Sequence[Result]) -> str:
    """Two checkouts on one card."""
    return "\n\n".join(f"{table(paired.HEADER, paired.rows_of(result))}\n\n{source_line(result)}" for result in results)


def block_section(results: Sequence[Result]) -> str:
    """Steps of a block, prefills and generations over kept keys, per model."""
    return _of_blocks(results, block.HEADER, block.rows_of)


def sparse_section(results: Sequence[Result]) -> str:
    """Blocks of sparse attention beside exact ones, per model."""
    return _of_blocks(results, sparse.HEADER, sparse.rows_of)


def _of_blocks(
    results: Sequence[Result], header: Sequence[str], rows_of: Callable[[Result], Iterable[Sequence[str]]]
) -> str:
    return "\n\n".join(
        titled(
            f"{r['model']}, blocks of {r['block']}, {r['k']:,} keys selected", table(header, list(rows_of(r))), source_line(r)
        )
        for r in results
    )  # fmt: skip


def eviction_section(results: Sequence[Result]) -> str:
    """Tokens per second with and without token eviction, per model."""
    return "\n\n".join(
        titled(
            f"{r['model']}, trace '{r['trace']}', prompts of {r['prompts'][0]:,} to {r['prompts'][1]:,} tokens, answers of up to "
            f"{r['answer']:,}" + (f", attention {r['attention']}" if "attention" in r else ""),
            table(eviction.header_of(r), list(eviction.rows_of(r))),
            source_line(r),
        )
        for r in results
    )


def across_section(results: Sequence[Result]) -> str:
    """From one graph to the next: a table per run."""
    return "\n\n".join(f"{table(across.HEADER, list(across.rows_of(r)))}\n\n{source_line(r)}" for r in results)


def batch_mates_section(results: Sequence[Result]) -> str:
    """The time of `batch_invariant` and the differences without it: a table per run."""
    return "\n\n".join(f"{table(batch_mates.HEADER, batch_mates.rows_of(r))}\n\n{source_line(r)}" for r in results)


def kv_attention_section(results: Sequence[Result]) -> str:
    """Attention over kept keys against its bound."""
    return "\n\n".join(
        f"{table(kv_attention.HEADER, list(kv_attention.rows_of(r)))}\n\n{source_line(r)}" for r in results
    )


def decoding_section(results: Sequence[Result]) -> str:
    """Tokens per second beside the published loops, per model."""
    return "\n\n".join(
        titled(
            f"{r['model']}, {r['dtype']}, {r['gen_length']} tokens"
            + (f", {r['threads']} thread{'s' * (r['threads'] > 1)}" if r["threads"] else ""),
            table(decoding.HEADER, decoding.rows_of(r["points"])),
            source_line(r),
        )
        for r in results
    )


SECTIONS: Final[Mapping[str, tuple[str, Callable[[Sequence[Result]], str]]]] = {
    "speed": ("speed", speed_section),
    "memory": ("speed", memory_section),
    "fit": ("fit", fit_section),
    "requests": ("requests", requests_section),
    "ablation": ("ablation", ablation_section),
    "decoding": ("decoding", decoding_section),
    "paired": ("paired", paired_section),
    "block": ("block", block_section),
    "sparse": ("sparse", sparse_section),
    "eviction": ("eviction", eviction_section),
    "across": ("across", across_section),
    "kv-attention": ("kv-attention", kv_attention_section),
    "same": ("same", same_section),
    "unembed": ("unembed", unembed_section),
    "planning": ("planning", planning.section),
    "resident": ("resident", resident.section),
    "keys": ("keys", sparse_keys.section),
    "dllm-serve": ("dllm-serve", dllm_serve.section),
    "search": ("search", search.section),
}
"""Marker in docs/performance.md or docs/records.md -> kind of result, and what writes the section."""
LONG: Final = frozenset({"search", "memory", "requests", "decoding", "sparse", "eviction", "across", "same", "unembed"})
"""Sections that stand in docs/records.md."""


def readme(results: Sequence[Result]) -> str:
    """The headline: one model at one mask ratio, all engines, and what the device shows."""
    mine = by_model(results).get(HEADLINE, [])
    points = [p for p in points_of(mine) if p["mask_ratio"] == HEADLINE_RATIO]
    at = {(p["tokens"], p["engine"]): p for p in points}
    rows = []
    for tokens in sorted({p["tokens"] for p in points}):
        cells = [at.get((tokens, engine)) for engine in ENGINES]
        rows.append((f"{tokens:,}", *map(_step, cells), *map(_device, cells)))
    if not rows:
        return ""
    header = ("tokens", *(f"{LABEL[e]}, ms" for e in ENGINES), *(f"{LABEL[e]}, GiB" for e in ENGINES))
    title = (
        f"{HEADLINE}, {HEADLINE_RATIO:.0%} masked, one step; milliseconds, and device memory as the driver shows it:"
    )
    return "\n\n".join((title, table(header, rows), sources([r for r in mine if r["points"] is points_of(mine)])))


def _step(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return ""
    return str(point["failed"]).split(":")[0] if point["failed"] else f"{point['step_s'] * 1e3:,.1f}"


def _device(point: Mapping[str, Any] | None) -> str:
    used = None if point is None else point.get("driver_bytes")
    return "" if used is None else f"{used / GIB:.2f}"


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:,.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


DOCUMENTS: Final[Mapping[str, Mapping[str, tuple[str, Callable[[Sequence[Result]], str]]]]] = {
    "README.md": {"bench": ("speed", readme)},
    "docs/performance.md": {name: section for name, section in SECTIONS.items() if name not in LONG},
    "docs/records.md": {name: SECTIONS[name] for name in SECTIONS if name in LONG} | small_models.RECORDS,
    "docs/decoding.md": {"batch-mates": ("batch-mates", batch_mates_section)},
    "docs/serving.md": {
        "serving": ("serving", serving.section),
        "over-http": ("over-http", over_http.section),
        "cold-start": ("cold-start", cold_start.section),
    },
    "docs/small-models.md": small_models.SECTIONS,
    "docs/offsets.md": {
        "offsets": ("offsets", offsets.section),
        "offset-families": ("offset-families", offset_families.section),
    },
}
"""Document -> its sections."""
_FIGURE: Final = re.compile(r"<!--fig ([\w-]+)-->.*?<!--/fig-->", re.DOTALL)


def documents() -> dict[Path, str]:
    """Return the documents as the records say they are; a kind of result that was not recorded leaves its section as it is.

    Raises
    ------
    SystemExit
        If a document has no markers for one of its sections, or asks for a figure that there is not.
    """
    found = {}
    for file in sorted((ROOT / "README.md", *(ROOT / "docs").glob("*.md"))):
        name, text = file.relative_to(ROOT).as_posix(), file.read_text()
        for marker, (kind, write) in DOCUMENTS.get(name, {}).items():
            if results := load_results(kind):
                text = _with_section(name, text, marker, write(results))
        found[file] = _FIGURE.sub(lambda match, name=name: _figure(name, match[1]), text)  # type: ignore[misc]
    return found


def _with_section(document: str, text: str, marker: str, written: str) -> str:
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{document} needs the markers {begin} and {end}, each once: add them where the table goes.")
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{written}\n{end}{tail}"


def _figure(document: str, name: str) -> str:
    if name not in FIGURES:
        raise SystemExit(f"{document} asks for the figure '{name}', which benchmarks/figures.py does not have.")
    return f"<!--fig {name}-->{FIGURES[name]()}<!--/fig-->"


# --- plots --------------------------------------------------------------------------------------------------------------


def write_plots(folder: Path) -> list[Path]:
    """Draw the pictures that have results; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ("training", "quality", "estimation", "decodability")
    return [
        *small_models.write_plots(*map(load_results, kinds), folder),
        *write_curves(load_results("dllm-serve"), folder),
    ]


def main() -> None:
    """Rewrite the documents, and draw the plots."""
    for file, text in documents().items():
        if text != file.read_text():
            file.write_text(text)
            print(file.relative_to(ROOT), file=sys.stderr)
    for file in write_plots(ROOT / "docs" / "images"):
        print(file.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
