"""Files of lines: requests are read as they are needed, answers are appended as they come, and say which lines are answered."""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mosaic.decoding.stream import MOST_AHEAD
from mosaic.errors import UsageError
from mosaic.runtime.range_pool import ClosesOnExit

__all__ = ["Answered", "AnswersFile", "Line", "distinct", "lines_of", "object_of", "opened", "unanswered"]


class Line(NamedTuple):
    """A line of requests: its number from 1, and its bytes without white space around them."""

    number: int
    content: bytes


class Answered(NamedTuple):
    """What a line of answers says of the line that it answers: its number, and the digest of it and of the job."""

    number: int
    digest: str


def opened(path: Path) -> Any:
    """Open a file of requests.

    Raises
    ------
    UsageError
        If it cannot be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}. Give a file of one JSON object per line.") from None


def lines_of(file: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines that are not blank."""
    for number, raw in enumerate(file, start=1):
        if content := raw.strip():
            yield Line(number, content)


def distinct(lines: Iterable[Line], name: Path) -> Iterator[Line]:
    """Yield lines, keeping each `custom_id`: by it alone the lines of a batch and their answers are told apart.

    Raises
    ------
    UsageError
        At the second line that has it, with both numbers.
    """
    first = dict[str, int]()
    for line in lines:
        found = None
        if b'"custom_id"' in line.content:
            with suppress(UsageError):  # of what is no JSON, which is said where the line is read
                found = object_of(line.content).get("custom_id")
        if isinstance(found, str) and (before := first.setdefault(found, line.number)) != line.number:
            raise UsageError(
                f"{name}, lines {before:,} and {line.number:,}: both have custom_id {found!r}; give each line its own."
            )
        yield line


def object_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises
    ------
    UsageError
        If it is none.
    """
    try:
        found = json.loads(content, parse_float=_finite, parse_constant=_finite)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error or 'nested too deeply'})") from None
    if not isinstance(found, dict):
        raise UsageError(f"expected a JSON object, got {type(found).__name__}")
    return found


def _finite(text: str) -> float:
    """Return a number of a line; JSON has no NaN and no Infinity, so no answer could repeat one as its "id"."""
    if math.isfinite(number := float(text)):
        return number
    raise UsageError(f"{text} is no number that an answer could repeat; as a name, write it as a text")


class AnswersFile(ClosesOnExit):
    """A file that answers are appended to, whole lines at once, by one process at a time.

    What a process that was killed has left of its last line is dropped.

    Parameters
    ----------
    path
        Made, if it is not there.
    answered
        Which line an answer is to; raises a `UsageError` where it is none.

    Raises
    ------
    UsageError
        If it cannot be written, is no regular file, or another process writes it.
    """

    def __init__(self, path: Path, answered: Callable[[dict[str, Any]], Answered]) -> None:
        self.path, self._answered = path, answered
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UsageError(
                f"cannot write '{path}': {error.strerror}. Give a path in an existing, writable folder."
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UsageError(f"cannot write '{path}': it is no regular file, so no job could go on there.")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process writes '{path}': wait for it, or give another file.") from None
            self._before = self._drop_half_a_line()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def answered(self) -> Iterator[Answered]:
        """Yield which lines were answered when the file was opened, as they stand there.

        Raises
        ------
        UsageError
            If a line is no answer.
        """
        with self.path.open("rb") as file:
            while file.tell() < self._before:
                at = file.tell()
                try:
                    yield self._answered(object_of(file.readline()))
                except (UsageError, LookupError, TypeError, ValueError):
                    raise UsageError(
                        f"{self.path}, byte {at:,}: no line that a job has written. Give another file, or remove this one."
                    ) from None

    def write(self, document: dict[str, Any]) -> None:
        """Append an answer.

        Raises
        ------
        OSError
            With the file's name, if the disk is full or fails.
        """
        left = json.dumps(document, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _drop_half_a_line(self) -> int:
        """Cut the file behind its last line break; return its size."""
        size = end = os.fstat(self._file).st_size
        while end:
            start = max(end - 65_536, 0)
            at = os.pread(self._file, end - start, start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
        return end


def unanswered(
    lines: Iterable[Line], answered: Iterator[Answered], digest: Callable[[bytes], str], names: tuple[Path, Path]
) -> Iterator[Line]:
    """Yield the lines that have no answer, reading both files once.

    No answer stands behind one to a line that is `MOST_AHEAD` or more lines further on, as a `Stream` lets no request run so far
    ahead. So no more answers than that are read ahead, and memory does not grow with the files.

    Parameters
    ----------
    names
        What errors call the files of requests and of answers.

    Raises
    ------
    UsageError
        If an answer is to another line, or by another job.
    """
    ahead, furthest, number = dict[int, str](), 0, 0
    for number, content in lines:
        while number not in ahead and furthest < number + MOST_AHEAD:
            found = next(answered, None)
            if found is None:
                break
            ahead[found.number], furthest = found.digest, max(furthest, found.number)
        before = ahead.pop(number, None)
        if before is None:
            yield Line(number, content)
        elif before != digest(content):
            raise UsageError(
                f"{names[1]} answers another line {number:,} than {names[0]} has, or by another model or other options: give "
                "another file, or remove this one."
            )
    beyond = [*ahead, *(found.number for found in answered)]
    if beyond:
        raise UsageError(
            f"{names[1]} answers line {min(beyond):,}, and {names[0]} has {number:,} lines: give another file, or remove this one."
        )
