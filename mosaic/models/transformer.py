"""One full bidirectional denoising step, registered from an `Architecture`.

`tokens` is the packed total of all sequences, `masked` the rows unembedded.
Shape legend: T tokens, M masked rows, D hidden, F feed-forward, V vocabulary,
N query heads, K key-value heads, H head size, E experts.
"""

from __future__ import annotations

from mosaic.models.architecture import Architecture
from mosaic.registrar.graph import Buffer, Graph

__all__ = ["full_step"]

PROJECTION_TILE = 128
FFN_TILE = 128
EXPERT_TILE = 128
LOGITS_TILE = 64


def full_step(g: Graph, arch: Architecture, *, logits: bool = False) -> None:
    """Register the step: embedding, layers, head with statistics, and the logits of chosen rows if asked for.

    Parameters
    ----------
    g
        An empty graph.
    arch
        Sizes and tensor names.
    logits
        Also return logits[R, V] of `logit_rows` R chosen rows, as an output in the plan.
    """
    tokens, seqs = g.dim("tokens"), g.dim("seqs", at_most="tokens")
    ids = g.input("token_ids", (tokens,), "int64")
    positions = g.input("positions", (tokens,), "int32")
    cu_seqlens = g.input("cu_seqlens", (seqs + 1,), "int32")
    table = g.weight("embedding", (arch.vocabulary, arch.hidden), arch.dtype, tensor=arch.names.embedding)
    inv_freq = g.weight(
        "inv_freq", (arch.head_size // 2,), "float32", tensor=f"=inv_freq:theta={arch.rope_theta},dim={arch.head_size}"
    )
    x = g.add_op("embedding", ids, table, name="hidden")
    for layer in range(arch.layers):
        with g.scope(f"layers.{layer}"):
            attention(g, arch, layer, x, positions, cu_seqlens, inv_freq)
            (experts if arch.experts else feed_forward)(g, arch, layer, x)
    head(g, arch, x, table, cu_seqlens, logits=logits)


def norm_weight(g: Graph, arch: Architecture, name: str, tensor: str) -> Buffer:
    return g.weight(name, (arch.hidden,), arch.dtype, tensor=tensor)


def attention(
    g: Graph, arch: Architecture, layer: int, x: Buffer, positions: Buffer, cu_seqlens: Buffer, inv_freq: Buffer
) -> None:
    """x += attention(rms_norm(x)): projections by chunks of tokens, one attention over all, output over queries."""
    tokens, names = g.dim("tokens"), arch.names
    width, kv_width = arch.heads * arch.head_size, arch.kv_heads * arch.head_size
    q = g.buffer("q", (tokens, width), arch.dtype)
    k = g.buffer("k", (tokens, kv_width), arch.dtype)
    v = g.buffer("v", (tokens, kv_width), arch.dtype)
    plan = (
        (q, names.query, names.query_norm, arch.heads),
        (k, names.key, names.key_norm, arch.kv_heads),
        (v, names.value, "", 0),
    )
    norm = norm_weight(g, arch, "attention_norm", names.attention_norm.format(layer=layer))
    with g.chunk("proj", over=tokens, tile=PROJECTION_TILE):
        h = g.add_op("rms_norm", x, norm, name="attention_in", eps=arch.norm_eps)
        for out, tensor, norm_tensor, heads in plan:
            name = out.name.rsplit("/", 1)[-1]
            stem = tensor.format(layer=layer)
            weight = g.weight(f"{name}_proj", (out.shape[1], arch.hidden), arch.dtype, tensor=f"{stem}.weight")
            bias = (
                g.weight(f"{name}_bias", (out.shape[1],), arch.dtype, tensor=f"{stem}.bias") if arch.qkv_bias else None
            )
            g.add_op("linear", h, weight, bias, out=out, name=f"{name}_linear")
            if heads and arch.head_norms:
                scale = g.weight(f"{name}_norm", (arch.head_size,), arch.dtype, tensor=norm_tensor.format(layer=layer))
                g.add_op("head_norm", out, scale, name=f"{name}_head_norm", heads=heads, eps=arch.norm_eps)
            if heads:
                g.add_op(
                    "rotary", out, positions, inv_freq, name=f"{name}_rotary", heads=heads, head_size=arch.head_size
                )
    y = g.add_op(
        "attention", q, k, v, cu_seqlens, heads=arch.heads, kv_heads=arch.kv_heads, head_size=arch.head_size,
        scale=arch.head_size**-0.5, pairs=g.dim("pairs"),
    )  # fmt: skip
    g.add_alias(y, q)
    weight = g.weight("o_proj", (arch.hidden, width), arch.dtype, tensor=names.output.format(layer=layer))
    g.add_op("linear_add", y, weight, x, name="o_linear")


def feed_forward(g: Graph, arch: Architecture, layer: int, x: Buffer) -> None:
    """x += down(silu(gate(h)) * up(h)) with h = rms_norm(x), by chunks of tokens."""
    names = arch.names
    norm = norm_weight(g, arch, "ffn_norm", names.ffn_norm.format(layer=layer))
    wide, narrow = (arch.ffn, arch.hidden), (arch.hidden, arch.ffn)
    gate_proj = g.weight("gate_proj", wide, arch.dtype, tensor=names.gate.format(layer=layer))
    up_proj = g.weight("up_proj", wide, arch.dtype, tensor=names.up.format(layer=layer))
    down_proj = g.weight("down_proj", narrow, arch.dtype, tensor=names.down.format(layer=layer))
    with g.chunk("ffn", over=g.dim("tokens"), tile=FFN_TILE):
        h = g.add_op("rms_norm", x, norm, name="ffn_in", eps=arch.norm_eps)
        gate = g.add_op("linear", h, gate_proj, name="gate")
        up = g.add_op("linear", h, up_proj, name="up")
        g.add_op("silu_mul", gate, up, name="act")
        g.add_op("linear_add", gate, down_proj, x, name="down")


def experts(g: Graph, arch: Architecture, layer: int, x: Buffer) -> None:
    """x += sum over a token's top experts of score * expert(h), dispatched by chunks of tokens."""
    names, many, top_k = arch.names, arch.experts, arch.experts_per_token
    norm = norm_weight(g, arch, "ffn_norm", names.ffn_norm.format(layer=layer))
    router = g.weight("router", (many, arch.hidden), arch.dtype, tensor=names.router.format(layer=layer))
    gate_proj, up_proj, down_proj = (
        g.weight(f"{name}_proj", (many, *shape), arch.dtype, tensor=tensor.format(layer=layer, experts=f"{{0:{many}}}"))
        for name, tensor, shape in (
            ("gate", names.gate, (arch.ffn, arch.hidden)),
            ("up", names.up, (arch.ffn, arch.hidden)),
            ("down", names.down, (arch.hidden, arch.ffn)),
        )
    )
    with g.chunk("experts", over=g.dim("tokens"), tile=EXPERT_TILE):
        h = g.add_op("rms_norm", x, norm, name="ffn_in", eps=arch.norm_eps)
        scores, chosen = g.add_op("moe_route", h, router, name="route", top_k=top_k, normalize=arch.normalize_experts)
        order, offsets = g.add_op("moe_sort", chosen, name="sort", num_experts=many)
        rows = g.add_op("moe_gather", h, order, name="dispatch", top_k=top_k)
        gate = g.add_op("grouped_linear", rows, gate_proj, offsets, name="gate")
        up = g.add_op("grouped_linear", rows, up_proj, offsets, name="up")
        g.add_op("silu_mul", gate, up, name="act")
        down = g.add_op("grouped_linear", gate, down_proj, offsets, name="down")
        g.add_op("moe_combine", down, order, scores, x, name="combine")


def head(g: Graph, arch: Architecture, x: Buffer, table: Buffer, cu_seqlens: Buffer, *, logits: bool) -> None:
    """Statistics of the masked rows, from logits by chunks of rows or fused with the unembedding."""
    masked = g.dim("masked", at_most="tokens")
    norm = norm_weight(g, arch, "final_norm", arch.names.final_norm)
    weight = (
        table if arch.tied else g.weight("head", (arch.vocabulary, arch.hidden), arch.dtype, tensor=arch.names.head)
    )
    rows = g.input("rows", (masked,), "int64")
    scores = [g.output(name, (masked,), "float32") for name in ("maximum", "second", "logsumexp", "entropy")]
    stats = (g.output("token", (masked,), "int64"), *scores)
    source = g.add_op("shift_rows", rows, cu_seqlens, name="source_rows") if arch.shifted else rows
    how = g.choice("head", ("logits", "fused"))
    with g.scope("head"), g.chunk("logits", over=masked, tile=LOGITS_TILE):
        h = unembedding_rows(g, arch, x, source, norm)
        if how == "fused":
            g.add_op("unembed_stats", h, weight, out=stats)
        else:
            g.add_op("row_stats", g.add_op("linear", h, weight, name="logits"), out=stats)
    g.add_op("confidence", stats[1], stats[3], out=g.output("confidence", (masked,), "float32"), name="confidence_of")
    if logits:
        returned = g.dim("logit_rows", at_most="tokens")
        chosen = g.input("logit_rows", (returned,), "int64")
        with g.scope("returned"):
            source = g.add_op("shift_rows", chosen, cu_seqlens, name="source_rows") if arch.shifted else chosen
            h = unembedding_rows(g, arch, x, source, norm)
        g.add_op(
            "linear", h, weight, out=g.output("logits", (returned, arch.vocabulary), arch.dtype), name="returned_logits"
        )


def unembedding_rows(g: Graph, arch: Architecture, x: Buffer, rows: Buffer, norm: Buffer) -> Buffer:
    """rms_norm(x[rows]), normalised in place of the gathered rows."""
    gathered = g.add_op("gather_rows", x, rows, name="gathered")
    h: Buffer = g.add_op("rms_norm", gathered, norm, name="normed", eps=arch.norm_eps)
    g.add_alias(h, gathered)
    return h
