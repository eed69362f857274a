"""`mosaic warm`: compile the kernels that a model's sessions launch, for a card that need not be there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mosaic.cli import decoding_options as o
from mosaic.cli.completion import device_names, model_names
from mosaic.cli.output import note, print_json, results
from mosaic.cli.request import require_torch, scaled


def warm(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Preset or checkpoint directory.", autocompletion=model_names)],
    device: Annotated[
        str, typer.Option(help="The card's profile: a name or my-card.toml.", autocompletion=device_names)
    ],
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that are served together at most.")] = 64,
    ctx: Annotated[str, typer.Option(help="Positions of a request at most, prompt and answer: 32768 or 32k.")] = "4k",
    gen_length: Annotated[int | None, typer.Option(help="Tokens to generate, default 128.")] = None,
    steps: o.Steps = None,
    block_length: o.BlockLength = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    remasking: o.Remasking = None,
    algorithm: o.Algorithm = None,
    alg: o.Alg = None,
    alg_temp: o.AlgTemp = None,
    threshold: o.Threshold = None,
    factor: o.Factor = None,
    cache: o.Cache = None,
    small_block_length: o.SmallBlockLength = None,
    edit_threshold: o.EditThreshold = None,
    attention: o.Attention = None,
    eviction: o.Eviction = None,
    block_cache: o.BlockCache = None,
    rope_scaling: o.RopeScaling = None,
    budget: o.Budget = None,
    host_budget: Annotated[str | None, typer.Option(help="Pinned host memory for weights and hidden states.")] = None,
    dtype: o.DType = None,
    batch_invariant: o.BatchInvariant = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Compile the kernels of a model's sessions ahead of the first request, for a card that need not be in this machine."""
    require_torch("`mosaic warm`")
    from mosaic.decoding.config import GenerationConfig
    from mosaic.errors import CompilationFailed
    from mosaic.kernels.cuda.shared.kept import kernel_folder
    from mosaic.models import load
    from mosaic.models.step import StepSize
    from mosaic.planner.planner import Planner
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.opening import device_ahead
    from mosaic.units import parse_tokens

    profile, card = device_ahead(device)
    folder = kernel_folder()
    folder.require_writable()
    described = scaled(load(model), rope_scaling)
    planner = Planner(
        described if dtype is None else described.with_dtype(dtype), device=profile, budget=budget, host_budget=host_budget,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    note(f"planning for {profile.name} (sm_{card.capability}); kernels are kept in {folder.path}")
    first = StepSize(windows=(1,), rows=1)
    with CompiledModel(Engine(planner, first, ahead=card)) as compiled, compiled.session() as session:
        session.warm(
            GenerationConfig(**o.given(context)),
            requests=max_requests,
            tokens=parse_tokens(ctx, what="--ctx"),
            progress=note,
        )
    made = session.warmed
    assert made is not None and made.kernels is not None
    if as_json:
        print_json({"folder": str(folder.path), "capability": card.capability, **asdict(made)})
    else:
        results().print(str(made), soft_wrap=True)
    if made.kernels.failed:
        name, why = made.kernels.failed[0]
        raise CompilationFailed(f"{len(made.kernels.failed)} kernels cannot be compiled: {name}: {why}")
