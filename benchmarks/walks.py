"""The length of the walks: files and calls of Mosaic from a command to its launch, and sizes of the library.

A file is entered where one of its functions is called; what runs while modules are imported is left out. A call is one of a
Python function of Mosaic, comprehensions and generators' resumptions included. Each walk is a process of its own.

    python -m benchmarks.walks            a table
    python -m benchmarks.walks --files    the files of each walk as well
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
LIBRARY: Final = ROOT / "mosaic"
PLAN: Final = ("plan", "--model", "llada-8b", "--tokens", "128k", "--device", "rtx-4090")
SIZES: Final = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 64,
                "mask_token_id": 63, "torch_dtype": "float32", "max_position_embeddings": 512}  # fmt: skip
LLADA: Final = {"model_type": "llada", "d_model": 64, "n_layers": 3, "n_heads": 2, "mlp_hidden_size": 96, "embedding_size": 64,
                "mask_token_id": 63, "torch_dtype": "float32"}  # fmt: skip
SDAR: Final = {**SIZES, "model_type": "sdar", "num_key_value_heads": 1, "head_dim": 32, "block_size": 4}


class Walk:
    """Calls of Mosaic's functions, by file, while it is followed."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._importing: FrameType | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Count calls until the block is left."""
        sys.setprofile(self._saw)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _saw(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":  # an import: its calls belong to no walk
            if event == "call" and self._importing is None:
                self._importing = frame
            elif event == "return" and self._importing is frame:
                self._importing = None
        elif event == "call" and self._importing is None and frame.f_code.co_filename.startswith(str(LIBRARY)):
            name = str(Path(frame.f_code.co_filename).relative_to(ROOT))
            self.calls[name] = self.calls.get(name, 0) + 1


def plan() -> Walk:
    """The command `mosaic plan`."""
    from mosaic.cli import main

    walk, sys.argv = Walk(), ["mosaic", *PLAN]
    with redirect_stdout(StringIO()), suppress(SystemExit), walk.followed():
        main()
    return walk


def second_step() -> Walk:
    """The second call of a model with ids of one shape."""
    import torch

    import mosaic

    ids, walk = torch.tensor([1, 2, 63, 63]), Walk()
    with mosaic.compile(LLADA) as model:
        model(ids)
        with walk.followed():
            model(ids)
    return walk


def second_generation() -> Walk:
    """The second `generate` of a model with one prompt."""
    import torch

    import mosaic

    walk = Walk()
    with mosaic.compile(SDAR) as model:
        model.generate(torch.tensor([1, 2, 3]), gen_length=16)
        with walk.followed():
            model.generate(torch.tensor([1, 2, 3]), gen_length=16)
    return walk


def advance(**options: Any) -> Walk:
    """A `Session.advance` of one request in the middle of a block, in steps that are there."""
    import torch

    import mosaic

    with mosaic.compile(SDAR) as model, model.session() as session:
        request = session.submit(torch.arange(1, 41), gen_length=16, **options)
        walks = []
        while session.live:
            walk = Walk()
            with walk.followed():
                session.advance()
            walks.append(walk)
        assert request.generation is not None
    return sorted(walks, key=lambda walk: sum(walk.calls.values()))[len(walks) // 2]


def bodies() -> dict[str, int]:
    """Bodies of each kind of step that a search over all choices compiles."""
    from mosaic.models.parts import KEPT, Commit
    from mosaic.models.phase import FULL_STEP, Phase
    from mosaic.planner import Planner

    denoise = Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic"))
    asked = {"full_step": ("llada-8b", FULL_STEP), "denoise": ("sdar-8b", denoise)}
    return {
        name: len(Planner(model, device="h200").space(phase).template.bodies) for name, (model, phase) in asked.items()
    }


def lines() -> dict[str, int]:
    """Lines of each package, and of the whole library."""
    found: dict[str, int] = {}
    for file in LIBRARY.rglob("*.py"):
        room = file.relative_to(LIBRARY).parts[0] if file.parent != LIBRARY else "(modules)"
        found[room] = found.get(room, 0) + len(file.read_text().splitlines())
    return dict(sorted(found.items())) | {"in all": sum(found.values())}


def imports(root: Path = LIBRARY) -> dict[str, set[str]]:
    """Modules of the library that each one imports, wherever the statement stands: in a function, or for annotations."""
    files = {
        ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in root.rglob("*.py")
    }

    def module(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    found: dict[str, set[str]] = {}
    for name, file in files.items():
        named = set[str]()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named.update(module(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                named.update(module(f"{node.module}.{alias.name}") for alias in node.names)
        found[name] = named - {"", name}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or not, the largest first: strongly connected components (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        path.append(module)
        for other in sorted(edges.get(module, ())):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in path:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            at = path.index(module)
            found.append(sorted(path[at:]))
            del path[at:]

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return sorted((circle for circle in found if len(circle) > 1), key=lambda circle: (-len(circle), circle))


WALKS: Final[Mapping[str, Callable[[], Walk]]] = {
    "plan": plan,
    "second step": second_step,
    "second generation": second_generation,
    "advance, exact": advance,
    "advance, sparse": lambda: advance(attention="mage"),
    "advance, evicting": lambda: advance(eviction="focus"),
}


def walked(name: str) -> dict[str, int]:
    """Calls by file of one walk, in a process of its own."""
    given = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walks", "--walk", name], capture_output=True, text=True, check=True, env=given, cwd=ROOT
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--walk"]:
        print(json.dumps(WALKS[arguments[1]]().calls))
        return
    found = {name: walked(name) for name in WALKS}
    print(f"{'walk':<22}{'files':>8}{'calls':>10}")
    for name, calls in found.items():
        print(f"{name:<22}{len(calls):>8}{sum(calls.values()):>10,}")
        if "--files" in arguments:
            print("\n".join(f"    {count:>8,}  {file}" for file, count in sorted(calls.items())))
    print("\nbodies: " + ", ".join(f"{name} {count}" for name, count in bodies().items()))
    print("circles of imports: " + (", ".join(str(len(circle)) for circle in circles(imports())) or "none"))
    print("lines: " + ", ".join(f"{room} {count:,}" for room, count in lines().items()))


if __name__ == "__main__":
    main(sys.argv[1:])
