"""Keys and values of a window of tokens into one layer of the rows that their sequences own in kv[R, L*2*W].

Rows are handed out in extents: neighbours that one sequence was given at once. A row of `kv` is the memory of one token; in
an extent of n rows the memory of all of them is laid out as [L, 2, K, n, H], so that the keys of one layer and head lie side
by side. Where layers differ in K or H, `layer` counts layers like itself: its keys begin at column `layer` * 2 * K * H.

`extents[X, 4]` lists, sequence after sequence, in order of position: the first row, the rows n, the position whose key comes
first, and how many tokens of the extent lie before that one. Those of sequence b are `cu_extents[b]` to `cu_extents[b + 1]`. A
token in no sequence, or at a position that its sequence has no row for, is not kept. kv may have a dtype of its own. k, v and
positions may be sliced by a region of tokens, the rest never."""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Dim, Implementation, Operator, Spec, require

KV: Final = "kv@#:a[R, L*2*kv_heads*head_size] extents@#:i64[X, 4] cu_extents@:i32[B+1]"
"""What an operator reads of what is kept. `cu_seqlens` has one number more than there are sequences, B."""


def rules(*, L: Dim, layer: int, kv: Spec, **_: object) -> None:
    require_layer("kv", L, layer)
    require_floats(kv)


def require_floats(kv: Spec) -> None:
    """Refuse keys and values that are kept as integers."""
    require("float" in kv.dtype, f"operand 'kv' is {kv}: keys and values are kept as floats")


def require_layer(name: str, layers: Dim, layer: int) -> None:
    """Refuse a layer whose keys and values the rows do not have."""
    require(bool(0 <= layer < layers), f"'{name}' has keys and values of {layers} layers, not layer {layer}")


OPERATOR = Operator(
    name="kv_store",
    operands="""
        k:a[T, K*head_size] v:a[T, K*head_size] kv!@#:c[R, L*2*K*head_size] extents@#:i64[X, 4]
        cu_extents@:i32[B+1] cu_seqlens@:i32[B+1] positions:i32[T]
    """,
    attrs="layer head_size",
    rules=rules,
    moved={"kv": "2*k", **dict.fromkeys(("extents", "cu_extents", "cu_seqlens"), "0")},
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.kv_store", row_origin="k"),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.kv_store", row_origin="k"
        ),
    ),
    roles={"k": "attention", "v": "attention"},
)
