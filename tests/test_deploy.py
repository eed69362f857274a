"""The container and the service under `deploy/`: options that the command has, time to drain, and what their linters say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mosaic.cli import app
from mosaic.serving import Limits

DEPLOY = Path(__file__).parent.parent / "deploy"
PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
HADOLINT, SYSTEMD = shutil.which("hadolint", path=PATHS), shutil.which("systemd-analyze", path=PATHS)


@pytest.mark.parametrize("name", ["Dockerfile", "mosaic.service"])
def test_options_are_those_of_the_command(name: str) -> None:
    text = (DEPLOY / name).read_text()
    (command,) = re.findall(r"^(?:ENTRYPOINT|ExecStart=).*serve.*$", text, re.MULTILINE)
    given = re.findall(r"--[a-z-]+", command)
    shown = CliRunner().invoke(app, ["serve", "--help"], terminal_width=200).output
    assert len(given) >= 2 and all(re.search(rf"{option}\b", shown) for option in given)


def test_the_service_is_given_the_time_to_drain() -> None:
    found = dict(line.split("=", 1) for line in (DEPLOY / "mosaic.service").read_text().splitlines() if "=" in line)
    drain_s = float(re.findall(r"--drain-timeout (\d+)", found["ExecStart"])[0])
    assert drain_s == Limits().drain_s and int(found["TimeoutStopSec"]) >= drain_s + 15


@pytest.mark.soak
@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    ran = subprocess.run([str(HADOLINT), DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


@pytest.mark.soak
@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_service_and_finds_it_confined(tmp_path: Path) -> None:
    unit = tmp_path / "mosaic.service"
    unit.write_text((DEPLOY / "mosaic.service").read_text().replace("/opt/mosaic/bin/mosaic", "/bin/true"))
    for more in (["verify"], ["security", "--offline=yes", "--threshold=30"]):
        ran = subprocess.run([str(SYSTEMD), *more, unit], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
