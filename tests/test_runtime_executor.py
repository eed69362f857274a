"""Executor: hand-written plans with loops, and poison that finds every wrong lifetime."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from operator_tables import scratch_rules
from runtime_helpers import StorageWatch, allocated_bytes
from torch import Tensor

from mosaic.errors import PlanFormatError, UsageError
from mosaic.kernels import load
from mosaic.models import load as load_model
from mosaic.planner import Planner, Request
from mosaic.runtime.executor import Executor
from mosaic.runtime.weights import fill_randomly, weight_views
from mosaic.runtime.workspace import Workspace, torch_dtype

SCRATCH = scratch_rules("cpu")

Slices = Sequence[tuple[str, int, str, int]]


class Naive:
    """Writes a plan document by hand: every buffer has an address of its own, and lives as long as its home."""

    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []
        self.buffers: list[dict[str, Any]] = []
        self.regions: list[dict[str, Any]] = []
        self.carried: dict[str, list[int]] = {}
        self._tops = {"workspace": 0, "weights": 0}

    def buffer(
        self,
        name: str,
        kind: str,
        shape: Sequence[int],
        *,
        dtype: str = "float32",
        region: str | None = None,
        **more: Any,
    ) -> int:
        pool = "weights" if kind == "weight" else "workspace"
        rotate = more.get("rotate", 1)
        size = -(-math.prod(shape) * torch_dtype(dtype).itemsize // 512) * 512 * rotate
        record = {
            "id": len(self.buffers), "name": name, "kind": kind, "pool": pool, "offset": self._tops[pool], "size": size,
            "start": 0, "end": None, "gaps": [], "alias_of": None, "alias_offset": 0, "dtype": dtype,
            "shape": list(shape), "alignment": 512, "region": region, "tensor": name if kind == "weight" else None,
            "rotate": 1, **more,
        }  # fmt: skip
        self._tops[pool] += size
        self.buffers.append(record)
        return len(self.buffers) - 1

    def op(
        self, kernel: str, operands: dict[str, int], *, region: str | None = None, slices: Slices = (), **attrs: Any
    ) -> None:
        shapes = {name: tuple(self.buffers[b]["shape"]) for name, b in operands.items()}
        dtypes = {name: self.buffers[b]["dtype"] for name, b in operands.items()}
        size = SCRATCH[kernel](shapes, dtypes, attrs) if kernel in SCRATCH else 0
        if size:
            operands["scratch"] = self.buffer("scratch", "scratch", (size,), dtype="uint8", region=region)
        self.ops.append(
            {
                "index": len(self.ops), "name": kernel, "kernel": kernel, "stream": "main", "region": region,
                "reads": [], "writes": [], "operands": operands, "attrs": attrs, "inplace": [],
                "slices": [list(entry) for entry in slices], "flops": 0, "bytes": 0,
            }
        )  # fmt: skip

    def region(
        self, name: str, start: int, end: int, *, rows: int, extent: int, parent: str | None = None, dim: str = "tokens"
    ) -> None:
        self.regions.append(
            {
                "name": name, "knob": name, "dim": dim, "extent": extent, "rows": rows, "count": -(-extent // rows),
                "start": start, "end": end, "parent": parent,
            }
        )  # fmt: skip

    def document(self) -> dict[str, Any]:
        homes = {region["name"]: region for region in self.regions}
        for record in self.buffers:
            home = homes.get(record["region"] or "")
            if record["end"] is None:
                record["start"] = home["start"] if home else 0
                record["end"] = home["end"] if home else len(self.ops)
        barriers = [
            {
                "name": name, "region": name, "start": home["start"], "end": home["end"], "inputs": [], "outputs": [],
                "carried": self.carried.get(name, []),
            }
            for name, home in homes.items()
        ]  # fmt: skip
        return {
            "schema": "mosaic.plan/1", "backend": "cpu", "implementations": {}, "edges": [], "regions": self.regions,
            "pools": [{"name": name, "device": "cpu", "capacity": top} for name, top in self._tops.items()],
            "barriers": barriers, "ops": self.ops,
            "buffers": self.buffers, "peak_bytes": self._tops["workspace"], "weights_bytes": self._tops["weights"],
        }  # fmt: skip


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace() as opened:
        opened.resize("workspace", 1 << 21)
        opened.resize("weights", 1 << 20)
        yield opened


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(document: dict[str, Any], workspace: Workspace, inputs: dict[str, Tensor], debug: Any = "poison") -> Executor:
    executor = Executor(document, workspace, debug=debug)
    for name, value in inputs.items():
        executor.inputs[name].copy_(value)
    executor.run()
    return executor


# --- hand-written plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [None, "poison"])
@pytest.mark.parametrize("rows", [1, 3, 4, 11, 16])
def test_a_loop_with_a_short_last_chunk(workspace: Workspace, rows: int, debug: Any) -> None:
    doc = Naive()
    x = doc.buffer("x", "input", (11, 6))
    norm, weight = doc.buffer("norm", "weight", (6,)), doc.buffer("w", "weight", (5, 6))
    y = doc.buffer("y", "output", (11, 5))
    h = doc.buffer("h", "transient", (rows, 6), region="r")
    doc.region("r", 0, 2, rows=rows, extent=11)
    doc.op(
        "rms_norm", {"x": x, "weight": norm, "y": h}, region="r", slices=[("x", 0, "r", 1), ("y", 0, "r", 1)], eps=1e-5
    )
    doc.op("linear", {"x": h, "weight": weight, "y": y}, region="r", slices=[("x", 0, "r", 1), ("y", 0, "r", 1)])
    document = doc.document()
    views = weight_views(document, workspace)
    fill_randomly(views)
    executor = run(document, workspace, {"x": randn(11, 6)}, debug)
    assert sum(call.name == "linear" for call in executor.calls) == -(-11 // rows)
    expected = load("rms_norm").reference(x=randn(11, 6), weight=views["norm"], eps=1e-5) @ views["w"].T
    torch.testing.assert_close(executor.outputs["y"], expected)
    assert executor.buffer("y").data_ptr() == executor.outputs["y"].data_ptr()


def test_nested_loops_over_rows_and_columns(workspace: Workspace) -> None:
    doc = Naive()
    x = doc.buffer("x", "input", (10, 6))
    norm = doc.buffer("norm", "weight", (6,))
    gate, up = doc.buffer("gate", "weight", (7, 6)), doc.buffer("up", "weight", (7, 6))
    y = doc.buffer("y", "output", (10, 7))
    h = doc.buffer("h", "transient", (4, 6), region="outer")
    u = doc.buffer("u", "transient", (4, 3), region="inner")
    doc.region("outer", 0, 4, rows=4, extent=10)
    doc.region("inner", 1, 4, rows=3, extent=7, parent="outer", dim="columns")
    both = [("y", 0, "outer", 1), ("y", 1, "inner", 1)]
    outer = [("x", 0, "outer", 1), ("y", 0, "outer", 1)]
    mine = [("x", 0, "outer", 1), ("weight", 0, "inner", 1), *both]
    doc.op("rms_norm", {"x": x, "weight": norm, "y": h}, region="outer", slices=outer, eps=1e-5)
    doc.op("linear", {"x": h, "weight": up, "y": u}, region="inner", slices=mine)
    doc.op("linear", {"x": h, "weight": gate, "y": y}, region="inner", slices=mine)
    slices = [(o, axis, region, 1) for o in ("gate", "up") for axis, region in ((0, "outer"), (1, "inner"))]
    doc.op("silu_mul", {"gate": y, "up": u}, region="inner", slices=slices)
    document = doc.document()
    views = weight_views(document, workspace)
    fill_randomly(views)
    executor = run(document, workspace, {"x": randn(10, 6)})
    names = [call.name for call in executor.calls if not call.name.startswith("poison")]
    assert names.count("rms_norm") == 3 and names.count("silu_mul") == 9
    normed = load("rms_norm").reference(x=randn(10, 6), weight=views["norm"], eps=1e-5)
    expected = torch.nn.functional.silu(normed @ views["gate"].T) * (normed @ views["up"].T)
    torch.testing.assert_close(executor.outputs["y"], expected)


def test_a_loop_inside_a_loop_over_the_same_rows_divides_them(workspace: Workspace) -> None:
    doc = Naive()
    x, y = doc.buffer("x", "input", (10, 3)), doc.buffer("y", "output", (10, 3))
    w = doc.buffer("w", "weight", (3, 3))
    rows = doc.buffer("rows", "input", (10,), dtype="int64")
    doc.region("outer", 1, 2, rows=4, extent=10)
    doc.region("inner", 1, 2, rows=3, extent=4, parent="outer")
    doc.op("gather_rows", {"x": x, "rows": rows, "y": y})
    slices = [(operand, 0, region, 1) for operand in ("x", "y") for region in ("inner", "outer")]
    doc.op("linear_add", {"x": x, "weight": w, "y": y}, region="inner", slices=slices)
    document = doc.document()
    weight_views(document, workspace)["w"].copy_(torch.eye(3))
    executor = run(document, workspace, {"x": randn(10, 3), "rows": torch.arange(10)})
    torch.testing.assert_close(executor.outputs["y"], 2 * randn(10, 3))  # every row exactly once
    assert [call.arguments["x"].shape[0] for call in executor.calls if call.name == "linear_add"] == [3, 1, 3, 1, 2]


def test_attention_by_chunks_of_queries_knows_its_rows(workspace: Workspace) -> None:
    doc = Naive()
    q, k, v = (doc.buffer(name, "input", (50, 8)) for name in "qkv")
    bounds = doc.buffer("cu_seqlens", "input", (3,), dtype="int32")
    y = doc.buffer("y", "output", (50, 8))
    doc.region("r", 0, 1, rows=16, extent=50)
    attrs = {"head_size": 4, "scale": 0.5}
    operands = {"q": q, "k": k, "v": v, "cu_seqlens": bounds, "y": y}
    doc.op("attention", operands, region="r", slices=[("q", 0, "r", 1), ("y", 0, "r", 1)], **attrs)
    inputs = {name: randn(50, 8, seed=i) for i, name in enumerate("qkv")}
    inputs["cu_seqlens"] = torch.tensor([0, 21, 50], dtype=torch.int32)
    executor = run(doc.document(), workspace, inputs)
    torch.testing.assert_close(executor.outputs["y"], load("attention").reference(**inputs, **attrs))


def test_rows_are_multiplied_by_the_factor_of_a_slice(workspace: Workspace) -> None:
    doc = Naive()
    x, order = doc.buffer("x", "input", (5, 2)), doc.buffer("order", "input", (10,), dtype="int64")
    y = doc.buffer("y", "output", (10, 2))
    doc.region("r", 0, 1, rows=2, extent=5)
    slices = [("x", 0, "r", 1), ("order", 0, "r", 2), ("y", 0, "r", 2)]
    doc.op("moe_gather", {"x": x, "order": order, "y": y}, region="r", slices=slices, top_k=2)
    local = torch.tensor([3, 0, 1, 2, 0, 3, 1, 2, 1, 0])  # assignment ids within each chunk
    executor = run(doc.document(), workspace, {"x": randn(5, 2), "order": local})
    expected = torch.cat([randn(5, 2)[2 * i : 2 * i + 2][local[4 * i : 4 * i + 4] // 2] for i in range(3)])
    assert torch.equal(executor.outputs["y"], expected)


def test_a_double_buffer_alternates(workspace: Workspace) -> None:
    doc = Naive()
    x, y = doc.buffer("x", "input", (8, 2)), doc.buffer("y", "output", (8, 2))
    index = doc.buffer("index", "input", (8,), dtype="int64")
    zero = doc.buffer("zero", "input", (8,), dtype="int64")
    slot = doc.buffer("slot", "transient", (3, 2), region="r", rotate=2)
    doc.region("r", 0, 2, rows=3, extent=8)
    doc.op(
        "gather_rows", {"x": x, "rows": index, "y": slot}, region="r", slices=[("rows", 0, "r", 1), ("y", 0, "r", 1)]
    )
    doc.op(
        "gather_rows",
        {"x": slot, "rows": zero, "y": y},
        region="r",
        slices=[(o, 0, "r", 1) for o in ("x", "rows", "y")],
    )
    inputs = {"x": randn(8, 2), "index": torch.arange(8), "zero": torch.zeros(8, dtype=torch.int64)}
    executor = run(doc.document(), workspace, inputs)
    addresses = [
        call.arguments["y"].data_ptr() for call in executor.calls if call.op == 0 and call.name == "gather_rows"
    ]
    assert addresses[0] == addresses[2] == addresses[1] - 512
    assert torch.equal(executor.outputs["y"], randn(8, 2)[[0, 0, 0, 3, 3, 3, 6, 6]])


def test_carried_buffers_are_poisoned_around_the_loop_only(workspace: Workspace) -> None:
    doc = Naive()
    x, y = doc.buffer("x", "input", (4, 2)), doc.buffer("y", "output", (2, 2))
    w = doc.buffer("w", "weight", (2, 2))
    first = doc.buffer("first", "input", (2,), dtype="int64")
    total = doc.buffer("total", "carry", (2, 2), region="r")
    doc.region("r", 1, 3, rows=2, extent=4)
    doc.carried["r"] = [total]
    doc.op("gather_rows", {"x": x, "rows": first, "y": y})
    doc.op("linear_add", {"x": x, "weight": w, "y": total}, region="r", slices=[("x", 0, "r", 1)])
    doc.op("linear_add", {"x": x, "weight": w, "y": y}, region="r", slices=[("x", 0, "r", 1)])
    executor = Executor(doc.document(), workspace, debug="poison")
    order = [call.name for call in executor.calls if "total" in call.name or call.name == "linear_add"]
    assert order == ["poison total at its start", *["linear_add"] * 4, "poison total at its end"]


def test_poison_spares_an_alias_that_outlives_its_roots_loop(workspace: Workspace) -> None:
    """Each iteration makes t anew; y, which lies behind it, is filled slice by slice."""
    doc = Naive()
    x, y = doc.buffer("x", "input", (4, 2)), doc.buffer("y", "output", (4, 2))
    first = doc.buffer("first", "input", (4,), dtype="int64")
    t = doc.buffer("t", "transient", (2, 2), region="r")
    doc.region("r", 0, 2, rows=2, extent=4)
    doc.op("gather_rows", {"x": x, "rows": first, "y": t}, region="r", slices=[("rows", 0, "r", 1), ("y", 0, "r", 1)])
    doc.op("copy", {"x": t, "y": y}, region="r", slices=[("x", 0, "r", 1), ("y", 0, "r", 1)])
    document = doc.document()
    place = document["buffers"][t]["offset"]
    document["buffers"][y].update(offset=place + 512, alias_of=t, alias_offset=512)
    document["buffers"][t]["size"] = 1024
    document["peak_bytes"] = place + 1024
    executor = run(document, workspace, {"x": randn(4, 2), "first": torch.arange(4)})
    assert torch.equal(executor.outputs["y"], randn(4, 2))


def test_external_tensors_are_used_where_they_are(workspace: Workspace) -> None:
    doc = Naive()
    x, y = doc.buffer("x", "input", (2, 3)), doc.buffer("y", "output", (2, 4))
    w = doc.buffer("w", "external", (4, 3), tensor="model.w")
    doc.op("linear", {"x": x, "weight": w, "y": y})
    adopted = randn(4, 3, seed=3)
    executor = Executor(doc.document(), workspace, tensors={"model.w": adopted})
    executor.inputs["x"].copy_(randn(2, 3))
    executor.run()
    torch.testing.assert_close(executor.outputs["y"], randn(2, 3) @ adopted.T)
    assert executor.calls[0].arguments["weight"].data_ptr() == adopted.data_ptr()
    with pytest.raises(UsageError, match=r"'w' is external: give the tensor 'model\.w'"):
        Executor(doc.document(), workspace)


def test_what_cannot_be_run_is_refused(workspace: Workspace) -> None:
    with pytest.raises(PlanFormatError, match=r"this runtime runs 'mosaic\.plan/1'"):
        Executor({"schema": "mosaic.plan/9"}, workspace)
    with pytest.raises(UsageError, match="debug"):
        Executor({"schema": "mosaic.plan/1"}, workspace, debug="loud")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no buffer 'z'"):
        Executor(Naive().document(), workspace).buffer("z")


# --- poison against the planner's own plans ---------------------------------------------------------------------------

CONFIG = {
    "model_type": "lladamoe", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "expert_intermediate_size": 800, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 61, "mask_token_id": 60, "torch_dtype": "float32",
}  # fmt: skip
REQUEST = Request(seq_lens=(130, 90), masked=70)


def planned() -> dict[str, Any]:
    """A plan of a mixture of experts whose dispatch runs by chunks, the last one short."""
    planner = Planner(load_model(CONFIG), device="cpu")
    tight = Planner(load_model(CONFIG), device="cpu", budget=planner.needed(REQUEST) + 4096)
    document = dict(tight.plan(REQUEST).document)
    assert any(region["extent"] % region["rows"] for region in document["regions"])
    return copy.deepcopy(document)


def inputs_of(document: dict[str, Any]) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (220,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(130), torch.arange(90)])
    return {
        "token_ids": ids,
        "positions": positions,
        "cu_seqlens": torch.tensor([0, 130, 220]),
        "rows": torch.arange(70) * 3,
    }


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return planned()


@pytest.fixture
def loaded(plan: dict[str, Any]) -> Iterator[Workspace]:
    with Workspace() as opened:
        for pool in ("workspace", "weights"):
            opened.resize(pool, plan["components"][pool])
        fill_randomly(weight_views(plan, opened))
        yield opened


def results(document: dict[str, Any], workspace: Workspace, debug: Any) -> dict[str, Tensor]:
    executor = run(document, workspace, inputs_of(document), debug)
    return {name: view.clone() for name, view in executor.outputs.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_poison_does_not_touch_a_plan_that_tells_the_truth(plan: dict[str, Any], loaded: Workspace) -> None:
    assert same(results(plan, loaded, None), results(plan, loaded, "poison"))


def groups(document: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Alias groups of the workspace whose contents matter."""
    buffers = document["buffers"]
    roots = [
        b for b in buffers if b["pool"] == "workspace" and b["alias_of"] is None and b["kind"] in ("transient", "input")
    ]
    return [[b for b in buffers if root["id"] in (b["id"], b["alias_of"])] for root in roots]


def test_poison_finds_every_lifetime_that_ends_too_early(plan: dict[str, Any], loaded: Workspace) -> None:
    expected = results(plan, loaded, None)
    for index in range(len(groups(plan))):
        document = copy.deepcopy(plan)
        group = groups(document)[index]
        if max(buffer["end"] for buffer in group) - min(buffer["start"] for buffer in group) < 2:
            continue  # written and read by one op: nothing shorter is a lifetime
        end = max(buffer["end"] for buffer in group)
        for buffer in group:
            buffer["end"] = min(buffer["end"], end - 1)
            buffer["gaps"] = []
        try:
            found = not same(expected, results(document, loaded, "poison"))
        except (IndexError, RuntimeError):
            found = True  # a poisoned index
        assert found, f"{group[0]['name']} may end at {end - 1} instead of {end} unnoticed"


def test_poison_finds_every_lifetime_that_starts_too_late(plan: dict[str, Any], loaded: Workspace) -> None:
    expected = results(plan, loaded, None)
    for index in range(len(groups(plan))):
        document = copy.deepcopy(plan)
        group = groups(document)[index]
        start = min(buffer["start"] for buffer in group)
        if group[0]["kind"] == "input" or max(buffer["end"] for buffer in group) - start < 2:
            continue
        for buffer in group:
            buffer["start"] = max(buffer["start"], start + 1)
        try:
            found = not same(expected, results(document, loaded, "poison"))
        except (IndexError, RuntimeError):
            found = True
        assert found, f"{group[0]['name']} may start at {start + 1} instead of {start} unnoticed"


def test_poison_finds_a_lie_in_a_gap(workspace: Workspace) -> None:
    doc = Naive()
    x, y = doc.buffer("x", "input", (2, 2)), doc.buffer("y", "output", (2, 2))
    rows = doc.buffer("rows", "input", (2,), dtype="int64")
    t = doc.buffer("t", "transient", (2, 2))
    doc.op("gather_rows", {"x": x, "rows": rows, "y": t})
    doc.op("gather_rows", {"x": t, "rows": rows, "y": y})
    document = doc.document()
    inputs = {"x": randn(2, 2), "rows": torch.arange(2)}
    assert torch.equal(run(document, workspace, inputs).outputs["y"], randn(2, 2))
    document["buffers"][t]["gaps"] = [[1, 2]]
    assert run(document, workspace, inputs).outputs["y"].isnan().all()


def test_poison_finds_what_is_read_before_it_is_written(workspace: Workspace) -> None:
    doc = Naive()
    x, y = doc.buffer("x", "input", (2, 3)), doc.buffer("y", "output", (2, 3))
    doc.op("linear_add", {"x": x, "weight": doc.buffer("w", "weight", (3, 3)), "y": y})
    document = doc.document()
    weight_views(document, workspace)["w"].zero_()
    assert run(document, workspace, {"x": randn(2, 3)}).outputs["y"].isnan().all()


def test_a_bound_step_allocates_nothing_and_stays_in_its_ranges(plan: dict[str, Any], loaded: Workspace) -> None:
    for debug in (None, "poison"):
        executor = Executor(plan, loaded, debug=debug)
        inputs = inputs_of(plan)

        def step(executor: Executor = executor, inputs: dict[str, Tensor] = inputs) -> None:
            for name, value in inputs.items():
                executor.inputs[name].copy_(value)
            executor.run()

        if debug is None:
            assert allocated_bytes(step) == 0
        with StorageWatch() as watch:
            step()
        own = {loaded.range(pool).address for pool in ("workspace", "weights")}
        assert watch.pointers - {t.untyped_storage().data_ptr() for t in inputs.values()} <= own
