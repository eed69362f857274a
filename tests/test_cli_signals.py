"""Ctrl-C and SIGTERM end the command with 130 and 143 wherever they strike, without a traceback and with the cursor shown."""

from __future__ import annotations

import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REAL = "import os, sys, mosaic_dllm; sys.argv = ['mosaic', *sys.argv[1:]]; os.write(1, b'@'); mosaic_dllm.main()"
STAND_IN = """
import signal, sys, threading, time, types
import mosaic_dllm
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
def struck():
    signal.raise_signal(signal.{signal})
class Deleted:
    def __del__(self):
        struck()
def command():
{body}
sys.modules["mosaic.cli"] = types.SimpleNamespace(main=command)
mosaic_dllm.GRACE_SECONDS = 0.2
{start}
mosaic_dllm.main()
print("done", flush=True)
{end}
"""
GENERATE = ("generate", "--prompt", "hello", "--gen-length", "256")


def ran(*body: str, number: int = signal.SIGINT, start: str = "", end: str = "") -> tuple[int, str, str]:
    """Run a command of these lines in the place of the command line: exit code, stdout, stderr."""
    lines = "\n".join(f"    {line}" for line in body or ("pass",))
    code = STAND_IN.format(signal=signal.Signals(number).name, body=lines, start=start, end=end)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_clears_up_and_ends_as_a_shell_says(number: int, code: int) -> None:
    assert ran("try:", "    struck()", "finally:", "    print('cleared', flush=True)", number=number) == (
        code,
        "cleared\n",
        "",
    )


@pytest.mark.parametrize(
    "body",
    {
        "within an import": (
            "import importlib.machinery as m",
            "m.SourceFileLoader.get_data = lambda *_: struck()",
            "import this",
        ),
        "taken for another error": (
            "try:",
            "    struck()",
            "except BaseException:",
            "    raise ValueError('half an import')",
        ),
        "taken for success": ("try:", "    struck()", "except BaseException:", "    pass"),
        "in a destructor": ("Deleted()", "time.sleep(50)"),
        "swallowed, while it goes on": (
            "try:",
            "    struck()",
            "except BaseException:",
            "    threading.Event().wait(50)",
        ),
        "twice": ("try:", "    struck()", "finally:", "    struck()", "    time.sleep(50)"),
    }.items(),
    ids=lambda item: item[0],
)
def test_no_way_to_lose_an_interrupt_goes_on_or_shows_a_traceback(body: tuple[str, tuple[str, ...]]) -> None:
    assert ran(*body[1]) == (130, "", "")


def test_a_signal_while_python_ends_and_one_that_is_ignored() -> None:
    assert ran(end="import atexit; atexit.register(struck)") == (130, "done\n", "")
    assert ran("struck()", start="signal.signal(signal.SIGINT, signal.SIG_IGN)") == (0, "done\n", "")


LIVE = """
import time
import mosaic.cli, mosaic_dllm
from mosaic.cli.live import LiveView, Record
from mosaic.cli.output import results
from mosaic.viz.canvas_picture import CanvasTracker
def command():
    with LiveView(results(), CanvasTracker(40, lambda ids: ["x" for _ in ids]), Record()):
        time.sleep(50)
mosaic.cli.main = command
mosaic_dllm.main()
"""


class Terminal:
    """A command in a terminal of its own, and what it has written there."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.pid, self._end = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(TERM="xterm-256color")
            os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
        self.written = b""

    def read(self, seconds: float, until: bytes = b"\0") -> None:
        """Read for so long, or until something comes, or the end."""
        ends = time.monotonic() + seconds
        while until not in self.written and (left := ends - time.monotonic()) > 0:
            if select.select([self._end], [], [], left)[0]:
                try:
                    part = os.read(self._end, 65536)
                except OSError:
                    return
                self.written += part

    def strike(self, number: int) -> tuple[int, bool]:
        """Send a signal; give the exit code, and whether the cursor is shown."""
        os.kill(self.pid, number)
        self.read(60)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._end)
        return code, self.written.rfind(b"\x1b[?25h") >= self.written.rfind(b"\x1b[?25l")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_live_view_gives_the_cursor_back(number: int, code: int) -> None:
    terminal = Terminal(LIVE)
    terminal.read(60, b"\x1b[?25l")
    assert b"\x1b[?25l" in terminal.written
    assert terminal.strike(number) == (code, True)
    assert b"Traceback" not in terminal.written


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_generate_ends_cleanly_whenever_it_is_struck(number: int) -> None:
    """From the first byte of `main` to its end: imports, compilation, planning, steps, the live view, Python's own end."""
    rng, codes = random.Random(number), set()
    for turn in range(40):
        terminal = Terminal(REAL, *GENERATE)
        terminal.read(60, b"@")
        if turn % 4 == 0:
            terminal.read(60, b"\x1b[?25l")
        terminal.read(rng.uniform(0, 4) if turn % 4 else rng.uniform(0, 0.5))
        code, shown = terminal.strike(number)
        done = b"tokens/s; planned peak" in terminal.written
        assert code == 128 + number or (done and code == 0), (turn, code, terminal.written[-2000:])
        assert shown and b"Traceback" not in terminal.written and b"ignored" not in terminal.written
        codes.add(code)
    assert 128 + number in codes
