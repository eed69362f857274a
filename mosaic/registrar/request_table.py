"""The table of requests under load: a row of a state for each, whose columns a step's own kernels read and move on.

The host writes a row when a request comes and when it leaves. In between `pack_requests` chooses who is served,
`place_requests` lays out their windows, and `advance_requests` takes what was committed. Positions count from the first token of
a request's prompt.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["COLUMNS", "ENDED", "EOS", "LENGTH", "MARKED_STEPS", "RUNNING", "STOPS", "Column", "Reported"]


class Column(IntEnum):
    """Columns int64 of a request. Those from `WRITTEN` on change from step to step."""

    STATE = 0
    """0: nobody's row, `RUNNING` or `ENDED`."""
    CANVAS = 1
    """Its first row of the canvas; others follow."""
    EXTENT = 2
    """Its first entry in the list of extents of keys; others follow."""
    EXTENTS = 3
    """How many there are."""
    PROMPT = 4
    """Tokens of the prompt."""
    END = 5
    """Where the answer ends."""
    LENGTH = 6
    """Positions of the canvas."""
    PREFIX = 7
    """Tokens whose keys are written before the first block is denoised, whole blocks."""
    BLOCK = 8
    """Tokens of a block."""
    WINDOW = 9
    """What a step computes: `BY_BLOCKS`, `REFRESHED`, `FROM_BLOCK`, `WHOLE` or `PACKED`."""
    EDIT_THRESHOLD = 10
    """The bits of a float32: of a request that decides all positions, the score above which a decided token is replaced."""
    MORE = 11
    """How many first steps of a block commit one more."""
    DECIDES = 12
    """Which positions of the block a step decides: `OPEN_ONES`, `FIRST_ONES`, `RANDOM_ONES`, `LEAST_ONES` or `ALL_ONES`."""
    TOP_K = 13
    """Of the sampling; 0: off."""
    NOISE = 14
    """The random key of its seed and number."""
    STOP = 15
    """The first of `STOPS` tokens that end the answer; -1: none."""
    THRESHOLD = 19
    """Here and in the next two, the bits of a float32."""
    TEMPERATURE = 20
    TOP_P = 21
    CUTS = 22
    """Whether top-p and top-k cut what its tokens are drawn from, so that scores are of what is kept."""
    GROUP = 23
    """A step serves one group, or several, by bits. Prompts are written by steps of group 0 alone."""
    MARKS = 24
    """Bit n: step n of a block needs what only some of the group's steps do; bit 62 stands for all later steps too."""
    OWN = 25
    """The rows that it has of its policies' states, by the states' slots, or -1; here and in the next three."""
    SPAN = 29
    """Tokens of the span around the block, from a multiple of it on, whose keys all its steps see: the block in which the model
    attends both ways, or `CANVAS_LONG`."""
    SHIFTED = 30
    """Whether row i-1 predicts position i."""
    PRIORITY = 31
    """Turns by which it goes before others, as if it had been served so much earlier."""
    POST_STEPS = 32
    """Of a request that decides all positions, the most steps after the one that has left none open."""
    SCHEDULE = 33
    """Entries of its schedule, which lie in the canvas behind its positions: entry n has the quota of step n in its low 32 bits,
    and above them the STEP that the step counts as. 0: there is none."""
    SCORE_TEMPERATURE = 34
    """The bits of a float32: the temperature at which scores are perturbed; 0: not at all."""
    RENEWED = 35
    """Of a request with sparse keys, tokens of the answer that share a Refresh, its packed span; the last span may be shorter."""
    KEPT = 36
    """Keys that each head keeps of those outside a packed span of RENEWED tokens."""
    KEPT_LAST = 37
    """The same of the last packed span."""
    WRITTEN = 38
    """Tokens of the prefix whose keys are written; of a request with sparse keys, where the last packed span ends."""
    START = 39
    """Where the block begins that is decoded."""
    BEFORE = 40
    """Tokens before the block whose final keys the next step writes."""
    NUMBER = 41
    """Steps of the block so far; of blocks that share a span of the model, all its steps."""
    STEP = 42
    """Steps so far that have decided, which random keys count; by its schedule, with steps that would have decided nothing."""
    OPEN = 43
    """Positions of the block where nothing is decided."""
    WIDE = 44
    """Whether the next step computes the whole span."""
    QUOTA = 45
    """Tokens that the next step of the block commits at least."""
    SINCE = 46
    """Steps of the block since the last one that has left fewer positions open."""
    SAVED = 47
    """Of a request that decides all positions, the hash of the block's tokens (`block_hash` of `mosaic.kernels.shared.requests`)
    after an earlier step; 0: there was none."""
    SERVED = 48
    """The turn in which it decided last, at first the one in which it came."""


COLUMNS: Final = 49
STOPS: Final = 4
MARKED_STEPS: Final = 62
RUNNING, ENDED = 1, 2
BY_BLOCKS, REFRESHED, FROM_BLOCK, WHOLE, PACKED = 0, 1, 2, 3, 4
"""Windows of a block's steps. By blocks: the block, which is the span, in its first step with `BEFORE` tokens before it.
Refreshed: the whole span in the first step, and on a shifted model until the block's first position is decided; then the block.
From the block: the same, but then to the canvas' end. Whole: the span. Packed: the span, over itself alone, in the marked steps of
a block beyond the packed span, the last of which is the Refresh; then the block over the packed keys, in its first step on a
shifted model with the token before it. On a shifted model keys of `BEFORE` tokens are written by a step of its own: its last row
predicts the first position after them, which it decides greedily and alone. There the first step of a block decides the first
position alone, too, if the next ones compute no row that predicts it."""
CANVAS_LONG: Final = 1 << 31
"""The span of a model that attends both ways in all of the canvas."""
OPEN_ONES, FIRST_ONES, RANDOM_ONES, LEAST_ONES, ALL_ONES = 0, 1, 2, 3, 4
"""What steps decide: all open positions of the block; the first ones, or those with the largest or the least random numbers
(`uniforms` of `mosaic.kernels.shared.requests`), as many as are committed; or all positions of the block but the prompt's. These
are edited: a decided token may be replaced, and one decided as the mask is a candidate. Such a block ends when none is open, and a
step has changed nothing or POST_STEPS steps have edited. Where it is as it was after an earlier step, the next one commits at least
as many more as are decided as the mask."""
LENGTH, EOS = 1, 2
"""How a request ends: it has all tokens of its answer, or one that stops it."""


class Reported(IntEnum):
    """Columns int64 of what a step says of each request that it has served: where its window began, and how it stands now."""

    ROW = 0
    """The row of the table; -1: there is none, nor any further."""
    BEGIN = 1
    TOKENS = 2
    """Of the window."""
    START = 3
    """Of the block that the step has decided."""
    FINAL = 4
    """Positions below are decided for good; of an answer that ends at a token that stops it, the position after that one."""
    MASKED = 5
    """Positions of the answer where nothing is decided."""
    END = 6
    """0, `LENGTH` or `EOS`."""
    ROWS = 7
    """Where its rows to decide end among those of the step."""
    WRITTEN = 8
    """From here on the columns that have changed, as they are in the table."""
