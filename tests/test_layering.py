"""The layers: the planner half never imports torch, and imports run downward only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "mosaic"
HEAVY = ("torch", "triton", "cuda", "numba", "ortools", "pulp", "matplotlib", "networkx", "transformers")

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
    "jobs": {"runtime", "models", "decoding", "jobs", "devices", "files"},
    "bench": {"bench"},
    "evaluation": {"runtime", "models", "decoding", "jobs", "evaluation"},
    "serving": {"runtime", "models", "decoding", "jobs", "viz", "serving"},
}
COMMON = {"errors", "units", "version"}
# At call time, through the room above: a notebook's picture of an object, and `generate` of a compiled model.
UPWARD_ON_DEMAND = {("planner/plan.py", "viz"), ("registrar/graph.py", "viz"), ("runtime/compiled.py", "decoding")}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


LIGHT = ("registrar.draw", "registrar.graph", "registrar.program", "models", "planner", "planner.check", "planner.offsets",
         "viz", "bench", "devices", "cli")  # fmt: skip


def test_the_planner_half_imports_nothing_heavy() -> None:
    """Imported in one process, as what the first ones leave out the next ones may not bring either."""
    code = (
        f"import importlib, sys\nfor name in {LIGHT!r}:\n    importlib.import_module('mosaic.' + name)\n"
        f"    print(name, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code).splitlines() == [f"{name} []" for name in LIGHT]


def test_planning_imports_nothing_heavy() -> None:
    code = (
        f"import sys, mosaic; mosaic.plan('llada-8b', tokens=4096); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_planning_starts_without_sympy() -> None:
    """It takes longer to import than everything else together; sizes are polynomials of our own."""
    code = "import sys, mosaic.cli; mosaic.plan('llada-8b', tokens=4096); print('sympy' in sys.modules)"
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


@pytest.mark.some
@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_run_downward(room: str) -> None:
    for file in sorted((ROOT / room).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        extra = imports(file) - ALLOWED[room] - COMMON
        extra -= {target for source, target in UPWARD_ON_DEMAND if source == path}
        assert not extra, f"{path} imports {sorted(extra)}"


# --- no circles: every import statement counts, deferred ones and those for types too ------------------------------------


def modules() -> dict[str, Path]:
    """The library's modules by dotted name; a package has that of its folder."""
    names = {path: ".".join(("mosaic", *path.relative_to(ROOT).with_suffix("").parts)) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(name: str, known: dict[str, Path]) -> set[str]:
    """Modules of the library that a module imports, anywhere in it."""
    found, package = set[str](), name if known[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {full if (full := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & known.keys() - {name}


def test_no_module_imports_what_imports_it() -> None:
    known = modules()
    imports_of = {name: imported(name, known) for name in known}
    for name in known:
        reached, left = set[str](), [*imports_of[name]]
        while left:
            if (other := left.pop()) not in reached:
                reached.add(other)
                left += imports_of[other]
        assert name not in reached, f"{name} imports what imports it"


# --- tests use public seams ---------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
PRIVATE = re.compile(r"_(?!_)\w*(?<!_)")  # `_repr_png_` is a protocol of notebooks
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def owner_of(node: ast.Attribute) -> str:
    """The name at the root of `name.a.b`, or nothing for what a call or an index gives."""
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def name_of(function: ast.expr) -> str:
    """The last part of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


def defined_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Members that a file defines itself: functions, classes, and names that are assigned, those of objects too."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner_of(node) in ("self", "cls"):
            found.add(node.attr)
    return found


def private_members(code: str) -> Iterator[str]:
    """The private names of other modules that a test's code uses, as `line: name`.

    Members of `self` and `cls`, of classes that the file defines, and of the standard library are its own business:
    a name that is imported from elsewhere than Mosaic is not followed.
    """
    nodes = [*ast.walk(ast.parse(code))]
    own, foreign = defined_in(nodes), set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                dotted = f"{module}.{alias.name}".strip(".")
                if dotted.split(".")[0] != "mosaic":
                    foreign.add((alias.asname or alias.name).split(".")[0])
                elif any(map(PRIVATE.fullmatch, dotted.split("."))):
                    yield f"{node.lineno}: {dotted}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: {name}" for name in re.findall(r"\bmosaic(?:\.\w+)*\._(?!_)\w+", node.value))
    for node in nodes:
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if owner_of(node) not in {"self", "cls", *foreign} and node.attr not in own | NAMED_TUPLE:
                yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.Call) and name_of(node.func) in ("setattr", "getattr", "delattr"):
            owner = node.args[0] if node.args else None
            if isinstance(owner, ast.Attribute) and owner_of(owner) in foreign:
                continue
            for named in node.args[:2]:
                if isinstance(named, ast.Constant) and isinstance(named.value, str) and PRIVATE.fullmatch(named.value):
                    yield f"{node.lineno}: {named.value}"


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("from mosaic.kernels import _norm", "mosaic.kernels._norm"),
        ("import mosaic.kernels._norm as norm", "mosaic.kernels._norm"),
        ("from mosaic.kernels._norm import bind", "mosaic.kernels._norm.bind"),
        ("import mosaic\nmosaic.plan._cache.clear()", "_cache"),
        ("compile(model)._engine", "_engine"),
        ("monkeypatch.setattr(cache, '_loaded', {})", "_loaded"),
        ("monkeypatch.setattr('mosaic.planner.template._compiled', {})", "mosaic.planner.template._compiled"),
        ("subprocess.run('import mosaic.kernels._norm')", "mosaic.kernels._norm"),
        ("getattr(plan, '_document')", "_document"),
        ("self._own = cls._own", ""),
        ("class A:\n    def _own(self): ...\nA()._own()", ""),
        ("import os\nos._exit(0)", ""),
        ("plan.__dict__", ""),
        ("plan._repr_png_()", ""),
        ("shape._replace(rows=3)", ""),
        ("import torch\nmonkeypatch.setattr(torch._C, '_end', None)", ""),
    ],
)
def test_private_members_are_found(code: str, named: str) -> None:
    assert [found.partition(": ")[2] for found in private_members(code)] == [named] * bool(named)


def test_no_test_reaches_into_private_members() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{place}"
        for file in sorted(TESTS.rglob("*.py"))
        if file != Path(__file__)
        for place in private_members(file.read_text())
    ]
    assert found == []


def test_no_file_is_longer_than_a_reader_holds_in_mind() -> None:
    """At most 500 lines, as long as there are ideas to cut it by."""
    long = {str(path): count for path in ROOT.rglob("*.py") if (count := len(path.read_text().splitlines())) > 500}
    assert not long


SECTION = re.compile(r"^( *)(?:Parameters|Attributes|Raises)\n\1-+\n((?:\1(?! *\"\"\").+\n)+)", re.M)
NAMES = re.compile(r"\*{0,2}[A-Za-z_][\w.]*(, \*{0,2}[A-Za-z_][\w.]*)*( : .+)?")


def unnamed(code: str) -> list[str]:
    """The lines of a docstring's sections that stand where a name is expected."""
    found = ((len(indent), line) for indent, lines in SECTION.findall(code) for line in lines.splitlines())
    return [line for indent, line in found if line[indent] != " " and not NAMES.fullmatch(line[indent:])]


def test_sections_of_docstrings_list_names() -> None:
    listed = '    Raises\n    ------\n    UsageError\n        If the value is unknown.\n    """\n'
    assert not unnamed(listed)
    assert unnamed(listed.replace("UsageError", "If it is unknown.")) == ["    If it is unknown."]
    wrong = {str(file): lines for file in sorted(ROOT.rglob("*.py")) if (lines := unnamed(file.read_text()))}
    assert not wrong, wrong
