"""Where a step's weights and hidden states live: on the device, or in pinned host memory with transfers beside the step.

A streamed weight is an ordinary transient, written by a copy on the side stream `weights` while the previous sublayer
computes. An offloaded hidden state stays in host memory; each iteration of a token region works on a window of it, in
one of two slots. Meanwhile the next window is fetched and the previous one stored (streams `fetch` and `store`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.registrar.graph import Buffer, Graph
    from mosaic.registrar.operator import Dim
    from mosaic.registrar.schemes.scheme import Bundle, Matrix

WEIGHTS: Final = "weights"
FETCH: Final = "fetch"
STORE: Final = "store"
SLOTS: Final = 2

SHARES: Final[Mapping[str, float]] = {
    "none": 0.0, "embedding": 0.0, "25%": 0.25, "50%": 0.5, "75%": 0.75, "layers": 1.0, "all": 1.0,
}  # fmt: skip
"""Options of the choice `stream`, and the share of layers, counted from the last, whose matrices are streamed; every
option but `none` keeps the embedding in host memory too, and `all` the head."""
UNTIED: Final = frozenset({"embedding", "all"})
"""Options that do not exist if the embedding is the head, which stays on the device."""


class Residency:
    """Gives the weights of a step, on the device or fetched ahead of use, by the choice `stream`."""

    def __init__(self, g: Graph, arch: Architecture) -> None:
        options = [name for name in SHARES if name not in UNTIED or not arch.tied]
        self.level = g.choice("stream", options, escalating=True)
        self._g, self._arch = g, arch
        self._streamed_from = arch.layers - ceil(SHARES[self.level] * arch.layers)

    @property
    def embedding_on_host(self) -> bool:
        """Whether token embeddings are gathered from host memory."""
        return self.level != "none" and not self._arch.tied

    @property
    def streams_head(self) -> bool:
        """Whether the head is fetched at the end of the step."""
        return self.level == "all"

    def streams(self, layer: int) -> bool:
        """Return whether the matrices of a layer are fetched."""
        return layer >= self._streamed_from

    def fetch(self, matrices: Sequence[Matrix], *, streamed: bool) -> dict[str, Bundle]:
        """Give the matrices; if streamed, issue the copies of their parts now, for which `arrive` waits."""
        if not streamed:
            return {m.name: m.bundle(self._arch.dtype, self.on_device) for m in matrices}
        with self._g.stream(WEIGHTS):
            return {m.name: m.bundle(self._arch.dtype, self._fetch) for m in matrices}

    def on_device(self, name: str, shape: Sequence[Dim], dtype: str, tensor: str) -> Buffer:
        """Give a weight as a buffer on the device."""
        return self._g.weight(name, shape, dtype, tensor=tensor)

    def _fetch(self, name: str, shape: Sequence[Dim], dtype: str, tensor: str) -> Buffer:
        source = self.on_host(name, shape, dtype, tensor)
        slot = self._g.buffer(name, shape, dtype)
        self._g.add_op("copy", source, out=slot, name=f"{name}_fetch")
        return slot

    def on_host(self, name: str, shape: Sequence[Dim], dtype: str, tensor: str) -> Buffer:
        """Give a weight as a buffer in host memory."""
        return self._g.buffer(f"{name}@host", shape, dtype, kind="host", tensor=tensor)

    def arrive(self, *, streamed: bool) -> None:
        """Make the next op wait for the fetched weights."""
        if streamed:
            self._g.wait(WEIGHTS)


class Hidden:
    """The residual stream [T, D], whole on the device or in windows.

    Parameters
    ----------
    rows
        T.
    on_host
        Whether it is in host memory.
    buffer
        Its buffer; a new one if not given.
    """

    def __init__(self, g: Graph, arch: Architecture, rows: Dim, *, on_host: bool, buffer: Buffer | None = None) -> None:
        self._g, self._arch, self.on_host = g, arch, on_host
        self.buffer = buffer or g.buffer(
            "hidden", (rows, arch.hidden), arch.dtype, kind="host" if on_host else "transient"
        )

    def rows(self, size: Dim, name: str) -> Buffer:
        """Give the rows of this iteration of a token region to read or update, `size` of them."""
        if not self.on_host:
            return self.buffer
        return fetched(self._g, self.buffer, (size, self._arch.hidden), self._arch.dtype, name)

    def window(self, size: Dim, name: str) -> Buffer:
        """Give the buffer that this iteration writes rows to; `keep` stores it."""
        if not self.on_host:
            return self.buffer
        return self._g.buffer(name, (size, self._arch.hidden), self._arch.dtype, rotate=SLOTS)

    def keep(self, window: Buffer) -> None:
        """Store the rows that this iteration wrote or updated."""
        if self.on_host:
            stored(self._g, window, self.buffer)


def fetched(g: Graph, source: Buffer, shape: Sequence[Dim], dtype: str, name: str) -> Buffer:
    """Copy this iteration's rows of a host buffer into a window; the next op waits for them."""
    window = g.buffer(name, shape, dtype, rotate=SLOTS)
    with g.stream(FETCH):
        g.add_op("copy", source, out=window, name=f"{name}_fetch")
    g.wait(FETCH)
    return window


def stored(g: Graph, window: Buffer, target: Buffer) -> None:
    """Copy a window to this iteration's rows, and columns, of a host buffer."""
    with g.stream(STORE):
        g.add_op("copy", window, out=target, name=f"{window.name.rsplit('/', 1)[-1]}_store")
