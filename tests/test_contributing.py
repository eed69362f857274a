"""The walks of CONTRIBUTING.md, held to what they say: their examples are all that is added to a copy of the library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^ *```(python|diff)\n( *# (\S+)\n.*?)^ *```$", re.MULTILINE | re.DOTALL)

USES = """
import sys, warnings
import numpy as np, torch
import mosaic
from mosaic.kernels import load as kernel
from mosaic.planner.offsets import Problem, solve, validate
from mosaic.registrar.operators import operator
from mosaic.testing import verify_operator

assert mosaic.__file__.startswith(sys.argv[1])
PLAIN = {
    "model_type": "plain", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 512, "torch_dtype": "float32",
}

# an operator: its record, its kernels, the checker's letters
added = operator("relu_squared")
assert verify_operator(added, {"T": 7, "F": 24}, loops=("T", "F")) == ("cpu",)
x = torch.randn(5, 40)
for backend in sys.argv[2:]:
    y = torch.empty(5, 40)
    kernel("relu_squared", backend).launch(x=x, y=y)
    torch.testing.assert_close(y, kernel("relu_squared").reference(x=x))


def squares(g):
    x = g.input("x", (g.dim("tokens"), 16), "float32")
    with g.chunk("rows", over=g.dim("tokens")):
        g.add_op("relu_squared", x, out=g.output("y", x.shape, "float32"))


plan = mosaic.plan_graph(squares, dims={"tokens": 9}, device="cpu")
assert plan.check() == (), plan.check()  # no operator that the checker cannot verify

tokens, order = torch.arange(12) * 7 % 250, []
with mosaic.compile(PLAIN, device="cpu") as model:  # of a family that was added
    # a way of attention, chosen by the configuration
    logits = {}
    for way in ("together", "keys_first"):
        step = model(tokens, masked=[3, 7], logits_for=range(12), config={"attention": way})
        logits[way] = step.logits.clone()
        assert step.plan.config["attention"] == way
    assert any(op.name.endswith("queries_in") for op in step.plan.records.ops)
    torch.testing.assert_close(logits["keys_first"], logits["together"])

    # an algorithm: it decides from left to right
    (found,) = model.generate(
        tokens[:4], algorithm="leftmost", gen_length=6, on_step=lambda step: order.extend(step.positions.tolist())
    )
    assert order == [4, 5, 6, 7, 8, 9] and found.token_ids.numel() == 6, (order, found)

# a policy, named by a request: the most certain tokens by margin, two a step
block = {**PLAIN, "model_type": "sdar", "block_size": 4, "mask_token_id": 255, "eos_token_id": 254, "pad_token_id": 254}
with mosaic.compile(block, device="cpu") as model:
    decided = []
    ask = dict(gen_length=8, steps=2, remasking="low_confidence_static", stop_at_eos=False, attention="margin")
    (found,) = model.generate(tokens[:4], on_step=lambda step: decided.append(len(step.positions)), **ask)
    assert [count for count in decided if count] == [2, 2, 2, 2], decided
    (other,) = model.generate(tokens[:4], **{**ask, "attention": None})
    assert not torch.equal(found.confidence, other.confidence)  # margins, not probabilities

# the family: read from its config.json, planned, its keys checked
assert mosaic.plan(PLAIN, tokens=64, device="cpu").fits
with warnings.catch_warnings(record=True) as warned:
    mosaic.plan({**PLAIN, "unheard_of": 1}, tokens=64, device="cpu")
assert ["'unheard_of' is unknown to Mosaic's family 'Plain'" in str(warning.message) for warning in warned] == [True]

# a solver: asked by its name, its answer holds
draw = np.random.default_rng(0)
starts = draw.integers(0, 50, 40)
problem = Problem(sizes=draw.integers(1, 99, 40), starts=starts, ends=starts + draw.integers(1, 20, 40))
answer = solve(problem, solver="greedy_by_length")
assert answer.solver == "greedy_by_length" and not validate(problem, answer)
"""


def examples() -> Iterator[tuple[str, str, str]]:
    """The output of the walks: the kind (a file, or changed lines in one), the file, and the text."""
    for kind, block, file in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        yield kind, file, dedent(block).split("\n", 1)[1]


def changed(text: str, diff: str) -> str:
    """Apply the lines that change: runs of lines that stay or go, each with the lines that come after it."""
    for old, new in hunks(diff):
        assert text.count(old) == 1, f"found {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def hunks(diff: str) -> Iterator[tuple[str, str]]:
    """The old and new lines of each change."""
    runs = [(added, list(lines)) for added, lines in groupby(diff.splitlines(), lambda line: line[0] == "+")]
    for (_, before), (_, after) in zip(runs[::2], runs[1::2], strict=True):
        stay = [line[1:] for line in before if line[0] == " "]
        yield "\n".join(line[1:] for line in before) + "\n", "\n".join([*stay, *(line[1:] for line in after)]) + "\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of the library's source with all that the walks add to it."""
    shutil.copytree(ROOT / "mosaic", tmp_path / "mosaic", ignore=shutil.ignore_patterns("checkpoints", "__pycache__"))
    for kind, file, text in examples():
        target = tmp_path / file
        assert target.exists() == (kind == "diff"), file
        target.write_text(changed(target.read_text(), text) if kind == "diff" else text)
    return tmp_path


@pytest.mark.soak
def test_what_the_walks_add_is_all_that_it_takes(library: Path) -> None:
    interpreted = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(library)}
    backends = ["cpu", "cuda"] if find_spec("triton") else ["cpu"]
    ran = subprocess.run(
        [sys.executable, "-c", USES, str(library), *backends],
        cwd=library, env=os.environ | interpreted, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


WALKS = [
    "An operator",
    "A way of attention",
    "A policy",
    "A decoding algorithm",
    "A model family",
    "A solver of offset assignment",
]


def test_a_walk_has_examples_of_the_files_that_it_names() -> None:
    walks = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for walk in (walk for walk in walks if walk.partition("\n")[0] in WALKS):
        named = set(re.findall(r"^(?:\d\. |   )`(mosaic/[\w/]+\.py)`", walk, re.MULTILINE))
        written = {file for _, _, file in BLOCK.findall(walk)}
        new = {file for file in written if not (ROOT / file).exists()}
        assert named == written - new | {re.sub(r"\w+\.py$", "NAME.py", file) for file in new}
        assert new and (written - new or "nothing else lists it" in walk)
