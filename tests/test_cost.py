"""The cost model: rates by size, the best legal attention, the link, and streams beside each other.

Streams are held against a simulation that walks every launch of every iteration by the rules of forks, waits and loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from mosaic.devices import DEVICES, Device
from mosaic.models import PRESETS, load
from mosaic.planner import Planner, Request
from mosaic.planner.body import Body
from mosaic.planner.cost import OpTimes
from mosaic.planner.template import compile_body
from mosaic.planner.timeline import overlapping_loops
from mosaic.registrar.graph import Graph

CARD = Device(
    name="card", memory_bytes=1 << 40, bandwidth=1e9, gemm_rates={1: {1: 1e9}}, attention_rates={"triton": {1: 1e9}},
    launch_s=0.0, host_link=1e6,
)  # fmt: skip
"""Round figures, and no time for a launch: what moves n bytes takes n nanoseconds."""
FAST = 1e30


def times(body: Body, device: Device, **dims: int) -> list[float]:
    """Seconds of every op of a body without regions."""
    timed = OpTimes(body, device)
    seconds = timed.launch_seconds([[dims[name] for name in body.variables]])[0]
    return [float(seconds[timed.class_of[i]]) for i in range(len(body.ops))]


def product(rows: int, columns: int) -> Body:
    g = Graph("product")
    x = g.input("x", (rows, 64), "bfloat16")
    g.add_op("linear", x, g.weight("w", (columns, 64), "bfloat16"), name="y")
    return compile_body(g)


# -- rates ----------------------------------------------------------------------------------------------------------

TABLE = {256: {32: 1e12, 512: 3e12}, 4096: {32: 2e12, 128: 6e12, 512: 8e12}}


@pytest.mark.parametrize(
    ("rows", "columns", "rate"),
    [
        (32, 256, 1e12), (512, 4096, 8e12), (128, 4096, 6e12),  # measured
        (128, 256, 2e12), (256, 4096, 7e12),  # half way between two numbers of rows, in powers of two
        (32, 1024, 1.5e12), (128, 1024, 4e12), (512, 1024, 5.5e12),  # half way between two numbers of columns
        (1, 256, 1e12), (4096, 256, 3e12), (512, 16, 3e12), (32, 1 << 20, 2e12),  # beyond both ends
    ],
)  # fmt: skip
def test_gemm_rates_are_bilinear_in_powers_of_two(rows: int, columns: int, rate: float) -> None:
    card = replace(CARD, bandwidth=FAST, gemm_rates=TABLE)
    assert times(product(rows, columns), card) == pytest.approx([2 * rows * columns * 64 / rate])


def test_rates_by_rows_alone_serve_any_columns() -> None:
    card = replace(CARD, bandwidth=FAST, gemm_rates={32: 1e12, 128: 3e12})
    for columns in (8, 100_000):
        assert times(product(64, columns), card) == pytest.approx([2 * 64 * columns * 64 / 2e12])


def test_few_rows_are_bound_by_the_bandwidth_and_every_launch_costs() -> None:
    moved = 2 * (2 * 64 + 512 * 64 + 2 * 512)
    assert times(product(2, 512), replace(CARD, gemm_rates={1: 1e15})) == pytest.approx([moved / 1e9])
    assert times(product(2, 512), replace(CARD, gemm_rates={1: 1e15}, launch_s=7.0)) == pytest.approx([7 + moved / 1e9])


def test_the_fused_unembedding_has_rates_of_its_own() -> None:
    g = Graph("head")
    g.add_op("unembed_stats", g.input("x", (64, 8), "bfloat16"), g.weight("w", (1000, 8), "bfloat16"))
    card = replace(CARD, bandwidth=FAST, gemm_rates=TABLE, unembed_rates={16: 1e12, 256: 3e12})
    assert times(compile_body(g), card) == pytest.approx([2 * 64 * 8 * 1000 / 2e12])
    widest = replace(card, unembed_rates={})
    assert times(compile_body(g), widest) == pytest.approx([2 * 64 * 8 * 1000 / 4e12])


def test_an_unembedding_that_samples_has_rates_of_its_own_too() -> None:
    g = Graph("head")
    g.add_op(
        "unembed_sample", g.input("x", (64, 8), "bfloat16"), g.weight("w", (1000, 8), "bfloat16"),
        g.input("keys", (64,), "int64"), g.input("temperature", (64,), "float32"),
    )  # fmt: skip
    card = replace(CARD, bandwidth=FAST, unembed_rates={16: 1e12}, sampled_unembed_rates={16: 5e11})
    assert times(compile_body(g), card) == pytest.approx([2 * 64 * 8 * 1000 / 5e11])
    assert times(compile_body(g), replace(card, sampled_unembed_rates={})) == pytest.approx([2 * 64 * 8 * 1000 / 1e12])


def test_products_of_few_rows_have_rates_of_their_own_and_take_64_at_a_time() -> None:
    def body(rows: int) -> Body:
        g = Graph("few")
        x, norm = g.input("x", (rows, 8), "bfloat16"), g.weight("norm", (8,), "bfloat16")
        g.add_op("norm_gate_up", x, norm, *(g.weight(name, (500, 8), "bfloat16") for name in ("gate", "up")), eps=1e-6)
        return compile_body(g)

    card = replace(CARD, bandwidth=FAST, gemm_rates={1000: {32: 1e12, 64: 4e12, 128: 9e12}})
    for rows, rate in ((8, 1e12), (32, 1e12), (64, 4e12), (128, 4e12), (4096, 4e12)):  # without, those of GEMMs
        assert times(body(rows), card) == pytest.approx([4 * rows * 8 * 500 / rate])
    for rows, rate in ((8, 2e12), (64, 6e12), (128, 6e12), (4096, 6e12)):
        own = replace(card, few_rows_rates={16: 2e12, 64: 6e12, 128: 8e12})
        assert times(body(rows), own) == pytest.approx([4 * rows * 8 * 500 / rate])


def test_a_transfer_takes_half_of_its_bytes_over_the_link() -> None:
    g = Graph("fetch")
    host = g.buffer("w@host", (1000, 10), "float32", kind="host", tensor="w")
    g.add_op("copy", host, out=g.output("w", (1000, 10), "float32"))
    assert times(compile_body(g), replace(CARD, host_link=1e6)) == pytest.approx([40_000 / 1e6])
    assert times(compile_body(g), replace(CARD, host_link=FAST)) == pytest.approx([80_000 / 1e9])


# -- attention ------------------------------------------------------------------------------------------------------

BOTH = {"cudnn": {1 << 10: 4e12, 1 << 14: 8e12}, "triton": {1 << 10: 2e12, 1 << 14: 4e12}}


def attention(dtype: str = "bfloat16", head_size: int = 64, backend: str = "cuda") -> Body:
    """Eight heads, all queries at once."""
    g = Graph("attention", backend=backend)
    tokens, seqs, span = g.dim("tokens"), g.dim("seqs"), g.dim("span")
    q, k, v = (g.input(name, (tokens, 8 * head_size), dtype) for name in "qkv")
    bounds = g.input("cu_seqlens", (seqs + 1,), "int32")
    g.add_op("attention", q, k, v, bounds, head_size=head_size, scale=1.0, span=span)
    return compile_body(g)


@pytest.mark.parametrize(
    ("body", "rates", "seqs", "implementation", "rate"),
    [
        (attention(), BOTH, 1, "cudnn", 6e12),
        (attention(), BOTH, 2, "triton", 3e12),
        (attention("float32"), BOTH, 1, "triton", 3e12),
        (attention(head_size=256), BOTH, 1, "triton", 3e12),
        (attention(), {"cudnn": {1: 1e12}, "triton": {1: 5e12}}, 1, "triton", 5e12),  # legal, but not the best
        (attention(), {"triton": {1: 5e12}}, 1, "triton", 5e12),
        (attention(), {"cudnn": {1: 5e12}}, 2, "triton", 5e12),  # no figures for it: those that there are
    ],
)
def test_attention_takes_the_best_that_is_legal(
    body: Body, rates: Mapping[str, Mapping[int, float]], seqs: int, implementation: str, rate: float
) -> None:
    card = replace(CARD, bandwidth=FAST, attention_rates=rates)
    assert OpTimes(body, card).implementations([512, seqs, 99]) == {"attention": implementation}
    width = 8 * body.ops[0].attrs["head_size"]
    tokens = 512  # times 8 heads: 2^12, half way
    assert times(body, card, tokens=tokens, seqs=seqs, span=99) == pytest.approx([4 * 99 * tokens * width / rate])


def test_where_there_is_no_choice_none_is_named() -> None:
    assert OpTimes(product(8, 8), CARD).implementations([8]) == {}
    assert OpTimes(attention(backend="cpu"), DEVICES["cpu"]).implementations([512, 1, 99]) == {}


# -- streams --------------------------------------------------------------------------------------------------------


class Walk:
    """Every launch of every iteration, in program order, on the clock of its stream."""

    def __init__(self, timed: OpTimes, extents: Mapping[str, int]) -> None:
        self.timed, self.body, self.extents = timed, timed.body, extents
        self.loops = overlapping_loops(timed.body)
        self.clocks = dict.fromkeys(["main", *(op.stream for op in self.body.ops)], 0.0)
        self.ended: dict[int, float] = {}
        self.known: dict[tuple[int, ...], list[float]] = {}

    def seconds(self, values: list[int]) -> float:
        self.walk(0, len(self.body.ops), None, values)
        return max(self.clocks.values())

    def walk(self, start: int, end: int, parent: int | None, values: list[int]) -> None:
        """The body of one iteration of `parent`: ops in it, and its regions as loops."""
        at = start
        while at < end:
            inner = next((i for i, r in enumerate(self.body.regions) if r.parent == parent and r.start == at), None)
            if inner is None:
                self.launch(at, values)
                at += 1
            else:
                self.loop(inner, values)
                at = self.body.regions[inner].end

    def iterations(self, knob: str, values: list[int]) -> Iterator[list[int]]:
        column = self.timed.columns[knob]
        rows, extent = values[column], self.extents[knob]
        for begin in range(0, extent, rows):
            inside = list(values)
            inside[column] = min(rows, extent - begin)
            yield inside

    def loop(self, index: int, values: list[int]) -> None:
        region = self.body.regions[index]
        ops = range(region.start, region.end)
        streams = {self.body.ops[op].stream for op in ops} | {"main"}
        overlaps = self.loops[region.start] == index
        if overlaps:
            self.clocks |= {s: max(self.clocks[s], self.clocks["main"]) for s in streams}
        touched = {b for op in ops if self.body.ops[op].stream != "main" for b in (*self.body.ops[op].reads,
                   *self.body.ops[op].writes) if self.body.buffers[b].home == index}  # fmt: skip
        slots = min((self.body.buffers[b].rotate for b in touched), default=1)
        ends: list[float] = []
        for inside in self.iterations(region.knob, values):
            if overlaps and len(ends) >= slots:
                self.clocks |= {s: max(self.clocks[s], ends[-slots]) for s in streams}
            self.walk(region.start, region.end, index, inside)
            ends.append(max(self.clocks[s] for s in streams))
        if overlaps:
            self.clocks |= dict.fromkeys(streams, max(self.clocks[s] for s in streams))

    def launch(self, index: int, values: list[int]) -> None:
        op = self.body.ops[index]
        key = tuple(values)
        if key not in self.known:
            self.known[key] = self.timed.launch_seconds([values])[0].tolist()
        began = self.clocks[op.stream]
        for _, source, target in self.body.edges:
            if target == index and source in self.ended:
                began = max(began, self.ended[source])
        self.clocks[op.stream] = self.ended[index] = began + self.known[key][self.timed.class_of[index]]


CONFIG = {
    "model_type": "llada", "d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 512,
    "embedding_size": 1024, "mask_token_id": 1023, "torch_dtype": "bfloat16",
}  # fmt: skip


def prepared(planner: Planner, tokens: int, **chosen: int | str) -> tuple[OpTimes, list[int], Mapping[str, int]]:
    """The times of the body with these choices, and the variables and extents of one configuration."""
    point = planner.space().at(Request(seq_lens=(tokens,)).size.dims())
    config = point.config(chosen)
    return point.space.times(config.choices), point.values(config), point.extents


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("chunks", [{}, {"proj": 512, "ffn": 1024, "experts": 384, "logits": 64}])
def test_on_one_stream_times_add(name: str, chunks: Mapping[str, int]) -> None:
    planner = Planner(name, device="h200")
    knobs = {knob.name for knob in planner.space().template.knobs}
    timed, values, extents = prepared(planner, 5000, **{k: v for k, v in chunks.items() if k in knobs})
    assert not timed.has_streams
    rows = {group: [[values[timed.columns[knob]] for knob in group]] for group in timed.groups}
    groups = sum(seconds for (seconds,) in timed.group_seconds(rows, values, extents).values())
    assert (
        timed.total_seconds(values, extents)
        == pytest.approx(groups)
        == pytest.approx(Walk(timed, extents).seconds(values))
    )


def test_settings_asked_for_together_take_what_each_takes_alone() -> None:
    """All pairs of rows of two knobs whose loops nest, at once and one by one; with a whole dim and shorter last chunks."""
    timed, values, extents = prepared(Planner("llada-8b", device="h200"), 5000, attention="heads", heads=4, proj=512)
    group = next(group for group in timed.groups if len(group) == 2)
    options = {"heads": (32, 5, 4, 1), "proj": (5000, 4096, 384)}
    settings = list(itertools.product(*(options[knob] for knob in group)))
    together = timed.group_seconds({group: settings}, values, extents)[group]
    assert len({round(seconds, 12) for seconds in together}) == len(settings)
    for rows, seconds in zip(settings, together, strict=True):
        assert timed.group_seconds({group: [rows]}, values, extents)[group] == pytest.approx([seconds], rel=1e-12)
        point = list(values)
        for knob, count in zip(group, rows, strict=True):
            point[timed.columns[knob]] = count
        every = {other: [[point[timed.columns[knob]] for knob in other]] for other in timed.groups}
        whole = timed.group_seconds(every, point, extents)
        assert timed.total_seconds(point, extents) == pytest.approx(sum(seconds for (seconds,) in whole.values()))


@pytest.mark.parametrize("link", [5e9, 54.7e9, 500e9])
@pytest.mark.parametrize("attention", ["together", "queries", "heads"])
def test_streamed_weights_come_while_the_step_computes(attention: str, link: float) -> None:
    planner = Planner(load(CONFIG), device=replace(DEVICES["h200"], host_link=link, launch_s=1e-6))
    for level in ("25%", "50%", "all"):
        chosen = {"attention": attention, "stream": level, "proj": 512, "ffn": 256, "logits": 256}
        timed, values, extents = prepared(planner, 3000, **chosen)
        assert timed.has_streams
        assert timed.total_seconds(values, extents) == pytest.approx(Walk(timed, extents).seconds(values), rel=1e-6)


@pytest.mark.parametrize("link", [5e9, 54.7e9])
@pytest.mark.parametrize("attention", ["together", "queries", "heads"])
@pytest.mark.parametrize("rows", [128, 4096])
def test_offloaded_hidden_states_pass_through_windows(attention: str, link: float, rows: int) -> None:
    planner = Planner(load(CONFIG), device=replace(DEVICES["h200"], host_link=link, launch_s=1e-6))
    chosen = {"attention": attention, "hidden": "host", "proj": rows, "ffn": rows, "logits": 256, "heads": 2}
    for level in ("none", "50%"):
        timed, values, extents = prepared(planner, 3000, **chosen, stream=level)
        assert timed.total_seconds(values, extents) == pytest.approx(Walk(timed, extents).seconds(values), rel=1e-6)
    # the first layer's weights may come once the embedding is computed; predicted is: once it has been stored
    timed, values, extents = prepared(planner, 3000, **chosen, stream="all")
    exact = Walk(timed, extents).seconds(values)
    assert exact * (1 - 1e-6) < timed.total_seconds(values, extents) < exact * 1.05


def moved(milliseconds: int) -> int:
    """Rows of four bytes that a copy on CARD takes so long to move."""
    return milliseconds * 1_000_000 // 8


def work(g: Graph, milliseconds: int, name: str) -> None:
    """An op on the main stream that takes so long."""
    x = g.buffer(f"{name}_in", (moved(milliseconds),), "float32", kind="input")
    g.add_op("copy", x, name=name)


def fetch(g: Graph, milliseconds: int, name: str) -> None:
    """An op on the side stream that takes so long over a link as fast as the memory."""
    with g.stream("fetch"):
        host = g.buffer(f"{name}@host", (moved(milliseconds),), "float32", kind="host", tensor=name)
        g.add_op("copy", host, name=name)


def milliseconds(g: Graph, device: Device = CARD) -> float:
    return OpTimes(compile_body(g), replace(device, host_link=0.5e9)).total_seconds([], {}) * 1e3


def test_a_wait_is_for_the_op_it_names() -> None:
    g = Graph("streams")
    work(g, 10, "a")
    fetch(g, 8, "first")
    g.wait("fetch")
    fetch(g, 20, "second")  # issued before the op that waits for the first alone
    work(g, 5, "b")
    assert milliseconds(g) == pytest.approx(10 + 8 + 20)
    work(g, 30, "c")
    assert milliseconds(g) == pytest.approx(10 + 8 + 5 + 30)
    g.wait("fetch")
    work(g, 1, "d")
    assert milliseconds(g) == pytest.approx(10 + 8 + 5 + 30 + 1)


def test_a_fetch_starts_after_the_op_it_is_forked_from_and_in_turn() -> None:
    g = Graph("streams")
    work(g, 10, "a")
    fetch(g, 6, "first")
    work(g, 2, "b")
    fetch(g, 6, "second")
    g.wait("fetch")
    work(g, 1, "c")
    assert milliseconds(g) == pytest.approx(10 + 6 + 6 + 1)


def test_layers_that_repeat_are_one_block() -> None:
    def layers(count: int) -> Graph:
        g = Graph("layers")
        work(g, 1, "embed")
        for layer in range(count):
            fetch(g, 7, f"w{layer}")
            work(g, 4, f"before{layer}")
            g.wait("fetch")
            work(g, 1, f"after{layer}")
        return g

    for count in (1, 2, 3, 50):
        assert milliseconds(layers(count)) == pytest.approx(1 + (7 + 1) * count)
    timed = OpTimes(compile_body(layers(50)), CARD)
    assert [times for _, times in timed.timeline.blocks if times > 1] == [50]


def test_what_was_asked_before_does_not_change_the_answer() -> None:
    planner = Planner(load(CONFIG), device="h200")
    chosen = {"hidden": "host", "stream": "all", "proj": 512, "logits": 256}
    timed, _, extents = prepared(planner, 3000, **chosen)
    fresh = {}
    for tokens in (3000, 2000):
        for ffn in (128, 256):
            _, values, extents = prepared(planner, tokens, **chosen, ffn=ffn)
            fresh[tokens, ffn] = OpTimes(timed.body, planner.device).total_seconds(values, extents)
    for (tokens, ffn), expected in [*fresh.items(), *fresh.items()]:
        _, values, extents = prepared(planner, tokens, **chosen, ffn=ffn)
        assert timed.total_seconds(values, extents) == expected
    assert len(set(fresh.values())) == 4
