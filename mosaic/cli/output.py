"""Output of results to stdout and of messages to stderr, with colour only where it is wanted."""

from __future__ import annotations

import codecs
import io
import json
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mosaic.errors import ConfigWarning, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_PLAIN: Final[Mapping[str, str]] = {
    "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{BLACK UP-POINTING TRIANGLE}": "^",
    "\N{LEFT SINGLE QUOTATION MARK}": "'", "\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
}  # fmt: skip
_LINES: Final = range(0x2500, 0x2580)
_BLOCKS: Final = range(0x2580, 0x25A0)


def degrade_output() -> None:
    """Make stdout and stderr print the nearest character, instead of failing, if their encoding lacks one."""
    codecs.register_error("mosaic", _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="mosaic")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """ASCII for the characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    if ord(character) in _LINES:
        return {"│": "|", "─": "-"}.get(character, "+")
    if ord(character) in _BLOCKS:
        return "#"
    return _PLAIN.get(character) or unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"


def is_unicode() -> bool:
    """Return whether stdout can print any character."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


@cache
def results() -> Console:
    """Return the console for results; 120 columns if stdout is no terminal. rich respects `NO_COLOR`."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=False)


def new_table(first: str, *others: str) -> Table:
    """Return a table without lines: the first column to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))
    for index, column in enumerate((first, *others)):
        table.add_column(column, justify="right" if index else "left", header_style="dim", no_wrap=True)
    return table


def note(message: str) -> None:
    """Write a remark to stderr; it is no result."""
    print(f"mosaic: {message}", file=sys.stderr)


@contextmanager
def noted_warnings() -> Iterator[None]:
    """Show Mosaic's warnings as remarks, each once, without the source line."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, ConfigWarning):
                note(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.simplefilter("once", ConfigWarning)
        warnings.showwarning = show
        yield


def report_plan(document: Mapping[str, Any], as_json: bool, explain: bool) -> None:
    """Print a plan as JSON, or as the summary, with its explanation if requested."""
    if as_json:
        print_json(document)
        return
    from mosaic.cli.summary import explanation, print_plan

    print_plan(results(), document)
    if explain:
        results().print()
        results().print(explanation(document))


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return the JSON object that an option was given.

    Raises
    ------
    UsageError
        If it is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{option}: expected a JSON object.")
    return found


def print_json(value: Any) -> None:
    """Print a document; under `--json` nothing else is printed to stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=not is_unicode(), indent=1) + "\n")
