"""Writing files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from mosaic.errors import UsageError

__all__ = ["write_atomic"]


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a whole file through a temporary neighbour and a rename.

    Parameters
    ----------
    path
        Where to write. A symbolic link is followed; what is no regular file (a pipe, `/dev/stdout`) is written
        directly.
    data
        The content; text is written as UTF-8 with `\\n` line ends.

    Raises
    ------
    UsageError
        If the folder does not exist, may not be written to, or `path` is a folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(f"{folder}/note.txt", "planned")
    ...     Path(f"{folder}/note.txt").read_text()
    'planned'
    """
    content = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(content)
        else:
            _replace(target, content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write '{os.fspath(path)}': {reason}. Give a path in an existing, writable folder."
        ) from error


def _replace(target: Path, content: bytes) -> None:
    """Write a neighbour with the mode a plain `open` would give, then rename it over the target."""
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
