"""Sort assignments by expert, stably: order[C*k] of flat assignment ids, offsets[E+1] of each expert's run."""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs
from mosaic.registrar.tiles import Tile, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    tokens, top_k = specs["experts"].shape
    return Tile((2,), "int64"), Tile((tokens * top_k,), "int64")


SORT_BLOCK: Final = 128
"""Assignments per block of the counting sort; each block counts every expert in an int32."""


def counts(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve one count of every expert per block of assignments, for a stable counting sort without atomics.

    A bound linear in the rows: 4 * E * ceil(A / B) <= A * ceil(4 * E / B) + 4 * E.
    """
    rows, top_k = specs["experts"].shape
    counts_bytes = 4 * attrs["num_experts"]
    return rows * top_k * -(-counts_bytes // SORT_BLOCK) + counts_bytes


OPERATOR = Operator(
    name="moe_sort",
    operands="experts:i64[C, K] -> order:i64[C*K] offsets:i64[num_experts+1]",
    attrs="num_experts",
    implementations=kernels_of("moe_sort", tiles=tiles, scratch=counts),
    roles={"order": "ffn", "offsets": "ffn"},
)
