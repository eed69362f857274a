"""Whatever is typed, damaged, full or poor in characters: one line, the right exit code, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

import mosaic
from mosaic import cli
from mosaic.cli.output import results
from mosaic.errors import MissingExtra

CONFIG = {
    "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64,
    "mask_token_id": 63, "torch_dtype": "float32",
}  # fmt: skip
PLAN = ("plan", "--model", "llada-8b", "--device", "h200", "--ctx", "1k")


def few(count: int, first: int) -> list[Any]:
    """Seeds, of which `make soak` alone runs those after the first ones."""
    return [pytest.param(seed, marks=[pytest.mark.soak] if seed >= first else []) for seed in range(count)]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run(*arguments: str) -> Ran:
    """The command in this process: an exception that escapes fails the test."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["mosaic", *arguments]
    results.cache_clear()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
        results.cache_clear()
    return Ran(code, out.getvalue(), err.getvalue())


def run_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    options.setdefault("stdout", subprocess.PIPE)
    environment = {**os.environ, **options.pop("environment", {})}
    command = [sys.executable, "-m", "mosaic", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, env=environment, check=False, **options)


# -- damaged plans -------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, -1, 0, 1, 7, 1 << 70, -(1 << 70), 1.5, float("nan"), float("inf"), "x", "", [], {}, True, [1], {"a": 1}, [[]], [None],
    "\ud800", "[bold]", "a" * 500,
]  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    made = mosaic.plan(CONFIG, tokens=70, device="h200", host_budget="1GiB", budget="1GiB")
    return json.loads(made.to_json())  # type: ignore[no-any-return]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def damaged(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One to three values replaced, deleted or added, anywhere; every second time near the top."""
    found = copy.deepcopy(document)
    everywhere = list(places(found))
    top = [place for place in everywhere if len(place) <= 2]
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(rng.choice((everywhere, top)))
        holder: Any = found
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took it away
            for key in place[:-1]:
                holder = holder[key]
            if rng.random() < 0.15:
                del holder[place[-1]]
            else:
                holder[place[-1]] = copy.deepcopy(rng.choice(VALUES))
    return found


@pytest.mark.parametrize("seed", few(40, 10))
def test_a_damaged_plan_is_refused_in_one_line_or_is_none_the_worse(
    document: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    bad, good, picture = (tmp_path / name for name in ("bad.json", "good.json", "plan.html"))
    text = json.dumps(damaged(document, rng))
    bad.write_text(text[: rng.randrange(len(text))] if seed % 10 == 0 else text)
    good.write_text(json.dumps(document))
    exports = ("--html", str(picture), "--trace", str(tmp_path / "t.json"), "--snapshot", str(tmp_path / "s.pickle"))
    holds = run("check", str(bad)).code == 0
    for arguments in (("show", str(bad), "--explain", *exports), ("plan", "--compare", str(bad), str(good))):
        ran = run(*arguments)
        if holds:
            assert ran.code == 0 and ran.out
        else:
            assert ran.code == 1 and ran.out == "" and str(bad) in ran.err, arguments
            assert ran.err.startswith("mosaic: ") and ran.err.count("\n") == 1 and not picture.exists()


def test_an_overlap_is_no_plan_to_show(document: dict[str, Any], tmp_path: Path) -> None:
    first, second = [b for b in document["buffers"] if b["pool"] == "workspace" and b["alias_of"] is None][:2]
    moved = [{**b, "offset": first["offset"]} if b["id"] == second["id"] else b for b in document["buffers"]]
    (tmp_path / "plan.json").write_text(json.dumps({**document, "buffers": moved}))
    ran = run("show", str(tmp_path / "plan.json"))
    assert ran.code == 1 and "not a valid plan" in ran.err and "mosaic check" in ran.err and ran.out == ""


def test_a_packing_that_does_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mosaic.planner import offsets

    instance, out = tmp_path / "toy.csv", tmp_path / "out.csv"
    instance.write_text("id,lower,upper,size\n0,0,10,4\n1,5,15,4\n")
    true = offsets.solve

    def broken(*arguments: Any, **options: Any) -> Any:
        from dataclasses import replace

        found = true(*arguments, **options)
        return replace(found, offsets=[0] * len(found.offsets))

    monkeypatch.setattr(offsets, "solve", broken)
    ran = run("pack", str(instance), "--out", str(out))
    assert ran.code == 1 and "does not hold" in ran.err and ran.err.count("\n") == 1 and not out.exists()


# -- garbage -------------------------------------------------------------------------------------------------------------

WORDS = (
    "", " ", "-", "--", "0", "-1", "1.5", "nan", "inf", "1e9", "9" * 400, "128k", "24GiB", "0GiB", "1k,2k", ",", "auto", "cpu",
    "h200", "rtx3090", "llada-8b", "small", "help", "/dev/null", "/", ".", "missing.json", "missing.toml", "[bold]", "%s{}", "é…中",
    "\udcff", "\n", "true", "None", "float32", "mosaic", "eager", "x" * 5000,
)  # fmt: skip
SLOW = {"generate", "calibrate"}
"""Commands that run a model or look for a card: only their errors are tried."""


def commands() -> dict[str, list[str]]:
    """Every command with its options, as typer knows them."""
    root: Any = typer.main.get_command(cli.app)
    found = {name: command for name, command in root.commands.items() if name != "bench"}
    return {name: [o for p in command.params for o in p.opts if o.startswith("--")] for name, command in found.items()}


@pytest.mark.parametrize("seed", few(60, 15))
def test_garbage_gets_an_exit_code_and_no_traceback(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    rng, known = random.Random(seed), commands()
    name = rng.choice(sorted(known))
    arguments: list[str] = []
    for _ in range(rng.randint(0, 4)):
        arguments += [rng.choice(known[name])] if rng.random() < 0.7 else []
        arguments += [rng.choice(WORDS)] if rng.random() < 0.8 else []
    if name in SLOW:
        arguments += ["--no-such-option"]
    ran = run(name, *arguments)
    assert ran.code in (0, 1, 2, 3), (name, arguments)
    assert ran.code in (0, 3) or ran.err, (name, arguments)
    assert "Traceback" not in ran.err + ran.out, (name, arguments)


# -- terminals, disks, packages ------------------------------------------------------------------------------------------


@pytest.mark.some
@pytest.mark.parametrize(
    ("arguments", "code", "encoding"),
    [
        (("generate", "--help"), 0, "ascii"),
        (PLAN, 0, "ascii"),
        pytest.param(PLAN, 0, "latin-1", marks=pytest.mark.soak),
        pytest.param(("plan", "--nonsense"), 2, "ascii", marks=pytest.mark.soak),
        (("show", "été…中.json"), 1, "ascii"),
    ],
)
def test_a_poor_encoding_gets_plain_characters(arguments: tuple[str, ...], code: int, encoding: str) -> None:
    ran = run_process(*arguments, environment={"PYTHONIOENCODING": encoding})
    text = (ran.stdout + ran.stderr).decode(encoding)
    assert ran.returncode == code and text and "Traceback" not in text
    if arguments is PLAN:
        assert "#" in text and "^" in text and "?" not in text


def test_json_survives_a_poor_encoding(tmp_path: Path) -> None:
    (tmp_path / "été…中").mkdir()
    (tmp_path / "été…中" / "config.json").write_text(json.dumps(CONFIG))
    arguments = ("plan", "--model", str(tmp_path / "été…中"), "--ctx", "8", "--device", "cpu", "--json")
    ran = run_process(*arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert json.loads(ran.stdout.decode("ascii"))["model"] == "été…中"


def test_standard_output_is_a_file_too(tmp_path: Path) -> None:
    """To a pipe, and to a file that the shell has opened: the plan first, then what is printed."""
    piped = run_process(*PLAN, "--out", "/dev/stdout").stdout.decode()
    with (tmp_path / "redirected").open("wb") as stream:
        run_process(*PLAN, "--out", "/dev/stdout", stdout=stream)
    redirected = (tmp_path / "redirected").read_text()
    for text in (piped, redirected):
        first, _, rest = text.partition("\n")
        assert json.loads(first)["schema"] == "mosaic.plan/1" and "fits, headroom" in rest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["redirected"]


def test_one_file_is_not_written_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "plan.json")
    for other in (tmp_path / "plan.json", tmp_path / "link", tmp_path / ".." / tmp_path.name / "plan.json"):
        ran = run(*PLAN, "--out", str(tmp_path / "plan.json"), "--html", str(other))
        assert ran.code == 2 and "twice" in ran.err and not (tmp_path / "plan.json").exists()


def test_a_full_disk_is_named_with_its_file(tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    for arguments, limit in (
        ((*PLAN, "--out", str(tmp_path / "plan.json")), small_files),
        ((*PLAN, "--out", "/dev/full"), None),
    ):
        ran = run_process(*arguments, preexec_fn=limit)
        (line,) = ran.stderr.decode().splitlines()
        assert ran.returncode == 1 and line.startswith(f"mosaic: {arguments[-1]}: ")
    assert not list(tmp_path.iterdir()) and Path("/dev/full").exists()
    with open("/dev/full", "wb") as full:
        ran = run_process("devices", stdout=full)
    assert ran.returncode == 1 and ran.stderr.decode() == "mosaic: standard output: No space left on device\n"


def test_what_is_written_is_named(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("plan.json", "plan.html")]
    ran = run(*PLAN, "--out", files[0], "--html", files[1])
    assert ran.code == 0 and ran.err == f"mosaic: wrote {files[0]}, {files[1]}\n"
    assert run("show", files[0], "--html", files[1], "--json").err == f"mosaic: wrote {files[1]}\n"


def test_torch_is_asked_for_by_its_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nimport mosaic, mosaic.errors\n"
        "for name in ('compile', 'CompiledModel'):\n"
        "    try:\n        getattr(mosaic, name)\n"
        "    except mosaic.errors.MissingExtra as error:\n        print(error.extra, error)\n"
        "print(mosaic.plan('small', tokens=5, device='cpu').fits)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, second, last = ran.stdout.splitlines()
    assert (
        first.startswith("torch mosaic.compile needs torch: pip install")
        and "CompiledModel" in second
        and last == "True"
    )
    assert issubclass(MissingExtra, mosaic.MosaicError)
