"""Sparse keys of requests that are rows of a table: steps that Refresh serve Reuse beside it.

Windows that refresh stand first in a step and attend to themselves; the others attend to their packed keys. The table says which do
(`keep_requests`). A full step before a delayed Refresh is a Refresh, too: what it packs is packed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from mosaic.models.attention import kept
from mosaic.models.attention.projections import attend
from mosaic.models.attention.together import Together
from mosaic.models.inputs import together
from mosaic.models.kept_keys import key_row
from mosaic.models.policies.packed_keys import Packed, Packing

if TYPE_CHECKING:
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Supply
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["PackedRows"]

_OF_TABLE: Final = ("spans", "packed_extents", "cu_whole", "own_extents")
"""What `keep_requests` finds."""
_GIVEN: Final = ("requests", "served", "seen", "cu_seqlens", "extents", "cu_extents")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(Packed):
    """Windows of a table's requests over packed keys; `packing` is of steps that refresh."""

    packing: Packing

    def of_table(self, step: StepGraph, served: Mapping[str, Buffer]) -> Mapping[str, Supply]:
        """Return what a Refresh packs and where, and the extents by positions of the windows."""
        return together(
            _OF_TABLE, lambda: step.g.add_op("keep_requests", *[served[name] for name in _GIVEN], name="keeping")
        )

    @property
    def covering(self) -> PackedRows:
        """The policy of steps in which requests may refresh."""
        return RefreshedRows(packing=self.packing)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshedRows(PackedRows):
    """The same, and whole canvases that keep some of their keys."""

    label: ClassVar[str] = "refresh"

    def ways(self) -> Sequence[Way]:
        """Return the only option."""
        return (_Beside(self.packing),)


class _Beside(Together):
    """Attention to packed keys leaves windows as they are that see none; attention within windows, those that do not refresh."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def projected(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> None:
        """Pack keys of the canvases, and store those of the other windows behind packed ones."""
        bounds = step.inputs["cu_whole"]
        self._packing.pack(step, layer, k, v, self._packing.choose(step, layer, q, k, bounds=bounds), bounds)
        place, size = key_row(step.arch).places[layer], step.arch.stack[layer].attention.head_size
        stored = step.kv, step.inputs["own_extents"], step.inputs["cu_extents"], step.cu_seqlens, step.positions
        step.g.add_op("kv_store", k, v, *stored, name="store", layer=place, head_size=size)

    def attended(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> Buffer:
        """Register both attentions; results replace queries."""
        return attend(step, layer, kept.attend(step, layer, q), k, v, bounds=step.inputs["cu_whole"])
