"""Prefixes that requests share: found as in a plain dictionary of blocks, and nobody's tokens depend on them."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_request_table import CONFIGS, MASK
from torch import Tensor

import mosaic
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.errors import CheckpointError, DoesNotFit, UsageError
from mosaic.runtime import weight_store
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.prefixes import Prefix, Prefixes
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.weights import fill_randomly

UNIT = 64
FAMILIES = ("sdar", "llada2", "fast-dllm-v2")
POLICIES: tuple[dict[str, Any], ...] = (
    {}, {}, {"attention": "mage:k=8"}, {"attention": "flashblock"}, {"eviction": "focus:requests=64"},
    {"attention": "mage+flashblock:k=8:reuse_steps=2"}, {"attention": "mage:k=8", "eviction": "focus:requests=64"},
)  # fmt: skip


# --- the index ------------------------------------------------------------------------------------------------------


class Writer:
    """A request: its tokens, how many are its prompt, and how many it has written."""

    def __init__(self, prefixes: Prefixes, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt
        self.prefix: Prefix = prefixes.open(np.array(tokens[:prompt]), prompt)
        self.shared = self.prefix.length
        self.written: int | None = None


class Blocks:
    """Units by the tokens up to their end: the rows of each, and its extent; and what every row holds."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], tuple[list[int], tuple[int, int]]] = {}
        self.memory: dict[int, tuple[int, ...]] = {}

    def hand_out(self, rows: list[int]) -> None:
        """Rows are somebody's, who has written nothing."""
        new = set(rows)
        self.memory = {row: held for row, held in self.memory.items() if row not in new}
        self.rows = {chain: found for chain, found in self.rows.items() if found[0][0] not in new}

    def drop_gone(self, table: RowTable) -> None:
        """Blocks are there while their extents are owned or idle, and the blocks before them are."""
        there = {*table.idle, *[span for owned in table.owned for span in owned.spans()]}
        self.rows = {
            chain: found
            for chain, found in self.rows.items()
            if found[1] in there and chain[:-UNIT] in {(), *self.rows}
        }
        if any(chain[:-UNIT] not in {(), *self.rows} for chain in self.rows):
            self.drop_gone(table)

    def longest(self, tokens: list[int]) -> int:
        count = 0
        while count + UNIT <= len(tokens) and tuple(tokens[: count + UNIT]) in self.rows:
            count += UNIT
        return count


def rows_of(prefix: Prefix, start: int, end: int) -> list[int]:
    return prefix.rows.slots(start, end).tolist()


@pytest.mark.parametrize("seed", [*range(3), *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 120)]])
def test_units_are_found_as_in_a_dictionary_of_blocks(seed: int) -> None:
    """Requests of a random tree of prompts begin, write, answer and end early, in few rows: what is shared is the longest chain of
    blocks that are there, and every row that somebody may read has the tokens that it was found by."""
    rng, table, plain = random.Random(seed), RowTable("kv", extents=True), Blocks()
    prefixes, live, hits, evicted, fewer = Prefixes(table, 4), list[Writer](), 0, 0, 0
    table.most = rng.choice([0, 2000, 6000])
    roots = [[rng.randrange(3) for _ in range(4000)] for _ in range(2)]
    for _ in range(120):
        if len(live) < 6 and rng.random() < 0.5:
            tokens = list(rng.choice(roots))
            for _ in range(rng.randrange(3)):  # branches off
                at = rng.randrange(2000)
                tokens[at:] = [(token + 1) % 3 for token in tokens[at:]]
            prompt, answer = rng.randrange(1, 2200), rng.randrange(1, 600)
            known = plain.longest(tokens[:prompt])
            given, asked = rows_before(prefixes, tokens, prompt, answer)
            mine = Writer(prefixes, tokens[: prompt + answer], prompt)
            assert mine.shared == known
            assert rows_of(mine.prefix, 0, known) == [
                row for n in range(UNIT, known + 1, UNIT) for row in plain.rows[tuple(tokens[:n])][0]
            ]
            before = len(table.idle)
            mine.prefix.rows.reserve(prompt + answer)
            assert table.rows == given if table.most <= given else given <= table.rows <= table.most
            fewer += asked < prompt + answer
            evicted += before > len(table.idle)
            plain.hand_out(rows_of(mine.prefix, known, prompt + answer))
            plain.drop_gone(table)
            mine.prefix.promise()
            note(plain, mine, prompt)
            live.append(mine)
            hits += known > 0
        elif live:
            mine = rng.choice(live)
            if mine.written is None:
                if not mine.prefix.waits:
                    mine.written = mine.prefix.lead()
                    for n, row in enumerate(rows_of(mine.prefix, 0, mine.written)):
                        assert plain.memory[row] == tuple(mine.tokens[: n + 1])[-200:]
            elif mine.written < mine.prompt and rng.random() < 0.9:
                end = min(mine.written + rng.choice([100, 700, 2000]), mine.prompt)
                write(plain, mine, end)
                mine.prefix.wrote(end)
            if rng.random() < 0.3:
                live.remove(mine)
                if mine.written is not None:
                    if mine.written == mine.prompt:
                        write(plain, mine, rng.randint(mine.prompt, len(mine.tokens)))
                    mine.prefix.keep(np.array(mine.tokens), mine.written)
                    note(plain, mine, mine.written)
                mine.prefix.close()
                forget_unwritten(plain, live)
                plain.drop_gone(table)
        assert all(prefixes.units(np.array(root)) <= plain.longest(root) for root in roots)
    for mine in live:
        mine.prefix.close()
    assert table.rows == table.positions == 0
    prefixes.close()
    assert not table.idle
    whole = table.open()
    whole.reserve(10)
    assert whole.runs() == [(0, 10)]
    assert hits and fewer and (evicted or table.most)


def rows_before(prefixes: Prefixes, tokens: list[int], prompt: int, answer: int) -> tuple[int, int]:
    """The rows that there will be with a request, and those that it is to be given, foretold; nothing changes."""
    table = prefixes.table
    before = table.changes, table.rows, table.positions, [*table.free], table.idle, table.owned
    found = prefixes.match(np.array(tokens), prompt, 0)
    asked = prefixes.fresh(prompt + answer, [found])
    assert before == (table.changes, table.rows, table.positions, [*table.free], table.idle, table.owned)
    return table.room(asked), asked


def write(plain: Blocks, mine: Writer, end: int) -> None:
    for n, row in zip(range(mine.written or 0, end), rows_of(mine.prefix, mine.written or 0, end), strict=True):
        plain.memory[row] = tuple(mine.tokens[: n + 1])[-200:]
    mine.written = end


def note(plain: Blocks, mine: Writer, end: int) -> None:
    """Its units are there, where they are not yet, as far as each lies in one extent."""
    for stop in range(UNIT, end + 1, UNIT):
        chain = tuple(mine.tokens[:stop])
        rows = rows_of(mine.prefix, stop - UNIT, stop)
        inside = [span for span in mine.prefix.rows.spans() if span[0] <= rows[0] and rows[-1] < span[1]]
        if chain in plain.rows:
            continue
        if not inside or rows != [*range(rows[0], rows[0] + UNIT)]:
            return
        plain.rows[chain] = rows, inside[0]


def forget_unwritten(plain: Blocks, live: list[Writer]) -> None:
    """Units that nobody writes, nor has: a request that has their rows may."""
    owned = {span for mine in live for span in mine.prefix.rows.spans()}
    for chain, (rows, extent) in [*plain.rows.items()]:
        if extent not in owned and any(
            plain.memory.get(row) != chain[: len(chain) - UNIT + n + 1][-200:] for n, row in enumerate(rows)
        ):
            del plain.rows[chain]


# --- sessions -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    """One model of each family for all tests, whose tokens are no near ties; it reads no row that nobody has written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_store, "fill_randomly", fill_widely)
        made = {
            family: mosaic.compile({**CONFIGS[family], "num_hidden_layers": 3}, seed=3, host_budget=0, debug="poison")
            for family in FAMILIES
        }
    made["llada"] = mosaic.compile(CONFIGS["llada"], seed=3, host_budget=0, debug="poison")
    yield made
    for model in made.values():
        assert model.state_rows == {}
        model.trim()
        assert not any(size for pool, size in model.workspace.committed_bytes().items() if pool.startswith("state/"))
        model.close()


def fill_widely(views: dict[str, Tensor], **options: Any) -> None:
    fill_randomly(views, **options)
    for view in views.values():
        view.mul_(12 if view.dim() > 1 else 1)


def alone(model: CompiledModel, asked: Submission) -> list[int]:
    """The tokens of a request that shares nothing."""
    with model.session() as session:
        request = session.submit_all([asked])[0]
        while session.live:
            session.advance()
    assert request.generation is not None and request.generation.cached_tokens == 0
    return request.generation.token_ids.tolist()


def tree(rng: random.Random, longest: int) -> Tensor:
    """A prompt of a random tree: its parts are those of others, or one's own."""
    parts = [
        torch.randint(6, MASK, (longest // 2,), generator=torch.Generator().manual_seed(rng.randrange(2)))
        for _ in range(2)
    ]
    prompt = torch.cat(parts)[: rng.randint(1, longest)]
    if rng.random() < 0.5:
        prompt[rng.randrange(len(prompt)) :] = 7
    return prompt


def options_of(rng: random.Random, family: str) -> GenerationConfig:
    policy = rng.choice({"": POLICIES[:1], "fast-dllm-v2": ({}, {"cache": "dual"})}.get(family, POLICIES))
    return GenerationConfig(
        gen_length=8 * rng.randint(1, 12 if family else 3), seed=rng.randrange(3), temperature=rng.choice([0, 0, 0.8]),
        threshold=rng.choice([0.1, 0.3, 0.9]), stop_at_eos=rng.random() < 0.5, **policy,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "seed"), [
    ("sdar", 0), *[pytest.param(family, seed, marks=pytest.mark.soak) for family in FAMILIES for seed in range(1, 4)],
])  # fmt: skip
def test_requests_that_share_prefixes_get_what_they_get_alone(
    models: dict[str, CompiledModel], family: str, seed: int
) -> None:
    """Random trees of prompts, with policies, at any priority; some are cancelled, some fork, some go on with an answer, and others
    take the rows of those that have ended."""
    rng, model = random.Random(f"{family} {seed}"), models[family]
    longest, given, cached, asked = rng.choice([300, 1500]) if seed else 300, list[Any](), 0, list[Tensor]()
    with model.session(max_num_batched_tokens=rng.choice([64, 256, 8192])) as session:
        for _ in range(16 if seed else 6):
            prompt = tree(rng, longest)
            if asked and rng.random() < 0.3:
                prompt = torch.cat([rng.choice(asked), prompt[:20]])
            config = options_of(rng, family if seed else "")
            more = [
                Submission(prompt=prompt, config=config, request_id=rng.randrange(3), priority=rng.choice([0, 0, 5]))
                for _ in range(rng.choice([1, 1, 3]))
            ]
            with suppress(DoesNotFit):
                given += zip(more, session.submit_all(more), strict=True)
            session.advance(rng.choice([0, 1, 5, 40]))
            if session.live and rng.random() < 0.3:
                session.cancel(rng.choice(session.live))
            ended = [request.generation for _, request in given if request.generation is not None]
            asked = [torch.cat([found.prompt_ids, found.token_ids]) for found in ended[-3:]]
        while session.live:
            session.advance()
    for submission, request in given:
        found = request.generation
        cached += found.cached_tokens
        assert found.cached_tokens % UNIT == 0 and found.cached_tokens <= len(found.prompt_ids)
        expected = alone(model, submission)
        assert found.token_ids.tolist() == (
            expected if found.finish in ("eos", "length") else expected[: len(found.token_ids)]
        )
    assert cached > 0 and not model.state_rows


def run(session: Session, prompt: Tensor, **options: Any) -> Any:
    request = session.submit(prompt, stop_at_eos=False, request_id=0, **{"gen_length": 72, "steps": 1, **options})
    while session.live:
        session.advance()
    return request.generation


def prompt_of(length: int) -> Tensor:
    return torch.randint(6, MASK, (length,), generator=torch.Generator().manual_seed(9))


def test_how_many_tokens_were_cached_is_said(models: dict[str, CompiledModel]) -> None:
    """Whole units of the prompt's whole blocks, and of an answer if its blocks attended to all keys; none where attention sees both
    ways, nor once the caller may have written into the weights."""
    prompt = prompt_of(1300)
    with models["sdar"].session() as session:
        assert [run(session, prompt).cached_tokens for _ in range(2)] == [0, 1280]
        answered = run(session, prompt[:600])
        assert answered.cached_tokens == 576
        going_on = torch.cat([prompt[:600], answered.token_ids])
        assert run(session, going_on).cached_tokens == 600 // UNIT * UNIT + UNIT
        selected = run(session, other := prompt.flip(0)[:600], attention="mage:k=8")
        assert run(session, torch.cat([other, selected.token_ids])).cached_tokens == 576
        assert run(session, prompt_of(63)).cached_tokens == run(session, prompt_of(63)).cached_tokens == 0
    with models["llada"].session() as session:
        assert [run(session, prompt, block_length=8, cache="prefix", gen_length=8).cached_tokens for _ in range(2)] == [
            0,
            0,
        ]
    with mosaic.compile(CONFIGS["sdar"]) as model, model.session() as session:
        model.weights()
        assert [run(session, prompt_of(200)).cached_tokens for _ in range(2)] == [0, 0]


def test_kept_keys_stay_while_there_is_room_for_those_who_come() -> None:
    """Others are given new rows up to those that steps are planned for. Nobody loses keys to a question."""
    prompts = [torch.full((200,), 10 + n) for n in range(3)]
    with mosaic.compile(CONFIGS["sdar"]) as model, model.session() as session:
        session.submit_all([Submission(prompt=prompt, config=GenerationConfig(gen_length=8)) for prompt in prompts])
        while session.live:
            session.advance()
        assert run(session, prompt_of(100), gen_length=8).cached_tokens == 0
        assert [run(session, prompt, gen_length=8).cached_tokens for prompt in prompts] == [192] * 3
        longer = Submission(prompt=prompt_of(2000), config=GenerationConfig(gen_length=8))
        assert session.admits(longer)
        assert [run(session, prompt, gen_length=8).cached_tokens for prompt in prompts] == [192] * 3
        session.submit_all([longer])
        assert [run(session, prompt, gen_length=8).cached_tokens for prompt in prompts] == [0] * 3


def test_answers_to_one_prompt_have_its_rows_once(models: dict[str, CompiledModel]) -> None:
    """Those that come while the first reads the prompt wait for it. If it is cancelled, the next goes on where it was."""
    model, prompt = models["sdar"], prompt_of(1300)
    with model.session(max_num_batched_tokens=256) as session:
        config = GenerationConfig(gen_length=16, stop_at_eos=False)
        asked = [Submission(prompt=prompt, config=config, request_id=n) for n in range(5)]
        forks = session.submit_all(asked)
        assert model.state_rows["kv"] == 1316 + 4 * (1316 - 1280)
        session.advance(3)
        session.cancel(forks[0])
        keys = list[int]()
        while session.live:
            keys += [step.plan.dims["keys"] for step in session.advance()]
        assert max(keys) >= 4 * 1316  # of all sequences, more than there are rows
        cached = [fork.generation.cached_tokens for fork in forks if fork.generation is not None]
        assert cached == [0, 768, 1280, 1280, 1280]
    for submission, fork in zip(asked[1:], forks[1:], strict=True):
        assert fork.generation is not None and fork.generation.token_ids.tolist() == alone(model, submission)


@pytest.mark.parametrize(("steps", "cached"), [(2, 0), (3, 64)])
def test_a_block_is_shared_when_its_last_keys_are_written(
    models: dict[str, CompiledModel], steps: int, cached: int
) -> None:
    """The first step after it writes them: before it, they are of masks."""
    prompt, model = prompt_of(60), models["sdar"]
    with model.session() as session:
        request = session.submit(prompt, gen_length=16, steps=1, stop_at_eos=False)
        session.advance(steps)
        session.cancel(request)
        assert request.generation is not None and len(request.generation.token_ids) >= 4
        asked = Submission(
            prompt=torch.cat([prompt, request.generation.token_ids[:4]]), config=GenerationConfig(gen_length=8)
        )
        again = session.submit_all([asked])[0]
        while session.live:
            session.advance()
    assert again.generation is not None and again.generation.cached_tokens == cached
    assert again.generation.token_ids.tolist() == alone(model, asked)


def test_nobody_waits_for_a_request_of_lower_priority(models: dict[str, CompiledModel]) -> None:
    prompt, config = prompt_of(600), GenerationConfig(gen_length=4)
    with models["sdar"].session(max_num_batched_tokens=64) as session:
        low = session.submit(prompt, config, priority=-1000)
        high = session.submit(prompt, config)
        while session.live:
            session.advance()
    assert high.generation is not None and low.generation is not None
    assert high.generation.cached_tokens == 0 and high.generation.steps < 20


# --- pinned and saved -----------------------------------------------------------------------------------------------


def test_a_pinned_prefix_stays_until_it_is_released(models: dict[str, CompiledModel]) -> None:
    """Whoever takes the rows of others; steps that compute it serve live requests too, and none of their outcomes is lost."""
    model, prompt = models["sdar"], prompt_of(700)
    with model.session() as session:
        running = session.submit(prompt.flip(0)[:100], gen_length=8, steps=1, stop_at_eos=False)
        pinned = session.prefixes.pin(prompt)
        assert pinned.token_ids.tolist() == prompt[:640].tolist() and model.state_rows["kv"] >= 640
        told = session.advance(30)
        assert running.generation is not None and running.steps == len([step for step in told if step.request == 0])
        for n in range(3):
            run(session, torch.full((700,), 7 + n), gen_length=4)
        assert run(session, prompt).cached_tokens == 640
        pinned.close()
        assert model.state_rows == {} and not pinned.token_ids.numel()
        with pytest.raises(UsageError, match="released"):
            pinned.save("nowhere")
        told = session.submit(prompt[:70], gen_length=4, on_step=lambda _: session.prefixes.pin(prompt.flip(0)))
        with pytest.raises(UsageError, match="a callback cannot advance"):
            session.advance(30)
        assert session.live in ((told,), ())  # not what was to compute the prefix
        session.cancel(told)
        for n in range(9):
            run(session, torch.full((700,), 17 + n), gen_length=4)
        assert run(session, prompt).cached_tokens == 0
        with pytest.raises(UsageError, match="pin 64 at least"):
            session.prefixes.pin(prompt[:63])
        session.prefixes.pin(prompt[:64])
    assert model.state_rows == {}
    with models["llada"].session() as session, pytest.raises(UsageError, match="attend by blocks"):
        session.prefixes.pin(prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_prefix_serves_another_session(models: dict[str, CompiledModel], family: str, tmp_path: Path) -> None:
    """Wherever its rows lie, and whatever of it is kept there already."""
    model, prompt, file = models[family], prompt_of(1200), tmp_path / "prefix.safetensors"
    with model.session() as session:
        run(session, prompt_of(90), **alone_options(family))
        session.prefixes.pin(prompt).save(file)
        expected = run(session, prompt, **alone_options(family)).token_ids.tolist()
    model.trim()
    for before in (0, 200):
        with model.session() as session:
            if before:
                run(session, prompt[:before], **alone_options(family))
                run(session, prompt_of(77), **alone_options(family))
            with session.prefixes.load(file) as pinned:
                assert pinned.token_ids.tolist() == prompt[:1152].tolist()
                found = run(session, prompt, **alone_options(family))
            assert found.cached_tokens == 1152 and found.token_ids.tolist() == expected
        model.trim()
    other = models["sdar" if family != "sdar" else "llada2"]
    with other.session() as session, pytest.raises(CheckpointError, match="of another model"):
        session.prefixes.load(file)
    alike = mosaic.compile({**CONFIGS[family], "num_hidden_layers": 3}, seed=4)
    with (
        alike as drawn_again,
        drawn_again.session() as session,
        pytest.raises(CheckpointError, match="its weights differ"),
    ):
        session.prefixes.load(file)
    model.save(tmp_path / "weights")
    with model.session() as session, pytest.raises(CheckpointError, match="no saved prefix: it has no tensor"):
        session.prefixes.load(tmp_path / "weights" / "model.safetensors")
    for again in (lambda: session.prefixes.load(file), lambda: session.prefixes.pin(prompt)):
        with pytest.raises(UsageError, match="the session is closed"):
            again()
    file.write_bytes(file.read_bytes()[:-5])
    with model.session() as session, pytest.raises(CheckpointError, match=r"prefix\.safetensors"):
        session.prefixes.load(file)
    with model.session() as session, pytest.raises(UsageError, match="existing, writable folder"):
        session.prefixes.pin(prompt[:64]).save(tmp_path / "none" / "file")
    assert model.state_rows == {}


def alone_options(family: str) -> dict[str, Any]:
    return {"steps": None, "gen_length": 16} if family == "fast-dllm-v2" else {"gen_length": 16}


@pytest.mark.soak
def test_a_saved_prefix_serves_another_process(tmp_path: Path) -> None:
    script = """
import sys, torch, mosaic
with mosaic.compile("small-sdar", dtype="float32") as model, model.session() as session:
    prompt = torch.arange(10, 150)
    if sys.argv[1] == "save":
        session.prefixes.pin(prompt).save(sys.argv[2])
    elif sys.argv[1] == "load":
        session.prefixes.load(sys.argv[2])
    request = session.submit(prompt, gen_length=32)
    while session.live:
        session.advance()
    print(request.generation.cached_tokens, request.generation.token_ids.tolist())
"""
    found = [
        subprocess.run(
            [sys.executable, "-c", script, how, str(tmp_path / "file")], capture_output=True, text=True, check=True
        ).stdout.split(" ", 1)
        for how in ("alone", "save", "load")
    ]
    assert [cached for cached, _ in found] == ["0", "128", "128"] and len({tokens for _, tokens in found}) == 1
