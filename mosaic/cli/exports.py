"""Write a plan in other formats. All are rendered before the first is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic.cli.output import note, print_json, results
from mosaic.errors import UsageError
from mosaic.files import is_replaceable, write_atomic

if TYPE_CHECKING:
    from rich.table import Table

Document = Mapping[str, Any]


def check_targets(targets: Iterable[Path | None]) -> None:
    """Refuse output files that cannot be written or are named twice, before any work is done for them."""
    seen: set[str] = set()
    for path in targets:
        if path is None:
            continue
        where = os.path.realpath(path)
        if where in seen:
            raise UsageError(f"cannot write {path} twice: give every output a file of its own.")
        seen.add(where)
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: the directory {path.parent} does not exist.")
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a directory; give a file name.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: no permission.")


def export(document: Document, targets: Mapping[str, Path | None]) -> None:
    """Render `document` for every given target, then write the files and report them; if one fails, none is left."""
    rendered = [(path, _rendered(document, kind)) for kind, path in targets.items() if path is not None]
    written: list[Path] = []
    try:
        for path, data in rendered:
            write_atomic(path, data)
            written.append(path)
    except BaseException:
        for path in filter(is_replaceable, written):
            path.unlink(missing_ok=True)
        raise
    say_written(written)


def say_written(paths: Iterable[Path | None]) -> None:
    """Name the files on stderr."""
    names = [str(path) for path in paths if path is not None]
    if names:
        note(f"wrote {', '.join(names)}")


def report(
    result: dict[str, Any], tables: Callable[[dict[str, Any]], Iterable[Table]], out: Path | None, as_json: bool
) -> None:
    """Write a measurement's JSON to `out`, whole or not at all, and print it, or its tables."""
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1) + "\n")
        say_written([out])
    if as_json:
        print_json(result)
        return
    for table in tables(result):
        results().print(table)
        results().print()


_ENDINGS: Mapping[str, str] = {"html": ".html", "png": ".png", "trace": ".perfetto.json", "snapshot": ".pickle"}
"""Kind of file -> its name in `mosaic.viz.save`."""


def _rendered(document: Document, kind: str) -> str | bytes:
    if kind == "json":
        from mosaic.planner.plan import Plan

        return Plan(document).to_json()
    from mosaic.viz.save import FORMATS

    return FORMATS[_ENDINGS[kind]](document)
