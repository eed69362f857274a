"""A body whose repeated layers are counted on is the body of the graph with all of its layers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from mosaic.errors import GraphError
from mosaic.models import PRESETS, load
from mosaic.models.parts import KEPT, LOGITS, NO_HEAD, Commit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.policies.flashblock import PrefixReuse, Reused
from mosaic.models.policies.focus import Focus
from mosaic.models.policies.focus_options import Eviction
from mosaic.models.policies.mage import Selected
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.planner.body import Body
from mosaic.planner.compiling import compile_body, copies
from mosaic.registrar.validate import validate

TOP = Commit(score="confidence", rule="top")
PLAIN = {"full": FULL_STEP, "denoise": Phase(cache=KEPT, commit=TOP), "fill": Phase(cache=KEPT, head=NO_HEAD)}
SPARSE = {
    "plain": SparseAttention(),
    "ends": SparseAttention(exact_layers=3, exact_last=2, by="bounds", selects="every", page=16),
}
OTHERS = {
    **PLAIN,
    "logits": Phase(logits=LOGITS),
    **{
        f"sparse {name}, {'selecting' if selects else 'reading'}": Phase(
            cache=Selected(attention=chosen, selects=selects), commit=TOP
        )
        for name, chosen in SPARSE.items()
        for selects in (True, False)
    },
    **{
        f"reuse, {'fresh' if fresh else 'kept'}": Phase(
            cache=Reused(reuse=PrefixReuse(change=0.1), refreshes=fresh), commit=TOP
        )
        for fresh in (True, False)
    },
    "evicting": Phase(cache=KEPT, commit=TOP, cut=Focus(eviction=Eviction())),
}


def read(body: Body) -> Mapping[str, Any]:
    """All that a body says, by names: buffers that programs share come in another order."""
    names, regions = [b.name for b in body.buffers], [None, *(r.name for r in body.regions)]
    assert len(set(names)) == len(names)

    def size(row: int) -> Any:
        powers = zip(body.exponents.tolist(), body.coefficients[row].tolist(), strict=True)
        return int(body.denominators[row]), sorted((power, c) for power, c in powers if c)

    def region(index: int | None) -> str | None:
        return regions[0 if index is None else index + 1]

    def listed(ids: list[int]) -> list[str]:
        return [names[b] for b in ids]

    return {
        "variables": body.variables,
        "ops": [
            op._replace(
                region=region(op.region), reads=listed(op.reads), writes=listed(op.writes), updates=listed(op.updates),
                operands={name: names[b] for name, b in op.operands.items()}, inplace=[*map(listed, op.inplace)],
                flops=size(op.flops), bytes=size(op.bytes), rate_rows=size(op.rate_rows), rate_columns=size(op.rate_columns),
            )  # type: ignore[arg-type]
            for op in body.ops
        ],
        "buffers": {
            b.name: b._replace(
                shape=[*map(size, b.shape)], bytes=size(b.bytes), home=region(b.home), alias_offset=size(b.alias_offset),
                alias_of=None if b.alias_of is None else names[b.alias_of],
            )  # type: ignore[arg-type]
            for b in body.buffers
        },
        "workspace": [b.name for b in body.buffers if b.pool == "workspace"],
        "regions": [r._replace(parent=region(r.parent)) for r in body.regions],  # type: ignore[arg-type]
        "barriers": [(name, listed(ids), start, end) for name, ids, start, end in body.barriers],
        "edges": body.edges,
    }  # fmt: skip


USUAL = ("llada-8b", "llada2-mini")
"""Models whose graphs the test command looks at."""


@pytest.mark.some
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *(
            pytest.param(name, phase, id=f"{name}, {kind}", marks=() if name in USUAL else pytest.mark.soak)
            for name in PRESETS
            for kind, phase in PLAIN.items()
        ),
        *(pytest.param("sdar-1.7b", phase, id=f"sdar-1.7b, {kind}") for kind, phase in OTHERS.items()),
    ],
)
def test_a_brief_graph_has_the_body_of_the_whole_one(name: str, phase: Phase) -> None:
    model, rng, runs = load(name), random.Random(f"{name} {phase}"), 0
    for graph in phase.graphs:
        choices = [*model.graph(phase=graph, brief=True).choices.values()]
        for stream in ("none", rng.choice(("25%", "50%", "75%", "all"))):
            taken = {choice.name: rng.choice(choice.options) for choice in choices}
            if stream in next(choice.options for choice in choices if choice.name == "stream"):
                taken["stream"] = stream
            brief = model.graph(phase=graph, choices=taken, brief=True)
            whole = model.graph(phase=graph, choices=taken)
            validate(brief)
            assert read(compile_body(brief)) == read(compile_body(whole)), taken
            assert not whole.runs and len(brief.ops) <= len(whole.ops)
            runs += len(brief.runs)
    assert runs


def test_numbers_are_counted_on_wherever_they_stand() -> None:
    first, second = ["layers.1/a.04%", 3, {"x": [7, 2]}, 0.125], ["layers.2/a.04%", 8, {"x": [8, 2]}, 0.125]
    assert copies(first, second, 2) == [
        ("layers.3/a.04%", 13, {"x": [9, 2]}, 0.125),
        ("layers.4/a.04%", 18, {"x": [10, 2]}, 0.125),
    ]


@pytest.mark.parametrize("other", [["layers.2/b"], ["layers.2/a", 1], [2], ["layers.2/a.3"]])
def test_layers_that_differ_in_more_are_refused(other: list[Any]) -> None:
    with pytest.raises(GraphError, match="differ in more than numbers"):
        copies(["layers.1/a"], other, 1)
