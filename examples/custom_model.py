"""Register a bidirectional transformer of your own and plan it. Needs neither torch nor a GPU."""

import mosaic

LAYERS, HIDDEN, FFN, HEADS, VOCABULARY = 24, 2048, 8192, 16, 50304
HEAD = HIDDEN // HEADS


def denoising_step(g: mosaic.Graph) -> None:
    """One step: embed all tokens, attend in both directions, and score the masked rows."""
    tokens, seqs, masked = g.dim("tokens"), g.dim("seqs", at_most="tokens"), g.dim("masked", at_most="tokens")
    cu_seqlens = g.input("cu_seqlens", (seqs + 1,), "int32")
    table = g.weight("embedding", (VOCABULARY, HIDDEN), "bfloat16")
    x = g.add_op("embedding", g.input("token_ids", (tokens,), "int64"), table, name="hidden")

    def weight(name: str, *shape: int) -> object:
        return g.weight(name, shape, "bfloat16")

    for layer in range(LAYERS):
        with g.scope(f"layers.{layer}"):
            h = g.add_op("rms_norm", x, weight("attention_norm", HIDDEN), name="attention_in", eps=1e-5)
            q, k, v = (g.add_op("linear", h, weight(f"{name}_proj", HIDDEN, HIDDEN), name=name) for name in "qkv")
            y = g.add_op(
                "attention", q, k, v, cu_seqlens, heads=HEADS, kv_heads=HEADS, head_size=HEAD, scale=HEAD**-0.5,
                pairs=g.dim("pairs"),
            )  # fmt: skip
            g.add_alias(y, q)  # the output may overwrite the queries: the contract of attention allows it
            g.add_op("linear_add", y, weight("o_proj", HIDDEN, HIDDEN), x, name="o")  # x += y @ o_proj.T

            with g.chunk("ffn", over=tokens):  # the planner decides how many rows at a time, or all
                h = g.add_op("rms_norm", x, weight("ffn_norm", HIDDEN), name="ffn_in", eps=1e-5)
                gate = g.add_op("linear", h, weight("gate_proj", FFN, HIDDEN), name="gate")
                up = g.add_op("linear", h, weight("up_proj", FFN, HIDDEN), name="up")
                g.add_op("silu_mul", gate, up, name="act")
                g.add_op("linear_add", gate, weight("down_proj", HIDDEN, FFN), x, name="down")

    rows = g.input("rows", (masked,), "int64")
    statistics = [g.output("token", (masked,), "int64")]
    statistics += [g.output(name, (masked,), "float32") for name in ("maximum", "second", "logsumexp", "entropy")]
    with g.chunk("logits", over=masked):  # logits of all masked rows never exist at once, unless they fit
        h = g.add_op("gather_rows", x, rows, name="masked_hidden")
        h = g.add_op("rms_norm", h, weight("final_norm", HIDDEN), name="masked_normed", eps=1e-5)
        logits = g.add_op("linear", h, table, name="logits")
        g.add_op("row_stats", logits, out=statistics)


def dims_at(tokens: int) -> dict[str, int]:
    """One sequence, half of it masked."""
    return {"tokens": tokens, "seqs": 1, "masked": max(1, tokens // 2), "pairs": tokens**2}


plan = mosaic.plan_graph(
    denoising_step, name="my-model", dims=dims_at(131_072), dims_at=dims_at, device="rtx-4090", budget_bytes=8 << 30
)
print("fits 8 GiB:   ", plan.fits)
print("total:        ", f"{plan.total_bytes / 2**30:.2f} GiB, workspace {plan.peak_bytes / 2**30:.2f} GiB")
print("optimal:      ", plan.optimal)
print("chunks:       ", plan.config)
print("L_max:        ", f"{plan.max_ctx_tokens:,} tokens")
for form in plan.document["formula"]:
    print("peak formula: ", form["expr"], "at", form["at"])
