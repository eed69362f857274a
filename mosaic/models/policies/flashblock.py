"""FlashBlock: attention to a prefix whose output is kept for several steps of a block. Legend: B sequences, T tokens.

Each step of a block reads all keys before it, though few of its queries have changed since the step before. FlashBlock (arXiv
2602.05305) keeps the attention's output over the prefix, with its log-sum-exp, within a block, and joins it with attention to the
block's own keys, which are new in every step. LoSA (arXiv 2604.12056) does so where states are stable.

A request says in `StepRequest.values` how many keys lie before its block ("prefix"), and whether it attends to them in this step
("refreshes"). Requests that refresh and that reuse share a step. A request's rows of a block have their places in one row of the
states.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.errors import UsageError
from mosaic.models.attention.kept import KeptTogether, extents_of
from mosaic.models.inputs import Input
from mosaic.models.kept_keys import attending
from mosaic.models.parts.cache import KV, Kept
from mosaic.models.policies.policy import BlockStep, Options, Policy, is_integer, is_number, with_parts
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window
    from mosaic.models.parts.part import ResultPer
    from mosaic.models.phase import Phase
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer

CHANGE: Final = "change"
"""The output that says by how much a request's queries have changed."""


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse(Options):
    """When a block attends to its prefix again. The defaults: in its first step only.

    A step *refreshes* where it attends to the whole prefix, and keeps its output and log-sum-exp, of every layer, head and row;
    other steps *reuse* these. A block's first step refreshes: the block before has become a part of its prefix.

    Parameters
    ----------
    steps
        Steps that an output serves, the one that keeps it among them; None: all steps of a block.
    change
        Also refresh once queries have changed by this or more: the Frobenius norm of the difference to those of the last
        refresh, over that of these, of all rows that a step forwards, in the last layer that reuses. A step's change is known
        when it has run, so it is the next one that refreshes. None: changes are not measured.

    Raises
    ------
    UsageError
        A value that cannot be, in one line.

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
        """Return the options by the names that they have beside those of other policies."""
        return tuple(_NAMED)

    def with_options(self, options: Mapping[str, Any]) -> PrefixReuse:
        """Return the same with `reuse_steps` and `reuse_change`."""
        if others := [name for name in options if name not in _NAMED]:
            raise UsageError(f"attention: '{self}' selects no keys; leave {', '.join(others)} out.")
        return replace(self, **{_NAMED[name]: value for name, value in options.items()})

    def kinds(self, steps: int) -> list[str]:
        """Return which of a block's steps are like its first."""
        return ["first" if self.refreshes_in(step) else "later" for step in range(steps)]

    def refreshes_in(self, step: int) -> bool:
        """Return whether a step of a block, counted from 0, refreshes, whatever has changed."""
        return step == 0 or (self.steps is not None and step % self.steps == 0)

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Check that a model can be attended to so.

        Raises
        ------
        UsageError
            If it attends in both directions.
        """
        if not arch.block:
            raise UsageError(
                "attention: this model attends in both directions, so its keys change in every step and no output over them "
                "outlives one; reuse is for block diffusion (SDAR, LLaDA2.0, Fast-dLLM v2)."
            )


REUSES: Final[Mapping[str, PrefixReuse]] = {"flashblock": PrefixReuse()}
"""By name: FlashBlock, whose outputs serve all steps of a block."""
_NAMED: Final = {"reuse_steps": "steps", "reuse_change": "change"}


# --- what is kept, and the part of a phase ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOutputs(State):
    """What a block's rows attended to of its prefix, a row a request: of every layer that keeps and every token, all heads."""

    least_rows: int = 1
    layers: int

    def columns(self, arch: Architecture) -> int:
        """Return the numbers of all layers that keep."""
        return (self.layers or arch.layers) * arch.block * arch.attention.heads * arch.attention.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSums(PrefixOutputs):
    """The log-sum-exps that belong to them: one a head."""

    def columns(self, arch: Architecture) -> int:
        """Return the numbers of all layers that keep."""
        return (self.layers or arch.layers) * arch.block * arch.attention.heads


def kept_outputs(layers: int) -> PrefixOutputs:
    """Return the state that outputs of the first `layers` layers are kept in; 0: of all."""
    return PrefixOutputs(name=f"prefix_outputs_{layers or 'all'}", layers=layers)


def kept_sums(layers: int) -> PrefixSums:
    """Return the state that their log-sum-exps are kept in."""
    return PrefixSums(name=f"prefix_sums_{layers or 'all'}", dtype="float32", layers=layers)


def kept_queries() -> PrefixOutputs:
    """Return the state that the queries of one layer are kept in, to be compared with later ones."""
    return PrefixOutputs(name="prefix_queries", layers=1)


def reuse_states(reuse: PrefixReuse, layers: int) -> Sequence[State]:
    """Return the states of a policy that reuses outputs of the first `layers` layers; 0: of all."""
    return kept_outputs(layers), kept_sums(layers), *((kept_queries(),) if reuse.change is not None else ())


def reuse_inputs(reuse: PrefixReuse, layers: int, *, refreshes: bool) -> Sequence[Input]:
    """Return where outputs are kept and queries, how many keys a block's prefix has, and how many are attended to again."""
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


def _row(window: Window, *states: State) -> int:
    """The one row that a request has of each of the states, which are taken and given back together."""
    rows = {window.request.states[state].runs(0, 1)[0][0] for state in states}
    assert len(rows) == 1, rows
    return int(rows.pop())


def _refreshed(window: Window) -> int:
    values = window.request.values
    return int(values["prefix"]) if values["refreshes"] else 0


def check_reuse(request: Any, *, refreshes: bool) -> None:
    """Check that a request says how far its prefix goes and whether it refreshes, and forwards rows that have places.

    Raises
    ------
    UsageError
        In one line.
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
    """Windows write their keys and values, and attend to the keys before their block once for several steps.

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
        """Return, beside those of kept keys, what says where outputs are kept and which are made anew."""
        return *Kept.inputs(self, arch), *reuse_inputs(self.reuse, 0, refreshes=self.refreshes)

    @property
    def covering(self) -> Reused:
        """The policy of steps in which requests may refresh."""
        return self if self.refreshes else replace(self, refreshes=True)

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, and what is kept of the attention to them."""
        return KV, *reuse_states(self.reuse, 0)

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """By how much each request's queries have changed, where that is measured."""
        return {} if self.reuse.change is None else {CHANGE: "sequence"}

    def check(self, request: Any, arch: Architecture) -> None:
        """Check, beside what kept keys need, that a request reuses only what has a place."""
        Kept.check(self, request, arch)
        check_reuse(request, refreshes=self.refreshes)

    def ways(self) -> Sequence[Way]:
        """Return the one way: windows are short."""
        return (ReusedTogether(self),)


# --- attention --------------------------------------------------------------------------------------------------------


class JoinedLayers:
    """The attention of layers whose outputs over a prefix are kept: registered layer by layer.

    Parameters
    ----------
    reuse
        The options.
    layers
        How many first layers reuse; 0: all.
    refreshes
        Whether requests may refresh in the step.
    """

    def __init__(self, step: StepGraph, reuse: PrefixReuse, layers: int, *, refreshes: bool) -> None:
        self._layers, self._refreshes = layers, refreshes
        self._change: Buffer | None = None
        if reuse.change is not None:
            self._change = step.g.output(CHANGE, (step.seqs,), "float32")

    def attend(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register attention to all keys, over the queries' storage."""
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
    """All queries at once. A step that refreshes attends to the prefixes of those sequences that do."""

    name: ClassVar[str] = "together"
    by_rows: ClassVar[bool] = False  # the last layer keeps the outputs of all rows
    cuts = False

    def __init__(self, policy: Reused) -> None:
        KeptTogether.__init__(self)
        self._policy = policy

    def begin(self, step: StepGraph) -> None:
        """Declare what comes back of the queries."""
        self._joined = JoinedLayers(step, self._policy.reuse, 0, refreshes=self._policy.refreshes)

    def attended(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register the attention of one layer over the queries' storage."""
        return self._joined.attend(step, layer, q)


# --- hooks ------------------------------------------------------------------------------------------------------------


class Reusing(Policy):
    """Refreshes in a block's first step, as its keys come after those of the block before, and wherever options ask for it."""

    def __init__(self, options: PrefixReuse, config: Any, arch: Architecture, positions: int) -> None:
        self._reuse = options
        self._taken = 0
        self._refreshed: dict[int, int] = {}  # by position: the steps before it was last refreshed
        self._changed = False
        if options.change is not None:
            self.waits = (
                "how much queries change is known when a step's outcome is read; leave one out, or reuse for a number of "
                "steps."
            )

    def refreshes(self, step: BlockStep) -> bool:
        """Return whether a step refreshes: by its number, or by what has been taken of the positions of its window."""
        if not self._refreshed:
            return self._reuse.refreshes_in(step.number)
        oldest = min(self._refreshed.get(position, -1) for position in self._of_block(step))
        served = self._reuse.steps is not None and self._taken - oldest >= self._reuse.steps
        return oldest < 0 or served or self._changed

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Attend with what is kept, but in steps that write final keys."""
        if step.writes:
            return phase
        return with_parts(phase, cache=Reused(reuse=self._reuse, refreshes=self.refreshes(step)))

    def tell(self, step: BlockStep, request: Any) -> None:
        """Say where the prefix ends, and whether the step refreshes."""
        if not step.writes:
            step.values |= {"prefix": step.start, "refreshes": self.refreshes(step)}

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Note which rows were refreshed, and by how much queries have changed."""
        if step.values["refreshes"]:
            self._refreshed.update(dict.fromkeys(self._of_block(step), self._taken))
        if self._reuse.change is not None:
            self._changed = float(result.values[CHANGE]) >= self._reuse.change
        self._taken += 1

    def _of_block(self, step: BlockStep) -> range:
        return range(max(step.window[0], step.start), step.window[1])
