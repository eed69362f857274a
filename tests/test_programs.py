"""Programs that users register: compiled, run, and compared with plain PyTorch."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusion_gemma_toy as toy
import pytest
import torch
from diffusion_gemma_kernels import KERNELS
from torch import Tensor

import mosaic
from mosaic import Implementation, Operator, Program
from mosaic.errors import BucketOverflow, CheckpointError, DoesNotFit, GraphError, UnknownName, UsageError
from mosaic.runtime import engine
from mosaic.runtime.compiled_program import CompiledProgram
from mosaic.runtime.page_pool import PAGE_BYTES

WIDTH = 64


def _keep(*, x: Tensor, limit: Tensor, kept: Tensor, count: Tensor, scratch: Tensor | None = None) -> None:
    """Copy the rows whose first column is above the limit to the front; unused rows after them are NaN."""
    chosen = x[x[:, 0] > limit]
    kept.fill_(torch.nan)
    kept[: len(chosen)] = chosen
    count.fill_(len(chosen))


KEEP = Operator(
    name="keep_rows", operands="x@:a[T, F] limit:a[1] -> kept@:a[T, F] count:i64[1]",
    implementations=(Implementation(backend="cpu", kernel=_keep),),
)  # fmt: skip


def _double(*, x: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    torch.add(x, x, out=y)


DOUBLE = Operator(
    name="double", operands="x:a[*T] -> y:a[*T]",
    implementations=(Implementation(backend="cpu", kernel=_double),),
)  # fmt: skip


def prefix(g: Any) -> None:
    """Two products that need room, then the rows that are kept."""
    n = g.dim("tokens")
    x = g.input("x", (n, WIDTH), "float32")
    h = g.add_op("linear", x, g.weight("up", (4 * WIDTH, WIDTH), "float32"))
    y = g.add_op("linear", h, g.weight("down", (WIDTH, 4 * WIDTH), "float32"))
    limit = g.input("limit", (1,), "float32")
    g.add_op(KEEP, y, limit, out=(g.carry("kept", (n, WIDTH), "float32"), g.output("count", (1,), "int64")))


def suffix(g: Any) -> None:
    """The second graph over the kept rows, in one of several sizes."""
    g.dim("tokens")
    rows = g.dim("rows", at_most="tokens")
    kept = g.carry("kept", (rows, WIDTH), "float32")
    h = g.add_op("linear", kept, g.weight("up", (4 * WIDTH, WIDTH), "float32"))
    y = g.add_op("linear", h, g.weight("last", (WIDTH, 4 * WIDTH), "float32"))
    g.add_op(DOUBLE, y, out=g.output("y", (rows, WIDTH), "float32"))


def bucketed(buckets: tuple[int, ...] = (4, 16, 64)) -> Program:
    program = Program("pruned")
    program.add_phase("prefix", prefix)
    program.add_phase("suffix", suffix)
    program.add_bucketed_step("step", "prefix", "suffix", count="count", dim="rows", buckets=buckets)
    return program


def rows_of(seed: int, count: int, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def limit_of(y: Tensor, count: int) -> Tensor:
    """A limit that the first column of `count` rows exceeds."""
    found = y[:, 0].sort(descending=True).values
    return ((found[count - 1] + found[count]) / 2).reshape(1)


def test_a_step_of_two_graphs_runs_at_three_buckets() -> None:
    """Under poison; the carry lies at one address in all of them, and what the prefix left is what the suffix reads."""
    with mosaic.compile(bucketed(), debug="poison") as program:
        weights, seen, addresses = program.weights(), set(), set()
        for seed, count in enumerate((3, 12, 40, 4, 16, 5, 17, 1)):
            x = rows_of(seed, 60)
            y = x @ weights["up"].T @ weights["down"].T
            limit = limit_of(y, count)
            found = program("step", x=x, limit=limit)
            size = program.current.dims["rows"]
            assert size == min(b for b in (4, 16, 60) if b >= count) == len(found["y"])
            kept = y[y[:, 0] > limit]
            torch.testing.assert_close(program.carry("kept")[:count], kept)
            torch.testing.assert_close(found["y"][:count], 2 * (kept @ weights["up"].T @ weights["last"].T))
            seen.add(size)
            addresses.add(program.carry("kept").data_ptr())
            record = next(b for b in program.current.document["buffers"] if b["name"] == "kept")
            assert (record["pool"], record["offset"]) == ("carry/kept", 0)
            assert program.current.check() == ("double",)
        assert seen == {4, 16, 60} and len(addresses) == 1
        changes = program.workspace.changes()
        for seed, count in enumerate((40, 3, 12, 40, 3)):
            x = rows_of(seed, 60)
            program("step", x=x, limit=limit_of(x @ weights["up"].T @ weights["down"].T, count))
        assert program.workspace.changes() == changes  # sizes that alternate map nothing


def looked_at(g: Any) -> None:
    """The prefix, which reads what it hands on."""
    prefix(g)
    h = g.add_op(DOUBLE, g["kept"])
    g.add_op(DOUBLE, h, out=g.output("fourfold", (g.dim("tokens"), WIDTH), "float32"))


def test_a_carry_that_is_read_after_it_was_written_is_handed_on() -> None:
    program = Program("pruned")
    program.add_phase("prefix", looked_at)
    program.add_phase("suffix", suffix)
    program.add_bucketed_step("step", "prefix", "suffix", count="count", dim="rows", buckets=(4, 64))
    with mosaic.compile(program, debug="poison") as compiled:
        for seed in range(3):
            x = rows_of(seed, 40)
            weights = compiled.weights()
            y = x @ weights["up"].T @ weights["down"].T
            limit = limit_of(y, 30)
            kept = y[y[:, 0] > limit]
            found = compiled("prefix", x=x, limit=limit)
            torch.testing.assert_close(found["fourfold"][:30], 4 * kept)
            assert set(compiled.current.check()) == {"double", "keep_rows"}
            found = compiled("step", x=x, limit=limit)
            torch.testing.assert_close(found["y"][:30], 2 * (kept @ weights["up"].T @ weights["last"].T))


def test_a_count_beyond_the_largest_bucket_is_an_error() -> None:
    with mosaic.compile(bucketed((4, 16))) as program:
        with pytest.raises(
            BucketOverflow, match=r"'prefix' computed count = 60, the largest bucket of 'rows' is 16"
        ) as at:
            program("step", x=rows_of(0, 60), limit=torch.tensor([-1e9]))
        assert (at.value.count, at.value.buckets) == (60, (4, 16))
        assert len(program("step", x=rows_of(0, 60), limit=torch.tensor([1e9]))["y"]) == 4


def test_a_carry_is_read_after_it_was_written_and_within_what_was() -> None:
    with mosaic.compile(bucketed()) as program:
        with pytest.raises(UsageError, match="run the step that writes it first"):
            program.run("suffix", dims={"tokens": 60, "rows": 4})
        program("prefix", x=rows_of(0, 8), limit=torch.tensor([-1e9]))
        kept = program.carry("kept").clone()
        for rows in (8, 8, 4, 4):
            found = program.run("suffix", dims={"tokens": 60, "rows": rows})["y"]
            up, last = program.weights()["up"], program.weights()["last"]
            torch.testing.assert_close(found, 2 * (kept[:rows] @ up.T @ last.T))
        with pytest.raises(UsageError, match=r"reads 4,096 bytes of the carry 'kept', of which .* left 1,024"):
            program.run("suffix", dims={"tokens": 60, "rows": 16})


def test_buckets_are_planned_before_anything_runs() -> None:
    with mosaic.compile(bucketed((4, 4096))) as program:
        most = program.plan("step", tokens=5000)
        assert most.total_bytes == max(
            program.plan("prefix", tokens=5000).total_bytes,
            *(program.plan("suffix", tokens=5000, rows=rows).total_bytes for rows in (4, 4096)),
        )
    with mosaic.compile(bucketed((4, 4096)), budget=most.total_bytes - 1) as program:
        with pytest.raises(DoesNotFit, match=r"needs .*, the budget is"):
            program("step", x=rows_of(0, 5000), limit=torch.tensor([1e9]))
        assert program.executors == ()
    with mosaic.compile(bucketed((4, 4096)), budget=most.total_bytes) as program:
        program("step", x=rows_of(0, 5000), limit=torch.tensor([1e9]))
        assert program.memory().committed["carry/kept"] < 5000 * WIDTH * 4 + PAGE_BYTES


def other(g: Any) -> None:
    """A step that has nothing to do with the carry."""
    m = g.dim("more")
    g.add_op(
        "linear", g.input("z", (m, WIDTH), "float32"), g.weight("up", (4 * WIDTH, WIDTH), "float32"),
        out=g.output("u", (m, 4 * WIDTH), "float32"),
    )  # fmt: skip


def test_what_fits_by_its_plan_runs_after_a_carry_of_another_step() -> None:
    """The carry's memory goes back where a step that does not declare it needs the room, and its value is gone then."""
    program = bucketed((4, 16))
    program.add_phase("other", other)
    with mosaic.compile(program) as free:
        budget = free.plan("prefix", tokens=5000).total_bytes
        rows = max(m for m in range(1000, 10000, 50) if free.plan("other", more=m).total_bytes <= budget)
        assert free.plan("other", more=rows).total_bytes + 5000 * WIDTH * 4 > budget
    with mosaic.compile(program, budget=budget) as compiled:
        for _ in range(2):
            compiled("prefix", x=rows_of(0, 5000), limit=torch.tensor([0.0]))
            assert compiled.memory().committed["carry/kept"] >= 5000 * WIDTH * 4
            z = rows_of(1, rows)
            torch.testing.assert_close(compiled("other", z=z)["u"], z @ compiled.weights()["up"].T)
            assert compiled.memory().committed["carry/kept"] == 0
            assert sum(compiled.memory().committed.values()) <= budget
            with pytest.raises(UsageError, match="run the step that writes it first"):
                compiled.run("suffix", dims={"tokens": 60, "rows": 4})


def test_a_step_that_is_refused_changes_nothing() -> None:
    """Its own memory would have taken the carry's place; nothing is committed for it, and the carry holds its value."""
    program = bucketed((4, 16))
    program.add_phase("other", other)
    with mosaic.compile(program) as free:
        budget = free.plan("prefix", tokens=5000).total_bytes
        rows = max(m for m in range(1000, 10000, 50) if free.plan("other", more=m).total_bytes <= budget)
    with mosaic.compile(program, budget=budget) as compiled:
        compiled("prefix", x=rows_of(0, 5000), limit=torch.tensor([0.0]))
        plan, kept, changes = compiled.current, compiled.carry("kept").clone(), compiled.workspace.changes()
        for inputs in ({"z": rows_of(1, rows).double()}, {"z": rows_of(1, rows), "limit": torch.tensor([0.0])}):
            with pytest.raises((UsageError, UnknownName)):
                compiled.run("other", inputs)
            assert compiled.current is plan and compiled.workspace.changes() == changes
            assert torch.equal(compiled.carry("kept").nan_to_num(), kept.nan_to_num())
        found = compiled.run("suffix", dims={"tokens": 5000, "rows": 16})["y"]
        weights = compiled.weights()
        torch.testing.assert_close(found, 2 * (kept[:16] @ weights["up"].T @ weights["last"].T))


def test_what_is_trimmed_is_what_the_last_step_does_not_need() -> None:
    """Before any step that is all but the weights; afterwards other steps' carries too, whose values are gone."""
    program = bucketed((4, 16))
    program.add_phase("other", other)
    with mosaic.compile(program) as compiled:
        compiled.trim()
        loaded = compiled.memory().committed
        assert loaded["weights"] and sum(loaded.values()) == loaded["weights"]
        compiled("prefix", x=rows_of(0, 5000), limit=torch.tensor([0.0]))
        compiled("other", z=rows_of(1, 10))
        before = compiled.memory()
        assert before.committed["carry/kept"] >= 5000 * WIDTH * 4 and "carry/kept" not in compiled.current.pools
        compiled.trim()
        after = compiled.memory()
        assert after.committed == after.planned and after.committed.keys() == before.committed.keys()
        with pytest.raises(UsageError, match="run the step that writes it first"):
            compiled.run("suffix", dims={"tokens": 60, "rows": 4})


def test_executors_are_kept_for_the_latest_sizes_and_outputs_for_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KEPT_EXECUTORS", 8)
    program = Program("other")
    program.add_phase("other", other)
    with mosaic.compile(program) as compiled:
        up = compiled.weights()["up"]
        for rows in (*range(1, 12), 3, 11):
            torch.testing.assert_close(compiled(z=torch.ones(rows, WIDTH))["u"], torch.ones(rows, WIDTH) @ up.T)
        assert len(compiled.executors) == 8
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        first = compiled(z=torch.ones(3, WIDTH))["u"]
        kept = first.clone()
        second = compiled(z=torch.zeros(3, WIDTH))["u"]
        done.set()
        thread.join()
        assert torch.equal(first, kept) and not second.any()


@pytest.mark.parametrize(("changed", "message"), [
    ({"count": "missing"}, "'prefix' has no output 'missing' of one integer"),
    ({"dim": "width"}, "'suffix' has no dim 'width'"),
    ({"buckets": (4, 4)}, "buckets must be ascending"),
    ({"buckets": ()}, "buckets must be ascending"),
    ({"suffix": "other"}, "unknown phase 'other'"),
    ({"name": "prefix"}, "has a phase or step 'prefix' already"),
])  # fmt: skip
def test_a_bucketed_step_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    program = Program("p")
    program.add_phase("prefix", prefix)
    program.add_phase("suffix", suffix)
    asked = {"name": "step", "prefix": "prefix", "suffix": "suffix", "count": "count", "dim": "rows", "buckets": (4,)}
    with pytest.raises((GraphError, UnknownName), match=message):
        program.add_bucketed_step(**{**asked, **changed})
        program.graph("suffix")


def wide(g: Any) -> None:
    shape = (g.dim("n"), 8)
    g.add_op(DOUBLE, g.carry("kept", shape, "float32"), out=g.output("y", shape, "float32"))


def test_a_carry_of_other_rows_is_refused() -> None:
    program = bucketed()
    program.add_phase("wide", wide)
    program.add_bucketed_step("more", "prefix", "wide", count="count", dim="n", buckets=(4,))
    with pytest.raises(GraphError, match="only the number of rows may differ"):
        program.graph("wide")


# --- states -----------------------------------------------------------------------------------------------------------

NAMES = ("kv", "summary")


def two_states(g: Any) -> None:
    """Store new rows into each state, and read all that there are."""
    for name in NAMES:
        new, rows = g.dim(f"{name}_new"), g.dim(f"{name}_rows")
        state = g.state(name, (rows, WIDTH), "float32")
        k, v = (g.input(f"{name}_{part}", (new, WIDTH // 2), "float32") for part in "kv")
        extents, counts = g.input(f"{name}_extents", (new, 4), "int64"), g.input(f"{name}_counts", (2,), "int32")
        positions = g.input(f"{name}_positions", (new,), "int32")
        g.add_op("kv_store", k, v, state, extents, counts, counts, positions, layer=0, head_size=WIDTH // 2)
        read = g.input(f"{name}_read", (rows,), "int64")
        g.add_op("gather_rows", state, read, out=g.output(f"{name}_found", (rows, WIDTH), "float32"))


def test_two_states_keep_their_rows_while_they_grow() -> None:
    """Under poison: contents as naive code has them, addresses where they were, new rows zero, steps refused in between."""
    held = {name: torch.zeros(1, WIDTH) for name in NAMES}
    generator = torch.Generator().manual_seed(0)
    with mosaic.compile(two_states, debug="poison") as program:
        addresses: dict[str, int] = {}
        for step, sizes in enumerate(((1, 7), (900, 7), (900, 2000), (40, 2000), (900, 2001), (2500, 3))):
            inputs: dict[str, Tensor] = {}
            one = {f"{name}_{part}": rows_of(0, 1, WIDTH // 2) for name in NAMES for part in "kv"}
            with pytest.raises(UsageError, match="needs the inputs"):
                program.run("step", one, dims={f"{name}_rows": 1 for name in NAMES})
            for name, rows in zip(NAMES, sizes, strict=True):
                old = held[name][:rows]
                held[name] = torch.cat([old, torch.zeros(rows - len(old), WIDTH)])
                slots = torch.randperm(rows, generator=generator)[: max(1, rows // 3)]
                held[name][slots] = new = rows_of(step, len(slots))
                places = torch.arange(len(slots))  # each in an extent of its own
                extents = torch.stack([slots, torch.ones_like(slots), places, torch.zeros_like(slots)], 1)
                inputs |= {f"{name}_k": new[:, : WIDTH // 2], f"{name}_v": new[:, WIDTH // 2 :]}
                inputs |= {f"{name}_extents": extents, f"{name}_positions": places.int()}
                inputs[f"{name}_counts"] = torch.tensor([0, len(slots)], dtype=torch.int32)
                inputs[f"{name}_read"] = torch.arange(rows)
            found = program.run("step", inputs)
            for name in NAMES:
                assert torch.equal(found[f"{name}_found"], held[name])
                assert torch.equal(program.state(name), held[name])
                assert program.state(name).data_ptr() == addresses.setdefault(name, program.state(name).data_ptr())
            if step == 3:
                program.trim()
                committed = program.memory().committed
                assert all(committed[f"state/{name}"] == program.current.pools[f"state/{name}"] for name in NAMES)
        assert program.current.check() == ()


# --- a model of one's own -----------------------------------------------------------------------------------------------


def readme_blocks() -> tuple[str, str]:
    """The model that the README shows a part of, without its plan, and the README's code that runs it."""
    root = Path(__file__).parent.parent
    text = (root / "README.md").read_text(encoding="utf-8")
    run = text.split("<!-- run-custom-model:begin -->")[1].split("<!-- run-custom-model:end -->")[0]
    model = (root / "examples" / "custom_model.py").read_text(encoding="utf-8")
    return model.split("plan = mosaic.plan_graph(")[0], run.split("```python")[1].split("```")[0]


def plain_step(weights: dict[str, Tensor], names: dict[str, Any], ids: Tensor, rows: Tensor) -> Tensor:
    """Logits of the rows, in float32 from the formulas."""
    w, head = {name: value.float() for name, value in weights.items()}, names["HEAD"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def turned(x: Tensor, frequencies: Tensor) -> Tensor:
        angles = torch.arange(len(x)).float()[:, None] * frequencies
        a, b = x.view(len(x), -1, head).chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    x = w["embedding"][ids]
    for i in range(names["LAYERS"]):
        p = f"layers.{i}/"
        h = norm(x, w[p + "attention_norm"])
        q, k, v = (h @ w[f"{p}{name}_proj"].T for name in "qkv")
        q, k = (turned(t, w[p + "inv_freq"]) for t in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head**-0.5
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.view(len(x), -1, head)).reshape(len(x), -1)
        x = x + y @ w[p + "o_proj"].T
        h = norm(x, w[p + "ffn_norm"])
        x = x + (torch.nn.functional.silu(h @ w[p + "gate_proj"].T) * (h @ w[p + "up_proj"].T)) @ w[p + "down_proj"].T
    return norm(x[rows], w["final_norm"]) @ w["embedding"].T


def test_the_model_of_the_readme_ends_with_a_step() -> None:
    model, run = readme_blocks()
    names: dict[str, Any] = {}
    exec(compile(model, "README.md", "exec"), names)
    shown: list[Any] = []
    names["print"] = lambda *values: shown.extend(value.clone() for value in values)
    exec(compile(run, "README.md", "exec"), names)
    token, entropy = shown
    rows = torch.tensor([3, 5, 8, 13, 21])
    with mosaic.compile(names["denoising_step"], budget="64MiB", dims={"seqs": 1, "span": 24}, debug="poison") as again:
        given = {name: value.clone() for name, value in again.weights().items()}
    given = {name: value if value.dtype == torch.float32 else 4 * value for name, value in given.items()}
    inputs = {
        "token_ids": torch.arange(24), "positions": torch.arange(24, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 24], dtype=torch.int32), "rows": rows,
    }  # fmt: skip
    weights = {name: value for name, value in given.items() if not name.endswith("inv_freq")}
    for scale in (1, 4):
        own = {name: value if value.dtype == torch.float32 else value * scale / 4 for name, value in given.items()}
        bound = {name: own[name] for name in weights}
        with mosaic.compile(
            names["denoising_step"], weights=bound, budget="64MiB", dims={"seqs": 1, "span": 24}, debug="poison"
        ) as compiled:
            found = {name: value.clone() for name, value in compiled.run("step", inputs).items()}
        logits = plain_step(own, names, inputs["token_ids"], rows)
        assert torch.equal(found["token"], logits.argmax(-1))
        torch.testing.assert_close(found["maximum"], logits.max(-1).values, rtol=0.02, atol=0.02)
        torch.testing.assert_close(found["logsumexp"], logits.logsumexp(-1), rtol=0.01, atol=0.01)
        if scale == 1:
            assert torch.equal(found["token"], token) and torch.equal(found["entropy"], entropy)


# --- what is asked wrongly ----------------------------------------------------------------------------------------------


def small(g: Any) -> None:
    n, m = g.dim("tokens"), g.dim("more")
    x, y = g.input("x", (n, 2), "float32"), g.input("y", (n, 2), "float32")
    h = g.add_op("linear", x, g.weight("w", (2, 2), "float32", tensor="a.weight"))
    g.add_op(DOUBLE, h, out=g.output("z", (n, 2), "float32"))
    g.add_op("linear", y, g.weight("v", (2, 2), "float32"), out=g.output("u", (n, 2), "float32"))
    g.add_op(DOUBLE, g.input("s", (m + 1,), "float32"), out=g.output("t", (m + 1,), "float32"))


SMALL = {"x": torch.ones(3, 2), "y": torch.ones(3, 2), "s": torch.ones(6)}
EYE = torch.eye(2)


def test_weights_go_by_their_tensor_or_their_name() -> None:
    for key in ("a.weight", "w"):
        with mosaic.compile(small, weights={key: 3 * EYE, "v": EYE}, dims={"more": 5}) as program:
            assert program.run("step", SMALL)["z"].tolist() == [[6.0, 6.0]] * 3
            assert program.run("step", SMALL, dims={"more": 5})["u"].tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(("weights", "message"), [
    ({"v": EYE}, r"weights: missing: 'a.weight'\.$"),
    (dict.fromkeys("rstu", EYE), r"used by nothing: 'r', 's', 't' and 1 more\.$"),
    (dict.fromkeys("rst", EYE), r"used by nothing: 'r', 's', 't'\.$"),
    ({"v": EYE, "w": EYE, "q": EYE}, r"weights: used by nothing: 'q'\.$"),
    ({"q": EYE}, r"weights: missing: 'a.weight', 'v'; used by nothing: 'q'"),
    ({"v": EYE, "w": torch.eye(3)}, r"'a.weight': expected float32 \[2, 2\], found float32 \[3, 3\]"),
    ({"v": EYE.half(), "w": EYE}, r"'v': expected float32 \[2, 2\], found float16 \[2, 2\]"),
])  # fmt: skip
def test_weights_that_are_not_the_programs_are_refused(weights: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        mosaic.compile(small, weights=weights)


@pytest.mark.parametrize(("changed", "dims", "message"), [
    ({}, {}, "the step 'step' has dims that follow from no input's shape: 'more'. Give them by"),
    ({"x": None}, {"more": 5}, "needs the input x"),
    ({"x": torch.ones(4, 2)}, {"more": 5}, "the dim 'tokens' is 4 by input 'x' and 3 by input 'y'"),
    ({}, {"more": 5, "tokens": 9}, "the dim 'tokens' is 9 by dims and 3 by input 'x'"),
    ({"x": torch.ones(3)}, {"more": 5}, r"input 'x' of 'step': expected 2 axes, got \[3\]"),
    ({"x": torch.ones(3, 4)}, {"more": 5}, r"expected float32 \[3, 2\], got float32 \[3, 4\]"),
    ({"x": torch.ones(3, 2).long()}, {"more": 5}, r"expected float32 \[3, 2\], got int64 \[3, 2\]"),
    ({"q": torch.ones(3)}, {"more": 5}, "unknown input 'q'"),
])  # fmt: skip
def test_inputs_that_do_not_make_a_step_are_refused(
    changed: dict[str, Any], dims: dict[str, int], message: str
) -> None:
    inputs = {name: value for name, value in {**SMALL, **changed}.items() if value is not None}
    with mosaic.compile(small) as program, pytest.raises(UsageError, match=message):
        program.run("step", inputs, dims=dims)


def test_what_is_no_step_and_no_program_is_refused() -> None:
    with mosaic.compile(bucketed()) as program:
        with pytest.raises(UsageError, match="several steps, name one: prefix, suffix, step"):
            program(x=rows_of(0, 3))
        with pytest.raises(UnknownName, match="unknown step 'prefx'"):
            program.plan("prefx")
        with pytest.raises(UsageError, match="computes 'rows': leave it out"):
            program.run("step", {}, dims={"rows": 4})
        with pytest.raises(UsageError, match="no state 'kv' holds anything"):
            program.state("kv")
    with pytest.raises(mosaic.MosaicError, match="closed"):
        program.plan("prefix", tokens=4)
    with pytest.raises(UsageError, match="has no phase"):
        mosaic.compile(Program("empty"))
    with pytest.raises(UsageError, match="a callable that registers"):
        mosaic.compile(3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="weights and dims are those of a program"):
        mosaic.compile("llada-8b", weights={})  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="leave dtype, max_tokens, threads, batch_invariant and warm out"):
        mosaic.compile(small, dtype="float32")  # type: ignore[call-overload]


# --- two modes, three kinds of state and fourteen operators -------------------------------------------------------------

TINY = {
    "HIDDEN": 32, "DENSE": 24, "EXPERTS": 4, "TOP_K": 2, "EXPERT": 8, "VOCABULARY": 2048, "WINDOW": 15, "DTYPE": "float32",
    "LAYERS": tuple(
        replace(layer, heads=4, kv_heads=2, head_size=size, window=layer.window and 16)
        for layer, size in zip(toy.LAYERS, (8, 16), strict=True)
    ),
}  # fmt: skip
CHUNKED = {"canvas_rows": 32, "vocabulary": 1024, "encoder_proj": None, "decoder_ffn": None, "self_conditioning": 64}


def encoded(program: CompiledProgram, parts: tuple[int, ...]) -> None:
    """Commit tokens, as many at a time."""
    before, ids = 0, torch.arange(sum(parts)) * 37 % 2048
    for count in parts:
        end = before + count
        inputs = {
            "token_ids": ids[before:end], "positions": torch.arange(before, end, dtype=torch.int32),
            "lengths": torch.tensor([count, before], dtype=torch.int32),
        }  # fmt: skip
        program.run("encode", inputs, dims={"kv_tokens": end, "window_tokens": min(end, 15)})
        before = end


def denoised(program: CompiledProgram, before: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """One step of a canvas of 80 tokens behind what is committed, and the state that it leaves."""
    inputs = {
        "token_ids": torch.full((80,), tokens), "positions": torch.arange(before, before + 80, dtype=torch.int32),
        "lengths": torch.tensor([80, before], dtype=torch.int32), "temperature": torch.tensor([0.5]),
        "seed": torch.tensor([seed, 1]),
    }  # fmt: skip
    found = program.run("denoise", inputs, dims={"kv_tokens": before, "window_tokens": min(before, 15)})
    return {**{name: value.clone() for name, value in found.items()}, "soft": program.state("soft_embedding").clone()}


def test_diffusion_gemma_runs_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under poison: a prompt committed in parts leaves the states of one committed at once, chunks change nothing, and the
    second step is conditioned on the first."""
    for name, value in TINY.items():
        monkeypatch.setattr(toy, name, value)
    weights: dict[str, Tensor] = {}
    seen: list[dict[str, Tensor]] = []
    for parts, config in (((20,), None), ((12, 8), CHUNKED), ((5, 6, 9), {})):
        with mosaic.compile(toy.program(), dims={"canvas": 80}, debug="poison", config=config) as program:
            own = program.weights()
            if not weights:
                weights = {name: 8 * value for name, value in own.items()}
            for name, value in own.items():
                if "inv_freq" not in name:
                    value.copy_(weights[name])
            encoded(program, parts)
            kept = {name: program.state(name).clone() for name in STATES}
            first = denoised(program, 20, 7, 3)
            second = denoised(program, 20, 7, 3)
            seen.append({**kept, **first, **{f"{name} again": value for name, value in second.items()}})
            assert config is not CHUNKED or program.current.config["canvas_rows"] == 32
            assert set(program.current.check()) <= KERNELS.keys()
        logits_bound = torch.log(torch.tensor(2048.0))
        assert bool(((first["entropy"] >= 0) & (first["entropy"] <= logits_bound)).all())
        assert not torch.equal(first["soft"], second["soft"])
    for other in seen[1:]:
        for name, value in seen[0].items():
            torch.testing.assert_close(other[name], value, rtol=2e-3, atol=2e-4)


STATES = tuple(f"layers.{i}/committed_{what}" for i in range(2) for what in ("keys", "values"))
