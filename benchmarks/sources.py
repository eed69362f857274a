"""The source files of figures, by git's blob ids: the files that processes loaded, and whether a commit holds them.

Commits are rewritten when work lands, blobs are not. A blob's id needs no git, so a machine without the history computes it, too.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

__all__ = [
    "FROM_ROOT",
    "ROOT",
    "also",
    "changed",
    "commit_of",
    "differing",
    "from_root",
    "holding",
    "loaded",
    "loaded_by",
    "of_checkout",
    "of_run",
    "tree",
    "uncommitted",
]

ROOT: Final = Path(__file__).resolve().parent.parent
FROM_ROOT: Final = ("mosaic", "benchmarks", "tests", "examples")
"""Folders whose files a process may have loaded."""
_REPORTING: Final = (
    "mosaic/cli/",
    "mosaic/viz/",
    "benchmarks/figures.py",
    "benchmarks/quality/__main__.py",
    "benchmarks/quality/plot.py",
    "benchmarks/record.py",
    "benchmarks/report.py",
    "benchmarks/sources.py",
)
"""Code for command lines, pictures and records: no figure depends on it, unless a whole process is measured."""
_DATA: Final = {"mosaic/devices.py": "mosaic/profiles/*.toml"}
"""Files that a module reads when it is loaded."""
_DIGITS: Final = 12
_elsewhere: set[Path] = set()


def blob_id(content: bytes) -> str:
    """Name a file's content as git does, by its first digits."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()[:_DIGITS]


def loaded(*, whole: bool = False) -> list[str]:
    """Return the repository's files that this process has loaded so far, from the root; of a whole process what reports, too."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {path for file in files if file and (path := from_root(Path(file)))}
    return sorted(path for path in found if whole or not path.startswith(_REPORTING))


def from_root(file: Path) -> str | None:
    """Return a file's path from the root, or None if it is not the repository's."""
    file = file.resolve()
    if not file.is_relative_to(ROOT) or not file.is_file():
        return None
    path = file.relative_to(ROOT)
    return path.as_posix() if path.parts[0] in FROM_ROOT else None


def also(files: Iterable[str | Path]) -> None:
    """Count files among those of this run: data that it read, and files that another process loaded for it."""
    for file in files:
        if from_root(ROOT / file) is None:
            raise SystemExit(f"{file} is no file of {ROOT}: what is measured is named by its blob there.")
        _elsewhere.add(ROOT / file)


def loaded_by(*arguments: str) -> list[str]:
    """Return the files of a process that is measured as a whole: run `python -m ARGUMENTS` once more and ask it.

    >>> "mosaic/units.py" in loaded_by("mosaic", "plan", "--model", "llada-8b", "--ctx", "1k")
    True
    """
    ask = (
        "import atexit, runpy, sys; from benchmarks.sources import loaded\n"
        "atexit.register(lambda: print(*loaded(whole=True), sep='\\n', file=sys.stderr))\n"
        "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", ask, *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line for line in ran.stderr.splitlines() if line.split("/")[0] in FROM_ROOT]
    return [path for path in found if not path.startswith("benchmarks/")]


def of_run() -> dict[str, str]:
    """Return the blobs that this run measures, by path: the loaded, read and counted files."""
    mine = {*loaded(), *filter(None, map(from_root, _elsewhere))}
    mine |= {path.relative_to(ROOT).as_posix() for by in mine & {*_DATA} for path in ROOT.glob(_DATA[by])}
    return {path: blob_id((ROOT / path).read_bytes()) for path in sorted(mine)}


def of_checkout(files: Iterable[str], checkout: Path) -> dict[str, str]:
    """Return the blobs of the files that a process of another checkout loaded."""
    mine = {Path(file).resolve() for file in files}
    found = {file.relative_to(checkout).as_posix(): file for file in mine if file.is_relative_to(checkout / "mosaic")}
    return {path: blob_id(file.read_bytes()) for path, file in sorted(found.items())}


def changed(sources: Mapping[str, str]) -> list[str]:
    """Return the files that are gone or changed."""
    now = {path: ROOT / path for path in sources}
    return [path for path, file in now.items() if not file.is_file() or blob_id(file.read_bytes()) != sources[path]]


# --- git ----------------------------------------------------------------------------------------------------------------


def commit_of(name: str = "HEAD") -> str | None:
    """Return a commit's short id; None without a history."""
    return _git("rev-parse", "--short", "--verify", f"{name}^{{commit}}") if (ROOT / ".git").exists() else None


def tree(commit: str) -> dict[str, str]:
    """Return the blobs of a commit, by path."""
    entries = (line.split("\t") for line in (_git("ls-tree", "-r", commit) or "").splitlines())
    return {path: entry.split()[2][:_DIGITS] for entry, path in entries}


def holding(sources: Mapping[str, str]) -> str | None:
    """Return the last commit before this one that holds all of the sources; None if there is none."""
    commits = (_git("rev-list", "--abbrev-commit", "HEAD") or "").split()
    return next((commit for commit in commits if not differing(sources, commit)), None)


def differing(sources: Mapping[str, str], commit: str) -> list[str]:
    """Return the files of which a commit holds another version, or none."""
    held = tree(commit)
    return [path for path, blob in sources.items() if held.get(path) != blob]


def uncommitted() -> list[str]:
    """Return the files that a benchmark may measure and that differ from the commit; none without a history."""
    if commit_of() is None:
        return []
    listed = (
        _git("status", "--porcelain", "--no-renames", "--untracked-files=all", "--", *FROM_ROOT[:2]) or ""
    ).splitlines()
    paths = [line[3:] for line in listed]
    return [path for path in paths if not path.startswith((*_REPORTING, "benchmarks/results/"))]


def _git(*arguments: str) -> str | None:
    try:
        ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return ran.stdout.rstrip() if ran.returncode == 0 else None
