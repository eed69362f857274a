"""The last layer computes what is returned or kept and nothing else, in every phase and option."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from covering import some_of
from test_weight_addresses import CONFIGS, PHASES

import mosaic
from mosaic.errors import GraphError
from mosaic.models.parts import KEPT, NO_HEAD, Part
from mosaic.models.phase import Phase
from mosaic.registrar.graph import Graph


def useless_ops(graph: Graph) -> list[str]:
    """Ops of whose results nothing is returned, kept, or read by an op that has a use."""
    used = {graph.root(b).id for b in graph.buffers if b.kind in ("output", "state")}
    found = []
    for op in reversed(graph.ops):
        if used.isdisjoint(graph.root(buffer).id for buffer in op.writes):
            found.append(op.name)
        else:
            used.update(graph.root(buffer).id for buffer in op.reads)
    return found


@pytest.mark.some
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.soak if name in ("dream", "sdar") else ()) for name in CONFIGS]
)
def test_every_op_of_every_phase_has_a_use(family: str) -> None:
    model = mosaic.models.load(CONFIGS[family])
    for phase in PHASES:
        options = {choice.name: choice.options for choice in model.graph(phase=phase).choices.values()}
        for choices in some_of(options, 3, f"{family} {phase}"):
            assert not useless_ops(model.graph(backend="cpu", choices=choices, phase=phase)), (phase, choices)


@dataclass(frozen=True, slots=True)
class Echo(Part):
    """Gives back the hidden states of all tokens, and says so or not."""

    says: bool

    @property
    def reads_hidden(self) -> bool:
        return self.says

    def finish(self, step: Any) -> None:
        hidden = step.hidden.buffer
        step.g.add_op("copy", hidden, out=step.g.output("echo", hidden.shape, hidden.dtype), name="echo")


def test_hidden_states_of_all_tokens_are_there_for_parts_that_say_so() -> None:
    model = mosaic.models.load(next(iter(CONFIGS.values())))
    fill = Phase(cache=KEPT, head=NO_HEAD, others=(Echo(True),))
    assert not useless_ops(model.graph(phase=fill))
    with pytest.raises(GraphError, match="set `reads_hidden` on the part that reads them"):
        model.graph(phase=Phase(cache=KEPT, head=NO_HEAD, others=(Echo(False),)))


@pytest.mark.some
@pytest.mark.parametrize("family", CONFIGS)
def test_only_rows_to_decide_pass_what_follows_the_last_keys(family: str) -> None:
    """Unless a part needs the others, or the head is fetched beside the layer."""
    model = mosaic.models.load(CONFIGS[family])
    last = f"layers.{model.architecture.layers - 1}/"
    for phase in PHASES:
        if not phase.cached or not phase.head.decides:
            continue
        options = {choice.name: choice.options for choice in model.graph(phase=phase).choices.values()}
        for choices in some_of(options, 3, f"{family} {phase}"):
            for part, whole in ((None, choices["stream"] == "all"), (Echo(True), True)):
                graph = model.graph(
                    backend="cpu", choices=choices, phase=replace(phase, others=(part,) if part else ())
                )
                (stored,) = (op.index for op in graph.ops if op.name == f"{last}store")
                later = [op for op in graph.ops[stored:] if op.name.startswith(last) and op.operator.name != "kv_store"]
                dims = {op.region.over.name if op.region else "tokens" for op in later}
                assert later and dims <= ({"tokens"} if whole else {"masked"}), (phase, choices)
