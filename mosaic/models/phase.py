"""A phase: a kind of step, composed of parts. It is one graph of a model's program, or two if it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from mosaic.errors import UsageError
from mosaic.models.inputs import ROW_BOUNDS, Input
from mosaic.models.parts import (
    KEPT,
    STATISTICS,
    TABLED,
    WHOLE,
    CachePolicy,
    CommitRule,
    Cut,
    Guidance,
    Head,
    Part,
    ReturnedLogits,
)
from mosaic.models.parts.cut import COUNT, KEPT_DIM
from mosaic.models.parts.heads import NOISE
from mosaic.models.parts.part import ResultPer
from mosaic.models.parts.windows import WINDOWS, Windows
from mosaic.models.state import State
from mosaic.registrar.bucketed import BucketedStep

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

GraphOf: TypeAlias = Literal["whole", "prefix", "suffix"]
"""Which graph of a phase: its only one, or the first or second of a cut phase."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A kind of step.

    Parameters
    ----------
    tokens
        The source of the windows' tokens: the host, or a table of requests on the device.
    cache
        Which keys and values are attended to, and which outlive the step.
    head
        The results for each unembedded row.
    commit
        How rows are scored and which are committed; None: the step returns the head's results.
    guidance
        A second copy of the sequences is computed, without the prompt.
    logits
        The logits of chosen rows are returned as well.
    cut
        The step is two graphs, the second over fewer rows; None: it is one.
    others
        Parts of other kinds, such as readers or writers of states of their own.
    held
        States with rows of other owners, which the step does not touch: its plan counts them.
    graph
        Which graph of a cut phase is meant; None for the whole step.

    Raises
    ------
    UsageError
        If the parts cannot form a step.

    Examples
    --------
    >>> from mosaic.models.parts import KEPT, NO_HEAD, Commit
    >>> Phase(cache=KEPT, head=NO_HEAD).name
    'commit'
    >>> Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic")).name
    'denoise'
    """

    tokens: Windows = WINDOWS
    cache: CachePolicy = WHOLE
    head: Head = STATISTICS
    commit: CommitRule | None = None
    guidance: Guidance | None = None
    logits: ReturnedLogits | None = None
    cut: Cut | None = None
    others: tuple[Part, ...] = ()
    held: tuple[State, ...] = ()
    graph: GraphOf = "whole"

    def __post_init__(self) -> None:
        returns = self.commit is not None or self.guidance is not None or self.logits is not None
        if not self.head.decides and (returns or not self.states):
            raise UsageError("a phase without head only fills a state: give it one, and no commit, guidance or logits.")
        if self.head.samples and self.commit is None:
            raise UsageError(f"a phase that samples ('{self.head.name}') chooses among its rows; give a commit rule.")
        if self.cached and self.guidance is not None:
            raise UsageError("guidance computes whole sequences; it has no cached phases.")
        if self.cut is not None and (not self.cached or self.commit is None or self.logits is not None):
            raise UsageError("a phase that is cut has a cache and a commit rule, and returns no logits.")
        if self.cut is None and self.graph != "whole":
            raise UsageError(f"a phase that is not cut has no {self.graph}.")
        if self.tokens.alone and (self.commit is None or self.guidance is not None):
            raise UsageError("a table of requests is for phases that commit, without guidance.")

    def __hash__(self) -> int:
        """Cached: phases are in the keys of most caches of steps."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, entry.name) for entry in fields(self)]))

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The distinct states of its parts."""
        return tuple(dict.fromkeys(state for part in self.parts for state in part.states))

    @cached_property
    def own_states(self) -> tuple[State, ...]:
        """The states that the policies of a table's requests have brought, but for that of keys."""
        return tuple([state for state in self.states if state not in (self.cache.kept, *TABLED.states)])

    @cached_property
    def noisy(self) -> bool:
        """Whether the step takes random keys."""
        return any(part.noisy for part in self.parts)

    @property
    def parts(self) -> Iterator[Part]:
        """The parts, in the order of registration."""
        found = (self.tokens, self.cache, self.cut, *self.others, self.head, self.guidance, self.commit, self.logits)
        return (part for part in found if part is not None)

    @property
    def name(self) -> str:
        """The phase's label: `full_step`, `denoise` (over cached keys), or `commit` (no head; `prefill` is a long one).
        The graphs of a cut phase are `denoise_prefix` and `denoise_suffix`."""
        if not self.head.decides:
            return "commit"
        whole = self.cache.label or ("denoise" if self.cached else "full_step")
        return whole if self.graph == "whole" else f"{whole}_{self.graph}"

    @cached_property
    def graphs(self) -> tuple[Phase, ...]:
        """The graphs of a step, in order: the phase itself, or prefix and suffix of a cut phase."""
        if self.cut is None or self.graph != "whole":
            return (self,)
        return replace(self, graph="prefix"), replace(self, graph="suffix")

    @cached_property
    def bucketed(self) -> BucketedStep | None:
        """How the two graphs of a cut phase make a step; None for an uncut phase."""
        if self.cut is None or len(self.graphs) == 1:
            return None
        cut, (prefix, suffix) = self.cut, self.graphs
        return BucketedStep(
            prefix=prefix.name, suffix=suffix.name, count=COUNT, dim=KEPT_DIM,
            buckets=lambda dims: cut.buckets(dims["tokens"]),
        )  # fmt: skip

    @property
    def cached(self) -> bool:
        """Whether keys and values are written to, and read from, a state that outlives the step."""
        return self.cache.kept is not None

    @property
    def shipped(self) -> bool:
        """Whether all parts, and all states, are of Mosaic's own classes."""
        return all(type(one).__module__.startswith("mosaic.") for one in (*self.parts, *self.held))

    @property
    def copies(self) -> int:
        """The number of windows per sequence."""
        return 1 if self.guidance is None else 2

    @property
    def reads_hidden(self) -> bool:
        """Whether a part reads the hidden states of all tokens after the last layer."""
        return any(part.reads_hidden for part in self.parts)

    @cached_property
    def covering(self) -> Phase:
        """The phase whose steps serve requests of every phase that shares a step with this one."""
        found = replace(self.any_head, cache=_covers(self.cache)[-1])
        return self if found == self else found

    @cached_property
    def any_head(self) -> Phase:
        """The phase whose steps serve requests of every phase that differs from this one in the head alone, if it commits."""
        head = self.head if self.commit is None else _covers(self.head)[-1]
        return self if head == self.head else replace(self, head=head)

    def shifts(self, arch: Architecture) -> bool:
        """Return whether packing shifts the rows of a shifted model; otherwise an op does.

        It does if a rule chooses among the rows: the first position after a window may be one of them.
        """
        return arch.shifted and self.commit is not None

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of all parts, the rows to unembed, including copies, and their random keys."""
        return _inputs(self, arch)

    @cached_property
    def results(self) -> Mapping[str, ResultPer]:
        """The outputs of all parts that go back to requests, and what one value belongs to."""
        return {name: per for part in self.parts for name, per in part.results.items()}

    def windows(self, request: Any) -> list[Any]:
        """Return the tokens of a request's window, int64 [T], and of its copy."""
        return [request.token_ids, *([] if self.guidance is None else [self.guidance.copy_of(request)])]

    def registered(self, *, logits: ReturnedLogits | None, open_states: Iterable[State]) -> Phase:
        """Return the phase with logits, and with states that other owners have rows of."""
        held = set(open_states).difference(self.states)
        return replace(self, logits=self.logits or logits, held=tuple(sorted(held, key=lambda state: state.name)))


def shared_phase(phases: Iterable[Phase]) -> Phase:
    """Return the phase whose steps serve requests of all of these, which have one covering phase. Of a table's, some may also
    attend to all keys, or evict none.

    Parts in which they agree stay as they are: what one of them costs more, only a step pays that has it.

    >>> from mosaic.models.parts import KEPT, SAMPLE, Commit
    >>> greedy, sampled = (Phase(head=head, commit=Commit(score="margin", rule="top")) for head in (STATISTICS, SAMPLE))
    >>> shared_phase([greedy, greedy]) == greedy, shared_phase([greedy, sampled]) == sampled
    (True, True)
    """
    return _shared(tuple(dict.fromkeys(phases)))


@lru_cache(maxsize=1024)
def _shared(phases: tuple[Phase, ...]) -> Phase:
    first, *others = phases
    if not others:
        return first
    caches = [phase.cache for phase in phases if phase.cache != KEPT]
    cache, mixed = _least(caches or [KEPT]), 0 < len(caches) < len(phases)
    cut = next((phase.cut for phase in phases if phase.cut is not None), None)
    head = _least([phase.head for phase in phases])
    commit = None if first.commit is None else _least([phase.commit for phase in phases])
    return replace(first, cache=cache.covering if mixed else cache, cut=cut, head=head, commit=commit)


def _least(parts: Sequence[Any]) -> Any:
    """The least of the parts that cover all of these."""
    first, *others = map(_covers, parts)
    return next(part for part in first if all(part in covers for covers in others))


def _covers(part: Any) -> list[Any]:
    """A part and what covers it, the least first."""
    found = [part]
    while (more := found[-1].covering) != found[-1]:
        found.append(more)
    return found


@lru_cache(maxsize=256)
def _inputs(phase: Phase, arch: Architecture) -> tuple[Input, ...]:
    """`Phase.inputs`, cached: every step asks."""
    if phase.tokens.alone:
        return tuple(phase.tokens.inputs(arch))
    value = before if phase.shifts(arch) else "rows"
    rows = [
        Input(name=name, dtype="int64", per="row", index=True, value=value, copy=copy)
        for copy, name in enumerate(("rows", "unconditional_rows")[: phase.copies])
    ]
    own = [entry for part in phase.parts for entry in part.inputs(arch)]
    if phase.cached and phase.head.decides and ROW_BOUNDS.name not in (entry.name for entry in own):
        own.append(ROW_BOUNDS)
    return *own, *(rows if phase.head.decides else ()), *([NOISE] if phase.noisy else ())


def before(request: Any) -> Any:
    """Return the rows that predict a request's rows in a shifted model; the first of a window predicts itself."""
    return (request.rows - 1).clamp(min=0)


FULL_STEP: Final = Phase()
"""The whole sequence, statistics of the masked rows: the phase of a model's call."""
