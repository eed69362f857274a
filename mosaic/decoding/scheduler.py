"""Which step a session's table takes next: how many tokens and rows to decide there is room for.

The device chooses whom a step serves (`pack_requests`). The host chooses the size, a rung of a ladder, by what it knows of the
table: on a device that is a step late. Requests inside a block come first. Prompts get what is left, in chunks, as far as running
blocks are not delayed beyond a bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mosaic.decoding.expected import counted, go_on, left
from mosaic.decoding.groups import Groups, bits
from mosaic.decoding.kinds import Kind, Kinds, first_tokens, needs_of, phase_of, usual_tokens
from mosaic.decoding.newcomers import held_back
from mosaic.decoding.pace import Pace
from mosaic.decoding.prompts import is_integer
from mosaic.decoding.ready import Substitutes
from mosaic.decoding.rows import RULE, demand_of
from mosaic.decoding.rungs import COARSE, SHARES, below, most_of, rung, rungs
from mosaic.decoding.tabled import ServedSteps
from mosaic.errors import DoesNotFit, UsageError
from mosaic.kernels.shared.requests import asked_of, wanted
from mosaic.models.parts import CANVAS, KEPT, KV, REQUESTS
from mosaic.models.step import StepSize
from mosaic.registrar.operators.pack_requests import PATIENCE
from mosaic.registrar.request_table import ALL_ONES, Column, Reported
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.room import SEEN, Room, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.decoding.rows import TableRow
    from mosaic.decoding.tabled import TabledRequest
    from mosaic.kernels.shared.requests import Wanted
    from mosaic.models.state import State
    from mosaic.runtime.request_table import Launched, RequestTable, Served
    from mosaic.runtime.steps import StepRunner

__all__ = ["DELAY_MS", "MOST_TOKENS", "Scheduler"]

MOST_TOKENS: Final = 8192
DELAY_MS: Final = 50.0
FORESEEN_EXTENTS: Final = 4
"""Extents of keys that warm steps have room for, for each request: of 64 to 256 random requests that come and go, 3.5 at most."""
SLOWER: Final = 1.4
"""How much longer prompts beside blocks take on a device than plans say, until some were timed."""
SHARED: Final = 64
"""Parts of the positions that all requests of a warm session could have; as many are planned for as fit."""
PACE: Final = 1.5
BACKLOG: Final = 512
"""How much longer a step with prompts may take than blocks alone: at least, and as many times as so many tokens, or one who waits
for the prompts of others, come on each request that runs."""
FINER: Final = ((8, 8), (8, 4), (4, 4), (2, 4), (1, 4), (1, 2), (1, 1))
"""Rungs, and sizes of a second graph, between a number and twice as many, that a warm session may have ready, the most first. A
second graph takes as long as it has rows, the first one few layers, so that coarse rungs cost less than coarse sizes."""
AHEAD: Final = 2
"""Steps that are launched before the first of them is read, on a device."""


class Scheduler:
    """The requests of a session that are rows of a table, and their steps; the session holds the model.

    Parameters
    ----------
    runner
        The model.
    table
        Of the session.
    most_tokens
        Tokens of a step, unless one request alone needs more.
    delay_ms
        How much longer a step may take with prompts in it than without; as many times that as wait for each that runs.
    """

    def __init__(self, runner: StepRunner, table: RequestTable, most_tokens: int, delay_ms: float) -> None:
        if not is_integer(most_tokens) or most_tokens < 1:
            raise UsageError(f"max_num_batched_tokens: expected a number of tokens, at least 1, got {most_tokens!r}.")
        if isinstance(delay_ms, bool) or not isinstance(delay_ms, int | float) or not delay_ms >= 0:
            raise UsageError(f"max_delay_ms: expected milliseconds, at least 0, got {delay_ms!r}.")
        self._runner, self._table = runner, table
        self._most_tokens, self._delay_ms = most_tokens, delay_ms
        self._requests: NDArray[Any] = np.full(len(table.columns), None, dtype=object)
        self._live, self._told = np.zeros((2, len(table.columns)), dtype=np.bool_)
        self._waiting: deque[TabledRequest] = deque()
        self._kinds = Kinds()
        self._warm: dict[Kind, bool] = {}  # and whether it is of blocks, or of the prompts of others alone
        self._rooms: dict[int, Room] = {}  # that all blocks of a group need, until a request comes or goes
        self._foreseen, self._slots, self._ready = list[Room](), 0, 0
        self._groups, self._substitutes = Groups(), Substitutes(table, most_tokens)
        self._deciding = self._decided = 0
        self._pace, self._few = Pace(), table.engine.planner.device.balanced_rows
        self._served: ServedSteps | None = None

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self._waiting) + int(np.add.reduce(self._live))

    @property
    def live(self) -> bool:
        """Whether there is one."""
        return bool(self._waiting) or bool(np.logical_or.reduce(self._live))

    def admits(self, rows: Iterable[TableRow], more: Mapping[State, int], gone: Collection[TabledRequest] = ()) -> bool:
        """Return whether steps fit that serve all live requests but those who have `gone`, and these at once, once `more` rows of
        states are taken; beside others a warm session takes no more than it was planned for."""
        held = {owned for request in gone for owned in request.held} if gone else ()
        return self._table.admits(self._shared(rows, gone), more, held, planned=self._is_warm)

    def require(self, more: Mapping[State, int]) -> None:
        """Make sure that a warm session is planned for `more` rows of states, unless nobody else is in it.

        Raises
        ------
        DoesNotFit
            If it is not.
        """
        if not self._table.admits((), more, planned=self._is_warm):
            raise DoesNotFit("too few positions are left of those that steps are warm for.")

    @property
    def _is_warm(self) -> bool:
        return bool(self._foreseen) and self._table.is_open

    def stands(self) -> bool:
        """Return whether the steps of all live requests, and of those that were foreseen, fit."""
        return self._table.admits([*self._shared(()), *self._foreseen], {})

    def outlook(self, rows: Sequence[TableRow], more: Mapping[State, int]) -> tuple[int | None, bool, str]:
        """Return `room_in`, whether one request would not fit alone either, and say so, or what it would have to be."""
        steps = self.room_in(rows, more)
        if steps is not None:
            return steps, False, f" If nobody else comes, there is room in {steps:,} steps at most."
        if len(rows) > 1 or self.admits(rows, more):  # if so, steps of other sessions do not fit
            return None, False, ""
        longest = self.longest(rows[0])
        alone = f" Alone, such a request fits with {longest:,} positions of prompt and answer at most."
        return None, longest < rows[0].length, alone

    def room_in(self, rows: Sequence[TableRow], more: Mapping[State, int]) -> int | None:
        """Return in how many steps at most these fit, unless others come before; None if they may never, or nobody can say.

        Each step serves one at least. Among requests of one priority, those before the last one to go have had their turn by then;
        if they decide by blocks in steps that are not cut, each step of their group serves all. From `PATIENCE` steps after a
        prompt came, each step writes keys of a span of it.
        """
        live = sorted([(*left(self._table.columns[place]), place) for place in self._live.nonzero()[0].tolist()])
        requests = [self._requests[place] for _, _, place in live]

        count = bisect_left(range(len(live) + 1), True, key=lambda count: self.admits(rows, more, requests[:count]))
        if self._waiting or not 0 < count <= len(live):
            return None
        kinds = [(kind, number) for mine in self._kinds.values() for kind, number in mine.items()]
        all_at_once = sum([kind.tokens * number for kind, number in kinds]) <= self._most_tokens and not any(
            kind.tokens > 2 * kind.rows or kind.phase.cut is not None for kind, _ in kinds
        )
        steps = live[count - 1][0] * (1 if all_at_once else len(live)) if count else 0
        spans = [prompt for _, prompt, _ in live if prompt]
        of_all = sum(steps + prompt for steps, prompt, _ in live)
        if np.ptp(self._table.columns[self._live, Column.PRIORITY]):
            return AHEAD + of_all
        return AHEAD + min(of_all, (len(self._groups) + 1) * (steps + sum(spans) + PATIENCE * len(spans)))

    def longest(self, row: TableRow) -> int:
        """Return the positions that a request like this may have at most, alone in the session; 0: none fits."""
        held = {owned for request in self._all() for owned in request.held}

        def fit(blocks: int) -> bool:
            length = min(blocks * row.block, row.length)  # of a canvas whose prompt is no whole blocks
            start = min(row.start, length - row.block)
            shorter = row._replace(length=length, start=start, prefix=min(row.prefix, start))
            return self._table.admits(self._shared([shorter], self._all()), demand_of(shorter, 0), held)

        return min(row.block * most_of(-(-row.length // row.block), fit), row.length)

    def _all(self) -> list[TabledRequest]:
        return [*self._requests[self._live].tolist(), *self._waiting]

    def sizes(self, rows: Iterable[TableRow], more: Mapping[State, int]) -> list[StepSize]:
        """Return the sizes of these steps, one a group."""
        states = self._table.beside(more)
        return [self._table.size(room, states) for room in self._shared(rows)]

    def _shared(self, rows: Iterable[TableRow], gone: Iterable[TabledRequest] = ()) -> list[Room]:
        """The room of each group's step that serves all blocks of live requests, but those who have `gone`, and of these. Steps
        take `most_tokens` at most, unless one request needs more, and of whole canvases one at a time."""
        more = [(kind, 1) for row in rows for kind in self._kinds_of(row)]
        changed = self._kinds.changed(more + [(kind, -1) for request in gone for kind in self._kinds_of(request.row)])
        found = list[Room]()
        for group in {**self._kinds, **changed}:
            if group not in changed and group not in self._rooms:
                self._rooms[group] = self._room_of(group, self._kinds[group])
            if mine := changed.get(group, self._kinds.get(group)):
                found.append(self._room_of(group, mine) if group in changed else self._rooms[group])
        return found

    def _room_of(self, group: int, mine: Mapping[Kind, int]) -> Room:
        needed, block, _ = needs_of(kinds := self._beside((group,), mine))
        usual = decides = requests = 0
        for kind, count in mine.items():
            usual, decides, requests = usual + usual_tokens(kind) * count, decides + kind.rows * count, requests + count
        blocks = self._rung(max(needed, min(usual, self._most(block))), block)
        return Room.of(phase_of(kinds, marked=True), requests, blocks, block, decides)

    def _beside(self, groups: Collection[int], kinds: Iterable[Kind]) -> tuple[Kind, ...]:
        """These kinds of requests of some groups, and those that their steps are warm for."""
        return *kinds, *[kind for kind in self._warm if kind.group in groups]

    # --- before the first request -------------------------------------------------------------------------------------

    def foresee(self, rows: Sequence[TableRow], requests: int) -> int:
        """Plan steps from now on for `requests` requests like any of these, with as many positions as fit; return for how many of
        their length these are enough."""
        self._ready = self._table.engine.expect_graphs()
        self._table.expect(max(row.keys for row in rows))
        for row in rows:
            self._rooms.clear()
            own, *prompts = [kind._replace(tokens=kind.block) for kind in self._kinds_of(row)]
            self._warm = dict.fromkeys(prompts, False) | self._warm | {own: True}
        demand: dict[State, int] = {}
        for row in rows:
            for state, count in demand_of(row, FORESEEN_EXTENTS - 1).items():
                demand[state] = max(count, demand.get(state, 0))

        def more(slots: int, share: float) -> dict[State, int]:
            # rows that lie together leave holes between others: as many as rows, in traffic
            parts = dict.fromkeys((CANVAS, *[row.phase.cache.kept for row in rows]), share)
            table = max(self._table.rows_to_open, 1 << (slots - 1).bit_length())
            seen = max((row.keys * slots for row in rows if row.shares), default=0)  # others may have the rows
            found = {REQUESTS: table} | {
                state: max(rows, int(rows * slots * parts.get(state, 1.0))) << state.together
                for state, rows in demand.items()
            }
            return found | {SEEN: max(seen, found.get(KV, 0))}

        def rooms(slots: int) -> list[Room]:
            return [room for row in rows for room in self._shared([row] * slots)]

        def fits(slots: int, share: float) -> bool:
            return self._table.admits(rooms(slots), more(slots, share))

        slots, share = requests, most_of(SHARED, lambda parts: fits(requests, parts / SHARED)) / SHARED
        if not share:  # not so many fit, however short they are
            slots = most_of(requests, lambda slots: fits(slots, 0.0))
        foreseen = rooms(slots) if slots else []
        for room in foreseen:
            self._table.cover(room, room, more(slots, share))
        while len(self._table.columns) < slots and self._grow():
            pass
        self._foreseen, self._slots, self._substitutes.warm_for = foreseen, slots, self._table.planned
        return max(int(slots * share), min(slots, 1))

    def ladder(self, rows: Sequence[TableRow]) -> list[tuple[Shape, int | None]]:
        """Return the steps that foreseen requests like these may need, with the size of the second graph of cut ones.

        If they are more than can be kept ready, they have fewer rungs, and second graphs fewer sizes: others have substitutes, the
        largest of their kind at worst.
        """
        for share, sizes in FINER:
            if len(found := [*self._fitting(rows, share, sizes)]) <= self._ready:
                break
        if len(found) > self._ready:
            found = [*dict(reversed(found)).items()][::-1]  # of each step the largest second graph
        kinds = [
            [step for step in found if step[0][1:] == kind] for kind in dict.fromkeys(shape[1:] for shape, _ in found)
        ]
        return [step for kind in kinds for step in kind[:: -(-len(found) // self._ready)]]

    def _fitting(self, rows: Sequence[TableRow], share: int, sizes: int) -> Iterator[tuple[Shape, int | None]]:
        for shape in dict.fromkeys(self._shapes(rows, share)):
            if self._table.fits(shape.room):
                yield from ((shape, size) for size in self._table.kept(shape.room)[:: -SHARES // sizes])

    def _shapes(self, rows: Sequence[TableRow], share: int) -> Iterator[Shape]:
        """Give these steps, the largest first. Prompts fill those of group 0 alone, which have few rows if nobody decides there."""
        longest, decide = max(row.length for row in rows), {kind.group: True for kind, own in self._warm.items() if own}
        for groups in (*self._groups.shared([*decide]), *zip({kind.group for kind in self._warm} - decide.keys())):
            kinds = self._beside(groups, self._kinds.of(groups))
            needed, block, own_rows = needs_of(kinds)
            mine = [row for row in rows if self.group_of(row) in groups]
            one = longest if groups == (0,) else max([needed, *[row.most_tokens for row in mine]])
            most = max(needed, one, min(self._slots * one, self._most(block)))
            marks = any(row.marks for row in mine)
            for marked in (True,) if self._groups.mixes(groups) else (False, True)[: 1 + marks]:
                phase, blocks = phase_of(kinds, marked=marked), self._rung(most, block)
                while blocks:
                    for room in (rooms := Room.ladder(phase, self._slots, blocks, block, own_rows)):
                        few = groups[0] in decide or room.rows == rooms[-1].rows
                        if few and (room.windows > 1 or room.tokens <= self._rung(one, block) * block):
                            yield Shape(room, bits(groups), marked)
                    blocks = below(blocks, share)

    # --- requests -----------------------------------------------------------------------------------------------------

    def group_of(self, row: TableRow) -> int:
        """Return the number of a request's group."""
        return self._groups.number(row.phase)

    def _kinds_of(self, row: TableRow) -> list[Kind]:
        """The kinds of steps of a request: those of its group, and those that write its prompt."""
        group = self._groups.number(phase := row.phase)
        found = [Kind(group, phase, row.most_tokens, row.unit, row.most_rows)]
        if group and row.prefix:
            prompts = replace(phase, cache=KEPT, cut=None, commit=RULE)
            found.append(Kind(0, prompts, row.span, row.unit, row.most_rows))
        return found

    def add(self, request: TabledRequest) -> None:
        """Take a request that has begun."""
        self._kinds.change([(kind, 1) for kind in self._kinds_of(request.row)])
        self._rooms.clear()
        self._placed(request)

    def _placed(self, request: TabledRequest) -> None:
        if request.place is None:
            self._waiting.append(request)
        else:
            self._requests[request.place], self._live[request.place] = request, True
            self._told[request.place] = request.told

    def forget(self, request: TabledRequest) -> None:
        """Let go of a request; it has its row still, or waits for one."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.place is not None and self._requests[request.place] is request:
            self._requests[request.place], self._live[request.place] = None, False
        else:
            return
        self._kinds.change([(kind, -1) for kind in self._kinds_of(request.row)])
        self._rooms.clear()

    def launch(self) -> bool:
        """Launch a step if prompts fill it, unless one is on its way; return whether `step` would not wait."""
        if self._served is None and not self._table.launched:
            asked = wanted(self._table.columns)
            if np.add.reduce(asked.length[asked.running & asked.fills]) >= self._most_tokens:
                self._launch()
        return self._served is not None or self._table.has_news

    def step(self, *, alone: bool) -> ServedSteps:
        """Run a step; on a device, launch the one after it before its outcome is waited for. Its time counts if it was `alone`.

        Its outcome is returned again until it is `taken`: whoever is interrupted loses none.
        """
        table = self._table
        while self._served is None:
            most = AHEAD if self._runner.asynchronous and table.is_sure else 1
            while (
                len(table.launched) < most and self.live and not (table.launched and self._waiting) and self._launch()
            ):
                pass
            table.wait()
            with interrupts_held():
                step, served = table.launched[0], table.read()
                prefix = table.columns[served.report[:, Reported.ROW], Column.PREFIX]
                counts = alone and self._runner.asynchronous
                self._pace.take(step, served, prefix, partial(self._planned_ms, step), counts=counts)
                self._served = self._of_live(served)
        return self._served

    def taken(self) -> None:
        """Take note that the session has the outcome of the last step."""
        self._served = None

    def _of_live(self, served: Served) -> ServedSteps | None:
        """What a step did for live requests, if it served any."""
        numbers = served.report[:, Reported.ROW]
        self._deciding += int(np.add.reduce(served.decided > 0))
        self._decided += int(np.add.reduce(served.committed))
        for request in filter(None, self._requests[numbers[served.decided == 0]].tolist()):
            request.wrote()
        places = self._live[numbers].nonzero()[0]
        if not len(places):
            return None
        told = self._told[numbers[places]]
        return ServedSteps(served, places, self._requests[numbers[places]].tolist(), told)

    def _launch(self) -> bool:
        """Launch a step, unless all are expected to have ended by then."""
        with interrupts_held():
            while (able := [one for one in self._waiting if not one.follows]) and (
                not self._table.is_full or self._grow()
            ):
                request = min(able, key=lambda one: one.waiting_since)
                self._waiting.remove(request)
                request.enter()
                self._placed(request)
        asked, held = wanted(columns := self._expected()), 0
        if (waiting := held_back(columns, asked, self._most_tokens)) is not None:
            asked, held = asked._replace(running=asked.running & ~waiting), int(np.add.reduce(waiting))
        for groups in (choices := self._groups.choices(asked)):
            shape = self._shape_of(columns, asked, groups, held)
            if groups == choices[-1] or self._table.fits(shape.room):
                break
        else:
            return False
        self._table.launch(shape, holds=waiting is not None)
        self._groups.served(groups)
        return True

    def _shape_of(self, columns: NDArray[np.int64], asked: Wanted, groups: tuple[int, ...], held: int) -> Shape:
        """The step for some groups, with room for what is asked for, fits, and delays nobody; `held` wait for others' prompts."""
        asks, length = asked.running & asked_of(asked, bits(groups)), asked.length
        decides, fills = asks & ~asked.fills, asks & asked.fills
        deciding, prompts = int(np.add.reduce(length[decides])), int(np.add.reduce(length[fills]))
        kinds = self._beside(groups, self._kinds.of(groups))
        _, block, own_rows = needs_of(kinds)
        rows = min(max(int(np.add.reduce(asked.rows[decides])), own_rows), deciding or own_rows)
        first, limit = first_tokens(columns, length, decides, fills), self._most(block)
        usual = 0 if self._knows(columns[decides]) else max(map(usual_tokens, kinds))
        least = max(first, min(max(deciding, usual), limit))
        most = max(least, min(deciding + prompts, limit))
        marked = self._groups.mixes(groups) or bool(np.logical_or.reduce(asked.marked[decides]))
        phase, served = phase_of(kinds, marked=marked), bits(groups)
        fewest, blocks, own = self._rung(first, block), self._rung(most, block), self._rung(least, block)
        alone = Room.of(phase, 1, fewest, block, own_rows)
        asking = partial(Room.of, phase, int(np.add.reduce(asks)), block=block, rows=rows)
        self._table.cover(alone, alone if self._is_warm else asking(blocks=own))
        if alone.tokens > self._most_tokens:  # what its rung has left is nobody's: the limit is for all but one
            return Shape(alone, served, marked)
        while not self._table.fits(asking(blocks=blocks)):
            if blocks <= fewest:
                return Shape(alone, served, marked)
            blocks = max(below(blocks), fewest)
        longest: float = math.inf
        if prompts and (of_all := asked.running & ~asked.fills).any():
            runs, waits = int(np.add.reduce(of_all)), int(np.add.reduce(fills)) + held
            blocks, longest = self._beside_blocks(
                lambda blocks: Shape(asking(blocks=blocks), served, marked), min(own, blocks), blocks,
                bits({*asked.group[of_all].tolist()}), max(1 + (prompts / BACKLOG + held) / runs, PACE),
                self._delay_ms * max(waits / runs, 1.0),
            )  # fmt: skip
        return self._substitutes.of(Shape(asking(blocks=blocks), served, marked), min(own, blocks), longest)

    def _beside_blocks(
        self, asking: Callable[[int], Shape], own: int, most: int, running: int, pace: float, delay_ms: float
    ) -> tuple[int, float]:
        """As many blocks, from `own` to `most`, as delay none of the `running` groups too long, and how many a substitute may have.
        Steps with prompts take at most `pace` times as long as the longest without, or have few tokens of prompts."""
        fits, predicted_ms, shape = self._table.fits, self._substitutes.predicted_ms, asking(own)
        if own == most or not fits(shape.room):  # a smaller step may take more memory than a larger one
            return most, math.inf
        block, (planned_ms, most_ms) = shape.room.block, map(partial(predicted_ms, fewest=own), (shape, asking(most)))
        slower = SLOWER if self._runner.asynchronous else 1.0
        token_ms = slower * max(most_ms - planned_ms, 0.0) / (block * (most - own))
        tokens = self._pace.time_for(shape.groups, running, planned_ms, token_ms, self._few, pace, delay_ms)
        longest = own + int(tokens / block)
        fitting = (blocks for blocks in rungs(own, most)[::-1] if blocks <= longest and fits(asking(blocks).room))
        return next(fitting, own), below(longest + 1, COARSE)

    def _planned_ms(self, step: Launched, tokens: int) -> float:
        """How long a step of this kind is planned to take with so many tokens of blocks alone."""
        _, windows, most, block, rows = step.room
        blocks = min(self._rung(max(tokens, 1), block), most)
        room = step.room._replace(windows=min(windows, blocks), blocks=blocks, rows=min(rows, blocks * block))
        return self._substitutes.predicted_ms(Shape(room, step.groups, step.marked), blocks)

    def _knows(self, columns: NDArray[np.int64]) -> bool:
        """Whether it is known what these will ask for: nothing is in flight, or their steps decide a number of tokens."""
        return not self._table.launched or bool((counted(columns) & (columns[:, Column.DECIDES] != ALL_ONES)).all())

    def _expected(self) -> NDArray[np.int64]:
        """The table as it will be when what is in flight has ended: requests decide what they have to, or what is usual."""
        columns = self._table.columns
        for step in self._table.launched:
            columns = columns.copy()
            go_on(columns, step, self._decided // max(self._deciding, 1))
        return columns

    def _grow(self) -> bool:
        """Make the table larger for those who wait, if all that was admitted to any session fits beside it then."""
        table, shared = self._table, self._runner.sharing()
        rows, generators = {REQUESTS: 3 * len(table.columns)}, shared.beside([], rows=True)
        if generators and not self._runner.admits(generators, more=rows):
            return False
        if not all(other.admits((), rows) for other in shared.tables) or not table.grow():
            return False
        more = len(table.columns) - len(self._live)
        self._requests = np.concatenate([self._requests, np.full(more, None, dtype=object)])
        self._live, self._told = np.pad([self._live, self._told], ((0, 0), (0, more)))
        return True

    def _most(self, block: int) -> int:
        """Tokens of a step of whole blocks, unless one request alone needs more."""
        return self._most_tokens // block * block

    def _rung(self, tokens: int, block: int) -> int:
        """Blocks that hold so many tokens, rounded up by at most an eighth; beyond `_most` only if the tokens are."""
        blocks, most = rung(-(-tokens // block)), self._most(block)
        return blocks if tokens > most else min(blocks, most // block)
