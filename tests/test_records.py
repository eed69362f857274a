"""Records say what was measured, and documents say what the records do: here, and in small copies where they do not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mosaic
from benchmarks import cases, figures, record, report, sources

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]


def git(root: Path, *arguments: str, given: str = "") -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, input=given.encode(), capture_output=True, check=True).stdout.decode()


def history_of(root: Path) -> None:
    """Skip where there is nothing to walk through."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("no git or no history: the blobs of records cannot be looked up")
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a shallow clone: the blobs of older records are not in it")


# --- what is wrong with records -----------------------------------------------------------------------------------------


def records_of(root: Path) -> dict[str, Record]:
    return {
        file.name: json.loads(file.read_text()) for file in sorted((root / "benchmarks" / "results").glob("*.json"))
    }


def wrong_in_themselves(root: Path) -> Iterator[str]:
    """Records that do not say what they measured, or whose digest is another's."""
    for name, found in records_of(root).items():
        env = found["environment"]
        if not env.get("sources") and "not_repeated" not in env:
            yield f"{name}: it does not say which sources it measured"
        if not env.get("commit") or not env.get("method"):
            yield f"{name}: it has no commit or no method; `python -m benchmarks.record fill` writes the commit"
        if env.get("digest") != record.digest_of(found):
            yield f"{name}: not what was recorded, by its digest"


def wrong_by_history(root: Path) -> Iterator[str]:
    """Records whose sources no commit ever held, or another than theirs did."""
    held = set()
    for line in git(root, "log", "-m", "--raw", "--no-abbrev", "--no-renames", "--format=").splitlines():
        entry, path = line.split("\t")
        held.add((path, entry.split()[3][:12]))
    trees: dict[str, dict[str, str]] = {}
    for name, found in records_of(root).items():
        env = found["environment"]
        measured = env.get("sources", {})
        if missing := [path for path, blob in measured.items() if (path, blob) not in held]:
            yield f"{name}: no commit holds its {missing[0]}"
        commit = str(env["commit"])
        known = subprocess.run(["git", "-C", str(root), "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
        if measured and known.returncode == 0:
            if commit not in trees:
                lines = (line.split("\t") for line in git(root, "ls-tree", "-r", commit).splitlines())
                trees[commit] = {path: entry.split()[2][:12] for entry, path in lines}
            if others := [path for path, blob in measured.items() if trees[commit].get(path) != blob]:
                yield f"{name}: {commit} holds another {others[0]}"


def versions_of(root: Path) -> dict[str, list[Record]]:
    """Every version of every record since records are sealed: of the history, where the seal is its own, and what lies there."""
    blobs: dict[str, str] = {}
    log = git(root, "log", "-m", "--raw", "--no-abbrev", "--no-renames", "--format=", "--", "benchmarks/results")
    for line in log.splitlines():
        entry, path = line.split("\t")
        if set(blob := entry.split()[3]) != {"0"}:
            blobs[blob] = Path(path).name
    found: dict[str, list[Record]] = {name: [version] for name, version in records_of(root).items()}
    printed = git(root, "cat-file", "--batch", given="".join(f"{blob}\n" for blob in blobs))
    for header, text in re.findall(r"^([0-9a-f]{40}) blob \d+\n(\{.*?^\})$", printed, re.MULTILINE | re.DOTALL):
        if '"digest": "' in text:
            version = json.loads(text)
            if version["environment"]["digest"] == record.digest_of(version):  # else `wrong_in_themselves` refused it
                found.setdefault(blobs[header], []).append(version)
    return found


def run_of(found: Record) -> tuple[str, str]:
    env = found["environment"]
    return env.get("recorded") or env["not_repeated"], env["command"]


def wrong_along_history(root: Path) -> Iterator[str]:
    """Figures that changed without a run, and runs that have the figures of another one."""
    versions = versions_of(root)
    everything = [(name, version) for name, of_file in versions.items() for version in of_file]
    by_figures: dict[str, list[tuple[str, Record]]] = {}
    for name, version in everything:
        by_figures.setdefault(json.dumps(record.figures_of(version), sort_keys=True), []).append((name, version))
    for same in by_figures.values():
        for (name, one), (other_name, other) in combinations(same, 2):
            timed = not one["environment"]["method"].startswith("computed")
            if timed and (run_of(one) != run_of(other) or name != other_name):
                yield f"{name}: the figures of another run, {' '.join(run_of(other))}"
    for name, of_file in versions.items():
        for one, other in combinations(of_file, 2):
            if run_of(one) == run_of(other) and record.figures_of(one) != record.figures_of(other):
                yield f"{name}: other figures than the same run had"


CHECKS: tuple[Callable[[Path], Iterator[str]], ...] = (wrong_in_themselves, wrong_by_history, wrong_along_history)


@pytest.mark.parametrize("check", CHECKS)
def test_records_are_what_was_recorded(check: Callable[[Path], Iterator[str]]) -> None:
    if check is not wrong_in_themselves:
        history_of(ROOT)
    assert [*check(ROOT)] == []


# --- in a small repository ----------------------------------------------------------------------------------------------

SOURCE = "mosaic/kernel.py"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one source, which this process has loaded, and no records."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    root = tmp_path / "repository"
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "mosaic").mkdir()
    for name in ("mosaic/__init__.py", SOURCE):
        (root / name).write_text("# first\n")
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    for name, value in (("user.name", "t"), ("user.email", "t@t"), ("commit.gpgsign", "false")):
        git(root, "config", name, value)
    commit(root)
    kernel = ModuleType("kernel")
    kernel.__file__ = str(root / SOURCE)
    monkeypatch.setitem(sys.modules, "kernel", kernel)
    monkeypatch.setattr(mosaic, "__file__", str(root / "mosaic" / "__init__.py"))
    monkeypatch.setattr(sources, "ROOT", root)
    monkeypatch.setattr(record, "RESULTS", root / "benchmarks" / "results")
    monkeypatch.delenv("OUT", raising=False)
    return root


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "a commit")
    return git(root, "rev-parse", "--short", "HEAD").strip()


def recorded(seconds: float = 0.25) -> Path:
    """Run a benchmark."""
    env = record.environment("median of 3")
    return record.write("tiny", {"environment": env, "card": "cpu", "points": [{"seconds": seconds}]})


def wrong(root: Path) -> list[str]:
    return [problem for check in CHECKS for problem in check(root)]


def test_a_record_says_what_it_measures(repository: Path) -> None:
    file = recorded(1 / 3)
    found = json.loads(file.read_text())
    env = found["environment"]
    blobs = {path: git(repository, "rev-parse", f"HEAD:{path}")[:12] for path in ("mosaic/__init__.py", SOURCE)}
    assert env["sources"] == blobs and env["commit"] == git(repository, "rev-parse", "--short", "HEAD").strip()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", env["recorded"]) and env["method"] == "median of 3"
    assert found["points"] == [{"seconds": 0.333333333}] and env["command"].startswith("python -m ")
    commit(repository)
    assert wrong(repository) == []
    assert "none of 2 measured files had changed" in record.source_line(found)
    (repository / SOURCE).write_text("# second\n")
    assert f"1 of 2 measured files had changed when this was written ({SOURCE})" in record.source_line(found)


@pytest.mark.parametrize("path", [SOURCE, "benchmarks/new.py"])
def test_a_changed_tree_is_refused_before_anything_is_measured(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    (repository / path).write_text("# changed\n")
    with pytest.raises(SystemExit, match=rf"^{path}: not what commit \w+ holds"):
        record.environment("median of 3")
    monkeypatch.setenv("OUT", str(tmp_path))  # to try something out
    assert json.loads(recorded().read_text())["environment"]["commit"] is None or path != SOURCE


def test_what_shows_is_not_measured_and_what_devices_read_is(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "benchmarks" / "report.py").write_text("# new\n")
    record.environment("median of 3")  # it refuses nothing
    for name in ("mosaic/viz/draw.py", "mosaic/devices.py", "mosaic/profiles/card.toml"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("# new\n")
        if name.endswith(".py"):
            module = ModuleType(name)
            module.__file__ = str(repository / name)
            monkeypatch.setitem(sys.modules, name, module)
    assert {"mosaic/devices.py", "mosaic/profiles/card.toml"} < {*sources.of_run()}
    assert "mosaic/viz/draw.py" not in sources.of_run() and "mosaic/viz/draw.py" in sources.loaded(whole=True)


def test_a_command_is_recorded_without_its_single_answers(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        assert sys.argv[:2] == ["benchmarks.quality", "policies"]
        group = {key: {"count": 3, "exact": 1.0} for key in ("all", "chain, 2048")}
        found = {"exact": {"seconds": 0.5, "exact": "111", "groups": group}}
        result = {"model": "small-sdar", "environment": {}, "items": [1, 2, 3], "schedules": {"dynamic": found}}
        Path(sys.argv[-1]).write_text(json.dumps(result))
        raise SystemExit(0)

    monkeypatch.setattr("benchmarks.quality.__main__.main", command)
    monkeypatch.setattr(sys, "argv", ["record"])
    record.main(["run", "policies-tiny", "--", "benchmarks.quality", "policies"])
    (found,) = record.load_results("policies")
    assert (
        found["environment"]["command"] == "python -m benchmarks.quality policies" and found["environment"]["sources"]
    )
    assert "items" not in found and found["answers"] == 3
    assert found["schedules"]["dynamic"]["exact"] == {"seconds": 0.5, "groups": {"all": {"count": 3, "exact": 1.0}}}
    with pytest.raises(SystemExit, match="usage"):
        record.main(["run", "policies-tiny"])


def test_a_tree_that_changes_while_it_is_measured_gives_a_record_without_a_commit(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = record.environment("median of 3")
    (repository / SOURCE).write_text("# changed\n")
    file = record.write("tiny", {"environment": env, "points": [1.5]})
    assert json.loads(file.read_text())["environment"]["commit"] is None
    assert f"{SOURCE} differ from" in capsys.readouterr().err


def test_mosaic_of_another_checkout_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "__file__", __file__)
    with pytest.raises(SystemExit, match=f"set PYTHONPATH={repository}"):
        record.environment("median of 3")


def test_a_machine_without_the_history_has_its_commit_filled_in(repository: Path) -> None:
    """And only the one that holds what it measured."""
    first = git(repository, "rev-parse", "--short", "HEAD").strip()
    (repository / ".git").rename(repository / "away")
    file = recorded()
    (repository / "away").rename(repository / ".git")
    assert json.loads(file.read_text())["environment"]["commit"] is None
    (repository / SOURCE).write_text("# second\n")
    second = commit(repository)
    assert record.fill() == (
        [],
        [f"tiny.json: {second} has not what was measured of {SOURCE}. Name the commit that has."],
    )
    assert record.fill(first) == (["tiny.json"], []) and record.fill(first) == ([], [])
    assert json.loads(file.read_text())["environment"]["commit"] == first and wrong(repository) == []
    (bare,) = [json.loads(file.read_text())]
    del bare["environment"]["sources"], bare["environment"]["commit"]
    file.write_text(json.dumps(bare))
    assert "does not say which sources" in record.fill()[1][0]
    with pytest.raises(SystemExit, match="'nowhere' is no commit"):
        record.fill("nowhere")


def test_the_other_checkout_of_a_pair_is_named_too(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "--short", "HEAD").strip()
    shutil.copytree(repository / "mosaic", tmp_path / "before" / "mosaic")
    (repository / SOURCE).write_text("# second\n")
    second = commit(repository)
    env = record.environment("median of 3")
    files = [str(tmp_path / "before" / SOURCE), str(repository / SOURCE), __file__]
    env["against"] = sources.of_checkout(files, tmp_path / "before")
    assert [*env["against"]] == [SOURCE]
    found = json.loads(record.write("tiny", {"environment": env, "points": [1.5]}).read_text())
    assert (found["environment"]["commit"], found["environment"]["against_commit"]) == (second, first)
    assert f"Commit {second}, against {first}; none of 2 measured files" in record.source_line(found)
    (repository / ".git").rename(repository / "away")
    file = record.write("tiny", {"environment": env, "points": [1.5]})
    foreign = {**env, "against": {SOURCE: "0123456789ab"}}
    record.write("tiny-foreign", {"environment": foreign, "points": [2.5]})
    (repository / "away").rename(repository / ".git")
    assert record.fill() == (["tiny.json"], ["tiny-foreign.json: no commit holds what it was measured against."])
    assert json.loads(file.read_text())["environment"]["against_commit"] == first


def edited(root: Path, change: Callable[[Record], None], *, sealed: bool = True) -> list[str]:
    """Errors of a record that was changed by hand, with its digest made again."""
    file = root / "benchmarks" / "results" / "tiny.json"
    found = json.loads(file.read_text())
    change(found)
    file.write_text(record.sealed(found) if sealed else json.dumps(found))
    return wrong(root)


def test_what_is_edited_stolen_or_foreign_is_caught(repository: Path) -> None:
    recorded()
    first = commit(repository)
    (repository / SOURCE).write_text("# second\n")
    second = commit(repository)
    file = repository / "benchmarks" / "results" / "tiny.json"
    text = file.read_text()
    blob = git(repository, "rev-parse", f"HEAD:{SOURCE}")[:12]
    env = json.loads(text)["environment"]

    def faster(found: Record) -> None:
        found["points"][0]["seconds"] = 0.2

    def in_source(name: str, value: Any) -> Callable[[Record], None]:
        return lambda found: found["environment"].update({name: value})

    assert edited(repository, faster, sealed=False) == [
        "tiny.json: not what was recorded, by its digest", "tiny.json: other figures than the same run had"
    ]  # fmt: skip
    file.write_text(text)
    assert edited(repository, faster) == ["tiny.json: other figures than the same run had"]
    file.write_text(text)
    foreign = {**env["sources"], SOURCE: "0123456789ab"}
    assert f"tiny.json: no commit holds its {SOURCE}" in edited(repository, in_source("sources", foreign))
    file.write_text(text)
    stolen = {**env["sources"], SOURCE: blob}  # of another commit than the record's
    assert edited(repository, in_source("sources", stolen)) == [f"tiny.json: {env['commit']} holds another {SOURCE}"]
    file.write_text(text)
    assert edited(repository, in_source("commit", second)) == [f"tiny.json: {second} holds another {SOURCE}"]
    file.write_text(text)
    assert edited(repository, in_source("commit", first)) == [], "a commit that holds the same sources"
    file.write_text(text)
    moved = edited(repository, in_source("recorded", "2027-01-01T00:00:00+00:00"))
    assert moved and all("the figures of another run" in problem for problem in moved)
    file.write_text(text)
    assert edited(repository, in_source("method", "computed by the planner")) == []
    assert edited(repository, in_source("recorded", "2027-01-01T00:00:00+00:00")) == [], "it times nothing"
    file.write_text(text)
    shutil.copy(file, file.with_name("tiny-again.json"))
    assert "tiny-again.json: the figures of another run" in " ".join(wrong(repository))


# --- other processes ----------------------------------------------------------------------------------------------------


def test_what_a_worker_loads_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text(
        "def main(given):\n    print('noise')\n    print('{\"given\": %s}' % given[1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    seen: list[str] = []
    monkeypatch.setattr(sources, "also", seen.extend)
    assert cases.in_own_process("worker", {"a": 1}, 60.0) == {"given": {"a": 1}}
    assert "mosaic/models/__init__.py" in seen and not any("record" in path for path in seen)


# --- documents ----------------------------------------------------------------------------------------------------------

AGE = re.compile(r"\w+ of (\d+) measured files had changed when this was written( \([^)]*\))?")
"""Counted when the report is made: it may be older in a checkout."""


def test_documents_are_what_the_report_writes() -> None:
    """`make report` would change nothing but how old records are."""
    for file, text in report.documents().items():
        assert AGE.sub(r"\1", file.read_text()) == AGE.sub(r"\1", text), f"{file.name}: run `make report`"


HIDDEN = re.compile(
    r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->|<!--(fig [\w-]+|given)-->.*?<!--/(fig|given)-->|^```.*?^```|`[^`\n]*`|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
"""Text that is generated or needs no check: tables, figures, limits; code and links."""
NUMBER = r"\d[\d,]*(?:\.\d+)?"
MEASURED = re.compile(
    rf"(?<![\w.,]){NUMBER}(?:\s+to\s+{NUMBER})?\s*(?:%|(?:ns|us|µs|ms|s|min|h|seconds?|minutes?|hours?|tokens/s|tokens\s+(?:per|a)\s+second"
    rf"|[GT]FLOP/s|[GT]B/s|points|times\s+(?:as|the|its|that|slower|faster|longer|more)|of\s+(?:FlashInfer|(?:its|the)\s+floor))\b)"
)


def typed_figures(text: str) -> list[str]:
    """Figures that look measured and that no record fills in, with their lines."""
    text = HIDDEN.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    return [f"line {text.count(chr(10), 0, found.start()) + 1}: {found[0]}" for found in MEASURED.finditer(text)]


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda file: file.name
)
def test_no_measurement_is_typed_by_hand(file: Path) -> None:
    assert typed_figures(file.read_text()) == [], "a figure comes from a record: see docs/testing.md, Benchmarks"


@pytest.mark.parametrize(
    "typed",
    [
        "It takes 142 us.", "6.48 ms a step", "0.65 to 0.84 of FlashInfer's time", "1.33 times as fast", "4.5 points", "in 12 s",
        "95.7 % are right", "3,600 tokens/s", "620 TFLOP/s", "1.2 to 7.3 points", "at 850\nms", "1.28\ntimes the time",
    ],
)  # fmt: skip
def test_what_looks_measured_is_seen(typed: str) -> None:
    assert len(typed_figures(typed)) == 1
    for escape in (
        f"<!--fig x-->{typed}<!--/fig-->",
        f"<!--given-->{typed}<!--/given-->",
        f"<!-- a:begin -->{typed}<!-- a:end -->",
    ):
        assert typed_figures(escape) == []
    assert len(typed_figures(f"<!--fig x-->1 ms<!--/fig--> {typed}")) == 1


def test_what_is_not_measured_may_be_typed() -> None:
    assert (
        typed_figures(
            "131,072 tokens of a 24 GiB card, 32 layers, sm_90, `--minutes 9 s`, 2.13 (CPU), 100 steps, 4 times 8"
        )
        == []
    )


def test_every_figure_stands_in_a_document() -> None:
    texts = "".join(file.read_text() for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert {*re.findall(r"<!--fig ([\w-]*)-->", texts)} == {*figures.FIGURES}


def test_a_figure_that_there_is_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("It takes <!--fig nothing-->1 ms<!--/fig-->.")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"README\.md asks for the figure 'nothing'"):
        report.documents()


def test_no_record_says_where_files_lay() -> None:
    for result in map(json.loads, (file.read_text() for file in record.RESULTS.glob("*.json"))):
        assert not re.search(r"(^|[\s='\"])/", result["environment"]["command"])


def test_a_command_names_files_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["x", "--against", str(ROOT / "before"), "--trace", "/somewhere/else/trace.json", "4k"]
    )
    assert record.command_line().endswith("--against before --trace …/trace.json 4k")
