"""Streams of a step: every pair of conflicting accesses is ordered, no wait is missing, and no order changes a result."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from stream_log import CALLER, Policy, StreamLog, Wait, annotate, execute, races
from torch import Tensor

from mosaic.errors import DeviceLost
from mosaic.kernels import load
from mosaic.models import load as load_model
from mosaic.planner import Planner, Request
from mosaic.planner.custom import plan_graph
from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.operators import operator
from mosaic.runtime.executor import Call, Executor
from mosaic.runtime.streams import device_lost
from mosaic.runtime.weights import fill_randomly, weight_views
from mosaic.runtime.workspace import Workspace

Document = Mapping[str, Any]
POLICIES: Final[tuple[tuple[Policy, int], ...]] = (
    ("sides first", 0), ("sides last", 0), ("random", 1), ("random", 2), ("random", 3),
)  # fmt: skip
WIDTH: Final = 8


# --- small graphs -----------------------------------------------------------------------------------------------------


def streamed(g: Graph, name: str, shape: tuple[Any, ...], *, from_host: bool = True) -> Buffer:
    """A weight, in host memory and fetched on its own stream where it is streamed."""
    if not from_host:
        return g.weight(name, shape, "float32", tensor=name)
    source = g.buffer(f"{name}@host", shape, "float32", kind="host", tensor=name)
    slot = g.buffer(name, shape, "float32")
    with g.stream("fetch"):
        g.add_op("copy", source, out=slot, name=f"{name}_fetch")
    return slot


def chain(g: Graph) -> None:
    """Prefetched weights: each is on its way while the op before computes, in memory that earlier ones used."""
    tokens = g.dim("tokens")
    h = g.input("x", (tokens, WIDTH), "float32")
    following = streamed(g, "w0", (WIDTH, WIDTH))
    for layer in range(5):
        weight = following
        g.wait("fetch")
        h = g.add_op("rms_norm", h, g.weight(f"norm{layer}", (WIDTH,), "float32", tensor=f"n{layer}"), eps=1e-5)
        following = streamed(g, f"w{layer + 1}", (WIDTH, WIDTH))
        h = g.add_op("linear", h, weight, name=f"linear{layer}")
    g.wait("fetch")
    g.add_op("linear", h, following, out=g.output("y", (tokens, WIDTH), "float32"))


def windows(g: Graph, *, slots: int = 2, layers: int = 2) -> None:
    """A residual in host memory: windows of it are fetched, updated and stored beside the main stream."""
    tokens = g.dim("tokens")
    x, y = g.input("x", (tokens, WIDTH), "float32"), g.output("y", (tokens, WIDTH), "float32")
    hidden = g.buffer("hidden", (tokens, WIDTH), "float32", kind="host")
    g.add_op("copy", x, out=hidden, name="down")
    for layer in range(layers):
        weight = g.weight(f"w{layer}", (WIDTH, WIDTH), "float32", tensor=f"w{layer}")
        with g.chunk("rows", over=tokens, tile=1, name=f"loop{layer}") as rows:
            window = g.buffer(f"window{layer}", (rows, WIDTH), "float32", rotate=slots)
            with g.stream("fetch"):
                g.add_op("copy", hidden, out=window, name=f"fetch{layer}")
            g.wait("fetch")
            h = g.add_op("linear", window, weight, name=f"linear{layer}")
            g.add_op("linear_add", h, weight, window, name=f"add{layer}")
            with g.stream("store"):
                g.add_op("copy", window, out=hidden, name=f"store{layer}")
    g.add_op("copy", hidden, out=y, name="up")


def heads(g: Graph) -> None:
    """Windows in a loop inside a loop over groups of columns, with weights fetched for each group."""
    tokens, groups = g.dim("tokens"), g.dim("groups", value=3)
    x, y = g.input("x", (tokens, WIDTH), "float32"), g.output("y", (tokens, WIDTH), "float32")
    hidden = g.buffer("hidden", (tokens, WIDTH), "float32", kind="host")
    total = g.buffer("total", (tokens, WIDTH), "float32", kind="host")
    g.add_op("copy", x, out=hidden, name="down")
    g.add_op("copy", x, out=total, name="start")
    up, down = streamed(g, "up", (groups, WIDTH)), streamed(g, "down", (WIDTH, groups))
    g.wait("fetch")
    with g.chunk("groups", over=groups, tile=1) as group:
        whole = g.buffer("whole", (tokens, group), "float32")
        with g.chunk("rows", over=tokens, tile=1, name="first") as rows:
            source = g.buffer("source", (rows, WIDTH), "float32", rotate=2)
            with g.stream("fetch"):
                g.add_op("copy", hidden, out=source, name="fetch_source")
            g.wait("fetch")
            g.add_op("linear", source, up, out=whole, name="project")
        with g.chunk("rows", over=tokens, tile=1, name="second") as rows:
            target = g.buffer("target", (rows, WIDTH), "float32", rotate=2)
            with g.stream("fetch"):
                g.add_op("copy", total, out=target, name="fetch_target")
            g.wait("fetch")
            g.add_op("linear_add", whole, down, target, name="accumulate")
            with g.stream("store"):
                g.add_op("copy", target, out=total, name="store_target")
    g.add_op("copy", total, out=y, name="back")


def fetched_groups(g: Graph) -> None:
    """Side ops of a loop that holds another loop: each group's weights arrive while the group before computes."""
    tokens, groups = g.dim("tokens"), g.dim("groups", value=5)
    x, y = g.input("x", (tokens, WIDTH), "float32"), g.output("y", (tokens, WIDTH), "float32")
    source = g.buffer("up@host", (groups, WIDTH), "float32", kind="host", tensor="up")
    total = g.buffer("total", (tokens, WIDTH), "float32", kind="host")
    g.add_op("copy", x, out=total, name="start")
    down = g.weight("down", (WIDTH, groups), "float32", tensor="down")
    with g.chunk("groups", over=groups, tile=1) as group:
        up = g.buffer("up", (group, WIDTH), "float32", rotate=2)
        with g.stream("fetch"):
            g.add_op("copy", source, out=up, name="fetch_up")
        g.wait("fetch")
        with g.chunk("rows", over=tokens, tile=1) as rows:
            target = g.buffer("target", (rows, WIDTH), "float32", rotate=2)
            with g.stream("windows"):
                g.add_op("copy", total, out=target, name="fetch_target")
            h = g.add_op("linear", x, up, name="project")
            g.wait("windows")
            g.add_op("linear_add", h, down, target, name="accumulate")
            with g.stream("windows"):
                g.add_op("copy", target, out=total, name="store_target")
    g.add_op("copy", total, out=y, name="back")


def spilled(g: Graph) -> None:
    """Activations go to host memory and come back, each way beside the main stream."""
    tokens = g.dim("tokens")
    h = g.input("x", (tokens, WIDTH), "float32")
    weight = g.weight("w", (WIDTH, WIDTH), "float32", tensor="w")
    kept = []
    for layer in range(4):
        h = g.add_op("linear", h, weight, name=f"linear{layer}")
        host = g.buffer(f"kept{layer}", (tokens, WIDTH), "float32", kind="host")
        with g.stream("store"):
            g.add_op("copy", h, out=host, name=f"store{layer}")
        kept.append(host)
        h = g.add_op("silu_mul", g.add_op("copy", h, name=f"twin{layer}"), h, name=f"act{layer}")
        g.wait("store")
        h = g.add_op("rms_norm", h, g.weight(f"n{layer}", (WIDTH,), "float32", tensor=f"n{layer}"), eps=1e-5)
    for layer in reversed(range(4)):
        back = g.buffer(f"back{layer}", (tokens, WIDTH), "float32")
        with g.stream("fetch"):
            g.add_op("copy", kept[layer], out=back, name=f"fetch{layer}")
        h = g.add_op("linear", h, weight, name=f"again{layer}")
        g.wait("fetch")
        g.add_op("linear_add", back, weight, h, name=f"add{layer}")
    g.add_op("copy", h, out=g.output("y", (tokens, WIDTH), "float32"))


def old_rule(g: Graph) -> None:
    """One slot, forked and joined within each iteration."""
    tokens = g.dim("tokens")
    x, y = g.input("x", (tokens, WIDTH), "float32"), g.output("y", (tokens, WIDTH), "float32")
    weight = g.weight("w", (WIDTH, WIDTH), "float32", tensor="w")
    with g.chunk("rows", over=tokens, tile=1):
        h = g.add_op("linear", x, weight, name="before")
        with g.stream("side"):
            other = g.add_op("copy", h, name="beside")
        h = g.add_op("linear", h, weight, name="meanwhile")
        g.wait("side")
        g.add_op("linear_add", h, weight, other, name="after")
        g.add_op("linear", other, weight, out=y, name="last")


def random_graph(seed: int) -> Callable[[Graph], None]:
    """Layers of loops over rows, some inside a loop over groups; weights and the residual here or in host memory."""

    def build(g: Graph) -> None:
        choose = random.Random(seed)
        tokens, groups = g.dim("tokens"), g.dim("groups", value=2)
        x, y = g.input("x", (tokens, WIDTH), "float32"), g.output("y", (tokens, WIDTH), "float32")
        on_host = choose.random() < 0.7
        hidden = g.buffer("hidden", (tokens, WIDTH), "float32", kind="host" if on_host else "transient")
        g.add_op("copy", x, out=hidden, name="down")
        layers = choose.randint(1, 4)
        nested = [choose.random() < 0.4 for _ in range(layers)]
        from_host = [choose.random() < 0.6 for _ in range(layers)]
        ahead = choose.random() < 0.6  # fetch a layer's weights while the one before computes
        shapes = [(groups if inside else WIDTH, WIDTH) for inside in nested]
        weights = [streamed(g, "w0", shapes[0], from_host=from_host[0])]
        for layer in range(layers):
            for coming in range(len(weights), min(layer + 1 + ahead, layers)):
                weights.append(streamed(g, f"w{coming}", shapes[coming], from_host=from_host[coming]))
            if from_host[layer]:
                g.wait("fetch")
            with g.chunk("groups", over=groups, tile=1, name=f"outer{layer}") if nested[layer] else nullcontext():
                row_loop(g, choose, layer, hidden, weights[layer], groups if nested[layer] else WIDTH)
        g.add_op("copy", hidden, out=y, name="up")

    return build


def row_loop(g: Graph, choose: random.Random, layer: int, hidden: Buffer, weight: Buffer, width: Any) -> None:
    tokens, on_host = g.dim("tokens"), hidden.kind == "host"
    back = g.weight(f"back{layer}", (WIDTH, width), "float32", tensor=f"back{layer}")
    with g.chunk("rows", over=tokens, tile=1, name=f"loop{layer}") as rows:
        window = hidden
        if on_host:
            window = g.buffer(f"window{layer}", (rows, WIDTH), "float32", rotate=choose.choice((2, 3)))
            with g.stream("fetch"):
                g.add_op("copy", hidden, out=window, name=f"fetch{layer}")
            g.wait("fetch")
        h = g.add_op("linear", window, weight, name=f"linear{layer}")
        if choose.random() < 0.5:
            h = g.add_op("silu_mul", h, g.add_op("copy", h, name=f"twin{layer}"), name=f"act{layer}")
        g.add_op("linear_add", h, back, window, name=f"add{layer}")
        if on_host:
            with g.stream(choose.choice(("store", "fetch"))):
                g.add_op("copy", window, out=hidden, name=f"store{layer}")


def planned(build: Callable[[Graph], None], tokens: int = 11, rows: int = 2, device: str = "cpu") -> Document:
    """Plan with the given rows per chunk, and one group at a time."""
    g = Graph("probe", backend="cpu")
    build(g)
    config = {knob: 1 if knob == "groups" else rows for knob in g.tiles}
    return dict(plan_graph(build, dims={"tokens": tokens}, device=device, config=config).document)


GRAPHS: Final[Mapping[str, Callable[[Graph], None]]] = {
    "chain": chain, "windows": windows, "three slots": lambda g: windows(g, slots=3), "heads": heads,
    "fetched groups": fetched_groups, "spilled": spilled, "old rule": old_rule,
}  # fmt: skip


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace() as opened:
        for pool in ("workspace", "weights", "host"):
            opened.resize(pool, 1 << 21)
        yield opened


def inputs_of(document: Document, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        record["name"]: torch.randn(record["shape"], generator=generator)
        for record in document["buffers"]
        if record["kind"] == "input"
    }


def bind(document: Document, workspace: Workspace, **more: Any) -> Executor:
    for pool in ("workspace", "host"):
        workspace.range(pool).tensor[: 1 << 21].fill_(0xFF)
    fill_randomly(weight_views(document, workspace))
    for view in weight_views(document, workspace).values():
        view.mul_(20)  # so that every product matters in the result
    return Executor(document, workspace, **more)


def expected(document: Document, workspace: Workspace, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results of program order."""
    executor = bind(document, workspace)
    for name, value in inputs.items():
        executor.inputs[name].copy_(value)
    executor.run()
    assert all(bool(view.isfinite().all()) for view in executor.outputs.values() if view.is_floating_point())
    return {name: view.clone() for name, view in executor.outputs.items()}


def logged(
    document: Document, workspace: Workspace, inputs: Mapping[str, Tensor], *, steps: int = 1, debug: Any = None
) -> tuple[StreamLog, Executor]:
    """Give steps to a log that holds everything back, the caller's writing of inputs included."""
    log = StreamLog(held=True)
    executor = bind(document, workspace, streams=log, debug=debug)
    for _ in range(steps):
        for name, value in inputs.items():
            log.launch(CALLER, torch.add, {"input": value, "other": 0, "out": executor.inputs[name]})
        executor.run()
    annotate(log, executor, steps)
    return log, executor


def check(
    document: Document, workspace: Workspace, inputs: Mapping[str, Tensor], debug: Any, policies: Any = POLICIES
) -> None:
    """No races, and the results of program order in every order, of two steps in a row."""
    results = expected(document, workspace, inputs)
    log, executor = logged(document, workspace, inputs, steps=2, debug=debug)
    assert not races(log.entries)
    for policy, seed in policies:
        workspace.range("workspace").tensor[: 1 << 21].fill_(0xFF)
        execute(log.entries, policy, seed)
        for name, view in executor.outputs.items():
            assert torch.equal(view, results[name]), (policy, seed, name)


@pytest.mark.parametrize("debug", [None, "poison"])
@pytest.mark.parametrize("rows", [1, 2, 5, 11])
@pytest.mark.parametrize("name", GRAPHS)
def test_all_orders_that_events_allow_give_the_same_result(
    workspace: Workspace, name: str, rows: int, debug: Any
) -> None:
    document = planned(GRAPHS[name], rows=rows)
    assert {op["stream"] for op in document["ops"]} > {"main"}
    check(document, workspace, inputs_of(document), debug)


@pytest.mark.parametrize("debug", [None, "poison"])
def test_a_loop_that_runs_once_needs_one_slot(workspace: Workspace, debug: Any) -> None:
    document = planned(windows, rows=11)
    buffers = [{**b, "rotate": 1, "size": b["size"] // b["rotate"]} for b in document["buffers"]]
    check({**document, "buffers": buffers}, workspace, inputs_of(document), debug)


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs(workspace: Workspace, seed: int) -> None:
    document = planned(random_graph(seed), tokens=9, rows=1 + seed % 4)
    check(document, workspace, inputs_of(document), "poison" if seed % 2 else None)


# --- models -----------------------------------------------------------------------------------------------------------

LLADA: Final = {
    "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 48, "embedding_size": 64,
    "mask_token_id": 63, "torch_dtype": "float32",
}  # fmt: skip
EXPERTS: Final = {
    "model_type": "lladamoe", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "expert_intermediate_size": 40, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 61, "mask_token_id": 60, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.some
@pytest.mark.parametrize(
    ("model", "config", "debug"),
    [
        (LLADA, {"attention": "together", "hidden": "host", "stream": "50%"}, "poison"),
        (LLADA, {"attention": "queries", "hidden": "device", "stream": "all"}, None),
        (LLADA, {"attention": "heads", "hidden": "device", "stream": "all", "heads": 1}, "poison"),
        (LLADA, {"attention": "heads", "hidden": "host", "stream": "all", "heads": 2}, None),
        (LLADA, {"attention": "heads", "hidden": "host", "stream": "all", "heads": 2}, "poison"),
        (EXPERTS, {"attention": "queries", "hidden": "host", "stream": "layers"}, "poison"),
    ],
)
def test_models_with_their_moves(
    workspace: Workspace, model: dict[str, Any], config: dict[str, Any], debug: Any
) -> None:
    lengths, masked = (200, 70), 50
    knobs = {"proj": 128, "ffn": 128, "experts": 128, "logits": 64, "head": "fused"}
    planner = Planner(load_model(model), device="cpu")
    known = planner.plan(Request(seq_lens=(8,), masked=1)).document["config"]
    settings = {key: value for key, value in {**knobs, **config}.items() if key in known}
    document = planner.plan(Request(seq_lens=lengths, masked=masked), config=settings).document
    inputs = {
        "token_ids": torch.randint(0, 60, (sum(lengths),), generator=torch.Generator().manual_seed(0)),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": torch.tensor([0, 200, 270]),
        "rows": torch.arange(masked) * 5,
    }
    check(document, workspace, inputs, debug, POLICIES[1:3])


# --- nothing is missing, nothing too much -----------------------------------------------------------------------------


def waits_of(log: StreamLog, executor: Executor, step: int) -> list[tuple[int, str]]:
    """Waits of one step, by their place in the log, with what they are called."""
    names = [call.name for call in executor.calls if call.function == log.wait]
    own = [i for i, entry in enumerate(log.entries) if isinstance(entry, Wait) and entry.event not in log.of_step]
    assert len(own) % len(names) == 0
    return list(zip(own[step * len(names) :], names, strict=False))[: len(names)]


# Rules of loops hold for streams as a whole, whatever ops touch: in "fetched groups" main begins with what no slot needs.
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "fetched groups"])
def test_a_race_shows_whichever_wait_is_dropped(workspace: Workspace, name: str) -> None:
    document = planned(GRAPHS[name])
    log, executor = logged(document, workspace, inputs_of(document), steps=3)
    needless = [
        wait
        for index, wait in waits_of(log, executor, 1)
        if not races([*log.entries[:index], *log.entries[index + 1 :]])
    ]
    if name == "heads":  # entries of the inner loops, where earlier waits happen to order what is touched
        assert set(needless) <= {"fetch waits for main", "main waits for fetch"} and len(needless) <= 6
    else:
        assert not needless


@pytest.mark.parametrize("name", ["chain", "windows", "spilled", "old rule"])
def test_a_race_shows_whichever_edge_the_plan_lacks(workspace: Workspace, name: str) -> None:
    document = planned(GRAPHS[name])
    inputs = inputs_of(document)
    for index in range(len(document["edges"])):
        kept = [edge for i, edge in enumerate(document["edges"]) if i != index]
        log, _ = logged({**document, "edges": kept}, workspace, inputs, steps=2)
        assert races(log.entries) or _implied(document, index), document["edges"][index]


def _implied(document: Document, index: int) -> bool:
    """Whether a loop's entry orders what an edge orders: a fork from before the loop."""
    edge = document["edges"][index]
    return edge["kind"] == "fork" and document["ops"][edge["to"]]["region"] != document["ops"][edge["from"]]["region"]


def test_the_calls_of_a_loop_with_two_slots(workspace: Workspace) -> None:
    document = planned(lambda g: windows(g, layers=1), tokens=6, rows=2)
    log = StreamLog(held=True)
    executor = bind(document, workspace, streams=log)
    iteration = [
        "fetch0", "record fetch", "main waits for fetch", "linear0", "add0", "record main", "store waits for main",
        "store0", "record store",
    ]  # fmt: skip
    assert [call.name for call in executor.calls] == [
        "down", "record main", "fetch waits for main", *iteration, *iteration, "fetch waits for store", *iteration,
        "record store", "main waits for store", "up",
    ]  # fmt: skip
    ends = [call.arguments["event"] for call in executor.calls if call.name == "record store"]
    (turn,) = (call.arguments["event"] for call in executor.calls if call.name == "fetch waits for store")
    assert turn is ends[0] is ends[2] is not ends[1]


def test_iterations_overlap_as_far_as_their_slots_go(workspace: Workspace) -> None:
    for slots in (2, 3):
        document = planned(lambda g, slots=slots: windows(g, slots=slots, layers=1), tokens=10, rows=2)
        log, _ = logged(document, workspace, inputs_of(document))
        order = [launch.name.split("@")[0] for launch in execute(log.entries, "sides first")]
        before = order[: order.index("linear0")]
        assert before.count("fetch0") == slots  # the next ones wait for a slot
        assert order[: order.index("store0")].count("fetch0") == slots


def test_weights_are_fetched_while_the_layer_before_computes(workspace: Workspace) -> None:
    document = planned(chain)
    log, _ = logged(document, workspace, inputs_of(document))
    order = [launch.name.split("@")[0] for launch in execute(log.entries, "sides first")]
    assert all(order.index(f"w{i + 1}_fetch") < order.index(f"linear{i}") for i in range(5))


def test_events_are_made_when_a_plan_is_bound(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StreamLog()
    executor = bind(planned(heads), workspace, streams=log)
    monkeypatch.setattr(log, "event", None)
    executor.run()
    executor.run()


def test_without_streams_nothing_is_ordered(workspace: Workspace) -> None:
    document = planned(heads)
    executor, log = bind(document, workspace), StreamLog()
    launches = [
        call.name for call in bind(document, workspace, streams=log).calls if call.function.__name__ == "launch"
    ]
    assert [call.name for call in executor.calls] == launches


def test_equal_loops_share_their_tables_whatever_their_length(workspace: Workspace) -> None:
    document = planned(lambda g: windows(g, layers=6), tokens=4000, rows=2)
    executor = bind(document, workspace, streams=StreamLog())
    assert len(executor.calls) > 100_000
    steps = [step for segment in executor.segments for step in segment.steps]
    assert len(steps) < 200
    rows = {id(row) for segment in executor.segments for table in segment.tables for row in table}
    assert len(rows) < 5 * 2000 + 200  # a layer's, not six times as many


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Failing(StreamLog):
    """Raises at one launch."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = at, error

    def launch(self, stream: str, function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        super().launch(stream, function, arguments)


@pytest.mark.parametrize("at", [1, 2, 9, 17])
def test_after_ctrl_c_in_a_step_the_next_one_is_right(workspace: Workspace, at: int) -> None:
    document = planned(windows)
    inputs = inputs_of(document)
    results = expected(document, workspace, inputs)
    log = Failing(at, KeyboardInterrupt())
    executor = bind(document, workspace, streams=log)
    executor.inputs["x"].copy_(inputs["x"])
    with pytest.raises(KeyboardInterrupt):
        executor.run()
    assert log.drained == 1
    executor.inputs["x"].copy_(inputs["x"])
    executor.run()
    assert torch.equal(executor.outputs["y"], results["y"])


def test_a_lost_device_is_a_typed_error_that_names_the_op(workspace: Workspace) -> None:
    document = planned(windows)
    text = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
    executor = bind(document, workspace, streams=Failing(3, RuntimeError(text)))
    with pytest.raises(DeviceLost, match=r"illegal memory access was encountered\. .*restart it") as caught:
        executor.run()
    assert caught.value.__notes__ == ["in op 2 (linear0) of the plan"]
    assert isinstance(caught.value.__cause__, RuntimeError) and "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are(workspace: Workspace) -> None:
    executor = bind(planned(windows), workspace, streams=Failing(2, RuntimeError("CUDA error: invalid argument")))
    with pytest.raises(RuntimeError, match="invalid argument") as caught:
        executor.run()
    assert not isinstance(caught.value, DeviceLost) and caught.value.__notes__ == ["in op 1 (fetch0) of the plan"]


# --- capture ----------------------------------------------------------------------------------------------------------


class Capturing(StreamLog):
    """Captures by keeping what is launched, and replays it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.captures, self.replays = error, 0, 0

    def capture(self, step: Callable[[], None]) -> Any:
        self.captures += 1
        if self.error is not None:
            raise self.error
        before, self.held = len(self.launches), True
        step()
        self.held = False
        kept = self.launches[before:]

        class Graph:
            def replay(graph) -> None:
                self.replays += 1
                for launch in kept:
                    launch.function(**launch.arguments)

        return Graph()


def steps_of(executor: Executor, count: int, seed: int = 0) -> list[Tensor]:
    found = []
    for step in range(count):
        executor.inputs["x"].copy_(inputs_of(executor.document, seed + step)["x"])
        executor.run()
        found.append(executor.outputs["y"].clone())
    return found


def test_the_second_step_is_captured_and_later_ones_replay_it(workspace: Workspace) -> None:
    document = planned(heads)
    results = steps_of(bind(document, workspace), 4)
    log = Capturing()
    executor = bind(document, workspace, streams=log, capture=True)
    assert not executor.captured and executor.not_captured is None
    first = steps_of(executor, 1)
    assert not executor.captured and log.captures == 0  # it compiles and loads what is launched
    assert all(map(torch.equal, first + steps_of(executor, 3, seed=1), results))
    assert executor.captured and executor.not_captured is None and (log.captures, log.replays) == (1, 3)


@pytest.mark.parametrize("graph", [heads, windows])
def test_a_watched_step_shows_each_call_before_it_is_made_and_stays_captured(
    workspace: Workspace, graph: Callable[[Graph], None]
) -> None:
    document, shown, stood = planned(graph), list[Call](), list[Tensor]()
    results = steps_of(bind(document, workspace), 4)
    log = Capturing()
    executor = bind(document, workspace, streams=log, capture=True)
    found = steps_of(executor, 2)

    def watch(call: Call) -> None:
        shown.append(call)
        stood.append(executor.outputs["y"].clone())

    with executor.watched(watch):
        found += steps_of(executor, 1, seed=2)
    calls = executor.calls
    assert [(call.op, call.name, call.function) for call in shown] == [
        (call.op, call.name, call.function) for call in calls
    ]
    last = max(place for place, call in enumerate(calls) if call.function not in (log.record, log.wait))
    assert not torch.equal(stood[last], found[-1]) and (log.captures, log.replays) == (1, 1)
    assert all(map(torch.equal, found + steps_of(executor, 1, seed=3), results))
    assert len(shown) == len(calls) and (log.captures, log.replays) == (1, 2)


@pytest.mark.parametrize("graph", [heads, windows])
def test_a_graph_is_captured_again_when_pinned_memory_went_and_came(
    workspace: Workspace, graph: Callable[[Graph], None]
) -> None:
    """A copy from or to the host is tied to the registration of its memory; everything else goes by addresses."""
    document = planned(graph)
    sizes = {pool["name"]: pool["capacity"] for pool in document["pools"]}
    log = Capturing()
    executor = bind(document, workspace, streams=log, capture=True)
    expected = steps_of(executor, 3)
    for pool, captures in (
        ("workspace", 1),
        ("host", 2 if sizes["host"] else 1),
        ("workspace", 2 if sizes["host"] else 1),
    ):
        kept = workspace.view(pool, 0, (sizes[pool],), "uint8").clone()
        workspace.resize(pool, sizes[pool] + (1 << 20))
        workspace.resize(pool, sizes[pool])
        workspace.view(pool, 0, (sizes[pool],), "uint8").copy_(kept)
        assert all(map(torch.equal, steps_of(executor, 3), expected))
        assert executor.captured and log.captures == captures


def test_a_poisoned_step_is_never_captured(workspace: Workspace) -> None:
    log = Capturing()
    executor = bind(planned(windows), workspace, streams=log, capture=True, debug="poison")
    steps_of(executor, 3)
    assert log.captures == 0 and not executor.captured and executor.not_captured == "it is poisoned"


def test_what_cannot_be_captured_runs_launch_by_launch_and_says_so_once(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    document = planned(windows)
    results = steps_of(bind(document, workspace), 4)
    log = Capturing(RuntimeError("operation not permitted when stream is capturing"))
    executor = bind(document, workspace, streams=log, capture=True)
    assert all(map(torch.equal, steps_of(executor, 4), results))
    assert log.captures == 1 and executor.not_captured == "operation not permitted when stream is capturing"
    (record,) = caplog.records
    assert "operation not permitted" in record.getMessage() and record.levelname == "WARNING"


def test_advice_about_device_side_assertions_is_no_lost_device() -> None:
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    survived = "CUDA error: operation not permitted when stream is capturing"
    assert device_lost(RuntimeError(f"{survived}\n{advice}")) is None
    assert device_lost(RuntimeError(f"CUDA error: device-side assert triggered\n{advice}")) is not None
    assert device_lost(RuntimeError("")) is None


def test_a_device_lost_in_capture_is_not_run_on(workspace: Workspace) -> None:
    log = Capturing(RuntimeError("CUDA error: unspecified launch failure"))
    executor = bind(planned(windows), workspace, streams=log, capture=True)
    steps_of(executor, 1)
    with pytest.raises(DeviceLost):
        executor.run()


def test_the_cpu_has_no_graphs(workspace: Workspace) -> None:
    executor = bind(planned(windows), workspace, capture=True)
    steps_of(executor, 3)
    assert not executor.captured and executor.not_captured == "the cpu has no graphs"


# --- memory of the host ----------------------------------------------------------------------------


def test_kernels_reach_host_memory_by_the_devices_address_and_copies_by_the_hosts(workspace: Workspace) -> None:
    def build(g: Graph) -> None:
        tokens = g.dim("tokens")
        ids, table = (
            g.input("ids", (tokens,), "int64"),
            g.buffer("table", (9, WIDTH), "float32", kind="host", tensor="t"),
        )
        h = g.add_op("embedding", ids, table, name="embed")
        back = g.buffer("back", (tokens, WIDTH), "float32", kind="host")
        g.add_op("copy", h, out=back)
        g.add_op("gather_rows", back, ids, out=g.output("y", (tokens, WIDTH), "float32"))

    asked = []

    class Watched(Workspace):
        def view(self, name: str, offset: int, shape: Any, dtype: str, *, on_device: bool = False) -> Tensor:
            asked.append((name, tuple(shape), on_device))
            return super().view(name, offset, shape, dtype, on_device=on_device)

    launchers = {name: load(name).launch for name in ("embedding", "copy", "gather_rows")}
    ours = {
        name: replace(
            operator(name),
            implementations=tuple(replace(way, kernel=launch) for way in operator(name).implementations),
        )
        for name, launch in launchers.items()
    }
    special = replace(
        ours["copy"].implementation("cuda"), name="special", kernel=(seen := SimpleNamespace(launch=print))
    )
    ours["copy"] = replace(ours["copy"], implementations=(*ours["copy"].implementations, special))
    for backend in ("cpu", "cuda"):
        asked.clear()
        chosen = {"copy": "special"} if backend == "cuda" else {}
        document = {**planned(build, tokens=5), "backend": backend, "implementations": chosen}
        with Watched() as watched:
            for pool in ("workspace", "host"):
                watched.resize(pool, 1 << 16)
            executor = Executor(document, watched, operators=ours, streams=StreamLog())
            copying = seen.launch if backend == "cuda" else launchers["copy"]
            assert [call.function for call in executor.calls] == [
                launchers["embedding"], copying, launchers["gather_rows"]
            ]  # fmt: skip
        assert {entry for entry in asked if entry[0] == "workspace"} == {
            ("workspace", shape, False) for shape in ((5,), (5, WIDTH))
        }
        kernel_side = backend == "cuda"
        assert {entry for entry in asked if entry[0] == "host"} == {
            ("host", (9, WIDTH), kernel_side), ("host", (5, WIDTH), False), ("host", (5, WIDTH), kernel_side),
        }  # fmt: skip
