"""A request as a row of a table on the device: what an algorithm says of it, and its columns.

An algorithm whose steps follow from a few numbers describes its requests so (`Algorithm.row`). Others are generators on the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mosaic.decoding.noise import key_of
from mosaic.kernels.shared.requests import bits
from mosaic.models.parts import CANVAS, HELD_EXTENTS, KEPT, REQUESTS, TABLED, CachePolicy, Commit, Cut, Head
from mosaic.models.phase import Phase
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import (
    BY_BLOCKS,
    CANVAS_LONG,
    COLUMNS,
    FIRST_ONES,
    LEAST_ONES,
    OPEN_ONES,
    RANDOM_ONES,
    STOPS,
    Column,
)
from mosaic.runtime.prefixes import piece_of

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Canvas, Sampling
    from mosaic.models.policies.sparse_keys import SparseKeys
    from mosaic.models.state import State
    from mosaic.runtime.state_rows import OwnedRows

__all__ = ["ALL", "RULE", "TableRow", "columns_of", "demand_of", "finished"]

RULE: Final = Commit(score="confidence", rule="dynamic")
"""Every rule that commits at least a quota and all above a threshold."""
OF_TABLE: Final = {REQUESTS: 2, HELD_EXTENTS: 2}
"""Rows of the table's own states for each request, at most: a table that grows doubles, and keys lie in few extents."""
UNIT: Final = 32
"""Most tokens that steps over whole canvases are multiples of."""
ALL: Final = float("inf")
"""The threshold of a rule that commits a quota alone."""


class TableRow(NamedTuple):
    """What an algorithm says of a request.

    Parameters
    ----------
    sampling
        Which head draws its tokens.
    start, prefix
        Where its first block begins, and the tokens before it whose keys are written first.
    length, block, window
        Positions of the canvas, tokens of a block, and what its steps compute (`mosaic.registrar.request_table`).
    span
        The model's block, in which blocks lie; 0: it attends both ways in all of the canvas.
    before
        Tokens before the first block whose keys its first step writes.
    steps
        How many steps share the tokens of a block evenly; 0: each commits one.
    threshold
        Above it a token is committed in any case.
    decides
        Which open positions of the block steps decide.
    shifted
        Whether row i-1 predicts position i.
    cache, cut
        Of the kind of step, as policies have made them; where a step is marked, what covers this cache.
    commit
        Which of the rows to decide are committed.
    schedule
        Of a request whose answer is one block, if its steps differ: of each step that decides, the number that it counts as, with
        those that decide nothing, and how many tokens it commits.
    score_temperature
        At which scores are perturbed, by a rule that does; 0: not at all.
    edit_threshold, post_steps
        Of a request that decides all positions, the score above which a decided token is replaced, and the most steps that only
        edit a block.
    marks
        Bit n: step n of a block is marked (`Column.MARKS`).
    sparse
        Which keys it keeps, if each head keeps its own.
    """

    sampling: Sampling
    start: int
    prefix: int
    length: int
    block: int
    span: int = 0
    window: int = BY_BLOCKS
    before: int = 0
    steps: int = 0
    threshold: float = ALL
    decides: int = OPEN_ONES
    shifted: bool = False
    cache: CachePolicy = KEPT
    cut: Cut | None = None
    commit: Commit = RULE
    schedule: tuple[tuple[int, int], ...] = ()
    score_temperature: float = 0.0
    edit_threshold: float = 0.0
    post_steps: int = 0
    marks: int = 0
    sparse: SparseKeys | None = None

    @property
    def phase(self) -> Phase:
        """The kind of step that serves it."""
        return _phase(self.cache, self.cut, self.sampling.head, self.commit)

    @property
    def shares(self) -> bool:
        """Whether its keys are those of every request that begins with the same tokens."""
        return bool(self.span) and self.sparse is None

    @property
    def exact(self) -> bool:
        """Whether the keys of its answer are, too: its blocks attend to all keys, and keep all rows."""
        return self.cache == KEPT and self.cut is None

    @property
    def renewed(self) -> int:
        """Tokens of its first packed span, the longest; 0 without sparse keys."""
        return 0 if self.sparse is None else min(self.block * self.sparse.interval, self.length - self.start)

    @property
    def keys(self) -> int:
        """The rows of keys that it takes."""
        return self.length if self.sparse is None else self.sparse.rows(self.length, self.renewed)

    @property
    def most_tokens(self) -> int:
        """Tokens of its largest step that cannot be cut."""
        if not self.span:
            return self.length
        several = self.window == BY_BLOCKS and self.length - self.start > self.span
        return self.span * (2 if several else 1)

    @property
    def unit(self) -> int:
        """The tokens that steps are multiples of."""
        return self.block if self.span else min(self.block, UNIT)

    @property
    def most_rows(self) -> int:
        """Rows that a step decides at most."""
        chosen = self.decides in (FIRST_ONES, RANDOM_ONES, LEAST_ONES)
        return max(quota for _, quota in self.schedule) if self.schedule and chosen else self.block

    def number_of(self, start: int) -> int:
        """Return which block begins at a position; those in one span of the model count as one."""
        width, first = self.span or self.block, self.start - (self.start % self.span if self.span else 0)
        return max(start - first, 0) // width


@lru_cache(maxsize=256)
def _phase(cache: CachePolicy, cut: Cut | None, head: Head, commit: Commit) -> Phase:
    return Phase(tokens=TABLED, cache=cache, cut=cut, head=head, commit=commit)


def demand_of(row: TableRow, holes: int) -> dict[State, int]:
    """Return the rows of each state that a request takes; its keys, if it keeps any, lie in an extent more than there are holes,
    at most, and in one for each piece that others may share, or together."""
    found, kept = {CANVAS: row.length + len(row.schedule)}, row.cache.kept
    if kept is not None:
        pieces = row.keys // piece_of(row.span) + 1 if row.shares else 0
        found |= {kept: row.keys, HELD_EXTENTS: 1 if kept.together else holes + 1 + pieces}
    return found | dict.fromkeys(row.phase.own_states, 1)


def finished(column: NDArray[np.int64]) -> int:
    """Return how many first positions of a request have the keys of final tokens, by its columns: whole spans."""
    if column[Column.WRITTEN] < column[Column.PREFIX]:
        return int(column[Column.WRITTEN])
    return int((column[Column.START] - column[Column.BEFORE]) // column[Column.SPAN] * column[Column.SPAN])


def columns_of(row: TableRow, canvas: Canvas, group: int, priority: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the columns of a request that has not begun, [COLUMNS], and its canvas, `OPEN` where nothing is decided, [N], with its
    schedule behind it."""
    config, column = canvas.config, np.zeros(COLUMNS, dtype=np.int64)
    tokens = np.where(canvas.mask_array, OPEN, canvas.token_array)
    stops = (*canvas.architecture.eos_token_ids, *[-1] * STOPS) if config.stop_at_eos else [-1] * STOPS
    steps = min(row.steps or row.block, row.block)
    given = {
        Column.PROMPT: canvas.prompt_len, Column.END: canvas.end, Column.LENGTH: row.length, Column.PREFIX: row.prefix,
        Column.BLOCK: row.block, Column.WINDOW: row.window, Column.QUOTA: row.block // steps, Column.MORE: row.block % steps,
        Column.DECIDES: row.decides, Column.TOP_K: row.sampling.top_k, Column.NOISE: key_of(config.seed, canvas.request),
        Column.THRESHOLD: bits(row.threshold), Column.TEMPERATURE: bits(row.sampling.temperature),
        Column.TOP_P: bits(row.sampling.top_p), Column.CUTS: int(row.sampling.head.cuts), Column.START: row.start,
        Column.SPAN: row.span or CANVAS_LONG, Column.SHIFTED: int(row.shifted), Column.BEFORE: row.before, Column.WIDE: 1,
        Column.GROUP: group, Column.MARKS: row.marks, Column.PRIORITY: priority, Column.POST_STEPS: row.post_steps,
        Column.EDIT_THRESHOLD: bits(row.edit_threshold), Column.SCHEDULE: len(row.schedule),
        Column.SCORE_TEMPERATURE: bits(row.score_temperature),
        Column.OPEN: int(canvas.mask_array[row.start : row.start + row.block].sum()),
    }  # fmt: skip
    column[[int(key) for key in given]] = list(given.values())
    column[Column.STOP : Column.STOP + STOPS] = stops[:STOPS]
    if row.sparse is not None:
        last = (row.length - row.start) % row.renewed or row.renewed
        column[Column.RENEWED] = row.renewed
        column[Column.KEPT], column[Column.KEPT_LAST] = (row.sparse.kept(row.length - n) for n in (row.renewed, last))
    if row.schedule:
        column[Column.STEP], column[Column.QUOTA] = row.schedule[0]
        tokens = np.concatenate([tokens, [step << 32 | quota for step, quota in row.schedule]])
    column[Column.OWN : Column.SPAN] = -1
    for state in row.phase.own_states:
        column[state.own_column] = cast("OwnedRows", canvas.rows_of(state)).runs(0, 1)[0][0]
    return column, tokens
