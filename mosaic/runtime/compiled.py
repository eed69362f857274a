"""`compile`: a model whose every byte is planned, as an object to call. Plans per shape, binds once, then only runs.

The planning side is reached through `_planner` and `_plan` alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import torch
from torch import Tensor, nn

from mosaic.errors import DoesNotFit, RuntimeMemoryError, UsageError
from mosaic.runtime.checkpoint import Checkpoint
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.weights import (
    adopt_tensors,
    fill_randomly,
    load_weights,
    save_checkpoint,
    weight_views,
)
from mosaic.runtime.workspace import Pool, Workspace
from mosaic.units import format_bytes, format_tokens, parse_bytes

if TYPE_CHECKING:
    from mosaic.devices import Device
    from mosaic.models import Model
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner

__all__ = ["CompiledModel", "MemoryReport", "StepOutput", "compile"]

TokenIds: TypeAlias = Tensor | Sequence[Tensor]
Rows: TypeAlias = Tensor | Sequence[Tensor] | None
_KEPT_EXECUTORS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The statistics of M rows, and the logits of R rows where asked for.

    Views of planned memory: valid until the next call of the model; `.clone()` to keep them.

    Parameters
    ----------
    rows
        int64 [M], the rows of the packed batch that the statistics are of; the caller's to keep.
    token_ids
        int64 [M], the most likely token; ties go to the lower id.
    confidence
        float32 [M], its probability.
    maximum, second, logsumexp, entropy
        float32 [M]: the two largest logits, log-sum-exp and entropy (natural logarithm) of the row.
    logits
        [R, V] in the model's dtype for the rows of `logits_for`, or None.
    """

    rows: Tensor
    token_ids: Tensor
    confidence: Tensor
    maximum: Tensor
    second: Tensor
    logsumexp: Tensor
    entropy: Tensor
    logits: Tensor | None = None

    def clone(self) -> StepOutput:
        """Copy everything out of planned memory."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(self, **{name: value.clone() for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes by component (`weights`, `state`, `workspace`): planned, committed and resident.

    `resident` is measured by the operating system. Adopted parameters are the caller's: counted, not measured.
    """

    planned: Mapping[str, int]
    committed: Mapping[str, int]
    resident: Mapping[str, int]
    budget_bytes: int

    def __str__(self) -> str:
        lines = [f"{'':<12}{'planned':>14}{'committed':>14}{'resident':>14}"]
        for name in self.planned:
            cells = (table.get(name, 0) for table in (self.planned, self.committed, self.resident))
            lines.append(f"{name:<12}" + "".join(f"{format_bytes(cell):>14}" for cell in cells))
        return "\n".join([*lines, f"budget {format_bytes(self.budget_bytes)}"])


def compile(
    model: str | Path | Mapping[str, Any] | Model | nn.Module,
    *,
    device: Device | str = "cpu",
    dtype: str | torch.dtype | None = None,
    budget: int | str | None = None,
    debug: Debug = None,
    seed: int = 0,
) -> CompiledModel:
    """Plan a model, load its weights into planned memory, and return it ready to be called.

    Parameters
    ----------
    model
        A checkpoint directory; a preset's name or a config, with random weights; or a Hugging Face module, whose
        parameters are adopted without a copy and must stay as they are.
    device
        "cpu", or the profile of the CUDA card that this process uses (the first that PyTorch sees).
    dtype
        Of weights and activations; the checkpoint's if not given.
    budget
        The most bytes that everything together may take, as a number or like "24GiB"; the device's memory if not given.
    debug
        "poison" fills every buffer with NaN before and after its lifetime.
    seed
        For random weights.

    Raises
    ------
    DoesNotFit
        If not even one token fits the budget.
    CheckpointError
        If the checkpoint is not what its config.json says.

    Examples
    --------
    >>> config = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
    ...           "embedding_size": 64, "mask_token_id": 63, "torch_dtype": "float32"}
    >>> with compile(config) as model:
    ...     step = model(torch.tensor([1, 2, 63, 63]))
    ...     step.rows.tolist(), tuple(step.confidence.shape)
    ([2, 3], (2,))
    """
    source = dict(_config_of(model)) if isinstance(model, nn.Module) else model
    if isinstance(model, nn.Module) and dtype is None:
        dtype = next(iter(model.parameters())).dtype
    planner = _planner(source, device, dtype, parse_bytes(budget) if isinstance(budget, str) else budget)
    state = dict(model.state_dict()) if isinstance(model, nn.Module) else None
    return CompiledModel(planner, state=state, debug=debug, seed=seed)


def _config_of(module: nn.Module) -> Mapping[str, Any]:
    config = getattr(module, "config", None)
    if config is None:
        raise UsageError(f"{type(module).__name__} has no config: give a Hugging Face model or a checkpoint directory.")
    found: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    return found


def _planner(source: Any, device: Device | str, dtype: str | torch.dtype | None, budget_bytes: int | None) -> Planner:
    """Reach the planner: the model's description on a device of the CPU backend."""
    from mosaic.devices import load_device
    from mosaic.models import Model, load
    from mosaic.planner.planner import Planner

    described = source if isinstance(source, Model) else load(source)
    if dtype is not None:
        described = described.with_dtype(str(dtype).removeprefix("torch."))
    profile = load_device(device) if isinstance(device, str) else device
    if profile.backend == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"the device '{profile.name}' is a CUDA card, and PyTorch sees none; use device='cpu'.")
    return Planner(described, device=profile, budget_bytes=budget_bytes)


def _plan(planner: Planner, lengths: tuple[int, ...], masked: int, logit_rows: int) -> Plan:
    """Plan one step, or say why it does not fit."""
    from mosaic.planner.planner import Request

    plan = planner.plan(Request(seq_lens=lengths, masked=masked, logit_rows=logit_rows))
    if not plan.fits:
        raise DoesNotFit(
            f"a step over {format_tokens(sum(lengths))} tokens ({format_tokens(masked)} masked) needs "
            f"{format_bytes(plan.total_bytes)}, the budget is {format_bytes(plan.budget_bytes)}; the largest context "
            f"that fits is {format_tokens(plan.max_ctx_tokens)} tokens. Raise the budget, or call with fewer tokens.",
            needed_bytes=plan.total_bytes,
            available_bytes=plan.budget_bytes,
        )
    return plan


def _open_pool(planner: Planner) -> Pool:
    """The pages of the device that the plans are for, within the planner's budget."""
    device = planner.device
    ledger = DeviceLedger(planner.budget_bytes, device.name)
    if device.backend == "cpu":
        # Users hold views of outputs: one that outlives its memory reads zeros instead of ending the process.
        return PagePool(ledger, page_bytes=device.page_bytes, released="read")
    from mosaic.runtime.cuda_driver import CudaDriver
    from mosaic.runtime.cuda_pool import open_pool

    torch.cuda.init()  # type: ignore[no-untyped-call]
    return open_pool(CudaDriver(torch.cuda.current_device()), ledger, page_bytes=device.page_bytes)


class CompiledModel:
    """A planned model. Call it with token ids; see `compile`, which makes it.

    One plan is made per shape of the input (tokens, sequences, masked rows rounded up by at most an eighth) and kept.
    The committed memory is always exactly that of the plan of the last call.
    """

    def __init__(
        self, planner: Planner, *, state: Mapping[str, Tensor] | None = None, debug: Debug = None, seed: int = 0
    ) -> None:
        self._planner, self.debug = planner, debug
        self.model = planner.model
        self._bound: OrderedDict[tuple[int, ...], tuple[Plan, Executor]] = OrderedDict()
        self._current = _plan(planner, (1,), 1, 0)  # every plan of a model places its weights alike
        self.workspace = Workspace(pool=_open_pool(planner))
        for fixed in ("context", "library"):
            self.workspace.ledger.charge(fixed, self._current.components[fixed])
        self._adopted_bytes = 0
        try:
            self._weights = self._load(seed) if state is None else self._adopt(state)
        except BaseException:
            self.workspace.close()
            raise

    # --- weights --------------------------------------------------------------------------------------------------

    def _load(self, seed: int) -> dict[str, Tensor]:
        document = self._current.document
        # loading touches every page itself; faulting them in before would clear them for nothing
        self.workspace.resize("weights", self._current.components["weights"], populate=False)
        views = weight_views(document, self.workspace)
        if self.model.path is None:
            fill_randomly(views, seed=seed)
        else:
            with Checkpoint(self.model.path) as checkpoint:
                load_weights(views, checkpoint)
        return views

    def _adopt(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        document = self._current.document
        names = [record["tensor"] for record in document["buffers"] if record["tensor"] is not None]
        prefixed = {f"model.{name}": tensor for name, tensor in state.items() if f"model.{name}" in names}
        adopted = adopt_tensors(document, {**prefixed, **state})
        where = next(iter(adopted.values())).device
        constants = {
            record["tensor"]: torch.empty(record["shape"], device=where)
            for record in document["buffers"]
            if (record["tensor"] or "").startswith("=")
        }
        fill_randomly(constants)
        self._adopted_bytes = self._current.components["weights"]
        self.workspace.ledger.charge("weights", self._adopted_bytes)
        return {**adopted, **constants}

    # --- calls ----------------------------------------------------------------------------------------------------

    @property
    def mask_token_id(self) -> int:
        """The id of [MASK]."""
        return self.model.architecture.mask_token_id

    def plan(self, tokens: int | Sequence[int], *, masked: int | None = None, logit_rows: int = 0) -> Plan:
        """Plan a step without running it.

        Parameters
        ----------
        tokens
            Context of one sequence, or the lengths of several.
        masked
            Rows to unembed; all tokens if not given.

        Raises
        ------
        DoesNotFit
            With the largest context that fits.
        """
        lengths = (tokens,) if isinstance(tokens, int) else tuple(tokens)
        return _plan(self._planner, lengths, sum(lengths) if masked is None else masked, logit_rows)

    def __call__(self, token_ids: TokenIds, masked: Rows = None, *, logits_for: Rows = None) -> StepOutput:
        """Run one denoising step.

        Parameters
        ----------
        token_ids
            Integers: [S] one sequence, [B, S] a batch, or a list of [S_i] of different lengths.
        masked
            The rows to predict: a boolean mask in the form of `token_ids`, or int64 row numbers of the packed batch
            (sequences one after another). Where `token_ids` is [MASK], if not given.
        logits_for
            Rows whose logits are returned as well, in the same forms.

        Returns
        -------
        StepOutput
            Valid until the next call.

        Raises
        ------
        UsageError
            If ids, masks or rows do not fit together.
        DoesNotFit
            If the step needs more than the budget.
        """
        self._require_open()
        packed, lengths = _pack(token_ids, self.model.architecture.vocabulary)
        rows = _rows("masked", packed == self.mask_token_id if masked is None else masked, lengths)
        chosen = _rows("logits_for", logits_for, lengths) if logits_for is not None else rows[:0]
        executor = self._executor(lengths, len(rows), len(chosen))
        inputs = executor.inputs
        inputs["token_ids"].copy_(packed)
        bounds = [0, *accumulate(lengths)]
        inputs["cu_seqlens"].copy_(torch.tensor(bounds, dtype=torch.int32))
        for start, end in pairwise(bounds):
            torch.arange(end - start, out=inputs["positions"][start:end])
        _fill_rows(inputs["rows"], rows)
        if len(chosen):
            _fill_rows(inputs["logit_rows"], chosen)
        executor.run()
        return _output(executor.outputs, rows, len(chosen))

    def _executor(self, lengths: tuple[int, ...], masked: int, logit_rows: int) -> Executor:
        """Find or bind the executor of a shape, and commit exactly its memory."""
        tokens = sum(lengths)
        key = (tokens, len(lengths), max(_bucket(masked, tokens), 1), _bucket(logit_rows, tokens))
        plan, executor = self._bound.pop(key, None) or (self._plan_of(lengths, max(masked, 1), logit_rows), None)
        self.workspace.resize("workspace", plan.components["workspace"])
        if plan.components["state"]:
            self.workspace.resize("state", plan.components["state"])
        self._current = plan
        if executor is None:
            executor = Executor(plan, self.workspace, tensors=self._weights, debug=self.debug)
        if executor.inputs["rows"].numel() == key[2]:  # a plan for the exact number of rows serves no other
            self._bound[key] = (plan, executor)
        while len(self._bound) > _KEPT_EXECUTORS:
            self._bound.popitem(last=False)
        return executor

    def _plan_of(self, lengths: tuple[int, ...], masked: int, logit_rows: int) -> Plan:
        """Plan with rows rounded up, to be used again; exactly, where only that fits."""
        tokens = sum(lengths)
        try:
            return _plan(self._planner, lengths, _bucket(masked, tokens), _bucket(logit_rows, tokens))
        except DoesNotFit:
            return _plan(self._planner, lengths, masked, logit_rows)

    # --- looking and leaving --------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes; planned are those of the last call's plan."""
        self._require_open()
        components = {name: self._current.components[name] for name in ("weights", "state", "workspace")}
        adopted = {"weights": self._adopted_bytes} if self._adopted_bytes else {}
        return MemoryReport(
            planned=components,
            committed={**dict.fromkeys(components, 0), **self.workspace.committed_bytes(), **adopted},
            resident={**dict.fromkeys(components, 0), **self.workspace.resident_bytes(), **adopted},
            budget_bytes=self._planner.budget_bytes,
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint directory that `compile` reads: model.safetensors and config.json."""
        self._require_open()
        config = {**self.model.config, "torch_dtype": self.model.architecture.dtype}
        save_checkpoint(path, self._weights, config)

    def close(self) -> None:
        """Give all memory back. Closing twice is fine; calling the model afterwards is an error."""
        self._bound.clear()
        self._weights = {}
        self.workspace.close()

    def _require_open(self) -> None:
        if not self._weights:
            raise RuntimeMemoryError("the model is closed: compile it again.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def _sequences(what: str, values: TokenIds) -> list[Tensor]:
    """Split a tensor or a list into one 1-D tensor per sequence."""
    if isinstance(values, Tensor) and values.dim() == 1:
        return [values]
    if isinstance(values, Tensor) and values.dim() == 2:
        return list(values)
    if isinstance(values, Tensor):
        raise UsageError(f"{what}: expected [S], [B, S] or a list of [S], got a tensor of shape {list(values.shape)}.")
    parts = list(values)
    if not parts or not all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
        raise UsageError(f"{what}: expected [S], [B, S] or a list of [S]; each sequence a 1-D tensor, at least one.")
    return parts


def _pack(token_ids: TokenIds, vocabulary: int) -> tuple[Tensor, tuple[int, ...]]:
    """Lay the sequences one after another: ids [T] and lengths."""
    parts = _sequences("token_ids", token_ids)
    lengths = tuple(part.numel() for part in parts)
    if not lengths or min(lengths) == 0:
        raise UsageError(f"token_ids: a sequence is empty (lengths {list(lengths)}); give at least one token each.")
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packed.is_floating_point() or packed.dtype == torch.bool:
        raise UsageError(f"token_ids: expected integers, got {packed.dtype}.")
    low, high = int(packed.min()), int(packed.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(f"token_ids: expected ids in [0, {vocabulary}), got {low if low < 0 else high}.")
    return packed, lengths


def _rows(what: str, rows: TokenIds, lengths: tuple[int, ...]) -> Tensor:
    """Turn a mask or row numbers into int64 rows of the packed batch."""
    tokens = sum(lengths)
    if isinstance(rows, Tensor) and rows.dim() == 1 and rows.dtype != torch.bool:
        found = rows.to(torch.int64)
        if found.numel() > tokens:
            raise UsageError(f"{what}: {found.numel()} rows of a batch of {tokens} tokens; list each row once.")
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < tokens:
            raise UsageError(f"{what}: rows in [0, {tokens}) expected, got {int(found.min())} to {int(found.max())}.")
        return found.clone()
    masks = _sequences(what, rows)
    given = tuple(part.numel() for part in masks)
    packed = len(masks) == 1 and given == (tokens,)
    if any(part.dtype != torch.bool for part in masks) or not (given == lengths or packed):
        raise UsageError(
            f"{what}: expected a boolean mask of lengths {list(lengths)}, or row numbers; got lengths {list(given)}."
        )
    return torch.cat(masks).nonzero().view(-1)


def _bucket(count: int, most: int) -> int:
    """Round a number of rows up by at most an eighth, so that plans are reused while rows get fewer.

    >>> [_bucket(n, 1000) for n in (0, 7, 33, 100, 999)]
    [0, 7, 36, 104, 1000]
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return min(-(-count // step) * step, most)


def _fill_rows(out: Tensor, rows: Tensor) -> None:
    """Write the rows; what the bucket has too many repeats a row that exists."""
    out.fill_(int(rows[-1]) if len(rows) else 0)
    out[: len(rows)].copy_(rows)


def _output(outputs: Mapping[str, Tensor], rows: Tensor, chosen: int) -> StepOutput:
    names: Iterable[str] = ("confidence", "maximum", "second", "logsumexp", "entropy")
    return StepOutput(
        rows=rows,
        token_ids=outputs["token"][: len(rows)],
        logits=outputs["logits"][:chosen] if chosen else None,
        **{name: outputs[name][: len(rows)] for name in names},
    )
