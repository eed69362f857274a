"""The ways in which attention may run, one per file: the options of the choice `attention`.

A cache policy says which of them it has, the fastest first. Shape legend: T tokens, N query heads, K key-value heads, H
head size, D hidden.
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
        Whether the way has `keep` and `add_rows`; otherwise the last layer is computed for all tokens.
    cuts
        Whether the way has `project` and `resume`; a phase that is cut inside a layer runs in no other.
    """

    name: ClassVar[str] = ""
    by_rows: ClassVar[bool] = False
    cuts: bool = False

    def serves(self, arch: Architecture) -> bool:
        """Return whether the way can run the layers of a model."""
        return True

    def dims(self, step: StepGraph) -> None:
        """Declare the dims that the way needs beside the policy's; all ways of a policy do, whichever is taken."""

    def knobs(self, step: StepGraph) -> None:
        """Declare the knobs that the way adds; all ways of a policy do, whichever is taken."""

    def begin(self, step: StepGraph) -> None:
        """Declare what the way keeps for all layers."""

    def kind(self, step: StepGraph, layer: int) -> Hashable:
        """Return what of the way differs between layers, but for their numbers."""
        return None

    def matrices(self, step: StepGraph, layer: int) -> list[Matrix]:
        """Return the projections of a layer: q_proj [N H, D], k_proj and v_proj [K H, D], o_proj [D, N H]."""
        return matrices(step.arch, layer)

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register a layer's attention; `norm` [D] is the weight of its norm."""
        raise NotImplementedError

    # -- the last layer, where no part of the phase reads the hidden states of all tokens ---------------------------

    def keep(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register the keys and values of all tokens, from k_proj and v_proj alone."""
        raise NotImplementedError

    def add_rows(
        self, step: StepGraph, layer: int, h: Buffer, chosen: Chosen, matrices: dict[str, Bundle], x: Buffer
    ) -> None:
        """Register x += attention(h) @ o_proj.T for chosen rows, h and x [C, D]; `keep` came before."""
        raise NotImplementedError

    # -- a layer that a step is cut in -----------------------------------------------------------------------------

    def project(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer) -> None:
        """Register queries [T, N H] of all tokens, and store their keys and values: what comes before the cut."""
        raise NotImplementedError

    def resume(self, step: StepGraph, layer: int, q: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register hidden += attention(q) @ o_proj.T: what comes after it, of the rows that are kept."""
        raise NotImplementedError
