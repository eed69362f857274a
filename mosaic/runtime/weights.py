"""Weights of a plan: loaded in place, on the device or in host memory; drawn at random; or adopted.

Also the constants of plans, and saving.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mosaic.errors import CheckpointError, RuntimeMemoryError, WeightsMisplaced
from mosaic.files import write_atomic
from mosaic.models.architecture import Architecture
from mosaic.models.rotary import Rotary
from mosaic.models.safetensors import is_stack, members, missing, refuse_unused, tensor_rows
from mosaic.planner.check import WeightMap, weight_map
from mosaic.planner.plan_records import AnyPlan, PlanBuffer, records_in
from mosaic.runtime.checkpoint import PIECE_BYTES, Checkpoint, write_safetensors
from mosaic.runtime.encoding import encode_weights, plain_weights
from mosaic.runtime.frequencies import inverse_frequencies
from mosaic.runtime.workspace import HOST, Workspace, torch_dtype
from mosaic.units import format_bytes

INIT_STD: Final = 0.02


def place_weights(
    plan: AnyPlan, workspace: Workspace, given: Mapping[str, Tensor] | None, *, seed: int = 0
) -> dict[str, Tensor]:
    """Fill the weights of a program's plan: from given tensors, else at random.

    Parameters
    ----------
    given
        By the buffers' `tensor` field or name, in the plan's shapes and dtypes, on any device. Constants are computed.

    Returns
    -------
    dict
        Buffer name -> view, in the order of the plan.

    Raises
    ------
    CheckpointError
        If a tensor is missing, has another shape or dtype, or belongs to no weight.
    """
    records = [r for r in records_in(plan).buffers if r.holds_weight]
    views = {r.name: workspace.view(r.pool, r.offset, r.shape, r.dtype) for r in records}
    keys = {r.name: r.tensor or r.name for r in records}
    if given is not None:
        known = {key for key in (*keys, *keys.values()) if not key.startswith("=")}
        unused = [name for name in given if name not in known]
        absent = [
            key for name, key in keys.items() if not key.startswith("=") and key not in given and name not in given
        ]
        if unused or absent:
            told = [_listed(what, names) for what, names in (("missing", absent), ("used by nothing", unused)) if names]
            raise CheckpointError(f"weights: {'; '.join(told)}.")
    for name, view in views.items():
        key = keys[name]
        if given is None or key.startswith("="):
            fill_randomly({key: view}, seed=seed)
        else:
            view.copy_(_alike(key, view, given[key if key in given else name]))
    return views


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(map(repr, names[:3]))}{more}"


def _alike(key: str, view: Tensor, found: Tensor) -> Tensor:
    """Make sure that a tensor has the plan's shape and dtype."""
    if found.shape != view.shape or found.dtype != view.dtype:
        expected, got = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (view, found))
        raise CheckpointError(f"weights: tensor '{key}': expected {expected}, found {got}.")
    return found


def _stored(plan: AnyPlan) -> Iterator[tuple[str, PlanBuffer]]:
    """Give the buffers that hold weights of their own, by the weights' names."""
    for record in records_in(plan).buffers:
        if record.holds_weight and record.tensor is not None:
            yield record.tensor, record


def weight_views(plan: AnyPlan, workspace: Workspace) -> dict[str, Tensor]:
    """View every weight of a plan in its range, by its `tensor` field; constants (`=...`) too.

    Weights of kind `host` are views of host memory, the others of the device's.
    """
    return {
        tensor: workspace.view(record.pool, record.offset, record.shape, record.dtype)
        for tensor, record in _stored(plan)
    }


def require_in_place(document: Mapping[str, Any], loaded: WeightMap) -> None:
    """Make sure that a plan has its weights where they were loaded.

    Parameters
    ----------
    loaded
        Pool, offset and bytes of each loaded weight, by `tensor` name: `weights` of the plan it was loaded for.

    Raises
    ------
    WeightsMisplaced
        Naming the weights that are not loaded, or have another place or size.
    """
    planned = weight_map(document)
    wrong = [tensor for tensor, place in planned.items() if loaded.get(tensor) != place]
    if wrong:
        first = wrong[0]
        found = f"at {_place_text(loaded[first])}" if first in loaded else "nowhere: it is not loaded"
        raise WeightsMisplaced(
            f"{len(wrong)} of the plan's {len(planned)} weights are not where the plan has them: '{first}' is expected at "
            f"{_place_text(planned[first])} and lies {found}; load the weights for this plan.",
            wrong,
        )


def _place_text(place: tuple[str, int, int]) -> str:
    pool, offset, size = place
    return f"{pool} + {offset:,} ({size:,} B)"


def streamed_bytes(plan: AnyPlan) -> int:
    """Return the end of a plan's streamed weights in host memory, in bytes; hidden states come after them."""
    return max((b.offset + b.size for _, b in _stored(plan) if b.pool == HOST), default=0)


def commit_weights(plan: AnyPlan, workspace: Workspace) -> None:
    """Commit exactly the memory of a plan's weights, on the device and in host memory."""
    # loading touches every page itself; faulting them in earlier would zero them in vain
    streamed = streamed_bytes(plan)
    sizes = {"weights": records_in(plan).pool("weights").capacity, **({HOST: streamed} if streamed else {})}
    workspace.resize_all(sizes, populate=False)


def load_weights(views: Mapping[str, Tensor], checkpoint: Checkpoint, architecture: Architecture | None = None) -> None:
    """Fill the views from a checkpoint, wherever they are, and compute the constants.

    Parameters
    ----------
    architecture
        Of the model with these weights, all of them: other tensors of the checkpoint are refused.

    Raises
    ------
    CheckpointError
        If a tensor is missing, unknown, of another shape, or not convertible, or the file ends before it.
    """
    if architecture is not None:
        checkpoint.layout.verify(((name, tuple(view.shape)) for name, view in views.items()), architecture)
        for copy, original in architecture.copies.items():
            if copy in checkpoint and not checkpoint.equal(copy, original):
                raise _differs(str(checkpoint.path), copy, original)
    for tensor, view in plain_weights(views).items():
        if tensor.startswith("="):
            _fill_constant(tensor, view)
        elif not is_stack(tensor):
            checkpoint.copy_into(tensor, view)
        else:
            for part, name in zip(_parts(tensor, view), members(tensor), strict=True):
                checkpoint.copy_into(name, part)
    if architecture is not None:
        encode_weights(views, architecture.scheme, torch_dtype(architecture.dtype), checkpoint.copy_into)


def _differs(where: str, copy: str, original: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: tensor '{copy}' is not equal to '{original}', but config.json says that they are one (tied); "
        "check config.json against it."
    )


def fill_randomly(
    views: Mapping[str, Tensor],
    *,
    seed: int = 0,
    staging: Tensor | None = None,
    architecture: Architecture | None = None,
) -> None:
    """Fill the views with random weights: normal with deviation 0.02, norms (vectors that are no bias) around 1.

    Every tensor has its own generator, seeded by its name, and is drawn in pieces of `PIECE_BYTES`: its values depend
    neither on the rest of the model nor on its place (but CPU and CUDA generators differ).

    Parameters
    ----------
    views
        Contiguous, on the CPU or a device; filled.
    seed
        A different seed gives a different model.
    staging
        uint8 [at least PIECE_BYTES] on the device: weights of host memory are drawn there, so that they get the
        device's values. Without it, the CPU draws them. It may overlap the device's views, which are filled last.
    architecture
        Of the model; None: no weight is stored in parts.

    Raises
    ------
    RuntimeMemoryError
        If the staging is too small.
    """
    if staging is not None and staging.numel() < PIECE_BYTES:
        raise RuntimeMemoryError(
            f"drawing weights for host memory needs {format_bytes(PIECE_BYTES)} of staging on the device, "
            f"{format_bytes(staging.numel())} were given: commit more of the range that it lies in."
        )
    # weights that use the staging go first (False sorts before True): the staging may overlap the others
    order = sorted(plain_weights(views).items(), key=lambda item: staging is None or item[1].device == staging.device)
    for tensor, view in order:
        if tensor.startswith("="):
            _fill_constant(tensor, view)
            continue
        for part, name in zip(_parts(tensor, view), members(tensor), strict=True):
            _draw_named(name, part, seed, staging)
    if architecture is not None:
        dtype = torch_dtype(architecture.dtype)
        encode_weights(views, architecture.scheme, dtype, lambda name, out: _draw_named(name, out, seed, None))


def _draw_named(name: str, out: Tensor, seed: int, staging: Tensor | None) -> None:
    """Draw a checkpoint's tensor, by its name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    mean = 1.0 if out.dim() == 1 and not tensor_rows(name)[0].endswith("bias") else 0.0
    draw(out.view(-1), mean, int.from_bytes(digest[:8], "little", signed=True), staging)


def draw(out: Tensor, mean: float, seed: int, staging: Tensor | None) -> None:
    """Draw one tensor in pieces from one generator, in place or through the staging."""
    through = staging[:PIECE_BYTES].view(out.dtype) if staging is not None and staging.device != out.device else None
    generator = torch.Generator((out if through is None else through).device).manual_seed(seed)
    size = PIECE_BYTES // out.element_size()
    for start in range(0, out.numel(), size):
        piece = out[start : start + size]
        target = piece if through is None else through[: piece.numel()]
        target.normal_(mean, INIT_STD, generator=generator)
        if through is not None:
            piece.copy_(target)


def _parts(tensor: str, view: Tensor) -> list[Tensor]:
    return list(view.unbind(0)) if is_stack(tensor) else [view]


def _fill_constant(tensor: str, out: Tensor) -> None:
    rotary = Rotary.parse(tensor)
    if rotary is None or out.shape != (rotary.dim // 2,):
        raise CheckpointError(
            f"the plan's constant '{tensor}' {list(out.shape)} is unknown; plan again with this version."
        )
    out.copy_(inverse_frequencies(rotary))


def adopt_tensors(
    plan: AnyPlan,
    state: Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    architecture: Architecture | None = None,
) -> dict[str, Tensor]:
    """Adopt a module's own parameters as the weights of a plan, without a copy.

    Parameters
    ----------
    state
        `module.state_dict()`, or any mapping of the plan's tensor names to tensors. A stack is looked up under its
        template and must be one tensor: separate members cannot be adopted. If the plan takes rows of a tensor, those
        rows are adopted.
    device
        The device of the plan and of all parameters: "cpu", or a CUDA device with its index.
    architecture
        Of the model: other tensors of the module are refused.

    Returns
    -------
    dict
        Plan tensor name -> the caller's tensor, for `Executor(tensors=...)`; constants are not among them.

    Raises
    ------
    CheckpointError
        If a parameter is missing, unknown, of another shape or dtype, not contiguous, or on another device.
    """
    found: dict[str, Tensor] = {}
    for record in records_in(plan).buffers:
        name = record.tensor
        if record.kind not in ("weight", "external") or name is None or name.startswith("="):
            continue
        whole, rows = tensor_rows(name)
        if whole not in state:
            raise _not_adoptable(name, record, state)
        tensor = state[whole] if rows is None else state[whole][rows[0] : rows[1]]
        found[name] = _adopt(name, record, tensor, torch.device(device))
    if architecture is not None:
        _refuse_more(state, [tensor_rows(name)[0] for name in found], architecture)
    return found


def _not_adoptable(name: str, record: PlanBuffer, state: Mapping[str, Tensor]) -> CheckpointError:
    if not any(member in state for member in members(name)):
        return missing("the module", name, tuple(record.shape), state)
    return CheckpointError(
        f"the module: parameter '{name}': expected {record.dtype} {list(record.shape)}, found members of a stack, which lie "
        f"apart; save the model and compile the checkpoint directory instead."
    )


def _refuse_more(state: Mapping[str, Tensor], used: Iterable[str], architecture: Architecture) -> None:
    """Refuse tensors of a module that the plan does not use, and tied copies that differ."""
    refuse_unused("the module", architecture.unused(state, used))
    for copy, original in architecture.copies.items():
        if copy in state and not torch.equal(state[copy], state[original]):
            raise _differs("the module", copy, original)


def _adopt(name: str, record: PlanBuffer, tensor: Tensor, device: torch.device) -> Tensor:
    tensor = tensor.detach()
    actual = str(tensor.dtype).removeprefix("torch.")
    fits = list(tensor.shape) == list(record.shape) and actual == record.dtype
    if not fits or not tensor.is_contiguous() or tensor.device != device:
        kind = f"{'' if tensor.is_contiguous() else 'non-contiguous '}{actual} {list(tensor.shape)} on {tensor.device}"
        raise CheckpointError(
            f"the module: parameter '{name}': expected {record.dtype} {list(record.shape)} on {device}, found "
            f"{kind}; convert the module first, for example with .to('{device}', torch.{record.dtype})."
        )
    return tensor


def save_checkpoint(directory: str | os.PathLike[str], views: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write `model.safetensors` and `config.json`: stacks as members, slices joined into their tensor, no constants.

    Makes no copy in memory.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, list[tuple[int, Tensor]]] = {}
    for tensor, view in views.items():
        if tensor.startswith("="):
            continue
        for part, member in zip(_parts(tensor, view), members(tensor), strict=True):
            name, rows = tensor_rows(member)
            tensors.setdefault(name, []).append((rows[0] if rows else 0, part))
    whole = {name: [part for _, part in sorted(parts, key=itemgetter(0))] for name, parts in tensors.items()}
    write_safetensors(folder / "model.safetensors", whole)
    write_atomic(folder / "config.json", json.dumps(dict(config), indent=2) + "\n")
