"""The registration of a step, as parts of a phase and options of attention see it.

`transformer.py` implements it for layers, `ending.py` for the end of a step. Legend: T tokens, B sequences, M rows to
decide, C rows of a chunk, R rows of a state, W its width, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import StepInputs
    from mosaic.models.residency import Hidden, Residency
    from mosaic.models.rotary import Rotary
    from mosaic.models.state import State
    from mosaic.registrar.graph import Buffer, Graph
    from mosaic.registrar.operator import Dim
    from mosaic.registrar.polynomial import Polynomial


class StepGraph(Protocol):
    """The registration of one step.

    Attributes
    ----------
    inputs
        The inputs that the parts declare, by name.
    tokens, seqs, span
        Dims; in the second graph of a cut phase, `tokens` are the kept rows.
    first_graph
        Whether this is the first of the two graphs of a cut phase.
    residency, hidden
        Where weights and hidden states live; `on_host` says whether hidden states are in host memory. After the last
        layer hidden states exist only if a part of the phase `reads_hidden`.
    positions, cu_seqlens
        int32 [T] and [B + 1].
    inv_freq, sequences
        Rotary frequencies by rule; the sequence of each token if each sequence has its own frequencies, else None.
    kv
        The state [R, W] of keys and values, if the cache policy has one.
    near
        The state [R, W] of layers with a window, where it is another, else None.
    fused
        Whether ops between products are fused into them, for steps of few rows: a choice of steps over kept keys.
    arrivals
        If fused, the arrival counters of split products, else None.
    """

    g: Graph
    arch: Architecture
    phase: Any
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
        """Return the keys [begin, end) of its sequence that a token sees in a layer, int32 [T, 2]; None: by blocks."""

    def state(self, state: State, /) -> Buffer:
        """Return the buffer of a state."""

    def normed(self, rows: Dim, norm: Buffer, name: str, /) -> tuple[Buffer, Buffer]:
        """Return this iteration's rows of the hidden state, and rms_norm of them."""

    def norm_weight(self, name: str, tensor: str, size: int | None = None, /) -> Buffer:
        """Return the weight of a norm, [D] or [size]."""

    def attention_norm(self, layer: int, /) -> Buffer:
        """Return the weight [D] of the norm before a layer's attention."""

    def observe(self, layer: int, q: Buffer, /) -> None:
        """Pass a layer's queries, all rows, to the part that cuts the step, while they exist."""


class Ending(Protocol):
    """The end of a step, where rows are unembedded.

    Attributes
    ----------
    masked
        M.
    cu_seqlens
        int32 [B + 1].
    commits
        Whether a rule commits rows; otherwise the head's results go back to requests.
    open_id
        The value of the input `current` in undecided rows.
    """

    g: Graph
    arch: Architecture
    phase: Any
    inputs: StepInputs
    masked: Polynomial
    cu_seqlens: Buffer

    @property
    def commits(self) -> bool: ...

    @property
    def open_id(self) -> int: ...

    @property
    def hidden(self) -> Buffer:
        """The residual stream [T, D] after the last layer, if a part of the phase `reads_hidden`."""

    def token(self) -> Buffer:
        """Declare the output `token`, int64 [M]."""

    def figures(self, names: Sequence[str], /) -> Mapping[str, Buffer]:
        """Declare transients float32 [M] for a commit rule to read."""

    def score(self, kind: str, figures: Mapping[str, Buffer], out: Buffer, /) -> Buffer:
        """Write each row's float32 [M] number for the commit rule, as the head defines it."""

    def source(self, rows: Buffer, /) -> Buffer:
        """Return the rows of the hidden state that predict these rows."""

    def normed_rows(self, rows: Buffer, norm: Buffer, prefix: str = "", /) -> Buffer:
        """Register rms_norm(hidden[rows]), [C, D]."""
