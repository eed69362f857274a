"""Kernels on disk: found by content, checked, bounded, and shared by processes; compiled ahead for a card that is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

if not (torch.cuda.is_available() or "triton" in sys.modules):
    import triton_interpreter  # noqa: F401 - others of this process interpret: before anything loads triton
from triton.runtime.cache import get_cache_manager

import mosaic
from mosaic import cli
from mosaic.errors import UsageError
from mosaic.kernels.card import Card
from mosaic.kernels.cuda.shared.kept import KernelFolder, NotKept, kernel_folder
from mosaic.planner.planner import SizedStep
from mosaic.runtime.engine import Engine
from mosaic.runtime.opening import device_ahead

TESTS = Path(__file__).parent


def key_of(number: int) -> str:
    return f"{number:064x}"


def kept(folder: KernelFolder, number: int, files: Mapping[str, bytes]) -> dict[str, str]:
    """Keep a kernel's files as Triton does."""
    with folder.in_force():
        manager = get_cache_manager(key_of(number))
        group = {name: manager.put(content, name) for name, content in files.items()}
        manager.put_group("kernel.json", group)
    return group


def found(folder: KernelFolder, number: int) -> dict[str, bytes] | None:
    """The contents of a kernel's files, as Triton finds them."""
    with folder.in_force():
        group = get_cache_manager(key_of(number)).get_group("kernel.json")
    return None if group is None else {name: Path(path).read_bytes() for name, path in group.items()}


def files_of(number: int, size: int = 1000) -> dict[str, bytes]:
    return {"kernel.cubin": os.urandom(size), "kernel.json": json.dumps({"number": number}).encode()}


def old(folder: KernelFolder, *, seconds: float) -> None:
    """As if so much time had passed."""
    for place in folder.path.iterdir():
        used = place.stat().st_mtime - seconds
        os.utime(place, (used, used))


def test_what_was_kept_is_found_by_another_process_and_in_a_copy_of_the_folder(tmp_path: Path) -> None:
    first, files = KernelFolder(tmp_path / "first"), files_of(1)
    kept(first, 1, files)
    assert found(KernelFolder(first.path), 1) == files and found(first, 2) is None
    (tmp_path / "first").rename(tmp_path / "second")
    assert found(KernelFolder(tmp_path / "second"), 1) == files


def test_triton_is_asked_of_another_folder_only_inside_the_block(tmp_path: Path) -> None:
    import triton

    before = triton.knobs.cache.manager_class, triton.knobs.compilation.store_binary_only, dict(os.environ)
    with pytest.raises(KeyError), KernelFolder(tmp_path).in_force():
        assert triton.knobs.compilation.store_binary_only
        raise KeyError
    assert before == (triton.knobs.cache.manager_class, triton.knobs.compilation.store_binary_only, dict(os.environ))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "gone"])
@pytest.mark.parametrize("of", ["kernel.cubin", "kernel.json", "__grp__kernel.json"])
def test_what_is_damaged_is_never_read_and_comes_anew(tmp_path: Path, of: str, damage: str) -> None:
    folder, files = KernelFolder(tmp_path), files_of(1)
    kept(folder, 1, files)
    (path,) = tmp_path.glob(f"*/*.{of}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    damaged = {"flip": bytes(content), "truncate": path.read_bytes()[:-1], "empty": b""}
    path.unlink()
    if damage != "gone":
        path.write_bytes(damaged[damage])
    assert found(folder, 1) is None
    with pytest.raises(NotKept), folder.in_force(compiling=False):
        get_cache_manager(key_of(1)).get_group("kernel.json")
    kept(folder, 1, files)
    assert found(folder, 1) == files


def test_a_file_alone_is_checked_too(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    with folder.in_force():
        manager = get_cache_manager(key_of(3))
        path = manager.put(b"a library", "launcher.so")
        os.utime(Path(path).parent, (1, 1))
        assert manager.get_file("launcher.so") == path and Path(path).read_bytes() == b"a library"
        assert Path(path).parent.stat().st_mtime > 1  # it is used
        Path(path).write_bytes(b"A library")
        assert manager.get_file("launcher.so") is None
    with pytest.raises(NotKept), folder.in_force(compiling=False):
        get_cache_manager(key_of(3)).get_file("launcher.so")


def test_what_was_used_least_recently_goes_when_there_is_too_much(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path, most_bytes=5000)
    for number in range(4):
        kept(folder, number, files_of(number))
        old(folder, seconds=100)
    assert found(folder, 0) is not None  # it was used again
    kept(folder, 4, files_of(4))
    assert [found(folder, number) is not None for number in range(5)] == [True, False, True, True, True]
    assert folder.num_bytes() <= 5000
    kept(folder, 5, files_of(5, size=9000))  # all others may be in use by now: none of a minute ago goes
    assert [found(folder, number) is not None for number in range(6)] == [True, False, True, True, True, True]


def test_a_folder_that_cannot_be_written_is_said_in_a_line_and_kernels_go_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder, files = KernelFolder(tmp_path / "file" / "kernels"), files_of(1)
    with pytest.raises(UsageError, match=r"^cannot keep kernels in '.*': Not a directory\. Name .* MOSAIC_KERNELS\.$"):
        folder.require_writable()
    group = kept(folder, 1, files)
    assert {name: Path(path).read_bytes() for name, path in group.items()} == files
    kept(folder, 2, files_of(2))
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("kernels are compiled for this process alone: cannot write to") and found(folder, 1) is None


BUSY = """
import os, random, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_kernels_kept import KernelFolder, found, kept
rng, folder = random.Random({seed}), KernelFolder(Path({path!r}), most_bytes=20_000)
reads = 0
for turn in range(300):
    number = rng.randrange(12)
    files = {{"kernel.cubin": bytes([number]) * 3000, "kernel.json": str(number).encode()}}
    there = found(folder, number)
    reads += there is not None
    assert there in (None, files), there
    if there is None:
        kept(folder, number, files)
    if rng.random() < 0.1:
        for place in list(folder.path.iterdir()):
            try: os.utime(place, (1, 1))
            except FileNotFoundError: pass
print(reads)
"""


@pytest.mark.soak
def test_processes_share_a_folder_that_is_too_small(tmp_path: Path) -> None:
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY.format(tests=str(TESTS), seed=seed, path=str(tmp_path))], stdout=subprocess.PIPE, text=True,
            cwd=TESTS.parent,
        )
        for seed in range(4)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in busy]
    assert [process.returncode for process in busy] == [0] * 4 and min(map(int, said)) > 20


# --- compiled, in processes of their own ------------------------------------------------------------------------------


def begin(folder: Path, *command: str) -> subprocess.Popen[str]:
    """Begin a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(TESTS.parent), "MOSAIC_KERNELS": str(folder)}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen[str]) -> Any:
    """The JSON that a process prints."""
    said, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(said)


def alone(folder: Path, *arguments: str) -> Any:
    return printed(begin(folder, "tests/warm_alone.py", *arguments))


def test_a_kernel_is_compiled_once_found_as_a_launch_finds_it_and_compiled_again_when_damaged(tmp_path: Path) -> None:
    made = alone(tmp_path, "few")
    assert made["asked"] == ["silu_mul_kernel"] and made["others"] >= 5
    assert made["runs"] == [[0, 1, []], [1, 0, []], [0, 1, []], [0, 1, []]]  # found, compiled, failed
    assert not made["bare"] and made["lacks"] and len(made["said"]) == 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_steps_of_random_requests_ask_for_nothing_else_than_what_a_warm_session_has(
    tmp_path: Path, family: str, seed: int
) -> None:
    made = alone(tmp_path, "covered", family, str(seed))
    assert made["bare"] == [] and made["sizes"] > 3 and made["needed"] > 20


@pytest.mark.soak
@pytest.mark.parametrize("device", ["rtx-3090", "h100", "sm_100", "sm_120"])
def test_two_commands_at_once_fill_a_folder_and_every_launch_finds_its_kernel(tmp_path: Path, device: str) -> None:
    profile = tmp_path / f"{device}.toml"
    profile.write_text(f'name = "new"\ncapability = {device[3:]}\n')  # no profile of these ships
    limits = (
        "--device",
        str(profile) if device.startswith("sm_") else device,
        "--max-requests",
        "2",
        "--ctx",
        "256",
        "--json",
    )
    command = ("-m", "mosaic", "warm", "small-sdar", *limits)
    both = [begin(tmp_path, *command) for _ in range(2)]
    made = [printed(process)["kernels"] for process in both]
    assert min(one["found"] + one["compiled"] for one in made) > 20 and not any(one["failed"] for one in made)
    again = printed(begin(tmp_path, *command))
    assert again["kernels"]["compiled"] == 0 and again["kernels"]["failed"] == []
    if device == "h100":
        whole = alone(tmp_path, "whole", "small-sdar", "2", "256")
        assert whole["bare"] == [] and whole["plans"] == again["steps"]


def test_compile_compiles_kernels_before_it_loads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card; on a CPU there are none."""
    profile, card = device_ahead("h100")
    taken: list[int] = []

    def take(engine: Engine, steps: Iterable[SizedStep], progress: Any) -> None:
        assert engine.ahead == card and not engine.weights.views
        taken.extend(engine.plans.plan(step).document["capability"] for step in steps)

    def engine_of(*given: Any, ahead: Card | None = None, **more: Any) -> Engine:
        if ahead is None:
            raise InterruptedError("weights are loaded now")
        return Engine(*given, ahead=ahead, **more)

    monkeypatch.setattr("mosaic.runtime.compile.usable_device", lambda device: profile)
    monkeypatch.setattr("mosaic.runtime.compile.current_card", lambda: card)
    monkeypatch.setattr("mosaic.runtime.compile.Engine", engine_of)
    monkeypatch.setattr("mosaic.runtime.launches.compile_ahead", take)
    with pytest.raises(InterruptedError):
        mosaic.compile("small-sdar", device="h100", warm={"requests": 2, "tokens": 256})
    assert len(taken) > 10 and {*taken} == {90}
    monkeypatch.undo()
    with mosaic.compile("small-sdar", dtype="float32", warm={"requests": 2}) as model:
        assert not model.executors


@pytest.mark.parametrize(("warm", "message"), [
    (True, "warm: expected parameters of Session.warm by name, such as {'requests': 64}, got True."),
    ({"requests": 0}, "requests: expected a number from 1 to 1,024, got 0."),
])  # fmt: skip
def test_what_compile_cannot_warm_is_refused(warm: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, card = device_ahead("h100")
    monkeypatch.setattr("mosaic.runtime.compile.usable_device", lambda device: profile)
    monkeypatch.setattr("mosaic.runtime.compile.current_card", lambda: card)
    with pytest.raises(UsageError, match=re.escape(message)):
        mosaic.compile("small-sdar", device="h100", warm=warm)


@pytest.mark.soak
def test_an_interrupted_command_leaves_no_process(tmp_path: Path) -> None:
    process = begin(
        tmp_path, "-m", "mosaic", "warm", "small-sdar", "--device", "h100", "--max-requests", "2", "--ctx", "256"
    )
    assert process.stderr is not None
    while "kernel 1 of" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    process.communicate()
    left = [place for place in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in place.read_text()]
    assert left == []


@pytest.mark.parametrize(("device", "message"), [
    ("cpu", "the device 'cpu' is no CUDA card: it has no kernels to compile."),
    ("old.toml", "the profile 'old' has capability 75, kernels are compiled for 80 (Ampere) and later: write "),
    ("h100", "cannot keep kernels in '"),
])  # fmt: skip
def test_the_command_says_in_a_line_what_it_cannot_do(
    device: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.toml").write_text('name = "old"\ncapability = 75\n')
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOSAIC_KERNELS", "file/kernels")
    monkeypatch.setattr(sys, "argv", ["mosaic", "warm", "small-sdar", "--device", device])
    kernel_folder.cache_clear()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    kernel_folder.cache_clear()
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"mosaic: {message}") and ended.value.code == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Each process warms a session, and then answers; the folder is empty before the first."""
    first, second = (alone(tmp_path, "on_the_card", "small-sdar") for _ in range(2))
    assert first["made"][1] > 20 and first["made"][2] == [] and first["compiled"] == 0
    assert second["made"][1:] == [0, []] and second["made"][0] == sum(first["made"][:2]) and second["compiled"] == 0
    assert first["tokens"] == second["tokens"]
    print(first, second)
