"""The floor of a step: its FLOPs at the card's best dense rate, and every byte read once.

A product takes the longer of its FLOPs at the largest rate of the profile, whatever its shape, and of reading its weights once; of
experts, those that tokens which choose at random are expected to choose. Attention takes the longer of its FLOPs at the same rate
and of reading once the keys and values that are attended to, and the keys that a selection ranks. (The profile's best rate of
attention, 610 TFLOP/s on an H200, bounds nothing: steps whose rows are alike draw less power, and their attention ran faster.)
Norms, rotary embeddings, activations, logits, launches and the host cost nothing. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from mosaic.devices import Device
from mosaic.models.architecture import Architecture
from mosaic.models.policies.flashblock import PrefixReuse
from mosaic.models.policies.mage_options import SparseAttention

__all__ = ["Best", "Floor", "keys_read"]


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
        Whether layers that reuse outputs attend to their prefix in it.
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


class Best(NamedTuple):
    """A card's limits: FLOP/s of a dense product, and bytes read per second."""

    rate: float
    bandwidth: float

    @classmethod
    def of(cls, device: Device) -> Best:
        """Take the largest rate of the profile, at any shape."""
        rates = chain(device.gemm_rates.values(), (device.few_rows_rates, device.unembed_rates))
        return cls(max(chain.from_iterable(by_rows.values() for by_rows in rates)), device.bandwidth)

    def seconds(self, flops: float, read: float) -> float:
        """Return the longer of some FLOPs and of reading some bytes."""
        return max(flops / self.rate, read / self.bandwidth)

    def attention_s(self, *, pairs: float, keys: float, heads: int, kv_heads: int, size: int, item: int) -> float:
        """Return the seconds of one layer's attention.

        Parameters
        ----------
        pairs
            Of a query row and a key that it sees, of all sequences together.
        keys
            That are read, each with its value.
        heads, kv_heads, size
            Query heads, key-value heads, and the elements of one.
        item
            Bytes of an element.
        """
        return self.seconds(4 * pairs * heads * size, 2 * keys * kv_heads * size * item)


@dataclass(frozen=True, slots=True)
class Floor:
    """Floors of steps of one model on one device.

    Parameters
    ----------
    arch
        The model's.
    device
        Its profile.

    Examples
    --------
    >>> from mosaic.devices import load_device
    >>> from mosaic.models import load
    >>> arch = load("llada-8b").architecture
    >>> round(1e3 * Floor(arch, load_device("h200")).of(tokens=1024, rows=512, keys=[1024] * arch.layers), 1)
    22.0
    """

    arch: Architecture
    device: Device
    _best: Best = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_best", Best.of(self.device))

    def of(
        self,
        *,
        tokens: float,
        rows: float,
        keys: Sequence[float],
        requests: int = 1,
        kept: float | None = None,
        cut: int | None = None,
        prefill: bool = False,
        pairs: float | None = None,
    ) -> float:
        """Return seconds.

        Parameters
        ----------
        tokens
            That are computed up to the layer that is cut, its queries, keys and values included; in the last layer, keys and values
            alone.
        rows
            That are unembedded, and whose queries, attention and feed-forward the last layer computes; 0: a step that fills the
            cache alone.
        keys
            That each layer reads for all sequences together (`keys_read`).
        requests
            Sequences of the step, alike.
        kept
            Tokens that are computed from the attention of the cut layer on; all if not given.
        cut
            The layer; None: the step computes all tokens to its end.
        prefill
            Whether the step's own tokens are the keys, of which each sees those of its block and of the blocks before.
        pairs
            Of a token and a key that it sees in a layer, where sequences are not alike.
        """
        arch, seconds, last = self.arch, 0.0, len(keys) - 1
        queries, kv = (
            arch.attention.heads * arch.attention.head_size,
            2 * arch.attention.kv_heads * arch.attention.head_size,
        )
        kept = tokens if kept is None or cut is None else kept
        for layer, read in enumerate(keys):
            stored = tokens if cut is None or layer <= cut else kept
            asked = rows if layer == last else stored
            after = rows if layer == last else tokens if cut is None or layer < cut else kept
            seconds += self._products(2 * arch.hidden * (asked * queries + stored * kv), arch.hidden * (queries + kv))
            seen = read / requests
            of_row = (seen + arch.block) / 2 if prefill else seen if pairs is None else pairs / tokens
            seconds += self._best.attention_s(
                pairs=after * of_row, keys=read if after else 0.0, heads=arch.attention.heads, kv_heads=arch.attention.kv_heads,
                size=arch.attention.head_size, item=self._item,
            )  # fmt: skip
            seconds += self._product(after, queries, arch.hidden) + self._feed_forward(layer, after)
        return seconds + self._product(rows, arch.hidden, arch.vocabulary)

    def whole(self, tokens: int, masked: int) -> float:
        """Return seconds of a step over one whole sequence, block-causal where the model is."""
        keys = [float(tokens)] * self.arch.layers
        return self.of(tokens=tokens, rows=masked, keys=keys, prefill=self.arch.block > 0)

    @property
    def _item(self) -> int:
        return 4 if self.arch.dtype == "float32" else 2

    def _product(self, rows: float, inner: int, outer: int) -> float:
        """Seconds of [rows, inner] times a weight of [outer, inner]; of no rows, none."""
        return self._products(2 * rows * inner * outer, inner * outer) if rows else 0.0

    def _products(self, flops: float, weights: float) -> float:
        """Seconds of products with given FLOPs and weights."""
        return self._best.seconds(flops, self._item * weights)

    def _feed_forward(self, layer: int, rows: float) -> float:
        arch = self.arch
        ffn = arch.stack[layer].feed_forward
        if not ffn.experts:
            width = ffn.size
            return self._product(rows, arch.hidden, 2 * width) + self._product(rows, width, arch.hidden)
        chosen = ffn.experts_per_token
        hit = ffn.experts * (1 - (1 - chosen / ffn.experts) ** rows)
        seconds = self._product(rows, arch.hidden, ffn.experts)
        for inner, outer in ((arch.hidden, 2 * ffn.size), (ffn.size, arch.hidden)):
            seconds += self._products(2 * rows * chosen * inner * outer, hit * inner * outer)
        if ffn.shared:
            seconds += self._product(rows, arch.hidden, 2 * ffn.shared)
            seconds += self._product(rows, ffn.shared, arch.hidden)
        return seconds
