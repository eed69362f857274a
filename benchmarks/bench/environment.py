"""Where a figure comes from: machine, card, versions, commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

__all__ = ["commit_of", "environment"]

PACKAGES: Final = ("mosaic-dllm", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "cuda-bindings")
ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING")
"""Variables that change what the PyTorch engines take or how fast they are."""


def environment(command: str, packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Describe this machine and process; what is not installed or not known is left out or null."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
        "variables": {name: os.environ[name] for name in ALLOCATOR if name in os.environ},
        "commit": commit_of(Path(__file__).resolve().parents[2]),
        "command": command,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_of(tree: Path) -> str | None:
    """Name the commit of a working tree, with a plus sign where `mosaic/` differs from it; None where none is known."""
    if not (tree / ".git").exists():
        return None
    try:
        commit = _git(tree, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(tree, "status", "--porcelain", "mosaic") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
