"""Another distribution may install a top-level `mosaic` too (a PyTorch memory profiler does): name it."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

__all__ = ["other_mosaics", "warn_of_other_mosaics"]

OURS = "mosaic_dllm"


def other_mosaics(site: Path) -> list[str]:
    """Names of other distributions in a site directory that install a top-level `mosaic`."""
    found = []
    for info in sorted(site.glob("*.dist-info")):
        name = info.name.split("-")[0]
        if name.lower().replace("-", "_") != OURS and _installs_mosaic(info):
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


def warn_of_other_mosaics() -> None:
    """Say plainly on stderr that two distributions claim the import name."""
    for name in other_mosaics(Path(sysconfig.get_path("purelib"))):
        print(
            f"mosaic: warning: the distribution '{name}' also installs a top-level 'mosaic' and the two overwrite each "
            f"other; keep them in separate environments (pip uninstall {name}, then reinstall mosaic-dllm).",
            file=sys.stderr,
        )
