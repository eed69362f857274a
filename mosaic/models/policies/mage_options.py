"""MAGE's options: which keys of its prefix a block attends to. Presets are published methods of sparse attention.

Block diffusion denoises a block in many steps, each of which reads all keys. In MAGE (Kwon et al. 2026, arXiv
2602.14209, section 4) a block's first step, when all of it is masked, attends to all keys, and selects the keys with
the most attention, per layer and key-value head. Later steps of the block attend to the selected keys and to the block
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, get_args

from mosaic.errors import UnknownName, UsageError
from mosaic.models.policies.flashblock import PrefixReuse
from mosaic.models.policies.policy import Options, is_integer, is_number
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

Selects: TypeAlias = Literal["first", "every"]
Per: TypeAlias = Literal["kv_head", "query_head"]
Statistic: TypeAlias = Literal["mean", "max", "worst"]
Voters: TypeAlias = Literal["block", "answer"]
By: TypeAlias = Literal["mass", "bounds"]
MOST_KEYS: Final = 2**31 - 1
ALIKE: Final = 4096
"""The least `k` that a request's canvas is limited to: its selection takes 4.4 MiB for SDAR-8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttention(Options):
    """Which keys are selected, when, and by which rows. The defaults are MAGE as published.

    Parameters
    ----------
    k
        The most keys of the prefix per set.
    ratio
        The largest share of the prefix per set, rounded up to whole keys. Its decimal or fraction is taken as written,
        so that 0.15 of 100 keys is 15. 0: only `k` limits.
    mass
        The share of the prefix's attention that is enough: a set has the fewest keys that reach it, at most `k`. 0:
        only `k` limits. It applies to the "mean" over all voting rows, which adds up to 1.
    page
        Keys per page. Pages are selected whole and start at multiples of it; `k` is a multiple of it.
    by
        How pages are ranked: by the attention "mass" of their keys, the softmax over the prefix; or by the "bounds" of
        Quest (arXiv 2406.10774), the largest product that a query can have with any key between the page's elementwise
        minimum and maximum. The extrema are kept, so no key is read; they need `selects="every"` and pages of at least
        2 keys. Keys after the last whole page of the prefix are always attended to.
    exact_layers
        The number of first layers that attend to all keys in every step.
    exact_last
        The number of last layers that do.
    selects
        "first": a block's first step attends to all keys and selects for the others. "every": each step first selects
        by its own queries and then attends to the selection; the exact selection of each step, as an oracle.
    exact_steps
        Share of a block's steps, rounded up, that attend to all keys, at least the first step. The selection of the
        last of them is used.
    every
        Steps after which a block attends to all keys and selects again, counted from the last such step, in the block's
        own steps. 0: never again.
    carried
        First steps of later blocks attend to selected keys, too: to the previous block's selection, and to all keys
        after its prefix. Their own selection is for the block's later steps.
    per
        A set of keys per "kv_head", or per "query_head".
    rows
        Rows of a tile that has its own sets, from multiples of this on; the last tile may be smaller. A set is selected
        by the tile's voting rows, or by all voting rows if the tile has none. 0: all rows of the block share the sets.
    statistic
        How a key's score combines the softmax over the prefix, or the bounds, over all voting rows and heads of a set:
        by the "mean", the "max", or the minimum ("worst"): a key's score is the smallest weight that any voting row and
        head gives it. So every row's weights over a set add up to at least the sum of the keys' scores.
    reuse
        When the first exact layers attend to the prefix; other steps reuse their output over it. None: in every step.
    voters
        Rows that vote: all rows of the "block" that the step computes, or those of the "answer", without tokens of a
        prompt that ends in the block.

    Raises
    ------
    UsageError
        If a value is invalid; the message is one line.

    Examples
    --------
    >>> str(SparseAttention()), str(SparseAttention(k=1024, page=16))
    ('mage', 'sparse(k=1024, page=16)')
    """

    word: ClassVar[str] = "sparse"
    adjective: ClassVar[str] = "sparse"
    k: int = 512
    ratio: float = 0.0
    mass: float = 0.0
    page: int = 1
    by: By = "mass"
    exact_layers: int = 2
    exact_last: int = 0
    selects: Selects = "first"
    exact_steps: float = 0.0
    every: int = 0
    carried: bool = False
    per: Per = "kv_head"
    rows: int = 0
    statistic: Statistic = "mean"
    voters: Voters = "block"
    reuse: PrefixReuse | None = None

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("page", 1), ("exact_layers", 0), ("exact_last", 0), ("every", 0), ("rows", 0)):
            value = getattr(self, name)
            if not is_integer(value, least):
                raise UsageError(f"attention: {name} is {value!r}; it must be an integer of at least {least}.")
        if self.k % self.page:
            raise UsageError(
                f"attention: k {self.k} is not whole pages of {self.page} keys; use k "
                f"{max(self.k // self.page, 1) * self.page}."
            )
        if self.page > ALIKE:
            raise UsageError(f"attention: page is {self.page}; pages have {ALIKE} keys at most.")
        if self.k > MOST_KEYS:
            raise UsageError(f"attention: k is {self.k}; keys are counted in 32 bits, use at most {MOST_KEYS}.")
        if not isinstance(self.carried, bool):
            raise UsageError(f"attention: carried is {self.carried!r}; it must be true or false.")
        for name, of in (
            ("ratio", "the prefix"),
            ("mass", "the prefix's attention"),
            ("exact_steps", "a block's steps"),
        ):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value <= 1):
                raise UsageError(f"attention: {name} is {value!r}; it must be a share of {of}, in [0, 1].")
        if self.exact_steps and self.selects == "every":
            raise UsageError(
                "attention: exact_steps are those before a selection; with selects='every' there are none."
            )
        if self.every == 1:
            raise UsageError(
                "attention: every=1 leaves no sparse step to a block; use every=2 or more, or selects='every'."
            )
        if self.every and self.selects == "every":
            raise UsageError("attention: with selects='every' each step selects for itself; leave every out.")
        if self.carried and (self.exact_steps or self.selects == "every"):
            raise UsageError(
                "attention: carried=True leaves no exact step to a block; leave exact_steps and selects out."
            )
        named = {"selects": Selects, "per": Per, "statistic": Statistic, "voters": Voters, "by": By}
        for name, options in named.items():
            if getattr(self, name) not in get_args(options):
                raise UnknownName(f"attention's {name}", getattr(self, name), get_args(options))
        if self.mass and (self.by, self.statistic) != ("mass", "mean"):
            raise UsageError(
                "attention: mass is a share of the mean attention; leave it out, or by='bounds' and statistic='max' or 'worst'."
            )
        if self.reuse is not None and not (isinstance(self.reuse, PrefixReuse) and self.exact_layers):
            raise UsageError(
                f"attention: reuse is {self.reuse!r}; it must be PrefixReuse(…) with exact first layers, of which there are "
                f"{self.exact_layers}."
            )
        if self.by == "bounds" and self.page == 1:
            raise UsageError(
                "attention: the minimum and maximum of a page of 1 key are the key itself, twice; use page 16, or "
                "attention='oracle'."
            )
        if self.by == "bounds" and self.selects != "every":
            raise UsageError(
                "attention: by='bounds' estimates what a step attends to before it does; use selects='every'."
            )

    @classmethod
    def presets(cls) -> Mapping[str, SparseAttention]:
        """Return `PRESETS`."""
        return PRESETS

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, and of the options of `reuse`."""
        return *(entry.name for entry in fields(cls) if entry.name != "reuse"), *PrefixReuse.names()

    def with_options(self, options: Mapping[str, Any]) -> SparseAttention:
        """Return a copy with options set by name: fields, and options of `reuse`."""
        reuse = {name: value for name, value in options.items() if name in PrefixReuse.names()}
        others = {name: value for name, value in options.items() if name not in reuse}
        if reuse:
            others["reuse"] = (self.reuse or PrefixReuse()).with_options(reuse)
        return replace(self, **others)

    def joined(self, other: Options) -> SparseAttention | None:
        """Return a copy with `reuse` set, if the other options are a `PrefixReuse`."""
        return replace(self, reuse=other) if isinstance(other, PrefixReuse) else None

    def kinds(self, steps: int) -> list[str]:
        """Return a word per step of a block: "first", "again" for a later step that selects, or "later"."""
        found = []
        for step in range(steps):
            selects, refreshes = self.selects_in(step, steps), self.reuse is not None and self.reuse.refreshes_in(step)
            alike = refreshes or (selects and (self.selects == "every" or not step))
            found.append("first" if alike else "again" if selects else "later")
        return found

    def selects_in(self, step: int, steps: int) -> bool:
        """Return whether a step of a block, counted from 0, selects, where the block is to take `steps`.

        All steps that attend to all keys select; the last selection is used.

        >>> [step for step in range(32) if SparseAttention(exact_steps=0.1, every=8).selects_in(step, 32)]
        [0, 1, 2, 3, 11, 19, 27]
        """
        share = Fraction(str(self.exact_steps))  # exact: the float 0.28 * 25 is above 7
        last = max(math.ceil(share * steps), 1) - 1
        again = bool(self.every) and step > last and (step - last) % self.every == 0
        return self.selects == "every" or step <= last or again

    def selects_all(self, positions: int) -> bool:
        """Return whether a set would hold all keys of a canvas of this length, and nothing is reused.

        >>> [SparseAttention(k=512, mass=mass).selects_all(512) for mass in (0.0, 0.9)]
        [True, False]
        """
        return positions <= self.k and not self.ratio and not self.mass and self.reuse is None

    def within(self, positions: int) -> SparseAttention:
        """Return options that select the same keys of a canvas of this length, with a smaller `k` if it is far larger.

        The new `k` is a power of two of at least `ALIKE`, so that requests of several lengths still share steps.

        >>> [SparseAttention(k=k).within(20_000).k for k in (512, 10**9)]
        [512, 32768]
        """
        most = max(ALIKE, 1 << (positions - 1).bit_length())
        return self if self.k <= most + self.page else replace(self, k=-(-most // self.page) * self.page)

    def tiles(self, arch: Architecture) -> int:
        """Return the number of tiles of rows in a block, each with its own sets.

        >>> from mosaic.models import load
        >>> SparseAttention(rows=3).tiles(load("sdar-8b").architecture)
        2
        """
        return -(-arch.block // self.rows) if self.rows else 1

    def sparse_layers(self, arch: Architecture) -> range:
        """Return the layers that attend to selected keys."""
        return range(self.exact_layers, arch.layers - self.exact_last)

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Check that the model supports these options.

        Raises
        ------
        UsageError
            If it is bidirectional, or has no sparse layer.
        """
        if not arch.block:
            raise UsageError(
                "attention: this model attends in both directions, so its keys change in every step and no selection of them "
                "can be reused; sparse attention is for block diffusion (SDAR, LLaDA2.0, Fast-dLLM v2)."
            )
        if self.rows > arch.block:
            raise UsageError(
                f"attention: {self.rows} rows of a block of {arch.block} cannot have sets of their own; use at most "
                f"{arch.block}, or leave rows out."
            )
        if not self.sparse_layers(arch):
            raise UsageError(
                f"attention: {self.exact_layers + self.exact_last} exact layers of the model's {arch.layers} leave none sparse; "
                f"use at most {arch.layers - 1}."
            )


PRESETS: Final[Mapping[str, SparseAttention]] = {
    "mage": SparseAttention(),
    "oracle": SparseAttention(selects="every"),
    "sparsed": SparseAttention(exact_steps=0.2),
    "quest": SparseAttention(page=16, selects="every", by="bounds"),
    "exact-ends": SparseAttention(exact_layers=1, exact_last=1),
}
"""Presets: MAGE as published; the exact selection of every step; SparseD (arXiv 2509.24014) as MAGE's section 5 adapts
it, exact for 20 % of the steps; Quest (arXiv 2406.10774) as it adapts that, estimated in every step for all rows of the
block; MAGE with its two exact layers split between the first and the last layer."""


def sets_of(per: Per, arch: Architecture) -> int:
    """Return the number of sets of keys in a layer."""
    return arch.attention.kv_heads if per == "kv_head" else arch.attention.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSets(State):
    """Selections, one row per request: for every sparse layer and set a count, then pages in ascending order."""

    least_rows: int = 1
    pages: int
    exact: int
    per: Per
    rows: int

    def columns(self, arch: Architecture) -> int:
        """Return the columns over all sparse layers, tiles of rows and sets."""
        tiles = -(-arch.block // self.rows) if self.rows else 1
        return (arch.layers - self.exact) * sets_of(self.per, arch) * tiles * (1 + self.pages)


def index_sets(attention: SparseAttention) -> IndexSets:
    """Return the state for selections by these options; options with one layout share it."""
    pages, exact, per = attention.k // attention.page, attention.exact_layers + attention.exact_last, attention.per
    name = f"selected_{pages}_{exact}_{per}" + (f"_{attention.rows}_rows" if attention.rows else "")
    return IndexSets(name=name, dtype="int32", pages=pages, exact=exact, per=per, rows=attention.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageExtrema(State):
    """Elementwise extrema of the keys of whole pages, a row per page: by sparse layer heads' minima, then maxima."""

    exact: int

    def columns(self, arch: Architecture) -> int:
        """Return the width of two keys of every sparse layer."""
        return (arch.layers - self.exact) * 2 * arch.attention.kv_heads * arch.attention.head_size


def page_extrema(attention: SparseAttention) -> PageExtrema:
    """Return the state of page extrema, from which bounds are computed; options with one layout share it."""
    exact = attention.exact_layers + attention.exact_last
    return PageExtrema(name=f"pages_{attention.page}_{exact}", exact=exact)
