"""Register a bidirectional transformer of your own and plan it. Needs neither torch nor a GPU."""

import mosaic
from mosaic.registrar.graph import Buffer, Graph

LAYERS, HIDDEN, FFN, HEAD, VOCABULARY = 24, 2048, 8192, 128, 50304


def denoising_step(g: Graph) -> None:
    """One step: embed all tokens, attend in both directions, score the masked rows."""
    tokens, seqs = g.dim("tokens"), g.dim("seqs", at_most="tokens")
    ids, positions = g.input("token_ids", (tokens,), "int64"), g.input("positions", (tokens,), "int32")
    cu_seqlens = g.input("cu_seqlens", (seqs + 1,), "int32")
    table = weight(g, "embedding", VOCABULARY, HIDDEN)
    x = g.add_op("embedding", ids, table, name="hidden")
    for layer in range(LAYERS):
        with g.scope(f"layers.{layer}"):
            attention(g, x, positions, cu_seqlens)
            feed_forward(g, x)
    head(g, x, table)


def weight(g: Graph, name: str, *shape: int) -> Buffer:
    return g.weight(name, shape, "bfloat16")


def attention(g: Graph, x: Buffer, positions: Buffer, cu_seqlens: Buffer) -> None:
    """x += o(attention(norm(x))), all tokens at once."""
    h = g.add_op("rms_norm", x, weight(g, "attention_norm", HIDDEN), name="attention_in", eps=1e-5)
    q, k, v = (g.add_op("linear", h, weight(g, f"{name}_proj", HIDDEN, HIDDEN), name=name) for name in "qkv")
    frequencies = g.weight("inv_freq", (HEAD // 2,), "float32", tensor=f"=inv_freq:theta=10000.0,dim={HEAD}")
    for turned in (q, k):
        g.add_op("rotary", turned, positions, frequencies, head_size=HEAD)  # in place
    span = g.dim("span", at_most="tokens")  # how many keys a query sees on average
    y = g.add_op("attention", q, k, v, cu_seqlens, head_size=HEAD, scale=HEAD**-0.5, span=span)
    g.add_alias(y, q)  # the output overwrites the queries: its operator says that it may
    g.add_op("linear_add", y, weight(g, "o_proj", HIDDEN, HIDDEN), x, name="o")


def feed_forward(g: Graph, x: Buffer) -> None:
    """x += down(silu(gate(h)) * up(h)) with h = norm(x), as many tokens at a time as the planner says."""
    with g.chunk("ffn", over=g.dim("tokens")):
        h = g.add_op("rms_norm", x, weight(g, "ffn_norm", HIDDEN), name="ffn_in", eps=1e-5)
        gate = g.add_op("linear", h, weight(g, "gate_proj", FFN, HIDDEN), name="gate")
        up = g.add_op("linear", h, weight(g, "up_proj", FFN, HIDDEN), name="up")
        g.add_op("silu_mul", gate, up, name="act")
        g.add_op("linear_add", gate, weight(g, "down_proj", HIDDEN, FFN), x, name="down")


def head(g: Graph, x: Buffer, table: Buffer) -> None:
    """Token and statistics of every masked row; in chunks, their logits need not all exist at once."""
    masked = g.dim("masked", at_most="tokens")
    rows, token = g.input("rows", (masked,), "int64"), g.output("token", (masked,), "int64")
    scores = [g.output(name, (masked,), "float32") for name in ("maximum", "second", "logsumexp", "entropy")]
    with g.chunk("logits", over=masked):
        h = g.add_op("gather_rows", x, rows, name="masked_hidden")
        h = g.add_op("rms_norm", h, weight(g, "final_norm", HIDDEN), name="masked_normed", eps=1e-5)
        g.add_op("row_stats", g.add_op("linear", h, table, name="logits"), out=(token, *scores))


def one_sequence(tokens: int) -> dict[str, int]:
    """Values of the dims: one sequence, half of it masked."""
    return {"tokens": tokens, "seqs": 1, "masked": (tokens + 1) // 2, "span": tokens}


plan = mosaic.plan_graph(
    denoising_step, dims=one_sequence(131_072), dims_at=one_sequence, device="rtx-4090", budget="8GiB"
)
print(f"fits: {plan.fits}, {plan.total_bytes / 2**30:.2f} of 8 GiB; optimal: {plan.optimal}")
print(f"rows per chunk: {plan.config}")
print(f"longest context: {plan.max_ctx_tokens:,} tokens")
for form in plan.document["formula"]:
    print(f"bytes at {form['at']}: {form['expr']}")
