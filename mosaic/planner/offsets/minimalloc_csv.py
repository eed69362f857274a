"""MiniMalloc's CSV: one buffer a line, `id,lower,upper,size[,alignment,gaps,offset]`, columns in any order.

Lifetimes are half-open under every name: `lower,upper`, `start,end`. MiniMalloc itself reads a column named `end` as the
*last* time; ask for that with `inclusive_end` (one is added then, to the ends of gaps too).
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mosaic.errors import InstanceFormatError, UsageError
from mosaic.files import write_atomic

from .problem import BufferId, Interval, Problem, Solution

_NAMES = {
    "id": "id", "buffer": "id", "buffer_id": "id",
    "lower": "lower", "start": "lower", "begin": "lower",
    "upper": "upper", "end": "upper",
    "size": "size", "alignment": "alignment", "gaps": "gaps", "offset": "offset",
}  # fmt: skip
_GAP = re.compile(r"(-?\d+)-(-?\d+)(@\d+:\d+)?")
_CAPACITY = re.compile(r"\.(\d+)\.csv(?:\.gz)?$")


def capacity_of_name(path: str | os.PathLike[str]) -> int | None:
    """Return the capacity that a file name states, or None.

    Examples
    --------
    >>> capacity_of_name("A.1048576.csv")
    1048576
    """
    found = _CAPACITY.search(os.fspath(path))
    return int(found[1]) if found else None


def read_csv(
    path: str | os.PathLike[str], *, capacity: int | None = None, pin: bool = False, inclusive_end: bool = False
) -> Problem:
    """Read a problem from a `.csv` or `.csv.gz` file.

    Parameters
    ----------
    path : path
        The file. A name such as `A.1048576.csv` states a capacity.
    capacity : int, optional
        Bytes; overrides the file name.
    inclusive_end : bool
        The upper ends are last times, as in files of MiniMalloc with a column `end`.
    pin : bool
        Take an `offset` column as given offsets. Otherwise it is ignored.

    Raises
    ------
    InstanceFormatError
        One line that names file, line and column.
    """
    table = _Table(path, inclusive_end)
    capacity = capacity if capacity is not None else capacity_of_name(path)
    try:
        return Problem(
            ids=table.ids(),
            starts=table.ints("lower"),
            ends=table.ends(),
            sizes=table.ints("size"),
            gaps=table.gaps(),
            alignments=table.ints("alignment", default=1) if "alignment" in table.columns else 1,
            pins=table.pins() if pin and "offset" in table.columns else None,
            capacity=capacity,
        )
    except UsageError as error:
        raise InstanceFormatError(f"{table.name}: {error}") from None


def names_end(path: str | os.PathLike[str]) -> bool:
    """Return whether the header calls the upper end `end`, which MiniMalloc reads as inclusive."""
    return "end" in _Table(path, only_header=True).header


def write_csv(path: str | os.PathLike[str], problem: Problem, solution: Solution | None = None) -> None:
    """Write a problem, and the offsets if a solution is given; the file appears whole or not at all.

    Aliases have no place in the format: write the problem of their groups instead.

    Raises
    ------
    UsageError
        If the problem has aliases.
    """
    if problem.aliases:
        raise UsageError(f"the CSV format has no aliases; this problem has {len(problem.aliases)}")
    data = _text(problem, solution).encode()
    write_atomic(path, gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)


def _text(problem: Problem, solution: Solution | None) -> str:
    header = ["id", "lower", "upper", "size"]
    columns: list[Sequence[object]] = [problem.ids, problem.starts, problem.ends, problem.sizes]
    if problem.alignments != 1:
        header.append("alignment")
        columns.append([problem.alignment(row) for row in range(len(problem))])
    if problem.gaps is not None:
        header.append("gaps")
        columns.append([" ".join(f"{a}-{b}" for a, b in gaps) for gaps in problem.gaps])
    offsets = solution.offsets if solution is not None else problem.pins
    if offsets is not None:
        header.append("offset")
        columns.append(["" if offset is None else offset for offset in offsets])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*columns, strict=True))
    return out.getvalue()


class _Table:
    """The cells of a file by column, with the place of each for messages."""

    def __init__(self, path: str | os.PathLike[str], inclusive_end: bool = False, only_header: bool = False) -> None:
        self.name = os.path.basename(os.fspath(path))
        self.later = int(inclusive_end)
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise InstanceFormatError(f"cannot read {os.fspath(path)}: {error.strerror}; check the path.") from None
        try:
            text = (gzip.decompress(raw) if self.name.endswith(".gz") else raw).decode("utf-8-sig")
        except (UnicodeDecodeError, OSError, EOFError) as error:
            raise InstanceFormatError(f"{self.name}: not a CSV text: {error}") from error
        self.columns: dict[str, list[str]] = {}
        self.lines: list[int] = []
        self._parse(next((line for line in text.splitlines() if line.strip(", ")), "") if only_header else text)

    def _parse(self, text: str) -> None:
        reader = csv.reader(io.StringIO(text, newline=""))
        try:
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
        except csv.Error as error:
            raise InstanceFormatError(f"{self.name}, line {reader.line_num}: {error}") from error
        if not rows:
            raise InstanceFormatError(f"{self.name}: the file is empty; expected a header such as id,lower,upper,size")
        self.titles = self._titles(rows[0][1])
        self.lines = [line for line, _ in rows[1:]]
        for line, cells in rows[1:]:
            if len(cells) != len(self.titles):
                raise InstanceFormatError(
                    f"{self.name}, line {line}: {len(cells)} fields, the header has {len(self.titles)}"
                )
        self.columns = {title: [cells[i] for _, cells in rows[1:]] for i, title in enumerate(self.titles)}

    def _titles(self, header: list[str]) -> list[str]:
        self.header = {title.lower() for title in header}
        titles = [_NAMES.get(title.lower(), title) for title in header]
        if len(set(titles)) != len(titles):
            raise InstanceFormatError(f"{self.name}, line 1: the header {','.join(header)} names a column twice")
        for name, also in (("id", "buffer"), ("lower", "start"), ("upper", "end"), ("size", "")):
            if name not in titles:
                hint = f" (or '{also}')" if also else ""
                raise InstanceFormatError(
                    f"{self.name}, line 1: there is no column '{name}'{hint} in {','.join(header)}"
                )
        return titles

    def ints(self, column: str, default: int | None = None) -> list[int]:
        """Return a column of integers; an empty cell is the default if there is one."""
        cells = self.columns[column]
        try:
            return list(map(int, cells))
        except ValueError:
            return [self._int(cell, row, column, default) for row, cell in enumerate(cells)]

    def ends(self) -> list[int]:
        """Return half-open ends."""
        return [end + self.later for end in self.ints("upper")]

    def ids(self) -> list[BufferId]:
        """Return the ids, as ints where all of them are plain ints."""
        cells = self.columns["id"]
        seen: dict[str, int] = {}
        for row, cell in enumerate(cells):
            if cell in seen:
                raise InstanceFormatError(
                    f"{self._place(row, 'id')}: id {cell!r} occurs on line {self.lines[seen[cell]]} too"
                )
            seen[cell] = row
        if all(cell.isascii() and cell.isdigit() and str(int(cell)) == cell for cell in cells):
            return [int(cell) for cell in cells]
        return list(cells)

    def pins(self) -> list[int | None]:
        """Return the offset column; an empty cell is no pin."""
        return [self._int(c, row, "offset", None) if c else None for row, c in enumerate(self.columns["offset"])]

    def gaps(self) -> list[tuple[Interval, ...]] | None:
        """Return the gaps; one with a window (`a-b@c:d`) keeps part of the buffer in use and counts as no gap."""
        if "gaps" not in self.columns or not any(self.columns["gaps"]):
            return None
        found = []
        for row, cell in enumerate(self.columns["gaps"]):
            matches = [_GAP.fullmatch(word) for word in cell.split()]
            if None in matches:
                raise InstanceFormatError(f"{self._place(row, 'gaps')}: {cell!r} is not of the form '3-5 8-9'")
            found.append(tuple((int(m[1]), int(m[2]) + self.later) for m in matches if m is not None and m[3] is None))
        return found

    def _int(self, cell: str, row: int, column: str, default: int | None) -> int:
        if not cell and default is not None:
            return default
        try:
            return int(cell)
        except ValueError:
            raise InstanceFormatError(f"{self._place(row, column)}: {cell!r} is not an integer") from None

    def _place(self, row: int, column: str) -> str:
        return f"{self.name}, line {self.lines[row]}, column {column}"
