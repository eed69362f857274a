"""On a CUDA card: programs with operators of a user's own, bucketed steps replayed from graphs, and states that give pages
back from their middle while later rows live."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import test_policy
import test_programs
import torch
from test_gpu_generation import DEVICE, FAMILIES, draw, generated, tokens_of
from test_states import COMMIT, DECIDE, TOKENS, ids_of
from torch import Tensor

import mosaic
from mosaic import Implementation
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.compiled_program import CompiledProgram
from mosaic.runtime.host_inputs import HostInputs, Numbers
from mosaic.runtime.state_rows import OwnedRows
from mosaic.runtime.steps import StepRequest
from mosaic.testing import verify_operator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False"),
]
WIDTH = test_programs.WIDTH


def keep_on_card(*, x: Tensor, limit: Tensor, kept: Tensor, count: Tensor, scratch: Tensor | None = None) -> None:
    """The user's kernel; Triton is imported when it is first launched."""
    kernels = importlib.import_module("keep_rows_triton")
    kernels.keep_rows[(1,)](x, limit, kept, count, x.shape[0], W=x.shape[1], B=32)


def double_on_card(*, x: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    torch.add(x, x, out=y)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CompiledProgram, CompiledProgram]]:
    """The program of `test_programs` on the CPU and on the card, with the same weights."""
    for name, launch in (("KEEP", keep_on_card), ("DOUBLE", double_on_card)):
        operator = getattr(test_programs, name)
        mine = Implementation(backend="cuda", kernel=launch)
        monkeypatch.setattr(test_programs, name, replace(operator, implementations=(*operator.implementations, mine)))
    with (
        mosaic.compile(test_programs.bucketed()) as cpu,
        mosaic.compile(test_programs.bucketed(), device=DEVICE) as card,
    ):
        for name, view in card.weights().items():
            view.copy_(cpu.weights()[name])
        yield cpu, card


def test_bucketed_steps_are_replayed_and_their_carry_stays_where_it_is(
    pair: tuple[CompiledProgram, CompiledProgram],
) -> None:
    cpu, card = pair
    up, down = (cpu.weights()[name] for name in ("up", "down"))
    addresses, sizes = set(), set()
    for turn in range(5):
        for seed, count in enumerate((3, 12, 40, 4, 17, 1)):
            x = test_programs.rows_of(10 * turn + seed, 60)
            limit = test_programs.limit_of(x @ up.T @ down.T, count)
            expected, found = cpu("step", x=x, limit=limit), card("step", x=x.cuda(), limit=limit.cuda())
            assert len(found["y"]) == len(expected["y"])
            torch.testing.assert_close(found["y"][:count].cpu(), expected["y"][:count], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                card.carry("kept")[:count].cpu(), cpu.carry("kept")[:count], rtol=1e-4, atol=1e-4
            )
            addresses.add(card.carry("kept").data_ptr())
            sizes.add(len(found["y"]))
    assert len(addresses) == 1 and sizes == {4, 16, 60}
    assert len(card.executors) == 4 and all(executor.captured for executor in card.executors)


def test_an_operator_of_ones_own_is_held_against_its_reference_on_the_card() -> None:
    double = replace(
        test_programs.DOUBLE, reference=lambda *, x: 2 * x,
        implementations=(Implementation(backend="cuda", kernel=double_on_card, name="torch"),),
    )  # fmt: skip
    assert verify_operator(double, {"T": 37}, loops="T", backend="cuda") == ("torch",)


def ask(model: CompiledModel, owned: OwnedRows, seed: int, *, decide: bool) -> Tensor:
    """Write keys and values of a whole sequence, or score a window at its end."""
    nothing = torch.empty(0, dtype=torch.int64)
    tokens = ids_of(seed, TOKENS if decide else owned.length) % 80
    rows = torch.arange(4) if decide else nothing
    request = StepRequest(
        phase=DECIDE if decide else COMMIT, token_ids=tokens, start=owned.length - len(tokens), sequence=owned,
        key_len=owned.length, rows=rows, current=tokens[rows], quota=1,
    )  # fmt: skip
    return model.step([request])[0].score


@pytest.mark.alone
def test_pages_in_the_middle_of_a_state_go_back_to_the_card() -> None:
    """The driver's counter shows it; later rows keep addresses and contents, and steps replayed from graphs stay right."""
    with mosaic.compile(FAMILIES["sdar"]) as cpu, mosaic.compile(FAMILIES["sdar"], device=DEVICE) as card:
        owned: dict[str, list[OwnedRows]] = {}
        for name, model in (("cpu", cpu), ("card", card)):
            draw(model)
            owned[name] = [model.open_sequence() for _ in range(3)]
            for number, mine in enumerate(owned[name]):
                mine.reserve((500, 40_000, 700)[number])
                ask(model, mine, number, decide=False)
        expected = ask(cpu, owned["cpu"][2], 9, decide=True)

        def check() -> None:
            found = ask(card, owned["card"][2], 9, decide=True)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)

        for _ in range(3):
            check()
        assert card.executors[-1].captured
        state, row_bytes = card.workspace.range("state/kv"), 2 * 2 * 2 * 16 * 4
        address, full = state.address, card.workspace.committed_bytes()["state/kv"]
        for _ in range(3):
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            owned["card"][1].close()
            card.trim()
            given = torch.cuda.mem_get_info()[0] - free
            held = card.workspace.committed_bytes()["state/kv"]
            assert full - held >= 40_000 * row_bytes - (4 << 20)
            assert given >= full - held
            assert card.memory().resident["state/kv"] == held
            check()
            again = card.open_sequence()
            again.reserve(40_000)
            assert again.runs() == [(500, 40_000)]
            owned["card"][1] = again
            ask(card, again, 1, decide=False)
            check()
            assert state.address == address
        for mine in owned["card"]:
            mine.close()
        card.trim()
        assert card.workspace.committed_bytes()["state/kv"] == 0


def test_graphs_replay_after_their_memory_went_and_came_again() -> None:
    with mosaic.compile(FAMILIES["sdar"], device=DEVICE) as model:
        draw(model)
        options: dict[str, Any] = {"gen_length": 40, "threshold": 0.3}
        first = tokens_of(generated(model, "sdar", options))
        for _ in range(2):
            assert tokens_of(generated(model, "sdar", options)) == first
        captured = [executor for executor in model.executors if executor.captured]
        assert captured
        for _ in range(2):
            model(torch.arange(3000) % 80)  # other pages come
            model.trim()
            assert tokens_of(generated(model, "sdar", options)) == first
        assert all(executor.captured for executor in captured)


def test_inputs_written_through_their_image_are_what_was_written() -> None:
    """Random tensors and numbers of random lengths, some there already, beside each other and far apart; on both sides."""
    rng = random.Random(2)
    storage = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    views = {
        name: storage[at : at + 8 * 64].view(torch.int64)
        for name, at in (("a", 0), ("b", 512), ("c", 1024), ("d", 1 << 19), ("e", (1 << 19) + 2048))
    }
    inputs = HostInputs(views)
    for _ in range(60):
        values: dict[str, Tensor | Numbers] = {}
        for name in views:
            count = rng.randint(1, 64)
            kind = rng.choice(("numbers", "ranges", "same", "host", "card"))
            if kind == "numbers":
                values[name] = Numbers(tuple(rng.choices(range(99), k=count)), "int64")
            elif kind == "same":
                values[name] = Numbers((range(7, 50),), "int64")
            elif kind == "ranges":
                values[name] = Numbers((range(3), range(40, 40 + count // 2)), "int64")
            else:
                values[name] = torch.randint(99, (count,), device="cpu" if kind == "host" else "cuda")
        storage.random_()  # as a step would leave it
        inputs.write(values)
        for name, value in values.items():
            expected = (value.tensor() if isinstance(value, Numbers) else value).cpu()
            found = views[name].cpu()
            assert torch.equal(found[: len(expected)], expected)
            assert bool((found[len(expected) :] == expected[-1]).all())


def test_numbers_whose_writing_was_interrupted_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    view = torch.zeros(5, dtype=torch.int64, device="cuda")
    inputs, values = HostInputs({"a": view}), {"a": Numbers((range(3),), "int64")}

    def interrupted(_: Numbers) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Numbers, "tensor", interrupted)
        inputs.write(values)
    inputs.write(values)
    assert view.tolist() == [0, 1, 2, 2, 2]


def test_a_policy_with_a_state_of_its_own_runs_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels ask PyTorch for memory, so its steps are not captured; scores are the CPU's."""
    for name in ("NOTE", "DISTANCE"):
        operator = getattr(test_policy, name)
        on_cpu = operator.implementations[0]
        both = (on_cpu, replace(on_cpu, backend="cuda", name="torch"))
        monkeypatch.setattr(test_policy, name, replace(operator, implementations=both))
    with mosaic.compile(test_policy.CONFIG) as cpu, mosaic.compile(test_policy.CONFIG, device=DEVICE) as card:
        found: list[list[Tensor]] = []
        for model in (cpu, card):
            draw(model)
            owners = [model.open_rows(test_policy.SUMMARY, number) for number in range(2)]
            scores: list[Tensor] = []
            for turn in range(4):
                for owner, count in zip(owners, (30 + turn, 61), strict=True):
                    owner.reserve(test_policy.blocks(count))
                requests = [
                    StepRequest(
                        phase=test_policy.DECIDE, token_ids=ids_of(turn, count) % 80, rows=torch.arange(5),
                        current=torch.full((5,), test_policy.MASK), quota=2, states={test_policy.SUMMARY: owner},
                    )
                    for owner, count in zip(owners, (30 + turn, 61), strict=True)
                ]  # fmt: skip
                nothing = torch.empty(0, dtype=torch.int64)
                model.step(
                    [replace(r, phase=test_policy.LOOK, rows=nothing, current=nothing, quota=0) for r in requests]
                )
                scores += [result.score for result in model.step(requests)]
            found.append(scores)
            assert model.state_rows == {"summary": test_policy.blocks(33) + test_policy.blocks(61)}
            for owner in owners:
                owner.close()
        for expected, score in zip(*found, strict=True):
            torch.testing.assert_close(score, expected, rtol=1e-3, atol=1e-3)
            assert torch.isfinite(expected).all()
