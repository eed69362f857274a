"""What a dLLM transformer is: its sizes and the names of its tensors.

A family's file turns a config.json into an `Architecture`; `transformer.py`
turns an `Architecture` into a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from mosaic.errors import UnsupportedModel
from mosaic.models.rotary import Rotary

__all__ = ["Architecture", "TensorNames"]

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
class Architecture:
    """Sizes of one checkpoint.

    Parameters
    ----------
    hidden, layers, heads, kv_heads, head_size, ffn, vocabulary
        The transformer's sizes; `ffn` is one expert's where `experts` > 0.
    norm_eps
        RMSNorm's epsilon.
    rotary, rotary_scale
        How fast the dims of an attention head turn (the first dims, where not all do), and what cosines and sines are
        multiplied by.
    max_positions
        Positions that the model is made for.
    block
        Attention is causal by blocks of this many positions: a query sees its own block and those before; 0:
        everything.
    decode_block
        Bidirectional models: tokens that are decoded together where a request does not say; 0: the whole answer.
    experts, experts_per_token, normalize_experts
        Mixture of experts; 0 experts means a dense feed-forward.
    dense_layers, dense_ffn
        The number of first layers that have a dense feed-forward instead of experts, and its size.
    shared_ffn
        Size of the feed-forward that every token passes beside its experts; 0: none.
    router_scoring, router_groups, router_top_groups, router_scale
        How experts are chosen and weighed: attributes of the operator `moe_route`.
    qkv_bias, head_norms, tied
        Biases on q, k, v; per-head RMSNorm of q and k; head tied to the embedding.
    shifted
        Row i-1 predicts position i (Dream); the shift is done on row indices.
    editing
        Trained to replace tokens that it has decided (LLaDA2.1).
    mask_token_id
        The [MASK] token.
    eos_token_ids
        Tokens after which an answer is over: the end of the text, the end of a turn.
    pad_token_id
        The token that fills a batch up; None where the config names none.
    dtype
        The checkpoint's dtype.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    rotary: Rotary
    norm_eps: float
    mask_token_id: int
    names: TensorNames
    experts: int = 0
    experts_per_token: int = 0
    normalize_experts: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    tied: bool = False
    shifted: bool = False
    editing: bool = False
    dtype: str = "bfloat16"
    max_positions: int = 0
    block: int = 0
    decode_block: int = 0
    rotary_scale: float = 1.0
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0
    router_scoring: str = "softmax"
    router_groups: int = 0
    router_top_groups: int = 0
    router_scale: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"config.json: {self.heads} heads do not divide into {self.kv_heads} key-value heads."
            )
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise UnsupportedModel(f"config.json: {self.experts_per_token} experts per token of {self.experts}.")
        if self.router_groups:
            self._check_groups()
        if self.rotary.dim % 2 or not 0 < self.rotary.dim <= self.head_size:
            raise UnsupportedModel(f"config.json: {self.rotary.dim} of the {self.head_size} dims of a head turn.")

    def _check_sizes(self) -> None:
        if not 0 <= self.mask_token_id < self.vocabulary:
            raise UnsupportedModel(
                f"config.json: 'mask_token_id' is {self.mask_token_id}, outside the vocabulary of {self.vocabulary} tokens; "
                "give the id of the model's mask token."
            )
        if self.layers > MOST_LAYERS or self.parameters > MOST_PARAMETERS:
            raise UnsupportedModel(
                f"config.json: {self.layers} layers with {self.parameters} parameters are no model's; check its sizes."
            )
        if self.dense_layers > self.layers:
            raise UnsupportedModel(f"config.json: {self.dense_layers} dense layers of {self.layers}.")

    def _check_groups(self) -> None:
        groups, chosen, experts = self.router_groups, self.router_top_groups, self.experts
        if experts % groups or experts < 2 * groups:
            raise UnsupportedModel(f"config.json: {experts} experts do not divide into {groups} groups of two or more.")
        if not 0 < chosen <= groups or chosen * (experts // groups) < self.experts_per_token:
            raise UnsupportedModel(
                f"config.json: {chosen} of {groups} groups do not hold {self.experts_per_token} of {experts} experts."
            )

    @property
    def parameters(self) -> int:
        """Elements of the large matrices: those of layers, embedding and head."""
        heads = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        routed = 3 * self.hidden * (self.ffn * max(self.experts, 1) + self.shared_ffn)
        dense = min(self.dense_layers, self.layers)
        layers = self.layers * heads + (self.layers - dense) * routed + dense * 3 * self.hidden * self.dense_ffn
        return layers + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def max_context(self) -> int:
        """Positions that the model is made for, or that its rotary scaling reaches; 0 where nothing is known."""
        stretched = self.rotary.factor * (self.rotary.original or self.max_positions)
        return max(self.max_positions, int(stretched)) if self.max_positions else 0

    @property
    def rope_theta(self) -> float:
        """The rotary base."""
        return self.rotary.theta

    @property
    def rotary_size(self) -> int:
        """Dims of a head that turn."""
        return self.rotary.dim

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

    def is_dense(self, layer: int) -> bool:
        """Return whether a layer's feed-forward is a dense one."""
        return not self.experts or layer < self.dense_layers
