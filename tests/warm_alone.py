"""Kernels ahead of their first launch, in a process in which Triton compiles instead of interpreting: tests of `test_kernels_kept`.

`python tests/warm_alone.py WHAT` prints JSON; `MOSAIC_KERNELS` names the folder.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

import mosaic
from mosaic.decoding import GenerationConfig
from mosaic.kernels.card import Card, launches_for
from mosaic.kernels.cuda.shared.ahead import Compilers, recording
from mosaic.kernels.cuda.shared.compiler import Named
from mosaic.kernels.cuda.shared.kept import NotKept, kernel_folder
from mosaic.models import load
from mosaic.models.step import StepSize
from mosaic.planner.plan import Plan
from mosaic.planner.planner import Planner
from mosaic.runtime import launches as ahead
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.engine import Engine
from mosaic.runtime.launches import Launches
from mosaic.runtime.opening import device_ahead

PROFILE, CARD = device_ahead("h100")
GREEDY = GenerationConfig(gen_length=8, stop_at_eos=False)
CHEAP = "silu_mul_kernel"
TINY: Mapping[str, Any] = {
    "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64,
    "mask_token_id": 63, "torch_dtype": "bfloat16",
}  # fmt: skip


def planner_of(model: str | Mapping[str, Any]) -> Planner:
    return Planner(load(model), device=PROFILE)


def asked_by(plans: Iterable[Plan], card: Card = CARD) -> dict[bytes, str]:
    """What the launches of plans ask for."""
    with recording(card) as found:
        launches = Launches({})
        for plan in plans:
            launches.run(plan)
    return found


def asked_by_a_warm_session(config: Mapping[str, Any], requests: int, tokens: int) -> dict[bytes, str]:
    """What would be compiled for a session, without compiling it."""
    found: dict[bytes, str] = {}

    def take(engine: Engine, steps: Iterable[Any], progress: Any) -> None:
        found.update(asked_by(map(engine.plans.plan, steps)))

    compile_ahead, ahead.compile_ahead = ahead.compile_ahead, take
    engine = Engine(planner_of(config), StepSize(windows=(1,), rows=1), ahead=CARD)
    with CompiledModel(engine) as model, model.session() as session:
        session.warm(GREEDY, requests=requests, tokens=tokens)
    ahead.compile_ahead = compile_ahead
    return found


def missing(plans: Iterable[Plan]) -> list[str]:
    """Kernels that the folder does not have: Triton is asked as by a launch, with the arguments as they are, and a card by name."""
    run, lacks = JITFunction.run, list[str]()

    def find(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel.device_caches.clear()  # or it is found in this process
        try:
            run(kernel, *args, grid=grid, warmup=True, **options)
        except NotKept:
            lacks.append(kernel.__name__)

    asked_by(plans := list(plans))  # a step's kernels are imported before it runs
    triton.runtime.driver.set_active(Named(CARD.capability))
    JITFunction.run = find
    with launches_for(CARD), kernel_folder().in_force(compiling=False):
        for plan in plans:
            Launches({}).run(plan)
    JITFunction.run = run
    return lacks


def few() -> dict[str, Any]:
    """A kernel of a step: compiled, found, damaged, and then what launches it."""
    plan = planner_of(TINY).plan(StepSize(windows=(24,), rows=24), limit=False)
    asked = {one: name for one, name in asked_by([plan]).items() if name == CHEAP}
    folder, said = kernel_folder(), list[str]()
    with Compilers(CARD, folder) as compilers:
        first, second = compilers.run(asked, said.append), compilers.run(asked, said.append)
        bare = missing([plan])
        (binary,) = folder.path.glob(f"*/*.{CHEAP}.cubin")
        content = bytearray(binary.read_bytes())
        content[len(content) // 2] ^= 1
        binary.write_bytes(content)
        lacks = missing([plan])
        third = compilers.run(asked, said.append)
        (launcher,) = folder.path.glob("*/*__triton_launcher*")
        content = launcher.read_bytes()
        launcher.unlink()  # it is loaded in a process
        launcher.write_bytes(content[:100])
        fourth = compilers.run(asked, said.append)
    found = {
        "asked": [*asked.values()],
        "bare": CHEAP in bare,
        "others": len({*bare}),
        "lacks": CHEAP in lacks,
        "said": said,
    }
    runs = [(run.found, run.compiled, list(run.failed)) for run in (first, second, third, fourth)]
    return {**found, "runs": runs}


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(6, 60, (length,), generator=torch.Generator().manual_seed(length))


def covered(family: str, seed: int) -> dict[str, Any]:
    """Steps of random requests in a warm session, planned for a card: kernels that nobody compiled."""
    from test_request_table import CONFIGS

    config: Mapping[str, Any] = {**CONFIGS[family], "torch_dtype": "bfloat16"}
    rng, limits = random.Random(f"{family} {seed}"), {"requests": 4, "tokens": 64}
    asked = asked_by_a_warm_session(config, **limits)
    sizes, run = dict[Any, Any](), Engine.run

    def noting(engine: Engine, step: Any) -> Any:
        sizes[step.size.key] = step.size
        return run(engine, step)

    with mosaic.compile(CONFIGS[family], seed=3) as model, model.session() as session:
        session.warm(GREEDY, **limits)
        Engine.run = noting  # type: ignore[method-assign, assignment]
        left = 12
        while left or session.live:
            while left and len(session.live) < 4 and rng.random() < 0.6:
                session.submit(prompt_of(rng.randrange(1, 56)), GREEDY, steps=rng.randint(1, 4))
                left -= 1
            session.advance()
    Engine.run = run  # type: ignore[method-assign]
    plans = map(Engine(planner_of(config), StepSize(windows=(1,), rows=1), ahead=CARD).plans.plan, sizes.values())
    needed = asked_by(plans)
    return {"asked": len(asked), "needed": len(needed), "sizes": len(sizes), "bare": sorted(
        name for one, name in needed.items() if one not in asked)}  # fmt: skip


def whole(model: str, *limits: str) -> dict[str, Any]:
    """All steps of a warm session, whose kernels are on disk: those that Triton does not find there."""
    plans = list[Plan]()

    def take(engine: Engine, steps: Iterable[Any], progress: Any) -> None:
        plans.extend(map(engine.plans.plan, steps))

    ahead.compile_ahead = take
    engine = Engine(planner_of(model), StepSize(windows=(1,), rows=1), ahead=CARD)
    with CompiledModel(engine) as compiled, compiled.session() as session:
        session.warm(requests=int(limits[0]), tokens=int(limits[1]))
    return {"plans": len(plans), "bare": sorted(set(missing(plans)))}


def on_the_card(model: str) -> dict[str, Any]:
    """A warm session on this machine's card: what was found, compiled and failed, and kernels that its launches compiled."""
    began = perf_counter()
    with mosaic.compile(model, device="h100") as compiled, compiled.session() as session:
        ready_s = perf_counter() - began
        session.warm(GREEDY, requests=4, tokens=256)
        request = session.submit(prompt_of(40), GREEDY)
        asked = perf_counter()
        session.advance()
        first_s = perf_counter() - asked
        while session.live:
            session.advance()
        warmed, generation = session.warmed, request.generation
    assert warmed is not None and warmed.kernels is not None and generation is not None
    made = warmed.kernels.found, warmed.kernels.compiled, list(warmed.kernels.failed)
    figures = {"compile_s": ready_s, "warm_s": warmed.seconds, "kernels_s": warmed.kernels.seconds, "first_s": first_s}
    return {"made": made, "compiled": kernel_folder().compiled, "tokens": generation.token_ids.tolist(), **figures}


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    what, *rest = sys.argv[1:]
    made = {
        "few": few,
        "covered": lambda family, seed: covered(family, int(seed)),
        "whole": whole,
        "on_the_card": on_the_card,
    }[what](*rest)
    print(json.dumps(made))
