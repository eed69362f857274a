"""The examples run as printed, and the README shows the code that runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(example: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-W", "error", *options, str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=ROOT).stdout


def sync_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sync_readme", ROOT / "tools" / "sync_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_custom_model_is_planned_and_its_numbers_are_right() -> None:
    lines = run("custom_model.py").splitlines()
    assert re.fullmatch(r"fits: True, \d\.\d\d of 8 GiB; optimal: True", lines[0])
    assert re.fullmatch(r"rows per chunk: \{'ffn': (\d+|None), 'logits': (\d+|None)\}", lines[1])
    longest = re.fullmatch(r"longest context: ([\d,]+) tokens", lines[2])
    assert longest and int(longest[1].replace(",", "")) > 131_072
    hidden = 2 * 2048
    assert lines[3].startswith(
        f"bytes at layers.0/v: {5 * hidden + 4}*tokens"
    )  # hidden, normed, q, k, v, and positions
    assert f"bytes at layers.0/up: {hidden + 4 * 8192}*ffn_rows + {hidden + 4}*tokens" in lines[4]
    assert lines[5].startswith(f"bytes at logits: {hidden + 2 * 50304}*logits_rows + {hidden}*tokens")
    assert len(lines) == 6


@pytest.mark.soak
def test_the_canvas_is_drawn_half_way(tmp_path: Path) -> None:
    run("draw_canvas.py", arguments=(str(tmp_path / "canvas.svg"),))
    picture = (tmp_path / "canvas.svg").read_text(encoding="utf-8")
    text = " ".join(" ".join(re.findall(r">([^<]+)</text>", picture)).replace("&#160;", " ").split())
    assert "high, from 0.9" in text.replace("\xa0", " ") and "denoise" in text and "of 96" in text
    assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        "https://www.textualize.io", ""
    )


def test_the_custom_model_needs_no_torch() -> None:
    code = "import runpy, sys; runpy.run_path('examples/custom_model.py'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120, cwd=ROOT)


def test_the_readme_shows_the_custom_model() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "custom_model.py").read_text(encoding="utf-8")
    code = sync_readme().shown(example)
    assert sync_readme().synced(readme, code) == readme, "run: python tools/sync_readme.py"
    assert "[examples/custom_model.py](examples/custom_model.py)" in readme
    feed_forward, plan = code.split("\n\n\n")
    assert feed_forward in example and feed_forward.startswith("def feed_forward(g: Graph, x: Buffer)")
    assert plan in example and plan.startswith("plan = mosaic.plan_graph(") and plan.endswith(")")
    section = readme.split("<!-- custom-model:begin -->")[1].split("<!-- custom-model:end -->")[0]
    assert section == f"\n\n```python\n{code.strip()}\n```\n\n"


def test_the_custom_operator_is_verified() -> None:
    assert run("custom_operator.py") == "verified on cpu\n"
    assert "[examples/custom_operator.py](examples/custom_operator.py)" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    "readme", ["", "<!-- custom-model:begin -->", "<!-- custom-model:end --><!-- custom-model:begin -->"]
)
def test_a_readme_without_the_markers_is_refused(readme: str) -> None:
    with pytest.raises(ValueError, match="each once and in this order"):
        sync_readme().synced(readme, "code")


def test_syncing_twice_changes_nothing() -> None:
    tool, readme = sync_readme(), "a\n<!-- custom-model:begin -->old<!-- custom-model:end -->\nz\n"
    once = tool.synced(readme, "code\n")
    assert once == "a\n<!-- custom-model:begin -->\n\n```python\ncode\n```\n\n<!-- custom-model:end -->\nz\n"
    assert tool.synced(once, "code\n") == once
