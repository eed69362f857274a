"""One step of a denoising transformer, registered from an `Architecture` and a `Phase`.

`tokens` is the packed total of all sequences or windows, `masked` the number of unembedded rows, `span` the mean number
of keys that a query sees. In cached phases `keys` is the packed total of visible keys, `NAME_rows` the rows of a state.
The second graph of a cut phase computes `kept` of the tokens and unembeds `decided` of them. Shape legend: T tokens, B
sequences, R rows of the state, W width of a row, D hidden, F feed-forward, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable

from mosaic.errors import GraphError
from mosaic.models.architecture import Architecture
from mosaic.models.attention.projections import PROJECTION_TILE, Chosen, add_product
from mosaic.models.cutting import Prefix, Suffix
from mosaic.models.ending import WITHOUT_HIDDEN, StepEnding
from mosaic.models.inputs import ROW_BOUNDS, StepInputs
from mosaic.models.parts.cut import KEPT_DIM
from mosaic.models.phase import Phase
from mosaic.models.residency import Hidden, Residency
from mosaic.models.state import State
from mosaic.registrar.few_rows import tile_count
from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.operator import Dim
from mosaic.registrar.schemes.plain import PLAIN
from mosaic.registrar.schemes.scheme import Bundle, Matrix, product

FFN_TILE = 128
EXPERT_TILE = 128


def register_step(g: Graph, arch: Architecture, phase: Phase) -> None:
    """Register the step: embedding, layers, and the ops of the phase's parts.

    Parameters
    ----------
    g
        An empty graph.
    arch
        Sizes and tensor names.
    phase
        The kind of step.
    """
    TransformerStep(g, arch, phase).register()


class TransformerStep:
    """The registration of one step: a `StepGraph`, and the sublayers in order.

    `partial`: beyond its keys and values, the last layer computes only the unembedded rows, if any.
    """

    kv: Buffer
    near: Buffer | None = None

    def __init__(self, g: Graph, arch: Architecture, phase: Phase) -> None:
        self.g, self.arch, self.phase = g, arch, phase
        self.inputs = StepInputs(g, phase.inputs(arch))
        self.tokens, self.seqs = g.dim("tokens"), g.dim("seqs", at_most="tokens")
        self.first_graph = phase.graph == "prefix"
        if phase.graph == "suffix":
            self.tokens = g.dim(KEPT_DIM, at_most="tokens")
        ways = {way.name: way for way in phase.cache.ways() if way.serves(arch) and (phase.cut is None or way.cuts)}
        phase.cache.dims(self)
        self.span = g.dim("span")
        for way in ways.values():
            way.dims(self)
        self.decides = phase.head.decides and not self.first_graph
        if self.decides:
            self.masked = g.dim("masked", at_most="tokens")
            self.head_choice = g.choice("head", phase.head.ways, alike=False)
        self.attention_way = ways[g.choice("attention", tuple(ways))]
        # x times the norm's weight, before the division by the norm, may exceed float16's range
        few = phase.cached and phase.head.decides and arch.dtype != "float16" and arch.scheme is PLAIN
        self.fused = few and g.choice("products", ("apart", "fused"), alike=False) == "fused"
        places = ("device", "host") if phase.cut is None else ("device",)
        self.on_host = g.choice("hidden", places, escalating=True) == "host"
        self.residency = Residency(g, arch)
        self.partial = self._partial()
        self._rest: dict[str, Bundle] | None = None
        for way in ways.values():
            way.knobs(self)

    def _partial(self) -> bool:
        """Only if the hidden states of all tokens are not read. Not if attention needs all tokens, or if the head is
        streamed: all matrices of the last layer would be on the device beside it."""
        if self.phase.reads_hidden or not self.attention_way.by_rows:
            return False
        return self.phase.cached if not self.phase.head.decides else not self.residency.streams_head

    def register(self) -> None:
        """Register all of it; for a cut phase, one of its graphs."""
        cut, way = self.phase.cut, self.attention_way
        prefix = Prefix(self, cut, way) if cut is not None and self.first_graph else None
        self.suffix = Suffix(self, cut, way) if cut is not None and not self.first_graph else None
        ids = self.begin()
        self._hidden: Hidden | None = Hidden(
            self.g, self.arch, self.tokens, on_host=self.on_host, buffer=None if prefix is None else prefix.hidden
        )
        self.attention_way.begin(self)
        table = self.embedding()
        if ids is not None:
            self.embed(ids, table)
        if self.suffix is not None:
            self.suffix.begin()
        if prefix is not None:
            prefix.end(self.layers(0, prefix.cut.layer))
        else:
            self.end(self.layers(0 if self.suffix is None else self.suffix.cut.layer, self.arch.layers), table)
        self.inputs.finish(all_asked=self.phase.cut is None)
        self._check_states()

    def begin(self) -> Buffer | None:
        """Register the ops before the embedding; return the token ids, or None in a second graph."""
        g, phase = self.g, self.phase
        computed = self.inputs.of_tokens = phase.tokens.supplied(self)
        if phase.cut is not None:
            computed = {**computed, **phase.cut.supplied(self)}
        self.inputs.supplied = computed if self.suffix is None else self.suffix.supplied(computed)
        ids = self.inputs["token_ids"] if self.suffix is None else None
        self.positions, self.cu_seqlens = self.inputs["positions"], self.inputs["cu_seqlens"]
        self.sequences: Buffer | None = None
        if self.arch.rotary.kind == "dynamic":
            self.inv_freq, self.sequences = {self.arch.rotary: self.inputs["frequencies"]}, self.inputs["sequences"]
        else:
            self.inv_freq = {
                rotary: g.weight(f"inv_freq{number or ''}", (rotary.dim // 2,), "float32", tensor=rotary.constant)
                for number, rotary in enumerate(self.arch.rotaries)
            }
        self._sees = {window: self.inputs[f"sees_{window}"] for window in phase.cache.ranges(self.arch)}
        phase.cache.declare(self)
        if phase.cut is not None and self.suffix is None:
            phase.cut.declare(self)
        if phase.cached and self.decides:
            self.inputs[ROW_BOUNDS.name]
        for state in (*phase.states, *phase.held):
            self.state(state)
        self.arrivals: Buffer | None = None
        if self.fused:
            attentions = {layer.attention for layer in self.arch.stack}
            counts = [tile_count(own.width, own.kv_width, own.kv_width) for own in attentions]
            self.arrivals = g.add_op("zeros", name="arrivals", count=max(tile_count(self.arch.hidden), *counts))
        return ids

    def layers(self, first: int, end: int) -> dict[str, Bundle]:
        """Register layers; return the matrices fetched for the next op."""
        matrices = self.fetch_attention(first)
        for layer in self.g.layers(range(first, end), self.kind):
            matrices = self.layer(layer, matrices or self.fetch_attention(layer))
        return matrices or ({} if end == self.arch.layers else self.fetch_attention(end))

    def kind(self, layer: int) -> Hashable:
        """Return the key of a layer's registration, except its number."""
        arch, cut, streams = self.arch, self.phase.cut, self.residency.streams
        observed, own = cut is not None and layer <= cut.layer, self.attention_way.kind(self, layer)
        fetches_keys_alone = layer + 2 == arch.layers and self.partial and not self.phase.head.decides
        return fetches_keys_alone, observed, streams(layer), streams(layer + 1), arch.stack[layer : layer + 2], own

    def end(self, matrices: dict[str, Bundle], table: Buffer) -> None:
        """Register the ops after the last layer."""
        g, arch, phase, stream = self.g, self.arch, self.phase, self.hidden.buffer
        if not phase.reads_hidden:
            self._hidden = None
        for part in phase.parts:
            part.finish(self)
        if phase.head.decides:
            end = StepEnding(
                g, arch, phase, self.residency, self.inputs, hidden=stream if phase.reads_hidden else None,
                rows=lambda rows, prefix: self.last_rows(stream, rows, prefix), cu_seqlens=self.cu_seqlens,
                masked=self.masked if self.suffix is None else self.suffix.decided,
            )  # fmt: skip
            end.register(matrices["head"].whole if matrices else table, self.head_choice)

    @property
    def hidden(self) -> Hidden:
        """The hidden states of all tokens; after the last layer, if a part of the phase `reads_hidden`.

        Raises
        ------
        GraphError
            If no part does: the last layer has computed less.
        """
        if self._hidden is None:
            raise GraphError(WITHOUT_HIDDEN)
        return self._hidden

    def sees(self, layer: int) -> Buffer | None:
        """Return the keys [begin, end) of its sequence that a token sees in a layer, int32 [T, 2]; None: by blocks."""
        return self._sees.get(self.arch.stack[layer].attention.window)

    def state(self, state: State) -> Buffer:
        """Return the buffer of a state of a part, or of a state with rows of other owners."""
        return state.register(self.g, self.arch)

    def _check_states(self) -> None:
        """Make sure that no state has rows of other owners."""
        known = {state.name for state in (*self.phase.states, *self.phase.held)}
        strange = [b.name for b in self.g.buffers if b.kind == "state" and b.name not in known]
        if strange:
            raise GraphError(f"no part of the phase has the states {', '.join(strange)}: add them to its `states`.")

    def embedding(self) -> Buffer:
        """Return the embedding table, which stays in host memory if rows are gathered there."""
        arch = self.arch
        declare = self.residency.on_host if self.residency.embedding_on_host else self.residency.on_device
        return declare("embedding", (arch.vocabulary, arch.hidden), arch.dtype, arch.names.embedding)

    def embed(self, ids: Buffer, table: Buffer) -> None:
        """hidden = table[ids]."""
        g = self.g
        if not self.on_host:
            g.add_op("embedding", ids, table, out=self.hidden.buffer, name="embed")
            return
        with g.chunk("proj", over=self.tokens, tile=PROJECTION_TILE, name="embed") as rows:
            window = self.hidden.window(rows, "embedded")
            g.add_op("embedding", ids, table, out=window, name="embed")
            self.hidden.keep(window)

    def layer(self, layer: int, matrices: dict[str, Bundle]) -> dict[str, Bundle]:
        """Register one layer, given its attention matrices; the next sublayer's matrices are fetched meanwhile."""
        g, arch, residency = self.g, self.arch, self.residency
        streamed = residency.streams(layer)
        last = layer + 1 == arch.layers
        if last and self.partial and not self.phase.head.decides:
            self.keys_alone(layer, matrices)
            return {}
        if last and self.partial:
            return self.keys_first(layer, matrices)
        with g.scope(f"layers.{layer}"):
            residency.arrive(streamed=streamed)
            ffn = residency.fetch(self.ffn_matrices(layer), streamed=streamed)
            self.attention(layer, matrices)
            residency.arrive(streamed=streamed)
        if last and not self.phase.head.decides:
            following = {}
        elif last:
            following = residency.fetch(self.head_matrices(), streamed=residency.streams_head)
        else:
            following = self.fetch_attention(layer + 1) if residency.streams(layer + 1) else {}
        with g.scope(f"layers.{layer}"):
            self.feed_forward(layer, ffn)
        return following

    def keys_alone(self, layer: int, matrices: dict[str, Bundle]) -> None:
        """Register the keys and values that a layer keeps."""
        with self.g.scope(f"layers.{layer}"):
            self.residency.arrive(streamed=self.residency.streams(layer))
            self.attention_way.keep(self, layer, self.attention_norm(layer), matrices)
        self.feed_forward_knob(layer)

    def keys_first(self, layer: int, matrices: dict[str, Bundle]) -> dict[str, Bundle]:
        """Register the last layer's keys and values of all tokens; `last_rows` registers what follows."""
        residency, streamed = self.residency, self.residency.streams(layer)
        with self.g.scope(f"layers.{layer}"):
            residency.arrive(streamed=streamed)
            ffn = residency.fetch(self.ffn_matrices(layer), streamed=streamed)
            self.attention_way.keep(self, layer, self.attention_norm(layer), matrices)
        self.feed_forward_knob(layer)
        self._rest = {**matrices, **ffn}
        return residency.fetch(self.head_matrices(), streamed=False)

    def last_rows(self, hidden: Buffer, rows: Buffer, prefix: str) -> Buffer:
        """Register the rows [C, D] of the hidden state after the last layer; if `keys_first` has registered keys and
        values, the rest of the layer is computed for these rows alone."""
        g, layer = self.g, self.arch.layers - 1
        if self._rest is not None:  # at the region's begin, where the timeline joins streams
            self.residency.arrive(streamed=self.residency.streams(layer))
        with g.scope("head"):
            x: Buffer = g.add_op("gather_rows", hidden, rows, name=f"{prefix}gathered")
            if self._rest is None:
                return x
            positions = g.add_op("gather_rows", self.positions, rows, name=f"{prefix}row_positions")
            sequences, sees = None, self.sees(layer)
            if self.sequences is not None:
                sequences = g.add_op("gather_rows", self.sequences, rows, name=f"{prefix}row_sequences")
            if sees is not None:
                sees = g.add_op("gather_rows", sees, rows, name=f"{prefix}row_sees")
        with g.scope(f"layers.{layer}"):
            h = g.add_op("rms_norm", x, self.attention_norm(layer), name="queries_in", eps=self.arch.norm_eps)
            self.attention_way.add_rows(self, layer, h, Chosen(rows, positions, sequences, sees), self._rest, x)
            self.add_feed_forward(layer, self._rest, x)
        return x

    def norm_weight(self, name: str, tensor: str, size: int | None = None) -> Buffer:
        return self.g.weight(name, (size or self.arch.hidden,), self.arch.dtype, tensor=tensor)

    def fetch_attention(self, layer: int) -> dict[str, Bundle]:
        """Fetch a layer's projections: of a last layer that ends there, those of keys and values alone; of a cut layer,
        those that the graph uses."""
        found, streamed = self.attention_way.matrices(self, layer), self.residency.streams(layer)
        used = {matrix.name for matrix in found}
        if self.partial and not self.phase.head.decides and layer + 1 == self.arch.layers:
            used = {"k_proj", "v_proj"}
        if self.phase.cut is not None and layer == self.phase.cut.layer:
            used = {"o_proj"} if self.suffix is not None else used - {"o_proj"}
        with self.g.scope(f"layers.{layer}"):
            fetched = self.residency.fetch([matrix for matrix in found if matrix.name in used], streamed=streamed)
        if self.arch.stack[layer].attention.keys_as_values and "k_proj" in fetched:
            fetched["v_proj"] = fetched["k_proj"]
        return fetched

    def attention(self, layer: int, matrices: dict[str, Bundle]) -> None:
        """hidden += attention(rms_norm(hidden)) @ o_proj.T, by the option of `attention`."""
        if self.suffix is not None and layer == self.suffix.cut.layer:
            self.suffix.attention(matrices)
        else:
            self.attention_way.register(self, layer, self.attention_norm(layer), matrices)

    def observe(self, layer: int, q: Buffer) -> None:
        """Pass a layer's queries, all rows, to the part that cuts the step, while they exist."""
        if self.phase.cut is not None and self.suffix is None:
            self.phase.cut.observe(self, layer, q)

    def attention_norm(self, layer: int) -> Buffer:
        return self.norm_weight("attention_norm", self.arch.names.attention_norm.format(layer=layer))

    def normed(self, rows: Dim, norm: Buffer, name: str) -> tuple[Buffer, Buffer]:
        """Return this iteration's rows of the hidden state, and rms_norm of them."""
        source = self.hidden.rows(rows, f"{name}_rows")
        return source, self.g.add_op("rms_norm", source, norm, name=name, eps=self.arch.norm_eps)

    # -- feed-forward -------------------------------------------------------------------------------------------

    def ffn_matrices(self, layer: int) -> list[Matrix]:
        """Return the matrices of the feed-forward; or of all experts stacked, and of the shared one."""
        names, ffn = self.arch.names, self.arch.stack[layer].feed_forward
        found = self.projections(layer, "" if ffn.experts else names.dense, ffn.size, experts=ffn.experts)
        return found + (self.projections(layer, names.shared, ffn.shared, prefix="shared_") if ffn.shared else [])

    def projections(self, layer: int, template: str, size: int, *, experts: int = 0, prefix: str = "") -> list[Matrix]:
        """Return gate, up and down of a feed-forward of this size, or of a stack of them; `template` names them, else
        the architecture does."""
        hidden, names, scheme = self.arch.hidden, self.arch.names, self.arch.scheme
        lead, stack = ((experts,), f"{{0:{experts}}}") if experts else ((), "")
        if experts and scheme.grouped_linear is None:
            scheme = PLAIN
        shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
        tensors = {
            part: (template or getattr(names, part)).format(layer=layer, experts=stack, part=part) for part in shapes
        }
        return [Matrix(f"{prefix}{part}_proj", (*lead, *shapes[part]), tensors[part], scheme) for part in shapes]

    def feed_forward_knob(self, layer: int) -> str:
        """Declare the knob of a layer's feed-forward; a phase has it even if no region uses it."""
        knob, tile = ("experts", EXPERT_TILE) if self.arch.stack[layer].feed_forward.experts else ("ffn", FFN_TILE)
        self.g.knob(knob, over=self.tokens, tile=tile)
        return knob

    def feed_forward(self, layer: int, matrices: dict[str, Bundle]) -> None:
        """hidden += feed_forward(rms_norm(hidden)), by chunks of tokens."""
        knob = self.feed_forward_knob(layer)
        with self.g.chunk(knob, over=self.tokens, tile=self.g.tiles[knob]) as rows:
            source = self.hidden.rows(rows, "ffn_in_rows")
            self.add_feed_forward(layer, matrices, source)
            self.hidden.keep(source)

    def add_feed_forward(self, layer: int, matrices: dict[str, Bundle], x: Buffer) -> None:
        """x += feed_forward(rms_norm(x))."""
        norm, dense = self.ffn_norm(layer), not self.arch.stack[layer].feed_forward.experts
        if self.fused and dense:
            gate, up, down = (matrices[f"{part}_proj"] for part in ("gate", "up", "down"))
            y = self.g.add_op("norm_gate_up", x, norm, gate.whole, up.whole, name="act", eps=self.arch.norm_eps)
            add_product(self, y, down, x, "down")
            return
        h = self.g.add_op("rms_norm", x, norm, name="ffn_in", eps=self.arch.norm_eps)
        if dense:
            self.feed(h, matrices, x)
        else:
            self.experts(layer, h, matrices, x)

    def feed(self, h: Buffer, matrices: dict[str, Bundle], target: Buffer, prefix: str = "") -> None:
        """target += down(silu(gate(h)) * up(h))."""
        g = self.g
        gate = product(g, h, matrices[f"{prefix}gate_proj"], name=f"{prefix}gate")
        up = product(g, h, matrices[f"{prefix}up_proj"], name=f"{prefix}up")
        g.add_op("silu_mul", gate, up, name=f"{prefix}act")
        add_product(self, gate, matrices[f"{prefix}down_proj"], target, f"{prefix}down")

    def experts(self, layer: int, h: Buffer, matrices: dict[str, Bundle], target: Buffer) -> None:
        """target += shared(h) + sum over a token's top experts of score * expert(h)."""
        g, ffn = self.g, self.arch.stack[layer].feed_forward
        many, top_k = ffn.experts, ffn.experts_per_token
        router, bias = self.router(layer)
        if ffn.shared:
            self.feed(h, matrices, target, "shared_")
        scores, chosen = g.add_op(
            "moe_route", h, router, bias, name="route", top_k=top_k, normalize=ffn.normalize, **ffn.routing,
        )  # fmt: skip
        order, offsets = g.add_op("moe_sort", chosen, name="sort", num_experts=many)
        dispatched = g.add_op("moe_gather", h, order, name="dispatch", top_k=top_k)
        gate = product(g, dispatched, matrices["gate_proj"], offsets=offsets, name="gate")
        up = product(g, dispatched, matrices["up_proj"], offsets=offsets, name="up")
        g.add_op("silu_mul", gate, up, name="act")
        down = product(g, gate, matrices["down_proj"], offsets=offsets, name="down")
        g.add_op("moe_combine", down, order, scores, target, name="combine")

    def ffn_norm(self, layer: int) -> Buffer:
        return self.norm_weight("ffn_norm", self.arch.names.ffn_norm.format(layer=layer))

    def router(self, layer: int) -> tuple[Buffer, Buffer | None]:
        """Return the router's weight, and the float32 bias on the scores that experts are chosen by."""
        arch, names, many = self.arch, self.arch.names, self.arch.stack[layer].feed_forward.experts
        found = self.g.weight("router", (many, arch.hidden), arch.dtype, tensor=names.router.format(layer=layer))
        if not names.router_bias:
            return found, None
        return found, self.g.weight("router_bias", (many,), "float32", tensor=names.router_bias.format(layer=layer))

    # -- head ---------------------------------------------------------------------------------------------------

    def head_matrices(self) -> list[Matrix]:
        """Return the head, unless it is the embedding table on the device."""
        arch = self.arch
        if arch.tied:
            return []
        return [Matrix("head", (arch.vocabulary, arch.hidden), arch.names.head, PLAIN)]
