"""One vocabulary: `budget`, `host_budget` and `tokens` mean the same, and are read alike, wherever they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mosaic
from benchmarks.bench.settings import Settings
from mosaic.devices import DEVICES, load_device
from mosaic.errors import UsageError
from mosaic.models import load
from mosaic.planner.request import DEFAULT_MASK_RATIO
from mosaic.registrar.graph import Graph

CONFIG = {
    "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64,
    "mask_token_id": 63, "torch_dtype": "float32",
}  # fmt: skip
MIB = 1 << 20
SIZES = ("24MiB", 24 * MIB, np.int64(24 * MIB), "24 mib", str(24 * MIB))
NO_SIZES = (True, 1.5, float("nan"), "24XB", b"24MiB", [24 * MIB], -1)
NO_BUDGETS = (*NO_SIZES, 0, "0")


def copied(g: Graph) -> None:
    n = g.dim("tokens")
    g.add_op("copy", g.input("x", (n, 8), "float32"), out=g.output("y", (n, 8), "float32"))


def budgets_of_plan(**given: Any) -> tuple[int, int]:
    made = mosaic.plan(CONFIG, tokens=5, device="cpu", **given)
    return made.budget_bytes, made.document["host_budget_bytes"]


def budgets_of_planner(**given: Any) -> tuple[int, int]:
    planner = mosaic.Planner(load(CONFIG), device="cpu", **given)
    return planner.budget_bytes, planner.host_budget_bytes


def budgets_of_graph(**given: Any) -> tuple[int, int]:
    made = mosaic.plan_graph(copied, dims={"tokens": 5}, device="cpu", **given)
    return made.budget_bytes, made.document["host_budget_bytes"]


def budgets_of_program(**given: Any) -> tuple[int, int]:
    program = mosaic.Program("twice", backend="cpu")
    program.add_phase("once", copied)
    made = mosaic.plan_program(program, dims={"tokens": 5}, device="cpu", **given)["once"]
    return made.budget_bytes, made.document["host_budget_bytes"]


def budgets_of_bench(**given: Any) -> tuple[int, int]:
    found = Settings(model="small", device="cpu", contexts=(5,), **given)
    return found.budget or DEVICES["cpu"].memory_bytes, found.host_budget or 0  # type: ignore[return-value]


def budgets_of_compile(**given: Any) -> tuple[int, int]:
    pytest.importorskip("torch")
    with mosaic.compile(CONFIG, **given) as model:
        made = model.plan(5)
    return made.budget_bytes, made.document["host_budget_bytes"]


TAKERS = [
    budgets_of_plan, budgets_of_planner, budgets_of_graph, budgets_of_program, budgets_of_bench, budgets_of_compile
]  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS)
def test_budgets_are_numbers_or_text_everywhere(taker: Any) -> None:
    for size in SIZES:
        assert taker(budget=size, host_budget=size) == (24 * MIB, 24 * MIB)
    assert taker(budget=None, host_budget=None) == (DEVICES["cpu"].memory_bytes, 0)
    assert taker(host_budget=0) == taker(host_budget="0") == (DEVICES["cpu"].memory_bytes, 0)


@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_budget_is_refused_by_name_everywhere(taker: Any) -> None:
    for name, refused in (("budget", NO_BUDGETS), ("host_budget", NO_SIZES)):
        for size in refused:
            with pytest.raises(UsageError, match=f"^{name}"):
                taker(**{name: size})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=3), st.data())
def test_counts_are_numbers_or_text_everywhere(lengths: list[int], data: st.DataObject) -> None:
    """However lengths and rows are written, the request and its plan are the same."""
    kinds = st.sampled_from([int, str, np.int32, np.uint64])
    written = [data.draw(kinds)(length) for length in lengths]
    rows = data.draw(st.integers(1, sum(lengths)))
    plain = mosaic.Request(seq_lens=tuple(lengths), masked=rows)
    forms: list[Any] = [written, tuple(written), np.array(lengths), ",".join(map(str, lengths))]
    for form in forms:
        assert mosaic.Request(seq_lens=form, masked=data.draw(kinds)(rows)) == plain
    made = mosaic.Planner(load(CONFIG), device="cpu").plan(plain)
    assert mosaic.plan(CONFIG, seq_lens=written, masked=str(rows), device="cpu").dims == made.dims
    if len(lengths) == 1:
        assert mosaic.plan(CONFIG, tokens=written[0], masked=rows, device="cpu").dims == made.dims


def test_a_compiled_model_reads_the_same_counts() -> None:
    pytest.importorskip("torch")
    with mosaic.compile(CONFIG, max_tokens="1k") as model:
        plans = [model.plan(tokens, masked=rows) for tokens, rows in (("1k", 5), (1024, "5"), ([np.int64(1024)], 5))]
        assert len({plan.digest for plan in plans}) == 1 and plans[0].dims["tokens"] == 1024
        assert model.plan("1k,7").dims["seqs"] == 2
        for wrong in (None, 0, True, 1.5, "k", [0]):
            with pytest.raises(UsageError):
                model.plan(wrong)
    for wrong in (0, "0", True, -1, 2.5):
        with pytest.raises(UsageError, match="max_tokens"):
            mosaic.compile(CONFIG, max_tokens=wrong)


def test_dims_of_a_graph_are_counts_too() -> None:
    made = mosaic.plan_graph(copied, dims={"tokens": "1k"}, device="cpu")
    assert (
        made.dims == {"tokens": 1024} == mosaic.plan_graph(copied, dims={"tokens": np.int64(1024)}, device="cpu").dims
    )
    with pytest.raises(UsageError, match=r"the dim .tokens. must be an integer, got 1\.5"):
        mosaic.plan_graph(copied, dims={"tokens": 1.5}, device="cpu")  # type: ignore[dict-item]


@pytest.mark.parametrize("ratio", [True, "0.5", 0, -1, 1.5, float("nan"), [0.5], b"1"])
def test_a_mask_ratio_is_a_share(ratio: Any) -> None:
    with pytest.raises(UsageError, match="mask ratio"):
        mosaic.plan(CONFIG, tokens=8, mask_ratio=ratio)


def test_nothing_is_the_default_where_one_is_documented() -> None:
    assert mosaic.plan(CONFIG, tokens=8, device=None).device == "rtx-4090"
    assert mosaic.Planner(load(CONFIG), device=None).device is DEVICES["rtx-4090"] is load_device(None)
    assert mosaic.plan(CONFIG, tokens=8, mask_ratio=None, masked=None).dims["masked"] == 8 * DEFAULT_MASK_RATIO
    pytest.importorskip("torch")
    with mosaic.compile(CONFIG, device=None) as model:
        assert model.plan(5).device == "cpu"


@pytest.mark.parametrize("device", [5, True, ["cpu"], b"cpu", 1.5])
def test_what_is_no_device_is_refused(device: Any) -> None:
    for take in (load_device, lambda d: mosaic.plan(CONFIG, tokens=8, device=d)):
        with pytest.raises(UsageError, match="a device is a profile's name"):
            take(device)
