"""A compiled model: call it with token ids.

The user's view of an `Engine`, which has the plans, weights, states and executors. A call holds the engine's turn.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.parts import KV, LOGITS
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.state import State, rows_by_name
from mosaic.models.step import StepSize, most_rows
from mosaic.registrar.schemes.plain import PLAIN
from mosaic.runtime.batch import Rows, TokenIds, pack, rows_of
from mosaic.runtime.engine import Engine
from mosaic.runtime.face import Face
from mosaic.runtime.host_copy import HostCopy
from mosaic.runtime.outputs import MemoryReport, StepOutput, output_of
from mosaic.runtime.packing import PackedStep, pack_step
from mosaic.runtime.recent import Recent
from mosaic.runtime.request_table import RequestTable
from mosaic.runtime.results import results_of
from mosaic.runtime.state_rows import OwnedRows
from mosaic.runtime.step_plans import Settings
from mosaic.runtime.steps import StepRequest, StepResult
from mosaic.runtime.weights import save_checkpoint
from mosaic.units import Size, parse_lengths, parse_tokens

if TYPE_CHECKING:
    from mosaic.decoding import Generation, GenerationConfig, Prompt, Session, Streamer
    from mosaic.decoding.streaming import OnStep
    from mosaic.models.architecture import Architecture
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.runtime.divided import Divided
    from mosaic.runtime.sharing import SharedSizes

__all__ = ["CompiledModel", "MemoryReport", "StepOutput"]

KEPT_PACKED: Final = 4
"""Packed steps of calls that are kept."""
_log = logging.getLogger(__name__)


class CompiledModel(Face):
    """A planned model. Call it with token ids; see `compile`, which makes it.

    One plan is made per configuration and rounded input size (tokens, sequences, masked rows, rounded up by at most an
    eighth) and kept. The committed memory is the largest that calls have needed, so a repeated size maps nothing.
    Memory that only earlier calls needed is given back by `trim`, and by a call that would otherwise exceed the budget:
    every step whose plan fits runs.

    Threads may share a model: it serves one call at a time, and a whole generation is one call.

    Attributes
    ----------
    model
        The model's description.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.model = engine.planner.model
        self._untrained = self.architecture.max_context or inf  # a step beyond this context is warned about
        self._shapes = Recent[Hashable, PackedStep](
            KEPT_PACKED
        )  # of calls: others of one bring other ids and rows alone
        self._copy = HostCopy()

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
    def asynchronous(self) -> bool:
        """Whether steps run asynchronously: True on a device, False on a CPU."""
        return self._engine.plans.planner.device.backend != "cpu"

    @property
    def planner(self) -> Planner:
        """The planner of the model's steps, with the weights where they are."""
        return self._engine.plans.planner

    def exclusive(self) -> AbstractContextManager[object]:
        """Keep other threads out until the block is left: plans stay valid, and outputs are views instead of copies.

        Examples
        --------
        >>> import mosaic, torch
        >>> config = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
        ...           "embedding_size": 64, "mask_token_id": 63, "torch_dtype": "float32"}
        >>> with mosaic.compile(config) as model, model.exclusive():
        ...     first = model(torch.tensor([1, 63])).clone()
        ...     bool((model(torch.tensor([1, 63])).confidence == first.confidence).all())
        True
        """
        return self._engine.turns.whole()

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
        with self._engine.turn():
            step = StepSize(windows=lengths, rows=rows, logit_rows=returned, states=self._engine.states)
            return self._engine.plans.exact(step, config)

    def __call__(
        self, token_ids: TokenIds, masked: Rows = None, *, logits_for: Rows = None, config: Settings | None = None
    ) -> StepOutput:
        """Run one denoising step.

        Parameters
        ----------
        token_ids
            Integers: [S] one sequence, [B, S] a batch, or a list of [S_i] of different lengths.
        masked
            The rows to predict: a boolean mask of the form of `token_ids`, or int64 row numbers of the packed batch
            (sequences one after another). If not given, the rows whose token is [MASK].
        logits_for
            Rows whose logits are returned as well, in the same forms. A row is the position that it predicts: where
            `architecture.shifted`, row i is the official model's row i - 1, and row 0 its row 0.
        config
            Run this step in this configuration instead of the planner's or `compile`'s: rows per chunk by knob, an
            option by choice, such as {"attention": "heads", "heads": 4}. A knob that is not named is off, a choice
            takes its first option. Weights stay where they are unless 'stream' is named: then they are loaded again and
            stay in the new place. The result's `plan.config` is the configuration of the step.

        Returns
        -------
        StepOutput
            Valid until the next call.

        Raises
        ------
        UsageError
            If the shapes of ids, masks or rows disagree, or `config` names an unknown knob or option.
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._engine.turn():
            packed, lengths = pack(token_ids, self.architecture.vocabulary)
            rows = rows_of("masked", packed == self.mask_token_id if masked is None else masked, lengths)
            chosen = rows_of("logits_for", logits_for, lengths) if logits_for is not None else rows[:0]
            self._warn_beyond(max(lengths))
            request = StepRequest(
                phase=FULL_STEP if not len(chosen) else Phase(logits=LOGITS), token_ids=packed, lengths=lengths, rows=rows,
                current=rows[:0], logit_rows=chosen,
            )  # fmt: skip
            shape = self._engine.changes, lengths, len(rows), len(chosen)
            step = self._shapes.find(shape, lambda: pack_step([request], self.architecture, states=self._engine.states))
            given = {"token_ids": packed, "rows": rows, **({"logit_rows": chosen} if len(chosen) else {})}
            ran = self._engine.run(step.with_inputs(given), config)
            output = output_of(ran.outputs, rows, len(chosen), ran.plan)
            return output if self._engine.lend(output.tensors()) else output.clone()

    def _warn_beyond(self, positions: int) -> None:
        """Warn once when a step is longer than the context that the model was trained for."""
        most = self._untrained
        if positions > most:
            self._untrained = inf
            _log.warning(
                "%s: a step over %s positions, the model's own context is %s: what it predicts beyond is untrained",
                self.model.name, f"{positions:,}", f"{most:,}",
            )  # fmt: skip

    # --- decoding -------------------------------------------------------------------------------------------------

    def open_sequence(self) -> OwnedRows:
        """Open a sequence of keys and values: an owner of rows of the state `kv`."""
        return self.open_rows(KV)

    def open_rows(self, state: State, owner: Hashable = None) -> OwnedRows:
        """Open an owner of rows of a state. The rows are part of every plan until the owner is closed.

        Parameters
        ----------
        state
            A state of a phase's part; `KV` for keys and values.
        owner
            A label for reports: a request, a layer, a group of heads.

        Raises
        ------
        UsageError
            If rows of another state of the same name have been opened.
        """
        with self._engine.turn():
            return self._engine.table(state).open(owner)

    def sharing(self) -> SharedSizes:
        """Return a counter of the steps that the live requests of one session may share (`Shared`)."""
        return self._engine.sharing()

    def request_table(self) -> RequestTable:
        """Return a table for the requests of a session."""
        return RequestTable(self._engine)

    @property
    def state_rows(self) -> Mapping[str, int]:
        """Rows in use of each state, by name; states without rows are left out."""
        return rows_by_name(self._engine.states)

    def step(self, requests: Sequence[StepRequest], *, config: Settings | None = None) -> list[StepResult]:
        """Run one step over requests of one phase, packed.

        Parameters
        ----------
        config
            As for a call; the knobs and options are those of the phase.

        Returns
        -------
        list of StepResult
            One per request, in order: host memory that the caller owns.

        Raises
        ------
        UsageError
            If the requests cannot share a step, or `config` names a setting that the phase does not have.
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._engine.turn():
            started, asked = perf_counter(), tuple(requests)
            packed = pack_step(asked, self.architecture, states=self._engine.states)
            self._warn_beyond(max(request.start + request.token_ids.numel() for request in asked))
            ran = self._engine.run(packed, config)
            names = [name for name in asked[0].phase.results if name in ran.outputs]
            found = self._copy.start([ran.outputs[name] for name in names]).wait() if names else []
            return results_of(asked, dict(zip(names, found, strict=True)), ran.plan, perf_counter() - started)

    def predicted_ms(self, requests: Sequence[StepRequest]) -> float:
        """Return the predicted time of a step over these requests, in milliseconds."""
        with self._engine.turn():
            return self._engine.predicted_ms(pack_step(tuple(requests), self.architecture, states=self._engine.states))

    def divide(self, requests: Sequence[StepRequest], part_ms: float) -> Divided | None:
        """Begin a step as `step` runs it, in parts of so many predicted milliseconds, or one launch: other steps run in between.

        Returns
        -------
        Divided or None
            None if it is not longer than a part, or there is no memory for it beside what other steps have.
        """
        with self._engine.turn():
            asked = tuple(requests)
            packed = pack_step(asked, self.architecture, states=self._engine.states)
            return self._engine.divide(packed, part_ms, [*asked[0].phase.results], partial(results_of, asked))

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Plan:
        """Plan steps of these sizes, beside the rows that are open, and return the plan that takes the most memory.

        Parameters
        ----------
        more
            Rows of each state that will be reserved in addition to the reserved ones. If not given, the most that any
            of the steps has.

        Raises
        ------
        DoesNotFit
            If one of them does not fit.
        """
        with self._engine.turn():
            states, scattered = self._states_of(sizes, more), self._engine.scattered(sizes)
            self._engine.plans.require(scattered, states)
            graphs = [graph for size in scattered for graph in size.graphs]
            plans = [self._engine.plans.plan(graph.beside(states)) for graph in graphs]
            return max(plans, key=lambda plan: plan.total_bytes)

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        """Return whether steps of these sizes fit, by the peak formula, without a plan; `check` says why not."""
        with self._engine.turn():
            return self._engine.plans.fits(self._engine.scattered(sizes), self._states_of(sizes, more))

    def pays(self, size: StepSize) -> bool:
        """Return whether a cut step is predicted faster than the same step whole, if it keeps few rows."""
        with self._engine.turn():
            return self._engine.plans.pays(size)

    def place(self, steps: Mapping[str, StepSize], times: Mapping[str, int]) -> None:
        """Load the weights again where these steps, each run so many `times`, take the least predicted time in all, if it pays and
        nobody has rows."""
        with self._engine.turn():
            self._engine.place(steps, times)

    def _states_of(self, sizes: Sequence[StepSize], more: Mapping[State, int] | None) -> dict[State, int]:
        """Rows of each state during steps of these sizes, after `more` are reserved."""
        return self._engine.states_with(most_rows(sizes) if more is None else more)

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
        from mosaic.decoding import generate  # imported late: decoding is the layer above the runtime

        return generate(self, prompts, config, streamer=streamer, on_step=on_step, **options)

    def session(self, **options: Any) -> Session:
        """Open a session: requests that come and go, advanced by steps that they share. `options` as for
        `mosaic.decoding.Session`."""
        from mosaic.decoding import Session

        return Session(self, **options)

    # --- looking and leaving --------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        """Return views of all weights by checkpoint name, stacks of experts as one; streamed ones are in host memory.

        The next step computes with what is written into the views, until weights move: moving loads them from their
        source again. To keep changes, `save` the model and compile the directory.
        """
        with self._engine.turn():
            return MappingProxyType(self._engine.weights.show())

    def save(self, path: str | Path) -> None:
        """Write model.safetensors and config.json for `compile` to read; a model in a scheme cannot be saved."""
        if (scheme := self.architecture.scheme) is not PLAIN:
            raise UsageError(
                f"'{scheme.name}' stores the model's matrices: save a model that is compiled without the scheme."
            )
        with self._engine.turn():
            config = {**self.model.config, "torch_dtype": self.architecture.dtype}
            save_checkpoint(path, self._engine.weights.views, config)

    def close(self) -> None:
        """Give all memory back. Closing twice is fine; calling the model afterwards is an error."""
        with self._engine.turns:
            super().close()
            self._copy = HostCopy()
