"""resume_rows: on the CPU and in Triton against plain lists, and what it refuses."""

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

I32 = torch.int32


def drawn(seed: int) -> tuple[Case, dict[str, list[int]]]:
    """Windows of which some rows are kept, in any order, and some are to be decided."""
    rng = random.Random(seed)
    bounds, kept, ends, rows = [0], [], [0], []
    start = 0
    for _ in range(rng.choice([1, 3, 9])):
        window = range(start, start := start + rng.choice([1, 8, 100]))
        kept += rng.sample(window, rng.randint(0, len(window)))
        rows += sorted(rng.sample(window, rng.randint(0, len(window))))
        bounds.append(len(kept))
        ends.append(len(rows))
    size = max(len(kept) + rng.choice([0, 3]), 1)
    listed = kept + [rng.randrange(start) for _ in range(size)]
    positions = [rng.randrange(1000) for _ in range(start)]
    asked = [row for row, token in enumerate(rows) if token in kept]
    most = max(len(asked) + rng.choice([0, 5]), 1)
    padding = rng.choice([0, 4])
    given = {
        "chosen": torch.tensor(listed), "bounds": torch.tensor(bounds, dtype=I32),
        "positions": torch.tensor(positions, dtype=I32),
        "rows": torch.tensor([*rows, *[rows[-1] if rows else 0] * padding], dtype=torch.int64),
        "cu_rows": torch.tensor(ends, dtype=I32),
    }  # fmt: skip
    filled = [0] * (most - len(asked))
    expected = {
        "kept": listed[:size],
        "kept_positions": [positions[token] for token in listed[:size]],
        "decided": [kept.index(rows[row]) for row in asked] + filled,
        "asked": asked + filled,
        "cu_decided": [sum(row < end for row in asked) for end in ends],
        "place": [asked.index(row) if row in asked else -1 for row in range(len(rows) + padding)],
    }
    outputs = {
        name: torch.empty(len(values), dtype=torch.int64 if name in ("kept", "decided", "asked") else I32)
        for name, values in expected.items()
    }
    return Case("resume_rows", given, outputs, {"size": size, "most": most}), expected


@pytest.mark.parametrize("seed", range(24))
def test_on_the_cpu(seed: int) -> None:
    case, expected = drawn(seed)
    assert {name: value.tolist() for name, value in case.reference().items()} == expected
    case.launch()
    assert {name: value.tolist() for name, value in case.outputs.items()} == expected
    check_allocates_nothing(case)


@triton_test
@pytest.mark.parametrize("seed", range(24))
def test_in_triton(seed: int) -> None:
    case, expected = drawn(seed)
    found = run(case, DEVICE)
    assert {name: found[name].tolist() for name in expected} == expected


ROWS, SIZE, SEQS, TOKENS, MOST = (symbol(name) for name in "mcbtd")
GIVEN: dict[str, Any] = {
    "chosen": Spec((TOKENS,), "int64"), "bounds": Spec((SEQS + 1,), "int32"), "positions": Spec((TOKENS,), "int32"),
    "rows": Spec((ROWS,), "int64"), "cu_rows": Spec((SEQS + 1,), "int32"),
}  # fmt: skip


def test_shapes_follow_from_operands() -> None:
    found = operator("resume_rows").work(**GIVEN, size=SIZE, most=MOST).outputs
    shapes = [spec.shape for spec in found]
    assert shapes == [(SIZE,), (SIZE,), (MOST,), (MOST,), (SEQS + 1,), (ROWS,)]


@pytest.mark.parametrize(("changed", "message"), [
    ({"chosen": Spec((TOKENS,), "int32")}, r"operand 'chosen' is .*, expected int64\[t\]"),
    ({"rows": Spec((ROWS, 2), "int64")}, r"operand 'rows' is .*, expected int64\[M\]"),
    ({"positions": Spec((TOKENS,), "int64")}, r"operand 'positions' is .*, expected int32\[t\]"),
    ({"bounds": Spec((SEQS + 1,), "int64")}, r"operand 'bounds' is .*, expected int32\[b \+ 1\]"),
    ({"cu_rows": Spec((SEQS,), "int32")}, r"operand 'cu_rows' is .*, expected int32\[b \+ 1\]"),
])  # fmt: skip
def test_operands_that_do_not_fit_are_refused(changed: dict[str, Spec], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        operator("resume_rows").work(**{**GIVEN, **changed}, size=SIZE, most=MOST)
