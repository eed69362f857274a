"""One step of a denoising transformer, registered from an `Architecture` and a `Phase`.

`tokens` is the packed total of all sequences or windows, `masked` the rows unembedded, `span` the keys that a query sees
on average; in cached phases `keys` is the packed total of the keys seen, `kv_rows` the rows of the state. Shape legend:
T tokens, S keys, R rows of the state, M masked rows, D hidden, F feed-forward, V vocabulary, N query heads, K key-value
heads, H head size, E experts.
"""

from __future__ import annotations

from typing import Any

from mosaic.models.architecture import Architecture
from mosaic.models.head import Head
from mosaic.models.phase import Phase
from mosaic.models.residency import SLOTS, Hidden, Matrix, Residency, fetched, stored
from mosaic.registrar.graph import Buffer, Graph, Kind
from mosaic.registrar.operator import Dim

__all__ = ["register_step"]

PROJECTION_TILE = 128
FFN_TILE = 128
EXPERT_TILE = 128

ATTENTION = ("together", "queries", "heads")
"""How attention runs: all queries at once; by chunks of queries, which then never exist whole; or for a few KV heads at
a time, whose results are gathered before one output projection."""
CACHED_ATTENTION = ("together", "queries")
"""The same over the state: keys and values of all heads are there anyway."""


def register_step(g: Graph, arch: Architecture, phase: Phase) -> None:
    """Register the step: embedding, layers, and the head that the phase asks for.

    Parameters
    ----------
    g
        An empty graph.
    arch
        Sizes and tensor names.
    phase
        The kind of step.
    """
    _Step(g, arch, phase).register()


class _Step:
    """The registration of one step: what its sublayers share, and the sublayers in order."""

    def __init__(self, g: Graph, arch: Architecture, phase: Phase) -> None:
        self.g, self.arch, self.phase = g, arch, phase
        self.tokens, self.seqs = g.dim("tokens"), g.dim("seqs", at_most="tokens")
        if phase.cached:
            self.keys = g.dim("keys")
            self.span = g.dim("span", at_most="keys")
        else:
            self.span, self.kv_heads = g.dim("span", at_most="tokens"), g.dim("kv_heads", value=arch.kv_heads)
        if phase.head != "none":
            g.dim("masked", at_most="tokens")
        self.head_choice = Head.way(g, phase)
        self.attention_choice = g.choice("attention", CACHED_ATTENTION if phase.cached else ATTENTION)
        self.on_host = g.choice("hidden", ("device", "host"), escalating=True) == "host"
        self.residency = Residency(g, arch)
        if not phase.cached:
            g.knob("heads", over=self.kv_heads, tile=1)

    def register(self) -> None:
        """Register all of it."""
        g, arch, phase = self.g, self.arch, self.phase
        ids = g.input("token_ids", (self.tokens,), "int64")
        self.positions = g.input("positions", (self.tokens,), "int32")
        self.cu_seqlens = g.input("cu_seqlens", (self.seqs + 1,), "int32")
        rotary = arch.rotary
        self.inv_freq = g.weight("inv_freq", (rotary.dim // 2,), "float32", tensor=rotary.constant)
        self.sequences: Buffer | None = None
        if rotary.kind == "dynamic" and not phase.cached:  # kept keys are rotated once, by the constant ones
            self.inv_freq = g.input("frequencies", (self.seqs, rotary.dim // 2), "float32")
            self.sequences = g.input("sequences", (self.tokens,), "int32")
        if phase.cached or phase.held:
            self.declare_state()
        if phase.cached:
            self.slots = g.input("slots", (self.tokens,), "int64")
            self.key_slots = g.input("key_slots", (self.keys,), "int64")
            self.cu_keys = g.input("cu_keys", (self.seqs + 1,), "int32")
        self.hidden = Hidden(g, arch, on_host=self.on_host)
        self.attended = self.queries_buffer("attended", "host") if self.on_host and self.splits else None
        table = self.embed(ids)
        with g.scope("layers.0"):
            matrices = self.residency.fetch(self.attention_matrices(0), streamed=self.residency.streams(0))
        for layer in range(arch.layers):
            matrices = self.layer(layer, matrices)
        if phase.head == "none":
            Head.declare(g, arch)
            return
        head = Head(g, arch, phase, self.residency, hidden=self.hidden.buffer, cu_seqlens=self.cu_seqlens)
        head.register(matrices.get("head", table), self.head_choice)

    def declare_state(self) -> None:
        """The keys and values of all layers, side by side, one row a token; it grows at its end, so nothing moves.

        `slots` are the rows of the window's tokens, `key_slots` those of the keys that each sequence sees, by position.
        """
        g, arch = self.g, self.arch
        width = arch.layers * 2 * arch.kv_heads * arch.head_size
        self.kv = g.state("kv", (g.dim("kv_rows"), width), arch.dtype)

    @property
    def splits(self) -> bool:
        """Whether attention runs by groups of heads."""
        return self.attention_choice == "heads"

    def embed(self, ids: Buffer) -> Buffer:
        """hidden = table[ids]; the table stays in host memory where its rows are gathered from there."""
        g, arch = self.g, self.arch
        matrix = Matrix(name="embedding", shape=(arch.vocabulary, arch.hidden), tensor=arch.names.embedding)
        table = (
            self.residency.on_host(matrix)
            if self.residency.embedding_on_host
            else g.weight(matrix.name, matrix.shape, arch.dtype, tensor=matrix.tensor)
        )
        if not self.on_host:
            g.add_op("embedding", ids, table, out=self.hidden.buffer, name="embed")
            return table
        with g.chunk("proj", over=self.tokens, tile=PROJECTION_TILE, name="embed") as rows:
            window = self.hidden.window(rows, "embedded")
            g.add_op("embedding", ids, table, out=window, name="embed")
            self.hidden.keep(window)
        return table

    def layer(self, layer: int, matrices: dict[str, Buffer]) -> dict[str, Buffer]:
        """One layer, whose attention matrices are given; the matrices of the next sublayer are fetched meanwhile."""
        g, arch, residency = self.g, self.arch, self.residency
        streamed = residency.streams(layer)
        last = layer + 1 == arch.layers
        with g.scope(f"layers.{layer}"):
            residency.arrive(streamed=streamed)
            ffn = residency.fetch(self.ffn_matrices(layer), streamed=streamed)
            self.attention(layer, matrices)
            residency.arrive(streamed=streamed)
        if last and self.phase.head == "none":
            residency.declare(self.head_matrices(), streamed=residency.streams_head)
            following = {}
        elif last:
            following = residency.fetch(self.head_matrices(), streamed=residency.streams_head)
        else:
            with g.scope(f"layers.{layer + 1}"):
                following = residency.fetch(self.attention_matrices(layer + 1), streamed=residency.streams(layer + 1))
        with g.scope(f"layers.{layer}"):
            (self.feed_forward if arch.is_dense(layer) else self.experts)(layer, ffn)
        return following

    def norm_weight(self, name: str, tensor: str, size: int | None = None) -> Buffer:
        return self.g.weight(name, (size or self.arch.hidden,), self.arch.dtype, tensor=tensor)

    # -- attention ----------------------------------------------------------------------------------------------

    def attention_matrices(self, layer: int) -> list[Matrix]:
        """The four projections; shaped by the dim `kv_heads` where a region runs over it."""
        arch, names = self.arch, self.arch.names
        kv = (self.kv_heads if self.splits else arch.kv_heads) * arch.head_size
        width = kv * (arch.heads // arch.kv_heads)
        return [
            Matrix(name="q_proj", shape=(width, arch.hidden), tensor=names.query.format(layer=layer)),
            Matrix(name="k_proj", shape=(kv, arch.hidden), tensor=names.key.format(layer=layer)),
            Matrix(name="v_proj", shape=(kv, arch.hidden), tensor=names.value.format(layer=layer)),
            Matrix(name="o_proj", shape=(arch.hidden, width), tensor=names.output.format(layer=layer)),
        ]

    def attention(self, layer: int, matrices: dict[str, Buffer]) -> None:
        """hidden += attention(rms_norm(hidden)) @ o_proj.T, in the way that the choice says."""
        norm = self.norm_weight("attention_norm", self.arch.names.attention_norm.format(layer=layer))
        if self.phase.cached:
            self.attend_cached(layer, norm, matrices)
        elif self.attention_choice == "together":
            self.attend_together(layer, norm, matrices)
        elif self.attention_choice == "queries":
            self.attend_queries(layer, norm, matrices)
        else:
            self.attend_by_heads(layer, norm, matrices)

    def project(self, layer: int, name: str, h: Buffer, matrix: Buffer, out: Buffer | None = None) -> Buffer:
        """One of q, k, v, normed and rotated as the architecture says."""
        g, arch = self.g, self.arch
        tensor, head_norm = {
            "q": (arch.names.query, arch.names.query_norm),
            "k": (arch.names.key, arch.names.key_norm),
            "v": (arch.names.value, ""),
        }[name]
        width = matrix.shape[0]
        bias = None
        if arch.qkv_bias:
            tensor = tensor.format(layer=layer).replace(".weight", ".bias")
            bias = g.weight(f"{name}_bias", (width,), arch.dtype, tensor=tensor)
        y: Buffer = g.add_op("linear", h, matrix, bias, out=out, name=f"{name}_linear")
        if name != "v" and arch.head_norms:
            scale = self.norm_weight(f"{name}_norm", head_norm.format(layer=layer), arch.head_size)
            g.add_op("head_norm", y, scale, name=f"{name}_head_norm", eps=arch.norm_eps)
        if name != "v":
            factor: dict[str, Any] = {"factor": arch.rotary_scale} if arch.rotary_scale != 1.0 else {}
            g.add_op(
                "rotary", y, self.positions, self.inv_freq, self.sequences, name=f"{name}_rotary",
                head_size=arch.head_size, **factor,
            )  # fmt: skip
        return y

    def attend_to(self, q: Buffer, k: Buffer, v: Buffer, out: Buffer | None = None) -> Buffer:
        """softmax(q k^T) v, into `out` or over the queries' storage."""
        g, arch = self.g, self.arch
        blocks: dict[str, Any] = {"block": arch.block} if arch.block else {}
        y: Buffer = g.add_op(
            "attention", q, k, v, self.cu_seqlens, out=out, head_size=arch.head_size, scale=arch.head_size**-0.5,
            span=self.span, **blocks,
        )  # fmt: skip
        if out is None:
            g.add_alias(y, q)
        return y

    def attend_together(self, layer: int, norm: Buffer, matrices: dict[str, Buffer]) -> None:
        """Projections by chunks of tokens under one norm, one attention over all queries."""
        g, arch, tokens = self.g, self.arch, self.tokens
        heads = {"q": arch.heads, "k": arch.kv_heads, "v": arch.kv_heads}
        whole = {name: g.buffer(name, (tokens, n * arch.head_size), arch.dtype) for name, n in heads.items()}
        self.project_rows(layer, norm, matrices, whole, "proj", "attention_in")
        self.project_out(self.attend_to(whole["q"], whole["k"], whole["v"]), matrices["o_proj"])

    def project_out(self, y: Buffer, matrix: Buffer) -> None:
        """hidden += y @ o_proj.T for all heads, by windows where hidden states or results are in host memory."""
        g = self.g
        if not self.on_host:
            g.add_op("linear_add", y, matrix, self.hidden.buffer, name="o_linear")
            return
        with g.chunk("proj", over=self.tokens, tile=PROJECTION_TILE, name="output") as rows:
            window = self.hidden.rows(rows, "output_rows")
            if y.kind == "host":
                y = fetched(g, y, (rows, y.shape[1]), self.arch.dtype, "attended_rows")
            g.add_op("linear_add", y, matrix, window, name="o_linear")
            self.hidden.keep(window)

    def attend_queries(self, layer: int, norm: Buffer, matrices: dict[str, Buffer]) -> None:
        """Keys and values of all heads, then chunks of queries: project, attend, add to the residual at once."""
        g = self.g
        k, v = self.keys_and_values(layer, norm, matrices, self.arch.kv_heads)
        with g.chunk("proj", over=self.tokens, tile=PROJECTION_TILE, name="queries") as rows:
            source, h = self.normed(rows, norm, "queries_in")
            y = self.attend_to(self.project(layer, "q", h, matrices["q_proj"]), k, v)
            g.add_op("linear_add", y, matrices["o_proj"], source, name="o_linear")
            self.hidden.keep(source)

    def attend_by_heads(self, layer: int, norm: Buffer, matrices: dict[str, Buffer]) -> None:
        """A few KV heads at a time into their columns of one buffer, then one output projection of all: the arithmetic,
        to the bit, of attending at once. With the hidden states, that buffer is in host memory too."""
        if self.attended is None:
            self.attend_in_place(layer, norm, matrices)
            return
        g, attended = self.g, self.attended
        with g.chunk("heads", over=self.kv_heads, tile=1) as group:
            k, v = self.keys_and_values(layer, norm, matrices, group)
            with g.chunk("proj", over=self.tokens, tile=PROJECTION_TILE, name="queries") as rows:
                _, h = self.normed(rows, norm, "queries_in")
                q = self.project(layer, "q", h, matrices["q_proj"])
                y = g.buffer("attended_chunk", q.shape, q.dtype, rotate=SLOTS)
                stored(g, self.attend_to(q, k, v, y), attended)
        self.project_out(attended, matrices["o_proj"])

    def attend_in_place(self, layer: int, norm: Buffer, matrices: dict[str, Buffer]) -> None:
        """The queries of a few heads beside their keys and values, under one norm; their results over them."""
        g, arch = self.g, self.arch
        q, attended = self.queries_buffer("q", "transient"), self.queries_buffer("attended", "transient")
        g.add_alias(attended, q)
        with g.chunk("heads", over=self.kv_heads, tile=1) as group:
            k, v = (g.buffer(name, (self.tokens, group * arch.head_size), arch.dtype) for name in ("k", "v"))
            self.project_rows(layer, norm, matrices, {"q": q, "k": k, "v": v}, "proj", "attention_in")
            self.attend_to(q, k, v, attended)
        self.project_out(attended, matrices["o_proj"])

    def attend_cached(self, layer: int, norm: Buffer, matrices: dict[str, Buffer]) -> None:
        """Keys and values of the window into the state, by chunks of tokens; then its queries attend to the state, all
        at once or by chunks."""
        g, arch, tokens = self.g, self.arch, self.tokens
        together = self.attention_choice == "together"
        whole = g.buffer("q", (tokens, arch.heads * arch.head_size), arch.dtype) if together else None
        with g.chunk("proj", over=tokens, tile=PROJECTION_TILE, name="keys") as rows:
            _, h = self.normed(rows, norm, "keys_in")
            if whole is not None:
                self.project(layer, "q", h, matrices["q_proj"], whole)
            k, v = (self.project(layer, name, h, matrices[f"{name}_proj"]) for name in ("k", "v"))
            g.add_op("kv_store", k, v, self.slots, self.kv, name="store", layer=layer)
        if whole is not None:
            self.project_out(self.attend_to_state(layer, whole), matrices["o_proj"])
            return
        with g.chunk("proj", over=tokens, tile=PROJECTION_TILE, name="queries") as rows:
            source, h = self.normed(rows, norm, "queries_in")
            y = self.attend_to_state(layer, self.project(layer, "q", h, matrices["q_proj"]))
            g.add_op("linear_add", y, matrices["o_proj"], source, name="o_linear")
            self.hidden.keep(source)

    def attend_to_state(self, layer: int, q: Buffer) -> Buffer:
        """softmax(q k^T) v with the keys and values of the state, over the queries' storage."""
        g, arch = self.g, self.arch
        y: Buffer = g.add_op(
            "kv_attention", q, self.kv, self.key_slots, self.cu_seqlens, self.cu_keys, self.positions, name="attention",
            layer=layer, kv_heads=arch.kv_heads, head_size=arch.head_size, scale=arch.head_size**-0.5, block=arch.block,
            span=self.span,
        )  # fmt: skip
        g.add_alias(y, q)
        return y

    def queries_buffer(self, name: str, kind: Kind) -> Buffer:
        """The queries of all heads, or their results: of one layer, or in host memory of one layer after the other."""
        arch = self.arch
        width = self.kv_heads * (arch.heads // arch.kv_heads) * arch.head_size
        return self.g.buffer(name, (self.tokens, width), arch.dtype, kind=kind)

    def keys_and_values(
        self, layer: int, norm: Buffer, matrices: dict[str, Buffer], heads: Dim
    ) -> tuple[Buffer, Buffer]:
        """Those of all tokens for some heads, by chunks of tokens."""
        g, arch = self.g, self.arch
        k, v = (g.buffer(name, (self.tokens, heads * arch.head_size), arch.dtype) for name in ("k", "v"))
        self.project_rows(layer, norm, matrices, {"k": k, "v": v}, "keys", "keys_in")
        return k, v

    def project_rows(
        self, layer: int, norm: Buffer, matrices: dict[str, Buffer], outs: dict[str, Buffer], loop: str, name: str
    ) -> None:
        """Those of q, k and v that there are buffers for, of all tokens, by chunks of tokens under one norm."""
        with self.g.chunk("proj", over=self.tokens, tile=PROJECTION_TILE, name=loop) as rows:
            _, h = self.normed(rows, norm, name)
            for part, out in outs.items():
                self.project(layer, part, h, matrices[f"{part}_proj"], out)

    def normed(self, rows: Dim, norm: Buffer, name: str) -> tuple[Buffer, Buffer]:
        """This iteration's rows of the hidden state, and rms_norm of them."""
        source = self.hidden.rows(rows, f"{name}_rows")
        return source, self.g.add_op("rms_norm", source, norm, name=name, eps=self.arch.norm_eps)

    # -- feed-forward -------------------------------------------------------------------------------------------

    def ffn_matrices(self, layer: int) -> list[Matrix]:
        """The matrices of the feed-forward; or of all experts stacked, and of the one that every token passes."""
        arch, names = self.arch, self.arch.names
        own = {part: getattr(names, part) for part in ("gate", "up", "down")}
        if not arch.experts:
            return self.projections(layer, own, arch.ffn)
        if arch.is_dense(layer):
            return self.projections(layer, _parts(names.dense), arch.dense_ffn)
        found = self.projections(layer, own, arch.ffn, experts=arch.experts)
        if arch.shared_ffn:
            found += self.projections(layer, _parts(names.shared), arch.shared_ffn, prefix="shared_")
        return found

    def projections(
        self, layer: int, tensors: dict[str, str], size: int, *, experts: int = 0, prefix: str = ""
    ) -> list[Matrix]:
        """Gate, up and down of a feed-forward of this size, or of a stack of them."""
        hidden, stack = self.arch.hidden, f"{{0:{experts}}}"
        shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
        return [
            Matrix(
                name=f"{prefix}{part}_proj",
                shape=(experts, *shape) if experts else shape,
                tensor=tensors[part].format(layer=layer, experts=stack),
            )
            for part, shape in shapes.items()
        ]

    def feed_forward(self, layer: int, matrices: dict[str, Buffer]) -> None:
        """hidden += down(silu(gate(h)) * up(h)) with h = rms_norm(hidden), by chunks of tokens."""
        g = self.g
        norm = self.norm_weight("ffn_norm", self.arch.names.ffn_norm.format(layer=layer))
        with g.chunk("ffn", over=self.tokens, tile=FFN_TILE) as rows:
            source, h = self.normed(rows, norm, "ffn_in")
            self.feed(h, matrices, source)
            self.hidden.keep(source)

    def feed(self, h: Buffer, matrices: dict[str, Buffer], target: Buffer, prefix: str = "") -> None:
        """target += down(silu(gate(h)) * up(h))."""
        g = self.g
        gate = g.add_op("linear", h, matrices[f"{prefix}gate_proj"], name=f"{prefix}gate")
        up = g.add_op("linear", h, matrices[f"{prefix}up_proj"], name=f"{prefix}up")
        g.add_op("silu_mul", gate, up, name=f"{prefix}act")
        g.add_op("linear_add", gate, matrices[f"{prefix}down_proj"], target, name=f"{prefix}down")

    def experts(self, layer: int, matrices: dict[str, Buffer]) -> None:
        """hidden += shared(h) + sum over a token's top experts of score * expert(h), dispatched by chunks of tokens."""
        g, arch = self.g, self.arch
        many, top_k = arch.experts, arch.experts_per_token
        norm = self.norm_weight("ffn_norm", arch.names.ffn_norm.format(layer=layer))
        router = g.weight("router", (many, arch.hidden), arch.dtype, tensor=arch.names.router.format(layer=layer))
        bias = self.router_bias(layer)
        with g.chunk("experts", over=self.tokens, tile=EXPERT_TILE) as rows:
            source, h = self.normed(rows, norm, "ffn_in")
            if arch.shared_ffn:
                self.feed(h, matrices, source, "shared_")
            scores, chosen = g.add_op(
                "moe_route", h, router, bias, name="route", top_k=top_k, normalize=arch.normalize_experts,
                **self.routing(),
            )  # fmt: skip
            order, offsets = g.add_op("moe_sort", chosen, name="sort", num_experts=many)
            dispatched = g.add_op("moe_gather", h, order, name="dispatch", top_k=top_k)
            gate = g.add_op("grouped_linear", dispatched, matrices["gate_proj"], offsets, name="gate")
            up = g.add_op("grouped_linear", dispatched, matrices["up_proj"], offsets, name="up")
            g.add_op("silu_mul", gate, up, name="act")
            down = g.add_op("grouped_linear", gate, matrices["down_proj"], offsets, name="down")
            g.add_op("moe_combine", down, order, scores, source, name="combine")
            self.hidden.keep(source)

    def router_bias(self, layer: int) -> Buffer | None:
        """What is added to the scores by which experts are chosen, in float32."""
        arch = self.arch
        if not arch.names.router_bias:
            return None
        return self.g.weight(
            "router_bias", (arch.experts,), "float32", tensor=arch.names.router_bias.format(layer=layer)
        )

    def routing(self) -> dict[str, Any]:
        """How experts are chosen and weighed, where it is not the contract's own way."""
        arch = self.arch
        groups = {"groups": arch.router_groups, "top_groups": arch.router_top_groups} if arch.router_groups else {}
        scoring = {"scoring": arch.router_scoring} if arch.router_scoring != "softmax" else {}
        return {**scoring, **groups, **({"scale": arch.router_scale} if arch.router_scale != 1.0 else {})}

    # -- head ---------------------------------------------------------------------------------------------------

    def head_matrices(self) -> list[Matrix]:
        """The head, where it is not the embedding table on the device."""
        arch = self.arch
        if arch.tied:
            return []
        return [Matrix(name="head", shape=(arch.vocabulary, arch.hidden), tensor=arch.names.head)]


def _parts(template: str) -> dict[str, str]:
    """Names of gate, up and down, from one with `{part}` in it."""
    return {part: template.replace("{part}", part) for part in ("gate", "up", "down")}
