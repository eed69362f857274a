"""`compile`: plan a model or a program, load its weights and return it ready to be called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from mosaic.errors import UsageError
from mosaic.models import Model, load
from mosaic.models.step import StepSize
from mosaic.planner.planner import Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Debug
from mosaic.runtime.opening import current_card, usable_device
from mosaic.units import Size, parse_tokens

if TYPE_CHECKING:
    from mosaic.devices import Device
    from mosaic.registrar.program import Build, Program
    from mosaic.runtime.compiled_program import CompiledProgram


@overload
def compile(
    model: str | Path | Mapping[str, Any] | Model | nn.Module,
    *,
    device: Device | str | None = "cpu",
    dtype: str | torch.dtype | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    max_tokens: Size | None = None,
    config: Mapping[str, int | str | None] | None = None,
    capture: bool = True,
    threads: int | None = None,
    batch_invariant: bool = False,
    warm: Mapping[str, Any] | None = None,
    debug: Debug = None,
    seed: int = 0,
) -> CompiledModel: ...


@overload
def compile(
    model: Program | Build,
    *,
    weights: Mapping[str, Tensor] | None = None,
    dims: Mapping[str, Size] | None = None,
    device: Device | str | None = "cpu",
    budget: Size | None = None,
    host_budget: Size | None = None,
    config: Mapping[str, int | str | None] | None = None,
    capture: bool = True,
    debug: Debug = None,
    seed: int = 0,
) -> CompiledProgram: ...


def compile(
    model: str | Path | Mapping[str, Any] | Model | nn.Module | Program | Build,
    *,
    weights: Mapping[str, Tensor] | None = None,
    dims: Mapping[str, Size] | None = None,
    device: Device | str | None = "cpu",
    dtype: str | torch.dtype | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    max_tokens: Size | None = None,
    config: Mapping[str, int | str | None] | None = None,
    capture: bool = True,
    threads: int | None = None,
    batch_invariant: bool = False,
    warm: Mapping[str, Any] | None = None,
    debug: Debug = None,
    seed: int = 0,
) -> CompiledModel | CompiledProgram:
    """Plan a model or a program, load its weights into planned memory, and return it ready to be called.

    Parameters
    ----------
    model
        A checkpoint directory; a preset's name or a config, with random weights; or a Hugging Face module, whose
        parameters are adopted without a copy and must not change. For a program: a `Program`, or a callable that
        registers a graph; the result is a `CompiledProgram`.
    weights
        For a program only: tensors by the buffers' `tensor` field or name; random if not given.
    dims
        For a program only: values of dims that are no axis of an input.
    device
        "cpu", which None means too, or the profile of the CUDA card that this process uses (the first that PyTorch sees).
    dtype
        Of weights and activations; the checkpoint's if not given.
    budget
        The most bytes for everything together, a number or like "24GiB"; the device's memory if not given.
    host_budget
        The most pinned host memory for weights and hidden states; the profile's value if not given.
    max_tokens
        The longest step expected, a number or like "128k": weights are loaded to where the plan of that step has them.
        A step whose plan has them elsewhere loads them again.
    config
        Take these settings in every plan instead of searching, such as {"attention": "heads", "heads": 4}. Each kind of
        step takes the settings that it has. A call's own `config` overrides them.
    capture
        Replay short steps from CUDA graphs.
    threads
        CPU only: the threads that operations of a step may use. PyTorch is set to that number during a step. By the
        model's size if not given (`StepThreads`), at most the number that PyTorch is set to.
    batch_invariant
        Take only kernels for which a request's results are bit for bit independent of the other requests of its step.
        On a CPU in float32 all kernels are; on a card a step takes longer (docs/decoding.md).
    warm
        For a model on a card: compile the kernels of a session's steps before the weights are loaded, or find them on disk. The
        parameters of `Session.warm` by name, such as {"requests": 64, "tokens": 32768}; {} takes their defaults.
    debug
        "poison" fills every buffer with NaN before and after its lifetime, and a step that changes a weight raises.
    seed
        For random weights.

    Raises
    ------
    DoesNotFit
        If not even one token fits the budget.
    CheckpointError
        If the checkpoint does not match its config.json.

    Examples
    --------
    >>> config = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
    ...           "embedding_size": 64, "mask_token_id": 63, "torch_dtype": "float32"}
    >>> with compile(config) as model:
    ...     step = model(torch.tensor([1, 2, 63, 63]))
    ...     step.rows.tolist(), tuple(step.confidence.shape)
    ([2, 3], (2,))
    """
    if not isinstance(batch_invariant, bool):
        raise UsageError(f"batch_invariant: expected True or False, got {batch_invariant!r}.")
    if warm is not None and not isinstance(warm, Mapping):
        raise UsageError(
            f"warm: expected parameters of Session.warm by name, such as {{'requests': 64}}, got {warm!r}."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed: expected an integer, got {seed!r}.")
    if not isinstance(model, str | Path | Mapping | Model | nn.Module):
        from mosaic.runtime.compiled_program import (  # symbolic: kept out of the start of a model
            CompiledProgram,
            program_of,
        )

        if dtype is not None or max_tokens is not None or threads is not None or batch_invariant or warm is not None:
            raise UsageError(
                "a program has its own dtypes and sizes: leave dtype, max_tokens, threads, batch_invariant and warm out."
            )
        program = Planner(program_of(model), device=usable_device(device), budget=budget, host_budget=host_budget)
        return CompiledProgram(
            program, weights=weights, dims=dims or {}, config=config, capture=capture, debug=debug, seed=seed
        )
    if weights is not None or dims is not None:
        raise UsageError(
            "weights and dims are those of a program: a model's weights come from its directory or module."
        )
    module = model if isinstance(model, nn.Module) else None
    source = _config_of(model) if isinstance(model, nn.Module) else model
    described = source if isinstance(source, Model) else load(source)
    if module is not None and dtype is None:
        dtype = next(iter(module.parameters())).dtype
    if dtype is not None:
        described = described.with_dtype(str(dtype).removeprefix("torch."))
    longest = 1 if max_tokens is None else parse_tokens(max_tokens, what="max_tokens")
    planner = Planner(
        described, device=usable_device(device), budget=budget, host_budget=host_budget,
        pinned=None if module is None else {"stream": "none"}, batch_invariant=batch_invariant,
    )  # fmt: skip
    first = StepSize(windows=(longest,), rows=longest)
    if warm is not None and planner.device.backend == "cuda":
        with (
            CompiledModel(Engine(planner, first, config=config, ahead=current_card())) as ahead,
            ahead.session() as session,
        ):
            session.warm(**warm)
    engine = Engine(
        planner, first, given=None if module is None else dict(module.state_dict()),
        config=config, capture=capture, threads=threads, debug=debug, seed=seed,
    )  # fmt: skip
    return CompiledModel(engine)


def _config_of(module: nn.Module) -> dict[str, Any]:
    """The configuration of a Hugging Face module."""
    config = getattr(module, "config", None)
    if config is None:
        raise UsageError(f"{type(module).__name__} has no config: give a Hugging Face model or a checkpoint directory.")
    return dict(config if isinstance(config, Mapping) else config.to_dict())
