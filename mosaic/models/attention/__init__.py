"""The implementations of a layer's attention, one per file: the options of the choice `attention`.

A cache policy lists its options, the fastest first. Shape legend: T tokens, N query heads, K key-value heads, H head
size, D hidden.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from mosaic.models.attention.projections import matrices

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention.projections import Chosen
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle, Matrix

__all__ = ["Way"]


class Way:
    """One way to register hidden += attention(rms_norm(hidden)) @ o_proj.T.

    Attributes
    ----------
    name
        The option of the choice `attention`.
    by_rows
        Whether `keep` and `add_rows` exist; otherwise the last layer is computed for all tokens.
    cuts
        Whether `project` and `resume` exist, which a phase that is cut inside a layer needs.
    """

    name: ClassVar[str] = ""
    by_rows: ClassVar[bool] = False
    cuts: bool = False

    def serves(self, arch: Architecture) -> bool:
        """Return whether this option supports the layers of a model."""
        return True

    def dims(self, step: StepGraph) -> None:
        """Declare dims beside the policy's; a policy declares those of all its options, whichever is taken."""

    def knobs(self, step: StepGraph) -> None:
        """Declare knobs; a policy declares those of all its options, whichever is taken."""

    def begin(self, step: StepGraph) -> None:
        """Declare buffers that all layers share."""

    def kind(self, step: StepGraph, layer: int) -> Hashable:
        """Return a key of all that differs between layers, except their numbers."""
        return None

    def matrices(self, step: StepGraph, layer: int) -> list[Matrix]:
        """Return the projections of a layer: q_proj [N H, D], k_proj and v_proj [K H, D], o_proj [D, N H]."""
        return matrices(step.arch, layer)

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register a layer's attention; `norm` [D] is the weight of its norm."""
        raise NotImplementedError

    # -- the last layer, if no part of the phase reads the hidden states of all tokens ------------------------------

    def keep(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register the keys and values of all tokens, from k_proj and v_proj alone."""
        raise NotImplementedError

    def add_rows(
        self, step: StepGraph, layer: int, h: Buffer, chosen: Chosen, matrices: dict[str, Bundle], x: Buffer
    ) -> None:
        """Register x += attention(h) @ o_proj.T for chosen rows, h and x [C, D]; `keep` was called before."""
        raise NotImplementedError

    # -- a layer that a step is cut in -----------------------------------------------------------------------------

    def project(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer) -> None:
        """Register queries [T, N H] of all tokens, and store their keys and values: the part before the cut."""
        raise NotImplementedError

    def resume(self, step: StepGraph, layer: int, q: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register hidden += attention(q) @ o_proj.T of the kept rows: the part after the cut."""
        raise NotImplementedError
