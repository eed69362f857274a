"""The workspace that steps keep, against a model of it: the pages of each pool, as sets."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest
from runtime_helpers import buffer_row

from mosaic.errors import DoesNotFit
from mosaic.planner.plan import Plan
from mosaic.planner.plan_records import PlanRecords
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.state_rows import OwnedRows, RowTable
from mosaic.runtime.step_memory import StepMemory
from mosaic.runtime.workspace import Workspace

PAGE = 4096
ROW_BYTES = {"kv": PAGE, "ssm": 2 * PAGE}
BUFFERS = [
    buffer_row("kv", "input", (1, 1), "int64"),
    buffer_row("ssm", "state", (9, 2, 2048), "bfloat16"),
    buffer_row("kv", "state", (9, 1024), "float32"),
]
OTHERS = ("workspace", "host", "carry/x", "carry/y")


class Model:
    """Random plans and owners of rows, and which pages should be memory."""

    def __init__(self, seed: int, workspace: Workspace, budget_pages: int) -> None:
        self.rng, self.workspace, self.budget = random.Random(seed), workspace, budget_pages
        self.tables = [RowTable(name) for name in ROW_BYTES]
        self.owned: list[OwnedRows] = []
        self.pages: dict[str, set[int]] = {}
        self.shrinks: list[int] = []
        self.ways = set[int | None]()
        self.last: SimpleNamespace | None = None
        self.learned, self.expected = set[str](), 0
        self.memory = StepMemory(workspace, self.tables, lambda: self.shrinks.append(self.committed("workspace")), int)

    def committed(self, pool: str) -> int:
        return self.workspace.committed_bytes().get(pool, 0)

    def change_rows(self) -> None:
        if self.owned and self.rng.random() < 0.5:
            self.owned.pop(self.rng.randrange(len(self.owned))).close()
        else:
            self.owned.append(self.rng.choice(self.tables).open())
            self.owned[-1].reserve(self.rng.randint(1, 4))

    def plan(self) -> SimpleNamespace:
        pools = {name: self.rng.choice((0, 1, self.rng.randrange(1, 8 * PAGE))) for name in OTHERS}
        pools = {name: size for name, size in pools.items() if name == "workspace" or self.rng.random() < 0.6}
        pools["workspace"] = self.rng.randrange(8) * PAGE
        pools["weights"] = 99 * PAGE  # loaded by others
        states = [table for table in self.tables if self.rng.random() < 0.7]
        pools |= {table.pool: table.rows * ROW_BYTES[table.name] for table in states}
        buffers = [b for b in BUFFERS if b["kind"] == "input" or f"state/{b['name']}" in pools]
        return SimpleNamespace(pools=pools, records=PlanRecords({"buffers": buffers}))

    def span(self, pool: str, size: int) -> set[int]:
        """Pages of the first bytes of a pool, except free rows: the first row, whose address launches name, stays."""
        found = set(range(-(-size // PAGE)))
        for table in self.tables:
            if table.pool == pool and table.name in self.learned:
                pages = ROW_BYTES[table.name] // PAGE
                found -= {page for start, end in table.free for page in range(max(start, 1) * pages, end * pages)}
        return found

    def fits(self, pages: dict[str, set[int]]) -> bool:
        return sum(len(held) for pool, held in pages.items() if pool != "host") <= self.budget

    def in_use(self, plan: SimpleNamespace | None = None) -> dict[str, set[int]]:
        """Pages of each state in which somebody has a row, and up to which plans have counted; and those of a plan."""
        sizes = {t.pool: t.rows * ROW_BYTES[t.name] if t.name in self.learned else 0 for t in self.tables}
        needed = {} if plan is None else plan.pools
        return {pool: self.span(pool, max(size, needed.get(pool, 0))) for pool, size in sizes.items()}

    def commit(self) -> bool:
        again = self.last is not None and self.rng.random() < 0.4
        plan = self.last = self.last if again else self.plan()
        assert plan is not None
        sizes = {name: size for name, size in plan.pools.items() if name != "weights" and (name != "host" or size)}
        self.learned |= {table.name for table in self.tables if table.pool in sizes}
        wanted = {pool: self.span(pool, size) for pool, size in sizes.items()}
        owned = self.pages | {
            pool: self.pages[pool] & pages for pool, pages in self.in_use().items() if pool in self.pages
        }
        unused = [pool for pool in self.pages if pool == "host" or pool.startswith("carry/")]
        alone = owned | {pool: set[int]() for pool in unused} | wanted
        ways = [  # from what goes last to what goes first: nothing, rows of nobody, all that is not the plan's
            left | {pool: left.get(pool, set()) | pages for pool, pages in wanted.items()}
            for left in (self.pages, owned, alone)
        ]
        way = next((way for way, pages in enumerate(ways) if self.fits(pages)), None)
        self.ways.add(way)
        if way is None:
            with pytest.raises(DoesNotFit):
                self.memory.commit(cast(Plan, plan))
            return False
        looked_at = -(-self.committed("workspace") // PAGE)
        before = len(self.shrinks)
        self.memory.commit(cast(Plan, plan))
        # nobody may look at what goes, and all of it is there when that is said
        self.expected += way == 2 and sizes["workspace"] < looked_at * PAGE
        assert len(self.shrinks) == self.expected and self.shrinks[before:] in ([], [looked_at * PAGE])
        self.pages = ways[way]
        return True

    def trim(self) -> None:
        plan = self.plan()
        self.memory.trim(cast(Plan, plan))
        kept = {pool: self.span(pool, plan.pools.get(pool, 0)) for pool in OTHERS} | self.in_use()
        self.pages = {pool: pages & kept[pool] for pool, pages in self.pages.items()}

    def make_room(self) -> None:
        """As a graph does that is captured in the middle of a step."""
        self.memory.give_idle_back(cast(Plan, self.last) if self.last is not None else None)
        kept = self.in_use(self.last)
        self.pages = {pool: pages & kept.get(pool, pages) for pool, pages in self.pages.items()}


@pytest.mark.parametrize("seed", range(40))
def test_steps_keep_what_earlier_ones_needed_where_there_is_room(seed: int) -> None:
    budget = 12 + seed % 30
    ledger = DeviceLedger(budget_bytes=budget * PAGE)
    pool = PagePool(ledger, page_bytes=PAGE)
    with Workspace(pool=pool, capacities=dict.fromkeys((*OTHERS, "state/kv", "state/ssm"), 256 * PAGE)) as w:
        model = Model(seed, w, budget)
        for _ in range(25):
            action = model.rng.choice(
                (model.change_rows, model.change_rows, model.commit, model.commit, model.trim, model.make_room)
            )
            if action() is False:
                break
            held = {pool: len(pages) * PAGE for pool, pages in model.pages.items()}
            assert w.committed_bytes() == held, action
