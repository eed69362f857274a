"""Write a picture, report or trace of a plan to a file, by the file's ending."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

from mosaic.errors import UnknownName
from mosaic.files import write_atomic
from mosaic.viz.charts import plan_png
from mosaic.viz.perfetto import trace_json
from mosaic.viz.profile import Document
from mosaic.viz.report import html_report
from mosaic.viz.snapshot import snapshot_pickle
from mosaic.viz.text import text_timeline

FORMATS: Final[Mapping[str, Callable[[Document], bytes | str]]] = {
    ".html": html_report,
    ".png": plan_png,
    ".perfetto.json": trace_json,
    ".pickle": snapshot_pickle,
    ".txt": lambda doc: text_timeline(doc) + "\n",
}
"""Ending of the file -> the function that makes its content."""


def save(doc: Document, path: str | os.PathLike[str]) -> None:
    """Write the format that the ending of `path` names: report, picture, Perfetto trace, memory snapshot or text.

    Raises
    ------
    UnknownName
        If the ending is none of `FORMATS`.
    UsageError
        If the file cannot be written.
    MissingExtra
        If a picture is asked for and matplotlib is not installed.
    """
    name = os.path.basename(os.fspath(path))
    for ending, render in FORMATS.items():
        if name.lower().endswith(ending):
            write_atomic(path, render(doc))
            return
    raise UnknownName("file type", name, FORMATS, hint="The ending says what to write.")
