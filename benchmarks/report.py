"""Tables and plots from the recorded results: `python -m benchmarks.report`, or `make report`.

Reads benchmarks/results and rewrites what stands between the markers of the documents, and the plots in docs/images. A
kind of result that was not recorded leaves its section as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import (
    ablation,
    across,
    block,
    decoding,
    eviction,
    fit,
    kv_attention,
    paired,
    requests,
    same_results,
    small_models,
    sparse,
    speed,
    unembed,
)
from benchmarks.record import ROOT, load_results, replace_section, source_line, table
from mosaic.bench import ENGINES
from mosaic.units import GIB, MIB, format_bytes
from mosaic.viz.palette import COLORS

__all__ = ["DOCUMENTS", "SECTIONS", "main", "readme", "write_plots"]

COLOR: Final = {"mosaic": COLORS["hidden"], "eager": COLORS["logits and head"], "compile": COLORS["attention"]}
LABEL: Final = {"mosaic": "Mosaic", "eager": "eager PyTorch", "compile": "torch.compile"}
HEADLINE: Final = "llada-8b"
HEADLINE_RATIO: Final = 0.5
Result = dict[str, Any]


def by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results of each model, in order of their names."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result["model"], []).append(result)
    return found


def points_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The points of a model's largest run: times of two runs, perhaps of two cards, are never set beside each other."""
    return max((result["points"] for result in results), key=len, default=[])


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
            if rows := speed.rows_of(run["points"]):
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
    """The planner's largest contexts, what plain PyTorch reaches, and the executed plans."""
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
    """What became of the random requests."""
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
}
"""Marker in docs/performance.md -> kind of result, and what writes the section."""
DOCUMENTS: Final = {"performance.md": SECTIONS, "small-models.md": small_models.SECTIONS}
"""Document in docs -> its sections."""


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


# --- plots --------------------------------------------------------------------------------------------------------------


def write_plots(folder: Path) -> list[Path]:
    """Draw what there are results for; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for model, mine in by_model(load_results("speed")).items():
        if any(not p["failed"] for p in points_of(mine)):
            written.append(_speed_plot(model, points_of(mine), folder))
    if limits := [entry for result in load_results("fit") for entry in result["limits"]]:
        written.append(_fit_plot(limits, baseline_limits(load_results("speed")), folder))
    for model, mine in by_model(load_results("ablation")).items():
        written.append(_ablation_plot(model, mine[-1]["limits"], folder))
    return written + small_models.write_plots(
        load_results("training"),
        load_results("quality"),
        load_results("estimation"),
        load_results("decodability"),
        folder,
    )


def _new_figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(5.2 * columns, 3.8), dpi=150, layout="constrained")
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="#E5E5E5", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _saved(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(file, metadata={"Software": None})
    pyplot.close(figure)
    return file


def _token_ticks(axis: Any, tokens: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [f"{t // 1024}K" if t % 1024 == 0 else f"{t:,}" for t in tokens])
    axis.minorticks_off()
    axis.set_xlabel("tokens")


def _speed_plot(model: str, points: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Step over floor (over Mosaic where none was measured), and device memory, by context at the headline's ratio."""
    ratios = {p["mask_ratio"] for p in points}
    ratio = HEADLINE_RATIO if HEADLINE_RATIO in ratios else min(ratios)
    mine = sorted((p for p in points if p["mask_ratio"] == ratio and not p["failed"]), key=lambda p: int(p["tokens"]))
    floors = {p["tokens"]: p.get("floor_s") or p["step_s"] for p in mine if p["engine"] == "mosaic"}
    figure, (left, right) = _new_figure(2)
    for engine in ENGINES:
        curve = [p for p in mine if p["engine"] == engine]
        timed = [p for p in curve if p["tokens"] in floors]
        style: dict[str, Any] = {"color": COLOR[engine], "label": LABEL[engine], "marker": "o", "markersize": 4}
        left.plot([p["tokens"] for p in timed], [p["step_s"] / floors[p["tokens"]] for p in timed], **style)
        shown = [p for p in curve if p.get("driver_bytes") is not None]
        right.plot([p["tokens"] for p in shown], [p["driver_bytes"] / GIB for p in shown], **style)
    tokens = sorted({int(p["tokens"]) for p in mine})
    for axis in (left, right):
        _token_ticks(axis, tokens)
    left.set_ylabel("step / floor")
    left.set_ylim(bottom=0)
    right.set_ylabel("device memory, GiB")
    right.set_ylim(bottom=0)
    left.legend(frameon=False)
    figure.suptitle(f"{model}, one step, {ratio:.0%} masked")
    return _saved(figure, folder / f"speed-{model}.png")


def _fit_plot(limits: Sequence[Mapping[str, Any]], measured: Mapping[tuple[str, str, int], int], folder: Path) -> Path:
    """Largest context by budget: Mosaic's per model, and what PyTorch reaches."""
    figure, axis = _new_figure()
    palette = [COLORS[name] for name in ("hidden", "ffn", "inputs", "statistics")]
    for index, model in enumerate(dict.fromkeys(entry["model"] for entry in limits)):
        color = palette[index % len(palette)]
        mine = sorted((e["budget_bytes"], e["max_tokens"]) for e in limits if e["model"] == model and e["max_tokens"])
        axis.plot(
            [b / GIB for b, _ in mine],
            [t for _, t in mine],
            color=color,
            marker="o",
            markersize=4,
            label=f"{model}, Mosaic",
        )
        for engine, marker in (("eager", "x"), ("compile", "+")):
            other = sorted((cap, t) for (m, e, cap), t in measured.items() if (m, e) == (model, engine) and t)
            if other:
                axis.plot(
                    [cap / GIB for cap, _ in other], [t for _, t in other], color=color, marker=marker, linestyle="none",
                    label=f"{model}, {LABEL[engine]}",
                )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("device memory, GiB, CUDA context included")
    axis.set_ylabel("largest context, tokens")
    axis.legend(frameon=False)
    return _saved(figure, folder / "fit.png")


def _ablation_plot(model: str, limits: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Largest context by level, at the middle budget."""
    budgets = sorted({entry["budget_bytes"] for entry in limits})
    budget = budgets[len(budgets) // 2]
    mine = [entry for entry in limits if entry["budget_bytes"] == budget]
    figure, axis = _new_figure()
    names = [entry["level"] for entry in mine]
    bars = axis.barh(names, [max(entry["max_tokens"], 1) for entry in mine], color=COLOR["mosaic"])
    axis.bar_label(bars, [f"{entry['max_tokens']:,}" for entry in mine], padding=3)
    axis.set_xscale("log")
    axis.set_xlim(right=10 * max(entry["max_tokens"] for entry in mine))
    axis.invert_yaxis()
    axis.set_xlabel("largest context, tokens")
    axis.set_title(f"{model} in {format_bytes(budget)}")
    return _saved(figure, folder / f"ablation-{model}.png")


def main() -> None:
    """Rewrite every section that there are results for, and the plots."""
    for name, sections in DOCUMENTS.items():
        for marker, (kind, write) in sections.items():
            if results := load_results(kind):
                replace_section(ROOT / "docs" / name, marker, write(results))
                print(f"{name}: {marker}", file=sys.stderr)
    if text := readme(load_results("speed")):
        replace_section(ROOT / "README.md", "bench", text)
    for file in write_plots(ROOT / "docs" / "images"):
        print(file.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
