"""Atomic file writes: a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

from mosaic.errors import UsageError

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,6})")


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a whole file through a temporary neighbour and a rename.

    Parameters
    ----------
    path
        Where to write. A symbolic link is followed. A path that is no regular file (a pipe, a device) is written
        directly, and so is an open descriptor (`/dev/stdout`, `/dev/fd/3`), whatever its target.
    data
        The content; text is written as UTF-8 with `\\n` line ends.

    Raises
    ------
    UsageError
        If the folder does not exist or is not writable, or `path` is a folder.
    OSError
        With the file's name, if the disk is full or fails.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(f"{folder}/note.txt", "planned")
    ...     Path(f"{folder}/note.txt").read_text()
    'planned'
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        if (descriptor := _descriptor(path)) is not None:
            _write_through(descriptor, content)
        elif is_replaceable(path):
            _replace(Path(os.path.realpath(path)), content)
        else:
            Path(path).write_bytes(content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write '{os.fspath(path)}': {reason}. Give a path in an existing, writable folder."
        ) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def is_replaceable(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file or could become one; a pipe, a device or an open descriptor is neither."""
    target = Path(path)
    return _descriptor(path) is None and (target.is_file() or target.is_dir() or not target.exists())


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """The open descriptor that a path names."""
    name = os.fspath(path)
    match = _DESCRIPTOR.fullmatch(name)
    return int(match[1]) if match else _STREAMS.get(name)


def _write_through(descriptor: int, content: bytes) -> None:
    """Write at a descriptor's position, after earlier output: reopening a redirected file would begin at its start."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with os.fdopen(os.dup(descriptor), "wb") as copy:
        copy.write(content)


def _replace(target: Path, content: bytes) -> None:
    """Write a neighbouring file with the mode of a plain `open`, then rename it over the target."""
    neighbour = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(neighbour, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(neighbour, target)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
