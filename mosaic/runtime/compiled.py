"""`compile`: a model whose every byte is planned, as an object to call. Plans per shape, binds once, then only runs.

Steps are sized and planned by `step_plans`, weights kept by `weight_store`; threads take `turns`.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn

from mosaic.errors import RuntimeMemoryError, UsageError
from mosaic.models.parts import LOGITS
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.step import KV, StepSize
from mosaic.runtime.batch import Rows, TokenIds, pack, rows_of
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.outputs import MemoryReport, StepOutput, output_of
from mosaic.runtime.packing import fill, pack_step
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.state_rows import OwnedRows, RowTable
from mosaic.runtime.step_memory import StepMemory
from mosaic.runtime.step_plans import Settings, StepPlans
from mosaic.runtime.steps import StepRequest, StepResult
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.threads import StepThreads
from mosaic.runtime.turns import Turns
from mosaic.runtime.weight_store import WeightStore
from mosaic.runtime.weights import save_checkpoint
from mosaic.runtime.workspace import Workspace
from mosaic.units import Size, parse_lengths, parse_tokens

if TYPE_CHECKING:
    from mosaic.decoding import Generation, GenerationConfig, Prompt, Session, Streamer
    from mosaic.decoding.streaming import OnStep
    from mosaic.devices import Device
    from mosaic.models import Model
    from mosaic.models.architecture import Architecture
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, Progress

__all__ = ["CompiledModel", "MemoryReport", "StepOutput", "compile"]

_KEPT_EXECUTORS: Final = 16
CAPTURED_MS: Final = 500.0
"""Longest predicted step that is captured into a CUDA graph: launches of longer ones hide behind their kernels."""
OLDEST: Final = (8, 0)
"""Compute capability of the oldest cards that every kernel is compiled and tested for."""
_log = logging.getLogger(__name__)


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
    progress: Progress | None = None,
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
        Take these settings in every plan instead of searching, such as {"attention": "heads", "heads": 4}; each kind of
        step takes those that it has. A call's own `config` comes before it.
    capture
        Replay short steps from CUDA graphs.
    threads
        On a CPU, the threads that operations of a step may use: PyTorch is set to them for its time only. By the model's
        size if not given (`StepThreads`), at most as many as PyTorch is set to.
    debug
        "poison" fills every buffer with NaN before and after its lifetime, and makes it an error to change a weight.
    seed
        For random weights.
    progress
        Told what is compiled, which takes seconds the first time; see `Planner`.

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
    planner = _planner(
        source, device, dtype, budget, host_budget, adopts=isinstance(model, nn.Module), progress=progress
    )
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
    progress: Progress | None,
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
        pinned={"stream": "none"} if adopts else None, progress=progress,
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

    One plan is made per configuration and shape of the input (tokens, sequences, masked rows rounded up by at most an
    eighth) and kept. Committed memory is the most that calls have needed, so that sizes which alternate map nothing. What
    only earlier calls needed goes back when the last open sequence is closed, on `trim`, and wherever a call would
    exceed the budget otherwise: what fits by its plan runs.

    Threads may share a model: it serves one call at a time, a generation being one call, and others wait.

    Attributes
    ----------
    model
        The model's description.
    workspace
        Its memory.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        state: Mapping[str, Tensor] | None = None,
        config: Settings | None = None,
        max_tokens: int | None = None,
        capture: bool = True,
        threads: int | None = None,
        debug: Debug = None,
        seed: int = 0,
    ) -> None:
        if threads is not None and planner.device.backend != "cpu":
            raise UsageError("threads are those of a CPU's operations: leave them out, or use device='cpu'.")
        self.model, self.debug, self._capture = planner.model, debug, capture
        self._threads = StepThreads(self.model.architecture.parameters, threads)
        self._plans = StepPlans(planner, config)
        longest = 1 if max_tokens is None else max_tokens
        self._current = self._plans.exact(StepSize(windows=(longest,), rows=longest))
        self.workspace = _open_workspace(planner)
        self._on_cuda = planner.device.backend == "cuda"
        self._turns = Turns(on_cuda=self._on_cuda)
        self._kv = RowTable("kv", self._turns, drained=self._trim)
        self._memory = StepMemory(self.workspace, [self._kv], self._release_views)
        self._bound: OrderedDict[Hashable, tuple[Plan, Executor]] = OrderedDict()
        self._handed: list[weakref.ref[Tensor]] = []
        self._warned = self._shown = False
        where = torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")
        self._streams = shared_streams(torch.cuda.current_device()) if self._on_cuda else None
        self._store = WeightStore(planner.model, self.workspace, where, seed=seed)
        for fixed in ("context", "library"):
            self.workspace.ledger.charge(fixed, self._current.components[fixed])
        try:
            self._plans.settle_on(self._current)
            if state is None:
                self._store.load(self._current)
            else:
                self._store.adopt(self._current, state)
        except BaseException:
            self.workspace.close()
            raise

    # --- calls ----------------------------------------------------------------------------------------------------

    @property
    def mask_token_id(self) -> int:
        """The id of [MASK]."""
        return self.model.architecture.mask_token_id

    @property
    def architecture(self) -> Architecture:
        """Sizes and special tokens of the model."""
        return self.model.architecture

    @property
    def planner(self) -> Planner:
        """The planner of its steps, with the weights where they are: for the configurations that a step may take."""
        return self._plans.planner

    def exclusive(self) -> AbstractContextManager[object]:
        """Keep other threads out until the block is left: what was planned stays true, and outputs are views.

        Examples
        --------
        >>> config = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
        ...           "embedding_size": 64, "mask_token_id": 63, "torch_dtype": "float32"}
        >>> with compile(config) as model, model.exclusive():
        ...     first = model(torch.tensor([1, 63])).clone()
        ...     bool((model(torch.tensor([1, 63])).confidence == first.confidence).all())
        True
        """
        return self._turns

    def plan(
        self,
        tokens: Size | Iterable[Size],
        *,
        masked: Size | None = None,
        logit_rows: Size = 0,
        config: Settings | None = None,
    ) -> Plan:
        """Plan a step without running it, beside the sequences that are open.

        Parameters
        ----------
        tokens
            Context of one sequence, or the lengths of several: numbers, or like "128k".
        masked
            Rows to unembed; all tokens if not given.
        config
            As for a call.

        Raises
        ------
        DoesNotFit
            With the largest context that fits.
        """
        lengths = parse_lengths(tokens)
        rows = sum(lengths) if masked is None else parse_tokens(masked, what="masked")
        returned = parse_tokens(logit_rows, what="logit_rows", least=0)
        with self._turn():
            step = StepSize(windows=lengths, rows=rows, logit_rows=returned, states={KV: self._kv.rows})
            return self._plans.exact(step, config)

    def __call__(
        self,
        token_ids: TokenIds,
        masked: Rows = None,
        *,
        logits_for: Rows = None,
        config: Settings | None = None,
    ) -> StepOutput:
        """Run one denoising step.

        Parameters
        ----------
        token_ids
            Integers: [S] one sequence, [B, S] a batch, or a list of [S_i] of different lengths.
        masked
            The rows to predict: a boolean mask in the form of `token_ids`, or int64 row numbers of the packed batch
            (sequences one after another). Where `token_ids` is [MASK], if not given.
        logits_for
            Rows whose logits are returned as well, in the same forms. A row is the position that it predicts: where
            `architecture.shifted`, row i is the official model's row i - 1, and row 0 its row 0.
        config
            Run this step in a configuration of its own instead of the one that the planner finds, or `compile` was given:
            rows per chunk by knob, an option by choice, such as {"attention": "heads", "heads": 4}. What is not named is
            off, or the first option. Weights stay where they are unless 'stream' says otherwise: then they are loaded
            anew, and stay there. The result's `plan.config` is what was in force.

        Returns
        -------
        StepOutput
            Valid until the next call.

        Raises
        ------
        UsageError
            If ids, masks or rows do not fit together, or `config` names a knob or an option that there is not.
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._turn():
            packed, lengths = pack(token_ids, self.architecture.vocabulary)
            rows = rows_of("masked", packed == self.mask_token_id if masked is None else masked, lengths)
            chosen = rows_of("logits_for", logits_for, lengths) if logits_for is not None else rows[:0]
            self._warn_beyond(max(lengths))
            request = StepRequest(
                phase=FULL_STEP if not len(chosen) else Phase(logits=LOGITS), token_ids=packed, lengths=lengths, rows=rows,
                current=rows[:0], logit_rows=chosen,
            )  # fmt: skip
            step = pack_step([request], self.architecture, states={KV: self._kv.rows})
            executor = self._executor(step.size, config)
            fill(executor.inputs, step)
            with self._threads.in_force():
                executor.run()
            return self._handed_out(output_of(executor.outputs, rows, len(chosen), self._current))

    def _handed_out(self, output: StepOutput) -> StepOutput:
        """Views where nobody else can overwrite them before the caller's next call, else copies."""
        if not self._turns.is_alone:
            return output.clone()
        if self._on_cuda:
            self._handed = [weakref.ref(t) for t in output.tensors()]
        return output

    def _warn_beyond(self, positions: int) -> None:
        """Say once that a step goes beyond the positions that the model was made for."""
        most = self.architecture.max_context
        if most and positions > most and not self._warned:
            self._warned = True
            _log.warning(
                "%s: a step over %s positions, the model's own context is %s: what it predicts beyond is untrained",
                self.model.name, f"{positions:,}", f"{most:,}",
            )  # fmt: skip

    # --- decoding -------------------------------------------------------------------------------------------------

    def open_sequence(self) -> OwnedRows:
        """Start a sequence of keys and values, whose rows are part of every plan until it is closed."""
        with self._turn():
            return self._kv.open()

    @property
    def kv_rows(self) -> int:
        """Rows of the state that open sequences hold."""
        return self._kv.rows

    def step(self, requests: Sequence[StepRequest], *, config: Settings | None = None) -> list[StepResult]:
        """Run one step over requests of one phase, packed.

        Parameters
        ----------
        config
            As for a call; the knobs and options are those of the phase.

        Returns
        -------
        list of StepResult
            One a request, in order; on the host, the caller's to keep.

        Raises
        ------
        UsageError
            If the requests do not make one step, or `config` names what its phase does not have.
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._turn():
            started = perf_counter()
            packed = pack_step(requests, self.architecture, states={KV: self._kv.rows})
            self._warn_beyond(max(request.start + request.token_ids.numel() for request in requests))
            executor = self._executor(packed.size, config)
            fill(executor.inputs, packed)
            with self._threads.in_force():
                executor.run()
            return self._results(executor, requests, started)

    def _results(self, executor: Executor, requests: Sequence[StepRequest], started: float) -> list[StepResult]:
        """Copy the outcome to the host, and cut it up."""
        counts, found = [request.rows.numel() for request in requests], executor.outputs
        if requests[0].phase.commit is not None:
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

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[str, int] | None = None) -> Plan:
        """Plan steps of these sizes, beside the sequences that are open, and give the plan that takes the most memory.

        Parameters
        ----------
        more
            Rows of each state that will be reserved by then, besides those that open sequences have; those of the step
            that owns the most, if not given.

        Raises
        ------
        DoesNotFit
            If one of them does not fit.
        """
        with self._turn():
            self.architecture.rotary.check_kept(max((keys for size in sizes for keys in size.keys), default=0))
            rows = max((sum(size.owned) for size in sizes), default=0) if more is None else more.get(KV, 0)
            states = {KV: self._kv.rows + rows}
            plans = [self._plans.plan(size.beside(states)) for size in sizes]
            return max(plans, key=lambda plan: plan.total_bytes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerationConfig | None = None,
        *,
        streamer: Streamer | Sequence[Streamer] | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate an answer to every prompt; see `mosaic.decoding.generate`. Calls of other threads wait for its end."""
        from mosaic.decoding import generate  # upwards, but only when called: the algorithms stand on the runtime

        try:
            return generate(self, prompts, config, streamer=streamer, on_step=on_step, **options)
        finally:
            with self._turns:
                self._trim()

    def session(self) -> Session:
        """Open a session: requests that come and go, advanced by steps that they share; see `mosaic.decoding.Session`."""
        from mosaic.decoding import Session

        return Session(self)

    # --- plans and executors --------------------------------------------------------------------------------------

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, in the order of their last use."""
        return tuple(executor for _, executor in self._bound.values())

    def _executor(self, step: StepSize, config: Settings | None) -> Executor:
        """Find or bind the executor of a step's size and configuration, and commit its memory."""
        key = step.key, None if config is None else tuple(sorted((name, repr(value)) for name, value in config.items()))
        found = self._bound.get(key)
        plan = self._plans.plan(step, config) if found is None else found[0]
        if not self._store.serves(plan):
            self._move(plan)
        self._memory.commit(plan)
        self._current = plan
        if found is not None:
            self._bound.move_to_end(key)
            return found[1]
        executor = Executor(
            plan, self.workspace, tensors=self._store.adopted, weights=self._store.places, debug=self.debug,
            streams=self._streams, capture=self._capture and self._on_cuda and plan.predicted_step_ms <= CAPTURED_MS,
        )  # fmt: skip
        rounded = step.rounded().dims(self.architecture)
        if rounded.items() <= plan.document["dims"].items():
            self._bound[key] = (plan, executor)  # a plan for the exact numbers serves no other
        while len(self._bound) > _KEPT_EXECUTORS:
            self._bound.popitem(last=False)
        return executor

    def _move(self, plan: Plan) -> None:
        """Load the weights anew to where another plan wants them."""
        lost = "; what was written into `weights()` is lost" if self._shown else ""
        say = _log.warning if self._shown else _log.info
        say("weights move: %s is streamed from now on, loaded anew%s", plan.config["stream"], lost)
        self._shown = False
        self._release_views()
        self._bound.clear()
        self._store.forget()
        self.workspace.resize_all(
            {name: 0 for name in self.workspace.committed_bytes() if not name.startswith("state/")}
        )
        self._current, self._memory.exact = plan, True
        self._plans.settle_on(plan)
        try:
            self._store.load(plan)
        except BaseException:
            self.close()
            raise

    def _trim(self) -> None:
        """Give back what neither the last call nor open sequences need; the workspace later if outputs may be in it."""
        self._memory.trim(self._current, states_alone=bool(self._handed))

    def _release_views(self) -> None:
        """Empty the outputs handed out last: on a device, one touch of memory that is gone ends the whole process."""
        for reference in self._handed:
            tensor = reference()
            if tensor is not None:
                tensor.set_()  # type: ignore[call-overload]
        self._handed = []

    # --- looking and leaving --------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        """Views of all weights by checkpoint name, stacks of experts as one; streamed ones are in host memory.

        What is written into them is what the next step computes with, until weights move: then they come from where they
        came from before. `save` the model and compile the directory to keep it.
        """
        with self._turn():
            self._shown = True
            return MappingProxyType(self._store.views)

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes; planned are those of the last call's plan."""
        with self._turn():
            adopted = {"weights": self._store.adopted_bytes} if self._store.adopted_bytes else {}
            planned, committed = self._current.pools, self.workspace.committed_bytes()
            device = ("weights", "workspace", *(name for name in {**planned, **committed} if name.startswith("state/")))
            pools = dict.fromkeys((*device, "host") if planned["host"] else device, 0)
            return MemoryReport(
                planned={name: planned.get(name, 0) for name in pools},
                committed={**pools, **committed, **adopted},
                resident={**pools, **self.workspace.resident_bytes(), **adopted},
                budget_bytes=self.planner.budget_bytes,
                in_use=_in_use() if self._on_cuda else None,
            )

    def trim(self) -> None:
        """Give back what only earlier calls needed, and pages of the state in which no open sequence has a row.

        It happens by itself when the last open sequence is closed, and wherever a call would exceed the budget otherwise.
        Outputs of the last call stay valid on the CPU; on a CUDA device they are emptied, as by a next call.
        """
        with self._turn():
            self._release_views()
            self._trim()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint directory that `compile` reads: model.safetensors and config.json."""
        with self._turn():
            config = {**self.model.config, "torch_dtype": self.architecture.dtype}
            save_checkpoint(path, self._store.views, config)

    def close(self) -> None:
        """Give all memory back. Closing twice is fine; calling the model afterwards is an error."""
        with self._turns:
            self._bound.clear()
            self._store.forget()
            self.workspace.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the model to be free, and make sure that it is open."""
        with self._turns:
            if not self._store.views:
                raise RuntimeMemoryError("the model is closed: compile it again.")
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
