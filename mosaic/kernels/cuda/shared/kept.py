"""Compiled kernels on disk: found by content, checked before they are loaded, bounded in size.

Triton finds a kernel by a hash of its source, constants, types, target and compiler, and leaves reading and writing to a cache
manager. This one names each file by the SHA-256 of its content and compares them whenever it is read: a damaged or
truncated file is removed, and its kernel compiled again. Files come by a rename, and go under a lock, so several processes may
use one folder at once. Names are relative: a folder may be copied into an image.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, Final
from weakref import finalize

from mosaic.errors import UsageError
from mosaic.kernels.cuda.shared.launching import triton
from mosaic.units import GIB

__all__ = ["KernelFolder", "NotKept", "kernel_folder"]

VARIABLE: Final = "MOSAIC_KERNELS"
"""Environment variable that names the folder."""
MOST_BYTES: Final = 1 * GIB
"""The most that a folder keeps: some ten thousand kernels."""
GRACE_S: Final = 60.0
"""What was used so short a time ago stays: a process may be reading it."""
GROUP: Final = "__grp__"
CAN_KEEP: Final = hasattr(triton, "knobs")
"""Whether Triton lets a cache manager be named: it does from 3.4 on."""
PACKAGE: Final = "mosaic.kernels.cuda."
_DIGITS: Final = 64
_IN_FORCE: Final = RLock()
_SETTLED: Final = set[str]()
_log = logging.getLogger(__name__)


class NotKept(Exception):
    """What was asked for is not in the folder, and is not to be compiled."""


@cache
def kernel_folder() -> KernelFolder:
    """Return the folder of this user: that which `MOSAIC_KERNELS` names, or one in the user's cache."""
    cached = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return KernelFolder(Path(os.environ.get(VARIABLE) or Path(cached, "mosaic-dllm", "kernels")).expanduser())


class KernelFolder:
    """A folder of compiled kernels.

    Parameters
    ----------
    path
        The folder, which is made when something is written.
    most_bytes
        What all files take at most. Entries that were used least recently go when one is added.

    Attributes
    ----------
    compiled
        How many kernels this process has compiled and added.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path, self.most_bytes, self.compiled = path, most_bytes, 0
        self._own: Path | None = None

    @contextmanager
    def in_force(self, *, compiling: bool = True) -> Iterator[None]:
        """Let Triton read and write kernels here until the block is left; other threads wait to do so.

        Parameters
        ----------
        compiling
            Compile what is not here. If not, `NotKept` is raised.
        """
        if not CAN_KEEP:
            yield
            return
        knobs = triton.knobs

        def entry(key: str, override: bool = False, dump: bool = False) -> Any:
            if override or dump:
                return triton.runtime.cache.FileCacheManager(key, override, dump)
            return _Entry(self, key, compiling)

        with _IN_FORCE, knobs.cache.scope(), knobs.compilation.scope():
            _settle_keys()
            knobs.cache.manager_class, knobs.compilation.store_binary_only = entry, True
            yield

    def require_writable(self) -> None:
        """Make the folder, and write into it.

        Raises
        ------
        UsageError
            If that cannot be done, or the installed Triton has no way to keep kernels elsewhere than in its own cache.
        """
        if not CAN_KEEP:
            raise UsageError(
                f"Triton {triton.__version__} keeps kernels in its own cache alone: install Triton 3.4 or later."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise UsageError(
                f"cannot keep kernels in '{self.path}': {error.strerror}. Name a writable folder in {VARIABLE}."
            ) from None

    def num_bytes(self) -> int:
        """Return what all files take."""
        return sum(size for _, size, _ in self._entries())

    def spare(self) -> None:
        """Let entries go, least recently used first, until no more than `most_bytes` are kept; one of the last minute stays."""
        with self._locked(fcntl.LOCK_EX):
            entries = sorted(self._entries())
            taken, now = sum(size for _, size, _ in entries), time.time()
            for used, size, name in entries:
                if taken <= self.most_bytes or used > now - GRACE_S:
                    return
                shutil.rmtree(self.path / name, ignore_errors=True)
                taken -= size

    def _entries(self) -> list[tuple[float, int, str]]:
        """When each entry was used last, its bytes, and its name."""
        found = []
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(OSError):  # another process may let it go
                    sizes = [file.stat().st_size for file in os.scandir(entry.path)]
                    found.append((entry.stat().st_mtime, sum(sizes), entry.name))
        return found

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold the folder shared, to use its entries, or alone, to let some go."""
        try:
            held = os.open(self.path, os.O_RDONLY)
        except OSError:  # there is none yet
            yield
            return
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(held, how)
            yield
        finally:
            os.close(held)

    def used(self, name: str) -> None:
        """Note that an entry is used."""
        with suppress(OSError):  # of an image that cannot be written
            os.utime(self.path / name)

    def shared(self) -> Any:
        """Hold the folder, so that no entry goes, until the block is left."""
        return self._locked(fcntl.LOCK_SH)

    def write(self, entry: str, name: str, content: bytes) -> Path:
        """Add a file; where the folder cannot be written, to a folder of this process alone."""
        self.path.mkdir(parents=True, exist_ok=True)
        place = self.path / entry
        with self.shared():
            place.mkdir(exist_ok=True)
            part = place / f".{secrets.token_hex(8)}"
            try:
                part.write_bytes(content)
                part.replace(place / name)
            finally:
                part.unlink(missing_ok=True)
        return place / name

    def write_apart(self, name: str, content: bytes, why: OSError) -> Path:
        """Write a file for this process alone."""
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="mosaic-kernels-"))
            finalize(self, shutil.rmtree, self._own, ignore_errors=True)
            _log.warning(
                "kernels are compiled for this process alone: cannot write to '%s': %s", self.path, why.strerror
            )
        path = self._own / name
        path.write_bytes(content)
        return path


def _settle_keys() -> None:
    """Let Triton hash the functions of all modules that are loaded, each after those that it calls.

    Its hash of a function (3.6) has the constants of a called one only if that was hashed before: so what is compiled first in a
    process would decide which files are found.
    """
    loaded = [name for name in [*sys.modules] if name.startswith(PACKAGE) and name not in _SETTLED]
    for name in loaded:
        for value in [*vars(sys.modules[name]).values()]:
            if isinstance(value, triton.runtime.jit.JITCallable):
                _settle(value)
    _SETTLED.update(loaded)


def _settle(function: Any) -> None:
    called = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
    for other in called:
        if isinstance(other, triton.runtime.jit.JITCallable) and other.hash is None:
            _settle(other)
    hash(function)


class _Entry:
    """What Triton keeps under one key; it stands in for Triton's `FileCacheManager`."""

    def __init__(self, folder: KernelFolder, key: str, compiling: bool) -> None:
        self._folder, self._key, self._compiling = folder, key, compiling

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file that is as it was written, or None."""
        with self._folder.shared():
            found = next(self._sound(filename), None)
            if found is not None:
                self._folder.used(self._key)
                return str(found)
        if not self._compiling:
            raise NotKept(filename)
        return None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files that were written together, by name, or None if one is not as it was written."""
        with self._folder.shared():
            for listed in self._sound(GROUP + filename):
                names: Mapping[str, str] = json.loads(listed.read_text())
                if all(self._is_sound(listed.with_name(name)) for name in names.values()):
                    self._folder.used(self._key)
                    return {name: str(listed.with_name(named)) for name, named in names.items()}
        if not self._compiling:
            raise NotKept(filename)
        return None

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write a file, and return its path."""
        content = data if isinstance(data, bytes) else str(data).encode()
        if filename.endswith(".source"):
            content = b""  # what a kernel was compiled from is for people who debug Triton
        name = f"{hashlib.sha256(content).hexdigest()}.{filename}"
        try:
            return str(self._folder.write(self._key, name, content))
        except OSError as error:
            return str(self._folder.write_apart(name, content, error))

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        """Note which files were written together."""
        self._folder.compiled += 1
        written = self.put(json.dumps({name: Path(path).name for name, path in group.items()}), GROUP + filename)
        self._folder.spare()
        return written

    def _sound(self, filename: str) -> Iterator[Path]:
        """Files of this name that are as they were written."""
        place = self._folder.path / self._key
        try:
            names = sorted(os.listdir(place))
        except OSError:
            return
        yield from (place / name for name in names if name[_DIGITS + 1 :] == filename and self._is_sound(place / name))

    def _is_sound(self, path: Path) -> bool:
        """Whether a file's content is what its name says; it is removed if not."""
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() == path.name[:_DIGITS]:
                return True
            _log.warning("a kept kernel was damaged and is compiled again: %s", path)
            path.unlink()
        except OSError:
            pass
        return False
