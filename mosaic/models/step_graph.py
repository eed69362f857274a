"""What the parts of a phase and the ways of attention see of the step that is being registered.

Whatever registers a step has these members: layers are in `transformer.py`, their end is in `ending.py`. Legend: T tokens, B
sequences, M rows to decide, C rows of a chunk, R rows of a state, W its width, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import StepInputs
    from mosaic.models.residency import Hidden, Residency
    from mosaic.models.rotary import Rotary
    from mosaic.models.state import State
    from mosaic.registrar.graph import Buffer, Graph
    from mosaic.registrar.operator import Dim
    from mosaic.registrar.polynomial import Polynomial

__all__ = ["Ending", "StepGraph"]


class StepGraph(Protocol):
    """The registration of one step.

    Attributes
    ----------
    inputs
        The inputs that the parts declare, by name.
    tokens, seqs, span
        Dims; of the second graph of a phase that is cut, `tokens` are the rows that are kept.
    first_graph
        Whether this is the first of the two graphs of a phase that is cut.
    residency, hidden
        Where weights and hidden states live; `on_host` says whether hidden states are in host memory. After the last layer there
        are hidden states only where a part of the phase `reads_hidden`.
    positions, cu_seqlens
        int32 [T] and [B + 1].
    inv_freq, sequences
        Rotary frequencies by their rule; where each sequence has its own, the number of each token's sequence, else None.
    kv
        The state [R, W] that keys are kept in, where the cache policy has one.
    near
        The state [R, W] of layers with a window, where it is another, else None.
    fused
        Whether what lies between products is done in them, for steps of few rows: a choice of those over kept keys.
    arrivals
        There, the counts by which splits of products know each other, else None.
    """

    g: Graph
    arch: Architecture
    inputs: StepInputs
    tokens: Polynomial
    seqs: Polynomial
    span: Polynomial
    first_graph: bool
    residency: Residency
    on_host: bool
    positions: Buffer
    cu_seqlens: Buffer
    inv_freq: dict[Rotary, Buffer]
    sequences: Buffer | None
    kv: Buffer
    near: Buffer | None
    fused: bool
    arrivals: Buffer | None

    @property
    def hidden(self) -> Hidden:
        """The hidden states of all tokens."""

    def sees(self, layer: int, /) -> Buffer | None:
        """Return the keys [begin, end) of its sequence that each token sees in a layer, int32 [T, 2]; None: as the block says."""

    def state(self, state: State, /) -> Buffer:
        """Return the buffer of a state."""

    def normed(self, rows: Dim, norm: Buffer, name: str, /) -> tuple[Buffer, Buffer]:
        """Return this iteration's rows of the hidden state, and rms_norm of them."""

    def norm_weight(self, name: str, tensor: str, size: int | None = None, /) -> Buffer:
        """Return the weight of a norm, [D] or [size]."""

    def attention_norm(self, layer: int, /) -> Buffer:
        """Return the weight [D] of the norm before a layer's attention."""

    def observe(self, layer: int, q: Buffer, /) -> None:
        """Show a layer's queries, whole, to the part that cuts the step, while they are there."""


class Ending(Protocol):
    """The end of a step, where rows are unembedded.

    Attributes
    ----------
    masked
        M.
    cu_seqlens
        int32 [B + 1].
    commits
        Whether a rule commits rows; otherwise the head's figures are results.
    open_id
        What the input `current` has in rows where nothing is decided.
    """

    g: Graph
    arch: Architecture
    inputs: StepInputs
    masked: Polynomial
    cu_seqlens: Buffer

    @property
    def commits(self) -> bool: ...

    @property
    def open_id(self) -> int: ...

    @property
    def hidden(self) -> Buffer:
        """The residual stream [T, D] after the last layer, where a part of the phase `reads_hidden`."""

    def token(self) -> Buffer:
        """Declare the output `token`, int64 [M]."""

    def figures(self, names: Sequence[str], /) -> Mapping[str, Buffer]:
        """Declare transients float32 [M], which a commit rule reads."""

    def score(self, kind: str, figures: Mapping[str, Buffer], out: Buffer, /) -> Buffer:
        """Write the float32 [M] number of each row by which a commit rule goes, as the head says."""

    def source(self, rows: Buffer, /) -> Buffer:
        """Return the rows of the hidden state that predict these rows."""

    def normed_rows(self, rows: Buffer, norm: Buffer, prefix: str = "", /) -> Buffer:
        """Register rms_norm(hidden[rows]), [C, D]."""
