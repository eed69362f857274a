"""The `mosaic` command's way in, under a name that is ours alone.

Other distributions install a top-level `mosaic` too (a PyTorch memory profiler
does), and whoever is installed last overwrites the others' files. This module
cannot be overwritten, so it can say so plainly.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["main", "other_mosaics"]

DISTRIBUTION = "mosaic-dllm"
GRACE_SECONDS = 5.0
"""How long an interrupted command may take to clear up."""

COLLECTED_AFTER = 100_000
"""Objects until the collector looks: what is imported and planned stays, and looking through it took a tenth of a plan's time."""

_struck: list[int] = []


def main() -> None:
    """Run the command line, so that Ctrl-C and SIGTERM end it with 130 and 143 at any time, and never with a traceback."""
    gc.set_threshold(COLLECTED_AFTER)
    _hear(_strike)
    atexit.register(_hear, signal.SIG_IGN)  # the last of them: all is done then
    sys.unraisablehook = _ignored
    try:
        _run()
    finally:
        if _struck:
            _leave(_struck[0])
        _hear(lambda number, frame: _leave(number))  # while Python itself clears up
        gc.freeze()  # which need not look through all that was planned


def _hear(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Take what asks for the end, unless whoever started us wants it ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _strike(number: int, frame: FrameType | None) -> None:
    """Interrupt the command, which clears up; at once where that has begun, or within an import, which may not be left halfway."""
    if _struck or _is_importing(frame):
        _leave(number)
    _struck.append(number)
    deadline = threading.Timer(GRACE_SECONDS, _leave, [number])
    deadline.daemon = True
    deadline.start()
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _ignored(unraisable: sys.UnraisableHookArgs) -> None:
    """End where Python could only report an interrupt: in a destructor, or while it ends by itself."""
    if _struck and issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave(_struck[0])
    sys.__unraisablehook__(unraisable)


def _leave(number: int) -> NoReturn:
    """End the process as a shell reports a signal, with the terminal's cursor shown."""
    for descriptor in (1, 2):
        if os.isatty(descriptor) and os.environ.get("TERM") != "dumb":
            os.write(descriptor, b"\x1b[?25h")
    os._exit(128 + number)


def _run() -> None:
    """Name other owners of the import name, then run the command line."""
    others = other_mosaics(Path(sysconfig.get_path("purelib")))
    try:
        import mosaic

        ours = getattr(mosaic, "__distribution__", None) == DISTRIBUTION
    except ImportError:
        ours = False
    if others or not ours:
        names = " and ".join(f"'{name}'" for name in others) or "another distribution"
        fix = f"pip uninstall {' '.join(others)}" if others else "uninstall it"
        print(
            f"mosaic: {names} also installs a top-level 'mosaic', and the two overwrite each other; keep them in separate "
            f"environments ({fix}, then pip install --force-reinstall {DISTRIBUTION}).",
            file=sys.stderr,
        )
    if not ours:
        raise SystemExit(1)
    from mosaic.cli import main as run

    run()


def other_mosaics(site: Path) -> list[str]:
    """Names of other distributions in a site directory that install a top-level `mosaic`."""
    found = []
    for info in sorted(site.glob("*.dist-info")):
        name = info.name.split("-")[0]
        if name.lower().replace("_", "-") != DISTRIBUTION and _installs_mosaic(info):
            found.append(name)
    return found


def _installs_mosaic(info: Path) -> bool:
    top_level = info / "top_level.txt"
    try:
        if top_level.exists():
            return "mosaic" in top_level.read_text(encoding="utf-8").split()
        record = (info / "RECORD").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return record.startswith("mosaic/") or "\nmosaic/" in record
