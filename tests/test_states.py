"""Rows of states by name: who owns which, in ranges that grow and shrink alone and give pages back from their middle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import GRANULARITY, FakeDriver
from test_runtime_compiled import LLADA
from torch import Tensor

import mosaic
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models import load
from mosaic.models.parts import KEPT, KV, NO_HEAD, Commit
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.planner import Planner, plan_graph
from mosaic.planner.plan import Plan
from mosaic.runtime import cuda_range
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.cuda_pool import CudaPool
from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Executor
from mosaic.runtime.page_pool import PAGE_BYTES, PagePool
from mosaic.runtime.state_rows import OwnedRows, RowTable
from mosaic.runtime.steps import StepRequest
from mosaic.runtime.workspace import Workspace

WIDTH = 256  # float32 columns of a row: four rows to a page
NAMES = ("kv", "summary")


def handed_out(taken: set[int], count: int, *, together: bool = False) -> list[int]:
    """The rows that an owner gets by definition: of the smallest hole that holds all, the first of several, or else of the largest
    holes, one after the other; none of these if all have to lie side by side. Then those at the end."""
    found, taken = list[int](), set(taken)
    end = max(taken, default=-1) + 1
    while len(found) < count:
        more, free = count - len(found), [row for row in range(end) if row not in taken]
        holes = [
            [row for row in free if row - free.index(row) == at] for at in {row - free.index(row): 0 for row in free}
        ]
        whole = [hole for hole in holes if len(hole) >= more]
        split = [] if together else sorted(holes, key=len, reverse=True)
        hole = min(whole, key=len) if whole else [*split, [*range(end, end + more)]][0]
        found += hole[:more]
        taken.update(hole[:more])
    return found


class PlainTable:
    """The same by lists of rows."""

    def __init__(self) -> None:
        self.owned: dict[int, list[int]] = {}

    def handed_out(self, count: int, *, together: bool = False) -> list[int]:
        return handed_out({row for rows in self.owned.values() for row in rows}, count, together=together)

    @property
    def rows(self) -> int:
        return max((row + 1 for rows in self.owned.values() for row in rows), default=0)


def change(rng: random.Random, opened: dict[int, OwnedRows], plain: PlainTable, table: RowTable) -> None:
    """Open, grow, cut, cut out of the middle, or close."""
    key = rng.randrange(6)
    owned = opened.setdefault(key, table.open(key))
    mine = plain.owned.setdefault(key, [])
    match rng.choice(("grow", "grow", "grow", "cut", "middle", "close")):
        case "grow":
            count = rng.randint(0, 40)
            owned.reserve(count)
            mine += plain.handed_out(count - len(mine)) if count > len(mine) else []
        case "close":
            owned.close()
            mine.clear()
        case what:
            start = rng.randint(0, len(mine))
            end = rng.randint(start, len(mine)) if what == "middle" else None
            owned.drop(start, end)
            del mine[start:end]


def agree(opened: dict[int, OwnedRows], plain: PlainTable, table: RowTable) -> None:
    for key, owned in opened.items():
        rows = plain.owned[key]
        assert owned.slots().tolist() == rows and owned.length == len(rows)
        assert [first + i for first, count in owned.runs() for i in range(count)] == rows
        assert sum(a + n == b for (a, n), (b, _) in zip(owned.runs(), owned.runs()[1:], strict=False)) == 0
    taken = {row for rows in plain.owned.values() for row in rows}
    assert table.rows == plain.rows
    assert {row for start, end in table.free for row in range(start, end)} == set(range(table.rows)) - taken
    assert {owned.owner for owned in table.owned} == {key for key, rows in plain.owned.items() if rows}


def test_rows_have_the_owners_that_a_plain_table_says() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        table, opened, plain = RowTable("kv"), dict[int, OwnedRows](), PlainTable()
        for _ in range(40):
            change(rng, opened, plain, table)
            agree(opened, plain, table)
            owned, key = (found := rng.choice([*opened.items()]))[1], found[0]
            start = rng.randint(0, owned.length)
            end = rng.randint(start, owned.length)
            assert owned.slots(start, end).tolist() == plain.owned[key][start:end]
            runs = [first + i for first, count in owned.runs(start, end) for i in range(count)]
            assert runs == plain.owned[key][start:end]


class PlainExtents:
    """The same by sets: rows that were handed out at once and lie side by side are taken until all of them are dropped."""

    def __init__(self) -> None:
        self.owned: dict[
            int, list[tuple[int, int]]
        ] = {}  # by owner, a row and the number of its extent for each position
        self.extents: list[list[int]] = []

    @property
    def taken(self) -> set[int]:
        live = {extent for rows in self.owned.values() for _, extent in rows}
        return {row for extent in live for row in self.extents[extent]}

    def grow(self, key: int, count: int) -> None:
        taken, mine = self.taken, self.owned.setdefault(key, [])
        more = max(count - len(mine), 0)
        for row in handed_out(taken, more):
            if not self.extents or row != self.extents[-1][-1] + 1 or not mine or mine[-1][1] != len(self.extents) - 1:
                self.extents.append([])
            self.extents[-1].append(row)
            mine.append((row, len(self.extents) - 1))
        self.extents.append([-1])  # what comes next is not handed out at once with these


def test_extents_go_back_whole() -> None:
    """By a plain set of rows; tables say of each position which token of which extent it is."""
    for seed in range(30):
        rng, table, plain = random.Random(seed), RowTable("kv", extents=True), PlainExtents()
        opened = {key: table.open(key) for key in range(5)}
        for _ in range(40):
            key = rng.randrange(5)
            owned, mine = opened[key], plain.owned.setdefault(key, [])
            if rng.random() < 0.6:
                count, most = rng.randint(0, 40), table.most_extents(1)
                owned.reserve(count)
                plain.grow(key, count)
                assert sum(len(each.extents) for each in opened.values()) <= most
            else:
                start = rng.randint(0, len(mine))
                end = rng.choice([None, rng.randint(start, len(mine))])
                owned.drop(start, end)
                del mine[start:end]
            for key, owned in opened.items():
                found = []
                for first, rows, position, before in owned.extents:
                    assert position == len(found)
                    last = next((p for *_, p, _ in owned.extents if p > position), owned.length)
                    found += [(first + before + i, first, rows) for i in range(last - position)]
                expected = [(row, plain.extents[e][0], len(plain.extents[e])) for row, e in plain.owned.get(key, [])]
                assert found == expected and owned.length == len(expected)
            taken = plain.taken
            assert table.rows == max(taken, default=-1) + 1
            assert {row for start, end in table.free for row in range(start, end)} == set(range(table.rows)) - taken


def test_rows_that_are_handed_out_at_once_lie_side_by_side() -> None:
    """In a hole that holds all of them, else at the end. As many rows as `room` says are enough, and no fewer where no hole is."""
    reused = 0
    for seed in range(30):
        rng, table = random.Random(seed), RowTable("canvas", together=True)
        opened, plain = {key: table.open(key) for key in range(5)}, PlainTable()
        plain.owned = {key: [] for key in opened}
        for _ in range(40):
            keys, before, in_holes = rng.sample(range(5), rng.choice([1, 1, 2])), table.rows, 0
            grows = rng.random() < 0.6
            counts = [rng.choice([0, 1, rng.randint(1, 40)]) for _ in keys]
            room = table.room(sum(counts))
            for key, count in zip(keys, counts, strict=True):
                mine = plain.owned[key]
                if grows:
                    rows = plain.handed_out(count, together=True)
                    opened[key].reserve(len(mine) + count)
                    in_holes += count > 0 and rows[0] < before
                    mine += rows
                else:
                    start = rng.randint(0, len(mine))
                    end = rng.choice([None, rng.randint(start, len(mine))])
                    opened[key].drop(start, end)
                    del mine[start:end]
                agree(opened, plain, table)
            assert table.rows <= room
            assert not grows or in_holes or table.rows == room
            reused += in_holes
    assert reused > 50


def test_states_get_the_rows_that_were_foreseen() -> None:
    """Of any states, whether somebody has rows of them or not; `states_with` leaves others as they are."""
    notes, lines = State(name="notes", width=2), State(name="lines", width=2, together=True)
    rng, engine = (
        random.Random(0),
        Engine(Planner(load(LLADA), device="cpu", host_budget=0), StepSize(windows=(1,), rows=1)),
    )
    opened, exact = list[OwnedRows](), 0
    for _ in range(80):
        more = {state: rng.randint(0, 30) for state in rng.sample((KV, notes, lines), rng.randint(1, 3))}
        before, foreseen = engine.states, engine.states_with(more)
        assert {state: foreseen[state] for state in before if state not in more} == {
            state: rows for state, rows in before.items() if state not in more
        }
        for state, count in more.items():
            opened.append(engine.table(state).open())
            opened[-1].reserve(count)
        assert engine.states.keys() == foreseen.keys()
        for state, rows in engine.states.items():
            assert rows == foreseen[state] or (state == lines and rows < foreseen[state])
        exact += engine.states == foreseen
        for owned in rng.choices(opened, k=rng.randint(0, 3)):
            owned.close()
    engine.close()
    assert exact > 40


def test_positions_that_an_owner_has_not_are_refused() -> None:
    owned = RowTable("kv").open()
    owned.reserve(4)
    for start, end in ((0, 5), (3, 2), (-1, 2), (5, None)):
        for ask in (owned.slots, owned.runs, owned.drop):
            with pytest.raises(UsageError, match="reserve more"):
                ask(start, end)
    assert owned.length == 4


# --- ranges with holes ------------------------------------------------------------------------------------------------


def test_ranges_hold_the_pages_that_a_plain_set_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and in chunks that are cut on a device. What is held before and after a change keeps its contents."""
    monkeypatch.setattr(cuda_range, "CHUNK_BYTES", 8 * GRANULARITY)
    for seed in range(24):
        rng, driver = random.Random(seed), FakeDriver(64 * GRANULARITY)
        kinds = (PagePool(), CudaPool(driver))
        for number, name in ((0, "state/kv"), (1, "state/kv"), (1, "workspace")):
            with kinds[number] as pool:
                part, held = pool.reserve(name, 64 * GRANULARITY), set[int]()
                page = part.page_bytes
                for _ in range(8):
                    end = rng.randint(0, 24 * page)
                    cuts = sorted(rng.sample(range(end + 1), min(4, end // 2 * 2)))
                    holes = [*zip(cuts[::2], cuts[1::2], strict=True)]
                    inside = {i for i in range(24) if any(a <= i * page and (i + 1) * page <= b for a, b in holes)}
                    needed, before, changes = {i for i in range(24) if i * page < end} - inside, set(held), part.changes
                    match rng.choice(("commit", "decommit", "resize")):
                        case "commit":
                            part.commit(end, holes=holes)
                            held |= needed
                        case "decommit":
                            part.decommit(end, holes=holes)
                            held &= needed
                        case "resize":
                            part.resize(end, holes=holes)
                            held = needed
                    assert part.committed_bytes == len(held) * page == part.resident_bytes()
                    assert part.end_bytes == (max(held) + 1 if held else 0) * page
                    assert (part.changes > changes) == (held != before)
                    for i in held:
                        first = part.tensor[i * page]
                        assert name == "workspace" or i not in before or int(first) == i + 1
                        first.fill_(i + 1)
                    assert pool.ledger.committed_bytes == part.committed_bytes
                    assert number == 0 or driver.used_bytes == part.committed_bytes
        assert driver.used_bytes == 0


# --- two states of one graph ------------------------------------------------------------------------------------------


def two_states(g: Any) -> None:
    """Store new rows into each state, and read some of each back."""
    new, read, bounds = g.dim("tokens"), g.dim("read"), g.input("cu_seqlens", (2,), "int32")
    positions = g.input("positions", (new,), "int32")
    for name in NAMES:
        state = g.state(name, (g.dim(f"{name}_rows"), WIDTH), "float32")
        k, v = (g.input(f"{name}_{part}", (new, WIDTH // 2), "float32") for part in "kv")
        extents, count = g.input(f"{name}_extents", (new, 4), "int64"), g.input(f"{name}_cu_extents", (2,), "int32")
        g.add_op("kv_store", k, v, state, extents, count, bounds, positions, layer=0, head_size=WIDTH // 2)
        rows = g.input(f"{name}_read", (read,), "int64")
        g.add_op("gather_rows", state, rows, out=g.output(f"{name}_found", (read, WIDTH), "float32"))


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace() as opened:
        yield opened


class States:
    """Two states in a workspace, and what naive code says that they hold."""

    def __init__(self, workspace: Workspace, rng: random.Random) -> None:
        self.workspace, self.rng = workspace, rng
        self.tables = {name: RowTable(name) for name in NAMES}
        self.opened: dict[str, dict[int, OwnedRows]] = {name: {} for name in NAMES}
        self.plain = {name: PlainTable() for name in NAMES}
        self.held: dict[str, dict[int, Tensor]] = {name: {} for name in NAMES}

    def plan(self, tokens: int, read: int) -> Plan:
        rows = {f"{name}_rows": max(table.rows, 1) for name, table in self.tables.items()}
        return plan_graph(two_states, dims={"tokens": tokens, "read": read, **rows}, device="cpu")

    def step(self) -> None:
        """Write every row that is new to its owner, and find every row that anybody has."""
        fresh = {name: sorted(self._rows(name) - self.held[name].keys()) for name in NAMES}
        have = {name: sorted(self._rows(name)) for name in NAMES}
        plan = self.plan(max(1, *map(len, fresh.values())), max(1, *map(len, have.values())))
        for pool, size in plan.pools.items():
            holes = [(a * WIDTH * 4, b * WIDTH * 4) for a, b in self.free(pool)]
            self.workspace.resize(pool, size, holes=holes)
        executor = Executor(plan, self.workspace, debug="poison")
        for name in NAMES:
            values = torch.randn(
                len(fresh[name]), WIDTH, generator=torch.Generator().manual_seed(self.rng.randrange(1 << 30))
            )
            self.held[name] |= dict(zip(fresh[name], values, strict=True))
            for part, value in (("k", values[:, : WIDTH // 2]), ("v", values[:, WIDTH // 2 :])):
                executor.inputs[f"{name}_{part}"].zero_()[: len(value)] = value
            single = [[row, 1, position, 0] for position, row in enumerate(fresh[name])]  # extents of a row each
            executor.inputs[f"{name}_extents"][: len(single)] = torch.tensor(single, dtype=torch.int64).view(-1, 4)
            executor.inputs[f"{name}_cu_extents"].copy_(torch.tensor([0, len(single)]))
            somewhere = have[name][0] if have[name] else 0
            executor.inputs[f"{name}_read"].fill_(somewhere)[: len(have[name])] = torch.tensor(
                have[name], dtype=torch.int64
            )
        count = plan.dims["tokens"]
        executor.inputs["cu_seqlens"].copy_(torch.tensor([0, count]))
        executor.inputs["positions"].copy_(torch.arange(count))
        executor.run()
        for name in NAMES:
            found = executor.outputs[f"{name}_found"][: len(have[name])]
            assert all(torch.equal(row, self.held[name][i]) for i, row in zip(have[name], found, strict=True))

    def change(self) -> None:
        name = self.rng.choice(NAMES)
        change(self.rng, self.opened[name], self.plain[name], self.tables[name])
        self.held[name] = {row: value for row, value in self.held[name].items() if row in self._rows(name)}

    def free(self, pool: str) -> list[tuple[int, int]]:
        return [*self.tables[pool.removeprefix("state/")].free] if pool.startswith("state/") else []

    def _rows(self, name: str) -> set[int]:
        return {row for rows in self.plain[name].owned.values() for row in rows}

    def pages(self, name: str) -> int:
        """Bytes of the pages that rows of a state touch, the last row's at least."""
        rows = self._rows(name) | {max(self.tables[name].rows, 1) - 1}
        return len({row * WIDTH * 4 // PAGE_BYTES for row in rows}) * PAGE_BYTES


def test_two_states_grow_and_shrink_alone(workspace: Workspace) -> None:
    """Under poison: contents as naive code has them, addresses where they were, resident bytes those of owned rows."""
    for seed in range(2):
        states = States(workspace, random.Random(seed))
        addresses = {name: workspace.range(f"state/{name}").tensor.data_ptr() for name in NAMES}
        for _ in range(12):
            states.change()
            states.step()
            for name in NAMES:
                part = workspace.range(f"state/{name}")
                assert part.tensor.data_ptr() == addresses[name] == part.address
                assert part.resident_bytes() == part.committed_bytes == states.pages(name)
            assert workspace.ledger.committed_bytes == sum(workspace.committed_bytes().values())


def test_a_state_is_alone_in_its_pool() -> None:
    few = plan_graph(two_states, dims={"tokens": 3, "read": 3, "kv_rows": 5, "summary_rows": 9}, device="cpu")
    more = plan_graph(two_states, dims={"tokens": 3, "read": 3, "kv_rows": 5000, "summary_rows": 9}, device="cpu")
    for plan in (few, more):
        plan.check()
        assert all(b["offset"] == 0 for b in plan.document["buffers"] if b["kind"] == "state")
        assert plan.components["state"] == plan.pools["state/kv"] + plan.pools["state/summary"]
    assert few.pools["state/kv"] < few.pools["state/summary"] == more.pools["state/summary"] < more.pools["state/kv"]


# --- a model's steps ----------------------------------------------------------------------------------------------------

TOKENS = 24
ROW = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head size, float32
DECIDE = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
COMMIT = Phase(cache=KEPT, head=NO_HEAD)


def ids_of(seed: int, count: int) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def keep(model: CompiledModel, owned: OwnedRows, seed: int) -> None:
    """Write keys and values of a whole sequence."""
    nothing = torch.empty(0, dtype=torch.int64)
    tokens = ids_of(seed, owned.length)
    ask = StepRequest(
        phase=COMMIT, token_ids=tokens, sequence=owned, key_len=len(tokens), rows=nothing, current=nothing
    )
    model.step([ask])


def look(model: CompiledModel, owned: OwnedRows) -> Tensor:
    """The scores of a window over all keys of a sequence, the last of which it overwrites."""
    rows, tokens = torch.arange(4), ids_of(1, TOKENS)
    window: dict[str, Any] = {"start": owned.length - TOKENS, "key_len": owned.length}
    ask = StepRequest(phase=DECIDE, token_ids=tokens, sequence=owned, rows=rows, current=tokens[:4], quota=1, **window)
    return model.step([ask])[0].score


def test_pages_of_closed_sequences_go_back_while_a_later_one_lives() -> None:
    """Later rows keep their addresses and contents, and the pages come back with new rows."""
    with mosaic.compile(LLADA, host_budget=0, debug="poison") as model:
        first, second, last = (model.open_sequence() for _ in range(3))
        for number, owned in enumerate((first, second, last)):
            owned.reserve((100, 900, 60)[number])
            keep(model, owned, number)
        rows, expected = last.slots().tolist(), look(model, last)
        address, full = model.workspace.range("state/kv").address, model.memory().resident["state/kv"]
        second.close()
        assert model.state_rows == {"kv": 1060} and model.memory().resident["state/kv"] == full
        model.trim()
        memory = model.memory()
        assert memory.resident["state/kv"] == memory.committed["state/kv"] == pages_of([*range(100), *rows])
        assert torch.equal(look(model, last), expected) and last.slots().tolist() == rows
        again = model.open_sequence()
        again.reserve(500)
        keep(model, again, 7)
        assert again.runs() == [(100, 500)] and torch.equal(look(model, last), expected)
        assert model.workspace.range("state/kv").address == address
        held = model.memory().resident["state/kv"]
        for owned in (first, again, last):
            owned.close()
        assert model.memory().resident["state/kv"] == held > pages_of([*range(600)])  # for whoever opens rows next
        model.trim()
        assert model.memory().resident["state/kv"] == 0 == model.workspace.ledger.held().get("state/kv", 0)


def pages_of(rows: list[int]) -> int:
    """Bytes of the pages that rows touch, or are rounded up to."""
    return len({byte // PAGE_BYTES for row in rows for byte in (row * ROW, row * ROW + ROW - 1)}) * PAGE_BYTES


@pytest.mark.parametrize("debug", [None, "poison"])
def test_rows_that_nobody_wrote_are_poisoned(debug: Any) -> None:
    """A new owner's rows hold the last owner's values; under poison, reading them unwritten gives NaN."""
    with mosaic.compile(LLADA, host_budget=0, debug=debug) as model:
        first, other = model.open_sequence(), model.open_sequence()
        first.reserve(60)
        other.reserve(40)
        keep(model, first, 0)
        keep(model, other, 1)
        expected = look(model, other)
        first.close()
        second = model.open_sequence()
        second.reserve(60)
        assert second.runs() == [(0, 60)]
        assert bool(torch.isnan(look(model, second)).any()) == (debug == "poison")
        assert torch.equal(look(model, other), expected)
        keep(model, second, 2)
        assert torch.isfinite(look(model, second)).all()
        second.drop(0, 10)
        second.reserve(80)  # rows that were given back come again, for other positions
        assert bool(torch.isnan(look(model, second)).any()) == (debug == "poison")


def test_steps_that_fit_by_their_plans_run_whatever_ran_before() -> None:
    """At random sizes and beside sequences that come and go: resident bytes never exceed the budget, and a plan that fits
    runs; with room for all of them, sizes that were there before map nothing."""
    with mosaic.compile(LLADA, host_budget=0) as free:
        largest = max(free.plan(600, masked=600).total_bytes, free.plan(40).total_bytes)
    for budget in (largest + 700 * ROW, 1 << 30):
        rng, ran, refused, opened = random.Random(5), 0, 0, dict[int, OwnedRows]()
        with mosaic.compile(LLADA, budget=budget, host_budget=0) as model:
            fixed = sum(model.workspace.ledger.held().get(part, 0) for part in ("context", "library"))
            for turn in range(40):
                key = rng.randrange(4)
                owned = opened.setdefault(key, model.open_sequence())
                if rng.random() < 0.3:
                    owned.close()
                else:
                    owned.reserve(rng.randint(1, 500))
                tokens = rng.choice((40, 300, 600))
                before, ledger = model.workspace.changes(), model.workspace.ledger
                try:
                    fits = model.plan(tokens, masked=tokens).fits
                except DoesNotFit:
                    refused += 1
                    continue
                assert fits and torch.isfinite(model(ids_of(turn, tokens), torch.arange(tokens)).entropy).all()
                ran += 1
                assert sum(model.memory().resident.values()) + fixed <= budget
                assert ledger.committed_bytes == fixed + sum(model.workspace.resident_bytes().values()) <= budget
                before = model.workspace.changes()
                model(ids_of(turn, tokens), torch.arange(tokens))
                assert model.workspace.changes() == before
            for owned in opened.values():
                owned.close()
            model.trim()
            assert model.memory().resident["state/kv"] == 0
            rooms = budget > largest + 700 * ROW
            assert ran > 10 and (refused == 0) == rooms
            before = model.workspace.changes()
            for _ in range(3):
                for tokens in (40, 600):
                    model(ids_of(0, tokens), torch.arange(tokens))
            assert model.workspace.changes() - before <= 2
