"""The floor of a block-diffusion step: its products at the rates of the card's profile, and the bytes that it has to read.

A product takes the longer of its FLOPs at the profile's rate for its rows and columns, and of reading its weights; experts are read
where a token is expected to choose them. Attention takes the longer of its FLOPs and of reading the keys and values that are
attended to, and the keys that a selection ranks. Norms, rotary embeddings, statistics, launches and the host cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mosaic.devices import Device
from mosaic.models.architecture import Architecture
from mosaic.models.reuse import PrefixReuse
from mosaic.models.sparse import SparseAttention
from mosaic.planner.cost import RateGrids

__all__ = ["StepFloor", "keys_read"]


def keys_read(
    attention: SparseAttention | PrefixReuse | None, arch: Architecture, keys: float, *, selects: bool, refreshes: bool
) -> list[float]:
    """Return how many keys, each with its value, each layer reads in a request's step; a key that is ranked is half of one.

    Parameters
    ----------
    attention
        What the request attends by; None: to all keys.
    keys
        That it sees.
    selects
        Whether the step selects.
    refreshes
        Whether layers that reuse what they kept attend to their prefix in it.
    """
    reuse = attention if isinstance(attention, PrefixReuse) else attention and attention.reuse
    found = [keys if refreshes or reuse is None else 0.0] * arch.layers
    if not isinstance(attention, SparseAttention):
        return found
    attended = min(attention.k, attention.ratio * keys or keys)
    if selects and attention.selects == "first" and not attention.carried:
        attended = keys
    ranked = keys / attention.page if attention.by == "bounds" else keys / 2
    for layer in attention.sparse_layers(arch):
        found[layer] = attended + selects * ranked
    for layer in range(arch.layers - attention.exact_last, arch.layers):
        found[layer] = keys
    return found


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Floors of steps of one model on one device.

    Parameters
    ----------
    arch
        The model's.
    device
        Its profile.
    """

    arch: Architecture
    device: Device

    def of(
        self, *, requests: int, tokens: float, kept: float, rows: float, keys: Sequence[float], cut: int | None = None
    ) -> float:
        """Return seconds.

        Parameters
        ----------
        requests
            Sequences of the step, alike.
        tokens
            That are computed up to the layer that is cut, its queries, keys and values included.
        kept
            That are computed from its attention on.
        rows
            That are unembedded.
        keys
            That each layer reads for all sequences together (`keys_read`).
        cut
            The layer; None: the step computes all tokens to its end.
        """
        arch, seconds = self.arch, 0.0
        queries, head = arch.heads * arch.head_size, arch.head_size
        for layer, read in enumerate(keys):
            before = tokens if cut is None or layer <= cut else kept
            after = tokens if cut is None or layer < cut else kept
            seconds += self._product(before, arch.hidden, queries + 2 * arch.kv_heads * head)
            seconds += self._attention(after, read, requests)
            seconds += self._product(after, queries, arch.hidden)
            seconds += self._feed_forward(layer, after)
        return seconds + self._product(rows, arch.hidden, arch.vocabulary)

    @property
    def _item(self) -> int:
        return 4 if self.arch.dtype == "float32" else 2

    def _product(self, rows: float, inner: int, outer: int) -> float:
        return self._longer(2 * rows * inner * outer, rows, outer, self._item * inner * outer)

    def _longer(self, flops: float, rows: float, columns: int, read: float) -> float:
        return max(flops / self._rate("gemm", rows, columns), read / self.device.bandwidth)

    def _rate(self, rate: str, rows: float, columns: float, way: str = "") -> float:
        grid = RateGrids(self.device).grid(rate, way)
        assert grid is not None
        return float(grid(np.array([max(rows, 1.0)]), np.array([float(columns)]))[0])

    def _attention(self, queries: float, keys: float, requests: int) -> float:
        arch = self.arch
        size = arch.head_size
        rates = [self._rate("attention", queries * arch.heads, 1.0, way) for way in self.device.attention_rates]
        flops = 4 * queries * (keys / requests) * arch.heads * size
        return max(flops / max(rates), 2 * self._item * arch.kv_heads * size * keys / self.device.bandwidth)

    def _feed_forward(self, layer: int, rows: float) -> float:
        arch = self.arch
        if not arch.experts or layer < arch.dense_layers:
            width = arch.dense_ffn if arch.experts else arch.ffn
            return self._product(rows, arch.hidden, 2 * width) + self._product(rows, width, arch.hidden)
        chosen = arch.experts_per_token
        hit = arch.experts * (1 - (1 - chosen / arch.experts) ** rows)
        each = rows * chosen / hit
        seconds = self._product(rows, arch.hidden, arch.experts)
        for inner, outer in ((arch.hidden, 2 * arch.ffn), (arch.ffn, arch.hidden)):
            seconds += self._longer(2 * rows * chosen * inner * outer, each, outer, hit * self._item * inner * outer)
        if arch.shared_ffn:
            seconds += self._product(rows, arch.hidden, 2 * arch.shared_ffn)
            seconds += self._product(rows, arch.shared_ffn, arch.hidden)
        return seconds
