"""What a dLLM transformer is: its sizes and the names of its tensors.

A family's file turns a config.json into an `Architecture`; `transformer.py`
turns an `Architecture` into a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final

from mosaic.errors import UnsupportedModel
from mosaic.models.rotary import Rotary
from mosaic.registrar.schemes.plain import PLAIN
from mosaic.registrar.schemes.scheme import Scheme

__all__ = ["Architecture", "Attention", "FeedForward", "Layer", "TensorNames"]

MOST_LAYERS: Final = 4096
MOST_PARAMETERS: Final = 1 << 48
"""More are not a model's: a config with them is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Checkpoint names; `{layer}` stands for the layer's number, the mixture-of-experts names also stack experts.

    `name[a:b]` is rows [a, b) of a tensor that the checkpoint keeps fused. Of `dense` and `shared`, feed-forwards beside
    the experts, `{part}` is gate, up or down. `harmless` are patterns of tensors that a checkpoint may hold and nobody
    reads: rotary frequencies, which follow from the config.
    """

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    ffn_norm: str
    query: str
    key: str
    value: str
    output: str
    gate: str
    up: str
    down: str
    query_norm: str = ""
    key_norm: str = ""
    router: str = ""
    router_bias: str = ""
    dense: str = ""
    shared: str = ""
    harmless: tuple[str, ...] = ("*rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a layer.

    Parameters
    ----------
    heads, kv_heads, head_size
        Query heads, key-value heads, and the size of each.
    rotary, rotary_scale
        How fast the dims of an attention head turn (the first dims, where not all do), and what cosines and sines are
        multiplied by.
    window
        Of the keys that its rows see, a query at position p sees those at positions j with |p - j| < window; 0: all.
    qkv_bias, head_norms
        Biases on q, k, v; per-head RMSNorm of q and k.
    keys_as_values
        The values are the keys before they are normed and turned: there is no projection of values.

    Raises
    ------
    UnsupportedModel
        If the sizes do not fit each other.
    """

    heads: int
    kv_heads: int
    head_size: int
    rotary: Rotary
    rotary_scale: float = 1.0
    window: int = 0
    qkv_bias: bool = False
    head_norms: bool = False
    keys_as_values: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"config.json: {self.heads} heads do not divide into {self.kv_heads} key-value heads."
            )
        if self.rotary.dim % 2 or not 0 < self.rotary.dim <= self.head_size:
            raise UnsupportedModel(f"config.json: {self.rotary.dim} of the {self.head_size} dims of a head turn.")

    @property
    def width(self) -> int:
        """Columns of all queries."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Columns of all keys."""
        return self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The feed-forward of a layer: a dense one, or a mixture of experts.

    Parameters
    ----------
    size
        Columns between its matrices; of one expert, where there are experts.
    experts, experts_per_token, normalize
        Mixture of experts, and whether the weights of a token's experts are divided by their sum; 0 experts: dense.
    shared
        Size of the feed-forward that every token passes beside its experts; 0: none.
    scoring, groups, top_groups, scale
        How experts are chosen and weighed: attributes of the operator `moe_route`.

    Raises
    ------
    UnsupportedModel
        If there are not as many experts as are chosen.
    """

    size: int
    experts: int = 0
    experts_per_token: int = 0
    normalize: bool = False
    shared: int = 0
    scoring: str = "softmax"
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        groups, chosen, experts = self.groups, self.top_groups, self.experts
        if experts and not 0 < self.experts_per_token <= experts:
            raise UnsupportedModel(f"config.json: {self.experts_per_token} experts per token of {experts}.")
        if groups and (experts % groups or experts < 2 * groups):
            raise UnsupportedModel(f"config.json: {experts} experts do not divide into {groups} groups of two or more.")
        if groups and (not 0 < chosen <= groups or chosen * (experts // groups) < self.experts_per_token):
            raise UnsupportedModel(
                f"config.json: {chosen} of {groups} groups do not hold {self.experts_per_token} of {experts} experts."
            )

    @property
    def routing(self) -> dict[str, Any]:
        """How experts are chosen and weighed, where that is not the default of the operator `moe_route`."""
        said = {"scoring": self.scoring, "groups": self.groups, "top_groups": self.top_groups, "scale": self.scale}
        usual = {"scoring": "softmax", "groups": 0, "top_groups": 0, "scale": 1.0}
        return {name: value for name, value in said.items() if value != usual[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer of a stack is; layers that are alike are equal."""

    attention: Attention
    feed_forward: FeedForward

    def times(self, count: int) -> tuple[Layer, ...]:
        """Return a stack of as many of it.

        Raises
        ------
        UnsupportedModel
            If they are more than a model's.
        """
        if count > MOST_LAYERS:
            raise UnsupportedModel(f"config.json: {count} layers are no model's; check its sizes.")
        return (self,) * count


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One checkpoint's sizes: an embedding, a stack of layers, an ending.

    Parameters
    ----------
    hidden, vocabulary
        Columns of the hidden states, rows of the embedding.
    stack
        The layers, from the first to the last.
    norm_eps
        RMSNorm's epsilon.
    max_positions
        Positions that the model is made for.
    block
        Attention is causal by blocks of this many positions: a query sees its own block and those before; 0:
        everything.
    decode_block
        Bidirectional models: tokens that are decoded together where a request does not say; 0: the whole answer.
    tied
        The head is the embedding.
    shifted
        Row i-1 predicts position i (Dream); the shift is done on row indices.
    published
        The decoding algorithm that it was published with, where that does not follow from `block` and `shifted`.
    mask_token_id
        The [MASK] token.
    eos_token_ids
        Tokens after which an answer is over: the end of the text, the end of a turn.
    pad_token_id
        The token that fills a batch up; None where the config names none.
    dtype
        Of hidden states and activations, and of weights that are stored as they are.
    keys
        The dtype that keys and values are kept in; that of activations, if not given.
    scheme
        How the matrices of layers are stored.

    Raises
    ------
    UnsupportedModel
        If sizes are no model's, or layers differ where they cannot.
    """

    hidden: int
    vocabulary: int
    stack: tuple[Layer, ...]
    norm_eps: float
    mask_token_id: int
    names: TensorNames
    tied: bool = False
    shifted: bool = False
    published: str = ""
    dtype: str = "bfloat16"
    keys: str = ""
    scheme: Scheme = PLAIN
    max_positions: int = 0
    block: int = 0
    decode_block: int = 0
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.mask_token_id < self.vocabulary:
            raise UnsupportedModel(
                f"config.json: 'mask_token_id' is {self.mask_token_id}, outside the vocabulary of {self.vocabulary} tokens; "
                "give the id of the model's mask token."
            )
        if self.parameters > MOST_PARAMETERS:
            raise UnsupportedModel(
                f"config.json: {self.layers} layers with {self.parameters} parameters are no model's; check its sizes."
            )
        if self.rotary.kind == "dynamic" and len(self.rotaries) > 1:
            raise UnsupportedModel("config.json: frequencies that depend on a length are those of all layers.")

    def __hash__(self) -> int:
        """Found once: every step asks what inputs its phase has in a model."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, entry.name) for entry in fields(self)]))

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.stack)

    @cached_property
    def attention(self) -> Attention:
        """The attention of every layer.

        Raises
        ------
        UnsupportedModel
            If layers differ in it: who asks has no way for that.
        """
        first, *others = dict.fromkeys(layer.attention for layer in self.stack)
        if others:
            raise UnsupportedModel("the attention of the model's layers differs, and this needs layers that are alike.")
        return first

    @property
    def feed_forward(self) -> FeedForward:
        """The feed-forward of the last layer: first ones may be dense where it has experts."""
        return self.stack[-1].feed_forward

    @cached_property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotary rules of the layers, each once."""
        return tuple(dict.fromkeys(layer.attention.rotary for layer in self.stack))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows of layers that have one, each once."""
        return tuple(sorted({layer.attention.window for layer in self.stack} - {0}))

    @property
    def rotary(self) -> Rotary:
        """The rotary rule of the first layer: of all layers, where frequencies depend on a sequence's length."""
        return self.rotaries[0]

    @cached_property
    def parameters(self) -> int:
        """Elements of the large matrices: those of layers, embedding and head."""
        total = self.vocabulary * self.hidden * (1 if self.tied else 2)
        for layer in self.stack:
            ffn, attention = layer.feed_forward, layer.attention
            total += 2 * self.hidden * (attention.width + attention.kv_width)
            total += 3 * self.hidden * (ffn.size * max(ffn.experts, 1) + ffn.shared)
        return total

    @property
    def max_context(self) -> int:
        """Positions that the model is made for, or that its rotary scaling reaches; 0 where nothing is known."""
        stretched = self.rotary.factor * (self.rotary.original or self.max_positions)
        return max(self.max_positions, int(stretched)) if self.max_positions else 0

    @property
    def copies(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold beside an equal one: a head that is the embedding."""
        return {self.names.head: self.names.embedding} if self.tied else {}

    def unused(self, names: Iterable[str], used: Iterable[str]) -> list[str]:
        """List the tensors among `names` that are neither used, nor harmless, nor copies of one that is."""
        known = {*used, *self.copies}
        return [
            name
            for name in names
            if name not in known and not any(fnmatchcase(name, pattern) for pattern in self.names.harmless)
        ]
