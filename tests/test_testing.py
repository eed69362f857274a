"""The test commands' promises: no file exceeds its budget, and a test that needs the card alone has it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import card
from budgets import BUDGETS_S, CEILING_S, budget_s

TESTS = Path(__file__).parent
BURNS = """
import time

def test_that_takes_long():
    before = time.process_time()
    while time.process_time() < before + 0.3:
        pass
"""


def test_all_budgets_together_are_within_the_ceiling() -> None:
    files = {file.stem for file in TESTS.glob("test_*.py")}
    assert BUDGETS_S.keys() <= files
    assert sum(map(budget_s, files)) <= CEILING_S


def test_a_file_beyond_its_budget_fails_the_run_whichever_worker_ran_it(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(BURNS)
    (tmp_path / "conftest.py").write_text(
        "import budgets\nbudgets.USUAL_S, budgets.COLD_S = 0.05, 0.0\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(budgets.Spending())\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-p", "no:cacheprovider", str(tmp_path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert ran.returncode == 1 and "1 passed" in ran.stdout
    assert "tests/test_long.py took 0." in ran.stdout


def test_the_card_is_shared_until_one_asks_for_it_alone(tmp_path: Path) -> None:
    lock, order = tmp_path / "card", list[str]()

    def alone() -> None:
        with card.held(lock, alone=True):
            order.append("alone")

    def later() -> None:
        with card.held(lock, alone=False):
            order.append("later")

    waiting = [threading.Thread(target=alone), threading.Thread(target=later)]
    with card.held(lock, alone=False), card.held(lock, alone=False):
        for thread in waiting:
            thread.start()
            thread.join(0.1)
        assert order == []
    for thread in waiting:
        thread.join()
    assert order == ["alone", "later"]
