"""Pictures of graphs: what is drawn agrees with the graph, repeats are folded, pictures are reproducible PNGs."""

from __future__ import annotations

import struct
import sys

import diffusion_gemma_toy as toy
import pytest

from mosaic import viz
from mosaic.errors import MissingExtra
from mosaic.models import PRESETS, load
from mosaic.planner import plan_program
from mosaic.registrar.graph import Graph
from mosaic.registrar.operator import Operator
from mosaic.viz.graph_picture import Picture, graph_figure, graph_png

COPY = Operator(name="copy", operands="x:a[*T] -> y:a[*T]")
OVER = Operator(name="over", operands="x:a[*T] -> y:a[*T]", inplace=(("y", "x"),))
LOOK = Operator(name="look", operands="x:a[*T] -> y:f32[1]")


def layered(layers: int, *, odd: int | None = None) -> Graph:
    """x through equal layers of two ops each, one of them odd, then an output; a side stream beside."""
    g = Graph("layered")
    tokens = g.dim("tokens")
    x = g.input("x", (tokens, 8), "float32")
    with g.stream("side"):
        seen = g.add_op(LOOK, x, name="beside")
    for layer in range(layers):
        with g.scope(f"layers.{layer}"), g.chunk("k", over=tokens):
            h = g.add_op(COPY, x, name="h")
            g.add_op(OVER if layer == odd else COPY, h, name="y")
    g.wait("side")
    g.add_op(COPY, x, out=g.output("out", (tokens, 8), "float32"), name="end")
    g.add_op(COPY, seen, out=g.output("seen", (1,), "float32"), name="seen_end")
    return g


def labels(g: Graph) -> list[str]:
    return [row.label for row in Picture(g).rows if row.kind is None]


def test_equal_layers_are_drawn_once() -> None:
    picture = Picture(layered(5))
    assert labels(layered(5)) == ["beside", "h", "y", "end", "seen_end"]
    assert [frame.label for frame in picture.frames] == ["layers.0 … 4   x 5", "k: chunks of tokens"]
    assert [(frame.first, frame.last) for frame in picture.frames] == [(2, 3), (2, 3)]
    assert {picture.row_of[op.index] for op in picture.graph.ops if op.name.endswith("/h")} == {2}


def test_layers_that_differ_are_not_folded() -> None:
    assert labels(layered(4, odd=2)) == ["beside", "h", "y", "h", "y", "h", "y", "end", "seen_end"]
    frames = [frame.label for frame in Picture(layered(4, odd=2)).frames if frame.label.startswith("layers")]
    assert frames == ["layers.0 … 1   x 2", "layers.2", "layers.3"]


def test_rails_show_who_writes_and_reads() -> None:
    picture = Picture(layered(3))
    rails = {rail.name: rail for rail in picture.rails}
    assert set(rails) == {"x", "beside", "layers.0/h", "layers.0/y", "out", "seen"}
    assert (rails["x"].writes, rails["x"].reads) == ({0}, {1, 2, 4})
    assert (rails["layers.0/h"].writes, rails["layers.0/h"].reads) == ({2}, {3})
    assert (rails["out"].kind, rails["out"].reads) == ("output", {6})  # to below the last row: it outlives the step
    for first in picture.rails:
        for second in picture.rails:
            if first is not second and first.lane == second.lane:
                assert max(first.rows) < min(second.rows) or max(second.rows) < min(first.rows)


def test_aliases_share_a_rail() -> None:
    picture = Picture(load("llada-8b").graph())
    queries = next(rail for rail in picture.rails if rail.name == "layers.0/q")
    attention = [row.label for row in picture.rows].index("attention")
    assert attention in queries.writes
    assert not any(rail.name.endswith("/attention") for rail in picture.rails)


def test_side_streams_have_their_own_lane() -> None:
    picture = Picture(layered(2))
    assert [row.stream for row in picture.rows if row.label == "beside"] == [1]
    assert picture.box_x(1) >= picture.box_x(0) + picture.width_of_box


@pytest.mark.parametrize("name", [*PRESETS, "encode", "denoise", "commit_then_denoise"])
def test_every_op_has_a_row_and_every_row_its_height(name: str) -> None:
    g = load(name).graph() if name in PRESETS else toy.program().graph(name)
    picture = Picture(g)
    assert set(picture.row_of) == set(range(len(g.ops)))
    drawn = set(picture.row_of.values())
    assert len(drawn) + sum(row.kind is not None for row in picture.rows) == len(picture.rows)
    assert picture.y == sorted(picture.y)
    if name in PRESETS:
        kinds = len(set(load(name).architecture.stack))  # of layers; each is drawn once
        assert len(picture.rows) < 20 + 20 * kinds


def test_the_picture_names_ops_and_buffers() -> None:
    pytest.importorskip("matplotlib")
    texts = {text.get_text() for text in graph_figure(layered(3)).axes[0].texts}
    assert {"layered", "beside", "h", "y", "end", "copy", "layers.0 … 2   x 3", "k: chunks of tokens"} <= texts
    assert "out float32 [tokens, 8]" in texts
    assert "10 ops, 4 of them folded into repeats; dims tokens" not in texts  # 9 ops: 1 + 3 x 2 + 2
    assert "9 ops, 4 of them folded into repeats; dims tokens" in texts


def test_a_png_of_sensible_size_the_same_every_time() -> None:
    pytest.importorskip("matplotlib")
    first, second = graph_png(layered(4)), graph_png(layered(4))
    assert first == second
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", first[16:24])
    assert 400 < width < 1600
    assert 200 < height < 1600
    assert layered(4)._repr_png_() == first


def test_without_matplotlib_notebooks_fall_back_to_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    g = layered(1)
    assert g._repr_png_() is None
    assert repr(g).startswith("Graph 'layered': 5 ops")
    with pytest.raises(MissingExtra, match=r"drawing a picture needs matplotlib: pip install 'mosaic-dllm\[viz\]'"):
        graph_png(g)


@pytest.mark.some
@pytest.mark.parametrize("step", ["encode", "denoise", "commit_then_denoise"])
def test_plans_of_a_users_own_dims_can_be_drawn(step: str) -> None:
    """Pictures and reports must not take a dim named `tokens` for granted."""
    pytest.importorskip("matplotlib")
    plan = plan_program(toy.program(), dims=toy.dims(prefix=8192), device="h200")[step]
    assert "8,192 kv_tokens" in viz.text_timeline(plan.document)
    assert "8,192 kv_tokens" in viz.html_report(plan.document)
    assert "kv_tokens=8192" in repr(plan)
    assert viz.plan_png(plan.document).startswith(b"\x89PNG")
    assert viz.trace_json(plan.document) and viz.snapshot_pickle(plan.document)
