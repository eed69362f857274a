"""The canvas of one request: its tokens, which of them are decided, and the steps that it asks for.

An algorithm is a generator over a canvas: it yields a `StepRequest` and gets the `StepResult`. It sees tokens, rows and
scores, never logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.decoding.noise import row_keys
from mosaic.errors import UsageError
from mosaic.kernels.shared.sampling import uniforms
from mosaic.models.parts import KEPT, NO_HEAD, NUCLEUS, SAMPLE, STATISTICS, Head
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.runtime.steps import StateRows, StepRequest, StepResult

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture
    from mosaic.models.state import State

__all__ = ["COMMIT", "Canvas", "Decision", "Sampling", "Shapes", "Steps", "cached_shape", "whole_blocks"]

Steps: TypeAlias = Generator[StepRequest, StepResult, None]
Shapes: TypeAlias = Sequence[StepSize | None]
"""The largest steps of one request; entry i of all requests of a batch is packed together."""
NOTHING_BEGUN: Final[Mapping[State, StateRows]] = MappingProxyType({})
COMMIT: Final = Phase(cache=KEPT, head=NO_HEAD)
"""Fill the cache, nothing else; a long one is a prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which head draws the tokens of an algorithm, and the settings that go with it."""

    head: Head
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, config: GenerationConfig, *, scaled: bool, cuts_greedy: bool = False) -> Sampling:
        """Choose the head that computes no more than is needed.

        Parameters
        ----------
        scaled
            Whether a token's confidence is its probability at the temperature; otherwise at temperature 1.
        cuts_greedy
            Whether top-p and top-k apply at temperature 0 too, to the confidence.
        """
        cut = (config.top_p or 1.0) < 1.0 or bool(config.top_k)
        drawn = config.temperature > 0
        if (cut and (drawn or cuts_greedy)) or (drawn and scaled and config.temperature != 1.0):
            return cls(head=NUCLEUS, temperature=config.temperature, top_p=config.top_p or 1.0, top_k=config.top_k or 0)
        return cls(head=SAMPLE, temperature=config.temperature) if drawn else cls(head=STATISTICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a step decided: positions int64 [n], tokens int64 [n], and float32 [n], the scores they were chosen by."""

    positions: Tensor
    token_ids: Tensor
    confidence: Tensor

    @classmethod
    def nothing(cls) -> Decision:
        """Return that of a step that decides nothing."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(positions=none, token_ids=none.clone(), confidence=torch.empty(0))


@dataclass(slots=True, kw_only=True)
class Canvas:
    """Prompt and answer of one request.

    Parameters
    ----------
    prompt
        int64 [P].
    config
        Resolved.
    architecture
        The model's.
    request
        The number that stands for this request in random keys.
    length
        Positions of the canvas, at least P + `gen_length`: whole blocks where the model attends by blocks.
    demand
        Rows of each state that the request has until its end, the keys and values of the canvas among them.
    open_state
        Starts the request's rows of a state.

    Attributes
    ----------
    tokens
        int64 [N], the mask where nothing is decided.
    masked
        bool [N], what is still to be decided. A model may decide for the mask token itself: that position is done.
    confidence
        float32 [N], the score that a token was committed by; 0 where masked, 1 in the prompt.
    token_array, mask_array, confidence_array
        `tokens`, `masked` and `confidence` as NumPy arrays of the same memory: NumPy handles a few elements in a fraction of
        PyTorch's time, and the device waits meanwhile.
    step
        Denoising steps so far, with scheduled steps that decide nothing and are not run.
    block
        The block being decoded, counted from 0.
    settled
        Tokens below never change; None: whatever is decided is settled (no editing).
    last
        What the last step decided.
    """

    prompt: Tensor
    config: GenerationConfig
    architecture: Architecture
    request: int
    length: int
    demand: Mapping[State, int]
    open_state: Callable[[State], StateRows]
    tokens: Tensor = field(init=False)
    masked: Tensor = field(init=False)
    confidence: Tensor = field(init=False)
    token_array: NDArray[np.int64] = field(init=False)
    mask_array: NDArray[np.bool_] = field(init=False)
    confidence_array: NDArray[np.float32] = field(init=False)
    step: int = 0
    block: int = 0
    settled: int | None = None
    last: Decision | None = None
    _held: dict[State, StateRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = torch.full((self.length,), self.architecture.mask_token_id)
        self.tokens[: self.prompt_len] = self.prompt
        self.masked = torch.ones(self.length, dtype=torch.bool)
        self.masked[: self.prompt_len] = False
        self.confidence = (~self.masked).float()
        self.token_array, self.mask_array = self.tokens.numpy(), self.masked.numpy()
        self.confidence_array = self.confidence.numpy()

    # --- what is where ------------------------------------------------------------------------------------------------

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.numel()

    @property
    def end(self) -> int:
        """Where the answer ends: the canvas may be longer, by what fills its last block."""
        return self.prompt_len + self.config.gen_length

    def open_rows(self, start: int, end: int) -> Tensor:
        """Return the positions in [start, end) that are still to be decided, int64."""
        return torch.from_numpy(self.mask_array[start:end].nonzero()[0] + start)

    @property
    def final(self) -> int:
        """Tokens at positions below this one are decided for good, and text that can be shown."""
        masked = self.mask_array[self.prompt_len : self.end]
        first = int(masked.argmax())
        decided = self.prompt_len + first if masked[first] else self.end
        return decided if self.settled is None else min(decided, max(self.settled, self.prompt_len))

    @property
    def eos(self) -> int | None:
        """The position of the first end-of-sequence token in the text that is final, where generation stops at it."""
        if not self.config.stop_at_eos:
            return None
        ends = np.isin(self.token_array[self.prompt_len : self.final], self.architecture.eos_token_ids).nonzero()[0]
        return self.prompt_len + int(ends[0]) if len(ends) else None

    @property
    def finished(self) -> bool:
        """Whether nothing that is left to decide belongs to the answer."""
        return self.final == self.end or self.eos is not None

    # --- steps --------------------------------------------------------------------------------------------------------

    def rows_of(self, state: State) -> StateRows:
        """Return the request's rows of a state, which its largest steps name.

        Raises
        ------
        UsageError
            If they do not, as no plan has counted them.
        """
        self.reserve()
        if state not in self._held:
            known = ", ".join(held.name for held in self._held) or "none"
            raise UsageError(
                f"the algorithm asks for the state '{state.name}', its largest steps have {known}: give the state and its "
                "rows to the sizes that `shapes` returns."
            )
        return self._held[state]

    def reserve(self, begun: Mapping[State, StateRows] = NOTHING_BEGUN) -> None:
        """Take the rows of all states, once: so one plan and one captured graph serve every step of a kind. Those of some are
        `begun`: the first of them are there."""
        for state, count in () if self._held else self.demand.items():
            self._held[state] = begun.get(state) or self.open_state(state)
            self._held[state].reserve(count)

    @property
    def held(self) -> Collection[StateRows]:
        """The request's rows of all states."""
        return self._held.values()

    def close(self) -> None:
        """Give all rows back."""
        while self._held:
            self._held.popitem()[1].close()

    def keys(self, positions: Tensor) -> Tensor:
        """Return random keys of some positions at this step, int64 [M]."""
        return row_keys(self.config.seed, self.request, self.step, positions)

    def uniforms(self, start: int, end: int) -> tuple[float, ...]:
        """Return a random number in (0, 1) for each of the positions in [start, end) at this step."""
        return tuple(map(float, uniforms(self.keys(torch.arange(start, end)))))

    def ask(
        self,
        phase: Phase,
        positions: Tensor,
        *,
        window: tuple[int, int],
        places: NDArray[np.int64] | None = None,
        key_len: int = 0,
        sampling: Sampling | None = None,
        **rule: Any,
    ) -> StepRequest:
        """Make the request for a step over the window [start, end), deciding some positions.

        `places`, [T] ascending, are the positions of its tokens where they stand apart. A cached step sees `key_len` keys,
        or as many as the window's end. The position just past the window may be decided too where row i-1 predicts position i.
        """
        start, end = window
        own, wanted = self.token_array, positions.numpy()
        if places is None:
            tokens, found = own[start:end].copy(), wanted - start
        else:
            start, tokens, found = int(places[0]), own[places], places.searchsorted(wanted)
            rule["values"] = {**rule.get("values", {}), "positions": torch.from_numpy(places.astype(np.int32))}
        states = {state: self.rows_of(state) for state in phase.states}
        sequence = None if phase.cache.kept is None else states.pop(phase.cache.kept)
        if sampling is not None:
            rule |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return StepRequest(
            phase=phase,
            token_ids=torch.from_numpy(tokens),
            start=start,
            sequence=sequence,
            key_len=0 if sequence is None else key_len or end,
            final_length=self.length,
            states=states,
            rows=torch.from_numpy(found),
            current=torch.from_numpy(own[wanted]),
            keys=self.keys(torch.from_numpy(wanted)) if phase.noisy else None,
            **rule,
        )

    def fill(self, start: int, end: int, phase: Phase = COMMIT, **given: Any) -> StepRequest:
        """Make the request that writes keys and values of [start, end), a prefill or the commit of a block; as `ask`."""
        return self.ask(phase, torch.empty(0, dtype=torch.int64), window=(start, end), **given)

    def take(self, positions: Tensor, result: StepResult) -> None:
        """Write what a step committed of the positions that it decides."""
        rows = result.committed.numpy().nonzero()[0]
        taken = positions.numpy()[rows]
        tokens, scores = result.chosen.numpy()[rows], result.score.numpy()[rows]
        self.token_array[taken] = tokens
        self.mask_array[taken] = False
        self.confidence_array[taken] = scores
        self.last = Decision(
            positions=torch.from_numpy(taken), token_ids=torch.from_numpy(tokens), confidence=torch.from_numpy(scores)
        )
        self.step += 1


def cached_shape(phase: Phase, tokens: int, key_len: int, rows: int = 0) -> StepSize | None:
    """Return the size of one request's cached step, or None without tokens."""
    return StepSize(phase=phase, windows=(tokens,), keys=(key_len,), rows=rows) if tokens > 0 else None


def whole_blocks(config: GenerationConfig, prompt_len: int) -> tuple[int, int]:
    """Return the length of the prompt's whole blocks, and of the canvas."""
    block = config.block_length or 1
    return prompt_len // block * block, -(-(prompt_len + config.gen_length) // block) * block
