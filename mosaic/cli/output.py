"""Where results and messages go: stdout for results, stderr for the rest, no colour where none is wanted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["new_table", "note", "print_json", "report_plan", "results"]


@cache
def results() -> Console:
    """The console for results; 120 columns where stdout is no terminal. `NO_COLOR` is respected by rich."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=False)


def new_table(first: str, *others: str) -> Table:
    """A table without lines: the first column to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))
    for index, column in enumerate((first, *others)):
        table.add_column(column, justify="right" if index else "left", header_style="dim", no_wrap=True)
    return table


def note(message: str) -> None:
    """A remark that is no result."""
    print(f"mosaic: {message}", file=sys.stderr)


def report_plan(document: Mapping[str, Any], as_json: bool, explain: bool) -> None:
    """A plan as its JSON, or as the summary with its explanation if asked for."""
    if as_json:
        print_json(document)
        return
    from mosaic.cli.summary import explanation, print_plan

    print_plan(results(), document)
    if explain:
        results().print()
        results().print(explanation(document))


def print_json(value: Any) -> None:
    """The only thing on stdout under `--json`."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
