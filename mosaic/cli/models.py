"""`mosaic models`: the presets and the families they stand for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mosaic.cli.output import new_table, print_json, results


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False) -> None:
    """List the models that can be planned without any file."""
    from mosaic.models import PRESETS, load
    from mosaic.planner import Planner, Request
    from mosaic.units import format_bytes, round_up

    rows: list[dict[str, Any]] = []
    for name in PRESETS:
        model = load(name)
        arch = model.architecture
        point = Planner(model).at(Request(seq_lens=(1,)))
        weights = round_up(point.pool_bytes(point.config({}), "weights"), point.space.device.page_bytes)
        rows.append(
            {
                "name": name, "family": model.family, "layers": arch.layers, "hidden": arch.hidden,
                "heads": arch.attention.heads, "kv_heads": arch.attention.kv_heads, "ffn": arch.feed_forward.size,
                "experts": arch.feed_forward.experts, "vocabulary": arch.vocabulary,
                "dtype": arch.dtype, "weights_bytes": weights,
            }
        )  # fmt: skip
    if as_json:
        print_json(rows)
        return
    numbers = ("layers", "hidden", "heads", "kv_heads", "ffn", "experts", "vocabulary")
    table = new_table("name", "family", *(key.replace("_", " ") for key in numbers), "weights")
    table.columns[1].justify = "left"
    for row in rows:
        shown = (f"{row[key]:,}" for key in numbers)
        table.add_row(row["name"], row["family"], *shown, format_bytes(row["weights_bytes"]))
    results().print(table)
    results().print(
        "Any checkpoint directory or config.json of these families works too: --model path/to/checkpoint", style="dim"
    )
