"""read_canvas and write_canvas: on the CPU and in Triton against plain lists, and what they refuse."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch
from test_kernels import Case, check_allocates_nothing

from mosaic.errors import GraphError
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator
from mosaic.registrar.polynomial import symbol

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")


def drawn(seed: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """A canvas with open positions, rows (some outside of it), tokens, and the taken flags."""
    rng = random.Random(seed)
    size = rng.choice([1, 7, 300])
    canvas = [rng.choice([-1, rng.randrange(100)]) for _ in range(size)]
    rows = rng.sample([*range(size), -1, size, 1 << 40], rng.randint(1, size + 2))
    return canvas, rows, [rng.randrange(100) for _ in rows], [rng.choice([0, 1]) for _ in rows]


def reading(seed: int) -> tuple[Case, list[int]]:
    canvas, rows, _, _ = drawn(seed)
    rows = rows + rows[:1]
    found = [canvas[row] if 0 <= row < len(canvas) else -1 for row in rows]
    operands = {"canvas": torch.tensor(canvas), "rows": torch.tensor(rows)}
    case = Case("read_canvas", operands, {"y": torch.empty(len(rows), dtype=torch.int64)}, {"open_id": 77})
    return case, [77 if token == -1 else token for token in found]


def writing(seed: int) -> tuple[Case, list[int]]:
    canvas, rows, tokens, taken = drawn(seed)
    operands = {"token": torch.tensor(tokens), "rows": torch.tensor(rows), "canvas": torch.tensor(canvas)}
    operands["taken"] = torch.tensor(taken, dtype=torch.uint8)
    after = list(canvas)
    for row, token, flag in zip(rows, tokens, taken, strict=True):
        if 0 <= row < len(canvas) and flag:
            after[row] = token
    return Case("write_canvas", operands), after


@pytest.mark.parametrize("seed", range(8))
def test_on_the_cpu(seed: int) -> None:
    case, expected = reading(seed)
    assert case.reference().tolist() == expected
    case.launch()
    assert case.outputs["y"].tolist() == expected
    check_allocates_nothing(case)
    case, after = writing(seed)
    assert case.reference().tolist() == after
    check_allocates_nothing(case)
    assert case.operands["canvas"].tolist() == after


@triton_test
@pytest.mark.parametrize("seed", range(4))
def test_in_triton(seed: int) -> None:
    case, expected = reading(seed)
    assert run(case, DEVICE)["y"].tolist() == expected
    case, after = writing(seed)
    assert run(case, DEVICE)["canvas"].tolist() == after


ROWS, COUNT = (symbol(name) for name in ("rows", "count"))
READ = {"canvas": Spec((ROWS,), "int64"), "rows": Spec((COUNT,), "int64")}
WRITTEN = {"token": READ["rows"], **READ, "taken": Spec((COUNT,), "uint8")}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("read_canvas", {"canvas": Spec((ROWS, 1), "int64")}, r"operand 'canvas' is .*, expected int64\[R\]"),
        ("read_canvas", {"rows": Spec((COUNT,), "int32")}, r"operand 'rows' is .*, expected int64\[count\]"),
        ("write_canvas", {"token": Spec((ROWS,), "int64")}, r"operand 'rows' is .*, expected int64\[rows\]"),
        ("write_canvas", {"taken": Spec((COUNT,), "int64")}, r"operand 'taken' is .*, expected uint8\[count\]"),
    ],
)
def test_contracts_refuse(name: str, change: dict[str, Any], message: str) -> None:
    given, attrs = (READ, {"open_id": 3}) if name == "read_canvas" else (WRITTEN, {})
    with pytest.raises(GraphError, match=message):
        operator(name).work(**{**given, **change}, **attrs)
