"""The `mosaic` command's way in, under a name that is ours alone.

Other distributions install a top-level `mosaic` too (a PyTorch memory profiler
does), and whoever is installed last overwrites the others' files. This module
cannot be overwritten, so it can say so plainly.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

__all__ = ["main", "other_mosaics"]

DISTRIBUTION = "mosaic-dllm"


def main() -> None:
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
