"""The figures of a load as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mosaic.bench.figures import MEASURES, PERCENTILES
from mosaic.cli.output import new_table
from mosaic.units import format_bytes

_ROWS: Final = (
    ("requests", "request_throughput", "/s"),
    ("good requests", "request_goodput", "/s"),
    ("tokens of answers, effective", "output_throughput", "/s"),
    ("tokens of answers, in steps", "in_step_throughput", "/s"),
    ("tokens with those of prompts", "total_token_throughput", "/s"),
    ("tokens of answers, best second", "max_output_tokens_per_s", "/s"),
    ("blocks", "block_throughput", "/s"),
    ("forwards of a token", "forwards_per_token", ""),
)
_SHOWN_ERRORS: Final = 5


def print_load(console: Console, found: Mapping[str, Any]) -> None:
    """Print the results of a load."""
    console.print(_headline(found))
    console.print(_throughput(found))
    if found["completed"]:
        console.print(_latencies(found))


def _headline(found: Mapping[str, Any]) -> Text:
    title = Text(f"{found['model_id']}: {found['completed']:,} of {found['num_prompts']:,} requests", style="bold")
    failed = f", {found['failed']:,} failed" if found["failed"] else ""
    title.append(
        f" in {found['duration']:,.2f} s{failed}; {found['max_concurrent_requests']:,} in flight at once, "
        f"{found['total_input_tokens']:,} tokens in ({found['cached_tokens']:,} cached), "
        f"{found['total_output_tokens']:,} out",
        style="not bold",
    )
    return title


def _throughput(found: Mapping[str, Any]) -> Table:
    table = new_table("", "", "")
    table.show_header = False
    for label, name, unit in _ROWS:
        if found.get(name) is not None:
            table.add_row(label, f"{found[name]:,.2f}", unit)
    if "peak_memory_bytes" in found:
        table.add_row("memory of the server, peak", format_bytes(found["peak_memory_bytes"]), "")
    return table


def _latencies(found: Mapping[str, Any]) -> Table:
    table = new_table("milliseconds", "mean", *(f"p{one}" for one in PERCENTILES))
    for name, label in MEASURES.items():
        columns = ("mean", *(f"p{one}" for one in PERCENTILES))
        table.add_row(f"{label} ({name})", *(f"{found[f'{column}_{name}_ms']:,.1f}" for column in columns))
    return table


def failures(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield why requests of a load have failed, and how many, the most frequent reason first."""
    counts = Counter(error for error in found["errors"] if error)
    for error, count in counts.most_common(_SHOWN_ERRORS):
        yield f"{count:,} failed: {error}"
    if len(counts) > _SHOWN_ERRORS:
        yield f"… and {len(counts) - _SHOWN_ERRORS:,} other errors (--save has them)"
