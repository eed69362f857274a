"""Kept keys of which a block attends to some: the policy of sparse attention. Legend: B sequences, T tokens.

A request says in `StepRequest.values` how many keys its prefix had when it selected ("captured"), of how many it selects in this
step ("candidates"; 0: it does not), whether it attends to all keys ("exactly"), and the position from which rows vote
("votes_from"). Requests that select, that attend to all keys, and that attend to what they have selected share a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mosaic.models.inputs import Input
from mosaic.models.parts.cache import KV, Kept
from mosaic.models.sparse import Per, SparseAttention, sets_of
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window
    from mosaic.models.step import StepSize
    from mosaic.models.transformer import StepGraph

__all__ = ["IndexSets", "Selected", "index_sets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSets(State):
    """What requests have selected, a row each: of every sparse layer and set a count, then pages in ascending order."""

    least_rows: int = 1
    pages: int
    exact_layers: int
    per: Per

    def columns(self, arch: Architecture) -> int:
        """Return the numbers of all sparse layers and sets."""
        return (arch.layers - self.exact_layers) * sets_of(self.per, arch) * (1 + self.pages)


def index_sets(attention: SparseAttention) -> IndexSets:
    """Return the state that selections by these options are kept in: the same for options that lay it out alike."""
    pages, exact, per = attention.k // attention.page, attention.exact_layers, attention.per
    return IndexSets(name=f"selected_{pages}_{exact}_{per}", dtype="int32", pages=pages, exact_layers=exact, per=per)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected(Kept):
    """Windows write their keys and values as ever, and attend in sparse layers to what was selected.

    Parameters
    ----------
    attention
        The options.
    selects
        Whether requests may select in the step.
    """

    attention: SparseAttention
    selects: bool

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return, beside those of kept keys, where selections lie and of how many keys; and who selects from what."""
        state = index_sets(self.attention)
        own = (
            Input(
                name="owner", dtype="int64", per="sequence",
                value=lambda window: window.request.states[state].runs(0, 1)[0][0],
            ),
            Input(name="captured", dtype="int32", per="sequence", value=lambda window: window.request.values["captured"]),
        )  # fmt: skip
        selecting = (
            Input(name="cu_keys", dtype="int32", per="bound", value=lambda window: window.request.key_len),
            Input(name="votes", dtype="uint8", per="token", value=_votes),
            Input(
                name="candidates",
                dtype="int32",
                per="sequence",
                value=lambda window: window.request.values["candidates"],
            ),
        )
        mixed = (
            Input(name="seen_exactly", dtype="int32", per="sequence", value=_seen_exactly),
            Input(name="seen_sparsely", dtype="int32", per="sequence", value=_seen_sparsely),
        )
        first = self.attention.selects == "first"
        return (
            *Kept.inputs(self, arch),
            *own,
            *(selecting if self.selects else ()),
            *(mixed if self.selects and first else ()),
        )

    @property
    def covering(self) -> Selected:
        """The policy of steps in which requests may select."""
        return self if self.selects else replace(self, selects=True)

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, and what was selected."""
        return KV, index_sets(self.attention)

    def ways(self) -> Sequence[Way]:
        """Return the one way: windows are short."""
        from mosaic.models.attention import selected

        return (selected.SelectedTogether(),)

    def dims(self, step: StepGraph) -> None:
        """Declare, beside the dims of kept keys, the keys that a query of a sparse layer attends to."""
        Kept.dims(self, step)
        step.g.dim("attended", at_most="keys")

    def sizes(self, size: StepSize) -> Mapping[str, int]:
        """Return the keys that a query attends to, those selected and its window's own: the mean over sequences, rounded up.

        As for `span`, windows lie at the end of what is owned, so that the plan serves while they move on.
        """
        chosen = self.attention
        counts = [
            min(keys, min(chosen.k, max(int(chosen.ratio * keys), 1) if chosen.ratio else chosen.k) + window)
            for window, keys in zip(size.windows, size.owned, strict=True)
        ]
        return {**Kept.sizes(self, size), "attended": -(-sum(counts) // len(counts))}


def _votes(window: Window) -> Any:
    votes = window.token_ids.new_zeros(window.length)
    votes[max(window.request.values["votes_from"] - window.start, 0) :] = 1
    return votes.byte()


def _seen_exactly(window: Window) -> int:
    return int(window.request.key_len) if window.request.values["exactly"] else 0


def _seen_sparsely(window: Window) -> int:
    return 0 if window.request.values["exactly"] else int(window.request.key_len)
