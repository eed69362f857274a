"""FlashBlock: attention output over a prefix, reused for several steps of a block. Legend: B sequences, T tokens.

Each step of a block reads all keys before it, though few of its queries have changed since the last step. FlashBlock
(arXiv 2602.05305) keeps the attention's output over the prefix, with its log-sum-exp, within a block, and merges it
with attention to the block's own keys, which is computed in every step. LoSA (arXiv 2604.12056) reuses outputs of rows
whose states are stable.

`StepRequest.values` has the number of keys before the request's block ("prefix"), and whether this step attends to them
("refreshes"). Requests that refresh and requests that reuse may share a step. The block's rows have places in the
request's one row of the states.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.errors import UsageError
from mosaic.models.attention.kept import KeptTogether, extents_of
from mosaic.models.inputs import Input, together
from mosaic.models.kept_keys import attending
from mosaic.models.parts.cache import KV, Kept
from mosaic.models.policies.policy import BlockStep, Options, Policy, is_integer, is_number, marks_of, with_parts
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Supply, Window
    from mosaic.models.parts.part import ResultPer
    from mosaic.models.phase import Phase
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer

CHANGE: Final = "change"
"""The output with the relative change of a request's queries."""


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse(Options):
    """When a block attends to its prefix again. By default only in its first step.

    A step *refreshes* if it attends to the whole prefix and keeps output and log-sum-exp of every layer, head and row.
    Other steps *reuse* them. A block's first step always refreshes: its prefix has grown by the previous block.

    Parameters
    ----------
    steps
        Steps per refresh, the refresh included; None: all steps of a block.
    change
        Also refresh after the queries have changed by at least this: the Frobenius norm of the difference to the
        queries of the last refresh, divided by the norm of those, over all rows of a step, in the last layer that
        reuses. A step's change is known after it has run, so the next step refreshes. None: changes are not measured.

    Raises
    ------
    UsageError
        If a value is invalid; the message is one line.

    Examples
    --------
    >>> str(PrefixReuse()), str(PrefixReuse(steps=4)), PrefixReuse(steps=4).refreshes_in(8)
    ('flashblock', 'reuse(steps=4)', True)
    """

    word: ClassVar[str] = "reuse"
    adjective: ClassVar[str] = "reusing"
    steps: int | None = None
    change: float | None = None

    def __post_init__(self) -> None:
        steps, change = self.steps, self.change
        if steps is not None and not is_integer(steps, 1):
            raise UsageError(
                f"attention: an output over the prefix serves {steps!r} steps; it must be an integer of at least 1, the step "
                "that keeps it."
            )
        if change is not None and not (is_number(change) and 0 <= change <= sys.float_info.max):
            raise UsageError(
                f"attention: change is {change!r}; it must be a number of at least 0, relative to queries."
            )

    @classmethod
    def presets(cls) -> Mapping[str, PrefixReuse]:
        """Return `REUSES`."""
        return REUSES

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the options under the names that they have beside other policies' options."""
        return tuple(_NAMED)

    def with_options(self, options: Mapping[str, Any]) -> PrefixReuse:
        """Return a copy with `reuse_steps` and `reuse_change` set."""
        if others := [name for name in options if name not in _NAMED]:
            raise UsageError(f"attention: '{self}' selects no keys; leave {', '.join(others)} out.")
        return replace(self, **{_NAMED[name]: value for name, value in options.items()})

    def kinds(self, steps: int) -> list[str]:
        """Return a word per step of a block: "first" for a refresh, else "later"."""
        return ["first" if self.refreshes_in(step) else "later" for step in range(steps)]

    def refreshes_in(self, step: int) -> bool:
        """Return whether a step of a block, counted from 0, refreshes regardless of changes."""
        return step == 0 or (self.steps is not None and step % self.steps == 0)

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Check that a model supports reuse.

        Raises
        ------
        UsageError
            If the model is bidirectional.
        """
        if not arch.block:
            raise UsageError(
                "attention: this model attends in both directions, so its keys change in every step and no output over them "
                "can be reused; reuse is for block diffusion (SDAR, LLaDA2.0, Fast-dLLM v2)."
            )


REUSES: Final[Mapping[str, PrefixReuse]] = {"flashblock": PrefixReuse()}
"""Presets: FlashBlock, whose outputs serve all steps of a block."""
_NAMED: Final = {"reuse_steps": "steps", "reuse_change": "change"}


# --- what is kept, and the part of a phase ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOutputs(State):
    """Attention outputs over a block's prefix, one row per request: all layers that keep, all tokens, all heads."""

    least_rows: int = 1
    slot: int = 1
    layers: int

    def columns(self, arch: Architecture) -> int:
        """Return the columns over all layers that keep."""
        return (self.layers or arch.layers) * arch.block * arch.attention.heads * arch.attention.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSums(PrefixOutputs):
    """The log-sum-exps of the outputs: one per head."""

    def columns(self, arch: Architecture) -> int:
        """Return the columns over all layers that keep."""
        return (self.layers or arch.layers) * arch.block * arch.attention.heads


def kept_outputs(layers: int) -> PrefixOutputs:
    """Return the state for outputs of the first `layers` layers; 0: all."""
    return PrefixOutputs(name=f"prefix_outputs_{layers or 'all'}", layers=layers)


def kept_sums(layers: int) -> PrefixSums:
    """Return the state for their log-sum-exps."""
    return PrefixSums(name=f"prefix_sums_{layers or 'all'}", dtype="float32", layers=layers)


def kept_queries() -> PrefixOutputs:
    """Return the state for the queries of one layer, with which later ones are compared."""
    return PrefixOutputs(name="prefix_queries", layers=1)


def reuse_states(reuse: PrefixReuse, layers: int) -> Sequence[State]:
    """Return the states of a policy that reuses outputs of the first `layers` layers; 0: all."""
    return kept_outputs(layers), kept_sums(layers), *((kept_queries(),) if reuse.change is not None else ())


def reuse_inputs(reuse: PrefixReuse, layers: int, *, refreshes: bool) -> Sequence[Input]:
    """Return the inputs: rows of outputs and queries, each block's prefix length, and its keys to attend to again."""
    found = [
        Input(
            name="kept_row", dtype="int64", per="sequence",
            value=lambda window: _row(window, kept_outputs(layers), kept_sums(layers)),
        ),
        Input(name="prefix", dtype="int32", per="sequence", value="prefix"),
    ]  # fmt: skip
    if reuse.change is not None:
        found.append(
            Input(name="queries_row", dtype="int64", per="sequence", value=lambda window: _row(window, kept_queries()))
        )
    if refreshes:
        found.append(Input(name="refreshed", dtype="int32", per="sequence", value=_refreshed))
    return found


def reuse_of_table(
    reuse: PrefixReuse, layers: int, step: StepGraph, served: Mapping[str, Buffer]
) -> Mapping[str, Supply]:
    """Return the same inputs of requests of a table."""
    own = kept_outputs(layers).own_column
    return together(
        ("kept_row", "prefix", "refreshed"),
        lambda: step.g.add_op(
            "reuse_requests", served["requests"], served["served"], name="reusing", own=own, steps=reuse.steps or 0
        ),
    )


def _row(window: Window, *states: State) -> int:
    """The row number that a request has in all of the states, which are taken and given back together."""
    rows = {window.request.states[state].runs(0, 1)[0][0] for state in states}
    assert len(rows) == 1, rows
    return int(rows.pop())


def _refreshed(window: Window) -> int:
    values = window.request.values
    return int(values["prefix"]) if values["refreshes"] else 0


def check_reuse(request: Any, *, refreshes: bool) -> None:
    """Check that a request gives its prefix and whether it refreshes, and forwards rows that have places.

    Raises
    ------
    UsageError
        With a message of one line.
    """
    values = request.values
    if not {"prefix", "refreshes"} <= values.keys():
        raise UsageError(
            'reuse: a request says values={"prefix": keys before its block, "refreshes": whether it does}.'
        )
    if values["refreshes"] and not refreshes:
        raise UsageError("reuse: a request that refreshes is for a phase whose steps do; use its covering phase.")
    if not values["refreshes"] and request.start < values["prefix"]:
        raise UsageError(
            f"reuse: a window from position {request.start} on reuses what is kept from {values['prefix']} on; refresh."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Kept):
    """Windows write their keys and values; a block attends to the keys before it once for several steps.

    Parameters
    ----------
    reuse
        The options.
    refreshes
        Whether requests may refresh in the step.
    """

    reuse: PrefixReuse
    refreshes: bool

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of kept keys, and those of outputs and refreshes."""
        return *Kept.inputs(self, arch), *reuse_inputs(self.reuse, 0, refreshes=self.refreshes)

    def of_table(self, step: StepGraph, served: Mapping[str, Buffer]) -> Mapping[str, Supply]:
        """Return the inputs of outputs and refreshes."""
        return reuse_of_table(self.reuse, 0, step, served)

    @property
    def covering(self) -> Reused:
        """The policy of steps in which requests may refresh."""
        return self if self.refreshes else replace(self, refreshes=True)

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, and the outputs over them."""
        return KV, *reuse_states(self.reuse, 0)

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The relative change of each request's queries, if it is measured."""
        return {} if self.reuse.change is None else {CHANGE: "sequence"}

    def check(self, request: Any, arch: Architecture) -> None:
        """Check the needs of kept keys, and that a request reuses only rows that have places."""
        Kept.check(self, request, arch)
        check_reuse(request, refreshes=self.refreshes)

    def ways(self) -> Sequence[Way]:
        """Return the only option: windows are short."""
        return (ReusedTogether(self),)


# --- attention --------------------------------------------------------------------------------------------------------


class JoinedLayers:
    """The attention of layers that reuse outputs over a prefix, registered layer by layer.

    Parameters
    ----------
    reuse
        The options.
    layers
        The number of first layers that reuse; 0: all.
    refreshes
        Whether requests may refresh in the step.
    """

    def __init__(self, step: StepGraph, reuse: PrefixReuse, layers: int, *, refreshes: bool) -> None:
        self._layers, self._refreshes = layers, refreshes
        self._change: Buffer | None = None
        if reuse.change is not None:
            self._change = step.g.output(CHANGE, (step.seqs,), "float32")

    def attend(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register attention to all keys; results replace queries."""
        g, arch, inputs = step.g, step.arch, step.inputs
        where, new = inputs["prefix"], [inputs["refreshed"]] if self._refreshes else []
        if self._change is not None and layer + 1 == (self._layers or arch.layers):
            g.add_op(
                "query_change", q, g[kept_queries().name], inputs["queries_row"], where, step.cu_seqlens, step.positions, *new,
                out=self._change, name="change", rows=arch.block,
            )  # fmt: skip
        sizes = attending(arch, layer)
        fresh: tuple[Buffer, ...] = ()
        if self._refreshes:
            fresh = g.add_op(
                "prefix_attention", q, step.kv, *extents_of(step), *new, step.cu_seqlens, step.positions,
                name="prefix_attention", block=arch.block, span=step.span, keys=g.dim("keys"), parts=g.dim("parts"), **sizes,
            )  # fmt: skip
        y: Buffer = g.add_op(
            "joined_attention", q, step.kv, *extents_of(step), inputs["seen"], step.cu_seqlens, step.positions, where,
            g[kept_outputs(self._layers).name], g[kept_sums(self._layers).name], inputs["kept_row"], *fresh, *new,
            name="attention", slot=layer, rows=arch.block, block=arch.block, **sizes,
        )  # fmt: skip
        g.add_alias(y, q)
        return y


class ReusedTogether(KeptTogether):
    """All queries at once. A step that refreshes attends to the prefixes of the sequences that refresh."""

    name: ClassVar[str] = "together"
    by_rows: ClassVar[bool] = False  # the last layer keeps the outputs of all rows
    cuts = False

    def __init__(self, policy: Reused) -> None:
        KeptTogether.__init__(self)
        self._policy = policy

    def begin(self, step: StepGraph) -> None:
        """Declare the output with the change of queries."""
        self._joined = JoinedLayers(step, self._policy.reuse, 0, refreshes=self._policy.refreshes)

    def attended(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register the attention of one layer; results replace queries."""
        return self._joined.attend(step, layer, q)


# --- hooks ------------------------------------------------------------------------------------------------------------


class Reusing(Policy):
    """Refreshes in a block's first step, because its prefix has grown, and wherever the options ask for it."""

    def __init__(self, options: PrefixReuse, config: Any, arch: Architecture, positions: int) -> None:
        self._reuse = options
        self._taken = 0
        self._refreshed: dict[int, int] = {}  # by position: the step that refreshed it last
        self._changed = False
        self.tabled = options.change is None

    def refreshes(self, step: BlockStep) -> bool:
        """Return whether a step refreshes: by its number, or if rows of its window lack an output that still serves."""
        if not self._refreshed:
            return self._reuse.refreshes_in(step.number)
        oldest = min(self._refreshed.get(position, -1) for position in self._of_block(step))
        served = self._reuse.steps is not None and self._taken - oldest >= self._reuse.steps
        return oldest < 0 or served or self._changed

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Reuse outputs, unless the step writes final keys."""
        if step.writes:
            return phase
        return with_parts(phase, cache=Reused(reuse=self._reuse, refreshes=self.refreshes(step)))

    def of_table(self, phase: Phase, step: BlockStep) -> tuple[Phase, int] | None:
        """Mark the steps that refresh, which follow from a step's number if changes are not measured."""
        marks = marks_of(self._reuse.refreshes_in, step.end - step.start) if self.tabled else None
        return None if marks is None else (with_parts(phase, cache=Reused(reuse=self._reuse, refreshes=False)), marks)

    def tell(self, step: BlockStep, request: Any) -> None:
        """State the length of the prefix, and whether the step refreshes."""
        if not step.writes:
            step.values |= {"prefix": step.start, "refreshes": self.refreshes(step)}

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Record the refreshed rows, and the change of queries."""
        if step.values["refreshes"]:
            self._refreshed.update(dict.fromkeys(self._of_block(step), self._taken))
        if self._reuse.change is not None:
            self._changed = float(result.values[CHANGE]) >= self._reuse.change
        self._taken += 1

    def _of_block(self, step: BlockStep) -> range:
        return range(max(step.window[0], step.start), step.window[1])
