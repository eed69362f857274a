"""`compile`: a model whose every byte is planned, as an object to call. Plans per shape, binds once, then only runs.

The planning side is reached through `_planner` and `_plan` alone.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from mosaic.errors import DoesNotFit, RuntimeMemoryError, UsageError
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.safetensors import tensor_rows
from mosaic.runtime.batch import Rows, TokenIds, bucket, fill_rows, pack, rows_of
from mosaic.runtime.checkpoint import PIECE_BYTES, Checkpoint
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.kv_memory import KVMemory
from mosaic.runtime.kv_memory import Sequence as KVSequence
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.packing import PackedStep, pack_step
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.steps import StepRequest, StepResult, StepShape
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.threads import StepThreads
from mosaic.runtime.weights import (
    adopt_tensors,
    fill_randomly,
    load_weights,
    save_checkpoint,
    streamed_bytes,
    weight_views,
)
from mosaic.runtime.workspace import Workspace
from mosaic.units import Size, format_bytes, format_tokens, parse_lengths, parse_tokens

if TYPE_CHECKING:
    from mosaic.decoding import Generation, GenerationConfig, Prompt, Streamer
    from mosaic.decoding.streaming import OnStep
    from mosaic.devices import Device
    from mosaic.models import Model
    from mosaic.models.architecture import Architecture
    from mosaic.planner.check import WeightMap
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, Request

__all__ = ["CompiledModel", "MemoryReport", "StepOutput", "compile"]

Settings: TypeAlias = Mapping[str, int | str | None] | None
_KEPT_EXECUTORS: Final = 16
CAPTURED_MS: Final = 500.0
"""Longest predicted step that is captured into a CUDA graph: launches of longer ones hide behind their kernels."""
FEWEST_ROWS: Final = 16
FEWEST_KEYS: Final = 64
MOST_DOUBLED: Final = 256
"""What decoding steps are planned for at least, and up to how many rows plans are for powers of two: a few rows take about as
long as one, and a generation whose masks get fewer then needs few plans, each of which is captured once."""
OLDEST: Final = (8, 0)
"""Compute capability of the oldest cards that every kernel is compiled and tested for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The statistics of M rows, and the logits of R rows where asked for.

    Views of planned memory: valid until the next call of the model; `.clone()` to keep them. On a CUDA device a call
    that needs less memory empties them.

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
    plan
        The plan that was in force; `plan.config` is the configuration.
    """

    rows: Tensor
    token_ids: Tensor
    confidence: Tensor
    maximum: Tensor
    second: Tensor
    logsumexp: Tensor
    entropy: Tensor
    logits: Tensor | None = None
    plan: Plan = field(repr=False)

    def clone(self) -> StepOutput:
        """Copy everything out of planned memory."""
        copies: dict[str, Any] = {name: value.clone() for name, value in self._views().items()}
        return replace(self, **copies)

    def tensors(self) -> list[Tensor]:
        """The views of planned memory."""
        return list(self._views().values())

    def _views(self) -> dict[str, Tensor]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "rows"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes by component (`weights`, `state`, `workspace`, pinned `host`): planned, committed and resident.

    `resident` is measured by the operating system. Adopted parameters are the caller's: counted, not measured.
    `in_use` is what a CUDA device's own counter shows, all processes together; None on the CPU.
    """

    planned: Mapping[str, int]
    committed: Mapping[str, int]
    resident: Mapping[str, int]
    budget_bytes: int
    in_use: int | None = None

    def __str__(self) -> str:
        lines = [f"{'':<12}{'planned':>14}{'committed':>14}{'resident':>14}"]
        for name in self.planned:
            cells = (table.get(name, 0) for table in (self.planned, self.committed, self.resident))
            lines.append(f"{name:<12}" + "".join(f"{format_bytes(cell):>14}" for cell in cells))
        used = "" if self.in_use is None else f", {format_bytes(self.in_use)} of the device in use"
        return "\n".join([*lines, f"budget {format_bytes(self.budget_bytes)}{used}"])


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
        "cpu", which None means too, or the profile of the CUDA card that this process uses (the first that PyTorch sees).
    dtype
        Of weights and activations; the checkpoint's if not given.
    budget
        The most bytes that everything together may take, as a number or like "24GiB"; the device's memory if not given.
    host_budget
        Pinned host memory that weights and hidden states may be kept in; what the profile says if not given.
    max_tokens
        The longest step expected, a number or like "128k": weights are loaded to where its plan wants them. A step that
        needs them elsewhere loads them anew.
    config
        Take these settings in every plan instead of searching, such as {"attention": "heads", "heads": 4}.
    capture
        Replay short steps from CUDA graphs.
    threads
        On a CPU, the threads that operations of a step may use: PyTorch is set to them for its time only. By the model's
        size if not given (`StepThreads`), at most as many as PyTorch is set to.
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
    longest = None if max_tokens is None else parse_tokens(max_tokens, what="max_tokens")
    planner = _planner(source, device, dtype, budget, host_budget, adopts=isinstance(model, nn.Module))
    state = dict(model.state_dict()) if isinstance(model, nn.Module) else None
    return CompiledModel(
        planner, state=state, config=config, max_tokens=longest, capture=capture, threads=threads, debug=debug,
        seed=seed,
    )  # fmt: skip


def _config_of(module: nn.Module) -> Mapping[str, Any]:
    config = getattr(module, "config", None)
    if config is None:
        raise UsageError(f"{type(module).__name__} has no config: give a Hugging Face model or a checkpoint directory.")
    found: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    return found


def _planner(
    source: Any,
    device: Device | str | None,
    dtype: str | torch.dtype | None,
    budget: Size | None,
    host_budget: Size | None,
    *,
    adopts: bool,
) -> Planner:
    """Reach the planner: the model's description on the device. Parameters that are adopted stay where they are."""
    from mosaic.devices import load_device
    from mosaic.models import Model, load
    from mosaic.planner.planner import Planner

    described = source if isinstance(source, Model) else load(source)
    if dtype is not None:
        described = described.with_dtype(str(dtype).removeprefix("torch."))
    profile = load_device("cpu" if device is None else device)
    if profile.backend == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"the device '{profile.name}' is a CUDA card, and PyTorch sees none; use device='cpu'.")
    return Planner(
        described, device=_usable(profile), budget=budget, host_budget=host_budget,
        pinned={"stream": "none"} if adopts else None,
    )  # fmt: skip


def _usable(profile: Device) -> Device:
    """The profile with the implementations that this process has: plans must not ask for others.

    Raises
    ------
    UsageError
        If the card is older than any kernel is compiled for.
    """
    if profile.backend != "cuda":
        return profile
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise UsageError(
            f"{torch.cuda.get_device_name()} has compute capability {'.'.join(map(str, capability))}, the kernels need "
            f"{'.'.join(map(str, OLDEST))} (Ampere) or later; use device='cpu'."
        )
    if "cudnn" not in profile.attention_rates:
        return profile
    from mosaic.kernels.cuda.attention_cudnn import available

    found = available()
    if found:
        return profile
    _log.warning("attention runs on Triton, which is slower: %s", found.reason)
    rates = {name: table for name, table in profile.attention_rates.items() if name != "cudnn"}
    return replace(profile, attention_rates=rates or {"triton": profile.attention_rates["cudnn"]})


class _Step(NamedTuple):
    """The size of a step: windows, the keys they may see, rows of the state, rows that are unembedded and rows whose
    logits are returned."""

    phase: Phase
    lengths: tuple[int, ...]
    key_lens: tuple[int, ...]
    kv_rows: int
    masked: int
    logit_rows: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def rounded(self) -> _Step:
        """Rows, keys and rows of the state rounded up, mostly by at most an eighth, so that the plan serves others too."""
        keys = sum(self.key_lens)
        more = bucket(keys, least=FEWEST_KEYS) - keys
        rows = {"least": FEWEST_ROWS, "doubled": MOST_DOUBLED} if self.phase.rule else {}
        return self._replace(
            key_lens=(*self.key_lens[:-1], self.key_lens[-1] + more) if keys else (),
            kv_rows=bucket(self.kv_rows, least=FEWEST_KEYS), masked=bucket(self.masked, self.tokens, **rows),
            logit_rows=bucket(self.logit_rows, self.tokens),
        )  # fmt: skip

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for steps that one executor serves."""
        found = self.rounded()
        return (*found._replace(lengths=(len(self.lengths), self.tokens), key_lens=(sum(found.key_lens),)),)

    def request(self) -> Request:
        """The step as the planner takes it."""
        from mosaic.planner.planner import Request

        return Request(
            seq_lens=self.lengths, masked=self.masked or None, logit_rows=self.logit_rows, phase=self.phase,
            key_lens=self.key_lens, kv_rows=self.kv_rows if self.phase.cached else None,
        )  # fmt: skip


def _plan(planner: Planner, step: _Step, config: Settings = None) -> Plan:
    """Plan one step, or say why it does not fit."""
    request = step.request()
    settings = None if config is None else planner.space(request.kind).known(config)
    plan = planner.plan(request, config=settings, limit=not step.phase.rule and not step.phase.cached)
    if not plan.fits:
        longest = planner.max_context(request)
        seen = f", {format_tokens(sum(step.key_lens))} keys" if step.phase.cached else ""
        raise DoesNotFit(
            f"a step over {format_tokens(step.tokens)} tokens ({format_tokens(step.masked)} masked{seen}) needs "
            f"{format_bytes(plan.total_bytes)}, the budget is {format_bytes(plan.budget_bytes)}; the largest context "
            f"that fits is {format_tokens(longest)} tokens. Raise the budget, or call with fewer tokens.",
            needed_bytes=plan.total_bytes,
            available_bytes=plan.budget_bytes,
        )
    return plan


def _open_workspace(planner: Planner) -> Workspace:
    """The pages of the device and of the host that the plans are for, within the planner's budgets."""
    device = planner.device
    ledger = DeviceLedger(planner.budget_bytes, device.name)
    host_ledger = DeviceLedger(planner.host_budget_bytes, "host")
    if device.backend == "cpu":
        # Users hold views of outputs: one that outlives its memory reads zeros instead of ending the process.
        pool = PagePool(ledger, page_bytes=device.page_bytes, released="read")
        return Workspace(pool=pool, host=PagePool(host_ledger, page_bytes=device.page_bytes))
    from mosaic.runtime.cuda_driver import CudaDriver
    from mosaic.runtime.cuda_pool import open_pool
    from mosaic.runtime.host_pool import HostPool

    torch.cuda.init()  # type: ignore[no-untyped-call]
    driver = CudaDriver(torch.cuda.current_device())
    host = HostPool(driver, host_ledger, page_bytes=device.page_bytes)
    return Workspace(pool=open_pool(driver, ledger, page_bytes=device.page_bytes), host=host)


class CompiledModel:
    """A planned model. Call it with token ids; see `compile`, which makes it.

    One plan is made per shape of the input (tokens, sequences, masked rows rounded up by at most an eighth) and kept.
    The committed memory is always exactly that of the plan of the last call.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        state: Mapping[str, Tensor] | None = None,
        config: Settings = None,
        max_tokens: int | None = None,
        capture: bool = True,
        threads: int | None = None,
        debug: Debug = None,
        seed: int = 0,
    ) -> None:
        self._asked, self.debug, self._seed, self._capture = planner, debug, seed, capture
        self.model, self._config = planner.model, config
        self._bound: OrderedDict[tuple[Hashable, ...], tuple[Plan, Executor]] = OrderedDict()
        if threads is not None and planner.device.backend != "cpu":
            raise UsageError("threads are those of a CPU's operations: leave them out, or use device='cpu'.")
        self._threads = StepThreads(self.model.architecture.parameters, threads)
        longest = max_tokens or 1
        self._kv = KVMemory()
        self._settle_on(_plan(planner, _Step(FULL_STEP, (longest,), (), 0, longest, 0), config))
        self.workspace = _open_workspace(planner)
        self._on_cuda = planner.device.backend == "cuda"
        self._streams = shared_streams(torch.cuda.current_device()) if self._on_cuda else None
        for fixed in ("context", "library"):
            self.workspace.ledger.charge(fixed, self._current.components[fixed])
        self._adopted_bytes = 0
        self._adopted: dict[str, Tensor] = {}
        self._loaded: WeightMap | None = None
        self._handed: list[weakref.ref[Tensor]] = []
        try:
            self._weights = self._load() if state is None else self._adopt(state)
        except BaseException:
            self.workspace.close()
            raise

    def _settle_on(self, plan: Plan) -> None:
        """Plan from here on with the weights where this plan has them."""
        self._current = plan
        self._planner = self._asked.with_pinned({"stream": str(plan.config["stream"])})

    # --- weights --------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, Tensor]:
        """Fill the weights where the current plan has them, the device's and those that are streamed."""
        document, workspace = self._current.document, self.workspace
        streamed = streamed_bytes(document)
        # loading touches every page itself; faulting them in before would clear them for nothing
        sizes = {"weights": self._current.components["weights"], **({"host": streamed} if streamed else {})}
        workspace.resize_all(sizes, populate=False)
        views, self._loaded = weight_views(document, workspace), self._current.weights
        if self.model.path is None:
            staging = self._staging() if self._on_cuda and streamed else None
            fill_randomly(views, seed=self._seed, staging=staging)
        else:
            with Checkpoint(self.model.path) as checkpoint:
                load_weights(views, checkpoint, self.model.architecture)
        return views

    def _staging(self) -> Tensor:
        """Memory to draw in for the host: where the device's weights come later, if there is room, for a budget may leave
        none beside them; else where the first step's workspace comes."""
        pool = "weights" if self._current.components["weights"] >= PIECE_BYTES else "workspace"
        if pool == "workspace":
            self.workspace.resize(pool, PIECE_BYTES)
        return self.workspace.view(pool, 0, (PIECE_BYTES,), "uint8")

    def _move(self, plan: Plan) -> None:
        """Load the weights anew to where another plan wants them."""
        _log.info("weights move: %s of the model's layers are streamed from now on", plan.config["stream"])
        self._release_views()
        self._bound.clear()
        self._weights = {}
        self.workspace.resize_all({name: 0 for name in self.workspace.committed_bytes() if name != "state"})
        self._settle_on(plan)
        try:
            self._weights = self._load()
        except BaseException:
            self.close()
            raise

    def _adopt(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        document = self._current.document
        names = {tensor_rows(record["tensor"])[0] for record in document["buffers"] if record["tensor"] is not None}
        bare = {name for name in state if f"model.{name}" in names - state.keys()}
        named = {f"model.{name}" if name in bare else name: tensor for name, tensor in state.items()}
        where = torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")
        adopted = adopt_tensors(document, named, device=where, architecture=self.architecture)
        constants = {
            record["tensor"]: torch.empty(record["shape"], device=where)
            for record in document["buffers"]
            if (record["tensor"] or "").startswith("=")
        }
        fill_randomly(constants)
        self._adopted_bytes = self._current.components["weights"]
        self.workspace.ledger.charge("weights", self._adopted_bytes)
        self._adopted = {**adopted, **constants}
        return self._adopted

    def weights(self) -> Mapping[str, Tensor]:
        """Views of all weights by checkpoint name, stacks of experts as one; streamed ones are in host memory."""
        self._require_open()
        return MappingProxyType(self._weights)

    # --- calls ----------------------------------------------------------------------------------------------------

    @property
    def mask_token_id(self) -> int:
        """The id of [MASK]."""
        return self.model.architecture.mask_token_id

    def plan(self, tokens: Size | Iterable[Size], *, masked: Size | None = None, logit_rows: Size = 0) -> Plan:
        """Plan a step without running it.

        Parameters
        ----------
        tokens
            Context of one sequence, or the lengths of several: numbers, or like "128k".
        masked
            Rows to unembed; all tokens if not given.

        Raises
        ------
        DoesNotFit
            With the largest context that fits.
        """
        lengths = parse_lengths(tokens)
        rows = sum(lengths) if masked is None else parse_tokens(masked, what="masked")
        return self._make(_Step(FULL_STEP, lengths, (), 0, rows, parse_tokens(logit_rows, what="logit_rows", least=0)))[
            0
        ]

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
        packed, lengths = pack(token_ids, self.model.architecture.vocabulary)
        rows = rows_of("masked", packed == self.mask_token_id if masked is None else masked, lengths)
        chosen = rows_of("logits_for", logits_for, lengths) if logits_for is not None else rows[:0]
        executor = self._executor(_Step(FULL_STEP, lengths, (), 0, max(len(rows), 1), len(chosen)))
        inputs = executor.inputs
        inputs["token_ids"].copy_(packed)
        bounds = [0, *accumulate(lengths)]
        inputs["cu_seqlens"].copy_(torch.tensor(bounds, dtype=torch.int32))
        for start, end in pairwise(bounds):
            torch.arange(end - start, out=inputs["positions"][start:end])
        fill_rows(inputs["rows"], rows)
        if len(chosen):
            fill_rows(inputs["logit_rows"], chosen)
        with self._threads.in_force():
            executor.run()
        output = _output(executor.outputs, rows, len(chosen), self._current)
        if self._on_cuda:
            self._handed = [weakref.ref(t) for t in output.tensors()]
        return output

    # --- decoding -------------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> Architecture:
        """Sizes and special tokens of the model."""
        return self.model.architecture

    def open_sequence(self) -> KVSequence:
        """Start a sequence of keys and values, whose rows are part of every plan until it is closed."""
        self._require_open()
        return self._kv.open()

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step over requests of one phase, packed.

        Returns
        -------
        list of StepResult
            One a request, in order; on the host, the caller's to keep.

        Raises
        ------
        UsageError
            If the requests do not make one step.
        DoesNotFit
            If the step needs more than the budget.
        """
        self._require_open()
        started = perf_counter()
        packed = pack_step(requests, shifted=self.architecture.shifted)
        # planned for all keys that the sequences own: one plan, and one captured graph, while the window moves on
        executor = self._executor(
            _Step(packed.phase, packed.lengths, packed.owned, self._kv.rows, sum(packed.counts), 0)
        )
        inputs = executor.inputs
        for name, value in packed.inputs.items():
            fill_rows(inputs[name], value)
        with self._threads.in_force():
            executor.run()
        return self._results(executor, packed, started)

    def _results(self, executor: Executor, packed: PackedStep, started: float) -> list[StepResult]:
        """Copy the outcome to the host, and cut it up."""
        counts, found = list(packed.counts), executor.outputs
        if packed.phase.rule:
            outputs = [found[name][: sum(counts)].cpu() for name in ("token", "score", "committed", "chosen")]
        else:  # nothing is decided
            counts = [0] * len(counts)
            outputs = [torch.empty(0, dtype=kind) for kind in (torch.int64, torch.float32, torch.bool, torch.int64)]
        seconds = perf_counter() - started
        return [
            StepResult(
                token=token.clone(), score=score.clone(), committed=committed.bool(), chosen=chosen.clone(),
                plan=self._current, seconds=seconds,
            )
            for token, score, committed, chosen in zip(*(torch.split(x, counts) for x in outputs), strict=True)
        ]  # fmt: skip

    def check(self, shapes: Sequence[StepShape]) -> Plan:
        """Plan steps of these sizes, beside the sequences that are open, and give the plan that takes the most memory.

        Raises
        ------
        DoesNotFit
            If one of them does not fit.
        """
        self._require_open()
        owned = [shape.owned or shape.key_lens for shape in shapes]
        rows = self._kv.rows + max(map(sum, owned), default=0)
        steps = [
            _Step(shape.phase, shape.tokens, keys, rows, shape.rows, 0)
            for shape, keys in zip(shapes, owned, strict=True)
        ]
        return max((self._planned(step)[0] for step in steps), key=lambda plan: plan.total_bytes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerationConfig | None = None,
        *,
        streamer: Streamer | Sequence[Streamer] | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate an answer to every prompt; see `mosaic.decoding.generate`."""
        from mosaic.decoding import generate  # upwards, but only when called: the algorithms stand on the runtime

        return generate(self, prompts, config, streamer=streamer, on_step=on_step, **options)

    # --- plans and executors --------------------------------------------------------------------------------------

    def _make(self, step: _Step) -> tuple[Plan, bool]:
        """Plan with the weights where they are; where only that fits, with weights elsewhere (True)."""
        try:
            return _plan(self._planner, step, self._config), False
        except DoesNotFit:
            if self._config is not None or self._asked.pinned == self._planner.pinned:
                raise
            return _plan(self._asked, step), True

    def _executor(self, step: _Step) -> Executor:
        """Find or bind the executor of a step's size, and commit exactly its memory."""
        key = step.key
        found = self._bound.get(key)
        plan = self._plan_of(step) if found is None else found[0]
        self._commit(plan)
        self._current = plan
        if found is not None:
            self._bound.move_to_end(key)
            return found[1]
        executor = Executor(
            plan, self.workspace, tensors=self._adopted, weights=self._loaded, debug=self.debug, streams=self._streams,
            capture=self._capture and self._on_cuda and plan.predicted_step_ms <= CAPTURED_MS,
        )  # fmt: skip
        rounded = step.rounded().request().dims(self.architecture.block)
        if rounded.items() <= plan.document["dims"].items():
            self._bound[key] = (plan, executor)  # a plan for the exact numbers serves no other
        while len(self._bound) > _KEPT_EXECUTORS:
            self._bound.popitem(last=False)
        return executor

    def _commit(self, plan: Plan) -> None:
        sizes = {"workspace": plan.components["workspace"]}
        if plan.components["state"] or not self._kv.rows:
            sizes["state"] = plan.components["state"]
        if plan.document["host_bytes"]:
            sizes["host"] = plan.document["host_bytes"]
        workspace = self.workspace.range("workspace")
        if sizes["workspace"] < workspace.committed_bytes:
            self._release_views()
        self.workspace.resize_all(sizes)

    def _release_views(self) -> None:
        """Empty the outputs handed out last: on a device, one touch of memory that is gone ends the whole process."""
        for reference in self._handed:
            tensor = reference()
            if tensor is not None:
                tensor.set_()  # type: ignore[call-overload]
        self._handed = []

    def _planned(self, step: _Step) -> tuple[Plan, bool]:
        """Plan with rows and keys rounded up, to be used again; exactly, where only that fits."""
        try:
            return self._make(step.rounded())
        except DoesNotFit:
            return self._make(step)

    def _plan_of(self, step: _Step) -> Plan:
        """Plan a step that is to run: where only that fits, the weights move."""
        plan, moved = self._planned(step)
        if moved:
            self._move(plan)
        return plan

    # --- looking and leaving --------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes; planned are those of the last call's plan."""
        self._require_open()
        components = {name: self._current.components[name] for name in ("weights", "state", "workspace")}
        if self._current.document["host_bytes"]:
            components["host"] = self._current.document["host_bytes"]
        adopted = {"weights": self._adopted_bytes} if self._adopted_bytes else {}
        return MemoryReport(
            planned=components,
            committed={**dict.fromkeys(components, 0), **self.workspace.committed_bytes(), **adopted},
            resident={**dict.fromkeys(components, 0), **self.workspace.resident_bytes(), **adopted},
            budget_bytes=self._planner.budget_bytes,
            in_use=_in_use() if self._on_cuda else None,
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


# --- outputs ----------------------------------------------------------------------------------------------------------


def _output(outputs: Mapping[str, Tensor], rows: Tensor, chosen: int, plan: Plan) -> StepOutput:
    names: Iterable[str] = ("confidence", "maximum", "second", "logsumexp", "entropy")
    return StepOutput(
        rows=rows,
        token_ids=outputs["token"][: len(rows)],
        logits=outputs["logits"][:chosen] if chosen else None,
        plan=plan,
        **{name: outputs[name][: len(rows)] for name in names},
    )


def _in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
