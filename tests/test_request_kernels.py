"""The operators of a table of requests: on the CPU and in Triton against plain Python, over random tables."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch
from test_kernels import Case, check_allocates_nothing

from mosaic.decoding.noise import key_of, row_keys
from mosaic.kernels.shared.requests import bits, block_hash
from mosaic.models import load
from mosaic.models.parts import (
    CANVAS,
    EACH,
    HELD_EXTENTS,
    KEPT,
    KV,
    NUCLEUS,
    REQUESTS,
    SAMPLE,
    STATISTICS,
    TABLED,
    WHOLE,
    Commit,
)
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.planner import Planner
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import CANVAS_LONG, COLUMNS, Column

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from test_triton_kernels import INTERPRETED, run

    DEVICE = "cpu" if INTERPRETED else "cuda"
    triton_test = (lambda function: function) if INTERPRETED else pytest.mark.gpu
else:
    triton_test = pytest.mark.skip(reason="triton is not installed")

I32 = torch.int32
SMALL = {
    "model_type": "sdar", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "vocab_size": 64, "mask_token_id": 63, "block_size": 4, "torch_dtype": "float32",
}  # fmt: skip


class Requests:
    """Random requests of a table, some of them nobody's or ended, over a canvas where some positions are decided."""

    def __init__(self, seed: int, *, packs: bool = True) -> None:
        self.packs = packs  # whether some have packed keys
        rng = self.rng = random.Random(seed)
        self.groups = rng.randrange(2)  # whether they are of several, and ask for marked steps
        self.first, self.count, more = rng.choice([0, 3]), rng.choice([1, 5, 40]), rng.choice([0, 2])
        self.table = torch.zeros(self.first + self.count + more, COLUMNS, dtype=torch.int64)
        tokens: list[int] = []
        extents: list[list[int]] = []
        for row in range(len(self.table)):
            self.table[row] = torch.tensor(self._request(tokens, extents))
        self.canvas, self.extents = torch.tensor(tokens), torch.tensor(extents)

    def _request(self, tokens: list[int], extents: list[list[int]]) -> list[int]:
        rng, column = self.rng, [0] * COLUMNS
        block, window = rng.choice([1, 4, 8]), rng.choice([0, 0, 1, 2, 3])
        shifted = rng.random() < 0.4
        small = shifted and window in (1, 3) and rng.random() < 0.6
        span = block * rng.choice([1, 4]) if small else CANVAS_LONG if window else block
        prompt = rng.randint(0 if window else 1, 5 * block)
        prefix = prompt // span * span
        start = prompt // block * block if small else prompt if window else prefix
        blocks = rng.randint(1, 3)
        length = start + blocks * block
        length += -length % span if small else 0
        at = rng.randrange(blocks)
        now, end = (
            start + at * block,
            rng.randint(max(prompt, start + (blocks - 1) * block) + 1, max(length, prompt + 1)),
        )
        written = prefix if at or rng.random() < 0.5 else rng.randrange(0, prefix + block, block)
        canvas = [rng.randrange(20) if p < max(prompt, now) else OPEN for p in range(length)]
        places = list(range(max(prompt, now), now + block))
        number = rng.choice([0, 1, 2, 70])
        for place in rng.sample(places, rng.randrange(len(places)) if number else 0):
            canvas[place] = rng.randrange(20)
        mine = [[rng.randrange(99), rng.randrange(1, 9), rng.randrange(9), 0] for _ in range(rng.randint(1, 3))]
        column[Column.STATE] = rng.choice([0, 1, 1, 1, 1, 2])
        column[Column.CANVAS], column[Column.EXTENT], column[Column.EXTENTS] = len(tokens), len(extents), len(mine)
        column[Column.PROMPT], column[Column.END], column[Column.LENGTH] = prompt, end, length
        column[Column.PREFIX], column[Column.BLOCK], column[Column.WINDOW] = prefix, block, window
        column[Column.QUOTA], column[Column.MORE] = rng.randint(1, block), rng.randrange(3)
        column[Column.DECIDES], column[Column.TOP_K], column[Column.CUTS] = (
            rng.randrange(3),
            rng.randrange(9),
            rng.randrange(2),
        )
        column[Column.SPAN], column[Column.SHIFTED], column[Column.WIDE] = span, shifted, rng.randrange(2)
        column[Column.NOISE] = key_of(rng.randrange(2**64), rng.randrange(9))
        column[Column.STOP : Column.STOP + 4] = [rng.randrange(20), -1, rng.choice([-1, 5]), -1]
        for setting in (Column.THRESHOLD, Column.TEMPERATURE, Column.TOP_P):
            column[setting] = bits(rng.random())
        column[Column.WRITTEN], column[Column.START], column[Column.NUMBER] = min(written, prefix), now, number
        column[Column.BEFORE] = span if at and span < CANVAS_LONG and now % span == 0 and not number else 0
        column[Column.GROUP] = rng.choice([0, 0, 0, 2]) * self.groups
        column[Column.MARKS] = rng.choice([0, 0, 1, 4, 1 << 62]) * self.groups
        column[Column.OWN : Column.OWN + 4] = [rng.randrange(-1, 9) for _ in range(4)]
        column[Column.STEP], column[Column.SERVED] = rng.choice([0, rng.randrange(50)]), rng.randrange(12)
        more = random.Random(len(tokens))
        column[Column.PRIORITY] = more.choice([0, 0, 3, -9, 1 << 30])
        column[Column.DECIDES] = more.choice([column[Column.DECIDES], 3, column[Column.DECIDES] if shifted else 4])
        column[Column.EDIT_THRESHOLD], column[Column.SCORE_TEMPERATURE] = bits(more.random()), bits(more.random())
        column[Column.SCHEDULE] = more.choice([0, 0, 3])
        column[Column.SINCE], column[Column.POST_STEPS] = more.randrange(6), more.randrange(5)
        column[Column.OPEN] = sum(token == OPEN for token in canvas[now : now + block])
        if self.packs and window == 3 and not small and more.random() < 0.7:
            self._pack_keys(column, more)
        tokens += canvas + [more.randrange(99) << 32 | more.randrange(9) for _ in range(column[Column.SCHEDULE])]
        extents += mine
        return column

    @staticmethod
    def _pack_keys(column: list[int], rng: random.Random) -> None:
        """Let a request keep packed keys, each in one extent."""
        block, answer = column[Column.BLOCK], column[Column.LENGTH] - column[Column.PROMPT]
        column[Column.WINDOW], column[Column.RENEWED] = 4, min(block * rng.randint(1, 3), answer)
        column[Column.KEPT], column[Column.KEPT_LAST] = rng.randint(1, 9), rng.randint(1, 9)
        column[Column.MARKS], column[Column.WRITTEN] = (
            rng.choice([1, 3]),
            column[Column.START] + rng.choice([-block, 0, block]),
        )
        if column[Column.DECIDES] == 4:
            column[Column.DECIDES] = 0

    def room(self) -> dict[str, int]:
        """Room that is mostly too little for all."""
        rng, count = self.rng, self.count
        return {
            "sequences": rng.choice([1, count, 2 * count]), "tokens": rng.choice([8, 16 * count, 4 * count]),
            "rows": rng.choice([8, 8 * count, 3 * count]), "extents": rng.choice([3, 3 * count]),
        }  # fmt: skip

    def pack(self) -> Case:
        room = self.room()
        limits = [
            self.first,
            self.count,
            room["tokens"],
            room["rows"],
            room["extents"],
            self.rng.choice([1, 4, 5]) if self.groups else 1,
            self.rng.randrange(2),
            self.rng.randrange(2),
        ]
        given = {"table": self.table.clone(), "room": torch.tensor([limits])}
        outputs = {"row": torch.empty(room["sequences"], dtype=torch.int64)}
        outputs |= {name: torch.empty(room["sequences"], dtype=I32) for name in ("begin", "seen")}
        outputs |= {
            f"cu_{name}": torch.empty(room["sequences"] + 1, dtype=I32) for name in ("seqlens", "rows", "extents")
        }
        return Case("pack_requests", given, outputs, {"sequences": room["sequences"]})

    def packed(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """A step that serves some of them."""
        case = self.pack()
        found = case.reference()
        self.table = found.pop("table")
        return found, case.operands["room"][0, 2:5].tolist()

    def place(self) -> Case:
        packed, (tokens, rows, extents) = self.packed()
        given = {"table": self.table, "canvas": self.canvas, "held_extents": self.extents}
        self.seen = packed.pop("seen")
        sizes, sequences = {"tokens": tokens, "most": rows, "count": extents}, len(packed["row"])
        outputs = {
            "positions": torch.empty(sizes["tokens"], dtype=I32),
            **{name: torch.empty(sizes["tokens" if name == "token_rows" else "most"], dtype=torch.int64)
               for name in ("token_rows", "rows", "decided_rows")},
            "extents": torch.empty(sizes["count"], 4, dtype=torch.int64),
            "quota": torch.empty(sequences, dtype=I32), "threshold": torch.empty(sequences),
            "edit_threshold": torch.empty(sequences),
        }  # fmt: skip
        return Case("place_requests", {**given, **packed}, outputs, sizes)

    def draw(self) -> Case:
        placing = self.place()
        decided = placing.reference()["decided_rows"]
        given = {name: placing.operands[name] for name in ("table", "row", "cu_rows")}
        rows = len(decided)
        outputs = {
            "keys": torch.empty(rows, dtype=torch.int64),
            "temperature": torch.empty(rows),
            "top_p": torch.empty(rows),
        }
        outputs |= {"top_k": torch.empty(rows, dtype=I32), "cuts": torch.empty(rows, dtype=torch.uint8)}
        outputs["score_temperature"] = torch.empty(rows)
        return Case("draw_requests", {**given, "decided_rows": decided}, outputs, {})

    def select(self) -> Case:
        placing, rng = self.place(), self.rng
        given = {name: placing.operands[name] for name in ("table", "row", "cu_seqlens")}
        given |= {"seen": self.seen, "positions": placing.reference()["positions"]}
        sequences, tokens = len(given["row"]), len(given["positions"])
        outputs = {"owner": torch.empty(sequences, dtype=torch.int64)}
        outputs |= {
            name: torch.empty(sequences + (name == "cu_keys"), dtype=I32)
            for name in ("captured", "candidates", "seen_exactly", "seen_sparsely", "cu_keys")
        }
        outputs["votes"] = torch.empty(tokens, dtype=torch.uint8)
        attrs = {"own": Column.OWN + rng.randrange(4), "carried": rng.random() < 0.5, "answer": rng.random() < 0.5}
        return Case("select_requests", given, outputs, attrs)

    def reuse(self) -> Case:
        placing, rng = self.place(), self.rng
        given = {name: placing.operands[name] for name in ("table", "row")}
        sequences = len(given["row"])
        outputs = {"kept_row": torch.empty(sequences, dtype=torch.int64)}
        outputs |= {name: torch.empty(sequences, dtype=I32) for name in ("prefix", "refreshed")}
        return Case("reuse_requests", given, outputs, {"own": Column.OWN + rng.randrange(4), "steps": rng.randrange(4)})

    def keep(self) -> Case:
        """Of requests that all keep packed keys; those of others end before."""
        self.table[self.table[:, Column.WINDOW] != 4, Column.STATE] = 2
        placing = self.place()
        given = {name: placing.operands[name] for name in ("table", "row", "cu_seqlens", "cu_extents")}
        given |= {"seen": self.seen, "extents": placing.reference()["extents"]}
        sequences = len(given["row"])
        outputs = {
            "spans": torch.empty(sequences + 1, 5, dtype=I32), "cu_whole": torch.empty(sequences + 2, dtype=I32),
            "packed_extents": torch.empty(sequences + 1, 4, dtype=torch.int64),
            "own_extents": torch.empty_like(given["extents"]),
        }  # fmt: skip
        return Case("keep_requests", given, outputs, {})

    def advance(self) -> Case:
        placing, rng = self.place(), self.rng
        decided = placing.reference()["decided_rows"]
        committed = torch.tensor([rng.random() < rng.choice([0.3, 1.0]) and row >= 0 for row in decided.tolist()])
        canvas = self.canvas.clone()
        canvas[decided[committed]] = torch.randint(20, (int(committed.sum()),))
        given = {name: placing.operands[name] for name in ("row", "begin")}
        computed = rng.randrange(len(given["row"]) + 1)  # of a cut step some may have to wait
        for name in ("cu_seqlens", "cu_rows"):
            given[name] = placing.operands[name].clamp(max=int(placing.operands[name][computed]))
        table = self.table.clone()
        for own in table:  # some blocks that are edited are as they were
            block = canvas[own[Column.CANVAS] + own[Column.START] :][: own[Column.BLOCK]]
            own[Column.SAVED] = rng.choice([0, block_hash(block.numpy(), int(own[Column.START]))])
        report = torch.empty(len(given["row"]), WIDTH, dtype=torch.int64)
        return Case("advance_requests", {**given, "table": table, "canvas": canvas}, {"report": report}, {"mask_id": 7})


def values(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in found.items()}


OF_POLICIES = ("select", "reuse")
OF_PACKED = ("keep",)
KINDS = ("pack", "place", "draw", "advance")


@pytest.mark.some
@pytest.mark.parametrize("kind", [*KINDS, *OF_PACKED, *OF_POLICIES])
@pytest.mark.parametrize("seed", range(40))
def test_on_the_cpu(seed: int, kind: str) -> None:
    case: Case = getattr(Requests(seed, packs=kind not in OF_POLICIES), kind)()
    expected = values(case.reference())
    case.launch()
    assert {
        name: value for name, value in values({**case.operands, **case.outputs}).items() if name in expected
    } == expected
    if seed < 4:
        check_allocates_nothing(case)


@pytest.mark.some
@triton_test
@pytest.mark.parametrize("kind", [*KINDS, *OF_PACKED, *OF_POLICIES])
@pytest.mark.parametrize("seed", range(8))
def test_in_triton(seed: int, kind: str) -> None:
    case: Case = getattr(Requests(seed, packs=kind not in OF_POLICIES), kind)()
    expected = values(case.reference())
    found = run(case, DEVICE)
    assert {name: found[name].tolist() for name in expected} == expected


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plans_of_steps_over_a_table_are_proved(device: str) -> None:
    """Of every head: no operator of theirs is one that the checker does not know."""
    planner, kernels = Planner(load(SMALL), device=device), set[str]()
    states = {KV: 200, CANVAS: 100, HELD_EXTENTS: 3, REQUESTS: 256}
    for head, cache in ((STATISTICS, KEPT), (SAMPLE, KEPT), (NUCLEUS, KEPT), (EACH, KEPT), (EACH, WHOLE)):
        phase = Phase(tokens=TABLED, cache=cache, head=head, commit=Commit(score="confidence", rule="dynamic"))
        keys: dict[str, Any] = {"keys": (64,) * 3, "extents": 3} if phase.cached else {}
        plan = planner.plan(StepSize(phase=phase, windows=(4,) * 3, rows=12, states=states, **keys))
        assert plan.check() == ()
        kernels |= {row["kernel"] for row in plan.document["ops"]}
    assert kernels >= {f"{kind}_requests" for kind in KINDS}


def test_the_keys_of_rows_are_those_of_noise() -> None:
    case = Requests(9).draw()
    given, bounds = case.operands, case.operands["cu_rows"].tolist()
    row = next(row for row in range(len(bounds) - 1) if bounds[row + 1] > bounds[row])
    request, mine = int(given["row"][row]), slice(bounds[row], bounds[row + 1])
    own = given["table"][request]
    own[Column.NOISE] = key_of(7, 3)
    positions = given["decided_rows"][mine] - own[Column.CANVAS]
    assert case.reference()["keys"][mine].tolist() == row_keys(7, 3, int(own[Column.STEP]), positions).tolist()
