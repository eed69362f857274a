"""The notebooks run as they stand, and carry their pictures as PNG."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = types.ModuleType("IPython.display")
    display.Image = lambda data: data  # type: ignore[attr-defined]
    ipython = types.ModuleType("IPython")
    ipython.version_info, ipython.get_ipython = (9, 0), lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    scope: dict[str, Any] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
    assert scope["plan"].optimal


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_png_and_text(path: Path) -> None:
    outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds == {"image/png", "text/plain"}
    assert not any(output["output_type"] == "error" for output in outputs)
