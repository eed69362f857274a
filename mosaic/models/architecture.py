"""The description of a dLLM transformer: its sizes and the names of its tensors.

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

MOST_LAYERS: Final = 4096
MOST_PARAMETERS: Final = 1 << 48
"""The largest supported number; a config with more is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Checkpoint names; `{layer}` stands for the layer's number, the mixture-of-experts names also stack experts.

    `name[a:b]` is rows [a, b) of a tensor that the checkpoint keeps fused. In `dense` and `shared`, feed-forwards
    beside the experts, `{part}` is gate, up or down. `harmless` are patterns of tensors that a checkpoint may hold and
    Mosaic does not read: rotary frequencies, which follow from the config.
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
        Rotary frequencies of the rotated dims of a head (the first ones, if not all are), and the factor on cosines and
        sines.
    window
        A query at position p sees only keys at positions j with |p - j| < window; 0: all keys.
    qkv_bias, head_norms
        Biases on q, k, v; per-head RMSNorm of q and k.
    keys_as_values
        The values are the keys before norm and rotation; there is no projection of values.

    Raises
    ------
    UnsupportedModel
        If the sizes do not match each other.
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
            raise UnsupportedModel(f"config.json: {self.rotary.dim} of {self.head_size} dims of a head are rotated.")

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
        Hidden columns; of one expert in a mixture of experts.
    experts, experts_per_token, normalize
        Mixture of experts, and whether the weights of a token's experts are divided by their sum. 0 experts: dense.
    shared
        Hidden columns of the feed-forward that every token passes beside its experts; 0: none.
    scoring, groups, top_groups, scale
        How experts are chosen and weighted: attributes of the operator `moe_route`.

    Raises
    ------
    UnsupportedModel
        If more experts are chosen than exist.
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
        """The routing attributes that differ from the defaults of the operator `moe_route`."""
        said = {"scoring": self.scoring, "groups": self.groups, "top_groups": self.top_groups, "scale": self.scale}
        usual = {"scoring": "softmax", "groups": 0, "top_groups": 0, "scale": 1.0}
        return {name: value for name, value in said.items() if value != usual[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The description of one layer of a stack; equal layers share a template."""

    attention: Attention
    feed_forward: FeedForward

    def times(self, count: int) -> tuple[Layer, ...]:
        """Return a stack of `count` such layers.

        Raises
        ------
        UnsupportedModel
            If there are more layers than any model has.
        """
        if count > MOST_LAYERS:
            raise UnsupportedModel(f"config.json: {count} layers are no model's; check its sizes.")
        return (self,) * count


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of one checkpoint: an embedding, a stack of layers, an ending.

    Parameters
    ----------
    hidden, vocabulary
        Columns of the hidden states, rows of the embedding.
    stack
        The layers, from the first to the last.
    norm_eps
        RMSNorm's epsilon.
    max_positions
        Positions that the model was trained for.
    block
        Attention is causal by blocks of this many positions: a query sees its own block and earlier ones; 0: all keys.
    decode_block
        Bidirectional models: tokens that are decoded together by default; 0: the whole answer.
    tied
        The head is the embedding matrix.
    shifted
        Row i-1 predicts position i (Dream); the shift is done on row indices.
    published
        The decoding algorithm that the model was published with, if it does not follow from `block` and `shifted`.
    mask_token_id
        The [MASK] token.
    eos_token_ids
        Tokens that end an answer: the end of the text, the end of a turn.
    pad_token_id
        The token that pads a batch; None if the config names none.
    dtype
        Of hidden states and activations, and of weights that are stored as they are.
    keys
        The dtype that keys and values are kept in; that of activations, if not given.
    scheme
        How the matrices of layers are stored.

    Raises
    ------
    UnsupportedModel
        If a size is out of range, or layers differ in a property that must be common.
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
        """Cached: every step asks for the inputs of its phase in a model."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, entry.name) for entry in fields(self)]))

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.stack)

    @cached_property
    def attention(self) -> Attention:
        """The attention of every layer.

        Raises
        ------
        UnsupportedModel
            If the layers differ in it: the caller supports only equal layers.
        """
        first, *others = dict.fromkeys(layer.attention for layer in self.stack)
        if others:
            raise UnsupportedModel("the attention of the model's layers differs, and this needs layers that are alike.")
        return first

    @property
    def feed_forward(self) -> FeedForward:
        """The feed-forward of the last layer; in a mixture of experts, first layers may be dense."""
        return self.stack[-1].feed_forward

    @cached_property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotary rules of the layers."""
        return tuple(dict.fromkeys(layer.attention.rotary for layer in self.stack))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of layers that have one."""
        return tuple(sorted({layer.attention.window for layer in self.stack} - {0}))

    @property
    def rotary(self) -> Rotary:
        """The rotary rule of the first layer; rules that depend on a sequence's length are the same in all layers."""
        return self.rotaries[0]

    @cached_property
    def parameters(self) -> int:
        """Elements of the large matrices: layers, embedding and head."""
        total = self.vocabulary * self.hidden * (1 if self.tied else 2)
        for layer in self.stack:
            ffn, attention = layer.feed_forward, layer.attention
            total += 2 * self.hidden * (attention.width + attention.kv_width)
            total += 3 * self.hidden * (ffn.size * max(ffn.experts, 1) + ffn.shared)
        return total

    @cached_property
    def max_context(self) -> int:
        """Positions that the model was trained for, or that its rotary scaling reaches; 0 if unknown."""
        stretched = self.rotary.factor * (self.rotary.original or self.max_positions)
        return max(self.max_positions, int(stretched)) if self.max_positions else 0

    @property
    def copies(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold as copies of another: a head equal to the embedding."""
        return {self.names.head: self.names.embedding} if self.tied else {}

    def unused(self, names: Iterable[str], used: Iterable[str]) -> list[str]:
        """List the tensors among `names` that are neither used, nor harmless, nor copies of a used one."""
        known = {*used, *self.copies}
        return [
            name
            for name in names
            if name not in known and not any(fnmatchcase(name, pattern) for pattern in self.names.harmless)
        ]
