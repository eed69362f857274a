"""Write the keys and values of a window of tokens into one layer of the rows that their sequences own in kv[R, L*2*W].

Rows are handed out in extents: neighbouring rows that one sequence reserved at once. A row of `kv` is the memory of one
token. In an extent of n rows the memory of all of them is laid out as [L, 2, K, n, H], so that the keys of one layer
and head are adjacent. If layers differ in K or H, `layer` counts in units of this layer: its keys begin at column
`layer` * 2 * K * H.

`extents[X, 4]` lists, by sequence and in order of position: the first row, the number of rows n, the first position in
it, and the number of the extent's tokens that precede that one. Sequence b has the extents `cu_extents[b]` to
`cu_extents[b + 1]`. A token in no sequence, or at a position without a row, is not stored. kv may have a dtype of its
own. A region of tokens may slice k, v and positions, nothing else."""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Dim, Operator, Spec, require

KV: Final = "kv@#:a[R, L*2*kv_heads*head_size] extents@#:i64[X, 4] cu_extents@:i32[B+1]"
"""The operands of an operator that reads kept keys. `cu_seqlens` has B + 1 numbers for B sequences."""


def rules(*, L: Dim, layer: int, kv: Spec, **_: object) -> None:
    require_layer("kv", L, layer)
    require_floats(kv)


def require_floats(kv: Spec) -> None:
    """Refuse keys and values that are kept as integers."""
    require("float" in kv.dtype, f"operand 'kv' is {kv}: keys and values are kept as floats")


def require_layer(name: str, layers: Dim, layer: int) -> None:
    """Refuse a layer that the rows have no place for."""
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
    implementations=kernels_of("kv_store", row_origin="k"),
    roles={"k": "attention", "v": "attention"},
)
