"""Two layers of DiffusionGemma as a program: the hard test of the DSL. It is planned at full size and run small.

Sizes are the release's (26B-A4B), layers are two: one sliding, one full, of different heads and head sizes. `encode` is
causal and commits keys and values; `denoise` lets a canvas see the committed ones and its own, and carries a soft
embedding to the next step: attention over the vocabulary, accumulated tile by tile.
Shape legend: T tokens of the mode, P committed prefix, D hidden, F feed-forward, V vocabulary, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from diffusion_gemma_kernels import KERNELS

from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.operator import Implementation, Operator
from mosaic.registrar.polynomial import Polynomial
from mosaic.registrar.program import Program

HIDDEN: Final = 2816
DENSE: Final = 2112
EXPERTS: Final = 128
TOP_K: Final = 8
EXPERT: Final = 704
VOCABULARY: Final = 262144
WINDOW: Final = 1023  # committed tokens that a sliding layer keeps
EPS: Final = 1e-6
DTYPE: Final = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The differences between the two kinds of layers."""

    heads: int
    kv_heads: int
    head_size: int
    window: int
    prefix: str
    theta: float
    keys_are_values: bool


LAYERS: Final = (
    Layer(heads=16, kv_heads=8, head_size=256, window=1024, prefix="window_tokens", theta=1e4, keys_are_values=False),
    Layer(heads=16, kv_heads=2, head_size=512, window=0, prefix="kv_tokens", theta=1e6, keys_are_values=True),
)


def dims(*, prefix: int, prompt: int = 256, canvas: int = 256) -> dict[str, int]:
    """Values of every dim of the program: committed capacity, tokens to encode, tokens of the canvas."""
    return {"kv_tokens": prefix, "window_tokens": min(prefix, WINDOW), "q_tokens": prompt, "canvas": canvas}


# -- contracts of its own ------------------------------------------------------------------------------------------


ACCUMULATORS: Final = (
    "maximum%:f32[T] total%:f32[T] weighted%:f32[T] token%:i64[T] noisy%:f32[T] sample%:i64[T] soft%:f32[T, D]"
)


def _operator(name: str, operands: str, **said: Any) -> Operator:
    """An operator with what the CPU has for it."""
    origin = "table" if name == "vocab_tile_update" else None
    way = Implementation(backend="cpu", kernel=KERNELS[name], row_origin=origin)
    return Operator(name=name, operands=operands, implementations=(way,), **said)


ADD = _operator("add", "x!:a[*T] y:b[*T]")
SCALE = _operator("scale", "x!:a[*T] factor?:b[*S]", attrs="factor_value=1.0")
NORM = _operator("norm_to", "x:a[*T, D] weight?:b[D] -> y:dtype[*T, D]", attrs="eps dtype", inplace=(("y", "x"),))
HEAD_VALUES = _operator("head_values", "x:a[T, H*heads] -> y:a[T, H*heads]", attrs="heads eps", inplace=(("y", "x"),))
GELU_MUL = _operator("gelu_mul", "gate!:a[*T] up:b[*T]")
GELU_PACKED = _operator("gelu_mul_packed", "x:a[T, 2*F] -> y:a[T, F]")
ROUTER = _operator(
    "scaled_route", "x:a[T, D] scale:b[D] weight:c[E, D] per_expert:d[E] -> scores:a[T, top_k] experts:i64[T, top_k]",
    attrs="top_k", flops="2*x*E", rate="gemm",
)  # fmt: skip
EXPERT_SUM = _operator("expert_sum", "y:a[T*K, D] order:i64[T*K] scores:a[T, K] -> x:a[T, D]")
CACHED_ATTENTION = _operator(
    "cached_attention",
    "q:a[T, Q] k@:a[S, kv_heads*head_size] v@:a[S, kv_heads*head_size] keys@:a[P, kv_heads*head_size] "
    "values@:a[P, kv_heads*head_size] lengths:i32[2] -> y:a[T, Q]",
    attrs="scale causal window heads kv_heads head_size", inplace=(("y", "q"),), flops="4*q*S + 4*q*P", rate="attention",
)  # fmt: skip
COMMIT = _operator("commit", "k:a[T, W] v:a[T, W] lengths:i32[2] keys!:a[P, W] values!:a[P, W]")
SOFTCAP_TILE = _operator("softcap_tile", "logits:a[T, V] temperature:b[1] -> scores:f32[T, V]", attrs="cap")
VOCABULARY_START = _operator("vocab_start", f"h:a[T, D] -> {ACCUMULATORS.replace('%', '')}", moved={"h": "0"})
VOCABULARY_TILE = _operator(
    "vocab_tile_update", f"scores:f32[T, V] table:a[V, D] seed:i64[2] {ACCUMULATORS.replace('%', '!')}",
    flops="2*scores*D", rate="gemm",
)  # fmt: skip
VOCABULARY_FINISH = _operator(
    "vocab_finish", "maximum:f32[T] total:f32[T] weighted:f32[T] soft!:f32[T, D] -> entropy:f32[T]"
)


# -- the two modes -------------------------------------------------------------------------------------------------


def program() -> Program:
    """The two modes, and the step that commits a block before it denoises the next."""
    found = Program("diffusion-gemma-toy")
    found.add_phase("encode", encode)
    found.add_phase("denoise", denoise)
    found.add_step("commit_then_denoise", ("encode", "denoise"))
    return found


def embedding_table(g: Graph) -> Buffer:
    """The tied table; its vocabulary is a dim, so that the head can run over it in tiles."""
    vocabulary = g.dim("vocabulary", value=VOCABULARY)
    return g.weight("embedding", (vocabulary, HIDDEN), DTYPE, tensor="model.decoder.embed_tokens.weight")


def embed(g: Graph, tokens: Polynomial) -> Buffer:
    """Token embeddings times sqrt(D)."""
    x: Buffer = g.add_op("embedding", g.input("token_ids", (tokens,), "int64"), embedding_table(g), name="hidden")
    g.add_op(SCALE, x, name="embedding_scale", factor_value=float(HIDDEN) ** 0.5)
    return x


def encode(g: Graph) -> None:
    """Prefill and commit: causal over T tokens, keys and values written to the state."""
    tokens = g.dim("q_tokens")
    stack(g, embed(g, tokens), tokens, mode="encoder")


def denoise(g: Graph) -> None:
    """One denoising step of a canvas, over the committed keys and values and its own."""
    canvas = g.dim("canvas")
    x = embed(g, canvas)
    soft = g.state("soft_embedding", (canvas, HIDDEN), "float32")
    x = self_conditioning(g, x, soft, canvas)
    stack(g, x, canvas, mode="decoder")
    head(g, x, soft, canvas)


def weight(g: Graph, name: str, *shape: int) -> Buffer:
    """A weight named as in the checkpoint, which holds the text stack under `model.decoder` only."""
    tensor = "/".join([*g.scopes, name]).replace("/", ".")
    return g.weight(name, shape, DTYPE, tensor=f"model.decoder.{tensor}.weight")


def self_conditioning(g: Graph, x: Buffer, soft: Buffer, canvas: Polynomial) -> Buffer:
    """norm(x + mlp(norm(soft))) over x, the last norm without a weight."""
    y = g.buffer("conditioned", (canvas, HIDDEN), DTYPE)
    g.add_alias(y, x)
    with g.scope("self_conditioning"), g.chunk("self_conditioning", over=canvas, tile=64):
        h = g.add_op(NORM, soft, weight(g, "pre_norm", HIDDEN), name="in", eps=EPS, dtype=DTYPE)
        dense(g, h, x)
        g.add_op(NORM, x, name="post_norm", eps=EPS, dtype=DTYPE, out=y)
    return y


def stack(g: Graph, x: Buffer, tokens: Polynomial, *, mode: str) -> None:
    """All layers in one of the two modes; only the layer scalars belong to a mode."""
    positions, lengths = g.input("positions", (tokens,), "int32"), g.input("lengths", (2,), "int32")
    for number, layer in enumerate(LAYERS):
        with g.scope(f"layers.{number}"):
            attention(g, layer, x, tokens, positions, lengths, mode=mode)
            feed_forward(g, x, tokens, mode=mode)
            path = "model.encoder.language_model" if mode == "encoder" else "model.decoder"
            scalar = g.weight(f"{mode}_scalar", (1,), DTYPE, tensor=f"{path}.layers.{number}.layer_scalar")
            g.add_op(SCALE, x, scalar, name="layer_scalar")


def attention(
    g: Graph, layer: Layer, x: Buffer, tokens: Polynomial, positions: Buffer, lengths: Buffer, *, mode: str
) -> None:
    """x += norm(o(attention(q, k, v and what is committed))); the encoder commits k and v afterwards."""
    width, kv_width = layer.heads * layer.head_size, layer.kv_heads * layer.head_size
    q, k, v = (g.buffer(name, (tokens, w), DTYPE) for name, w in (("q", width), ("k", kv_width), ("v", kv_width)))
    inv_freq = g.weight(
        "inv_freq", (layer.head_size // 2,), "float32", tensor=f"=inv_freq:theta={layer.theta},dim={layer.head_size}"
    )
    with g.chunk(f"{mode}_proj", over=tokens):
        h = g.add_op("rms_norm", x, weight(g, "input_layernorm", HIDDEN), name="attention_in", eps=EPS)
        g.add_op("linear", h, weight(g, "q_proj", width, HIDDEN), out=q, name="q_linear")
        g.add_op("linear", h, weight(g, "k_proj", kv_width, HIDDEN), out=k, name="k_linear")
        raw = (
            k
            if layer.keys_are_values
            else g.add_op("linear", h, weight(g, "v_proj", kv_width, HIDDEN), name="v_linear")
        )
        g.add_op(HEAD_VALUES, raw, out=v, name="v_norm", heads=layer.kv_heads, eps=EPS)  # before k is normed in place
        for out in (q, k):
            name = out.name.rsplit("/", 1)[-1]
            g.add_op("head_norm", out, weight(g, f"{name}_norm", layer.head_size), name=f"{name}_norm", eps=EPS)
            g.add_op("rotary", out, positions, inv_freq, name=f"{name}_rotary", head_size=layer.head_size)
    prefix = g.dim(layer.prefix, at_most=window(g) if layer.window else None)
    keys, values = (g.state(name, (prefix, kv_width), DTYPE) for name in ("committed_keys", "committed_values"))
    y = g.add_op(
        CACHED_ATTENTION, q, k, v, keys, values, lengths, name="attention", scale=1.0, causal=mode == "encoder",
        window=layer.window, heads=layer.heads, kv_heads=layer.kv_heads, head_size=layer.head_size,
    )  # fmt: skip
    g.add_alias(y, q)
    if mode == "encoder":
        g.add_op(COMMIT, k, v, lengths, keys, values)
    out = g.add_op("linear", y, weight(g, "o_proj", HIDDEN, width), name="o_linear")
    added(g, x, out, "post_attention_layernorm")


def window(g: Graph) -> str:
    """The dim that bounds what a sliding layer keeps."""
    return str(g.dim("window", value=WINDOW))


def added(g: Graph, x: Buffer, y: Buffer, norm: str) -> None:
    """x += norm(y), normed in place."""
    g.add_op(ADD, x, normed(g, y, norm), name=f"{norm}_add")


def normed(g: Graph, x: Buffer, norm: str) -> Buffer:
    """norm(x), in place of x, which is not read again."""
    y: Buffer = g.add_op("rms_norm", x, weight(g, norm, HIDDEN), name=f"{norm}_out", eps=EPS)
    g.add_alias(y, x)
    return y


def dense(g: Graph, h: Buffer, x: Buffer | None) -> Buffer:
    """down(gelu(gate(h)) * up(h)), into a new buffer or added to x."""
    gate = g.add_op("linear", h, weight(g, "gate_proj", DENSE, HIDDEN), name="gate")
    up = g.add_op("linear", h, weight(g, "up_proj", DENSE, HIDDEN), name="up")
    g.add_op(GELU_MUL, gate, up, name="act")
    down = weight(g, "down_proj", HIDDEN, DENSE)
    found: Buffer = (
        g.add_op("linear", gate, down, name="down") if x is None else g.add_op("linear_add", gate, down, x, name="down")
    )
    return found


def feed_forward(g: Graph, x: Buffer, tokens: Polynomial, *, mode: str) -> None:
    """x += norm(norm(dense(norm(x))) + norm(experts(norm(x)))), routed on the raw x."""
    with g.chunk(f"{mode}_ffn", over=tokens):
        h = g.add_op("rms_norm", x, weight(g, "pre_feedforward_layernorm", HIDDEN), name="ffn_in", eps=EPS)
        with g.scope("mlp"):
            a = dense(g, h, None)
        a = normed(g, a, "post_feedforward_layernorm_1")
        b = normed(g, experts(g, x), "post_feedforward_layernorm_2")
        g.add_op(ADD, a, b, name="both")
        added(g, x, a, "post_feedforward_layernorm")


def experts(g: Graph, x: Buffer) -> Buffer:
    """The sum over each token's eight experts, gate and up in one weight."""
    h = g.add_op("rms_norm", x, weight(g, "pre_feedforward_layernorm_2", HIDDEN), name="experts_in", eps=EPS)
    router = (
        weight(g, "router.scale", HIDDEN),
        weight(g, "router.proj", EXPERTS, HIDDEN),
        weight(g, "router.per_expert", EXPERTS),
    )
    scores, chosen = g.add_op(ROUTER, x, *router, name="route", top_k=TOP_K)
    order, offsets = g.add_op("moe_sort", chosen, name="sort", num_experts=EXPERTS)
    rows = g.add_op("moe_gather", h, order, name="dispatch", top_k=TOP_K)
    wide = g.add_op(
        "grouped_linear", rows, weight(g, "gate_up_proj", EXPERTS, 2 * EXPERT, HIDDEN), offsets, name="gate_up"
    )
    act = g.add_op(GELU_PACKED, wide, name="expert_act")
    down = g.add_op(
        "grouped_linear", act, weight(g, "experts.down_proj", EXPERTS, HIDDEN, EXPERT), offsets, name="expert_down"
    )
    found: Buffer = g.add_op(EXPERT_SUM, down, order, scores, name="combine")
    return found


def head(g: Graph, x: Buffer, soft: Buffer, canvas: Polynomial) -> None:
    """All that the sampler and the next step need, in one pass over vocabulary tiles: canvas x V never exists.

    Rows of the canvas and tiles of the vocabulary are chunked independently; the accumulators of a row live through the
    tiles. The soft embedding is accumulated where it stays: in the state that the next step reads.
    """
    table, vocabulary = embedding_table(g), g.dim("vocabulary")
    temperature, seed = g.input("temperature", (1,), "float32"), g.input("seed", (2,), "int64")
    maximum, total, weighted, noisy = (
        g.buffer(name, (canvas,), "float32") for name in ("maximum", "total", "weighted", "noisy")
    )
    token, sample = (g.output(name, (canvas,), "int64") for name in ("token", "sample"))
    entropy = g.output("entropy", (canvas,), "float32")
    accumulators = (maximum, total, weighted, token, noisy, sample, soft)
    with g.scope("head"), g.chunk("canvas_rows", over=canvas, tile=32):
        h = g.add_op("rms_norm", x, weight(g, "norm", HIDDEN), name="final_norm", eps=EPS)
        g.add_op(VOCABULARY_START, h, out=accumulators)
        with g.chunk("vocabulary", over=vocabulary, tile=1024):
            logits = g.add_op("linear", h, table, name="logits")
            scores = g.add_op(SOFTCAP_TILE, logits, temperature, name="scores", cap=30.0)
            g.add_op(VOCABULARY_TILE, scores, table, seed, *accumulators)
        g.add_op(VOCABULARY_FINISH, maximum, total, weighted, soft, out=entropy)
