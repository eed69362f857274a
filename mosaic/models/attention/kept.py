"""Over kept keys: a window's keys are stored in the state by chunks of tokens, then its queries attend to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from mosaic.models.attention import Way
from mosaic.models.attention.projections import (
    PROJECTION_TILE,
    Chosen,
    add_product,
    bias_and_scale,
    project,
    project_out,
    rule,
)
from mosaic.models.inputs import ROW_BOUNDS
from mosaic.models.kept_keys import attending, key_row

if TYPE_CHECKING:
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.operator import Dim
    from mosaic.registrar.schemes.scheme import Bundle

KeptIn: TypeAlias = "tuple[tuple[Buffer, Buffer, Buffer], int]"
"""The state that a layer's keys are in, the extents of its rows with their bounds by sequence, and the layer's place there."""


class _Kept(Way):
    """`stored(layer)` is called once the window's keys are in the state; it registers ops over them."""

    by_rows: ClassVar[bool] = True

    def __init__(self, stored: Callable[[StepGraph, int], None] | None = None) -> None:
        self._stored = stored

    def store(
        self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer | None = None
    ) -> None:
        """Write the window's keys and values into the state, and the queries into their buffer, if there is one."""
        _store(step, layer, norm, matrices, queries, self.stored_in(step, layer))
        if self._stored is not None:
            self._stored(step, layer)

    def stored_in(self, step: StepGraph, layer: int) -> KeptIn:
        """Return where a layer's keys are written, rows found by the positions of the window."""
        return _kept_in(step, layer)

    def keep(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Store the window's keys and values."""
        self.store(step, layer, norm, matrices)

    def add_rows(
        self, step: StepGraph, layer: int, h: Buffer, chosen: Chosen, matrices: dict[str, Bundle], x: Buffer
    ) -> None:
        """Attend to the state; rows are grouped by sequence, which bounds give."""
        q = project(step, layer, "q", h, matrices["q_proj"], chosen=chosen)
        add_product(step, attend(step, layer, q, chosen=chosen), matrices["o_proj"], x, "o_linear")


class KeptTogether(_Kept):
    """All queries at once, projected with the keys and values under one norm."""

    name: ClassVar[str] = "together"
    cuts = True

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Project, store, attend, add to the residual."""
        whole = step.g.buffer("q", (step.tokens, step.arch.stack[layer].attention.width), step.arch.dtype)
        self.project(step, layer, norm, matrices, whole)
        step.observe(layer, whole)
        self.resume(step, layer, whole, matrices)

    def project(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer) -> None:
        """Project, and store."""
        self.store(step, layer, norm, matrices, queries)

    def resume(self, step: StepGraph, layer: int, q: Buffer, matrices: dict[str, Bundle]) -> None:
        """Attend, add to the residual."""
        project_out(step, self.attended(step, layer, q), matrices["o_proj"])

    def attended(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register the attention of one layer; results replace queries."""
        return attend(step, layer, q)


class KeptQueries(_Kept):
    """Chunks of queries, which never exist whole."""

    name: ClassVar[str] = "queries"

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Store all keys and values first, then the chunks."""
        g = step.g
        self.store(step, layer, norm, matrices)
        with g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name="queries") as rows:
            source, h = step.normed(rows, norm, "queries_in")
            y = attend(step, layer, project(step, layer, "q", h, matrices["q_proj"]))
            add_product(step, y, matrices["o_proj"], source, "o_linear")
            step.hidden.keep(source)


def _store(
    step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer | None, kept_in: KeptIn
) -> None:
    g, head_size, (kept, place) = step.g, step.arch.stack[layer].attention.head_size, kept_in
    with g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name="keys") as rows:
        if queries is not None and step.fused:
            _store_at_once(step, layer, rows, norm, matrices, queries, kept_in)
            return
        _, h = step.normed(rows, norm, "keys_in")
        if queries is not None:
            project(step, layer, "q", h, matrices["q_proj"], queries)
        k, v = (project(step, layer, name, h, matrices[f"{name}_proj"]) for name in ("k", "v"))
        g.add_op(
            "kv_store", k, v, *kept, step.cu_seqlens, step.positions, name="store",
            layer=place, head_size=head_size,
        )  # fmt: skip


def _store_at_once(
    step: StepGraph, layer: int, rows: Dim, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer, kept_in: KeptIn
) -> None:
    """Project and store in two launches, for this iteration's rows of the hidden state."""
    g, arch, own, (kept, place) = step.g, step.arch, step.arch.stack[layer].attention, kept_in
    x = step.hidden.rows(rows, "keys_in_rows")
    projections = [matrices[f"{name}_proj"].whole for name in "qkv"]
    found = [
        bias_and_scale(step, layer, name, matrix.shape[0]) for name, matrix in zip("qkv", projections, strict=True)
    ]
    k, v = (g.buffer(name, (rows, projections[1].shape[0]), arch.dtype) for name in "kv")
    biases, scales = zip(*found, strict=True)
    g.add_op(
        "norm_qkv",
        x,
        norm,
        *projections,
        step.arrivals,
        *biases,
        out=(queries, k, v),
        name="qkv_linear",
        eps=arch.norm_eps,
    )
    g.add_op(
        "rotary_store", queries, k, v, *kept, step.cu_seqlens, step.positions, step.inv_freq[own.rotary],
        *scales[:2], step.sequences, name="store", layer=place, head_size=own.head_size, eps=arch.norm_eps,
        factor=own.rotary_scale,
    )  # fmt: skip


def attend(step: StepGraph, layer: int, q: Buffer, seen: str = "seen", chosen: Chosen | None = None) -> Buffer:
    """softmax(q k^T) v with the keys and values of the state, for all tokens or the rows to decide; results replace
    queries.  `seen` names the input with the number of keys that each sequence sees; rows of a sequence that sees 0 are
    unchanged.
    """
    g, bounds, positions, sees = step.g, step.cu_seqlens, step.positions, step.sees(layer)
    if chosen is not None:
        bounds, positions, sees = step.inputs[ROW_BOUNDS.name], chosen.positions, chosen.sees
    kept, place = _kept_in(step, layer)
    # a ring's few keys would be in one or two of the segments that all keys are cut into
    parts = g.dim("parts") if kept[0] is step.kv else 1
    y: Buffer = g.add_op(
        "kv_attention", q, *kept, step.inputs[seen], bounds, positions, sees, name="attention", keys=g.dim("keys"), parts=parts,
        **{**attending(step.arch, layer, ranges=True), "layer": place}, **rule(step, layer),
    )  # fmt: skip
    g.add_alias(y, q)
    return y


def _kept_in(step: StepGraph, layer: int) -> KeptIn:
    """The state that a layer's keys are kept in with the extents of its rows, and the layer's place there."""
    window = step.arch.stack[layer].attention.window
    if step.near is None:
        return (step.kv, *extents_of(step)), key_row(step.arch).places[layer]
    kept = (step.near, step.inputs["near_extents"], step.inputs["cu_near_extents"])
    return kept if window else (step.kv, *extents_of(step)), key_row(step.arch, window > 0).places[layer]


def extents_of(step: StepGraph) -> tuple[Buffer, Buffer]:
    """The extents of all sequences' rows, and where each sequence's extents begin."""
    return step.inputs["extents"], step.inputs["cu_extents"]
