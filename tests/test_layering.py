"""Who may know whom: the planner half never imports torch, and imports run downward only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "mosaic"
HEAVY = ("torch", "triton", "cuda", "numba", "ortools", "pulp", "matplotlib", "transformers")

# Each room and the rooms it may import; the command line may use all.
ALLOWED = {
    "registrar": {"registrar"},
    "models": {"registrar", "models"},
    "planner": {"registrar", "models", "planner", "devices", "files"},
    "viz": {"registrar", "planner", "models", "viz", "devices", "files"},
    "kernels": {"registrar", "kernels"},
    "runtime": {"registrar", "kernels", "runtime", "planner", "models", "devices", "files"},
    "calibration": {"registrar", "kernels", "runtime", "calibration", "devices", "files"},
    "decoding": {"registrar", "kernels", "runtime", "planner", "models", "decoding"},
    "bench": {"registrar", "kernels", "runtime", "planner", "models", "devices", "files", "decoding", "bench"},
}
COMMON = {"errors", "units", "version"}
# At call time, through the room above: a notebook's picture of an object, and `generate` of a compiled model.
UPWARD_ON_DEMAND = {("planner/plan.py", "viz"), ("registrar/graph.py", "viz"), ("runtime/compiled.py", "decoding")}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "registrar.graph",
        "registrar.program",
        "models",
        "planner",
        "planner.check",
        "planner.offsets",
        "viz",
        "devices",
        "cli",
        "bench",
    ],
)
def test_the_planner_half_imports_nothing_heavy(module: str) -> None:
    found = run(f"import sys, mosaic.{module}; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert found == "[]"


def test_planning_imports_nothing_heavy() -> None:
    code = (
        f"import sys, mosaic; mosaic.plan('llada-8b', tokens=4096); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_planning_with_compiled_templates_starts_without_sympy() -> None:
    """It takes longer to import than everything else together; templates are read from disk."""
    code = "import sys, mosaic.planner, mosaic.cli; print('sympy' in sys.modules)"
    assert run(code) == "False"


def test_importing_mosaic_imports_nothing_at_all() -> None:
    assert run("import sys, mosaic; print([m for m in sys.modules if m.startswith('mosaic.')])") == "['mosaic.version']"


def imports(file: Path) -> set[str]:
    """Rooms and modules of Mosaic that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("mosaic.")}
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_run_downward(room: str) -> None:
    for file in sorted((ROOT / room).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        extra = imports(file) - ALLOWED[room] - COMMON
        extra -= {target for source, target in UPWARD_ON_DEMAND if source == path}
        assert not extra, f"{path} imports {sorted(extra)}"
