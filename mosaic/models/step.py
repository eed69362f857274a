"""The size of a step, which planning, admission, packing and execution share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import lt
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from mosaic.errors import UsageError
from mosaic.models.parts import LOGITS
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.registrar.bucketed import BucketedStep

MAX_TOKENS: Final = 2**31 - 1
"""Positions and sequence bounds are int32."""
FEWEST_ROWS: Final = 16
FEWEST_KEYS: Final = 64
FEWEST_EXTENTS: Final = 16
MOST_DOUBLED: Final = 256
MOST_PADDED: Final = 64
"""The least size that decoding steps are planned for, and the size up to which plans are for powers of two. A few rows
take about as long as one, so a generation whose masks get fewer needs few plans, each captured once. Tokens of padded
windows are rounded to powers of two up to `MOST_PADDED`."""


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The size of one step over one or more sequences. What a step asks for whenever it runs is found once.

    Parameters
    ----------
    phase
        The kind of step.
    windows
        Tokens of each sequence; in cached phases, of each window.
    keys
        Cached phases: keys that each window sees, its own included.
    owned
        Cached phases: tokens that each sequence has rows of the state for; by default the keys it sees. A step is
        planned for all of them, so one plan, and one captured graph, serves it while the window moves on.
    extents
        Cached phases: extents of the rows of all sequences; by default one per sequence.
    rows
        Rows to decide, of all sequences together; 0 if the phase has no head.
    logit_rows
        Rows whose logits are returned.
    kept
        Second graph of a cut phase: the rows that it computes.
    states
        Rows of each state, of all owners together. By default a state of the phase that grows with the tokens owned,
        such as the kept keys, has the rows that these take; any other state has one row.
    exact
        The numbers are planned for as they are: whoever asks has rounded them.

    Raises
    ------
    UsageError
        If the numbers contradict each other.

    Examples
    --------
    >>> StepSize(windows=(8, 3), rows=4).dims()
    {'tokens': 11, 'seqs': 2, 'span': 7, 'masked': 4}
    """

    phase: Phase = FULL_STEP
    windows: tuple[int, ...]
    keys: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    extents: int = 0
    rows: int = 0
    logit_rows: int = 0
    kept: int = 0
    states: Mapping[State, int] = field(default_factory=dict, hash=False)
    exact: bool = False

    def __post_init__(self) -> None:
        states = {state: rows for state, rows in self.states.items() if rows}
        kept = self.phase.cache.kept
        if kept is not None:
            object.__setattr__(self, "owned", self.owned or self.keys)
            object.__setattr__(self, "extents", self.extents or len(self.owned))
        for state, rows in self.phase.cache.rows(self.owned).items():
            states.setdefault(state, rows)
        for state in self.phase.states:
            states.setdefault(state, 1)
        object.__setattr__(self, "states", MappingProxyType(states))
        if not self.has_rows:
            object.__setattr__(self, "rows", 0)
        if not self.windows or min(self.windows) < 1:
            raise UsageError(f"a step has at least one window, of at least one token; got {list(self.windows)}.")
        tokens = self.tokens
        if tokens > MAX_TOKENS:
            raise UsageError(f"at most {MAX_TOKENS:,} tokens (positions are 32-bit), got {tokens:,}.")
        if self.has_rows and not 1 <= self.rows <= tokens:
            raise UsageError(f"masked rows must be between 1 and the {tokens:,} tokens, got {self.rows:,}.")
        if not 0 <= self.logit_rows <= tokens:
            raise UsageError(f"logit rows must be between 0 and the {tokens:,} tokens, got {self.logit_rows:,}.")
        if (self.phase.graph == "suffix") != (self.kept > 0) or self.kept > tokens:
            raise UsageError(
                f"the second graph of a step that is cut computes 1 to {tokens:,} rows, got {self.kept:,}."
            )
        self._check_keys()

    def _check_keys(self) -> None:
        kept = self.phase.cache.kept
        if kept is None:
            if self.keys or self.owned:
                raise UsageError("keys are seen in cached phases.")
            return
        if not len(self.owned) == len(self.keys) == len(self.windows):
            raise UsageError(f"{len(self.windows)} windows need one number of keys each, got {len(self.keys)}.")
        if any(map(lt, self.keys, self.windows)):
            window, keys = next(
                (window, keys) for window, keys in zip(self.windows, self.keys, strict=True) if keys < window
            )
            raise UsageError(f"a window of {window:,} tokens sees at least its own keys, got {keys:,}.")
        if any(map(lt, self.owned, self.keys)):
            keys, owned = next((keys, owned) for keys, owned in zip(self.keys, self.owned, strict=True) if owned < keys)
            raise UsageError(f"a window that sees {keys:,} keys has rows for as many tokens, got {owned:,}.")
        if self.states[kept] < max(self.owned):
            raise UsageError(f"{max(self.owned):,} keys do not fit {self.states[kept]:,} rows of the state.")

    @cached_property
    def tokens(self) -> int:
        """Tokens of all windows together, rounded up if the phase pads windows."""
        count = sum(self.windows)
        return bucket(count, doubled=MOST_PADDED, share=self._share) if self.phase.tokens.padded else count

    @property
    def _share(self) -> int:
        """The largest relative rounding of tokens and rows to decide: a quarter for a cut step. Its cost depends little
        on them, and every such number multiplies the sizes of its second graph."""
        return 8 if self.phase.cut is None else 4

    @property
    def has_rows(self) -> bool:
        """Whether the phase decides rows."""
        return self.phase.head.decides

    @property
    def name(self) -> str:
        """The name of its graph."""
        return self.phase.name

    @cached_property
    def follows(self) -> bool:
        """Whether it reads carries of another graph."""
        return self.kept > 0

    @cached_property
    def takes_all(self) -> bool:
        """Whether this graph must have every setting of a call; each of two graphs takes the settings that it has."""
        return self.phase.graph == "whole"

    @property
    def keeps_weights(self) -> bool:
        """Whether weights must stay where they are: they cannot move between the graphs of one step."""
        return self.phase.cut is not None

    @cached_property
    def bucketed(self) -> BucketedStep | None:
        """How the two graphs of a cut phase make a step; None for an uncut phase."""
        return self.phase.bucketed

    @property
    def kind(self) -> Phase:
        """The phase that is registered: with logits if rows of them are returned, and with the states that other owners
        have rows of."""
        return self.phase.registered(logits=LOGITS if self.logit_rows else None, open_states=self.states)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The row counts that the second graph of a cut phase is planned for, ascending; empty for an uncut phase."""
        step, tokens = self.phase.bucketed, self.tokens
        return () if step is None else step.sizes({"tokens": tokens}, tokens)

    def graph(self, kept: int = 0) -> StepSize:
        """Return the size of a cut phase's first graph, or of its second for `kept` rows."""
        prefix, suffix = self.phase.graphs
        return replace(self, phase=suffix if kept else prefix, kept=kept)

    @property
    def graphs(self) -> tuple[StepSize, ...]:
        """The sizes of the graphs that the step may run: its own; for a cut phase the first graph's, and the second's
        for each row count that it is planned for."""
        buckets = self.buckets
        return (self.graph(), *map(self.graph, buckets)) if buckets else (self,)

    @property
    def others(self) -> dict[State, int]:
        """Rows of each state, except the rows of the keys of this step's sequences."""
        own = self.phase.cache.rows(self.owned)
        return {state: max(rows - own.get(state, 0), 0) for state, rows in self.states.items()}

    def dims(self, architecture: Architecture | None = None) -> dict[str, int]:
        """Return the values of the symbolic dims.

        These are tokens, seqs, span; masked with a head; logit_rows if asked for; keys, extents and parts in cached
        phases; kept and decided in a second graph; and `NAME_rows` of each state.

        Parameters
        ----------
        architecture
            The model's: block-causal attention sees fewer keys. If not given, every key is seen.
        """
        block = 0 if architecture is None else architecture.block
        seen = self.owned or self.windows
        pairs = sum(_pairs(n, k, block) for n, k in zip(self.windows, seen, strict=True))
        copies = self.phase.copies
        dims = {"tokens": self.tokens * copies, "seqs": len(self.windows) * copies, "span": -(-pairs // self.tokens)}
        if self.has_rows:
            dims["masked"] = self.rows
        if self.logit_rows:
            dims["logit_rows"] = self.logit_rows
        if self.kept:
            dims |= {"kept": self.kept, "decided": min(self.rows, self.kept)}
        if self.owned:
            dims |= {
                "keys": sum(self.owned),
                "extents": self.extents,
                **self.phase.cache.sizes(self.windows, self.owned),
            }
        return dims | {state.rows_dim: rows for state, rows in self.states.items()}

    def at(self, context: int) -> StepSize:
        """Return the step for one sequence of another length, with at most as many rows to decide.

        In cached phases with rows to decide, the window is kept and `context` is the number of keys. Rows of the state
        that other owners hold are kept, too.
        """
        window = min(max(self.windows), context) if self.phase.cached and self.has_rows else context
        states = self.others
        for state, rows in self.phase.cache.rows((context,)).items():
            states[state] += rows
        return replace(
            self, windows=(window,), keys=(context,) if self.phase.cached else (), owned=(),
            rows=min(self.rows, window), logit_rows=min(self.logit_rows, window), kept=min(self.kept, window), states=states,
        )  # fmt: skip

    def beside(self, states: Mapping[State, int]) -> StepSize:
        """Return the same step with these rows of states; of the keys, at least those that it was planned for."""
        found, kept = {**self.states, **states}, self.phase.cache.kept
        if kept is not None and self.exact:
            found[kept] = max(found[kept], *self.owned)
        return replace(self, states=found)

    def rounded(self) -> StepSize:
        """Return the size with rows, keys and states rounded up, mostly by at most an eighth: its plan serves more steps."""
        if self.exact:
            return self
        owned, extents, rows, logit_rows, states = self._rounded
        more = owned - sum(self.owned)
        return replace(
            self, owned=(*self.owned[:-1], self.owned[-1] + more) if owned else (), extents=extents, rows=rows,
            logit_rows=logit_rows, states=dict(states),
        )  # fmt: skip

    @property
    def _rounded(self) -> tuple[int, int, int, int, frozenset[tuple[State, int]]]:
        """Keys owned, extents, rows to decide, rows of logits and rows of each state, rounded up."""
        tokens, rules = self.tokens, self.phase.commit is not None
        if self.exact:
            return sum(self.owned), self.extents, self.rows, self.logit_rows, frozenset(self.states.items())
        return (
            bucket(sum(self.owned), least=FEWEST_KEYS),
            bucket(self.extents, least=FEWEST_EXTENTS, doubled=MOST_DOUBLED),
            bucket(
                self.rows,
                tokens,
                least=FEWEST_ROWS if rules else 0,
                doubled=MOST_DOUBLED if rules else 0,
                share=self._share,
            ),
            bucket(self.logit_rows, tokens),
            rounded_states(self.states),
        )

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for steps that one rounded plan serves."""
        return self.phase, len(self.windows), self.tokens, self.kept, *self._rounded


def most_rows(sizes: Iterable[StepSize]) -> dict[State, int]:
    """Return the maximum over steps of the rows of each state."""
    found: dict[State, int] = {}
    for size in sizes:
        found |= {state: max(rows, found.get(state, 0)) for state, rows in size.states.items()}
    return found


def rounded_states(states: Mapping[State, int], share: int = 8) -> frozenset[tuple[State, int]]:
    """Return the rows of each state, rounded up as for planning, by an eighth at most or another `share`."""
    return frozenset([
        (state, bucket(count, least=state.least_rows, doubled=FEWEST_ROWS, share=share)) for state, count in states.items()
    ])  # fmt: skip


def bucket(count: int, most: int | None = None, *, least: int = 0, doubled: int = 0, share: int = 8) -> int:
    """Round a number of rows up by at most an eighth, or another `share`, so that plans are reused as it changes.

    A number above zero becomes at least `least`, and never more than `most`. Numbers up to `doubled` are rounded to the
    next power of two: fewer plans, at about the same time per step.

    >>> [bucket(n, 1000) for n in (0, 7, 33, 100, 999)]
    [0, 7, 36, 104, 1000]
    >>> [bucket(n, 1000, least=16, doubled=256) for n in (0, 7, 33, 100, 999)]
    [0, 16, 64, 128, 1000]
    >>> [bucket(n, share=4) for n in (33, 100, 500)]
    [40, 112, 512]
    """
    if not count:
        return 0
    count = max(count, least)
    step = 1 << (count - 1).bit_length() if count <= doubled else 1 << max(count.bit_length() - share.bit_length(), 0)
    rounded = -(-count // step) * step
    return rounded if most is None else min(rounded, most)


def _pairs(window: int, keys: int, block: int) -> int:
    """The number of (query, key) pairs of a window at the end of its keys.

    >>> _pairs(8, 8, 0), _pairs(8, 8, 4), _pairs(4, 8, 4), _pairs(3, 7, 4)
    (64, 48, 32, 21)
    """
    if not block:
        return window * keys
    first, whole = keys - window, keys // block * block
    beyond = (keys - max(whole, first)) * (whole + block - keys) if keys > whole else 0
    return _causal_pairs(keys, block) - _causal_pairs(first, block) - beyond


def _causal_pairs(queries: int, block: int) -> int:
    """The number of (query, key) pairs of the first `queries` queries; each sees the keys up to its block's end."""
    blocks, rest = divmod(queries, block)
    return block * block * blocks * (blocks + 1) // 2 + rest * (blocks + 1) * block
